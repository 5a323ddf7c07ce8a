"""The exact minimum of a reparametrised problem, and of every strategy: nodes are eliminated one after the other in sparse tables.

    exact = eliminate(problem, parts, room)             # TooWide where that takes too many rows
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

MOST_CODES = 2**61
"""Numbers of states stay below this."""

MOST_ROWS = 60_000_000
"""Rows of all joined tables together: some seconds, and about a gigabyte."""

ROW_WORK, TABLE_WORK = 3e-7, 2e-4
"""Work of a row and of a table."""

Places = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exact:
    """What elimination gave, in the units of the parts.

    Attributes:
        room: what was looked for is below this.
        least: above the parts' constant, of all assignments; ``room`` where none is below that.
        extra: per node and strategy, of all assignments with it; ``room`` where none is below that.
        assignment: one that costs ``least``, or None where there is none below ``room``.
        rows: that were made on the way.
        work: spent.
    """

    room: float
    least: float
    extra: list[Floats]
    assignment: Ints | None
    rows: int
    work: float


class _Empty(Exception):
    """Nothing is below the room."""


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


class TooWide(Exception):
    """More rows than may be made; ``work`` was spent on them."""

    def __init__(self, work: float) -> None:
        super().__init__(work)
        self.work = work


def eliminate(problem: Problem, parts: Parts, room: float, most: int = MOST_ROWS) -> Exact:
    """The exact minimum below ``room``.

    Raises:
        TooWide: that takes more than so many rows.
    """
    run = _Run(problem, room, most)
    try:
        run.fill(parts)
        run.eliminate()
    except _Empty:
        return run.nothing()
    return run.result()


class _Run:
    """One elimination: all tables that were ever made, by number, and the steps that made them."""

    def __init__(self, problem: Problem, room: float, most: int) -> None:
        self.problem, self.room, self.most = problem, room, most
        self.sizes: list[int] = []
        self.logs: list[float] = []
        self.tables: list[_Table] = []
        self.near: list[set[int]] = [set() for _ in range(problem.size)]
        self.steps: list[_Step] = []
        self.left: list[Ints] = []
        self.rows = 0

    def fill(self, parts: Parts) -> None:
        """A table for every node, whose number is the node's, then one for every edge; of the states that may be below the room.

        A node that has one state left is decided: tables do not mention it.
        """
        edges = self.problem.edges
        masks = [row < self.room for row in parts.unary]
        pairs = []
        for edge, table in zip(edges, parts.tables, strict=True):
            x, y, values = _pairs(edge, table, parts.unary[edge.a], parts.unary[edge.b], self.room)
            pairs.append((x, y, values))
            self._count(len(values))
            for v, states in ((edge.a, x), (edge.b, y)):
                found = np.zeros(len(masks[v]), dtype=bool)
                found[states] = True
                masks[v] &= found
        self.left = [np.flatnonzero(mask) for mask in masks]
        self.sizes = [len(states) for states in self.left]
        self.logs = [math.log(max(1, k)) for k in self.sizes]
        place = [np.cumsum(mask) - 1 for mask in masks]
        for v, states in enumerate(self.left):
            self._put((v,), np.arange(len(states))[:, None], parts.unary[v][states])
        for edge, (x, y, values) in zip(edges, pairs, strict=True):
            both = masks[edge.a][x] & masks[edge.b][y]
            states = np.stack([place[edge.a][x[both]], place[edge.b][y[both]]], axis=1)
            self._put((edge.a, edge.b), states, values[both])

    def eliminate(self) -> None:
        """All nodes: always the one whose join is expected to be the smallest."""
        expected = [self._expected(v) for v in range(self.problem.size)]
        queue = [(rows, v) for v, rows in enumerate(expected)]
        heapq.heapify(queue)
        gone = [k == 1 for k in self.sizes]
        while queue:
            rows, v = heapq.heappop(queue)
            if gone[v] or rows != expected[v]:
                continue
            if rows[0] > math.log(self.most):
                raise TooWide(self.work())
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

    def _put(self, nodes: tuple[int, ...], states: Ints | Places, values: Floats) -> int:
        number = len(self.tables)
        open_ = [i for i, v in enumerate(nodes) if self.sizes[v] != 1]
        nodes = tuple(nodes[i] for i in open_)
        self.tables.append(_Table(nodes, states[:, open_].astype(np.int32), values))
        for v in nodes:
            self.near[v].add(number)
        self._count(len(values))
        if not len(values):
            raise _Empty
        return number

    def _count(self, rows: int) -> None:
        self.rows += rows
        if self.rows > self.most:
            raise TooWide(self.work())

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
        (codes,) = self._codes((joined,), nodes)
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
        own, codes = self._codes((left, right), shared)
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

    def _codes(self, tables: Sequence[_Table], nodes: Sequence[int]) -> list[Ints]:
        """Of the rows of each table a number for their states of these nodes: equal for equal states."""
        ends = np.cumsum([len(table.values) for table in tables])
        codes, count = np.zeros(int(ends[-1]), dtype=np.int64), 1
        for v in nodes:
            if count * self.sizes[v] > MOST_CODES:
                known, codes = np.unique(codes, return_inverse=True)
                count = len(known)
            codes = codes * self.sizes[v] + np.concatenate([table.states[:, table.nodes.index(v)] for table in tables])
            count *= self.sizes[v]
        return np.split(codes, ends[:-1])

    def result(self) -> Exact:
        """The pass back."""
        ends = [t for t, table in enumerate(self.tables) if not table.nodes]
        least = sum(float(self.tables[t].values[0]) for t in ends)
        if least >= self.room:
            return self.nothing()
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
        extra = [np.full(k, self.room) for k in self.problem.sizes.tolist()]
        assignment = np.zeros(self.problem.size, dtype=np.int64)
        for v in range(self.problem.size):
            extra[v][self.left[v]] = np.minimum(total[v], self.room)
            assignment[v] = self.left[v][chosen[v]]
        return Exact(room=self.room, least=least, extra=extra, assignment=assignment, rows=self.rows, work=self.work())

    def nothing(self) -> Exact:
        """Where no assignment is below the room."""
        extra = [np.full(k, self.room) for k in self.problem.sizes.tolist()]
        return Exact(room=self.room, least=self.room, extra=extra, assignment=None, rows=self.rows, work=self.work())


def _pairs(edge: Edge, table: Floats, first: Floats, second: Floats, room: float) -> tuple[Ints, Ints, Floats]:
    """Allowed pairs of strategies that leave room, and their cells."""
    core = np.where(edge.core >= FORBIDDEN, np.inf, table)
    cells = core[edge.rows[:, None], edge.cols]
    x, y = np.nonzero(cells + first[:, None] + second < room)
    return x, y, cells[x, y]


def _ends(values: Floats, begin: Ints, end: Ints, most: Floats) -> Ints:
    """Per range of sorted values, where those below ``most`` end: all ranges are halved at once."""
    low, high = begin.copy(), end.copy()
    while (open_ := low < high).any():
        middle = (low + high) >> 1
        below = open_ & (values[np.minimum(middle, len(values) - 1)] < most)
        low = np.where(below, middle + 1, low)
        high = np.where(open_ & ~below, middle, high)
    return low
