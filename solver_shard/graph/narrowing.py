"""What masks leave of a choice graph: arc consistency, the smaller graph of what is left, and points of it without the solver.

**Arc consistency.** When the strategies of a node are narrowed, so are those of its neighbours to what still has a partner that is not
forbidden, and so on. What goes is part of no assignment that the masks allow. It is no search: what is left may still have no point.

    narrowing = Narrowing(lowering.graph)
    narrowing.keep(masks)                               # False where they do not fit together
    point = random_point(lowering.graph, seed=0)

**Shrinking.** The plans that experts write decide nearly everything, so what they leave of a graph is completed in no time, where presolve
alone would first look at all that they forbid.

    small = shrink(graph, masks)
    graph.cost(small.restore(x)) == small.graph.cost(x)      # for every x
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.errors import InternalError
from solver_shard.graph.choice_graph import Bools, ChoiceGraph, Ints, Masks

_ATTEMPTS = 10
"""Draws of a random point that may end in a dead end."""

EASED = 24
"""Dead ends that are opened one after the other, at most: a few ops lack a cut, or the pattern is not for this model."""

EASED_FAR = 4
"""Edges from a dead end to what is dropped, at most: from a transition over what it makes to an op and what that makes."""

Left = dict[int, Bools]
"""Masks of all nodes."""


class _Arcs:
    """The edges of a graph in both directions: whether two strategies may be chosen together."""

    def __init__(self, graph: ChoiceGraph, pairs: Mapping[tuple[int, int], Bools] | None = None) -> None:
        self.empty = -1  # the node that had nothing left when ``consistent`` gave up
        allowed = [table < FORBIDDEN for table in graph.tables]
        flipped = [np.ascontiguousarray(table.T) for table in allowed]
        self._from: list[list[tuple[int, Bools]]] = [[] for _ in range(graph.size)]
        for (u, v), number in zip(graph.edges.tolist(), graph.edge_tables.tolist(), strict=True):
            there, back = allowed[number], flipped[number]
            if pairs and (u, v) in pairs:
                there, back = there & pairs[u, v], back & pairs[u, v].T
            self._from[u].append((v, there))
            self._from[v].append((u, back))

    def around(self, v: int, distance: int) -> set[tuple[int, int]]:
        """The edges on ways of so many edges from a node, in both directions."""
        near, found = {v}, set[tuple[int, int]]()
        for _ in range(distance):
            found |= {edge for u in near for w, _ in self._from[u] for edge in ((u, w), (w, u))}
            near = {u for edge in found for u in edge}
        return found

    def opened(self, free: _Arcs, edges: set[tuple[int, int]]) -> None:
        """Take these edges as another object for the same graph has them."""
        for u in {u for edge in edges for u in edge}:
            both = zip(self._from[u], free._from[u], strict=True)
            self._from[u] = [other if (u, own[0]) in edges or (own[0], u) in edges else own for own, other in both]

    def consistent(self, left: Left, changed: Iterable[int]) -> Left | None:
        """What is left when these nodes were narrowed; None where a node has nothing left. Narrows the masks of ``left`` itself."""
        queue = deque(changed)  # first in, first out: what is narrowed from several sides is looked at once, after them
        waiting = set(queue)
        while queue:
            u = queue.popleft()
            waiting.discard(u)
            if not left[u].any():
                self.empty = u
                return None
            for v, table in self._from[u]:
                kept = left[v] & table[left[u]].any(axis=0)
                if (kept != left[v]).any():
                    left[v] = kept
                    if v not in waiting:
                        waiting.add(v)
                        queue.append(v)
        return left


class Narrowing:
    """What is left of a choice graph while decisions are taken.

    Attributes:
        left: by node, which strategies are left; arc consistent.
    """

    def __init__(self, graph: ChoiceGraph) -> None:
        self._arcs = _Arcs(graph)
        left = self._arcs.consistent({v: graph.node_costs(v) < FORBIDDEN for v in range(graph.size)}, range(graph.size))
        if left is None:
            raise InternalError("the choice graph has no point: every strategy of some node is forbidden by its neighbours")
        self.left: Left = left

    def keep(self, masks: Masks) -> bool:
        """Leave only these strategies of some nodes; False, and nothing is changed, where some node would have none."""
        left = self._arcs.consistent(self.left | {v: self.left[v] & mask for v, mask in masks.items()}, masks)
        if left is None:
            return False
        self.left = left
        return True

    def only(self, v: int, strategy: int) -> bool:
        """Decide a node."""
        return self.keep({v: np.arange(len(self.left[v])) == strategy})


def random_point(graph: ChoiceGraph, seed: int, fixed: Mapping[int, int] | None = None) -> tuple[int, ...]:
    """One strategy per node, drawn at random node after node; the same seed gives the same point.

    Args:
        fixed: strategies of some nodes, which are kept.

    Raises:
        InternalError: the fixed strategies do not fit together, or every attempt ends in a dead end.
    """
    for attempt in range(_ATTEMPTS):
        point = _draw(graph, random.Random(seed if not attempt else f"{seed}, attempt {attempt}"), fixed or {})
        if point is not None:
            return point
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


def eased(graph: ChoiceGraph, masks: Masks, pairs: Mapping[tuple[int, int], Bools]) -> dict[tuple[int, int], Bools] | None:
    """As many of the pairs as leave every node a strategy; None where the masks alone do not.

    Where a node has nothing left, what was said of the edges around it is dropped, those next to it first: an op that only runs whole
    gets whole tensors, and all else stays as it was said.

    Args:
        masks, pairs: as of ``shrink``.
    """
    kept = dict(pairs)
    arcs, free = _Arcs(graph, kept), _Arcs(graph)
    allowed = {v: (graph.node_costs(v) < FORBIDDEN) & masks.get(v, True) for v in range(graph.size)}
    for _ in range(EASED):
        if arcs.consistent({v: mask.copy() for v, mask in allowed.items()}, range(graph.size)) is not None:
            return kept
        around = (arcs.around(arcs.empty, distance) for distance in range(1, 1 + EASED_FAR))
        near = next((edges for edges in around if not edges.isdisjoint(kept)), None)
        if near is None:
            return None
        arcs.opened(free, near)
        kept = {edge: allowed_pairs for edge, allowed_pairs in kept.items() if edge not in near}
    return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shrunk:
    """What is left of a graph; ``kept`` has the positions of the strategies of every node."""

    graph: ChoiceGraph
    kept: tuple[Ints, ...]

    def restore(self, assignment: Ints) -> Ints:
        """The assignment of the larger graph."""
        return np.array([kept[x] for kept, x in zip(self.kept, assignment, strict=True)], dtype=np.int64)


def shrink(graph: ChoiceGraph, masks: Masks, pairs: Mapping[tuple[int, int], Bools] | None = None) -> Shrunk | None:
    """The graph of what masks leave, without the rest: costs, bytes and lives stay the same; None where a node has no strategy left.

    Args:
        masks: by node, the strategies that may be chosen; nodes that are not named may choose freely.
        pairs: by two nodes, in the order of their edge, the pairs that may be chosen.
    """
    pairs = pairs or {}
    left = {v: (graph.node_costs(v) < FORBIDDEN) & masks.get(v, True) for v in range(graph.size)}
    if _Arcs(graph, pairs).consistent(left, range(graph.size)) is None:
        return None
    kept = [np.flatnonzero(mask) for mask in left.values()]
    tables: list[Ints] = []
    known: dict[tuple[int, int, bytes, bytes], int] = {}
    numbers = []
    for (u, v), number in zip(graph.edges.tolist(), graph.edge_tables.tolist(), strict=True):
        key = (number, id(pairs.get((u, v))), kept[u].tobytes(), kept[v].tobytes())
        if key not in known:
            cells = graph.tables[number][kept[u][:, None], kept[v]]
            if (u, v) in pairs:
                cells = np.where(pairs[u, v][kept[u][:, None], kept[v]], cells, FORBIDDEN)
            known[key] = len(tables)
            tables.append(np.ascontiguousarray(cells))
        numbers.append(known[key])
    positions = np.concatenate([graph.offsets[v] + kept[v] for v in range(graph.size)]) if graph.size else np.zeros(0, dtype=np.int64)
    small = replace(
        graph,
        offsets=np.concatenate([[0], np.cumsum([len(x) for x in kept])]).astype(np.int64),
        costs=graph.costs[positions],
        usages=graph.usages[positions],
        edge_tables=np.array(numbers, dtype=np.int64),
        tables=tuple(tables),
    )
    return Shrunk(graph=small, kept=tuple(kept))
