"""Of plans of equal cost, one whose repeated layers are alike: what differs in one layer at no gain is brought to what most layers do.

>>> chosen = tidied(graph, assignment, alike_nodes(lowering))
>>> graph.cost(chosen) <= graph.cost(assignment), graph.peak(chosen) <= graph.peak(assignment)
(True, True)

A solver takes any of the plans that cost the same, so that one layer of a stack may store a weight where the others store its part.
Nodes that are **odd**, that is do not choose what most of their copies do, form islands in the graph. An island is moved as a whole: its
neighbours do what most do already, so what it moves to is mostly allowed, and costs there what it costs the copies. A move that is
forbidden, costs more, or needs more memory than the peak is not made. No edge joins two islands, so what one move costs does not depend
on the others, and they are made in the order of the graph: the result is always the same.

So it drops nothing: a plan that is proven stays proven, since neither its objective nor its peak, intermediates counted, gets larger.

Which nodes are copies is read from names here, not from structure (:mod:`solver_shard.graph.symmetry`): the first and last layers of a
stack belong to it although they begin and end otherwise. Nothing depends on whether that is right but how tidy the plan is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from solver_shard.graph.choice_graph import ChoiceGraph, Ints
from solver_shard.graph.nodes import Lowering, OpNode, TensorNode, group_of
from solver_shard.graph.symmetry import fold
from solver_shard.graph.transient_memory import Transients
from solver_shard.text import template


def tidied(graph: ChoiceGraph, assignment: Sequence[int] | Ints, alike: Ints, copies: Ints | None = None) -> Ints:
    """The assignment with odd nodes brought to what most of their copies do, where that costs nothing.

    Args:
        alike: int64[nodes], a number that copies share; they have the same strategies, in the same order.
        copies: int64[nodes], how many each node stands for in a folded graph; by default one.
    """
    chosen = np.array(assignment, dtype=np.int64)
    usual = _usual(chosen, alike, np.ones_like(chosen) if copies is None else copies)
    if (chosen == usual).all():
        return chosen
    touching = _Touching(graph)
    profile = graph.profile(chosen)
    peak = profile.max(initial=0)
    free = list(_islands(touching, chosen != usual))
    if graph.loads is None:  # what islands load of windows does not add up: there each is judged when it moves
        free = [island for island in free if touching.cost(island, usual) <= touching.cost(island, chosen)]
    for _ in range(2):  # what did not fit at first may fit when others have moved
        left = []
        for island in free:
            after = profile + _more(graph, island, chosen, usual, len(profile))
            moved = chosen.copy()
            moved[island] = usual[island]
            if after.max(initial=0) <= peak and (graph.loads is None or graph.cost(moved) <= graph.cost(chosen)):
                chosen, profile = moved, after
            else:
                left.append(island)
        free = left
    return chosen


def tidy(problem: Transients, plain: Sequence[int] | Ints) -> tuple[Ints, int]:
    """The same of a lowered problem, tied or free, and its true peak: no larger, the intermediates of transitions counted.

    ``plain``: an assignment of the lowered graph, equal on copies where the problem is tied; so is the result.
    """
    graph, given, alike = problem.lowering.graph, np.asarray(plain, dtype=np.int64), alike_nodes(problem.lowering)
    member = leaders = np.arange(graph.size)
    if problem.classes is not None:
        folded = fold(graph, problem.classes)
        graph, member = folded.graph, folded.member
        leaders = np.unique(member, return_index=True)[1]
    found = tidied(graph, given[leaders], alike[leaders], np.bincount(member))
    before, after = problem.peak(given[leaders]), problem.peak(found)
    return (found[member], after) if after <= before else (given, before)


def alike_nodes(lowering: Lowering) -> Ints:
    """A number per node of the choice graph (int64) that copies share: nodes of the same name but for the numbers in it."""
    program, seen = lowering.program, dict[Hashable, int]()
    names: dict[int, Hashable] = {}
    ops: list[Hashable] = []
    for op in program.ops:
        where = (op.module, op.name, op.phase, op.recompute)
        seen[where] = seen.get(where, 0) + 1
        ops.append((template(op.module), op.name, op.phase, op.recompute, seen[where]))
        names.update({t: (ops[-1], j) for j, t in enumerate(op.results)})
    names.update({t: template(program.tensors[t].name) for t in program.sources()})
    known: dict[Hashable, int] = {}
    found = []
    for node in lowering.nodes:
        place: Hashable = None
        if isinstance(node, OpNode):
            column = lowering.strategies[node.op]
            place = ops[node.op], tuple(way.name for way in column.single), column.axis_choice.tobytes()
        elif isinstance(node, TensorNode):
            group = group_of(node, lowering.lives)
            place = names[node.tensor], group and (group.purpose, group.family)
        found.append(known.setdefault((type(node), place, node.strategies), len(known)))
    return np.array(found, dtype=np.int64)


def _usual(chosen: Ints, alike: Ints, copies: Ints) -> Ints:
    """What most copies of each node choose; of equally many the first strategy."""
    width = int(chosen.max(initial=0)) + 1
    pairs, where = np.unique(alike * width + chosen, return_inverse=True)
    counts = np.bincount(where, weights=copies).astype(np.int64)
    most: dict[int, tuple[int, int]] = {}
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        number, choice = divmod(pair, width)
        if number not in most or count > most[number][0]:
            most[number] = count, choice
    return np.array([most[number][1] for number in alike.tolist()], dtype=np.int64)


def _more(graph: ChoiceGraph, nodes: Sequence[int], before: Ints, after: Ints, end: int) -> Ints:
    """Bytes that one choice of some nodes uses more than another, at each time before ``end``."""
    change = np.zeros(end + 1, dtype=np.int64)
    for v in nodes:
        usages = graph.node_usages(v)
        for start, stop in graph.node_intervals(v).tolist():
            change[start] += usages[after[v]] - usages[before[v]]
            change[stop] -= usages[after[v]] - usages[before[v]]
    return np.cumsum(change[:-1])


class _Touching:
    """The edges of every node."""

    def __init__(self, graph: ChoiceGraph) -> None:
        self.graph = graph
        self.edges = graph.edges.tolist()
        self.of: list[list[int]] = [[] for _ in range(graph.size)]
        for e, (u, v) in enumerate(self.edges):
            self.of[u].append(e)
            self.of[v].append(e)

    def cost(self, nodes: Sequence[int], chosen: Ints) -> int:
        """Of these nodes and of all edges at them; what is forbidden costs more than all that is not."""
        graph = self.graph
        edges = dict.fromkeys(e for v in nodes for e in self.of[v])
        paid = [int(graph.node_costs(v)[chosen[v]]) for v in nodes]
        paid += [int(graph.tables[graph.edge_tables[e]][chosen[self.edges[e][0]], chosen[self.edges[e][1]]]) for e in edges]
        return sum(paid)


def _islands(touching: _Touching, odd: NDArray[np.bool_]) -> Iterator[list[int]]:
    """Connected parts of the odd nodes, in the order of their first nodes."""
    left = odd.copy()
    for start in np.flatnonzero(odd).tolist():
        if not left[start]:
            continue
        island, left[start] = [start], False
        for v in island:
            for e in touching.of[v]:
                for other in touching.edges[e]:
                    if left[other]:
                        left[other] = False
                        island.append(other)
        yield sorted(island)
