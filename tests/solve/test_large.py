"""The way of large problems, also for small ones: exact, the same for any number of workers, compiled or not, and only when needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from enumeration import enumerate_allowed
from random_graphs import best_value, hard_graph, points, random_graph, some_limit

from solver_shard.graph.choice_graph import ChoiceGraph, Ints
from solver_shard.solve import limits, parameters, search
from solver_shard.solve.bounds.bounding import is_large
from solver_shard.solve.bounds.subgradient import Relaxation
from solver_shard.solve.bounds.trws import scale_of
from solver_shard.solve.engine import solve
from solver_shard.solve.flat import Flat
from solver_shard.solve.integer_program import Proof
from solver_shard.solve.limits import Clock
from solver_shard.solve.parameters import LARGE_CELLS, LARGE_FREE_CELLS, SolveParameters
from solver_shard.solve.presolve import presolve
from solver_shard.solve.primal.lns import LargeNeighbourhoodSearch
from solver_shard.solve.problem import Edge, Problem, from_graph
from solver_shard.solve.solution import Event, Status


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "LARGE_CELLS", -1)
    monkeypatch.setattr(parameters, "LARGE_FREE_CELLS", -1)


def case(seed: int) -> tuple[ChoiceGraph, int | None]:
    """A small graph with a limit, and its optimum by enumeration."""
    rng = np.random.default_rng([7, seed])
    graph = random_graph(rng, int(rng.integers(2, 7)), 4)
    found = points(graph)
    limit = some_limit(rng, found)
    return replace(graph, limit=limit), best_value(found, limit)


@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize("block", range(10))
def test_small_graphs_by_enumeration(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        graph, best = case(seed)
        events = list[Event]()
        solution = solve(graph, gap=0.0, seed=seed, time_limit=None, progress=events.append)
        for event in events:
            assert best is None or event.objective is None or event.objective >= best, seed
            assert best is None or event.bound is None or event.bound <= best, seed
        if best is None:
            assert solution.status is Status.INFEASIBLE, seed
        else:
            assert (solution.status, solution.objective, solution.bound) == (Status.OPTIMAL, best, best), seed


@pytest.mark.usefixtures("everything_is_large")
def test_a_finished_proof_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 2**53 a proof may stop some digits early; no improvement beside it or after it can help."""

    def never(*_arguments: object, **_options: object) -> None:
        raise AssertionError("an epoch of improvements for a problem that one program solves")

    monkeypatch.setattr(LargeNeighbourhoodSearch, "run", never)
    closed = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        graph = hard_graph(rng, 5, strategies=3, degree=2, room=1.3)
        graph = replace(graph, costs=graph.costs * 10**14 + rng.integers(0, 10**13, len(graph.costs)))
        rows = enumerate_allowed(graph)
        values = [graph.cost(x) for x in rows if graph.limit is None or graph.peak(x) <= graph.limit]
        solution = solve(graph, gap=0.0, seed=seed, time_limit=None)
        assert solution.objective == min(values, default=None)
        assert solution.bound is None or not values or solution.bound <= min(values)
        closed += solution.objective is not None
    assert closed > 5


def mid_size(seed: int) -> ChoiceGraph:
    return hard_graph(np.random.default_rng(seed), 40, strategies=4, degree=3, room=1.25)


@pytest.mark.usefixtures("everything_is_large")
def test_the_number_of_workers_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "FIRST_CELLS", 1)  # improvements beside every program
    monkeypatch.setattr(parameters, "ANNEALING_FIRST_WORK", 0.1)
    epochs: list[int] = []
    run = limits.run

    def counted(tasks: Sequence[Callable[[], object]], *, workers: int, over: Callable[[], bool]) -> list[object]:
        epochs.append(workers * (len(tasks) > 1))
        return run(tasks, workers=workers, over=over)

    monkeypatch.setattr(limits, "run", counted)
    graph = mid_size(3)
    found = [solve(graph, gap=0.0, seed=1, time_limit=None, work_limit=1.0, workers=workers) for workers in (1, 2)]
    assert found[0].assignment is not None
    assert {(s.assignment, s.bound, s.work) for s in found} == {(found[0].assignment, found[0].bound, found[0].work)}
    assert {1, 2} <= set(epochs), "two tasks at once, or this says nothing"


