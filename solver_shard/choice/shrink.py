"""A choice graph without the strategies that restrictions leave no use for: as small as what is left, however large it was.

    small = shrink(graph, masks)
    graph.cost(small.restore(x)) == small.graph.cost(x)      # for every x

Arc consistency: where strategies of a node go, so do those of its neighbours that then have no allowed partner, and so on. What goes is
part of no assignment that the restrictions allow; costs, bytes and lives of what stays are the same. The plans that experts write
decide nearly everything, so they are completed in no time, where presolve alone would first look at all that they forbid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from solver_shard.choice.graph import FORBIDDEN, ChoiceGraph, Ints
from solver_shard.solve.spans import Bools


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shrunk:
    """What is left of a graph; ``kept`` has the positions of the strategies of every node."""

    graph: ChoiceGraph
    kept: tuple[Ints, ...]

    def restore(self, assignment: Ints) -> Ints:
        """The assignment of the larger graph."""
        return np.array([kept[x] for kept, x in zip(self.kept, assignment, strict=True)], dtype=np.int64)


def shrink(graph: ChoiceGraph, masks: Mapping[int, Bools], pairs: Mapping[tuple[int, int], Bools] | None = None) -> Shrunk | None:
    """The graph of what is left; None where a node has no strategy left.

    Args:
        masks: by node, the strategies that may be chosen; nodes that are not named may choose freely.
        pairs: by two nodes, in the order of their edge, the pairs that may be chosen.
    """
    pairs = pairs or {}
    edges = graph.edges.tolist()
    arcs: list[list[tuple[int, int, bool]]] = [[] for _ in range(graph.size)]
    for e, (u, v) in enumerate(edges):
        arcs[u].append((v, e, False))
        arcs[v].append((u, e, True))
    kept = [np.flatnonzero((graph.node_costs(v) < FORBIDDEN) & masks.get(v, True)) for v in range(graph.size)]

    def table(e: int) -> Ints:
        """What is left of an edge's table."""
        (u, v), whole = edges[e], graph.tables[graph.edge_tables[e]]
        cells = whole[kept[u][:, None], kept[v]]
        return cells if (u, v) not in pairs else np.where(pairs[u, v][kept[u][:, None], kept[v]], cells, FORBIDDEN)

    waiting = dict.fromkeys(range(graph.size))
    while waiting:
        u = next(iter(waiting))
        del waiting[u]
        for v, e, flipped in arcs[u]:
            partners = (table(e) < FORBIDDEN).any(axis=1 if flipped else 0)
            if not partners.all():
                kept[v] = kept[v][partners]
                waiting[v] = None
        if not len(kept[u]):
            return None
    tables: list[Ints] = []
    known: dict[tuple[int, int, bytes, bytes], int] = {}
    numbers = []
    for e, (u, v) in enumerate(edges):
        key = (int(graph.edge_tables[e]), id(pairs.get((u, v))), kept[u].tobytes(), kept[v].tobytes())
        if key not in known:
            known[key] = len(tables)
            tables.append(np.ascontiguousarray(table(e)))
        numbers.append(known[key])
    left = np.concatenate([graph.offsets[v] + kept[v] for v in range(graph.size)]) if graph.size else np.zeros(0, dtype=np.int64)
    small = replace(
        graph,
        offsets=np.concatenate([[0], np.cumsum([len(x) for x in kept])]).astype(np.int64),
        costs=graph.costs[left],
        usages=graph.usages[left],
        edge_tables=np.array(numbers, dtype=np.int64),
        tables=tuple(tables),
    )
    return Shrunk(graph=small, kept=tuple(kept))
