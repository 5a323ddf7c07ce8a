"""The solver against enumeration, and its promises: limits, determinism, certificates, what it does not import."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from random_graphs import best_value, loopy_graph, points, random_graph, some_limit

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.errors import InputError
from solver_shard.graph.choice_graph import MIB, ChoiceGraph, WarmStart
from solver_shard.solve import engine, parameters, search
from solver_shard.solve.engine import solve
from solver_shard.solve.integer_program import Proof
from solver_shard.solve.limits import Clock
from solver_shard.solve.solution import Event, Status, objective_value, relative_gap


@pytest.mark.parametrize("block", range(10))
def test_optima_of_random_graphs(block: int) -> None:
    check_optima(range(40 * block, 40 * block + 40))


@pytest.mark.parametrize("block", range(5))
def test_optima_when_every_stage_is_made_to_work(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "WORTH_FIXING", 0)
    monkeypatch.setattr(parameters, "FIRST_CELLS", 3)
    if block % 2:
        monkeypatch.setattr(parameters, "QUICK_WORK", 0.0)
    if block > 1:  # leave the problem without its limit at once, and come back to it as soon as there is an incumbent
        monkeypatch.setattr(parameters, "FREE_SHARE", -1.0)
        monkeypatch.setattr(parameters, "RELAX_AFTER", -1.0)
    check_optima(range(1000 + 40 * block, 1000 + 40 * block + 40))


def check_optima(seeds: range) -> None:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        graph = random_graph(rng, int(rng.integers(1, 7)))
        found = points(graph)
        limit = some_limit(rng, found)
        graph = replace(graph, limit=limit)
        objective = str(rng.choice(["time", "time", "memory"]))
        weight = int(rng.choice([0, 0, 5, 10**6, 10**9])) if objective == "time" else 0
        solution = solve(graph, objective=objective, memory_weight=weight, gap=0.0, seed=seed, time_limit=None)
        best = best_value(found, limit, objective, weight)
        if best is None:
            assert solution.status is Status.INFEASIBLE, seed
            if found:
                assert solution.assignment is not None
                assert solution.peak == min(p.peak for p in found), seed
                assert limit is not None
                assert limit < solution.peak_bound <= solution.peak, seed
            continue
        assert solution.status is Status.OPTIMAL, seed
        assert solution.assignment is not None
        assert (solution.objective, solution.bound) == (best, best), seed
        assert solution.cost == graph.cost(solution.assignment)
        assert solution.peak == graph.peak(solution.assignment)
        assert limit is None or solution.peak <= limit
        assert solution.peak_bound <= min(p.peak for p in found)


def ladder(layers: int, limit_share: float | None, seed: int = 0) -> ChoiceGraph:
    """Layers of two nodes; the choice that costs less uses more bytes, and neighbours want to agree."""
    rng = np.random.default_rng(seed)
    nodes, k = 2 * layers, 5
    usages = np.sort(rng.integers(1, 1000, (nodes, k)), axis=1)
    costs = np.sort(rng.integers(1, 10_000, (nodes, k)), axis=1)[:, ::-1]
    edges = [(v, v + 1) for v in range(nodes - 1)] + [(v, v + 2) for v in range(nodes - 2)]
    tables = []
    for _ in edges:
        table = rng.integers(0, 5000, (k, k)) * (rng.random((k, k)) < 0.7)
        tables.append(np.where(rng.random((k, k)) < 0.15, FORBIDDEN, table))
    spans = [(v, nodes) if v % 2 else (v, v + 3) for v in range(nodes)]
    graph = ChoiceGraph(
        names=tuple(f"layer {v // 2} {'ab'[v % 2]}" for v in range(nodes)),
        offsets=np.arange(0, k * nodes + 1, k),
        costs=costs.ravel().astype(np.int64),
        usages=usages.ravel().astype(np.int64),
        interval_offsets=np.arange(nodes + 1),
        intervals=np.array(spans, dtype=np.int64),
        edges=np.array(edges, dtype=np.int64),
        edge_tables=np.arange(len(edges)),
        tables=tuple(t.astype(np.int64) for t in tables),
    )
    graph.validate()
    if limit_share is None:
        return graph
    low = solve(graph, objective="memory", gap=0.0, time_limit=None).peak
    high = solve(graph, time_limit=None).peak
    assert low is not None
    assert high is not None
    return replace(graph, limit=int(low + limit_share * (high - low)))


def test_a_binding_limit_on_a_larger_graph_is_solved_within_the_gap() -> None:
    graph = ladder(10, 0.4)
    free = solve(replace(graph, limit=None), time_limit=None)
    solution = solve(graph, time_limit=None)
    assert solution.status in (Status.OPTIMAL, Status.GAP)
    assert solution.gap is not None
    assert solution.gap <= 1e-4
    assert solution.peak is not None
    assert graph.limit is not None
    assert solution.peak <= graph.limit
    assert free.objective is not None
    assert solution.bound is not None
    assert free.objective <= solution.bound


def test_the_problem_without_its_limit_closes_the_gap_below_an_incumbent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left too early for its cheapest assignment to be within a limit that hardly binds, and a limited search that stands still."""
    graph = loopy_graph(np.random.default_rng(4), "dense", 24)
    best = solve(replace(graph, limit=None), gap=0.0, time_limit=None, work_limit=60.0)
    assert best.status is Status.OPTIMAL
    monkeypatch.setattr(parameters, "FREE_SHARE", -1.0)
    monkeypatch.setattr(parameters, "RELAX_AFTER", -1.0)
    epoch = search.Search._epoch
    monkeypatch.setattr(search.Search, "_epoch", lambda s, p, *a, **o: epoch(s, p, *a, **o) if p.limit is None else Proof(large=True))
    found = solve(replace(graph, limit=best.peak), gap=0.0, time_limit=None, work_limit=60.0)
    assert (found.objective, found.bound) == (best.objective, best.bound)
    assert any("below the incumbent" in stage.name for stage in found.stages)


