"""The exact minimum of a reparametrised problem, and of every strategy: nodes are eliminated one after the other in sparse tables.

    order = order_of(problem)                           # None where a problem is not narrow
    exact = eliminate(problem, parts, room, order)      # TooWide where that takes too many rows
    parts.constant + exact.least                        # no assignment costs less
    parts.constant + exact.extra[v][x]                  # no assignment that has strategy x of node v costs less

Message passing bounds a problem edge by edge. What the edges of a small circle decide together it does not see, and over the circles of
all layers that adds up to most of the gap. Bucket elimination (Dechter 1999) sees all of it: to eliminate a node, all tables that mention
it are joined, and the least value over its strategies for every state of the nodes around it is a new table. Such tables grow with the
product of the strategies around a node; but parts (``trws.Parts``) are never negative, so what cannot be part of an assignment below
constant + ``room`` is dropped, and some dozens of states are left for each node. There are three passes.

1. **Floors**: nodes are eliminated with tables that hold only what is near their own least value. That is cheap, and finds what each
   step adds to the bound, whatever is decided elsewhere: its *rise*.
2. **Up**: nodes are eliminated again. A state is dropped if its parts so far and the rises of all steps that have nothing to do with
   them reach the room.
3. **Down**: from the last node to the first, every row of every table gets the least that all other tables add to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import MIB, Bools, Ints
from solver_shard.solve import parameters as tuned
from solver_shard.solve.bounds.trws import Parts
from solver_shard.solve.problem import Edge, Floats, Problem

EXACT = 2.0**53
"""Whole numbers up to this are exact, and so are their sums."""

MOST_STATES = 2.0**61
"""Numbers of states stay below this."""


Places = NDArray[np.int32]


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """In which order nodes are eliminated.

    Attributes:
        nodes: all nodes, first to last.
        parent: per node, the first of those around it when it is eliminated; -1 where there is none.
    """

    nodes: list[int]
    parent: list[int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exact:
    """What elimination gave, in the units of the parts.

    Attributes:
        least: above the parts' constant, of all assignments; ``room`` where none is below that.
        extra: per node and strategy, of all assignments with it; ``room`` where none is below that.
        assignment: one that costs ``least``, or None where there is none below ``room``.
        work: spent.
    """

    least: float
    extra: list[Floats]
    assignment: Ints | None
    work: float


class TooWide(Exception):  # noqa: N818 - not an error: it ends one way of proving
    """More rows than may be made, or than there is time for.

    Attributes:
        least: a bound, above the parts' constant, that was found nevertheless.
        work: spent.
    """

    def __init__(self, least: float, work: float) -> None:
        super().__init__(least, work)
        self.least, self.work = least, work


def order_of(problem: Problem) -> Order | None:
    """Always the node with the fewest states of it and those around it; None where a problem is not narrow (NARROW)."""
    around: list[set[int]] = [set() for _ in range(problem.size)]
    for edge in problem.edges:
        around[edge.a].add(edge.b)
        around[edge.b].add(edge.a)
    logs = np.log2(problem.sizes).tolist()

    def weight(v: int) -> float:
        return float(logs[v] + sum(logs[w] for w in sorted(around[v])))

    weights = [weight(v) for v in range(problem.size)]
    queue = [(weight, v) for v, weight in enumerate(weights)]
    heapq.heapify(queue)
    nodes: list[int] = []
    near: list[set[int]] = [set()] * problem.size
    gone = [False] * problem.size
    while queue:
        found, v = heapq.heappop(queue)
        if gone[v] or found != weights[v]:
            continue
        if found > tuned.NARROW:
            return None
        gone[v] = True
        nodes.append(v)
        near[v] = around[v]
        for w in sorted(near[v]):
            around[w] |= near[v]
            around[w] -= {v, w}
        for w in sorted(near[v]):
            weights[w] = weight(w)
            heapq.heappush(queue, (weights[w], w))
    place = {v: i for i, v in enumerate(nodes)}
    return Order(nodes=nodes, parent=[min(near[v], key=place.__getitem__, default=-1) for v in range(problem.size)])


def eliminate(
    problem: Problem, parts: Parts, room: float, order: Order, most: int = tuned.MOST_ROWS, over: Callable[[], bool] = _never
) -> Exact:
    """The exact minimum below ``room``.

    Args:
        problem: whose edges and sizes count.
        parts: whole numbers that are never negative.
        room: a whole number; its sum with the parts' constant is below 2**53, so that all sums are exact.
        order: of the problem.
        most: rows that may be made.
        over: asked before every join whether to stop.

    Raises:
        TooWide: that takes more than so many rows, or ``over`` says so.
    """
    rises, work = np.zeros(problem.size), 0.0
    for window in tuned.FLOOR_WINDOWS:
        floors = _Floors(problem, max(1.0, np.ceil(window * room)), most // tuned.FLOOR_FEWER, over)
        try:
            floors.run(parts, order)
        except _Wide:
            if not rises.any():
                raise TooWide(float(floors.rises.sum()), work + floors.work()) from None
            break
        finally:
            work += floors.work()
        rises = floors.rises if floors.rises.sum() > rises.sum() else rises
        if not floors.capped:
            break
    up = _Up(problem, room, most, _elsewhere(rises, order), over)
    try:
        up.run(parts, order)
        exact = up.down()
    except _Empty:
        exact = up.nothing()
    except _Wide:
        raise TooWide(float(rises.sum()), work + up.work()) from None
    return replace(exact, work=work + up.work())


class _Empty(Exception):  # noqa: N818 - not an error: it ends one way of proving
    """Nothing is below the room."""


class _Wide(Exception):  # noqa: N818 - not an error: it ends one way of proving
    """More rows than may be made."""


def _elsewhere(rises: Floats, order: Order) -> tuple[Floats, Floats]:
    """Per node, what steps add that share no part with the table that its step makes, and with the tables that it joins."""
    inside, above = rises.copy(), np.zeros(len(rises))
    for v in order.nodes:
        if order.parent[v] >= 0:
            inside[order.parent[v]] += inside[v]
    for v in reversed(order.nodes):
        if order.parent[v] >= 0:
            above[v] = above[order.parent[v]] + rises[order.parent[v]]
    total = rises.sum()
    return total - inside - above, total - rises - above


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Values of some states of some nodes: ``states`` int32[n, nodes], ``values`` float64[n]."""

    nodes: tuple[int, ...]
    states: Places
    values: Floats


