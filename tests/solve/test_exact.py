"""The solver is exact: a thousand small graphs against enumeration, larger ones against another solver, and every bound on its way."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from enumeration import enumerate_allowed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rivals import solve_with

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import ChoiceGraph, Ints
from solver_shard.solve.engine import solve
from solver_shard.solve.solution import Event, Status

BLOCKS, PER_BLOCK = 20, 50
LARGE = (3, 50, 10**6, 10**11, 10**17)
"""Costs are drawn below one of these."""


@dataclass(frozen=True)
class Case:
    """A small graph with a limit, and what enumeration says of it."""

    graph: ChoiceGraph
    best: int | None
    free: int | None
    least_peak: int | None

    @property
    def binds(self) -> bool:
        """Whether the limit costs something."""
        return self.best is not None and self.best != self.free


def small_graph(rng: np.random.Generator) -> ChoiceGraph:
    """One to six nodes of one to five strategies: no, one or several live intervals a node, some of them empty; nodes that use nothing;
    parallel edges both ways, parts that nothing connects; tables that forbid, tie, separate or do nothing."""
    nodes = int(rng.integers(1, 7))
    sizes = rng.choice([1, 2, 2, 3, 3, 4, 5], nodes)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    high, bytes_high = int(rng.choice(LARGE)), int(rng.choice([2, 8, 100, 10**12]))
    costs = rng.integers(0, high, offsets[-1], endpoint=True)
    costs[rng.random(offsets[-1]) < 0.04] = FORBIDDEN
    usages = rng.integers(0, bytes_high, offsets[-1], endpoint=True)
    for v in np.flatnonzero(rng.random(nodes) < 0.2).tolist():
        usages[offsets[v] : offsets[v + 1]] = 0
    intervals: list[list[int]] = []
    interval_offsets = [0]
    for _ in range(nodes):
        for _ in range(int(rng.choice([0, 1, 1, 1, 1, 2, 3]))):
            start, stop = sorted(rng.integers(0, 9, 2).tolist())
            intervals.append([start, start] if rng.random() < 0.1 else [start, stop])
        interval_offsets.append(len(intervals))
    edges, tables = [], []
    for _ in range(int(rng.integers(0, 2 * nodes)) if nodes > 1 else 0):
        u, v = rng.choice(nodes, 2, replace=False).tolist()
        edges.append([u, v])
        tables.append(table_of(rng, (sizes[u], sizes[v]), high))
    graph = ChoiceGraph(
        names=tuple(f"n{v}" for v in range(nodes)),
        offsets=offsets.astype(np.int64),
        costs=costs.astype(np.int64),
        usages=usages.astype(np.int64),
        interval_offsets=np.array(interval_offsets, dtype=np.int64),
        intervals=np.array(intervals, dtype=np.int64).reshape(-1, 2),
        edges=np.array(edges, dtype=np.int64).reshape(-1, 2),
        edge_tables=np.arange(len(edges), dtype=np.int64),
        tables=tuple(tables),
    )
    graph.validate()
    return graph


def table_of(rng: np.random.Generator, shape: tuple[int, int], high: int) -> Ints:
    """A table of one of the kinds that graphs have."""
    rows, columns = shape
    kind = rng.integers(6)
    if kind == 0 and rows == columns:  # one to one
        return np.where(rng.permutation(rows)[:, None] == np.arange(columns), 0, FORBIDDEN).astype(np.int64)
    if kind == 1:  # a sum of a row's and a column's cost
        return (rng.integers(0, high, (rows, 1), endpoint=True) + rng.integers(0, high, (1, columns), endpoint=True)).astype(np.int64) // 2
    if kind == 2:
        return np.full(shape, rng.integers(0, high, endpoint=True), dtype=np.int64)
    if kind == 3:  # few values, many of them equal
        return rng.choice([0, high // 2, high], shape).astype(np.int64)
    table = rng.integers(0, high, shape, endpoint=True)
    return np.where(rng.random(shape) < 0.2, FORBIDDEN, table).astype(np.int64)


def exact_totals(graph: ChoiceGraph, rows: Ints) -> tuple[list[int], list[int]]:
    """Cost, in Python's integers, and peak of every assignment."""
    return [graph.cost(row) for row in rows], [graph.peak(row) for row in rows]


def judge(graph: ChoiceGraph, costs: list[int], peaks: list[int]) -> Case:
    """A case from a graph and all its assignments."""
    within = [c for c, p in zip(costs, peaks, strict=True) if graph.limit is None or p <= graph.limit]
    return Case(graph, min(within, default=None), min(costs, default=None), min(peaks, default=None))


def case_of(seed: int) -> Case:
    """An even seed gives a limit that binds, an odd one any other: none, one that is too loose to matter, or one that nothing keeps."""
    for attempt in range(1000):
        rng = np.random.default_rng([seed, attempt])
        graph = small_graph(rng)
        rows = enumerate_allowed(graph)
        costs, peaks = exact_totals(graph, rows)
        if seed % 2:
            limits = [None, None, None if not peaks else max(peaks), None if not peaks or not min(peaks) else min(peaks) - 1]
            return judge(replace(graph, limit=limits[int(rng.integers(4))]), costs, peaks)
        cheapest = min((p for c, p in zip(costs, peaks, strict=True) if c == min(costs)), default=0)
        below = sorted({p for p in peaks if p < cheapest})
        if below:
            return judge(replace(graph, limit=min(int(rng.choice(below)) + int(rng.integers(2)), cheapest - 1)), costs, peaks)
    raise AssertionError("no graph on which a limit could bind")


