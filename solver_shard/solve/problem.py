"""The solver's own form of a choice graph: compact tables, memory as carriers and spans of time.

A **carrier** is a vector of bytes over the strategies of one node and a column: how many times those bytes are in use at each
kept time, stored as intervals (problem.py). A node that stands for several tensors, or for several copies of a layer, has several
carriers; carriers that are in use at the same times share a column.

An edge's table is ``core[rows[x], cols[y]]``: strategies that a neighbour cannot tell apart share a row. On sharding
graphs cores are several times smaller than their tables, and shared between edges.

A **column** says how many times something is in use at each time. It is stored as spans, rows (column, start, stop) of an int64[S, 3]
array: half-open intervals over the positions of the kept times, so that 65,000 nodes over 40,000 times need no matrix. Spans of one column
may overlap and then add up. What depends on a weight per column (bytes, multipliers) is one pass over the spans: a difference array and its
cumulative sum.

**Windows** (``choice_graph.Loads``) stay as they are, with the problem's nodes in place of the graph's; ``Problem.priced`` is a problem
without them that never costs more.

>>> spans = np.array([[0, 0, 3], [0, 2, 4], [1, 1, 2]])
>>> counts(spans, times=4, columns=2).T
array([[1, 1, 2, 1],
       [0, 1, 0, 0]])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.errors import InternalError
from solver_shard.graph.choice_graph import MIB, Bools, ChoiceGraph, Ints, Loads, exact_sum
from solver_shard.solve import parameters as tuned

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edge:
    """Table ``core[rows[x], cols[y]]`` between nodes a < b; every row and column of the core is used.

    ``core`` is int64[p, q], FORBIDDEN where the pair may not be chosen; ``rows`` int64[strategies of a]; ``cols``
    int64[strategies of b].
    """

    a: int
    b: int
    core: Ints
    rows: Ints
    cols: Ints

    def seen_from(self, v: int) -> tuple[Ints, Ints, Ints, int]:
        """(core, rows, cols, neighbour) with v on the first axis."""
        if v == self.a:
            return self.core, self.rows, self.cols, self.b
        return self.core.T, self.cols, self.rows, self.a

    def table(self) -> Ints:
        """The full table, int64[strategies of a, strategies of b]."""
        return self.core[self.rows[:, None], self.cols[None, :]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Carrier:
    """Bytes per strategy of ``node`` (int64) and the column of ``Problem.spans`` that says when they count."""

    node: int
    usage: Ints
    column: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Minimise ``cost + weight * peak // 2**20``; cost = constant + unary + edges + windows; peak = largest profile, at most ``limit``.

    Attributes:
        unary: int64 per strategy and node.
        edges: no two between the same nodes after presolve.
        carriers: see the module.
        spans: int64[S, 3], rows (column, start, stop) over positions in ``times``; see problem.py.
        base: int64[times], bytes that are in use whatever is chosen.
        times: int64[times], labels that survive presolve.
        constant: added to every cost. A cost of ``constant`` + FORBIDDEN or more counts as forbidden.
        limit: bytes, or None.
        weight: of the peak in the objective, per 2**20 bytes; 2**20 without costs is the objective "memory".
        loads: of windows; None where all costs add up. A forbidden pair is so in ``edges``.
        sizes: strategies per node.
        offsets: int64[nodes + 1], where the strategies of each node begin among all.
        columns: int64[carriers], the column of each carrier.
    """

    unary: tuple[Ints, ...]
    edges: tuple[Edge, ...]
    carriers: tuple[Carrier, ...]
    spans: Ints
    base: Ints
    times: Ints
    constant: int = 0
    limit: int | None = None
    weight: int = 0
    loads: Loads | None = None
    sizes: Ints = field(init=False)
    offsets: Ints = field(init=False)
    columns: Ints = field(init=False)

    def __post_init__(self) -> None:
        sizes = np.array([len(row) for row in self.unary], dtype=np.int64)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "offsets", starts_of(sizes))
        object.__setattr__(self, "columns", np.array([c.column for c in self.carriers], dtype=np.int64))

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.unary)

    def cost(self, assignment: Ints) -> int:
        """Exact cost without the peak; at least FORBIDDEN when a forbidden pair is chosen."""
        plain = self.plain(assignment)
        return plain if self.loads is None else plain + exact_sum(self.loads.times(assignment))

    def plain(self, assignment: Ints) -> int:
        """The cost without the windows."""
        own = exact_sum(self._unary[self.offsets[:-1] + assignment])
        if not self.edges:
            return self.constant + own
        cells, cores, widths, (rows, row_at, left), (cols, col_at, right) = self._tables
        paid = cells[cores + rows[row_at + assignment[left]] * widths + cols[col_at + assignment[right]]]
        return self.constant + own + exact_sum(paid)

    @cached_property
    def _unary(self) -> Ints:
        return np.concatenate([np.zeros(0, dtype=np.int64), *self.unary])

    @cached_property
    def _tables(self) -> tuple[Ints, Ints, Ints, tuple[Ints, Ints, Ints], tuple[Ints, Ints, Ints]]:
        """All cores in a row, where each edge's begins and how wide it is; the same of rows and columns, with the edge's node."""
        cells, cores = _in_a_row([edge.core for edge in self.edges])
        rows, row_at = _in_a_row([edge.rows for edge in self.edges])
        cols, col_at = _in_a_row([edge.cols for edge in self.edges])
        ends = np.array([(edge.a, edge.b, edge.core.shape[1]) for edge in self.edges], dtype=np.int64)
        return cells, cores, ends[:, 2], (rows, row_at, ends[:, 0]), (cols, col_at, ends[:, 1])

    def profile(self, assignment: Ints) -> Ints:
        """Bytes in use at each kept time, int64[times]."""
        return self._over_time(self._usages[self._usage_offsets + assignment[self._carrier_nodes]])

    @cached_property
    def pairs(self) -> int:
        """Entries of all cores, once per edge."""
        return sum(edge.core.size for edge in self.edges)

    @cached_property
    def width(self) -> int:
        """Number of columns."""
        return int(max(self.columns.max(initial=-1), self.spans[:, 0].max(initial=-1))) + 1

    @cached_property
    def mult(self) -> Ints:
        """The counts as a matrix, int64[times, columns]; for problems that are small.

        Raises:
            InternalError: it would not be small.
        """
        if len(self.base) * self.width > tuned.MAX_DENSE:
            raise InternalError(f"counts of {len(self.base)} times x {self.width} columns asked for as a matrix; use spans or rows")
        return counts(self.spans, len(self.base), self.width)

    def rows(self, where: Ints) -> Ints:
        """The counts at some times only, int64[len(where), columns]."""
        if len(self.base) * self.width <= tuned.SMALL_DENSE:
            return self.mult[where]
        return counts_at(self.spans, np.asarray(where, dtype=np.int64), self.width)

    def allowed(self, assignment: Ints) -> bool:
        """Whether no forbidden strategy or pair is chosen."""
        return self.plain(assignment) - self.constant < FORBIDDEN

    def value(self, assignment: Ints) -> int | None:
        """Exact objective, or None where the assignment is forbidden or above the limit."""
        peak = int(self.profile(assignment).max(initial=0))
        if not self.allowed(assignment) or (self.limit is not None and peak > self.limit):
            return None
        return self.cost(assignment) + self.weight * peak // MIB

    def whole(self, bound: float) -> int:
        """The objective that a bound on cost + weight * peak / 2**20 proves; the objective rounds that sum down."""
        return int(np.floor(bound)) if self.weight % MIB else int(np.ceil(bound))

    def ceiling(self) -> int:
        """The limit, or what no peak exceeds."""
        if not len(self.base):
            return 0 if self.limit is None else self.limit
        most = int(self._over_time(self._extreme(np.maximum)).max())
        return most if self.limit is None else min(most, self.limit)

    def most(self) -> int:
        """No allowed assignment within the limit has a larger objective."""
        total = self.constant + sum(int(np.where(row < FORBIDDEN, row, 0).max()) for row in self.unary)
        total += sum(int(np.where(e.core < FORBIDDEN, e.core, 0).max()) for e in self.edges)
        total += 0 if self.loads is None else self.loads.most()
        return total + self.weight * self.ceiling() // MIB

    def priced(self, weights: Ints) -> Problem:
        """Without windows, never costing more: each term of a window counts with its weight (int64[terms]), see ``ChoiceGraph.priced``."""
        if self.loads is None:
            return self
        own, joint = self.loads.together(weights)
        unary = [row if v not in own else _plus(row, own[v]) for v, row in enumerate(self.unary)]
        known: dict[tuple[int, ...], tuple[Ints, Ints, Ints]] = {}
        edges = []
        for edge in self.edges:
            more = joint.pop((edge.a, edge.b), None)
            if more is None:
                edges.append(edge)
                continue
            key = id(edge.core), id(edge.rows), id(edge.cols), id(more)
            if key not in known:
                known[key] = compact_table(_plus(edge.table(), more))
            core, rows, cols = known[key]
            edges.append(Edge(a=edge.a, b=edge.b, core=core, rows=rows, cols=cols))
        for (a, b), more in joint.items():
            if (id(more),) not in known:
                known[id(more),] = compact_table(more)
            core, rows, cols = known[id(more),]
            edges.append(Edge(a=a, b=b, core=core, rows=rows, cols=cols))
        constant = self.constant + self.loads.constant(weights)
        return replace(self, unary=tuple(unary), edges=tuple(edges), constant=constant, loads=None)

    def partly(self, weights: Ints, whole: Sequence[int]) -> tuple[Problem, Ints]:
        """With these windows only, the others priced by the weights of their terms; and the weights of the terms that are left."""
        assert self.loads is not None
        loads, terms = self.loads.only(whole)
        others = weights.copy()
        others[terms] = 0
        return replace(self.priced(others), loads=loads if len(whole) else None), weights[terms]

    def least(self) -> int:
        """A simple lower bound on the peak: every node at its smallest usage."""
        return int(self._over_time(self._extreme(np.minimum)).max(initial=0))

    @cached_property
    def _usages(self) -> Ints:
        return np.concatenate([np.zeros(0, dtype=np.int64), *[c.usage for c in self.carriers]])

    @cached_property
    def _usage_offsets(self) -> Ints:
        return np.cumsum([0, *[len(c.usage) for c in self.carriers[:-1]]], dtype=np.int64)[: len(self.carriers)]

    @cached_property
    def _carrier_nodes(self) -> Ints:
        return np.array([c.node for c in self.carriers], dtype=np.int64)

    def _extreme(self, which: np.ufunc) -> Ints:
        """Least or largest bytes of each carrier."""
        result: Ints = which.reduceat(self._usages, self._usage_offsets) if self.carriers else np.zeros(0, dtype=np.int64)
        return result

    def _over_time(self, used: Ints) -> Ints:
        """Bytes in use at each time where each carrier has so many."""
        total = np.zeros(self.width, dtype=np.int64)
        np.add.at(total, self.columns, used)
        return self.base + over_time(self.spans, total, len(self.base))


