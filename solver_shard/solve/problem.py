"""The solver's own form of a choice graph: compact tables, memory as carriers and spans of time.

A **carrier** is a vector of bytes over the strategies of one node and a column: how many times those bytes are in use at each
kept time, stored as intervals (spans.py). A node that stands for several tensors, or for several copies of a layer, has several
carriers; carriers that are in use at the same times share a column.

An edge's table is ``core[rows[x], cols[y]]``: strategies that a neighbour cannot tell apart share a row. On sharding
graphs cores are several times smaller than their tables, and shared between edges.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from solver_shard.choice.graph import FORBIDDEN, ChoiceGraph, Ints, exact_sum
from solver_shard.errors import InternalError
from solver_shard.solve.solution import MIB
from solver_shard.solve.spans import at_times, between, counts, counts_at, over_time, shared, uncovered

Floats = NDArray[np.float64]

SMALL_DENSE = 2**22
"""Matrix of counts that is kept for looking up rows."""

MAX_DENSE = 2**26
"""Largest matrix of counts (times x columns) that is built."""


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
    """Minimise ``cost + weight * peak // 2**20``; cost = constant + unary + edges; peak = largest profile, at most ``limit``.

    Attributes:
        unary: int64 per strategy and node.
        edges: no two between the same nodes after presolve.
        carriers: see the module.
        spans: int64[S, 3], rows (column, start, stop) over positions in ``times``; see spans.py.
        base: int64[times], bytes that are in use whatever is chosen.
        times: int64[times], labels that survive presolve.
        constant: added to every cost. A cost of ``constant`` + FORBIDDEN or more counts as forbidden.
        limit: bytes, or None.
        weight: of the peak in the objective, per 2**20 bytes; 2**20 without costs is the objective "memory".
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
    sizes: Ints = field(init=False)
    offsets: Ints = field(init=False)
    columns: Ints = field(init=False)

    def __post_init__(self) -> None:
        sizes = np.array([len(row) for row in self.unary], dtype=np.int64)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "offsets", np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)]).astype(np.int64))
        object.__setattr__(self, "columns", np.array([c.column for c in self.carriers], dtype=np.int64))

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.unary)

    def cost(self, assignment: Ints) -> int:
        """Exact cost without the peak; at least FORBIDDEN when a forbidden pair is chosen."""
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
        if len(self.base) * self.width > MAX_DENSE:
            raise InternalError(f"counts of {len(self.base)} times x {self.width} columns asked for as a matrix; use spans or rows")
        return counts(self.spans, len(self.base), self.width)

    def rows(self, where: Ints) -> Ints:
        """The counts at some times only, int64[len(where), columns]."""
        if len(self.base) * self.width <= SMALL_DENSE:
            return self.mult[where]
        return counts_at(self.spans, np.asarray(where, dtype=np.int64), self.width)

    def allowed(self, assignment: Ints) -> bool:
        """Whether no forbidden strategy or pair is chosen."""
        return self.cost(assignment) - self.constant < FORBIDDEN

    def value(self, assignment: Ints) -> int | None:
        """Exact objective, or None where the assignment is forbidden or above the limit."""
        peak = int(self.profile(assignment).max(initial=0))
        cost = self.cost(assignment)
        if cost - self.constant >= FORBIDDEN or (self.limit is not None and peak > self.limit):
            return None
        return cost + self.weight * peak // MIB

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
        return total + self.weight * self.ceiling() // MIB

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
    first, rows = _distinct(table)
    core = table[first]
    first, cols = _distinct(core.T)
    return np.ascontiguousarray(core[:, first]), rows, cols


def compact_edge(edge: Edge) -> Edge:
    """The same edge with equal rows and columns of its core made one."""
    core, rows, cols = compact_table(edge.core)
    if core.shape == edge.core.shape:
        return edge
    return Edge(a=edge.a, b=edge.b, core=core, rows=rows[edge.rows], cols=cols[edge.cols])


def _distinct(table: Ints) -> tuple[Ints, Ints]:
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