def check(case: Case, seed: int) -> None:
    """Status and optimum agree, and no event on the way said anything else."""
    graph, events = case.graph, list[Event]()
    solution = solve(graph, gap=0.0, seed=seed, time_limit=None, progress=events.append)
    for event in events:
        assert case.best is None or event.objective is None or event.objective >= case.best
        assert case.best is None or event.bound is None or event.bound <= case.best
    if case.best is None:
        assert solution.status is Status.INFEASIBLE
        assert all(event.objective is None for event in events)
        if case.least_peak is not None:
            assert solution.peak_bound <= case.least_peak
        return
    assert solution.objective == case.best
    assert (solution.status, solution.bound, solution.gap) == (Status.OPTIMAL, case.best, 0.0)
    assert solution.assignment is not None
    assert graph.allowed(solution.assignment)
    assert graph.cost(solution.assignment) == case.best == solution.cost
    assert graph.peak(solution.assignment) == solution.peak
    assert graph.limit is None or graph.peak(solution.assignment) <= graph.limit


@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_thousand_small_graphs_by_enumeration(block: int) -> None:
    binding = 0
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        case = case_of(seed)
        binding += case.binds
        try:
            check(case, seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert binding == PER_BLOCK // 2


@settings(max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0.0, 1.0), engine_seed=st.integers(0, 2**31 - 1))
def test_bounds_and_incumbents_enclose_the_optimum_whatever_the_limit(seed: int, share: float, engine_seed: int) -> None:
    graph = small_graph(np.random.default_rng(seed))
    costs, peaks = exact_totals(graph, enumerate_allowed(graph))
    if peaks:
        graph = replace(graph, limit=int(min(peaks) + share * (max(peaks) - min(peaks))))
    check(judge(graph, costs, peaks), engine_seed)


def middling_graph(seed: int) -> ChoiceGraph:
    """Sixty to a hundred and twenty nodes in layers, each read by the next few; what costs less uses more; the limit binds."""
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(60, 121))
    sizes = rng.integers(1, 5, nodes)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    costs = np.concatenate([np.sort(rng.integers(0, 2000, k))[::-1] for k in sizes])
    usages = np.concatenate([np.sort(rng.integers(1, 500, k)) for k in sizes])
    edges = [(v, w) for v in range(nodes) for w in (v + 1, v + 1 + int(rng.integers(1, 6))) if w < nodes and rng.random() < 0.75]
    tables = []
    for u, v in edges:
        shape = (int(sizes[u]), int(sizes[v]))
        table = rng.integers(0, 1000, shape) * (rng.random(shape) < 0.6)
        table = np.where(rng.random(shape) < 0.08, FORBIDDEN, table)
        table[0, 0] = min(int(table[0, 0]), 1000)  # the first strategies use least: together they keep the limit
        tables.append(table.astype(np.int64))
    stops = np.minimum(np.arange(nodes) + rng.integers(1, 9, nodes), nodes)
    stops[rng.random(nodes) < 0.1] = nodes
    graph = ChoiceGraph(
        names=tuple(f"n{v}" for v in range(nodes)),
        offsets=offsets,
        costs=costs.astype(np.int64),
        usages=usages.astype(np.int64),
        interval_offsets=np.arange(nodes + 1, dtype=np.int64),
        intervals=np.stack([np.arange(nodes), stops], axis=1).astype(np.int64),
        edges=np.array(edges, dtype=np.int64).reshape(-1, 2),
        edge_tables=np.arange(len(edges), dtype=np.int64),
        tables=tuple(tables),
    )
    graph.validate()
    least = graph.peak([int(graph.node_usages(v).argmin()) for v in range(nodes)])
    most = graph.peak([int(graph.node_usages(v).argmax()) for v in range(nodes)])
    return replace(graph, limit=int(least + rng.uniform(0.2, 0.7) * (most - least)))


@pytest.mark.parametrize("block", range(5))
def test_larger_graphs_by_another_solver(block: int, capfd: pytest.CaptureFixture[str]) -> None:
    for seed in range(block * 6, block * 6 + 6):
        graph, events = middling_graph(seed), list[Event]()
        theirs = solve_with("highs", graph, seconds=60.0)
        assert theirs.status == "optimal", seed
        assert theirs.value is not None
        ours = solve(graph, gap=0.0, time_limit=None, progress=events.append)
        assert (ours.status, ours.objective) == (Status.OPTIMAL, theirs.value), seed
        assert all(event.bound is None or event.bound <= theirs.value for event in events), seed
        assert all(event.objective is None or event.objective >= theirs.value for event in events), seed
    capfd.readouterr()  # HiGHS' log
