"""A plan is made tidy at no cost: never dearer, larger or forbidden, and alike wherever one move makes it so."""

from __future__ import annotations

import numpy as np
import pytest
from enumeration import enumerate_allowed
from lowered import lowered
from programs import trained_mlp
from random_graphs import random_graph

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import ChoiceGraph
from solver_shard.graph.nodes import SourceNode
from solver_shard.graph.symmetry import node_classes
from solver_shard.graph.tidy import alike_nodes, tidied, tidy
from solver_shard.graph.transient_memory import Transients
from solver_shard.solve.engine import solve
from solver_shard.text import template


def stack(layers: int, usages: tuple[int, int] = (1, 1), first: tuple[int, int] = (0, 0)) -> ChoiceGraph:
    """``layers`` pairs of a weight and its reader, which must choose alike; both choices cost nothing, but ``first`` in the first layer."""
    costs = [[*first], [0, 0]] + [[0, 0]] * (2 * layers - 2)
    same = np.array([[0, FORBIDDEN], [FORBIDDEN, 0]], dtype=np.int64)
    n = 2 * layers
    return ChoiceGraph(
        names=tuple(f"n{v}" for v in range(n)),
        offsets=np.arange(0, 2 * n + 1, 2),
        costs=np.array(costs, dtype=np.int64).ravel(),
        usages=np.array([usages, (0, 0)] * layers, dtype=np.int64).ravel(),
        interval_offsets=np.arange(n + 1),
        intervals=np.array([[0, 1]] * n),
        edges=np.array([[2 * k, 2 * k + 1] for k in range(layers)]),
        edge_tables=np.zeros(layers, dtype=np.int64),
        tables=(same,),
    )


CASES = {
    "an odd layer is brought to the others": ({}, [1, 1, 0, 0, 0, 0], [0] * 6),
    "also where that is cheaper": ({"first": (3, 5)}, [1, 1, 0, 0, 0, 0], [0] * 6),
    "not where it costs more": ({"first": (5, 3)}, [1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]),
    "not where it needs more memory than the peak": ({"usages": (2, 1)}, [1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]),
    "of equally many the first strategy": ({}, [1, 1, 0, 0, 1, 1, 0, 0], [0] * 8),
}


@pytest.mark.parametrize(("changes", "given", "wanted"), CASES.values(), ids=CASES.keys())
def test_what_is_odd_at_no_gain_is_brought_to_what_most_do(
    changes: dict[str, tuple[int, int]], given: list[int], wanted: list[int]
) -> None:
    graph = stack(len(given) // 2, **changes)
    assert tidied(graph, given, np.arange(len(given)) % 2).tolist() == wanted


def test_a_folded_node_counts_as_often_as_it_stands_for() -> None:
    graph, alike = stack(2), np.arange(4) % 2
    assert tidied(graph, [1, 1, 0, 0], alike, np.array([3, 3, 2, 2])).tolist() == [1] * 4
    assert tidied(graph, [1, 1, 0, 0], alike, np.array([2, 2, 3, 3])).tolist() == [0] * 4


@pytest.mark.parametrize("seed", range(40))
def test_nothing_becomes_dearer_larger_or_forbidden(seed: int) -> None:
    """On any graph and any partition of nodes of equal size."""
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, 6, strategies=3)
    alike = graph.sizes() * 10 + rng.integers(0, 2, graph.size)
    allowed = enumerate_allowed(graph)
    for given in allowed[rng.integers(0, len(allowed), 5)] if len(allowed) else ():
        found = tidied(graph, given, alike)
        assert graph.allowed(found)
        assert graph.cost(found) <= graph.cost(given)
        assert graph.peak(found) <= graph.peak(given)
        assert tidied(graph, given, alike).tolist() == found.tolist()


@pytest.mark.parametrize("tied", [True, False])
def test_a_lowered_plan_keeps_its_price_and_its_true_peak(tied: bool) -> None:
    case = lowered(trained_mlp(64, 32, 64, 4), "2,2")
    problem = Transients(case.lowering, case.costs, node_classes(case.lowering) if tied else None)
    found = solve(problem.graph, time_limit=30, gap=0.0)
    plain = problem.plain(found.assignment)
    chosen, peak = tidy(problem, plain)
    assert case.graph.cost(chosen) == case.graph.cost(plain)
    assert peak <= problem.peak(found.assignment)
    evaluation = case.evaluate(case.plan(chosen.tolist()))
    assert (evaluation.total_ns, evaluation.peak) == (case.graph.cost(chosen), peak)
    if problem.folded is not None:
        leaders = np.unique(problem.folded.member, return_index=True)[1]
        assert problem.plain(chosen[leaders]).tolist() == chosen.tolist()  # alike on copies, still


def test_copies_are_nodes_of_one_name_but_for_its_numbers() -> None:
    lowering = lowered(trained_mlp(64, 32, 64, 3), "2,2").lowering
    alike = alike_nodes(lowering)
    together: dict[int, list[str]] = {}
    for v, node in enumerate(lowering.nodes):
        if isinstance(node, SourceNode):
            together.setdefault(int(alike[v]), []).append(lowering.program.tensors[node.tensor].name)
    stored = [names for names in together.values() if len(names) > 1]
    assert sorted(map(len, stored)) == [3, 3]
    assert all(len({template(name) for name in names}) == 1 for names in stored)
    for number in set(alike.tolist()):
        members = np.flatnonzero(alike == number)
        assert len({int(size) for size in lowering.graph.sizes()[members]}) == 1
