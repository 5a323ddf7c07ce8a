"""Elimination is exact: the least cost and that of every strategy, against enumeration, whatever the messages, the room and the windows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flat_problems import allowed, some_problem

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.solve import parameters
from solver_shard.solve.bounds import elimination
from solver_shard.solve.bounds.elimination import Exact, Order, TooWide, eliminate, order_of
from solver_shard.solve.bounds.trws import Messages, Parts, scale_of
from solver_shard.solve.parameters import MOST_ROWS
from solver_shard.solve.problem import Edge, Problem

BLOCKS, PER_BLOCK = 15, 20


def split(problem: Problem, sweeps: int) -> tuple[Parts, float]:
    """The problem's costs as parts after some sweeps, and their scale."""
    messages = Messages(problem, scale_of(problem))
    for _ in range(sweeps):
        messages.sweep(messages.theta)
    return messages.reparametrise(messages.theta), messages.scale


def order_for(problem: Problem) -> Order:
    order = order_of(problem)
    assert order is not None
    return order


def check(problem: Problem, parts: Parts, scale: float, room: float, exact: Exact) -> None:
    least = [np.full(int(k), room) for k in problem.sizes]
    best = room
    for x in allowed(problem):
        above = problem.cost(x) * scale - parts.constant
        best = min(best, above)
        for row, i in zip(least, x.tolist(), strict=True):
            row[i] = min(row[i], above)
    assert exact.least == best
    for found, row in zip(exact.extra, least, strict=True):
        assert found.tolist() == row.tolist()
    assert (exact.assignment is None) == (best >= room)
    if exact.assignment is not None:
        assert problem.cost(exact.assignment) * scale - parts.constant == best


