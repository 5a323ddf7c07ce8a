"""What restrictions leave of a choice graph is all that they allow, at the same cost and bytes."""

from __future__ import annotations

import numpy as np
import pytest
from enumeration import enumerate_allowed, totals
from random_graphs import random_graph

from solver_shard.graph.narrowing import shrink


@pytest.mark.parametrize("seed", range(40))
def test_nothing_that_restrictions_allow_is_lost_and_nothing_else_is_left(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, 6)
    sizes = graph.sizes().tolist()
    masks = {v: rng.random(sizes[v]) < 0.7 for v in range(0, graph.size, 2)}
    pairs = {(u, v): rng.random((sizes[u], sizes[v])) < 0.8 for u, v in graph.edges.tolist()[::3]}
    rows = enumerate_allowed(graph)
    for v, mask in masks.items():
        rows = rows[mask[rows[:, v]]]
    for (u, v), mask in pairs.items():
        rows = rows[mask[rows[:, u], rows[:, v]]]
    small = shrink(graph, masks, pairs)
    if small is None:
        assert not len(rows)
        return
    small.graph.validate()
    left = enumerate_allowed(small.graph)
    assert sorted(map(tuple, rows.tolist())) == sorted(tuple(small.restore(x).tolist()) for x in left)
    if len(left):
        whole = np.array([small.restore(x) for x in left])
        assert [x.tolist() for x in totals(small.graph, left)] == [x.tolist() for x in totals(graph, whole)]
