"""The choice graph: one strategy per node, costs on nodes and edges, memory over time. Flat numpy arrays, no tensors.

Every node has strategies with a cost (nanoseconds) and a usage (bytes). It uses that many bytes during each of its
half-open live intervals; intervals may overlap, and then count once each. Every edge has a table of costs indexed by
the strategies of its two nodes; ``FORBIDDEN`` means that the pair may not be chosen. Equal tables are stored once.

These costs add up. What runs side by side does not: costs of nodes and of edges may also load the terms of windows (``Loads``), and a
window costs as much as its fullest term.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


WEIGHT = 2**20
"""Weights of the terms of a window are whole numbers that sum to this."""

Uses = Iterable[tuple[int, int]]
"""(term, times): which terms a cost loads, and how many times it is paid on each."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Loads:
    """What nodes and edges load of the windows of a step: a window takes as long as its fullest term (the compute stream, or a lane).

        loads = Loads.of(
            windows=[0, 0, 1, 1],  # terms 0 and 1 are of window 0, terms 2 and 3 of window 1
            nodes=[(v, nanoseconds_of_each_strategy, [(0, 1)])],  # a cost of node v: once on term 0
            edges=[(u, v, table, [(0, 2), (3, 1)])],  # a cost of u and v together: twice on term 0, once on term 3
        )
        replace(graph, loads=loads).cost(x)

    A node or a pair may have any number of such costs, with or without an edge of the graph between the two.

    Attributes:
        windows: int64[R], the window of each term, 0 .. W - 1, never decreasing; every window has a term.
        base: int64[R], nanoseconds on each term whatever is chosen.
        nodes: int64[A, 4], rows (node, vector, term, times).
        vectors: costs per strategy, int64[strategies]; never FORBIDDEN.
        edges: int64[B, 5], rows (u, v, table, term, times); u != v.
        tables: costs of shape (strategies of u, strategies of v); never FORBIDDEN.
    """

    windows: Ints
    base: Ints
    nodes: Ints
    vectors: tuple[Ints, ...]
    edges: Ints
    tables: tuple[Ints, ...]

    @staticmethod
    def of(
        windows: Sequence[int] | Ints,
        nodes: Iterable[tuple[int, Ints, Uses]] = (),
        edges: Iterable[tuple[int, int, Ints, Uses]] = (),
        base: Sequence[int] | Ints | None = None,
    ) -> Loads:
        """Loads of costs, each with the terms that it loads; equal vectors and tables are stored once, rows of zeros not at all."""
        vectors, tables = _Distinct(), _Distinct()
        own: dict[tuple[int, int, int], int] = {}
        joint: dict[tuple[int, int, int, int], int] = {}
        for v, costs, uses in nodes:
            if costs.any():
                number = vectors.number(costs)
                for term, times in uses:
                    own[v, number, term] = own.get((v, number, term), 0) + times
        for u, v, costs, uses in edges:
            if costs.any():
                number = tables.number(costs)
                for term, times in uses:
                    joint[u, v, number, term] = joint.get((u, v, number, term), 0) + times
        return Loads(
            windows=np.asarray(windows, dtype=np.int64),
            base=np.zeros(len(windows), dtype=np.int64) if base is None else np.asarray(base, dtype=np.int64),
            nodes=np.array([(*key, times) for key, times in own.items() if times], dtype=np.int64).reshape(-1, 4),
            vectors=tuple(vectors.arrays),
            edges=np.array([(*key, times) for key, times in joint.items() if times], dtype=np.int64).reshape(-1, 5),
            tables=tuple(tables.arrays),
        )

    @property
    def count(self) -> int:
        """Number of windows."""
        return int(self.windows[-1]) + 1 if len(self.windows) else 0

    @cached_property
    def starts(self) -> Ints:
        """int64[W], the first term of each window."""
        return np.searchsorted(self.windows, np.arange(self.count)).astype(np.int64)

    def terms(self, assignment: Sequence[int] | Ints) -> Ints:
        """Nanoseconds on each term, int64[R]."""
        chosen = np.asarray(assignment, dtype=np.int64)
        cells, node_at, edge_at, widths = self._cells
        own = cells[node_at + chosen[self.nodes[:, 0]]] * self.nodes[:, 3]
        joint = cells[edge_at + chosen[self.edges[:, 0]] * widths + chosen[self.edges[:, 1]]] * self.edges[:, 4]
        total = self.base.copy()
        np.add.at(total, self.nodes[:, 2], own)
        np.add.at(total, self.edges[:, 3], joint)
        return total

    def times(self, assignment: Sequence[int] | Ints) -> Ints:
        """Nanoseconds of each window, int64[W]: of its fullest term."""
        return self.longest(self.terms(assignment))

    def longest(self, terms: Ints) -> Ints:
        """The largest of each window's terms, int64[W]."""
        return np.maximum.reduceat(terms, self.starts) if len(terms) else terms

    @cached_property
    def _cells(self) -> tuple[Ints, Ints, Ints, Ints]:
        """All vectors and tables in a row; where the vector of each row of ``nodes`` begins, the table of each of ``edges``; its width."""
        arrays = [*self.vectors, *self.tables]
        starts = np.cumsum([0, *[array.size for array in arrays]], dtype=np.int64)
        widths = np.array([table.shape[1] for table in self.tables], dtype=np.int64)
        cells = np.concatenate([np.zeros(0, dtype=np.int64), *[array.ravel() for array in arrays]])
        return cells, starts[self.nodes[:, 1]], starts[len(self.vectors) + self.edges[:, 2]], widths[self.edges[:, 2]]

    def together(self, weights: Ints) -> tuple[dict[int, Ints], dict[tuple[int, int], Ints]]:
        """Costs of nodes and of pairs u < v that never exceed the windows' times: each term times its weight / WEIGHT, rounded down.

        Args:
            weights: int64[R], not negative, summing to WEIGHT in each window.
        """
        own: dict[int, list[tuple[int, int]]] = {}
        joint: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for v, number, term, times in self.nodes.tolist():
            if factor := int(weights[term]) * times:
                own.setdefault(v, []).append((number, factor))
        for u, v, number, term, times in self.edges.tolist():
            if factor := int(weights[term]) * times:
                joint.setdefault((min(u, v), max(u, v)), []).append((number if u < v else ~number, factor))
        vectors = _Weighted(self.vectors)
        tables = _Weighted(self.tables)
        return {v: vectors.sum(rows) for v, rows in own.items()}, {ends: tables.sum(rows) for ends, rows in joint.items()}

    def substituted(self, owner: Sequence[int] | Ints, maps: Sequence[Ints | None]) -> Loads:
        """The loads where each node v follows node ``owner[v]`` of another graph, with strategy ``maps[v][x]`` when that has x.

        Args:
            owner: -1 where the node is decided: its strategy is the only one of ``maps[v]``.
            maps: None where it has the same strategy.
        """
        base, owners = self.base.copy(), list(owner)
        own: list[tuple[int, Ints, Uses]] = []
        joint: list[tuple[int, int, Ints, Uses]] = []

        def load(node: int, costs: Ints, term: int, times: int) -> None:
            if node < 0:
                base[term] += int(costs[0]) * times
            else:
                own.append((node, costs, ((term, times),)))

        every = slice(None)
        taken: dict[tuple[object, ...], Ints] = {}

        def part(array: Ints, *nodes: int) -> Ints:
            """The entries of an array of two nodes' strategies, or one's; of copies of a layer only once."""
            key = (id(array), *(None if (own := maps[v]) is None else own.tobytes() for v in nodes))
            if key not in taken:
                for axis, v in enumerate(nodes):
                    array = array[(every,) * axis + (maps[v] if maps[v] is not None else every,)]
                taken[key] = array
            return taken[key]

        for v, number, term, times in self.nodes.tolist():
            load(owners[v], part(self.vectors[number], v), term, times)
        for u, v, number, term, times in self.edges.tolist():
            a, b, table = owners[u], owners[v], part(self.tables[number], u, v)
            if a < 0 or b < 0:
                load(max(a, b), table[0] if a < 0 else table[:, 0], term, times)
            elif a == b:
                load(a, np.diagonal(table), term, times)
            elif a < b:
                joint.append((a, b, table, ((term, times),)))
            else:
                joint.append((b, a, table.T, ((term, times),)))
        return Loads.of(self.windows, own, joint, base)

    def only(self, windows: Sequence[int]) -> tuple[Loads, Ints]:
        """The loads of some windows, in their order, and the positions of their terms."""
        terms = np.flatnonzero(np.isin(self.windows, windows))
        place = np.full(len(self.windows), -1, dtype=np.int64)
        place[terms] = np.arange(len(terms))
        own, joint = self.nodes[place[self.nodes[:, 2]] >= 0], self.edges[place[self.edges[:, 3]] >= 0]
        loads = replace(
            self,
            windows=np.unique(self.windows[terms], return_inverse=True)[1].astype(np.int64),
            base=self.base[terms],
            nodes=np.concatenate([own[:, :2], place[own[:, 2], None], own[:, 3:]], axis=1),
            edges=np.concatenate([joint[:, :3], place[joint[:, 3], None], joint[:, 4:]], axis=1),
        )
        return loads, terms

    def loaded(self) -> set[int]:
        """Nodes that anything loaded depends on."""
        return {*self.nodes[:, 0].tolist(), *self.edges[:, :2].ravel().tolist()}

    def constant(self, weights: Ints) -> int:
        """What is paid at these weights whatever is chosen, rounded down."""
        total: int = sum(base * weight for base, weight in zip(self.base.tolist(), weights.tolist(), strict=True))
        return total // WEIGHT

    def weights(self, shares: Sequence[float] | NDArray[np.float64]) -> Ints:
        """Whole weights nearest to shares of each window's terms (float[R], not negative); a window of zeros is shared evenly.

        >>> Loads.of([0, 0, 0]).weights([1.0, 1.0, 1.0]).tolist()
        [349526, 349525, 349525]
        """
        wanted = np.maximum(np.asarray(shares, dtype=np.float64), 0.0)
        whole = np.zeros(len(self.windows), dtype=np.int64)
        for start, stop in zip(self.starts.tolist(), [*self.starts[1:].tolist(), len(self.windows)], strict=True):
            own = wanted[start:stop] if wanted[start:stop].sum() > 0 else np.ones(stop - start)
            down = np.minimum(np.floor(own / own.sum() * WEIGHT).astype(np.int64), WEIGHT)
            order = np.argsort(-(own / own.sum() * WEIGHT - down), kind="stable")
            down[order[: WEIGHT - int(down.sum())]] += 1
            whole[start:stop] = down
        return whole

    def validate(self, sizes: Ints) -> None:
        """Check shapes and ranges for nodes of so many strategies; InternalError says what is wrong."""
        windows, own, joint = self.windows, self.nodes, self.edges
        if len(windows) and (windows[0] != 0 or not np.isin(np.diff(windows), (0, 1)).all()):
            raise InternalError("choice graph: the windows of terms are not 0, ..., 0, 1, ..., in order")
        for rows, ends in ((own, own[:, :1]), (joint, joint[:, :2])):
            if (ends < 0).any() or (ends >= len(sizes)).any() or (rows[:, -2] < 0).any() or (rows[:, -2] >= len(windows)).any():
                raise InternalError("choice graph: a load is of a node or a term that is not there")
            if (rows[:, -1] < 0).any():
                raise InternalError("choice graph: a load is paid less than zero times")
        if (joint[:, 0] == joint[:, 1]).any():
            raise InternalError("choice graph: a load is of a pair of one node")
        for v, vector in np.unique(own[:, :2], axis=0).tolist():
            if self.vectors[vector].shape != (sizes[v],):
                raise InternalError(f"choice graph: a load of node {v} has shape {self.vectors[vector].shape}")
        for u, v, table in np.unique(joint[:, :3], axis=0).tolist():
            if self.tables[table].shape != (sizes[u], sizes[v]):
                raise InternalError(f"choice graph: a load of nodes {u} and {v} has shape {self.tables[table].shape}")
        if len(self.base) != len(windows) or any((array < 0).any() for array in (self.base, *self.vectors, *self.tables)):
            raise InternalError("choice graph: a load is negative, or its base is not that of as many terms")
        if self.most() >= FORBIDDEN:
            raise InternalError(f"choice graph: loads sum to {self.most()}; what is forbidden belongs into costs and tables")

    def most(self) -> int:
        """Nanoseconds that all terms together never exceed."""
        total: int = sum(self.base.tolist())
        total += sum(int(self.vectors[vector].max()) * times for _, vector, _, times in self.nodes.tolist())
        total += sum(int(self.tables[table].max()) * times for _, _, table, _, times in self.edges.tolist())
        return total


