"""The choice graph: one strategy per node, costs on nodes and edges, memory over time. Flat numpy arrays, no tensors.

Every node has strategies with a cost (nanoseconds) and a usage (bytes). It uses that many bytes during each of its
half-open live intervals; intervals may overlap, and then count once each. Every edge has a table of costs indexed by
the strategies of its two nodes; ``FORBIDDEN`` means that the pair may not be chosen. Equal tables are stored once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.errors import InternalError

Bools = NDArray[np.bool_]

Masks = Mapping[int, Bools]
"""Node to bool[its strategies]: which of them are allowed; nodes that are not named may choose freely."""

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WarmStart:
    """A hint: which strategies of some nodes to start from; the solver completes it as well as it can.

        WarmStart(name="megatron", allowed={3: np.array([False, True, True])})

    Attributes:
        name: a label for the report.
        allowed: node -> bool[strategies of the node]. Nodes that are not named may choose freely. A restriction that
            allows nothing, or that cannot be met together with the others, is dropped.
    """

    name: str
    allowed: Masks


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
    allowed: Masks = field(default_factory=dict)
    edges: tuple[int, ...] = ()


MAX_BYTES = 2**63 - 1
"""Of all usages together: sums of bytes are exact in int64."""

Ints = NDArray[np.int64]


def repeated(costs: Ints, count: int) -> Ints:
    """Costs of what is paid ``count`` times; what is forbidden stays so."""
    if count == 1:
        return np.ascontiguousarray(costs)
    forbidden = costs >= FORBIDDEN
    return np.where(forbidden, FORBIDDEN, np.where(forbidden, 0, costs) * count)


def exact_sum(values: Ints) -> int:
    """The sum of int64 values, beyond 64 bits too."""
    return (int((values >> 32).sum()) << 32) + int((values & (2**32 - 1)).sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class ChoiceGraph:
    """An immutable choice graph of N nodes and E edges.

    Attributes:
        names: N labels, for messages only.
        offsets: int64[N + 1]; the strategies of node v are ``offsets[v]:offsets[v + 1]`` of the two next arrays.
        costs: int64, nanoseconds per strategy; ``FORBIDDEN`` is allowed.
        usages: int64, bytes per strategy.
        interval_offsets: int64[N + 1] into ``intervals``.
        intervals: int64[M, 2], half-open [start, stop).
        edges: int64[E, 2], node pairs (u, v); parallel edges add up; u != v.
        edge_tables: int64[E], the table of each edge.
        tables: cost tables of shape (strategies of u, strategies of v).
        limit: bytes that the usage of the live nodes may never exceed, or None.
    """

    names: tuple[str, ...]
    offsets: Ints
    costs: Ints
    usages: Ints
    interval_offsets: Ints
    intervals: Ints
    edges: Ints
    edge_tables: Ints
    tables: tuple[Ints, ...]
    limit: int | None = None

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.names)

    def sizes(self) -> Ints:
        """Number of strategies of each node."""
        return np.diff(self.offsets)

    def node_costs(self, v: int) -> Ints:
        return self.costs[self.offsets[v] : self.offsets[v + 1]]

    def node_usages(self, v: int) -> Ints:
        return self.usages[self.offsets[v] : self.offsets[v + 1]]

    def node_intervals(self, v: int) -> Ints:
        return self.intervals[self.interval_offsets[v] : self.interval_offsets[v + 1]]

    def narrowed(self, masks: Masks) -> ChoiceGraph:
        """The graph with all other strategies forbidden; positions of nodes and strategies stay.

        ``narrowing.shrink`` leaves them out.
        """
        costs = self.costs.copy()
        for v, mask in masks.items():
            costs[self.offsets[v] : self.offsets[v + 1]][~mask] = FORBIDDEN
        return replace(self, costs=costs)

    def cost(self, assignment: Sequence[int] | Ints) -> int:
        """Exact total cost; FORBIDDEN entries count as themselves."""
        chosen = np.asarray(assignment, dtype=np.int64)
        return exact_sum(self.costs[self.offsets[:-1] + chosen]) + exact_sum(self._paid(chosen))

    def allowed(self, assignment: Sequence[int] | Ints) -> bool:
        """Whether no forbidden strategy or pair is chosen."""
        chosen = np.asarray(assignment, dtype=np.int64)
        return bool((self.costs[self.offsets[:-1] + chosen] < FORBIDDEN).all() and (self._paid(chosen) < FORBIDDEN).all())

    def _paid(self, chosen: Ints) -> Ints:
        """The entries of all edges' tables, int64[E], in the order of their tables."""
        order, stops = self._by_table
        left, right = chosen[self.edges[order, 0]], chosen[self.edges[order, 1]]
        paid = np.empty(len(order), dtype=np.int64)
        start = 0
        for table, stop in zip(self.tables, stops, strict=True):
            paid[start:stop] = table[left[start:stop], right[start:stop]]
            start = stop
        return paid

    @cached_property
    def _by_table(self) -> tuple[Ints, list[int]]:
        """Edges sorted by table, and where those of each table end."""
        order = np.argsort(self.edge_tables, kind="stable")
        return order, np.searchsorted(self.edge_tables[order], np.arange(len(self.tables)), side="right").tolist()

    def profile(self, assignment: Sequence[int] | Ints) -> Ints:
        """Bytes in use at each time from 0 to the last stop (int64[last stop])."""
        chosen = np.asarray(assignment, dtype=np.int64)
        usage = np.repeat(self.usages[self.offsets[:-1] + chosen], np.diff(self.interval_offsets))
        end = int(self.intervals[:, 1].max(initial=0))
        change = np.zeros(end + 1, dtype=np.int64)
        live = self.intervals[:, 0] < self.intervals[:, 1]
        np.add.at(change, self.intervals[live, 0], usage[live])
        np.subtract.at(change, self.intervals[live, 1], usage[live])
        return np.cumsum(change)[:end]

    def peak(self, assignment: Sequence[int] | Ints) -> int:
        """Largest number of bytes in use at any time; takes no longer where times are large numbers."""
        chosen = np.asarray(assignment, dtype=np.int64)
        live = self.intervals[:, 0] < self.intervals[:, 1]
        usage = np.repeat(self.usages[self.offsets[:-1] + chosen], np.diff(self.interval_offsets))[live]
        starts, stops = self.intervals[live].T
        grows, shrinks = np.argsort(starts, kind="stable"), np.argsort(stops, kind="stable")
        used = np.cumsum(usage[grows])  # use only grows at a start: what has started by then, less what has stopped
        freed = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(usage[shrinks])])
        used = used - freed[np.searchsorted(stops[shrinks], starts[grows], side="right")]
        return int(used.max(initial=0))

    def most_bytes(self) -> int:
        """Bytes that no time can exceed: every node at its largest usage, all intervals at once. Exact, beyond 64 bits too."""
        if not self.size:
            return 0
        largest = np.maximum.reduceat(self.usages, self.offsets[:-1]).tolist()
        return sum(usage * count for usage, count in zip(largest, np.diff(self.interval_offsets).tolist(), strict=True))

    def validate(self) -> None:
        """Check shapes and ranges; InternalError says which node or edge is wrong."""
        n = self.size
        sizes = self.sizes()
        if len(self.offsets) != n + 1 or len(self.interval_offsets) != n + 1:
            raise InternalError(f"choice graph: offsets are for {len(self.offsets) - 1} nodes, names for {n}")
        if (sizes < 1).any():
            raise InternalError(f"choice graph: node {self.names[int(np.argmin(sizes))]!r} has no strategy")
        if len(self.costs) != self.offsets[-1] or len(self.usages) != self.offsets[-1]:
            raise InternalError("choice graph: costs or usages do not match the number of strategies")
        if (self.usages < 0).any() or (self.costs < 0).any():
            raise InternalError("choice graph: a cost or usage is negative")
        if (
            len(self.intervals) != self.interval_offsets[-1]
            or (self.intervals[:, 0] > self.intervals[:, 1]).any()
            or (self.intervals < 0).any()
        ):
            raise InternalError("choice graph: an interval is reversed or negative, or their number is wrong")
        if self.most_bytes() > MAX_BYTES:
            raise InternalError(f"choice graph: usages sum to {self.most_bytes()} bytes; sums must stay below 2^63")
        shapes = np.array([table.shape for table in self.tables], dtype=np.int64).reshape(-1, 2)[self.edge_tables]
        ends = self.edges
        wrong = (ends[:, 0] == ends[:, 1]) | (ends < 0).any(axis=1) | (ends >= n).any(axis=1)
        if wrong.any():
            raise InternalError(f"choice graph: edge {tuple(ends[int(np.argmax(wrong))].tolist())} is not between two nodes")
        unlike = (shapes != sizes[ends]).any(axis=1)
        if unlike.any():
            e = int(np.argmax(unlike))
            u, v = (self.names[v] for v in ends[e].tolist())
            raise InternalError(f"choice graph: the table from {u!r} to {v!r} has shape {tuple(shapes[e].tolist())}")