@pytest.mark.usefixtures("everything_is_large")
def test_epochs_improve_an_incumbent_and_keep_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = presolve(from_graph(mid_size(4), limit=mid_size(4).limit)[0])
    relaxation = Relaxation(Flat.of(problem, scale_of(problem)), {}, np.random.default_rng(0))
    found: list[Ints] = []
    for _ in relaxation.steps():
        found += [x for x in relaxation.found if problem.value(x) is not None]
        relaxation.found.clear()
        if found:
            break
    first = problem.value(found[0])
    assert first is not None
    monkeypatch.setattr(parameters, "ANNEALING_FIRST_WORK", 0.2)
    epochs = LargeNeighbourhoodSearch(relaxation, SolveParameters(workers=1))
    epochs.reprice(relaxation.prices())
    incumbent, value = found[0], first
    for _ in range(2):
        offers, proof = epochs.run(incumbent, None, 1.0, Clock(None, 10.0))
        assert proof is None
        for x in offers:
            new = problem.value(x)
            if new is not None and new < value:
                incumbent, value = x, new
    assert value < first


@pytest.mark.usefixtures("everything_is_large")
def test_a_search_ends_that_has_nothing_to_improve_and_no_program_to_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value is known from elsewhere, so that no assignment found is better than it."""
    monkeypatch.setattr(search, "prove", lambda *_arguments, **_options: Proof(large=True))
    graph = hard_graph(np.random.default_rng(0), 12, degree=4)
    problem, _ = presolve(from_graph(graph, limit=None)[0])
    clock, polls = Clock(None, None), 0

    def halt() -> bool:
        nonlocal polls
        polls += 1
        assert polls < 20_000, "without end"
        return False

    clock.halt = halt
    found = search.Search(problem, clock, SolveParameters(gap=0.0), report=lambda *_arguments: None)
    found.best.value = 1
    found.run()
    assert found.best.assignment is None


@pytest.mark.usefixtures("everything_is_large")
def test_regions_where_nothing_uses_memory() -> None:
    graph = hard_graph(np.random.default_rng(0), 12, degree=4)
    usages = np.where(np.arange(len(graph.usages)) % 6, graph.usages, 0)
    problem, _ = from_graph(replace(graph, usages=usages, limit=1), limit=1)
    relaxation = Relaxation(Flat.of(problem, scale_of(problem)), {}, np.random.default_rng(0))
    epochs = LargeNeighbourhoodSearch(relaxation, SolveParameters(workers=1))
    epochs.reprice({})
    epochs.work = 0.1
    offers, _ = epochs.run(np.zeros(problem.size, dtype=np.int64), None, 1.0, Clock(None, 10.0))
    assert all(problem.value(x) is not None for x in offers[:2])


def test_what_is_large() -> None:
    def of(size: int, *, times: int = 1, weight: int = 0) -> Problem:
        cells = np.zeros((size, size), dtype=np.int64)
        edge = Edge(a=0, b=1, core=cells, rows=np.arange(size), cols=np.arange(size))
        unary = (np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64))
        base, spans = np.zeros(times, dtype=np.int64), np.zeros((0, 3), dtype=np.int64)
        return Problem(unary=unary, edges=(edge,), carriers=(), spans=spans, base=base, times=base, weight=weight)

    some, more = int(np.sqrt(LARGE_CELLS)) + 1, int(np.sqrt(LARGE_FREE_CELLS)) + 1
    assert is_large(of(some))
    assert not is_large(of(some, times=0)), "messages alone solve it"
    assert is_large(of(more, times=0))
    assert not is_large(of(some, weight=1)), "a price of the peak is for the linear program"
    assert not is_large(from_graph(mid_size(0), limit=None)[0])
    assert search.is_large is is_large


SOLVE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from random_graphs import hard_graph
from solver_shard.solve import parameters
from solver_shard.solve.engine import solve
parameters.LARGE_CELLS = parameters.LARGE_FREE_CELLS = int(sys.argv[2])
graph = hard_graph(np.random.default_rng(2), int(sys.argv[3]), strategies=3, degree=3, room=1.2)
found = solve(graph, gap=0.0, seed=0, time_limit=None, work_limit=0.3, workers=1)
print(json.dumps([found.assignment, found.bound, found.work, "numba" in sys.modules]))
"""


def solved(cells: int, nodes: int, **environment: str) -> list[object]:
    """What a process of its own says of one graph: assignment, bound, work, and whether it has imported numba."""
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    command = [sys.executable, "-W", "error", "-c", SOLVE, tests, str(cells), str(nodes)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, check=True, capture_output=True, text=True, cwd=os.path.dirname(tests)
    )
    result: list[object] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_kernels_that_are_not_compiled_give_the_same() -> None:
    plain = solved(-1, 14, NUMBA_DISABLE_JIT="1")
    assert plain == solved(-1, 14)
    assert plain[0] is not None


def test_small_graphs_do_without_numba() -> None:
    assert solved(LARGE_CELLS, 14)[3] is False
