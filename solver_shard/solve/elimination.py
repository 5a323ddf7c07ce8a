"""The exact minimum of a reparametrised problem, and of every strategy: nodes are eliminated one after the other in sparse tables.

    exact, work = eliminate(problem, parts, room)       # None in place of exact where that takes too many rows
    parts.constant + exact.least                        # no assignment costs less
    parts.constant + exact.extra[v][x]                  # no assignment that has strategy x of node v costs less

Message passing bounds a problem edge by edge. What several edges decide together it does not see, and on layers that share tensors that
can be most of the gap. Bucket elimination (Dechter 1999) sees all of it: to eliminate a node, all tables that mention it are joined, and
the least value over its strategies for every state of the nodes around it is a new table. Such tables grow with the product of the
strategies around a node; but costs that messages have split (``messages.Parts``) are never negative, so a state whose parts so far exceed ``room``
cannot be part of an assignment below constant + room, and is dropped. What is left are some dozens of states for each node.

A second pass, back from the last node to the first, gives every row of every table the least that all other tables add to it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver_shard.choice.graph import FORBIDDEN, Ints
from solver_shard.solve.messages import Parts
from solver_shard.solve.problem import Edge, Floats, Problem

MOST_CODES = 60 * math.log(2)
"""Logarithm of the states of a table's nodes beyond which they cannot be numbered."""

MOST_ROWS = 40_000_000
"""Rows of all joined tables together: some seconds, and about a gigabyte."""

ROW_WORK, TABLE_WORK = 3e-7, 2e-4
"""Work of a row and of a table."""

Places = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exact:
    """What elimination gave, in the units of the parts.

    Attributes:
        least: above the parts' constant, of all assignments; ``room`` where none is below that.
        extra: per node and strategy, of all assignments with it; ``room`` where none is below that.
        assignment: one that costs ``least``, or None where there is none below ``room``.
    """

    least: float
    extra: list[Floats]
    assignment: Ints | None


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Values of some states of some nodes: ``states`` int32[n, nodes], ``values`` float64[n]."""

    nodes: tuple[int, ...]
    states: Places
    values: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A node eliminated: from which tables, from which rows of each, and to which row of the result.

    Attributes:
        tables: numbers of the tables that were joined.
        result: number of the table that came out.
        rows: per table, the row of it in every row of the join.
        values: of the rows of the join.
        target: of every row of the join, its row of the result.
        best: per row of the result, the row of the join that it is.
    """

    tables: list[int]
    result: int
    rows: list[Places]
    values: Floats
    target: Places
    best: Ints


class _TooWide(Exception):
    """More rows than may be made."""


def eliminate(problem: Problem, parts: Parts, room: float) -> tuple[Exact | None, float]:
    """The exact minimum below ``room``, and the work that was spent; None in its place where there are too many rows."""
    run = _Run(problem, room)
    try:
        run.fill(parts)
        run.eliminate()
        return run.result(), run.work()
    except _TooWide:
        return None, run.work()


