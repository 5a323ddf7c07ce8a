"""The solver's own form of a graph: times that may be left out, and order of nodes."""

from __future__ import annotations

import numpy as np
import pytest
from random_graphs import points, random_graph

from solver_shard.graph.choice_graph import ChoiceGraph
from solver_shard.solve.problem import compact_table, from_graph


def layered(layers: int, nodes: int, rng: np.random.Generator) -> ChoiceGraph:
    """Nodes with one interval per layer: activations that pile up until their layer runs backwards, gradients that pile up then."""
    intervals, offsets = [], [0]
    period, end = 6, 12 * layers
    for _ in range(nodes):
        kind, at = rng.integers(3), int(rng.integers(period))
        for layer in range(layers):
            forward, backward = layer * period + at, end - 1 - layer * period - at
            intervals.append([(forward, forward + 1), (forward, backward), (backward, end)][kind])
        offsets.append(len(intervals))
    return ChoiceGraph(
        names=tuple(f"n{v}" for v in range(nodes)),
        offsets=np.arange(0, 3 * nodes + 1, 3),
        costs=np.zeros(3 * nodes, dtype=np.int64),
        usages=rng.integers(0, 100, 3 * nodes),
        interval_offsets=np.array(offsets),
        intervals=np.array(intervals, dtype=np.int64),
        edges=np.zeros((0, 2), dtype=np.int64),
        edge_tables=np.zeros(0, dtype=np.int64),
        tables=(),
    )


@pytest.mark.parametrize("seed", range(30))
def test_kept_times_of_repeated_layers_hold_every_peak(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = layered(12, 5, rng)
    problem, order = from_graph(graph, limit=None)
    assert len(problem.base) < 50, "interior layers are left out"
    for _ in range(20):
        chosen = rng.integers(0, 3, graph.size)
        assert problem.profile(chosen[order]).max() == graph.peak(chosen)


@pytest.mark.parametrize("seed", range(30))
def test_costs_and_peaks_are_those_of_the_graph(seed: int) -> None:
    graph = random_graph(np.random.default_rng(seed), 5)
    problem, order = from_graph(graph, limit=None)
    for point in points(graph):
        x = np.array(point.assignment)[order]
        assert problem.cost(x) == point.cost
        assert problem.profile(x).max(initial=0) == point.peak
        assert problem.least() <= point.peak <= problem.ceiling()
        assert point.cost <= problem.most()


def test_equal_rows_and_columns_share_a_place_in_the_core() -> None:
    table = np.array([[1, 2, 1], [1, 2, 1], [3, 4, 3]])
    core, rows, cols = compact_table(table)
    assert core.tolist() == [[1, 2], [3, 4]]
    assert (rows.tolist(), cols.tolist()) == ([0, 0, 1], [0, 1, 0])