class _Joins:
    """Tables by number, and joins of them.

    Attributes:
        tables: a table for every node, whose number is the node's, one for every edge, then those that steps make.
        near: per node, the numbers of the tables that mention it and are not yet joined.
        left: per node, the strategies that its states stand for.
        rows: made so far.
    """

    def __init__(self, problem: Problem, most: int, over: Callable[[], bool] = _never) -> None:
        self.problem, self.most, self.over = problem, most, over
        self.tables: list[_Table] = []
        self.near: list[set[int]] = [set() for _ in range(problem.size)]
        self.left: list[Ints] = []
        self.sizes: list[int] = []
        self.rows = 0

    def work(self) -> float:
        """Work spent so far."""
        return tuned.ROW_WORK * self.rows + tuned.TABLE_WORK * len(self.tables)

    def fill(self, parts: Parts, masks: Sequence[Bools], pairs: Sequence[tuple[Ints, Ints, Floats]]) -> None:
        """The tables of nodes, of these strategies, and of edges, of these pairs of them."""
        self.left = [np.flatnonzero(mask) for mask in masks]
        self.sizes = [len(states) for states in self.left]
        if not all(self.sizes):
            raise _Empty
        place = [np.cumsum(mask) - 1 for mask in masks]
        for v, states in enumerate(self.left):
            self.put((v,), np.arange(len(states))[:, None], parts.unary[v][states])
        for edge, (x, y, values) in zip(self.problem.edges, pairs, strict=True):
            both = masks[edge.a][x] & masks[edge.b][y]
            states = np.stack([place[edge.a][x[both]], place[edge.b][y[both]]], axis=1)
            self.put((edge.a, edge.b), states, values[both])

    def put(self, nodes: Sequence[int], states: Ints | Places, values: Floats) -> int:
        """A new table; it does not mention nodes that have one state left: they are decided."""
        number = len(self.tables)
        open_ = [i for i, v in enumerate(nodes) if self.sizes[v] > 1]
        self.tables.append(_Table(tuple(nodes[i] for i in open_), states[:, open_].astype(np.int32), values))
        for v in self.tables[-1].nodes:
            self.near[v].add(number)
        return number

    def count(self, rows: int) -> None:
        """Some rows are made, if there is room and time for them."""
        self.rows += rows
        if self.rows > self.most or self.over():
            raise _Wide

    def take(self, v: int) -> list[int]:
        """The tables that mention a node, small ones first; they are joined now."""
        numbers = sorted(self.near[v], key=lambda t: (len(self.tables[t].values), t))
        for t in numbers:
            for w in self.tables[t].nodes:
                self.near[w].discard(t)
        return numbers

    def join(self, left: _Table, right: _Table, room: float) -> tuple[_Table, Places, Places]:
        """Rows that agree on shared nodes and together stay below the room; and the row of either side in each."""
        shared = tuple(v for v in right.nodes if v in left.nodes)
        own, codes = self.codes((left, right), shared)
        # Within a state of the shared nodes rows are sorted by value, and only those that leave room are made.
        known, which = np.unique(codes, return_inverse=True)
        order = np.lexsort((right.values, which))
        starts = np.searchsorted(which[order], np.arange(len(known) + 1))
        place = np.searchsorted(known, own)
        found = np.flatnonzero(known[np.minimum(place, len(known) - 1)] == own) if len(known) else np.zeros(0, dtype=np.int64)
        begin = starts[place[found]]
        counts = _ends(right.values[order], begin, starts[place[found] + 1], room - left.values[found]) - begin
        self.count(int(counts.sum()))
        rows = np.repeat(found, counts)
        partners = order[np.repeat(begin - np.cumsum(counts) + counts, counts) + np.arange(len(rows))]
        new = [i for i, v in enumerate(right.nodes) if v not in shared]
        states = np.concatenate([left.states[rows], right.states[partners][:, new]], axis=1)
        table = _Table(left.nodes + tuple(right.nodes[i] for i in new), states, left.values[rows] + right.values[partners])
        return table, rows.astype(np.int32), partners.astype(np.int32)

    def codes(self, tables: Sequence[_Table], nodes: Sequence[int]) -> list[Ints]:
        """Of the rows of each table a number for their states of these nodes: equal for equal states."""
        ends = np.cumsum([len(table.values) for table in tables])
        codes, count = np.zeros(int(ends[-1]), dtype=np.int64), 1
        for v in nodes:
            if count * self.sizes[v] > MOST_STATES:
                known, codes = np.unique(codes, return_inverse=True)
                count = len(known)
            codes = codes * self.sizes[v] + np.concatenate([table.states[:, table.nodes.index(v)] for table in tables])
            count *= self.sizes[v]
        return np.split(codes, ends[:-1])

    def least(self, joined: _Table, v: int) -> tuple[tuple[int, ...], list[int], Ints, Places]:
        """(Nodes but v, their columns, the row of least value for each of their states, which of these each row belongs to)."""
        others = [i for i, w in enumerate(joined.nodes) if w != v]
        nodes = tuple(joined.nodes[i] for i in others)
        (codes,) = self.codes((joined,), nodes)
        order = np.lexsort((joined.values, codes))
        ranked = codes[order]
        first = np.ones(len(ranked), dtype=bool)
        first[1:] = ranked[1:] != ranked[:-1]
        target = np.empty(len(order), dtype=np.int32)
        target[order] = np.cumsum(first) - 1
        return nodes, others, order[first], target


