"""Windows: what their terms cost, what weights make of them, and that folding and shrinking keep them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from enumeration import enumerate_allowed
from random_graphs import random_graph, repeated_layers, windowed

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.errors import InternalError
from solver_shard.graph.choice_graph import WEIGHT, ChoiceGraph, Ints, Loads
from solver_shard.graph.narrowing import shrink
from solver_shard.graph.symmetry import expand, fold
from solver_shard.solve.engine import solve
from solver_shard.solve.presolve import presolve
from solver_shard.solve.presolve.reducer import NoAssignment
from solver_shard.solve.problem import from_graph
from solver_shard.solve.solution import Status, objective_value


def spelled_out(graph: ChoiceGraph, x: list[int]) -> int:
    """The price of an assignment, term by term."""
    loads = graph.loads
    assert loads is not None
    total = sum(int(graph.node_costs(v)[x[v]]) for v in range(graph.size))
    total += sum(int(graph.tables[t][x[u], x[v]]) for (u, v), t in zip(graph.edges.tolist(), graph.edge_tables.tolist(), strict=True))
    for window in range(loads.count):
        terms: list[int] = []
        for term in np.flatnonzero(loads.windows == window).tolist():
            own = sum(int(loads.vectors[k][x[v]]) * times for v, k, r, times in loads.nodes.tolist() if r == term)
            own += int(loads.base[term])
            terms.append(own + sum(int(loads.tables[k][x[u], x[v]]) * times for u, v, k, r, times in loads.edges.tolist() if r == term))
        total += max(terms)
    return total


def drawn(rng: np.random.Generator, graph: ChoiceGraph) -> list[int]:
    return [int(rng.integers(k)) for k in graph.sizes().tolist()]


@pytest.mark.parametrize("seed", range(20))
def test_a_window_costs_its_fullest_term_and_weights_never_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = windowed(rng, random_graph(rng, int(rng.integers(1, 7))))
    loads = graph.loads
    assert loads is not None
    for _ in range(20):
        x = drawn(rng, graph)
        assert graph.cost(x) == spelled_out(graph, x)
        weights = loads.weights(rng.random(len(loads.windows)) * (rng.random(len(loads.windows)) < 0.7))
        assert (np.add.reduceat(weights, loads.starts) == WEIGHT).all()
        priced = graph.priced(weights)
        priced.validate()
        assert priced.loads is None
        assert priced.allowed(x) == graph.allowed(x)
        terms = loads.terms(x)
        largest = np.zeros(len(terms), dtype=np.int64)
        largest[[start + int(part.argmax()) for start, part in zip(loads.starts, np.split(terms, loads.starts[1:]), strict=True)]] = WEIGHT
        if graph.allowed(x):
            assert priced.cost(x) <= graph.cost(x)
            assert graph.priced(largest).cost(x) == graph.cost(x)


@pytest.mark.parametrize("seed", range(20))
def test_tied_copies_load_their_own_windows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph, classes = repeated_layers(rng, windowed(rng, random_graph(rng, int(rng.integers(1, 4)))))
    assert graph.loads is not None
    folded = fold(graph, classes)
    folded.graph.validate()
    assert folded.graph.loads is not None
    assert len(folded.terms) == len(graph.loads.windows)
    assert folded.graph.loads.count <= graph.loads.count
    for _ in range(20):
        x = drawn(rng, folded.graph)
        free = expand(folded, x)
        assert folded.graph.allowed(x) == graph.allowed(free)
        if graph.allowed(free):
            assert folded.graph.cost(x) == graph.cost(free) == spelled_out(graph, list(free))


def test_windows_of_repeated_layers_fold_into_one() -> None:
    layer = np.array([3, 5], dtype=np.int64)
    table = np.array([[0, 2], [4, 1]], dtype=np.int64)
    graph = ChoiceGraph(
        names=tuple("abcdef"),
        offsets=np.arange(0, 13, 2),
        costs=np.zeros(12, dtype=np.int64),
        usages=np.zeros(12, dtype=np.int64),
        interval_offsets=np.zeros(7, dtype=np.int64),
        intervals=np.zeros((0, 2), dtype=np.int64),
        edges=np.zeros((0, 2), dtype=np.int64),
        edge_tables=np.zeros(0, dtype=np.int64),
        tables=(),
        loads=Loads.of(
            [0, 0, 1, 1, 2, 2],
            nodes=[(2 * k, layer, [(2 * k, 1)]) for k in range(3)] + [(5, layer, [(5, 2)])],  # the last layer's lane has more to do
            edges=[(2 * k, 2 * k + 1, table, [(2 * k + 1, 1)]) for k in range(3)],
        ),
    )
    folded = fold(graph, np.array([0, 1, 0, 1, 0, 1]))
    assert folded.graph.loads is not None
    assert folded.graph.loads.windows.tolist() == [0, 0, 1, 1]
    assert folded.terms.tolist() == [0, 1, 0, 1, 2, 3]
    assert folded.graph.loads.terms([1, 0]).tolist() == [10, 8, 5, 4 + 6]
    assert folded.graph.cost([1, 0]) == graph.cost([1, 0] * 3) == 5 + 5 + 10


@pytest.mark.parametrize("seed", range(20))
def test_what_masks_leave_costs_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = windowed(rng, random_graph(rng, int(rng.integers(1, 7))))
    small = shrink(graph, {v: rng.random(k) < 0.7 for v, k in enumerate(graph.sizes().tolist())})
    if small is None:
        return
    small.graph.validate()
    for _ in range(20):
        x = drawn(rng, small.graph)
        assert small.graph.cost(x) == graph.cost(small.restore(np.array(x)))


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        (Loads.of([0, 2]), "windows of terms"),
        (Loads.of([0], nodes=[(0, np.array([-1, 0]), [(0, 1)])]), "negative"),
        (Loads.of([0], nodes=[(0, np.array([FORBIDDEN, 0]), [(0, 1)])]), "forbidden"),
        (Loads.of([0], nodes=[(0, np.array([1]), [(0, 1)])]), "shape"),
        (Loads.of([0], nodes=[(0, np.array([1, 1]), [(1, 1)])]), "not there"),
        (Loads.of([0], nodes=[(0, np.array([1, 1]), [(0, -1)])]), "less than zero times"),
        (Loads.of([0], edges=[(0, 0, np.ones((2, 2), dtype=np.int64), [(0, 1)])]), "one node"),
    ],
)
def test_loads_that_are_not_legal_are_refused(loads: Loads, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        loads.validate(np.array([2, 2]))


@pytest.mark.parametrize("seed", range(40))
def test_presolve_keeps_the_windows_times(seed: int) -> None:
    """What is left costs as much as the graph, and the best of it is the best of the graph."""
    rng = np.random.default_rng(seed)
    graph = windowed(rng, random_graph(rng, int(rng.integers(1, 6))))
    rows = enumerate_allowed(graph)
    problem, order = from_graph(graph, limit=None)
    try:
        small, postsolve = presolve(problem)
    except NoAssignment:
        assert not len(rows)
        return
    loads = small.loads
    assert loads is not None
    least = []
    for choice in itertools.product(*map(range, small.sizes.tolist())):
        x = np.array(choice, dtype=np.int64)
        full = np.empty_like(order)
        full[order] = postsolve.restore(x)
        assert small.allowed(x) == graph.allowed(full)
        if small.allowed(x):
            least.append(small.cost(x))
            assert least[-1] == graph.cost(full) == problem.cost(full[order])
            weights = loads.weights(rng.random(len(loads.windows)))
            assert small.priced(weights).cost(x) <= least[-1]
    assert min(least) == min(graph.cost(row) for row in rows)


def best_of(graph: ChoiceGraph, rows: Ints, objective: str, weight: int) -> int | None:
    """The best objective within the limit, by looking at every assignment."""
    values = [
        objective_value(objective, weight, graph.cost(row), graph.peak(row))
        for row in rows
        if graph.limit is None or graph.peak(row) <= graph.limit
    ]
    return min(values, default=None)


@pytest.mark.parametrize("seed", range(24))
def test_the_solver_agrees_with_brute_force(seed: int) -> None:
    """Windows, lanes, limits and ties, for every objective: the optimum, and a proof of it."""
    rng = np.random.default_rng(seed)
    graph = windowed(rng, random_graph(rng, int(rng.integers(1, 7))))
    if seed % 3 == 0:
        one = windowed(rng, random_graph(rng, int(rng.integers(1, 4)), strategies=3))
        graph = fold(*repeated_layers(rng, one)).graph
    rows = enumerate_allowed(graph)
    peaks = sorted(graph.peak(row) for row in rows)
    for limit in (None, *peaks[:1], *peaks[len(peaks) // 3 : len(peaks) // 3 + 1]):
        limited = replace(graph, limit=limit)
        for objective, weight in (("time", 0), ("time", 10**6), ("memory", 0)):
            found = solve(limited, objective=objective, memory_weight=weight, gap=0.0, work_limit=60.0)
            best = best_of(limited, rows, objective, weight)
            if best is None:
                assert found.status is Status.INFEASIBLE
            else:
                assert (found.status, found.objective, found.bound) == (Status.OPTIMAL, best, best)