def test_looser_limits_never_cost_more() -> None:
    costs = []
    graph = ladder(5, 0.0)
    assert graph.limit is not None
    for extra in (1.0, 1.1, 1.3, 1.6, 2.0):
        solution = solve(replace(graph, limit=int(graph.limit * extra)), gap=0.0, time_limit=None)
        assert solution.status is Status.OPTIMAL
        costs.append(solution.cost)
    assert costs == sorted(costs, reverse=True)


def test_same_input_seed_and_work_limit_give_the_same_assignment() -> None:
    graph = ladder(8, 0.3, seed=3)
    for work in (None, 0.4):
        first = solve(graph, time_limit=None, work_limit=work, seed=5)
        again = solve(graph, time_limit=None, work_limit=work, seed=5)
        assert first.assignment == again.assignment
        assert first.bound == again.bound
        assert first.work == pytest.approx(again.work)


def test_a_short_time_limit_still_gives_a_valid_certificate() -> None:
    graph = ladder(30, 0.2, seed=1)
    started = time.monotonic()
    solution = solve(graph, time_limit=0.5)
    assert time.monotonic() - started < 60, "not a promise of speed: only that it ends"
    if solution.assignment is not None:
        assert graph.allowed(solution.assignment)
        if solution.feasible:
            assert solution.bound is not None
            assert solution.objective is not None
            assert solution.bound <= solution.objective


def test_an_infeasible_limit_comes_with_a_peak_near_the_least() -> None:
    graph = ladder(6, 0.0)
    assert graph.limit is not None
    solution = solve(replace(graph, limit=graph.limit - 1), time_limit=None, gap=0.0)
    assert solution.status is Status.INFEASIBLE
    assert solution.peak is not None
    assert solution.peak_bound == graph.limit <= solution.peak
    assert relative_gap(solution.peak, solution.peak_bound) <= parameters.PEAK_GAP
    assert solution.gap is None
    assert solution.bound is None
    assert solve(graph, time_limit=None).feasible