class _Run:
    """One elimination: all tables that were ever made, by number, and the steps that made them."""

    def __init__(self, problem: Problem, room: float) -> None:
        self.problem, self.room = problem, room
        self.sizes: list[int] = problem.sizes.tolist()
        self.logs: list[float] = np.log(problem.sizes).tolist()
        self.tables: list[_Table] = []
        self.near: list[set[int]] = [set() for _ in range(problem.size)]
        self.steps: list[_Step] = []
        self.rows = self.kept = 0

    def fill(self, parts: Parts) -> None:
        """A table for every node, whose number is the node's, then one for every edge."""
        for v, unary in enumerate(parts.unary):
            states = np.flatnonzero(unary < self.room)
            self._put((v,), states[:, None].astype(np.int32), unary[states])
        for edge, table in zip(self.problem.edges, parts.tables, strict=True):
            self._put((edge.a, edge.b), *_pairs(edge, table, parts.unary[edge.a], parts.unary[edge.b], self.room))

    def eliminate(self) -> None:
        """All nodes: always the one whose join is expected to be the smallest."""
        expected = [self._expected(v) for v in range(self.problem.size)]
        queue = [(rows, v) for v, rows in enumerate(expected)]
        heapq.heapify(queue)
        gone = [False] * self.problem.size
        while queue:
            rows, v = heapq.heappop(queue)
            if gone[v] or rows != expected[v]:
                continue
            gone[v] = True
            for w in self._eliminate(v):
                expected[w] = self._expected(w)
                heapq.heappush(queue, (expected[w], w))

    def work(self) -> float:
        """Work spent so far."""
        return ROW_WORK * self.rows + TABLE_WORK * len(self.tables)

    def _expected(self, v: int) -> tuple[float, int]:
        """Logarithm of the rows of the join of all tables with this node, if their states were independent; and its nodes."""
        total, largest = 0.0, 0.0
        seen: set[int] = set()
        for t in sorted(self.near[v]):
            rows = math.log(max(1, len(self.tables[t].values)))
            total += rows
            largest = max(largest, rows)
            for w in self.tables[t].nodes:
                total -= self.logs[w] if w in seen else 0.0
                seen.add(w)
        return max(total, largest), len(seen)

    def _put(self, nodes: tuple[int, ...], states: Places, values: Floats) -> int:
        number = len(self.tables)
        self.tables.append(_Table(nodes, states, values))
        for v in nodes:
            self.near[v].add(number)
        self._count(len(values))
        if sum(self.logs[v] for v in nodes) > MOST_CODES:
            raise _TooWide
        return number

    def _count(self, rows: int) -> None:
        self.rows += rows
        if self.rows > MOST_ROWS:
            raise _TooWide

    def _eliminate(self, v: int) -> tuple[int, ...]:
        """Eliminate one node; the nodes around it."""
        numbers = sorted(self.near[v], key=lambda t: (len(self.tables[t].values), t))
        joined = self.tables[numbers[0]]
        rows: list[Places] = [np.arange(len(joined.values), dtype=np.int32)]
        for t in numbers[1:]:
            joined, left, right = self._join(joined, self.tables[t])
            rows = [row[left] for row in rows] + [right]
        for t in numbers:
            for w in self.tables[t].nodes:
                self.near[w].discard(t)
        others = [i for i, w in enumerate(joined.nodes) if w != v]
        nodes = tuple(joined.nodes[i] for i in others)
        codes = self._codes(joined, nodes)
        order = np.lexsort((joined.values, codes))
        ranked = codes[order]
        first = np.ones(len(ranked), dtype=bool)
        first[1:] = ranked[1:] != ranked[:-1]
        best = order[first]
        target = np.empty(len(order), dtype=np.int32)
        target[order] = np.cumsum(first) - 1
        result = self._put(nodes, joined.states[best][:, others], joined.values[best])
        self.steps.append(_Step(numbers, result, rows, joined.values, target, best))
        return nodes

    def _join(self, left: _Table, right: _Table) -> tuple[_Table, Places, Places]:
        """Rows that agree on shared nodes and together stay below the room; and the row of either side in each."""
        shared = tuple(v for v in right.nodes if v in left.nodes)
        own, codes = self._codes(left, shared), self._codes(right, shared)
        # Within a state of the shared nodes rows are sorted by value, and only those that leave room are made.
        known, which = np.unique(codes, return_inverse=True)
        order = np.lexsort((right.values, which))
        starts = np.searchsorted(which[order], np.arange(len(known) + 1))
        place = np.searchsorted(known, own)
        found = np.flatnonzero(known[np.minimum(place, len(known) - 1)] == own) if len(known) else np.zeros(0, dtype=np.int64)
        begin = starts[place[found]]
        ends = _ends(right.values[order], begin, starts[place[found] + 1], self.room - left.values[found])
        counts = ends - begin
        self._count(int(counts.sum()))
        rows = np.repeat(found, counts)
        partners = order[np.repeat(begin - np.cumsum(counts) + counts, counts) + np.arange(len(rows))]
        new = [i for i, v in enumerate(right.nodes) if v not in shared]
        states = np.concatenate([left.states[rows], right.states[partners][:, new]], axis=1)
        table = _Table(left.nodes + tuple(right.nodes[i] for i in new), states, left.values[rows] + right.values[partners])
        return table, rows.astype(np.int32), partners.astype(np.int32)

    def _codes(self, table: _Table, nodes: Sequence[int]) -> Ints:
        """A number for every state of these nodes; see MOST_CODES."""
        codes = np.zeros(len(table.values), dtype=np.int64)
        for v in nodes:
            codes = codes * self.sizes[v] + table.states[:, table.nodes.index(v)]
        return codes

    def result(self) -> Exact:
        """The pass back."""
        ends = [step.result for step in self.steps if not self.tables[step.result].nodes]
        if any(not len(self.tables[t].values) for t in ends):
            return Exact(least=self.room, extra=[np.full(k, self.room) for k in self.sizes], assignment=None)
        least = sum(float(self.tables[t].values[0]) for t in ends)
        if least >= self.room:
            return Exact(least=self.room, extra=[np.full(k, self.room) for k in self.sizes], assignment=None)
        total: list[Floats] = [np.zeros(0)] * len(self.tables)  # of every row: the least of all that has it
        chosen = [0] * len(self.tables)
        for t in ends:
            total[t] = np.array([least])
        for step in reversed(self.steps):
            others = total[step.result] - self.tables[step.result].values
            whole = step.values + others[step.target]
            row = int(step.best[chosen[step.result]])
            for t, rows in zip(step.tables, step.rows, strict=True):
                total[t] = np.full(len(self.tables[t].values), self.room)
                np.minimum.at(total[t], rows, whole)
                chosen[t] = int(rows[row])
        extra = [np.full(k, self.room) for k in self.sizes]
        assignment = np.zeros(self.problem.size, dtype=np.int64)
        for v in range(self.problem.size):
            states = self.tables[v].states[:, 0]
            extra[v][states] = np.minimum(total[v], self.room)
            assignment[v] = states[chosen[v]]
        return Exact(least=least, extra=extra, assignment=assignment)


def _pairs(edge: Edge, table: Floats, first: Floats, second: Floats, room: float) -> tuple[Places, Floats]:
    """Allowed pairs of strategies that leave room."""
    core = np.where(edge.core >= FORBIDDEN, np.inf, table)
    cells = core[edge.rows[:, None], edge.cols]
    x, y = np.nonzero(cells + first[:, None] + second < room)
    return np.stack([x, y], axis=1).astype(np.int32), cells[x, y]


def _ends(values: Floats, begin: Ints, end: Ints, most: Floats) -> Ints:
    """Per range of sorted values, where those below ``most`` end: all ranges are halved at once."""
    low, high = begin.copy(), end.copy()
    while (open_ := low < high).any():
        middle = (low + high) >> 1
        below = open_ & (values[np.minimum(middle, len(values) - 1)] < most)
        low = np.where(below, middle + 1, low)
        high = np.where(open_ & ~below, middle, high)
    return low