def _plus(costs: Ints, more: Ints) -> Ints:
    """Costs and what is paid besides; what is forbidden stays so, and nothing else becomes so."""
    return np.where(costs >= FORBIDDEN, FORBIDDEN, np.minimum(costs + more, FORBIDDEN - 1))


def starts_of(lengths: Ints) -> Ints:
    """Where runs of these lengths begin, end to end, and where the last one ends: int64[runs + 1]."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)]).astype(np.int64)


def within(lengths: Ints) -> Ints:
    """0, 1, ... within each run of the given lengths."""
    return np.arange(int(lengths.sum())) - np.repeat(starts_of(lengths)[:-1], lengths)


def from_graph(
    graph: ChoiceGraph, *, limit: int | None, weight: int = 0, costs_count: bool = True, memory_counts: bool = True
) -> tuple[Problem, Ints]:
    """The problem of a graph, strategy for strategy, and the graph's node behind each of its nodes.

    Nodes are ordered by the time at which they first live: message passing along time needs several times fewer sweeps than in
    other orders. Equal cores are shared; parallel edges are not yet summed.

    Args:
        graph: a valid graph.
        limit: memory limit in bytes; replaces the graph's.
        weight: of the peak, per MiB.
        costs_count: if false, all costs but FORBIDDEN are taken as 0.
        memory_counts: if false, no node uses any bytes.
    """
    order = np.argsort(_starts(graph), kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(graph.size)
    costs = graph.costs if costs_count else np.where(graph.costs >= FORBIDDEN, FORBIDDEN, 0)
    unary = tuple(costs[graph.offsets[v] : graph.offsets[v + 1]] for v in order.tolist())
    compact: dict[int, tuple[Ints, Ints, Ints]] = {}
    edges = []
    for (u, v), t in zip(rank[graph.edges].tolist(), graph.edge_tables.tolist(), strict=True):
        turned = u > v
        key = 2 * t + turned
        if key not in compact:
            table = graph.tables[t] if costs_count else np.where(graph.tables[t] >= FORBIDDEN, FORBIDDEN, 0)
            compact[key] = compact_table(table.T if turned else table)
        core, rows, cols = compact[key]
        edges.append(Edge(a=min(u, v), b=max(u, v), core=core, rows=rows, cols=cols))
    if memory_counts:
        spans, times, columns = _memory(graph)
    else:
        spans, times, columns = np.zeros((0, 3), dtype=np.int64), np.zeros(0, dtype=np.int64), np.full(graph.size, -1, dtype=np.int64)
    carriers = tuple(
        Carrier(node=i, usage=graph.node_usages(v), column=column)
        for i, (v, column) in enumerate(zip(order.tolist(), columns[order].tolist(), strict=True))
        if column >= 0
    )
    problem = Problem(
        unary=unary,
        edges=tuple(edges),
        carriers=carriers,
        spans=spans,
        base=np.zeros(len(times), dtype=np.int64),
        times=times,
        limit=limit,
        weight=weight,
        loads=graph.loads.substituted(rank.tolist(), [None] * graph.size) if graph.loads is not None and costs_count else None,
    )
    return problem, order


def _memory(graph: ChoiceGraph) -> tuple[Ints, Ints, Ints]:
    """(spans, the kept times, column of each node or -1 where it never uses any bytes).

    Use only grows where an interval starts, so the starts are all the times that can be a peak; those that another one covers are
    dropped as well.
    """
    owner = np.repeat(np.arange(graph.size), np.diff(graph.interval_offsets))
    uses = np.maximum.reduceat(graph.usages, graph.offsets[:-1]) > 0 if graph.size else np.zeros(0, dtype=bool)
    live = uses[owner] & (graph.intervals[:, 0] < graph.intervals[:, 1])
    intervals = graph.intervals[live]
    times = np.unique(intervals[:, 0])
    spans = np.concatenate([owner[live, None], np.searchsorted(times, intervals)], axis=1)
    spans, columns = shared(spans, graph.size)
    for keep in (uncovered, lambda spans, base: between(spans, len(base))):
        kept = keep(spans, np.zeros(len(times), dtype=np.int64))
        times, spans = times[kept], at_times(spans, kept)
    spans, place = shared(spans, int(columns.max(initial=-1)) + 1)
    return spans, times, np.where(columns >= 0, place[columns], -1) if len(place) else columns


def _starts(graph: ChoiceGraph) -> Floats:
    """First live time of each node; one that never lives takes the earliest of its neighbours'."""
    start = np.full(graph.size, np.inf)
    np.minimum.at(start, np.repeat(np.arange(graph.size), np.diff(graph.interval_offsets)), graph.intervals[:, 0].astype(np.float64))
    stop = np.zeros(graph.size)
    np.maximum.at(stop, np.repeat(np.arange(graph.size), np.diff(graph.interval_offsets)), graph.intervals[:, 1].astype(np.float64))
    known = np.isfinite(start)
    while not known.all() and len(graph.edges):
        found = start.copy()
        for a, b in ((0, 1), (1, 0)):
            np.minimum.at(found, graph.edges[:, a], start[graph.edges[:, b]])
        found[known] = start[known]
        if not (np.isfinite(found) & ~known).any():
            break
        start, known = found, np.isfinite(found)
    return start + stop / (4 * max(float(stop.max(initial=0)), 1.0))


