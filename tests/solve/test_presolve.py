"""Presolve is exact: what is left has the same optimum, and every solution of it restores to one of the same cost and memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import aliased_graph, best_value, points, random_graph, some_limit

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import ChoiceGraph, Ints
from solver_shard.solve.presolve import presolve
from solver_shard.solve.presolve.reducer import NoAssignment, Reducer
from solver_shard.solve.problem import Carrier, Edge, Problem, from_graph


def chain(*tables: list[list[int]], usages: list[list[int]] | None = None, limit: int | None = None) -> Problem:
    """Nodes in a row with the given tables between them, no costs of their own, all alive at time 0."""
    sizes = [len(tables[0]), *[len(t[0]) for t in tables]]
    flat = np.concatenate([np.array(u) for u in usages]) if usages else np.zeros(sum(sizes), dtype=np.int64)
    graph = ChoiceGraph(
        names=tuple("abcdefgh"[: len(sizes)]),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        costs=np.zeros(sum(sizes), dtype=np.int64),
        usages=flat,
        interval_offsets=np.arange(len(sizes) + 1),
        intervals=np.array([[0, 1]] * len(sizes)),
        edges=np.array([[v, v + 1] for v in range(len(tables))]),
        edge_tables=np.arange(len(tables)),
        tables=tuple(np.array(t, dtype=np.int64) for t in tables),
        limit=limit,
    )
    return from_graph(graph, limit=limit)[0]


X = FORBIDDEN


@pytest.mark.parametrize(
    ("problem", "nodes", "edges", "optimum"),
    [
        pytest.param(chain([[3, 3], [3, 3]]), 0, 0, 3, id="constant"),
        pytest.param(chain([[1, 2], [11, 12]]), 0, 0, 1, id="separable"),
        pytest.param(chain([[5, X], [X, 4]], [[7, X], [X, 9]]), 0, 0, 12, id="followers in a row"),
        pytest.param(chain([[X, X], [1, 2]]), 0, 0, 1, id="row without a partner"),
        pytest.param(chain([[0, 5], [5, 0]], [[0, 5], [5, 0]]), 0, 0, 0, id="free nodes are eliminated"),
        pytest.param(
            chain([[0, 5], [5, 0]], [[0, 5], [5, 0]], usages=[[1, 2], [0, 0], [2, 1]], limit=3), 2, 1, 0, id="only nodes with bytes stay"
        ),
        pytest.param(chain([[0, 5], [5, 0]], usages=[[1, 2], [2, 1]], limit=4), 0, 0, 0, id="a time that cannot be full"),
        pytest.param(chain([[0, 5], [9, 5]], usages=[[1, 2], [2, 1]], limit=3), 0, 0, 0, id="dominated"),
    ],
)
def test_structures(problem: Problem, nodes: int, edges: int, optimum: int) -> None:
    small, _ = presolve(problem)
    assert (small.size, len(small.edges)) == (nodes, edges)
    assert min(v for v in values(small) if v is not None) == optimum


def test_a_node_without_an_allowed_strategy_is_noticed() -> None:
    with pytest.raises(NoAssignment):
        presolve(chain([[X, X], [X, X]]))


def some_graph(rng: np.random.Generator) -> ChoiceGraph:
    if rng.random() < 0.5:
        return random_graph(rng, int(rng.integers(1, 6)), 3)
    nodes = int(rng.integers(1, 6))
    # With n nodes and 2n edges no total reaches what stands for forbidden.
    return aliased_graph(rng, nodes, high=int(rng.choice([4, 20, 10**6, FORBIDDEN // (3 * nodes)])))


@settings(max_examples=300)
@given(st.integers(0, 10**9), st.integers(0, 2), st.booleans(), st.sampled_from([None, 0, 1, 3]))
def test_what_is_left_restores_to_the_same_cost_and_memory(seed: int, weight: int, shrink: bool, stop_after: int | None) -> None:
    rng = np.random.default_rng(seed)
    graph = some_graph(rng)
    found = points(graph)
    limit = some_limit(rng, found)
    problem, order = from_graph(graph, limit=limit, weight=weight)
    keep = [rng.random(int(k)) < 0.8 for k in problem.sizes] if shrink else None
    if keep is not None:
        masks = {int(order[i]): mask for i, mask in enumerate(keep)}
        found = [p for p in found if all(masks[v][x] for v, x in enumerate(p.assignment))]
    asked = itertools.count()
    try:
        small, undo = presolve(problem, keep, None if stop_after is None else lambda: next(asked) >= stop_after)
    except NoAssignment:
        assert not found
        return
    place = {int(t): i for i, t in enumerate(problem.times)}
    for x in assignments(small):
        full = undo.restore(x)
        if not small.allowed(x):
            continue
        assert problem.cost(full) == small.cost(x)
        assert problem.profile(full)[[place[int(t)] for t in small.times]].tolist() == small.profile(x).tolist()
        if small.value(x) is not None:
            assert problem.value(full) == small.value(x)
    left = [v for v in values(small) if v is not None]
    assert min(left, default=None) == best_value(found, limit, "time", weight)
    for of, removed in (
        ("nodes", problem.size - small.size),
        ("strategies", int(problem.offsets[-1] - small.offsets[-1])),
        ("edges", len(problem.edges) - len(small.edges)),
        ("cells", sum(e.core.size for e in problem.edges) - sum(e.core.size for e in small.edges)),
        ("times", len(problem.times) - len(small.times)),
    ):
        assert sum(getattr(step, of) for step in undo.log) == removed, of


@pytest.mark.parametrize("seed", range(400))
def test_near_copies_are_not_taken_for_copies(seed: int) -> None:
    """Few tables and costs among many nodes, joined in slightly different ways: what is found for one must not be used for another.

    The first three nodes carry bytes and stay; the others are eliminated between two of them, followed or dominated.
    """
    rng = np.random.default_rng(seed)
    nodes, hubs = 8, 3
    cores = [np.where(rng.random((2, 3)) < 0.1, FORBIDDEN, rng.integers(0, 9, (2, 3))) for _ in range(2)]
    maps = np.array([[0, 1, 1], [0, 0, 1], [1, 0, 1]])
    orders = np.array([[0, 1, 2], [1, 0, 2], [0, 2, 1]])
    costs = rng.integers(0, 9, (2, 3))
    pairs = [(0, 1), (0, 1), (1, 2), (1, 2)] if seed % 2 else []  # these add up
    for v in range(hubs, nodes):
        pairs += [(h, v) for h in sorted(rng.choice(hubs, 1 + int(rng.random() < 0.7), replace=False).tolist())]
    edges = [Edge(a=h, b=v, core=cores[rng.integers(2)], rows=maps[rng.integers(3)], cols=orders[rng.integers(3)]) for h, v in pairs]
    usages = rng.integers(0, 4, (hubs, 3))
    problem = Problem(
        unary=tuple(costs[rng.integers(0, 2, nodes)]),
        edges=tuple(edges),
        carriers=tuple(Carrier(node=h, usage=usages[h], column=0) for h in range(hubs)),
        spans=np.array([[0, 0, 1]]),
        base=np.zeros(1, dtype=np.int64),
        times=np.zeros(1, dtype=np.int64),
        limit=int(usages.min(axis=1).sum()) + int(rng.integers(0, 3)),
    )
    much = 10**15  # for FORBIDDEN: many of those would not fit into 64 bits
    x = np.stack(np.meshgrid(*[np.arange(3)] * nodes, indexing="ij"), axis=-1).reshape(-1, nodes)
    cost = sum(row[x[:, v]] for v, row in enumerate(problem.unary)) + sum(
        np.minimum(e.table(), much)[x[:, e.a], x[:, e.b]] for e in problem.edges
    )
    used = sum((c.usage[x[:, c.node]] for c in problem.carriers), np.zeros(len(x), dtype=np.int64))
    fits = (used <= problem.limit) & (cost < much)
    expected = int(cost[fits].min()) if fits.any() else None
    try:
        small, undo = presolve(problem)
    except NoAssignment:
        assert not (cost < much).any()
        return
    found = [(value, y) for y in assignments(small) if (value := small.value(y)) is not None]
    assert min((value for value, _ in found), default=None) == expected
    for value, y in found:
        assert problem.value(undo.restore(y)) == value


@pytest.mark.parametrize("seed", range(20))
def test_slices_and_sums_of_shared_tables_are_those_of_each_edge(seed: int) -> None:
    """All pairs of nodes have the same core, seen through different maps; edges are sliced and added, and their tables compared."""
    rng = np.random.default_rng(seed)
    core = rng.integers(0, 99, (4, 4))
    maps = [rng.permutation([0, 1, 2, 3, *rng.integers(0, 4, 1)]) for _ in range(3)]
    pairs = list(itertools.combinations(range(5), 2))
    edges = [Edge(a=a, b=b, core=core, rows=maps[rng.integers(3)], cols=maps[rng.integers(3)]) for a, b in pairs]
    problem = Problem(
        unary=(np.zeros(5, dtype=np.int64),) * 5,
        edges=tuple(edges),
        carriers=(),
        spans=np.zeros((0, 3), dtype=np.int64),
        base=np.zeros(0, dtype=np.int64),
        times=np.zeros(0, dtype=np.int64),
    )
    reducer = Reducer(problem)
    more = [Edge(a=a, b=b, core=core, rows=maps[rng.integers(3)], cols=maps[rng.integers(3)]) for a, b in pairs]
    for edge in more:
        reducer.add_edge(edge)
    keeps = [rng.random(5) < 0.6 for _ in range(5)]
    for v, keep in enumerate(keeps):
        keep[rng.integers(5)] = True
        reducer.restrict(v, keep)
    for first, second in zip(edges, more, strict=True):
        expected = (first.table() + second.table())[keeps[first.a]][:, keeps[first.b]]
        assert reducer.adjacent[first.a][first.b].table().tolist() == expected.tolist()


@settings(max_examples=100)
@given(st.integers(0, 10**9))
def test_restrictions_carried_over_only_allow_what_they_say(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, 5, 3) if seed % 2 else aliased_graph(rng, 5)
    problem, _ = from_graph(graph, limit=None, weight=1)
    try:
        small, undo = presolve(problem)
    except NoAssignment:
        return
    target = undo.restore(np.array([int(rng.integers(k)) for k in small.sizes], dtype=np.int64))
    masks = undo.reduce({v: np.arange(k) == target[v] for v, k in enumerate(problem.sizes.tolist())})
    allowed = [np.flatnonzero(mask) if mask is not None else np.arange(k) for mask, k in zip(masks, small.sizes.tolist(), strict=True)]
    assert any((undo.restore(np.array(x, dtype=np.int64)) == target).all() for x in itertools.product(*allowed))


def assignments(problem: Problem) -> list[Ints]:
    return [np.array(x, dtype=np.int64) for x in itertools.product(*[range(int(k)) for k in problem.sizes])]


def values(problem: Problem) -> list[int | None]:
    return [problem.value(x) for x in assignments(problem)]