class _Distinct:
    """Arrays, equal ones once."""

    def __init__(self) -> None:
        self.arrays: list[Ints] = []
        self._known: dict[tuple[tuple[int, ...], bytes], int] = {}

    def number(self, array: Ints) -> int:
        array = np.ascontiguousarray(array, dtype=np.int64)
        number = self._known.setdefault((array.shape, array.tobytes()), len(self.arrays))
        if number == len(self.arrays):
            self.arrays.append(array)
        return number


class _Weighted:
    """Sums of arrays times factors / WEIGHT, rounded down; what copies of a layer share is summed once."""

    def __init__(self, arrays: Sequence[Ints]) -> None:
        self._arrays = arrays
        self._known: dict[tuple[tuple[int, int], ...], Ints] = {}

    def sum(self, rows: Sequence[tuple[int, int]]) -> Ints:
        """Of arrays by number (transposed where that is ~number) and factor; exact, for what is above WEIGHT and below it adds up apart."""
        key = tuple(sorted(rows))
        if key not in self._known:
            high = low = np.zeros((), dtype=np.int64)
            for number, factor in key:
                array = self._arrays[number] if number >= 0 else self._arrays[~number].T
                times, weight = divmod(factor, WEIGHT)
                high = high + array * times + (array >> 20) * weight
                low = low + (array & (WEIGHT - 1)) * weight
            self._known[key] = high + (low >> 20)
        return self._known[key]


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
        loads: costs that load windows, paid beside ``costs`` and ``tables``; None where all costs add up.
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
    loads: Loads | None = None

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
        """Exact total cost, with the time of the windows; FORBIDDEN entries count as themselves."""
        chosen = np.asarray(assignment, dtype=np.int64)
        total: int = exact_sum(self.costs[self.offsets[:-1] + chosen]) + exact_sum(self._paid(chosen))
        return total if self.loads is None else total + exact_sum(self.loads.times(chosen))

    def priced(self, weights: Ints) -> ChoiceGraph:
        """A graph without windows that never costs more: each term of a window counts with its weight (int64[terms], of WEIGHT together).

        That is as much as the window's time where the weight is on its fullest term, but for what is rounded down.
        """
        if self.loads is None:
            return self
        own, joint = self.loads.together(weights)
        costs, tables = self.costs.copy(), _Distinct()
        for v, more in own.items():
            costs[self.offsets[v] : self.offsets[v + 1]] += more
        if self.size:
            costs[: self.offsets[1]] += self.loads.constant(weights)
        numbers = [len(self.tables) + tables.number(more) for more in joint.values()]
        return replace(
            self,
            costs=np.where(self.costs >= FORBIDDEN, FORBIDDEN, np.minimum(costs, FORBIDDEN - 1)),
            edges=np.concatenate([self.edges, np.array(list(joint), dtype=np.int64).reshape(-1, 2)]),
            edge_tables=np.concatenate([self.edge_tables, np.array(numbers, dtype=np.int64)]),
            tables=(*self.tables, *tables.arrays),
            loads=None,
        )

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
        if self.loads is not None:
            self.loads.validate(sizes)