def _in_a_row(arrays: list[Ints]) -> tuple[Ints, Ints]:
    """The distinct arrays flat one after the other, and where each one begins."""
    known: dict[int, int] = {}
    distinct: list[Ints] = []
    at, end = [], 0
    for array in arrays:
        if id(array) not in known:
            known[id(array)] = end
            distinct.append(array.ravel())
            end += array.size
        at.append(known[id(array)])
    return np.concatenate(distinct), np.array(at, dtype=np.int64)


def compact_table(table: Ints) -> tuple[Ints, Ints, Ints]:
    """(core, rows, cols) with table == core[rows][:, cols] and no two equal rows or columns in the core."""
    table = np.minimum(table, FORBIDDEN)
    first, rows = distinct(table)
    core = table[first]
    first, cols = distinct(core.T)
    return np.ascontiguousarray(core[:, first]), rows, cols


def compact_edge(edge: Edge) -> Edge:
    """The same edge with equal rows and columns of its core made one."""
    core, rows, cols = compact_table(edge.core)
    if core.shape == edge.core.shape:
        return edge
    return Edge(a=edge.a, b=edge.b, core=core, rows=rows[edge.rows], cols=cols[edge.cols])


def distinct(table: Ints) -> tuple[Ints, Ints]:
    """First positions of the distinct rows (in order of first appearance) and the distinct row of each row."""
    known: dict[bytes, int] = {}
    first: list[int] = []
    which = np.empty(len(table), dtype=np.int64)
    for x, row in enumerate(np.ascontiguousarray(table)):
        key = row.tobytes()
        if key not in known:
            known[key] = len(first)
            first.append(x)
        which[x] = known[key]
    return np.array(first, dtype=np.int64), which


