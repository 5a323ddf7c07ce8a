"""A problem as flat arrays, for compiled loops: nodes, edges with shared cores, and bytes over time.

    flat = Flat.of(problem, scale)
    flat.cost(assignment), flat.profile(assignment)

Costs are integers times ``scale`` (a power of two), in float64, FORBIDDEN as ``CLASH``; bytes are int64. The strategies of node v are
``off[v]:off[v + 1]``. Edge e from node ``ea[e]`` to node ``eb[e]`` has a core of ``nr[e]`` rows and ``nc[e]`` columns at ``toff[e]`` of
``pool``; strategy x of its first node is row ``maps[rmap[e] + x]``, or x itself where ``rmap[e]`` is -1; columns likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from solver_shard.graph.choice_graph import Ints
from solver_shard.solve.bounds.trws import CLASH, scaled
from solver_shard.solve.problem import Floats, Problem, starts_of, within


class Graph(NamedTuple):
    """Nodes and edges, as compiled loops read them; see the module.

    Attributes:
        fs, fl: edges whose first node is v: ``fl[fs[v]:fs[v + 1]]``.
        bs, bl: edges whose second node is v.
        bo, fo: per edge, where its messages to the first and to the second node begin.
        share: TRW-S weight of each node.
    """

    k: Ints
    off: Ints
    ea: Ints
    eb: Ints
    nr: Ints
    nc: Ints
    toff: Ints
    pool: Floats
    rmap: Ints
    cmap: Ints
    maps: Ints
    fs: Ints
    fl: Ints
    bs: Ints
    bl: Ints
    bo: Ints
    fo: Ints
    share: Floats


class Bytes(NamedTuple):
    """Memory, as compiled loops read it.

    Attributes:
        ms: carriers of node v are ``ms[v]:ms[v + 1]``.
        uoff: carrier c has its bytes per strategy at ``uoff[c]`` of ``usage``.
        ss: its live spans are ``ss[c]:ss[c + 1]`` of ``starts`` and ``stops``.
        node: the node of each carrier.
    """

    ms: Ints
    uoff: Ints
    usage: Ints
    ss: Ints
    starts: Ints
    stops: Ints
    node: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flat:
    """A problem in flat form.

    Attributes:
        problem: what it was made of.
        scale: factor of all costs.
        theta: unary costs per flat strategy, scaled.
        graph: nodes and edges.
        bytes: carriers and spans.
        base: bytes in use at each time whatever is chosen.
        limit: bytes, or None.
    """

    problem: Problem
    scale: float
    theta: Floats
    graph: Graph
    bytes: Bytes
    base: Ints
    limit: int | None

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.graph.k)

    @staticmethod
    def of(problem: Problem, scale: float) -> Flat:
        """The flat form of a problem; cores and index maps that edges share are stored once."""
        sizes, n = problem.sizes, problem.size
        pool, pooled = _Store(), {}
        maps = _Store()
        ea, eb, nr, nc, toff, rmap, cmap = ([] for _ in range(7))
        for edge in problem.edges:
            key = id(edge.core)
            if key not in pooled:
                pooled[key] = pool.add(np.minimum(scaled(edge.core, scale), CLASH).ravel())
            ea.append(edge.a)
            eb.append(edge.b)
            nr.append(edge.core.shape[0])
            nc.append(edge.core.shape[1])
            toff.append(pooled[key])
            rmap.append(maps.map(edge.rows, edge.core.shape[0]))
            cmap.append(maps.map(edge.cols, edge.core.shape[1]))
        first, second = _ints(ea), _ints(eb)
        fl, fs = _incidence(first, n)
        bl, bs = _incidence(second, n)
        carriers = sorted(problem.carriers, key=lambda c: c.node)
        order = np.argsort(problem.spans[:, 0], kind="stable")
        spans = problem.spans[order]
        column_start = np.searchsorted(spans[:, 0], np.arange(int(spans[:, 0].max(initial=-1)) + 2))
        columns = np.array([c.column for c in carriers], dtype=np.int64)
        counts = column_start[columns + 1] - column_start[columns] if len(columns) else columns
        which = np.repeat(column_start[columns], counts) + within(counts) if len(columns) else columns
        graph = Graph(
            k=sizes,
            off=problem.offsets,
            ea=first,
            eb=second,
            nr=_ints(nr),
            nc=_ints(nc),
            toff=_ints(toff),
            pool=pool.floats(),
            rmap=_ints(rmap),
            cmap=_ints(cmap),
            maps=maps.ints(),
            fs=fs,
            fl=fl,
            bs=bs,
            bl=bl,
            bo=starts_of(_ints(nr)),
            fo=starts_of(_ints(nc)),
            share=1.0 / np.maximum(1, np.maximum(np.diff(fs), np.diff(bs))),
        )
        node = np.array([c.node for c in carriers], dtype=np.int64)
        memory = Bytes(
            ms=np.searchsorted(node, np.arange(n + 1)).astype(np.int64),
            uoff=starts_of(_ints([len(c.usage) for c in carriers]))[:-1],
            usage=np.concatenate([np.zeros(0, dtype=np.int64), *[c.usage for c in carriers]]),
            ss=starts_of(counts),
            starts=np.ascontiguousarray(spans[which, 1]),
            stops=np.ascontiguousarray(spans[which, 2]),
            node=node,
        )
        theta = np.minimum(np.concatenate([np.zeros(0), *[scaled(row, scale) for row in problem.unary]]), CLASH)
        return Flat(problem=problem, scale=scale, theta=theta, graph=graph, bytes=memory, base=problem.base, limit=problem.limit)

    def cost(self, assignment: Ints, theta: Floats | None = None) -> float:
        """Scaled cost, without the problem's constant; at least CLASH where a forbidden pair is chosen."""
        g, unary = self.graph, self.theta if theta is None else theta
        rows, cols = self.cells(assignment)
        return float(unary[g.off[:-1] + assignment].sum()) + float(g.pool[g.toff + rows * g.nc + cols].sum())

    def cells(self, assignment: Ints) -> tuple[Ints, Ints]:
        """Row and column of the core of each edge that an assignment chooses."""
        g = self.graph
        x, y = assignment[g.ea], assignment[g.eb]
        if not len(g.maps):
            return x, y
        rows = np.where(g.rmap >= 0, g.maps[np.maximum(g.rmap, 0) + np.where(g.rmap >= 0, x, 0)], x)
        cols = np.where(g.cmap >= 0, g.maps[np.maximum(g.cmap, 0) + np.where(g.cmap >= 0, y, 0)], y)
        return rows, cols

    def profile(self, assignment: Ints) -> Ints:
        """Bytes in use at each time, int64[times]."""
        m, times = self.bytes, len(self.base)
        used = np.repeat(m.usage[m.uoff + assignment[m.node]], np.diff(m.ss))
        change = np.zeros(times + 1, dtype=np.int64)
        np.add.at(change, m.starts, used)
        np.subtract.at(change, m.stops, used)
        result: Ints = self.base + np.cumsum(change[:times])
        return result

    def row(self, time: int) -> tuple[Ints, Ints, int]:
        """Memory row of a time: (flat strategies, bytes above the node's least, bytes in use at least)."""
        g, m = self.graph, self.bytes
        live = np.zeros(len(m.node), dtype=np.int64)
        carrier = np.repeat(np.arange(len(m.node)), np.diff(m.ss))
        np.add.at(live, carrier[(m.starts <= time) & (time < m.stops)], 1)
        active = np.flatnonzero(live)
        lengths = g.k[m.node[active]]
        inside = within(lengths)
        place = np.repeat(g.off[m.node[active]], lengths) + inside
        total = np.zeros(int(g.off[-1]), dtype=np.int64)
        np.add.at(total, place, np.repeat(live[active], lengths) * m.usage[np.repeat(m.uoff[active], lengths) + inside])
        least = np.minimum.reduceat(total, g.off[:-1])
        total -= np.repeat(least, g.k)
        where = np.flatnonzero(total)
        return where, total[where], int(self.base[time]) + int(least.sum())


class _Store:
    """Arrays end to end; index maps that are equal are stored once."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.length = 0
        self.known: dict[bytes, int] = {}

    def add(self, part: Floats | Ints) -> int:
        start = self.length
        self.parts.append(part)
        self.length += len(part)
        return start

    def map(self, which: Ints, count: int) -> int:
        if len(which) == count and (which == np.arange(count)).all():
            return -1
        key = which.tobytes()
        if key not in self.known:
            self.known[key] = self.add(which)
        return self.known[key]

    def floats(self) -> Floats:
        return np.concatenate([np.zeros(0), *self.parts])

    def ints(self) -> Ints:
        return np.concatenate([np.zeros(0, dtype=np.int64), *self.parts])


def _ints(values: object) -> Ints:
    return np.array(values, dtype=np.int64)


def _incidence(end: Ints, n: int) -> tuple[Ints, Ints]:
    order = np.argsort(end, kind="stable")
    return order, np.searchsorted(end[order], np.arange(n + 1)).astype(np.int64)
