"""A region of nodes as a problem of its own: everything else stays as it is in an assignment.

    small = region(flat, chosen, nodes, keep)
    better[small.nodes] = small.strategies(answer)

What the other nodes cost given the region is in its unary costs, what they use is in its base. Between two consecutive starts or stops
of the region's own spans only the time of the largest base is kept: exact, for the region uses the same at all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import Bools, Ints
from solver_shard.solve.flat import Flat
from solver_shard.solve.problem import Carrier, Edge, Problem, compact_edge


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """The problem, the nodes behind its nodes and the strategies behind theirs."""

    problem: Problem
    nodes: Ints
    kept: tuple[Ints, ...]

    def positions(self, strategies: Ints) -> Ints:
        """The assignment of the region that stands for some original strategies of its nodes."""
        return np.array([np.searchsorted(row, x) for row, x in zip(self.kept, strategies.tolist(), strict=True)], dtype=np.int64)

    def strategies(self, answer: Ints) -> Ints:
        """The original strategies of an assignment of the region."""
        return np.array([row[x] for row, x in zip(self.kept, answer.tolist(), strict=True)], dtype=np.int64)


def region(flat: Flat, chosen: Ints, nodes: Ints, keep: Bools) -> Region:
    """The region of some nodes (sorted), of which only the strategies in ``keep`` (per flat strategy) may be chosen."""
    whole = flat.problem
    place = {int(v): i for i, v in enumerate(nodes)}
    kept = [np.flatnonzero(keep[flat.graph.off[v] : flat.graph.off[v + 1]]) for v in nodes]
    unary = [whole.unary[v][own] for v, own in zip(nodes, kept, strict=True)]
    edges: list[Edge] = []
    for i, v in enumerate(nodes.tolist()):
        own = kept[i]
        for e in flat.graph.fl[flat.graph.fs[v] : flat.graph.fs[v + 1]].tolist():
            edge = whole.edges[e]
            other = place.get(edge.b)
            if other is None:
                unary[i] = np.minimum(unary[i] + edge.core[edge.rows[own], edge.cols[chosen[edge.b]]], FORBIDDEN)
            else:
                edges.append(_edge(edge, i, other, own, kept[other]))
        for e in flat.graph.bl[flat.graph.bs[v] : flat.graph.bs[v + 1]].tolist():
            edge = whole.edges[e]
            if edge.a not in place:
                unary[i] = np.minimum(unary[i] + edge.core[edge.rows[chosen[edge.a]], edge.cols[own]], FORBIDDEN)
    spans, base, carriers, times = _memory(flat, chosen, nodes, kept)
    problem = Problem(
        unary=tuple(unary),
        edges=tuple(edges),
        carriers=carriers,
        spans=spans,
        base=base,
        times=times,
        limit=whole.limit,
    )
    return Region(problem=problem, nodes=nodes, kept=tuple(kept))


def _edge(edge: Edge, a: int, b: int, rows: Ints, cols: Ints) -> Edge:
    used_rows, mine = np.unique(edge.rows[rows], return_inverse=True)
    used_cols, theirs = np.unique(edge.cols[cols], return_inverse=True)
    core = edge.core[used_rows[:, None], used_cols[None, :]]
    return compact_edge(Edge(a=a, b=b, core=core, rows=mine, cols=theirs))


def _memory(flat: Flat, chosen: Ints, nodes: Ints, kept: list[Ints]) -> tuple[Ints, Ints, tuple[Carrier, ...], Ints]:
    m = flat.bytes
    carriers: list[Carrier] = []
    spans: list[tuple[int, int, int]] = []
    columns: dict[tuple[tuple[int, int], ...], int] = {}
    rest = np.zeros(len(flat.base) + 1, dtype=np.int64)
    for i, v in enumerate(nodes.tolist()):
        for c in range(int(m.ms[v]), int(m.ms[v + 1])):
            usage = m.usage[m.uoff[c] : m.uoff[c] + flat.graph.k[v]]
            live = tuple(
                zip(
                    m.starts[m.ss[c] : m.ss[c + 1]].tolist(),
                    m.stops[m.ss[c] : m.ss[c + 1]].tolist(),
                    strict=True,
                )
            )
            own, least = usage[kept[i]], int(usage[kept[i]].min())
            freed = int(usage[chosen[v]]) - least
            for start, stop in live:
                rest[start] -= freed
                rest[stop] += freed
            if (own > least).any():
                if live not in columns:
                    columns[live] = len(columns)
                    spans += [(columns[live], start, stop) for start, stop in live]
                carriers.append(Carrier(node=i, usage=own - least, column=columns[live]))
    profile = flat.profile(chosen) + np.cumsum(rest)[:-1]
    table = np.array(spans, dtype=np.int64).reshape(-1, 3)
    cuts = np.unique(np.concatenate([table[:, 1], table[:, 2]])) if len(table) else np.zeros(0, dtype=np.int64)
    if len(cuts) < 2:
        return table[:0], np.zeros(0, dtype=np.int64), (), np.zeros(0, dtype=np.int64)
    inside = cuts[:-1]
    base = np.maximum.reduceat(profile[: cuts[-1]], inside)
    table = np.stack([table[:, 0], np.searchsorted(cuts, table[:, 1]), np.searchsorted(cuts, table[:, 2])], axis=1)
    return table, base, tuple(carriers), inside