def canonical(spans: Ints) -> Ints:
    """The same counts with the fewest spans, sorted by column, start and stop; in a column no span stops where one starts.

    Only the numbers of spans that start and that stop at a time matter for the counts, so the first start of a column is paired
    with its first stop, and so on.
    """
    if not len(spans):
        return spans.reshape(0, 3)
    columns = np.concatenate([spans[:, 0], spans[:, 0]])
    at = np.concatenate([spans[:, 1], spans[:, 2]])
    change = np.repeat(np.array([1, -1], dtype=np.int64), len(spans))
    order = np.lexsort((at, columns))
    columns, at = columns[order], at[order]
    first = np.flatnonzero(np.r_[True, (columns[1:] != columns[:-1]) | (at[1:] != at[:-1])])
    change = np.add.reduceat(change[order], first)
    columns, at = columns[first], at[first]
    starts, stops = np.maximum(change, 0), np.maximum(-change, 0)
    return np.stack([np.repeat(columns, starts), np.repeat(at, starts), np.repeat(at, stops)], axis=1)


def over_time(spans: Ints, weights: Ints, times: int) -> Ints:
    """Sum over columns of count x weight at each time, int64[times]; ``weights`` has one per column."""
    change = np.zeros(times + 1, dtype=np.int64)
    each = weights[spans[:, 0]]
    np.add.at(change, spans[:, 1], each)
    np.subtract.at(change, spans[:, 2], each)
    result: Ints = np.cumsum(change[:-1])
    return result