class _Floors(_Joins):
    """The first pass.

    Attributes:
        rises: per node, what its step adds to the bound.
        capped: whether a rise may be larger with a larger window.
    """

    def __init__(self, problem: Problem, window: float, most: int, over: Callable[[], bool] = _never) -> None:
        super().__init__(problem, most, over)
        self.window = window
        self.rises = np.zeros(problem.size)
        self.capped = False
        self.missing: list[float] = []
        """Per table, what a state costs at least that is not in it."""

    def run(self, parts: Parts, order: Order) -> None:
        """Eliminate all nodes; every table's least value is taken out of it, and is the rise of the step that made it.

        What is not in a table has at least ``missing`` in the parts that the table is made of. So each is cut for itself: a strategy that
        has no partner in one table stays in the others, and no node counts as decided.
        """
        pairs = []
        for edge, table in zip(self.problem.edges, parts.tables, strict=True):
            pairs.append(_pairs(edge, table, self.window))
            self.count(len(pairs[-1][0]))
        self.fill(parts, [np.ones(int(k), dtype=bool) for k in self.problem.sizes], pairs)
        self.missing = [self.window] * len(self.tables)
        for v in order.nodes:
            self._step(v)

    def _step(self, v: int) -> None:
        numbers = self.take(v)
        if not numbers:
            return
        joined = self.tables[numbers[0]]
        missing = min(self.window, *(self.missing[t] for t in numbers))
        for t in numbers[1:]:
            joined, _, _ = self.join(joined, self.tables[t], self.window)
        nodes, others, best, _ = self.least(joined, v)
        values = joined.values[best]
        rise = min(float(values.min(initial=np.inf)), missing)
        self.capped |= rise == missing
        self.rises[v] = rise
        if len(values):  # with nothing left it says nothing of any state
            self.put(nodes, joined.states[best][:, others], values - rise)
            self.missing.append(missing - rise)


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


