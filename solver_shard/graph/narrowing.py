"""What masks leave of a choice graph: arc consistency, and the smaller graph of what is left.

**Arc consistency** (AC-3, Mackworth 1977). When the strategies of a node are narrowed, so are those of its neighbours to what still has a
partner that is not forbidden, and so on. What goes is part of no assignment that the masks allow. It is no search: what is left may still
have no point.

    arcs = Arcs(problem.size, [Arc(edge.a, edge.b, edge.core < FORBIDDEN, edge.rows, edge.cols) for edge in problem.edges])
    emptied = arcs.propagate(domains, range(problem.size))      # a node that nothing is left of: then there is no assignment; or None
    narrowing = Narrowing(lowering.graph)
    narrowing.keep(masks)                               # False where they do not fit together

``Arcs`` is the one loop for domains that shrink while tables stay: of graphs here, in presolve of a whole problem
(solve/presolve/aliases.py), in rounding of messages, which takes decisions back (solve/bounds/trws.py), and in infeasible subsystems, which
remember why a strategy went (solve/iis.py); ``removed`` tells the last two what went. Three others look alike and are not: presolve of
single nodes (solve/presolve/__init__.py) cuts the tables themselves, so that "has a partner" is a property of a core that its copies share;
elimination and labels bound pairs by cost and look at each edge once. The result does not depend on the order of the queue; the reasons do,
so it is first in, first out.

**Shrinking.** The plans that experts write decide nearly everything, so what they leave of a graph is completed in no time, where presolve
alone would first look at all that they forbid.

    small = shrink(graph, masks)
    graph.cost(small.restore(x)) == small.graph.cost(x)      # for every x
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.errors import InternalError
from solver_shard.graph.choice_graph import Bools, ChoiceGraph, Ints, Masks

EASED = 24
"""Dead ends that are opened one after the other, at most: a few ops lack a cut, or the pattern is not for this model."""

EASED_FAR = 4
"""Edges from a dead end to what is dropped, at most: from a transition over what it makes to an op and what that makes."""

Removed = Callable[[int, Bools, Bools, int], None]
"""Called after a node lost strategies: the node, its domain before, what went, and the number of the arc over which."""


@dataclass(frozen=True, slots=True, eq=False)
class Arc:
    """An edge: ``allowed[rows[x], cols[y]]`` for the strategies x of ``a`` and y of ``b``; every row and column is some strategy's.

    ``owner``: position of the constraint that it is of, or -1.
    """

    a: int
    b: int
    allowed: Bools
    rows: Ints
    cols: Ints
    owner: int = -1

    def seen_from(self, v: int) -> tuple[Bools, Ints, Ints, int]:
        """(allowed, rows, cols, neighbour) with v on the first axis."""
        return (self.allowed, self.rows, self.cols, self.b) if v == self.a else (self.allowed.T, self.cols, self.rows, self.a)


class Arcs:
    """The edges of so many nodes that forbid something; ``around``: per node the numbers of its arcs."""

    def __init__(self, nodes: int, arcs: Sequence[Arc]) -> None:
        self.arcs = arcs
        self.around: list[list[int]] = [[] for _ in range(nodes)]
        for number, arc in enumerate(arcs):
            self.around[arc.a].append(number)
            self.around[arc.b].append(number)
        self._whole: dict[tuple[int, bool], Bools | None] = {}

    def propagate(
        self, domains: list[Bools], start: Iterable[int], *, removed: Removed | None = None, owners: Collection[int] | None = None
    ) -> int | None:
        """Make domains consistent from these nodes on; the node that was emptied, or None.

        Args:
            domains: bool per node and strategy; what shrinks is replaced, not changed.
            start: nodes whose neighbours are looked at.
            removed: told of every removal.
            owners: arcs of other owners than these do not count; None: all count.
        """
        queue = deque(start)
        waiting = set(queue)
        while queue:
            v = queue.popleft()
            waiting.discard(v)
            all_left = bool(domains[v].all())
            for number in self.around[v]:
                arc = self.arcs[number]
                if owners is not None and arc.owner >= 0 and arc.owner not in owners:
                    continue
                supported = self._supported(arc, v, None if all_left else domains[v])
                if supported is None:
                    continue
                _, _, theirs, w = arc.seen_from(v)
                before = domains[w]
                gone = before & ~supported[theirs]
                if not gone.any():
                    continue
                domains[w] = before & ~gone
                if removed is not None:
                    removed(w, before, gone, number)
                if not domains[w].any():
                    return w
                if w not in waiting:
                    waiting.add(w)
                    queue.append(w)
        return None

    def _supported(self, arc: Arc, v: int, domain: Bools | None) -> Bools | None:
        """Which lines of the other node have a partner in the domain (all of it where None); None for all of them."""
        if domain is not None:
            allowed, own, _, _ = arc.seen_from(v)
            present = np.zeros(allowed.shape[0], dtype=bool)
            present[own[domain]] = True
            return np.asarray(np.logical_or.reduce(allowed[present], axis=0))
        key = id(arc.allowed), v == arc.a  # copies of a layer share their tables: found out once for each
        if key not in self._whole:
            supported: Bools = np.logical_or.reduce(arc.seen_from(v)[0], axis=0)
            self._whole[key] = None if supported.all() else supported
        return self._whole[key]


def _arcs(graph: ChoiceGraph, pairs: Mapping[tuple[int, int], Bools] | None = None) -> Arcs:
    """The edges of a graph; ``pairs``: by two nodes, the pairs that may be chosen."""
    allowed = [table < FORBIDDEN for table in graph.tables]
    every = [(np.arange(table.shape[0]), np.arange(table.shape[1])) for table in allowed]
    arcs = []
    for (u, v), number in zip(graph.edges.tolist(), graph.edge_tables.tolist(), strict=True):
        table = allowed[number] & pairs[u, v] if pairs and (u, v) in pairs else allowed[number]
        arcs.append(Arc(u, v, table, *every[number]))
    return Arcs(graph.size, arcs)


class Narrowing:
    """What is left of a choice graph while decisions are taken.

    Attributes:
        left: by node, which strategies are left; arc consistent.
    """

    def __init__(self, graph: ChoiceGraph) -> None:
        self._arcs = _arcs(graph)
        left = [graph.node_costs(v) < FORBIDDEN for v in range(graph.size)]
        if not self._narrow(left, range(graph.size)):
            raise InternalError("the choice graph has no point: every strategy of some node is forbidden by its neighbours")

    def keep(self, masks: Masks) -> bool:
        """Leave only these strategies of some nodes; False, and nothing is changed, where some node would have none."""
        left = list(self.left.values())
        for v, mask in masks.items():
            left[v] = left[v] & mask
        return self._narrow(left, masks)

    def _narrow(self, left: list[Bools], changed: Iterable[int]) -> bool:
        """Take over what is left, made consistent after these nodes were narrowed; False where a node has nothing left."""
        changed = list(changed)
        if not all(left[v].any() for v in changed) or self._arcs.propagate(left, changed) is not None:
            return False
        self.left = dict(enumerate(left))
        return True

    def only(self, v: int, strategy: int) -> bool:
        """Decide a node."""
        return self.keep({v: np.arange(len(self.left[v])) == strategy})


def eased(graph: ChoiceGraph, masks: Masks, pairs: Mapping[tuple[int, int], Bools]) -> dict[tuple[int, int], Bools] | None:
    """As many of the pairs as leave every node a strategy; None where the masks alone do not.

    Where a node has nothing left, what was said of the edges around it is dropped, those next to it first: an op that only runs whole
    gets whole tensors, and all else stays as it was said.

    Args:
        masks, pairs: as of ``shrink``.
    """
    kept, free, arcs = dict(pairs), _arcs(graph), list(_arcs(graph, pairs).arcs)
    allowed = [(graph.node_costs(v) < FORBIDDEN) & masks.get(v, True) for v in range(graph.size)]
    for _ in range(EASED if all(mask.any() for mask in allowed) else 0):
        empty = Arcs(graph.size, arcs).propagate(list(allowed), range(graph.size))
        if empty is None:
            return kept
        near, numbers, opened = {empty}, set[int](), list[int]()
        for _ in range(EASED_FAR):
            numbers |= {number for v in near for number in free.around[v]}
            near |= {v for number in numbers for v in (arcs[number].a, arcs[number].b)}
            opened = [number for number in numbers if (arcs[number].a, arcs[number].b) in kept]
            if opened:
                break
        if not opened:
            return None
        for number in opened:
            arcs[number] = free.arcs[number]
        for number in opened:
            kept.pop((arcs[number].a, arcs[number].b), None)
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
    left = [(graph.node_costs(v) < FORBIDDEN) & masks.get(v, True) for v in range(graph.size)]
    if not all(mask.any() for mask in left) or _arcs(graph, pairs).propagate(left, range(graph.size)) is not None:
        return None
    kept = [np.flatnonzero(mask) for mask in left]
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
        loads=None if graph.loads is None else graph.loads.substituted(range(graph.size), kept),
    )
    return Shrunk(graph=small, kept=tuple(kept))