def counts(spans: Ints, times: int, columns: int) -> Ints:
    """The matrix of counts, int64[times, columns]."""
    change = np.zeros((times + 1, columns), dtype=np.int64)
    np.add.at(change, (spans[:, 1], spans[:, 0]), 1)
    np.subtract.at(change, (spans[:, 2], spans[:, 0]), 1)
    result: Ints = np.cumsum(change[:-1], axis=0)
    return result


def counts_at(spans: Ints, where: Ints, columns: int) -> Ints:
    """The rows of that matrix at some times, int64[len(where), columns]."""
    rows = np.zeros((len(where), columns), dtype=np.int64)
    for row, t in zip(rows, where.tolist(), strict=True):
        row += np.bincount(spans[(spans[:, 1] <= t) & (t < spans[:, 2]), 0], minlength=columns)
    return rows


def at_times(spans: Ints, keep: Bools) -> Ints:
    """The spans over the kept times only, canonical."""
    place = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(keep, dtype=np.int64)])
    moved = np.stack([spans[:, 0], place[spans[:, 1]], place[spans[:, 2]]], axis=1)
    return canonical(moved[moved[:, 1] < moved[:, 2]])


def shared(spans: Ints, columns: int) -> tuple[Ints, Ints]:
    """Equal columns made one: (spans, the new column of each old one, or -1 where it is never in use)."""
    spans = canonical(spans)
    place = np.full(columns, -1, dtype=np.int64)
    used, first = np.unique(spans[:, 0], return_index=True)
    known: dict[bytes, int] = {}
    stops = np.append(first[1:], len(spans))[: len(first)]
    intervals = np.ascontiguousarray(spans[:, 1:])
    kept = np.zeros(len(spans), dtype=bool)
    for column, start, stop in zip(used.tolist(), first.tolist(), stops.tolist(), strict=True):
        key = intervals[start:stop].tobytes()
        if key not in known:
            known[key] = len(known)
            kept[start:stop] = True
        place[column] = known[key]
    result = spans[kept]
    result[:, 0] = place[result[:, 0]]
    return result, place


