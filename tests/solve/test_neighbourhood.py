"""Neighbourhoods improve a poor assignment and never offer one that is not better.

Without a limit regions of whole components suffice for the optimum; with one, regions that only memory couples may be missed.
"""

from __future__ import annotations

import numpy as np
import pytest
from random_graphs import points, random_graph, some_limit

from solver_shard.choice.graph import Ints
from solver_shard.solve.clock import Clock
from solver_shard.solve.neighbourhood import neighbourhoods
from solver_shard.solve.problem import from_graph


@pytest.mark.parametrize("seed", range(20))
def test_a_small_graph_is_solved_from_its_worst_assignment(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, 6, 3)
    found = points(graph)
    limit = some_limit(rng, found)
    problem, order = from_graph(graph, limit=limit)
    within = [np.array(p.assignment)[order] for p in found if limit is None or p.peak <= limit]
    if not within:
        return
    values = [problem.value(x) for x in within]
    worst = max(range(len(within)), key=lambda i: values[i] or 0)
    best = [values[worst]]

    def offer(assignment: Ints, source: str) -> bool:
        value = problem.value(assignment)
        assert source == "neighbourhood"
        assert value is not None
        assert best[-1] is not None
        assert value < best[-1]
        best.append(value)
        return True

    neighbourhoods(problem, within[worst], Clock(None, 20.0), seed=seed, gap=0.0, offer=offer)
    optimum = min(v for v in values if v is not None)
    if limit is None:
        assert best[-1] == optimum


def test_a_clock_that_is_over_ends_it() -> None:
    graph = random_graph(np.random.default_rng(0), 6, 3)
    problem, order = from_graph(graph, limit=None)
    start = np.array(points(graph)[0].assignment)[order]
    neighbourhoods(problem, start, Clock(0.0, None), seed=0, gap=0.0, offer=lambda assignment, source: pytest.fail("no time for that"))
