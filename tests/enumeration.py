"""Every allowed assignment of a small choice graph, with its cost and its peak."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import ChoiceGraph

MOST = 1_000_000
Ints = NDArray[np.int64]


def enumerate_allowed(graph: ChoiceGraph) -> Ints:
    """Every assignment without a forbidden strategy or pair, one per row; node by node, at most MOST rows at any time."""
    rows = np.zeros((1, 0), dtype=np.int64)
    for v in range(graph.size):
        size = int(graph.sizes()[v])
        rows = np.concatenate([np.repeat(rows, size, axis=0), np.tile(np.arange(size), len(rows))[:, None]], axis=1)
        keep = graph.node_costs(v)[rows[:, v]] < FORBIDDEN
        for (a, b), table in zip(graph.edges.tolist(), graph.edge_tables.tolist(), strict=True):
            if max(a, b) == v:
                keep &= graph.tables[table][rows[:, a], rows[:, b]] < FORBIDDEN
        rows = rows[keep]
        assert len(rows) <= MOST, "the example is too large for brute force"
    return rows


def totals(graph: ChoiceGraph, rows: Ints) -> tuple[Ints, Ints]:
    """Cost and peak of every row."""
    cost = np.zeros(len(rows), dtype=np.int64)
    profile = np.zeros((len(rows), int(graph.intervals[:, 1].max())), dtype=np.int64)
    for v in range(graph.size):
        cost += graph.node_costs(v)[rows[:, v]]
        for start, stop in graph.node_intervals(v).tolist():
            profile[:, start:stop] += graph.node_usages(v)[rows[:, v]][:, None]
    for (a, b), table in zip(graph.edges.tolist(), graph.edge_tables.tolist(), strict=True):
        cost += graph.tables[table][rows[:, a], rows[:, b]]
    return cost, profile.max(axis=1)