def uncovered(spans: Ints, base: Ints) -> Bools:
    """Which times to keep: those that no neighbour among the kept ones covers.

    A time is covered by a neighbour with at least its count in every column and at least its ``base``: the peak is then not at
    that time alone. Of an interval graph the times left are those of its maximal cliques: something starts and something
    stops right after.
    """
    keep = np.ones(len(base), dtype=bool)
    left = canonical(spans)
    while True:
        place = np.flatnonzero(keep)
        own = base[place]
        for ahead in (True, False):
            covered = np.ones(len(place), dtype=bool)
            if ahead:  # nothing stops before the next time
                covered[left[:, 2] - 1] = False
                covered[:-1] &= own[:-1] <= own[1:]
                covered[-1:] = False
            else:  # nothing starts since the time before
                covered[left[:, 1]] = False
                covered[1:] &= own[1:] <= own[:-1]
                covered[:1] = False
            if covered.any():
                keep[place[covered]] = False
                left = at_times(left, ~covered)
                break
        else:
            return keep


def between(spans: Ints, times: int) -> Bools:
    """Which times to keep where layers repeat: a time whose use is at most the mean of those one period before and after goes.

    Exact: if such a time has the largest use of all, so have both of the others; following the later one ends at a kept
    time. Periods are the commonest distances between times at which the same columns are in use.
    """
    keep = np.ones(times, dtype=bool)
    spans = canonical(spans)
    for period in _periods(spans, times):
        if 2 * period >= times:
            continue
        doubled = spans[np.repeat(np.arange(len(spans)), 2)]
        earlier, later = spans + np.array([0, period, period]), spans - np.array([0, period, period])
        parts = [(doubled, 1), (earlier, -1), (later, -1)]
        columns = np.concatenate([part[:, 0] for part, _ in parts for _ in "ab"])
        at = np.concatenate([part[:, end] for part, _ in parts for end in (1, 2)])
        change = np.concatenate([np.full(len(part), sign * way, dtype=np.int64) for part, sign in parts for way in (1, -1)])
        above = _positive(columns, at, change)
        above = np.clip(above[:, 1:], 0, times)
        grows = np.zeros(times + 1, dtype=np.int64)
        np.add.at(grows, above[:, 0], 1)
        np.subtract.at(grows, above[:, 1], 1)
        keep[period:-period] &= np.cumsum(grows)[period : times - period] > 0
    return keep


def _periods(spans: Ints, times: int) -> list[int]:
    """The commonest distances between times and the next one at which the same columns are in use."""
    columns = np.concatenate([spans[:, 0], spans[:, 0]])
    live = _positive(columns, np.concatenate([spans[:, 1], spans[:, 2]]), np.repeat(np.array([1, -1], dtype=np.int64), len(spans)))
    # The set of columns in use as the sum of a random number per column. Two sets that share a sum would only suggest a bad period.
    marks = np.random.default_rng(0).integers(0, 2**62, int(columns.max(initial=-1)) + 1)
    key = over_time(live, marks, times)
    order = np.argsort(key, kind="stable")
    same = key[order][1:] == key[order][:-1]
    distance, number = np.unique((order[1:] - order[:-1])[same], return_counts=True)
    return [int(p) for p in distance[np.lexsort((distance, -number))][: tuned.PERIODS]]


