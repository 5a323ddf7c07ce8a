"""Points of a choice graph without the solver: drawn at random, or as near as possible to given decisions.

>>> point = random_point(lowering.graph, seed=0)
>>> plan = plan_of(lowering, point, costs, options)

Arc consistency keeps forbidden pairs out: when the strategies of a node are narrowed, so are those of its neighbours to what
still has a partner, and so on. It is no search, so a draw can end in a dead end; it then starts again from another seed.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.errors import InternalError
from solver_shard.graph.choice_graph import Bools, ChoiceGraph, Ints

Masks = dict[int, NDArray[np.bool_]]
"""Node to what is left of its strategies."""

_ATTEMPTS = 10


class Narrowing:
    """What is left of a choice graph while decisions are taken.

    Attributes:
        left: by node, which strategies are left; arc consistent.
    """

    def __init__(self, graph: ChoiceGraph) -> None:
        self.graph = graph
        tables = [table < FORBIDDEN for table in graph.tables]
        self._arcs: list[list[tuple[int, NDArray[np.bool_]]]] = [[] for _ in range(graph.size)]
        for (u, v), table in zip(graph.edges.tolist(), graph.edge_tables.tolist(), strict=True):
            self._arcs[u].append((v, tables[table]))
            self._arcs[v].append((u, tables[table].T))
        self.left: Masks = {v: graph.node_costs(v) < FORBIDDEN for v in range(graph.size)}
        start = self._spread(self.left, list(self.left))
        if start is None:
            raise InternalError("the choice graph has no point: every strategy of some node is forbidden by its neighbours")
        self.left = start

    def keep(self, masks: Mapping[int, NDArray[np.bool_]]) -> bool:
        """Leave only these strategies of some nodes; False, and nothing is changed, where some node would have none."""
        narrowed = {v: self.left[v] & mask for v, mask in masks.items()}
        if not all(mask.any() for mask in narrowed.values()):
            return False
        spread = self._spread({**self.left, **narrowed}, list(narrowed))
        if spread is None:
            return False
        self.left = spread
        return True

    def only(self, v: int, strategy: int) -> bool:
        """Decide a node."""
        return self.keep({v: np.arange(len(self.left[v])) == strategy})

    def narrowed(self) -> ChoiceGraph:
        """The graph with everything else forbidden."""
        costs = self.graph.costs.copy()
        for v, mask in self.left.items():
            costs[self.graph.offsets[v] : self.graph.offsets[v + 1]][~mask] = FORBIDDEN
        return dataclasses.replace(self.graph, costs=costs)

    def _spread(self, left: Masks, queue: list[int]) -> Masks | None:
        """Arc consistency from the nodes of the queue on; None where a node has nothing left."""
        while queue:
            u = queue.pop()
            for v, table in self._arcs[u]:
                kept = left[v] & table[left[u]].any(axis=0)
                if not kept.any():
                    return None
                if (kept != left[v]).any():
                    left[v] = kept
                    queue.append(v)
        return left


def random_point(graph: ChoiceGraph, seed: int, fixed: Mapping[int, int] | None = None) -> tuple[int, ...]:
    """One strategy per node, drawn at random node after node; the same seed gives the same point.

    Args:
        fixed: strategies of some nodes, which are kept.

    Raises:
        InternalError: the fixed strategies do not fit together, or every attempt ends in a dead end.
    """
    for attempt in range(_ATTEMPTS):
        found = _draw(graph, random.Random(seed if not attempt else f"{seed}, attempt {attempt}"), fixed or {})
        if found is not None:
            return found
    raise InternalError(f"{_ATTEMPTS} draws from seed {seed} all end at a node without a strategy that fits; use another seed")


def _draw(graph: ChoiceGraph, draws: random.Random, fixed: Mapping[int, int]) -> tuple[int, ...] | None:
    narrowing = Narrowing(graph)
    if not narrowing.keep({v: np.arange(len(narrowing.left[v])) == strategy for v, strategy in fixed.items()}):
        raise InternalError("the fixed strategies do not fit together")
    for v in range(graph.size):
        options = np.flatnonzero(narrowing.left[v]).tolist()
        draws.shuffle(options)
        if not any(narrowing.only(v, option) for option in options):
            return None
    return tuple(int(np.flatnonzero(narrowing.left[v])[0]) for v in range(graph.size))


# A choice graph without the strategies that restrictions leave no use for: as small as what is left, however large it was.
#
#     small = shrink(graph, masks)
#     graph.cost(small.restore(x)) == small.graph.cost(x)      # for every x
#
# Arc consistency: where strategies of a node go, so do those of its neighbours that then have no allowed partner, and so on. What goes is
# part of no assignment that the restrictions allow; costs, bytes and lives of what stays are the same. The plans that experts write
# decide nearly everything, so they are completed in no time, where presolve alone would first look at all that they forbid.


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
