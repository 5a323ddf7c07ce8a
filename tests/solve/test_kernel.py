"""Both integer programs against enumeration, with and without a cutoff."""

from __future__ import annotations

import numpy as np
import pytest
from random_graphs import best_value, hard_graph, points, random_graph, some_limit

from solver_shard.graph.choice_graph import MIB
from solver_shard.solve import integer_program, parameters
from solver_shard.solve.bounds.lagrangian import LagrangianDual
from solver_shard.solve.integer_program import solve_kernel
from solver_shard.solve.limits import Clock, left_behind
from solver_shard.solve.presolve import presolve
from solver_shard.solve.presolve.reducer import NoAssignment
from solver_shard.solve.problem import from_graph


def leave_to(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which way a integer_program is solved: by labels at once, or by HiGHS, whose claims labels or CP-SAT make again."""
    if way == "highs, labels":
        monkeypatch.setattr(parameters, "QUICK_WORK", 0.0)
    elif way == "highs, cp-sat":
        monkeypatch.setattr(integer_program, "_enumerated", lambda *_arguments: None)


WAYS = ("labels", "highs, labels", "highs, cp-sat")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(40))
def test_optimum_of_a_kernel(seed: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_to(way, monkeypatch)
    rng = np.random.default_rng(1000 + seed)
    graph = random_graph(rng, 6, 4)
    found = points(graph)
    limit = some_limit(rng, found)
    objective = str(rng.choice(["time", "memory"]))
    weight = MIB if objective == "memory" else int(rng.choice([0, 0, 1000]))
    problem, _ = from_graph(graph, limit=limit, weight=weight, costs_count=objective == "time")
    try:
        small, undo = presolve(problem)
    except NoAssignment:
        return
    best = best_value(found, limit, objective, weight)
    dual = LagrangianDual(small)
    for _ in range(3):
        dual.evaluate(rng.random(len(small.base)) * dual.scale * (seed % 3), 2)
    for cutoff in (None, None if best is None else best + 1, best):
        result = solve_kernel(small, dual, Clock(None, None), cutoff=cutoff, gap=0.0, seed=seed, effort=10.0)
        if best is None or cutoff == best:
            assert result.assignment is None
            assert result.empty or way == "highs, cp-sat" or (result.bound is not None and best is not None)
            assert result.bound is None or best is None or result.bound <= best
        else:
            assert result.assignment is not None
            assert problem.value(undo.restore(result.assignment)) == best
            assert result.bound is None or result.bound <= best
            if way != "highs, cp-sat":  # of two bounds in other units the lower counts
                assert result.bound == best


def test_a_call_that_was_left_behind_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_to("highs, cp-sat", monkeypatch)
    monkeypatch.setattr(integer_program, "call_watched", lambda *_arguments, **_options: None)
    problem, _ = from_graph(hard_graph(np.random.default_rng(0), 8, degree=4, room=2.0), limit=None)
    dual = LagrangianDual(problem)
    dual.evaluate(np.zeros(len(problem.base)), 2)
    result = solve_kernel(problem, dual, Clock(None, None), cutoff=None, gap=0.0, seed=0, effort=10.0)
    assert (result.assignment, result.bound, result.empty, result.proven) == (None, None, False, False)


def test_cp_sat_ends_when_the_caller_stops() -> None:
    problem, _ = from_graph(hard_graph(np.random.default_rng(0), 60), limit=None)
    dual = LagrangianDual(problem)
    dual.evaluate(np.zeros(len(problem.base)), 2)
    polls = 0
    clock = Clock(3600.0, None)

    def halt() -> bool:
        nonlocal polls
        polls += 1
        return polls > 3

    clock.halt = halt
    result = integer_program._lazily(problem, integer_program._CpSat(problem, dual, None, 0), dual, clock, None, 1e6, 0.0)
    assert not result.proven
    assert not left_behind()


class _NearTheCutoff:
    """A solver that proves a bound just below the known value and finds nothing, as one that is not told of that value."""

    def __init__(self, bound: int) -> None:
        self.bound, self.calls = bound, 0

    def add_row(self, t: int) -> None:
        pass

    def solve(self, clock: Clock, work: float, hint: object) -> integer_program._Answer:
        self.calls += 1
        return integer_program._Answer(None, self.bound, False, False, 1.0)


@pytest.mark.parametrize(("bound", "proven"), [(9_999, True), (9_900, False)])
def test_a_bound_near_the_known_value_is_a_proof(bound: int, proven: bool) -> None:
    graph = random_graph(np.random.default_rng(0), 4, 3)
    small, _ = presolve(from_graph(graph, limit=None)[0])
    backend = _NearTheCutoff(bound)
    result = integer_program._lazily(small, backend, LagrangianDual(small), Clock(None, None), 10_000, 5.0, 1e-3)  # type: ignore[arg-type]
    assert (result.proven, result.bound, result.assignment) == (proven, bound, None)
