"""Arc consistency (AC-3, Mackworth 1977): what is left of each node when every strategy must have an allowed partner across every edge.

    arcs = Arcs(problem.size, [Arc(edge.a, edge.b, edge.core < FORBIDDEN, edge.rows, edge.cols) for edge in problem.edges])
    emptied = arcs.propagate(domains, range(problem.size))      # a node that nothing is left of: then there is no assignment; or None

This is the one loop for domains that shrink while tables stay: presolve of a whole graph (presolve/aliases.py), rounding of messages, which
takes decisions back (bounds/trws.py), and infeasible subsystems, which remember why a strategy went (iis.py); ``removed`` tells the last
two what went. Three others look alike and are not: presolve of single nodes (presolve/__init__.py) cuts the tables themselves, so that "has
a partner" is a property of a core that its copies share; elimination and labels bound pairs by cost and look at each edge once.

The result does not depend on the order of the queue; the reasons do, so it is first in, first out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from solver_shard.graph.choice_graph import Bools, Ints

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
