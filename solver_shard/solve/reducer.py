"""The mutable workspace of presolve: a problem that shrinks, and the record of how to undo each step.

Every step is exact: the best objective of what is left (plus ``constant``) is the best objective of the graph, and
``Undo`` turns a solution of what is left into one of the graph of the same cost and no larger use of memory at any time.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from solver_shard.choice.graph import FORBIDDEN, Ints
from solver_shard.solve.ledger import Ledger
from solver_shard.solve.problem import Edge, Problem
from solver_shard.solve.spans import Bools, at_times, canonical, over_time
from solver_shard.solve.undo import Eliminate, Follow, Restrict, Step


class NoAssignment(Exception):  # noqa: N818 - not an error of the program: an answer
    """Forbidden entries leave some node without a strategy."""


class Reducer:
    """A problem under reduction.

    Attributes:
        unary: costs per node, or None where the node is gone.
        adjacent: node -> neighbour -> edge.
        carriers: node -> list of (bytes per strategy, column).
        spans: int64[S, 3], canonical (see spans.py).
        times: int64[times].
        constant: cost of what is gone.
        steps: what was done, in order.
        touched: nodes whose surroundings changed since they were last simplified.
        changed: nodes whose surroundings changed since dominance was last looked for.
        ledger: counts what goes.
    """

    def __init__(self, problem: Problem, ledger: Ledger | None = None) -> None:
        self.problem = problem
        self.ledger = ledger = ledger or Ledger()
        ledger.edges += len(problem.edges)
        ledger.cells += sum(edge.core.size for edge in problem.edges)
        self.unary: list[Ints | None] = list(problem.unary)
        self.adjacent: list[dict[int, Edge]] = [{} for _ in range(problem.size)]
        self.times = problem.times
        self.spans = canonical(problem.spans)
        self._base = problem.base
        self._change: dict[int, int] = {}  # column -> bytes per count that join the base when it is asked for
        self.carriers: list[list[tuple[Ints, int]]] = [[] for _ in range(problem.size)]
        for carrier in problem.carriers:
            self.add_carrier(carrier.node, carrier.usage, carrier.column)
        self.constant = problem.constant
        self.steps: list[Step] = []
        self.touched: set[int] = set()
        self.changed: set[int] = set()
        self._sliced: dict[tuple[int, bytes, bytes], tuple[Ints, Ints]] = {}
        for edge in problem.edges:
            self.add_edge(edge)

    def alive(self) -> list[int]:
        return [v for v, row in enumerate(self.unary) if row is not None]

    def costs(self, v: int) -> Ints:
        row = self.unary[v]
        assert row is not None
        return row

    def size(self, v: int) -> int:
        return len(self.costs(v))

    @property
    def base(self) -> Ints:
        """Bytes in use whatever is chosen, int64[times]."""
        if self._change:
            weights = np.zeros(self.problem.width, dtype=np.int64)
            weights[list(self._change)] = list(self._change.values())
            self._base = self._base + over_time(self.spans, weights, len(self._base))
            self._change = {}
        return self._base

    def keep_times(self, keep: Bools) -> None:
        """Keep some times."""
        self.ledger.times += len(keep) - int(keep.sum())
        self._base, self.times = self.base[keep], self.times[keep]
        self.spans = at_times(self.spans, keep)

    def add_edge(self, edge: Edge) -> None:
        """Add an edge; parallel edges become one."""
        a, b = edge.a, edge.b
        known = self.adjacent[a].get(b)
        if known is not None:
            edge = add_edges(known, edge)
        self.set_edge(edge)

    def set_edge(self, edge: Edge) -> None:
        known = self.adjacent[edge.a].get(edge.b)
        if known is None:
            self.ledger.edges -= 1
        else:
            self.ledger.cells += known.core.size
        self.ledger.cells -= edge.core.size
        self.adjacent[edge.a][edge.b] = edge
        self.adjacent[edge.b][edge.a] = edge
        self.touch(edge.a, edge.b)

    def mark(self, edge: Edge) -> None:
        """Replace an edge by the same one with more known about it."""
        self.adjacent[edge.a][edge.b] = edge
        self.adjacent[edge.b][edge.a] = edge

    def drop_edge(self, a: int, b: int) -> None:
        self.ledger.edges += 1
        self.ledger.cells += self.adjacent[a][b].core.size
        del self.adjacent[a][b]
        del self.adjacent[b][a]
        self.touch(a, b)

    def touch(self, *nodes: int) -> None:
        self.touched.update(nodes)
        self.changed.update(nodes)

    def restrict(self, v: int, keep: Bools) -> None:
        """Keep some strategies of a node."""
        if keep.all():
            return
        kept = np.flatnonzero(keep)
        if len(kept) == 0:
            raise NoAssignment(v)
        self.ledger.strategies += len(keep) - len(kept)
        self.steps.append(Restrict(v, kept))
        self.unary[v] = self.costs(v)[kept]
        self.carriers[v] = [(usage[kept], column) for usage, column in self.carriers[v]]
        for edge in list(self.adjacent[v].values()):
            if edge.a == v:
                self.set_edge(self._slice(replace(edge, rows=edge.rows[kept], open=False)))
            else:
                self.set_edge(self._slice(replace(edge, cols=edge.cols[kept], open=False)))
        self.touch(v)

    def follow(self, v: int, leader: int, strategy_of: Ints) -> None:
        """Merge a node into its leader; the edge between them must allow just the pairs (x, strategy_of[x])."""
        core, rows, cols, _ = self.adjacent[leader][v].seen_from(leader)
        own = self.costs(v)[strategy_of] + core[rows, cols[strategy_of]]
        self.steps.append(Follow(v, leader, strategy_of))
        self.drop_edge(leader, v)
        self.unary[leader] = np.minimum(self.costs(leader) + own, FORBIDDEN)
        for usage, column in self.carriers[v]:
            self.add_carrier(leader, usage[strategy_of], column)
        for w in list(self.adjacent[v]):
            core, rows, cols, _ = self.adjacent[v][w].seen_from(v)
            self.drop_edge(v, w)
            if leader < w:
                self.add_edge(self._slice(Edge(a=leader, b=w, core=core, rows=rows[strategy_of], cols=cols)))
            else:
                self.add_edge(self._slice(Edge(a=w, b=leader, core=_transpose(core), rows=cols, cols=rows[strategy_of])))
        self._remove(v)

    def fix(self, v: int) -> None:
        """Remove a node with a single strategy."""
        for w in list(self.adjacent[v]):
            core, rows, cols, _ = self.adjacent[v][w].seen_from(v)
            self.unary[w] = np.minimum(self.costs(w) + core[rows[0], cols], FORBIDDEN)
            self.drop_edge(v, w)
        self.constant += int(self.costs(v)[0])
        for usage, column in self.carriers[v]:
            self._change[column] = self._change.get(column, 0) + int(usage[0])
        self.steps.append(Eliminate(v, (), (), np.zeros((), dtype=np.int64)))
        self._remove(v)

    def eliminate(self, v: int) -> None:
        """Min-plus elimination of a node with no bytes and at most two neighbours."""
        costs, around = self.costs(v), list(self.adjacent[v])
        if not around:
            best = int(costs.argmin())
            self.constant += int(costs[best])
            self.steps.append(Eliminate(v, (), (), np.array(best, dtype=np.int64)))
        elif len(around) == 1:
            a = around[0]
            core, rows, cols, _ = self.adjacent[a][v].seen_from(a)
            total = core[:, cols] + costs[None, :]
            self.steps.append(Eliminate(v, (a,), (rows,), total.argmin(axis=1)))
            self.unary[a] = np.minimum(self.costs(a) + total.min(axis=1)[rows], FORBIDDEN)
            self.drop_edge(a, v)
        else:
            a, b = sorted(around)
            left, rows, own_left, _ = self.adjacent[a][v].seen_from(a)
            right, cols, own_right, _ = self.adjacent[b][v].seen_from(b)
            total = np.full((left.shape[0], right.shape[0]), 4 * FORBIDDEN, dtype=np.int64)
            best_of = np.zeros(total.shape, dtype=np.int64)
            for x, cost in enumerate(costs.tolist()):
                candidate = left[:, own_left[x], None] + (right[:, own_right[x]] + cost)[None, :]
                better = candidate < total
                np.copyto(total, candidate, where=better)
                best_of[better] = x
            self.steps.append(Eliminate(v, (a, b), (rows, cols), best_of))
            self.drop_edge(a, v)
            self.drop_edge(b, v)
            self.add_edge(Edge(a=a, b=b, core=np.minimum(total, FORBIDDEN), rows=rows, cols=cols))
        self._remove(v)

    def add_carrier(self, v: int, usage: Ints, column: int) -> None:
        if not usage.any():
            return
        for i, (known, other) in enumerate(self.carriers[v]):
            if other == column:
                self.carriers[v][i] = (known + usage, column)
                return
        self.carriers[v].append((usage, column))

    def _remove(self, v: int) -> None:
        self.ledger.nodes += 1
        self.ledger.strategies += self.size(v)
        self.unary[v] = None
        self.carriers[v] = []
        self.touched.discard(v)
        self.changed.discard(v)

    def _slice(self, edge: Edge) -> Edge:
        """Drop core rows and columns that no strategy uses; equal slices of one core are shared."""
        used_rows, rows = np.unique(edge.rows, return_inverse=True)
        used_cols, cols = np.unique(edge.cols, return_inverse=True)
        if (len(used_rows), len(used_cols)) == edge.core.shape:
            return edge
        key = (id(edge.core), used_rows.tobytes(), used_cols.tobytes())
        if key not in self._sliced:
            self._sliced[key] = (edge.core[used_rows[:, None], used_cols[None, :]], edge.core)
        return Edge(a=edge.a, b=edge.b, core=self._sliced[key][0], rows=rows, cols=cols)


def _transpose(core: Ints) -> Ints:
    return core.T


def add_edges(left: Edge, right: Edge) -> Edge:
    """Two parallel edges as one."""
    pairs, rows = np.unique(np.stack([left.rows, right.rows], axis=1), axis=0, return_inverse=True)
    others, cols = np.unique(np.stack([left.cols, right.cols], axis=1), axis=0, return_inverse=True)
    core = left.core[pairs[:, 0, None], others[None, :, 0]] + right.core[pairs[:, 1, None], others[None, :, 1]]
    return Edge(a=left.a, b=left.b, core=np.minimum(core, FORBIDDEN), rows=rows.ravel(), cols=cols.ravel())