def _positive(columns: Ints, at: Ints, change: Ints) -> Ints:
    """Where the running sum of the changes of a column is positive, as spans; the changes of each column sum to zero."""
    if not len(columns):
        return np.zeros((0, 3), dtype=np.int64)
    order = np.lexsort((at, columns))
    columns, at, level = columns[order], at[order], np.cumsum(change[order])
    last = np.flatnonzero(np.r_[(columns[1:] != columns[:-1]) | (at[1:] != at[:-1]), True])
    columns, at, level = columns[last], at[last], level[last]
    found = np.flatnonzero(level[:-1] > 0)
    return np.stack([columns[found], at[found], at[found + 1]], axis=1)


Need = tuple[int, Ints, int]
"""(node, bytes per strategy, column)."""


def regrouped(found: Iterable[Need], spans: Ints, base: Ints) -> tuple[tuple[Carrier, ...], Ints, Ints]:
    """The memory side of a problem in its smallest form, as (carriers, spans, base); every profile stays the same, time by time.

    - The least bytes over the strategies of a node are in use whatever is chosen: they join ``base``, int64[times].
    - Carriers of one node with the same column add up; those with the same bytes become one, in use when any of them is. A node that stands
      for hundreds of tensors is left with a few carriers.
    - Columns with the same spans (int64[S, 3]) are one. Carriers keep the order of their nodes in ``found``.
    """
    needs = list(found)
    columns = np.array([column for _, _, column in needs], dtype=np.int64)
    spans, place = shared(spans, 1 + int(max(spans[:, 0].max(initial=-1), columns.max(initial=-1))))
    flat, least, more = _above_least([usage for _, usage, _ in needs])
    fixed = np.zeros(len(place) + 1, dtype=np.int64)
    np.add.at(fixed, place[columns], least)  # what is never in use (-1) is added to the last and dropped
    base = base + over_time(spans, fixed[:-1], len(base))
    by_column: dict[tuple[int, int], Ints] = {}
    for (node, _, _), usage, column, counts in zip(needs, flat, place[columns].tolist(), more, strict=True):
        if counts and column >= 0:
            key = (node, column)
            by_column[key] = by_column[key] + usage if key in by_column else usage
    by_usage: dict[tuple[int, bytes], list[int]] = {}
    for (node, column), usage in by_column.items():
        by_usage.setdefault((node, usage.tobytes()), []).append(column)
    spans, place = shared(*_together(list(by_usage.values()), spans, len(place)))
    carriers: dict[tuple[int, int], Ints] = {}
    for (node, usage_bytes), column in zip(by_usage, place.tolist(), strict=True):
        usage = np.frombuffer(usage_bytes, dtype=np.int64)
        key = (node, column)
        carriers[key] = carriers[key] + usage if key in carriers else usage
    return tuple(Carrier(node=node, usage=usage, column=column) for (node, column), usage in carriers.items()), spans, base


def _above_least(usages: list[Ints]) -> tuple[list[Ints], Ints, list[bool]]:
    """Each vector less its least entry, these entries, and whether anything is left of it."""
    if not usages:
        return [], np.zeros(0, dtype=np.int64), []
    stops = np.cumsum([len(usage) for usage in usages])
    starts = np.concatenate([np.zeros(1, dtype=np.int64), stops[:-1]])
    flat = np.concatenate(usages)
    least = np.minimum.reduceat(flat, starts)
    flat = flat - np.repeat(least, stops - starts)
    more = np.maximum.reduceat(flat, starts) > 0
    return [flat[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)], least, more.tolist()


def _together(groups: list[list[int]], spans: Ints, width: int) -> tuple[Ints, int]:
    """Spans in which column i is the sum of the columns of group i, and the number of groups."""
    offsets = np.searchsorted(spans[:, 0], np.arange(width + 1))
    group = np.repeat(np.arange(len(groups)), [len(columns) for columns in groups])
    column = np.array([c for columns in groups for c in columns], dtype=np.int64)
    number = offsets[column + 1] - offsets[column]
    first = np.repeat(offsets[column] - np.cumsum(number) + number, number)
    taken = spans[first + np.arange(int(number.sum()))]
    return np.concatenate([np.repeat(group, number)[:, None], taken[:, 1:]], axis=1), len(groups)
