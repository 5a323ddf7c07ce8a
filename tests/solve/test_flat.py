"""Flat arrays say the same as the problem that they were made of."""

from __future__ import annotations

import numpy as np
import pytest
from flat_problems import every, some_problem

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import Ints
from solver_shard.solve.bounds.trws import CLASH, scale_of
from solver_shard.solve.flat import Flat
from solver_shard.solve.integer_program import row_of
from solver_shard.solve.problem import Carrier, Edge, Problem

SEEDS = range(60)


def assignments(problem: Problem, rng: np.random.Generator, count: int = 12) -> list[Ints]:
    return [(rng.random(problem.size) * problem.sizes).astype(np.int64) for _ in range(count)]


@pytest.mark.parametrize("seed", SEEDS)
def test_costs_profiles_and_rows_are_the_problem_s(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = some_problem(rng, nodes=int(rng.integers(1, 9)), consistent=bool(seed % 3))
    flat = Flat.of(problem, scale_of(problem))
    assert flat.size == problem.size
    for x in assignments(problem, rng):
        cost = flat.cost(x)
        if problem.allowed(x):
            assert cost == (problem.cost(x) - problem.constant) * flat.scale
        else:
            assert CLASH <= cost < np.inf
        assert flat.profile(x).tolist() == problem.profile(x).tolist()
        rows, cols = flat.cells(x)
        assert [(r, c) for r, c in zip(rows.tolist(), cols.tolist(), strict=True)] == [
            (e.rows[x[e.a]], e.cols[x[e.b]]) for e in problem.edges
        ]
    for t in range(len(problem.base)):
        where, above, least = flat.row(t)
        expected_where, expected_above, expected_least = row_of(problem, t)
        assert (where.tolist(), above.tolist(), least) == (expected_where.tolist(), expected_above.tolist(), expected_least)


@pytest.mark.parametrize("seed", SEEDS[:20])
def test_a_row_is_the_use_of_memory_above_the_least(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = some_problem(rng, nodes=4)
    flat = Flat.of(problem, 1.0)
    for t in range(len(problem.base)):
        where, above, least = flat.row(t)
        use = np.zeros(int(problem.offsets[-1]), dtype=np.int64)
        use[where] = above
        assert (above > 0).all()
        for x in every(problem):
            assert int(problem.profile(x)[t]) == least + int(use[problem.offsets[:-1] + x].sum())


@pytest.mark.parametrize("seed", SEEDS[:20])
def test_costs_under_other_unary_costs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = some_problem(rng)
    flat = Flat.of(problem, scale_of(problem))
    penalty = rng.integers(0, 1000, len(flat.theta)).astype(np.float64)
    for x in assignments(problem, rng):
        assert flat.cost(x, flat.theta + penalty) - flat.cost(x) == penalty[problem.offsets[:-1] + x].sum()


def test_equal_cores_and_maps_are_stored_once() -> None:
    core = np.array([[1, 2], [3, 4], [5, FORBIDDEN]])
    maps = np.array([0, 1, 1, 2])
    edges = tuple(Edge(a=a, b=a + 1, core=core, rows=maps.copy(), cols=np.array([1, 0, 0, 0])) for a in range(3))
    problem = Problem(
        unary=tuple(np.zeros(4, dtype=np.int64) for _ in range(4)),
        edges=edges,
        carriers=(),
        spans=np.zeros((0, 3), dtype=np.int64),
        base=np.zeros(0, dtype=np.int64),
        times=np.zeros(0, dtype=np.int64),
    )
    flat = Flat.of(problem, 1.0)
    assert flat.graph.pool.tolist() == [1, 2, 3, 4, 5, CLASH]
    assert len(flat.graph.maps) == 8
    assert flat.cost(np.array([3, 1, 0, 0])) == 5 + 4 + 2


def test_nothing_but_a_node_without_edges_carriers_or_times() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    problem = Problem(unary=(np.array([3, 1]),), edges=(), carriers=(), spans=np.zeros((0, 3), dtype=np.int64), base=nothing, times=nothing)
    flat = Flat.of(problem, 2.0)
    assert flat.cost(np.array([1])) == 2.0
    assert flat.profile(np.array([1])).tolist() == []
    used = Problem(
        unary=problem.unary,
        edges=(),
        carriers=(Carrier(node=0, usage=np.array([5, 7]), column=0), Carrier(node=0, usage=np.array([1, 0]), column=0)),
        spans=np.array([[0, 0, 1], [0, 0, 2]]),
        base=np.array([1, 0]),
        times=np.array([4, 9]),
    )
    flat = Flat.of(used, 1.0)
    assert flat.profile(np.array([0])).tolist() == [13, 6]
    assert [part if isinstance(part, int) else part.tolist() for part in flat.row(0)] == [[1], [2], 13]


@pytest.mark.parametrize("scale", [2.0**-9, 2.0**-6])
def test_costs_are_rounded_down_where_the_scale_is_below_one(scale: float) -> None:
    large = 2**55 - 1  # the nearest float is larger
    problem = Problem(
        unary=(np.array([large]), np.array([0])),
        edges=(Edge(a=0, b=1, core=np.array([[large]]), rows=np.array([0]), cols=np.array([0])),),
        carriers=(),
        spans=np.zeros((0, 3), dtype=np.int64),
        base=np.zeros(0, dtype=np.int64),
        times=np.zeros(0, dtype=np.int64),
    )
    flat = Flat.of(problem, scale)
    assert flat.cost(np.array([0, 0])) / scale <= 2 * large
    assert flat.cost(np.array([0, 0])) / scale >= 2 * large - 2 / scale
