"""Rounding pays no part above its slack, takes back what does not fit, and finds what a tight bound is made of."""

from __future__ import annotations

import numpy as np
import pytest
from flat_problems import allowed, some_problem

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import Ints
from solver_shard.solve.bounds.trws import ANY, Messages, consistent, scale_of
from solver_shard.solve.bounds.trws_compiled import Passing, parts
from solver_shard.solve.flat import Flat
from solver_shard.solve.problem import Edge, Floats

X = np.inf


def edge(a: int, b: int, rows: int, cols: int) -> Edge:
    return Edge(a=a, b=b, core=np.zeros((rows, cols), dtype=np.int64), rows=np.arange(rows), cols=np.arange(cols))


def table(*rows: list[float]) -> Floats:
    return np.array(rows, dtype=np.float64)


def largest(chosen: Ints, edges: list[Edge], unary: list[Floats], tables: list[Floats]) -> float:
    paid = [row[x] for row, x in zip(unary, chosen, strict=True)]
    paid += [t[e.rows[chosen[e.a]], e.cols[chosen[e.b]]] for e, t in zip(edges, tables, strict=True)]
    return float(max(paid, default=0.0))


def test_a_choice_that_leaves_a_later_node_nothing_is_not_made() -> None:
    edges = [edge(0, 1, 2, 2), edge(1, 2, 2, 2)]
    unary = [table([0, 5])[0], np.zeros(2), np.zeros(2)]
    tables = [table([0, X], [X, 0]), table([X, X], [0, 0])]
    found = consistent(edges, unary, tables, ANY)
    assert found is not None
    assert found.tolist()[:2] == [1, 1]


def test_a_choice_is_taken_back_where_arc_consistency_sees_only_what_follows_from_it() -> None:
    """Three nodes that must all differ have two strategies each but for the last, and the first choice decides the rest."""
    differ = table([X, 0, 0], [0, X, 0], [0, 0, X])
    edges = [edge(0, 1, 3, 3), edge(0, 2, 3, 3), edge(1, 2, 3, 3)]
    unary = [np.array([0.0, 1.0, 9.0]), np.array([0.0, X, 0.0]), np.array([0.0, X, 0.0])]
    found = consistent(edges, unary, [differ] * 3, ANY)
    assert found is not None
    assert found[0] == 1
    assert len(set(found.tolist())) == 3


def test_nothing_is_found_where_nothing_fits() -> None:
    assert consistent([edge(0, 1, 2, 2)], [np.zeros(2)] * 2, [table([X, X], [X, X])], ANY) is None
    assert consistent([edge(0, 1, 2, 2)], [np.zeros(2)] * 2, [table([3, 4], [5, 6])], 2.0) is None


@pytest.mark.parametrize("seed", range(150))
def test_what_is_found_pays_no_part_above_the_slack(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = some_problem(rng, nodes=int(rng.integers(1, 7)), degree=3.0, forbidden=0.4)
    messages = Messages(problem, scale_of(problem))
    for _ in range(1 + seed % 12):
        bound = messages.sweep(messages.theta)
    split = messages.reparametrise(messages.theta)
    for slack in (0.0, 1e-4 * abs(bound), 0.1 * abs(bound), ANY):
        found = consistent(problem.edges, split.unary, split.tables, slack)
        assert found is None or largest(found, list(problem.edges), split.unary, split.tables) <= slack
        if found is not None and slack == 0.0:
            assert problem.cost(found) * messages.scale == split.constant, "parts of nothing: the bound is the optimum"
    tree = [edge for edge in problem.edges if edge.b == edge.a + 1]
    assert consistent(tree, split.unary, [np.where(e.core < FORBIDDEN, 0.0, X) for e in tree], ANY) is not None, "a tree never gets stuck"


@pytest.mark.parametrize("seed", range(40))
def test_parts_on_flat_arrays_are_the_costs_but_for_a_constant(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = some_problem(rng, nodes=int(rng.integers(1, 7)))
    flat = Flat.of(problem, scale_of(problem))
    passing = Passing(flat)
    for _ in range(1 + seed % 4):
        passing.sweep(flat.theta)
    before = passing.forward.copy(), passing.backward.copy()
    split = parts(passing, flat.theta)
    unary, tables = split.unary, split.tables
    assert (passing.forward == before[0]).all()
    assert (passing.backward == before[1]).all()
    assert all((part >= 0).all() for part in [*unary, *tables])
    constants = set()
    for x in allowed(problem):
        total = sum(row[i] for row, i in zip(unary, x, strict=True))
        total += sum(t[e.rows[x[e.a]], e.cols[x[e.b]]] for e, t in zip(problem.edges, tables, strict=True))
        constants.add(flat.cost(x) - total)
    assert len(constants) <= 1
