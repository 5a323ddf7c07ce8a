"""An assignment from parts of the costs: node by node the cheapest given the earlier ones, kept consistent.

    chosen = consistent(edges, unary, tables, slack)        # no part above ``slack`` is paid; None where the walk gets stuck

After each decision, strategies whose parts to all that is left of some neighbour are above the slack leave the choice (arc consistency);
a decision that leaves a node nothing is taken back, and the next best is made. On costs as they are, with an infinite slack, that avoids
forbidden pairs. On reparametrised costs (messages.Parts), which are never negative and mostly zero once the bound has settled, with a
slack that is a small part of the bound, the assignments that are left are those the bound is made of: where it is tight, the walk finds
one. Choosing by the messages alone fails there: layers that are alike have equally good strategies that do not fit together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve.problem import Edge, Floats
from solver_shard.solve.spans import Bools

ANY = float(np.finfo(np.float64).max)
"""A slack that allows whatever is finite."""


SLACKS = (1e-5, 1e-4)
"""Slacks that are tried on reparametrised costs, as parts of the bound."""

FIRST_SLOW, SLOWER = 3e-4, 0.2
"""Part of the bound that a step gains at most when it is first rounded, and what that is multiplied by for each next time."""

FAR = 10.0
"""Times what such a step may gain by which an incumbent must be above the bound: one that is nearer was rounded, and the bound is late."""


def consistent(edges: Sequence[Edge], unary: Sequence[Floats], tables: Sequence[Floats], slack: float) -> Ints | None:
    """See the module.

    Args:
        edges: each from an earlier to a later node.
        unary: per node and strategy.
        tables: per edge, over the rows and columns of its core.
        slack: largest part that may be paid.
    """
    domains = _Domains(edges, [row <= slack for row in unary], [table <= slack for table in tables])
    if not domains.settle():
        return None
    lower: list[list[int]] = [[] for _ in unary]
    for e, edge in enumerate(edges):
        lower[edge.b].append(e)
    chosen = np.zeros(len(unary), dtype=np.int64)
    for v, row in enumerate(unary):
        total = row.copy()
        for e in lower[v]:
            edge = edges[e]
            total += tables[e][edge.rows[chosen[edge.a]]][edge.cols]
        total[~domains.left[v]] = np.inf
        while True:
            x = int(total.argmin())
            if not np.isfinite(total[x]):
                return None
            if domains.choose(v, x):
                break
            total[x] = np.inf
        chosen[v] = x
    return chosen


class _Domains:
    """What is left to choose from at each node; always arc consistent after ``settle``."""

    def __init__(self, edges: Sequence[Edge], left: list[Bools], allowed: Sequence[Bools]) -> None:
        self.edges, self.left, self.allowed = edges, left, allowed
        self.near: list[list[int]] = [[] for _ in left]
        for e, edge in enumerate(edges):
            if not allowed[e].all():
                self.near[edge.a].append(e)
                self.near[edge.b].append(e)

    def settle(self) -> bool:
        """Make it consistent; false where that leaves some node nothing."""
        return all(left.any() for left in self.left) and self._propagate(list(range(len(self.left))), [])

    def choose(self, v: int, x: int) -> bool:
        """Leave node v one strategy; false, and nothing changed, where that leaves some node nothing."""
        trail = [(v, self.left[v])]
        self.left[v] = np.zeros(len(self.left[v]), dtype=bool)
        self.left[v][x] = True
        if self._propagate([v], trail):
            return True
        for w, left in reversed(trail):
            self.left[w] = left
        return False

    def _propagate(self, queue: list[int], trail: list[tuple[int, Bools]]) -> bool:
        """From these nodes on; what nodes had before is added to the trail."""
        waiting = set(queue)
        while queue:
            v = queue.pop()
            waiting.discard(v)
            own = self.left[v]
            for e in self.near[v]:
                edge, allowed = self.edges[e], self.allowed[e]
                partner: Bools
                if edge.a == v:
                    w, partner = edge.b, np.logical_or.reduce(allowed[edge.rows[own]], axis=0)[edge.cols]
                else:
                    w, partner = edge.a, np.logical_or.reduce(allowed[:, edge.cols[own]], axis=1)[edge.rows]
                before = self.left[w]
                gone = before & ~partner
                if not gone.any():
                    continue
                after = before & partner
                trail.append((w, before))
                self.left[w] = after
                if not after.any():
                    return False
                if w not in waiting:
                    waiting.add(w)
                    queue.append(w)
        return True