def test_the_peak_is_not_minimised_to_the_end_once_nothing_can_keep_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = ladder(6, 0.0)
    assert graph.limit is not None
    small = replace(graph, limit=int(0.97 * graph.limit))
    solution = solve(small, time_limit=None, gap=0.0)
    monkeypatch.setattr(parameters, "PEAK_GAP", 0.0)
    exact = solve(small, time_limit=None, gap=0.0)
    assert solution.status is exact.status is Status.INFEASIBLE
    assert exact.peak == exact.peak_bound == graph.limit
    assert solution.peak is not None
    assert solution.peak_bound <= graph.limit <= solution.peak
    assert solution.work < exact.work


def test_what_ended_a_search_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof or the caller: nothing to say; a limit; or nothing left to try, where every integer program is too large."""
    graph = ladder(8, 0.3, seed=3)
    assert solve(graph, time_limit=None).ended is None
    for limit in ({"work_limit": 1e-9, "time_limit": None}, {"time_limit": 1e-9}):
        short = solve(graph, gap=0.0, **limit)
        assert short.status in (Status.FEASIBLE, Status.UNKNOWN)
        assert short.ended == "limit"
    monkeypatch.setattr(search, "prove", lambda *_arguments, **_options: Proof(large=True))
    monkeypatch.setattr(parameters, "IDLE_EPOCHS", 0)
    given_up = solve(graph, gap=0.0, time_limit=600.0)
    assert given_up.status is Status.FEASIBLE
    assert given_up.ended == "search"
    asked = Clock(600.0, None)
    asked.halt = lambda: True
    assert solve(graph, gap=0.0, clock=asked).ended is None


def test_least_usage_everywhere_is_there_however_short_the_search() -> None:
    graph = ladder(10, None)
    graph = replace(graph, tables=tuple(np.minimum(table, 5000) for table in graph.tables))
    least = [int(np.lexsort((graph.node_costs(v), graph.node_usages(v)))[0]) for v in range(graph.size)]
    tight = replace(graph, limit=graph.peak(least))
    solution = solve(tight, time_limit=None, work_limit=1e-9)
    assert solution.feasible
    assert solution.cost is not None
    assert solution.cost <= graph.cost(least)
    assert not solve(replace(tight, limit=graph.peak(least) - 1), time_limit=None, work_limit=1e-9).feasible


def colouring(nodes: int, colours: int, limit: int | None) -> ChoiceGraph:
    """Nodes that all differ: no pair and no triple shows that there are too few colours."""
    edges = [(v, w) for w in range(nodes) for v in range(w)]
    count = nodes * colours
    return ChoiceGraph(
        names=tuple(f"node {v}" for v in range(nodes)),
        offsets=np.arange(0, count + 1, colours),
        costs=np.arange(count) % 7,
        usages=1 + np.arange(count) % 3,
        interval_offsets=np.arange(nodes + 1),
        intervals=np.array([[0, 1]] * nodes),
        edges=np.array(edges),
        edge_tables=np.zeros(len(edges), dtype=np.int64),
        tables=(np.where(np.eye(colours, dtype=bool), FORBIDDEN, 0),),
        limit=limit,
    )


@pytest.mark.parametrize("objective", ["time", "memory"])
@pytest.mark.parametrize("limit", [None, 100, 8])
def test_what_only_the_search_shows_to_be_impossible_is_infeasible(limit: int | None, objective: str) -> None:
    solution = solve(colouring(6, 5, limit), objective=objective, time_limit=None)
    assert solution.status is Status.INFEASIBLE
    assert solution.assignment is None
    assert solve(colouring(5, 5, None if limit is None else limit + 8), objective=objective, time_limit=None).feasible


@pytest.mark.parametrize("share", [-0.01, 0.1])
def test_a_search_for_the_least_peak_that_gives_up_proves_nothing(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search goes on without it, and proves by itself what there is to prove."""
    graph = ladder(6, share)
    expected = solve(graph, time_limit=None, gap=0.0)
    steps = engine.Search._bounding

    def nothing_decoded(given: engine.Search, *args: object) -> object:
        bounding = steps(given, *args)  # type: ignore[arg-type]
        bounding.steps = lambda: iter(())  # type: ignore[method-assign]
        return bounding

    asked: list[bool] = []

    def gives_up(given: engine._Run) -> None:
        asked.append(True)

    monkeypatch.setattr(engine._Run, "_least_peak", gives_up)
    monkeypatch.setattr(engine.Search, "_bounding", nothing_decoded)
    monkeypatch.setattr(engine, "_lightest", lambda graph: np.array([len(graph.node_costs(v)) - 1 for v in range(graph.size)]))
    solution = solve(graph, time_limit=None, gap=0.0)
    assert (solution.status, solution.feasible) == (expected.status, share > 0)
    assert share < 0 or (asked and solution.objective == expected.objective)