class _Up(_Joins):
    """The second and the third pass; ``elsewhere``: see the function of that name."""

    def __init__(
        self, problem: Problem, room: float, most: int, elsewhere: tuple[Floats, Floats], over: Callable[[], bool] = _never
    ) -> None:
        super().__init__(problem, most, over)
        self.room, self.elsewhere = room, elsewhere
        self.steps: list[_Step] = []

    def run(self, parts: Parts, order: Order) -> None:
        """Eliminate all nodes."""
        place = np.empty(self.problem.size, dtype=np.int64)
        place[order.nodes] = np.arange(self.problem.size)
        rooms = self.room - self.elsewhere[1]
        masks = [row < room for row, room in zip(parts.unary, rooms, strict=True)]
        pairs = []
        for edge, table in zip(self.problem.edges, parts.tables, strict=True):
            first = edge.a if place[edge.a] < place[edge.b] else edge.b
            x, y, values = _pairs(edge, table, rooms[first])
            both = masks[edge.a][x] & masks[edge.b][y]
            pairs.append((x[both], y[both], values[both]))
            self.count(len(pairs[-1][0]))
        for edge, (x, y, _) in zip(self.problem.edges, pairs, strict=True):
            for v, states in ((edge.a, x), (edge.b, y)):
                found = np.zeros(len(masks[v]), dtype=bool)
                found[states] = True
                masks[v] &= found
        self.fill(parts, masks, pairs)
        if not all(len(table.values) for table in self.tables):
            raise _Empty
        for v in order.nodes:
            if self.sizes[v] > 1:
                self._step(v)

    def _step(self, v: int) -> None:
        numbers = self.take(v)
        joined = self.tables[numbers[0]]
        rows: list[Places] = [np.arange(len(joined.values), dtype=np.int32)]
        for t in numbers[1:]:
            joined, left, right = self.join(joined, self.tables[t], self.room - self.elsewhere[0][v])
            rows = [row[left] for row in rows] + [right]
        if not len(joined.values):
            raise _Empty
        nodes, others, best, target = self.least(joined, v)
        result = self.put(nodes, joined.states[best][:, others], joined.values[best])
        self.steps.append(_Step(numbers, result, rows, joined.values, target, best))

    def down(self) -> Exact:
        """The third pass."""
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
        for v, left in enumerate(self.left):
            extra[v][left] = np.minimum(total[v], self.room)
            assignment[v] = left[chosen[v]]
        return Exact(least=least, extra=extra, assignment=assignment, work=0.0)

    def nothing(self) -> Exact:
        """Where no assignment is below the room."""
        extra = [np.full(k, self.room) for k in self.problem.sizes.tolist()]
        return Exact(least=self.room, extra=extra, assignment=None, work=0.0)


