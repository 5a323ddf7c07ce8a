"""The choice graph: one strategy per node, costs on nodes and edges, memory over time. Flat numpy arrays, no tensors.

Every node has strategies with a cost (nanoseconds) and a usage (bytes). It uses that many bytes during each of its
half-open live intervals; intervals may overlap, and then count once each. Every edge has a table of costs indexed by
the strategies of its two nodes; ``FORBIDDEN`` means that the pair may not be chosen. Equal tables are stored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver_shard.errors import InternalError

FORBIDDEN = 10**18
"""A cost that the solver never pays (the IOPDDL format's infinity)."""

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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

    def cost(self, assignment: Sequence[int] | Ints) -> int:
        """Exact total cost; FORBIDDEN entries count as themselves."""
        chosen = np.asarray(assignment, dtype=np.int64)
        total: int = sum(self.costs[self.offsets[:-1] + chosen].tolist())
        for (u, v), table in zip(self.edges.tolist(), self.edge_tables.tolist(), strict=True):
            total += int(self.tables[table][chosen[u], chosen[v]])
        return total

    def allowed(self, assignment: Sequence[int] | Ints) -> bool:
        """Whether no forbidden strategy or pair is chosen."""
        chosen = np.asarray(assignment, dtype=np.int64)
        if (self.costs[self.offsets[:-1] + chosen] >= FORBIDDEN).any():
            return False
        pairs = zip(self.edges.tolist(), self.edge_tables.tolist(), strict=True)
        return all(self.tables[table][chosen[u], chosen[v]] < FORBIDDEN for (u, v), table in pairs)

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
        """Largest number of bytes in use at any time."""
        return int(self.profile(assignment).max(initial=0))

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
        for (u, v), table in zip(self.edges.tolist(), self.edge_tables.tolist(), strict=True):
            if u == v or not (0 <= u < n and 0 <= v < n):
                raise InternalError(f"choice graph: edge ({u}, {v}) is not between two nodes")
            if self.tables[table].shape != (sizes[u], sizes[v]):
                raise InternalError(
                    f"choice graph: the table from {self.names[u]!r} to {self.names[v]!r} has shape {self.tables[table].shape}"
                )