def test_without_any_allowed_combination_there_is_no_assignment() -> None:
    graph = ladder(2, None)
    graph = replace(graph, tables=(*graph.tables[:-1], np.full_like(graph.tables[-1], FORBIDDEN)))
    for objective in ("time", "memory"):
        solution = solve(graph, objective=objective)
        assert solution.status is Status.INFEASIBLE
        assert solution.assignment is None


def test_warm_starts_are_completed_and_wrong_ones_do_no_harm() -> None:
    graph = ladder(8, 0.3, seed=2)
    best = solve(graph, time_limit=None)
    assert best.assignment is not None
    one_hot = {v: np.arange(5) == x for v, x in enumerate(best.assignment)}
    nothing = {0: np.zeros(5, dtype=bool)}
    clash = {v: np.arange(5) == 0 for v in range(graph.size)}
    starts = [WarmStart(name=name, allowed=allowed) for name, allowed in (("best", one_hot), ("nothing", nothing), ("clash", clash))]
    events: list[Event] = []
    solution = solve(graph, time_limit=None, warm_starts=starts, progress=events.append)
    assert solution.gap is not None
    assert solution.gap <= 1e-4
    assert any("warm start best" in event.source for event in events)
    assert events == list(solution.history)


def test_history_only_gets_better() -> None:
    solution = solve(ladder(8, 0.3), time_limit=None)
    objectives = [e.objective for e in solution.history if e.objective is not None]
    bounds = [e.bound for e in solution.history if e.bound is not None]
    assert objectives == sorted(objectives, reverse=True)
    assert bounds == sorted(bounds)
    assert solution.stages


def test_a_graph_without_nodes_or_times() -> None:
    nothing = ChoiceGraph(
        names=(),
        offsets=np.zeros(1, dtype=np.int64),
        costs=np.zeros(0, dtype=np.int64),
        usages=np.zeros(0, dtype=np.int64),
        interval_offsets=np.zeros(1, dtype=np.int64),
        intervals=np.zeros((0, 2), dtype=np.int64),
        edges=np.zeros((0, 2), dtype=np.int64),
        edge_tables=np.zeros(0, dtype=np.int64),
        tables=(),
        limit=5,
    )
    for objective in ("time", "memory"):
        solution = solve(nothing, objective=objective)
        assert (solution.status, solution.objective, solution.assignment) == (Status.OPTIMAL, 0, ())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"objective": "speed"}, "legal: 'time', 'memory'"),
        ({"memory_weight": -1}, "memory weight -1"),
        ({"gap": 1.5}, "gap 1.5"),
        ({"time_limit": 0.0}, "time limit 0.0"),
        ({"work_limit": -2.0}, "work limit -2.0"),
        ({"workers": 0}, "0 workers"),
    ],
)
def test_illegal_arguments(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        solve(ladder(2, None), **arguments)  # type: ignore[arg-type]


def test_objective_and_gap_by_hand() -> None:
    assert objective_value("time", 3, 100, 2 * MIB + 1) == 106
    assert objective_value("memory", 3, 100, 7) == 7
    assert relative_gap(200, 150) == 0.25
    assert relative_gap(0, 0) == 0.0


def test_the_solver_imports_neither_torch_nor_jax() -> None:
    code = "import sys, solver_shard.solve.engine, solver_shard.graph.iopddl; print([m for m in ('torch', 'jax') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