@pytest.mark.parametrize("block", range(BLOCKS))
def test_least_costs_of_all_and_of_each_strategy(block: int) -> None:
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        rng = np.random.default_rng(seed)
        problem = some_problem(rng, nodes=int(rng.integers(1, 7)), strategies=3, high=int(rng.choice([3, 50, 10**6])), limited=False)
        parts, scale = split(problem, int(rng.integers(0, 5)))
        costs = sorted({problem.cost(x) * scale - parts.constant for x in allowed(problem)})
        rooms = [float(2**50), *(costs[:1] and [costs[0] + 1, costs[len(costs) // 2] + 1, max(1.0, costs[0])])]
        for room in rooms:
            check(problem, parts, scale, room, eliminate(problem, parts, room, order_for(problem)))


def rising(seed: int, circles: int) -> Problem:
    """Circles of three nodes with two strategies that cannot all differ: no edge sees the cost of 10 or more that each one has."""
    rng = np.random.default_rng(seed)
    edges = []
    for i in range(circles):
        price = int(rng.integers(10, 20))
        for a, b in ((0, 1), (0, 2), (1, 2)):
            edges.append((3 * i + a, 3 * i + b, np.array([[price, 0], [0, price]])))
        if i:
            edges.append((3 * i - 3, 3 * i, rng.integers(0, 3, (2, 2))))
    plain = [Edge(a=a, b=b, core=core.astype(np.int64), rows=np.arange(2), cols=np.arange(2)) for a, b, core in edges]
    none = np.zeros(0, dtype=np.int64)
    return Problem(
        unary=tuple(rng.integers(0, 3, 2).astype(np.int64) for _ in range(3 * circles)),
        edges=tuple(sorted(plain, key=lambda edge: (edge.a, edge.b))),
        carriers=(),
        spans=np.zeros((0, 3), dtype=np.int64),
        base=none,
        times=none,
    )


@pytest.mark.parametrize("windows", [(1e-9,), (1 / 64,), (1 / 4,), (1.0,), (1 / 64, 1 / 4)])
@pytest.mark.parametrize("seed", range(5))
def test_what_circles_add_is_found_whatever_the_windows(seed: int, windows: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "FLOOR_WINDOWS", windows)
    problem = rising(seed, 4)
    parts, scale = split(problem, 30)
    least = min(problem.cost(x) for x in allowed(problem)) * scale - parts.constant
    for room in (least + 1, 1.5 * least, 3 * least):
        check(problem, parts, scale, room, eliminate(problem, parts, room, order_for(problem)))


def test_the_first_pass_sees_what_messages_do_not() -> None:
    problem = rising(0, 40)
    parts, scale = split(problem, 30)
    order = order_for(problem)
    floors = elimination._Floors(problem, 30 * scale, MOST_ROWS)
    floors.run(parts, order)
    exact = eliminate(problem, parts, 2.0**50, order)
    assert 40 * 5 * scale < floors.rises.sum() <= exact.least
    narrow = elimination._Floors(problem, 3 * scale, MOST_ROWS)
    narrow.run(parts, order)
    assert 0 < narrow.rises.sum() < floors.rises.sum()
    assert narrow.capped
    tight = elimination._Up(problem, exact.least + scale, MOST_ROWS, elimination._elsewhere(floors.rises, order))
    tight.run(parts, order)
    loose = elimination._Up(problem, exact.least + scale, MOST_ROWS, elimination._elsewhere(0 * floors.rises, order))
    loose.run(parts, order)
    assert tight.rows < loose.rows, "rises elsewhere leave less room"


def test_too_many_rows_end_it_with_a_bound() -> None:
    rng = np.random.default_rng(3)
    problem = some_problem(rng, nodes=7, strategies=4, degree=3.0, high=10**6, forbidden=0.0, limited=False)
    parts, scale = split(problem, 2)
    least = min(problem.cost(x) for x in allowed(problem)) * scale - parts.constant
    for most in (0, 10, 100):
        with pytest.raises(TooWide) as ended:
            eliminate(problem, parts, 2.0**50, order_for(problem), most)
        assert 0 <= ended.value.least <= least
        assert ended.value.work > 0
    assert eliminate(problem, parts, 2.0**50, order_for(problem)).least == least


def test_it_stops_when_it_is_told_to() -> None:
    """Asked before every join: Ctrl-C and a time limit do not wait for the end."""
    problem = rising(0, 10)
    parts, scale = split(problem, 5)
    asked = 0

    def over() -> bool:
        nonlocal asked
        asked += 1
        return asked > allowed_looks

    allowed_looks = 10**9
    order = order_for(problem)
    whole = eliminate(problem, parts, 200 * scale, order, over=over)
    every = asked
    assert every > len(problem.edges)
    for allowed_looks in (0, 10, every // 2, every - 1):
        asked = 0
        with pytest.raises(TooWide) as ended:
            eliminate(problem, parts, 200 * scale, order, over=over)
        assert asked <= allowed_looks + 2
        assert 0 <= ended.value.least <= whole.least


def test_nothing_is_allowed() -> None:
    problem = rising(0, 1)
    closed = np.full((2, 2), FORBIDDEN)
    problem = replace(problem, edges=(*problem.edges[:-1], replace(problem.edges[-1], core=closed)))
    parts = Parts(0.0, [row.astype(float) for row in problem.unary], [edge.core.astype(float) for edge in problem.edges])
    exact = eliminate(problem, parts, 100.0, order_for(problem))
    assert exact.assignment is None
    assert exact.least == 100.0
    assert all((row == 100.0).all() for row in exact.extra)


def test_states_of_many_nodes_are_numbered() -> None:
    """A node with seventy neighbours of four strategies each: the numbers of their states do not fit 64 bits."""
    count = 70
    own = np.array([5000, 0, 6000, 7000])
    cores = [np.repeat(np.roll(own, a)[:, None], 2, axis=1) for a in range(count)]
    edges = tuple(Edge(a=a, b=count, core=core, rows=np.arange(4), cols=np.arange(2)) for a, core in enumerate(cores))
    problem = replace(rising(0, 1), unary=(*[np.zeros(4, dtype=np.int64)] * count, np.array([0, 3000])), edges=edges)
    parts = Parts(0.0, [row.astype(float) for row in problem.unary], [core.astype(float) for core in cores])
    hub_first = Order(nodes=[count, *range(count)], parent=[*range(1, count), -1, 0])
    turned = eliminate(problem, parts, 5500.0, hub_first)
    assert turned.least == 0
    for v, row in enumerate(turned.extra[:-1]):
        assert row.tolist() == np.minimum(np.roll(own, v), 5500).tolist()
    assert turned.extra[-1].tolist() == [0, 3000]


def test_a_problem_with_too_many_states_around_a_node_is_not_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    circle = rising(0, 1)
    path = replace(circle, edges=circle.edges[:2])
    monkeypatch.setattr(parameters, "NARROW", 2.5)
    assert order_of(circle) is None, "two states of each of three nodes"
    assert order_of(path) is not None