def _pairs(edge: Edge, table: Floats, room: float) -> tuple[Ints, Ints, Floats]:
    """Allowed pairs of strategies below the room, and their cells."""
    core = np.where((edge.core < FORBIDDEN) & (table < room), table, np.inf)
    cells = core[edge.rows[:, None], edge.cols]
    x, y = np.nonzero(cells < room)
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


class CuttingPlanes:
    """Cutting planes on the bound as a function of the multipliers (Kelley 1960).

        planes.add(assignment, prices)
        bound, prices = planes.best(incumbent, near, reach)     # what the planes allow at best, and where

    Every allowed assignment is one: at multipliers l the bound is at most its cost plus, over all times, l_t (bytes at t - limit). The best
    multipliers for all planes so far, or half way between those and the best ones known, are tried next.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.times: list[int] = []
        self.planes: list[tuple[int, Ints]] = []

    def add(self, assignment: Ints, prices: Mapping[int, float]) -> None:
        """The plane of an assignment; its fullest time may get a multiplier, as may those that have one."""
        profile = self.problem.profile(assignment)
        self.planes.append((self.problem.cost(assignment), profile))
        labels = self.problem.times
        wanted = [t for t in np.searchsorted(labels, sorted(prices)).tolist() if t < len(labels)]
        if self.problem.limit is not None and profile.max(initial=0) > self.problem.limit:
            wanted.append(int(profile.argmax()))
        self.times += [t for t in dict.fromkeys(wanted) if t not in self.times]

    def best(self, most: float, near: Mapping[int, float], reach: float) -> tuple[float, dict[int, float]] | None:
        """(The bound, the multipliers) that the planes allow at best.

        Args:
            most: what the bound is at most: the cost of an incumbent.
            near: multipliers to which positive ones stay near: few planes say little of what is far.
            reach: the factor within which they stay.
        """
        solver = pywraplp.Solver.CreateSolver("GLOP")
        infinity, unit = solver.infinity(), max(abs(most), 1.0) / 1e4
        scale = MIB / unit
        labels = self.problem.times[self.times].tolist()
        known = [near.get(t, 0.0) * scale for t in labels]
        multipliers = [solver.NumVar(k / reach, k * reach if k > 0 else infinity, "") for k in known]
        bound = solver.NumVar(-infinity, most / unit, "")
        limit = self.problem.limit or 0
        for cost, profile in self.planes:
            row = solver.Constraint(-infinity, cost / unit)
            row.SetCoefficient(bound, 1.0)
            for multiplier, t in zip(multipliers, self.times, strict=True):
                row.SetCoefficient(multiplier, -(int(profile[t]) - limit) / MIB)
        prices = highest(solver, bound, dict(zip(labels, multipliers, strict=True)), limit, scale)
        return None if prices is None else (bound.solution_value() * unit, prices)


def highest(
    solver: pywraplp.Solver, bound: pywraplp.Variable, multipliers: Mapping[int, pywraplp.Variable], limit: int, scale: float
) -> dict[int, float] | None:
    """The positive multipliers, by label of their time, at which planes allow the highest bound; None where the program has no optimum.

    Args:
        scale: what the program's multipliers are times those of the problem.
    """
    objective = solver.Objective()
    objective.SetMaximization()
    objective.SetCoefficient(bound, 1.0)
    for multiplier in multipliers.values():  # of the best ones the least: beyond them lies nothing that is known
        objective.SetCoefficient(multiplier, -tuned.PLANES_TIE * max(limit, 1) / MIB)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    prices = {t: multiplier.solution_value() / scale for t, multiplier in multipliers.items()}
    return {t: price for t, price in prices.items() if price > 0}


def between(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """Multipliers half way between two."""
    return {t: (one.get(t, 0.0) + other.get(t, 0.0)) / 2 for t in sorted({*one, *other})}
