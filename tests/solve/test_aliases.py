"""The first stage of presolve: which nodes become one, what it costs, and that the bytes of many nodes stay the same together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from random_graphs import aliased_graph, points

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import ChoiceGraph, Ints
from solver_shard.solve.presolve import presolve
from solver_shard.solve.presolve.aliases import merge_aliases
from solver_shard.solve.presolve.postsolve import Ledger, table
from solver_shard.solve.presolve.reducer import NoAssignment
from solver_shard.solve.problem import Problem, from_graph, over_time, regrouped

X = FORBIDDEN


def problem_of(
    sizes: list[int], edges: list[tuple[int, int, list[list[int]]]], *, usages: list[list[int]] | None = None, intervals: Ints | None = None
) -> Problem:
    """Nodes without costs, all alive at time 0 if not said otherwise, with the given tables."""
    count = sum(sizes)
    graph = ChoiceGraph(
        names=tuple(map(str, range(len(sizes)))),
        offsets=np.cumsum([0, *sizes]),
        costs=np.zeros(count, dtype=np.int64),
        usages=np.zeros(count, dtype=np.int64) if usages is None else np.concatenate([np.array(row) for row in usages]),
        interval_offsets=np.arange(len(sizes) + 1),
        intervals=np.tile([0, 1], (len(sizes), 1)) if intervals is None else intervals,
        edges=np.array([edge[:2] for edge in edges]).reshape(-1, 2),
        edge_tables=np.arange(len(edges)),
        tables=tuple(np.array(edge[2]) for edge in edges),
    )
    return from_graph(graph, limit=None)[0]


SAME = [[0, X, X], [X, 0, X], [X, X, 0]]
TURNED = [[X, 0, X], [X, X, 0], [0, X, X]]
SWAPPED = [[0, X, X], [X, X, 0], [X, 0, X]]
COSTS = [[1, 2, 3], [4, 0, 1], [2, 2, 7]]


@pytest.mark.parametrize(
    ("problem", "unary", "edges", "constant"),
    [
        pytest.param(problem_of([3, 3], [(0, 1, TURNED)]), [[0, 0, 0]], [], 0, id="two aliases"),
        pytest.param(
            problem_of([3, 3, 3], [(0, 1, TURNED), (1, 2, TURNED), (2, 0, TURNED)]), [[0, 0, 0]], [], 0, id="a circle that agrees"
        ),
        pytest.param(problem_of([3, 3], [(0, 1, SAME), (0, 1, SWAPPED)]), [], [], 0, id="one strategy comes back as itself"),
        pytest.param(problem_of([3, 3], [(0, 1, TURNED), (0, 1, COSTS)]), [[2, 1, 2]], [], 0, id="a table along an alias is a cost"),
        pytest.param(problem_of([2, 3], [(0, 1, [[5, 5, 5], [5, 5, 5]])]), [[0, 0], [0, 0, 0]], [], 5, id="constant"),
        pytest.param(problem_of([2, 3], [(0, 1, [[5, 6, 8], [7, 8, 10]])]), [[0, 2], [0, 1, 3]], [], 5, id="row plus column"),
        pytest.param(problem_of([1, 3], [(0, 1, [[5, 6, 8]])]), [[0, 1, 3]], [], 5, id="a node of one strategy"),
        pytest.param(problem_of([2, 3], [(0, 1, [[X, 6, X], [X, X, X]])]), [], [], 6, id="one strategy is left"),
        pytest.param(
            problem_of([3, 3, 3], [(0, 1, TURNED), (0, 2, COSTS), (1, 2, COSTS)]),
            [[0, 0, 0], [0, 0, 0]],
            [[[5, 2, 4], [6, 2, 8], [3, 4, 10]]],
            0,
            id="edges that become parallel add up",
        ),
    ],
)
def test_what_becomes_of_a_graph(problem: Problem, unary: list[list[int]], edges: list[list[list[int]]], constant: int) -> None:
    small, _ = merge_aliases(problem, Ledger())
    assert [row.tolist() for row in small.unary] == unary
    assert [edge.table().tolist() for edge in small.edges] == edges
    assert small.constant == constant


def test_aliases_that_never_agree_allow_nothing() -> None:
    with pytest.raises(NoAssignment):
        merge_aliases(problem_of([3, 3], [(0, 1, SAME), (0, 1, TURNED)]), Ledger())


def test_a_long_chain_is_one_node_and_one_carrier() -> None:
    edges = [(v, v + 1, TURNED) for v in range(299)]
    intervals = np.stack([np.arange(300), np.arange(300) + 5], axis=1)
    problem = problem_of([3] * 300, edges, usages=[[4, 4, 6]] * 300, intervals=intervals)
    small, merge = merge_aliases(problem, Ledger())
    assert (small.size, len(small.edges)) == (1, 0)
    assert len(small.carriers) == 3, "the chain turns the strategies: three vectors of bytes over them"
    assert small.base.min() == 4 * 5
    for x in range(3):
        full = merge.restore(np.array([x]))
        assert full.tolist() == [(x + v) % 3 for v in range(300)]
        assert problem.profile(full).max() == small.profile(np.array([x])).max()


@pytest.mark.parametrize("seed", range(40))
def test_every_allowed_assignment_is_one_of_the_merged_problem(seed: int) -> None:
    graph = aliased_graph(np.random.default_rng(seed), 5)
    problem, order = from_graph(graph, limit=None)
    allowed = {tuple(np.array(point.assignment)[order].tolist()) for point in points(graph)}
    try:
        small, merge = merge_aliases(problem, Ledger())
    except NoAssignment:
        assert not allowed
        return
    every = [np.array(x, dtype=np.int64) for x in itertools.product(*map(range, small.sizes.tolist()))]
    assert {tuple(merge.restore(x).tolist()) for x in every if small.allowed(x)} == allowed


@pytest.mark.parametrize("seed", range(20))
def test_bytes_stay_the_same_at_every_time_when_carriers_are_put_together(seed: int) -> None:
    rng = np.random.default_rng(seed)
    times, columns, nodes = 7, 4, 3
    spans = np.concatenate([rng.integers(0, columns, (9, 1)), np.sort(rng.integers(0, times + 1, (9, 2)), axis=1)], axis=1)
    base = rng.integers(0, 5, times)
    needs = [(int(rng.integers(nodes)), rng.integers(0, 3, 2), int(rng.integers(columns))) for _ in range(10)]
    carriers, again, least = regrouped(needs, spans, base)
    assert len({(c.node, c.column) for c in carriers}) == len(carriers)
    for x in itertools.product(range(2), repeat=nodes):
        before, after = np.zeros(columns, dtype=np.int64), np.zeros(len(carriers) + 1, dtype=np.int64)
        for node, usage, column in needs:
            before[column] += usage[x[node]]
        for carrier in carriers:
            after[carrier.column] += carrier.usage[x[carrier.node]]
        assert (base + over_time(spans, before, times) == least + over_time(again, after, times)).all()


def test_bytes_of_one_node_over_the_same_times_are_one_carrier() -> None:
    spans = np.array([[0, 0, 2], [1, 2, 4], [2, 0, 4]])
    needs = [(0, np.array([0, 1]), 0), (0, np.array([0, 1]), 1), (0, np.array([5, 3]), 2)]
    (carrier,), again, base = regrouped(needs, spans, np.zeros(4, dtype=np.int64))
    assert carrier.usage.tolist() == [2, 1]
    assert base.tolist() == [3, 3, 3, 3]
    assert again.tolist() == [[0, 0, 4]]


def test_a_pair_that_many_parallel_edges_forbid_stays_forbidden() -> None:
    aliases = [(v, v + 1, SAME) for v in (*range(14), *range(15, 29))]
    forbidding = [(v, v + 15, [[X, 0, 1], [2, 0, 0], [0, 3, 0]]) for v in range(15)]
    small, _ = merge_aliases(problem_of([3] * 30, aliases + forbidding), Ledger())
    assert [edge.table().tolist() for edge in small.edges] == [[[X, 0, 15], [30, 0, 0], [0, 45, 0]]]


def test_the_log_is_a_table_that_adds_up() -> None:
    problem = problem_of([3, 3, 3], [(0, 1, TURNED), (1, 2, COSTS)])
    lines = table(presolve(problem)[1].log).splitlines()
    assert lines[0].split()[:6] == ["presolve", "nodes", "strategies", "edges", "cells", "times"]
    assert lines[-1].split()[:5] == ["removed", "3", "9", "2", "18"]
    assert [line.split()[0] for line in lines[1:4]] == ["forbidden", "aliases", "fold"]
