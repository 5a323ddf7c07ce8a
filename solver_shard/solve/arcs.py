"""Arc consistency that remembers why: which constraints made the last strategy of a node go.

Constraints are masks on nodes and edges that may be dropped. A strategy goes when a kept constraint's mask forbids it, or when a kept edge
leaves it without a partner. Each remembers the one reason for which it went, so that an emptied node leads back to the constraints that
emptied it: these alone empty it too. That is a conflict, though seldom a smallest one (see ``solve.conflict``), and it costs
milliseconds. Not every conflict shows in this way: where nothing is emptied, a search has to decide.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from solver_shard.choice.graph import FORBIDDEN, ChoiceGraph, Ints
from solver_shard.solve.problem import compact_table
from solver_shard.solve.spans import Bools

_ALIVE, _ALWAYS = -1, -2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Constraint:
    """Something that may be dropped: a pin, or an op of a template.

        Constraint(name="lm_head.weight=S(0),R", allowed={3: np.array([False, True, True])})

    Attributes:
        name: for messages.
        allowed: node -> bool[strategies of the node] that may be chosen while it is kept.
        edges: positions of edges of the graph that hold only while it is kept; no edge is of two constraints.
    """

    name: str
    allowed: Mapping[int, Bools] = field(default_factory=dict)
    edges: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Arc:
    """An edge that forbids something: ``allowed[rows[x], cols[y]]`` for the strategies x of ``a`` and y of ``b``."""

    a: int
    b: int
    allowed: Bools
    rows: Ints
    cols: Ints
    owner: int
    """Position of the constraint that it is of, or -1."""

    def seen_from(self, v: int) -> tuple[Bools, Ints, Ints, int]:
        """(allowed, rows, cols, neighbour) with v on the first axis."""
        return (self.allowed, self.rows, self.cols, self.b) if v == self.a else (self.allowed.T, self.cols, self.rows, self.a)


@dataclass(frozen=True, slots=True, eq=False)
class Left:
    """What arc consistency leaves: the strategies of every node; or, where ``core`` is not None, nothing, because of these constraints."""

    alive: list[Bools]
    core: tuple[int, ...] | None = None


class Arcs:
    """The forbidden pairs of a graph, made consistent once without any constraint and then from there for each set of them."""

    def __init__(self, graph: ChoiceGraph, constraints: Sequence[Constraint]) -> None:
        self.constraints = constraints
        owner = {e: k for k, constraint in enumerate(constraints) for e in constraint.edges}
        compact: dict[int, tuple[Ints, Ints, Ints] | None] = {}
        self.arcs: list[Arc] = []
        self.around: list[list[int]] = [[] for _ in range(graph.size)]
        for e, ((u, v), t) in enumerate(zip(graph.edges.tolist(), graph.edge_tables.tolist(), strict=True)):
            if t not in compact:
                forbidden = graph.tables[t] >= FORBIDDEN
                compact[t] = compact_table(forbidden.astype(np.int64)) if forbidden.any() else None
            found = compact[t]
            if found is None:
                continue
            self.around[u].append(len(self.arcs))
            self.around[v].append(len(self.arcs))
            self.arcs.append(Arc(u, v, found[0] == 0, found[1], found[2], owner.get(e, -1)))
        self.alive: list[Bools] = [graph.node_costs(v) < FORBIDDEN for v in range(graph.size)]
        cause = [np.where(row, _ALIVE, _ALWAYS) for row in self.alive]
        self.never = self._propagate(self.alive, cause, list(range(graph.size)), frozenset()) is not None
        """No assignment even without all constraints."""

    def left(self, kept: Sequence[int]) -> Left:
        """What these constraints leave together."""
        if self.never:
            return Left(self.alive, ())
        alive = [row.copy() for row in self.alive]
        cause = [np.where(row, _ALIVE, _ALWAYS) for row in alive]
        start: list[int] = []
        for k in kept:
            for v, mask in self.constraints[k].allowed.items():
                cause[v][alive[v] & ~mask] = k
                alive[v] &= mask
                start.append(v)
        for v in start:
            if not alive[v].any():
                return Left(alive, self._because(v, cause))
        own = frozenset(kept)
        start += [v for arc in self.arcs if arc.owner in own for v in (arc.a, arc.b)]
        emptied = self._propagate(alive, cause, list(dict.fromkeys(start)), own)
        return Left(alive, None if emptied is None else self._because(emptied, cause))

    def _propagate(self, alive: list[Bools], cause: list[Ints], start: list[int], kept: frozenset[int]) -> int | None:
        """From these nodes on; the node that was emptied, or None."""
        queue, waiting = deque(start), set(start)
        while queue:
            v = queue.popleft()
            waiting.discard(v)
            for e in self.around[v]:
                arc = self.arcs[e]
                if arc.owner >= 0 and arc.owner not in kept:
                    continue
                allowed, own, theirs, w = arc.seen_from(v)
                present = np.zeros(allowed.shape[0], dtype=bool)
                present[own[alive[v]]] = True
                supported: Bools = np.logical_or.reduce(allowed[present], axis=0)
                dead = alive[w] & ~supported[theirs]
                if not dead.any():
                    continue
                alive[w] = alive[w] & ~dead
                cause[w][dead] = len(self.constraints) + e
                if not alive[w].any():
                    return w
                if w not in waiting:
                    waiting.add(w)
                    queue.append(w)
        return None

    def _because(self, emptied: int, cause: list[Ints]) -> tuple[int, ...]:
        """The constraints that the loss of all of a node's strategies rests on."""
        found: set[int] = set()
        seen = {emptied: np.ones(len(cause[emptied]), dtype=bool)}
        todo = [(emptied, seen[emptied].copy())]
        while todo:
            v, gone = todo.pop()
            for reason in np.unique(cause[v][gone]).tolist():
                if 0 <= reason < len(self.constraints):
                    found.add(reason)
                elif reason >= 0:
                    arc = self.arcs[reason - len(self.constraints)]
                    found |= {arc.owner} - {-1}
                    allowed, own, theirs, w = arc.seen_from(v)
                    lost = own[gone & (cause[v] == reason)]
                    possible: Bools = np.logical_or.reduce(allowed[lost], axis=0)
                    partners = possible[theirs]  # all of them had gone before
                    known = seen.setdefault(w, np.zeros(len(cause[w]), dtype=bool))
                    fresh = partners & ~known
                    if fresh.any():
                        seen[w] = known | fresh
                        todo.append((w, fresh))
        return tuple(sorted(found))
