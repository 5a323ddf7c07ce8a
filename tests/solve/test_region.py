"""A region is the whole problem with everything else as it is: the same costs, the same peaks, the same optimum."""

from __future__ import annotations

import numpy as np
import pytest
from flat_problems import every, some_problem

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.solve.bounds.trws import scale_of
from solver_shard.solve.flat import Flat
from solver_shard.solve.presolve import presolve
from solver_shard.solve.presolve.reducer import NoAssignment
from solver_shard.solve.primal.lns import region
from solver_shard.solve.problem import Edge, Problem

SEEDS = range(120)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_region_has_the_costs_and_peaks_of_the_whole(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = some_problem(rng, nodes=int(rng.integers(1, 7)), strategies=3, limited=bool(seed % 6), times=12)
    flat = Flat.of(problem, scale_of(problem))
    chosen = (rng.random(problem.size) * problem.sizes).astype(np.int64)
    nodes = np.sort(rng.choice(problem.size, int(rng.integers(1, problem.size + 1)), replace=False))
    keep = rng.random(int(problem.offsets[-1])) < 0.7
    keep[problem.offsets[:-1] + chosen] = True
    small = region(flat, chosen, nodes, keep)
    assert small.strategies(small.positions(chosen[nodes])).tolist() == chosen[nodes].tolist()
    assert (len(small.problem.base) == 0) or len(small.problem.base) <= 2 * len(small.problem.spans) - 1, (
        "only times between starts and stops"
    )
    base = int(problem.profile(chosen).max(initial=0))
    best, least, shift = None, None, set()
    for x in every(small.problem):
        whole = chosen.copy()
        whole[nodes] = small.strategies(x)
        assert keep[problem.offsets[nodes] + whole[nodes]].all()
        allowed = small.problem.allowed(x)
        if base_is_allowed := problem.allowed(chosen):
            assert allowed == problem.allowed(whole)
        if problem.allowed(whole):
            assert allowed
            shift.add(problem.cost(whole) - small.problem.cost(x))
            value, own = problem.value(whole), small.problem.value(x)
            if problem.limit is None or base <= problem.limit:
                assert (value is None) == (own is None), "the limit is kept by both or by neither"
            if own is not None and (best is None or own < best):
                best = own
            if value is not None and (least is None or value < least):
                least = value
    assert len(shift) <= 1, "costs differ by what the rest costs"
    if base_is_allowed and (problem.limit is None or base <= problem.limit):
        assert least is not None
        assert best == least - shift.pop()


@pytest.mark.parametrize("seed", SEEDS[:40])
def test_a_region_survives_presolve(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = some_problem(rng, nodes=6, strategies=3)
    flat = Flat.of(problem, scale_of(problem))
    within = [x for x in every(problem) if problem.value(x) is not None]
    if not within:
        return
    chosen = within[int(rng.integers(len(within)))]
    nodes = np.sort(rng.choice(6, 4, replace=False))
    small = region(flat, chosen, nodes, np.ones(int(problem.offsets[-1]), dtype=bool))
    values = [v for x in every(small.problem) if (v := small.problem.value(x)) is not None]
    try:
        kernel, undo = presolve(small.problem)
    except NoAssignment:
        raise AssertionError("the region's own assignment is one") from None
    found = [(v, x) for x in every(kernel) if (v := kernel.value(x)) is not None]
    value, x = min(found, key=lambda pair: pair[0])
    assert value == min(values)
    whole = chosen.copy()
    whole[nodes] = small.strategies(undo.restore(x))
    assert problem.value(whole) is not None
    assert all(int(row.max()) <= FORBIDDEN for row in small.problem.unary)


def test_a_node_with_many_forbidding_neighbours_stays_forbidden() -> None:
    """Ten forbidden pairs are no less than one: their sum is beyond 64 bits."""
    fan = 10
    core = np.array([[0, FORBIDDEN], [FORBIDDEN, 0]], dtype=np.int64)
    same = np.arange(2)
    problem = Problem(
        unary=tuple(np.array([0, 0], dtype=np.int64) for _ in range(fan + 1)),
        edges=tuple(Edge(a=0, b=1 + i, core=core, rows=same, cols=same) for i in range(fan)),
        carriers=(),
        spans=np.zeros((0, 3), dtype=np.int64),
        base=np.zeros(0, dtype=np.int64),
        times=np.zeros(0, dtype=np.int64),
        limit=None,
    )
    flat = Flat.of(problem, scale_of(problem))
    small = region(flat, np.zeros(fan + 1, dtype=np.int64), np.array([0]), np.ones(2 * (fan + 1), dtype=bool))
    assert small.problem.unary[0].tolist() == [0, FORBIDDEN]
