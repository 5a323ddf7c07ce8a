"""Neighbourhoods of an incumbent: a region of nodes is free, the rest stays; what is left is a small integer program.

Regions are connected (breadth-first from a random node), because tables couple neighbours; every other one starts from
nodes that live at the time of the peak, because memory couples those. The size of the regions follows what the programs can prove.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve.clock import Clock
from solver_shard.solve.dual import Dual
from solver_shard.solve.kernel import cells_of, solve_kernel
from solver_shard.solve.presolve import NoAssignment, presolve
from solver_shard.solve.problem import Problem

PATIENCE = 25
"""Regions in a row without a better solution after which the search stops."""

FIRST_CELLS = 4000
LEAST_CELLS = 500
MOST_CELLS = 30_000


def neighbourhoods(problem: Problem, incumbent: Ints, clock: Clock, *, seed: int, gap: float, offer: Callable[[Ints, str], bool]) -> None:
    """Improve an incumbent until the clock or patience ends; better ones go to ``offer``."""
    rng = np.random.default_rng(seed)
    around: list[list[tuple[int, int]]] = [[] for _ in range(problem.size)]
    for edge in problem.edges:
        around[edge.a].append((edge.b, edge.core.size))
        around[edge.b].append((edge.a, edge.core.size))
    cells, stale = FIRST_CELLS, 0
    while stale < PATIENCE and not clock.over():
        region = _region(problem, incumbent, around, cells, rng, from_peak=stale % 2 == 1)
        keep = [np.ones(int(k), dtype=bool) if v in region else np.arange(k) == incumbent[v] for v, k in enumerate(problem.sizes)]
        stale += 1
        clock.spend(1e-3 * problem.size)
        try:
            small, undo = presolve(problem, keep)
        except NoAssignment:
            continue
        if cells_of(small) > 4 * MOST_CELLS:
            cells = max(LEAST_CELLS, cells // 2)
            continue
        dual = Dual(small)
        for _ in range(4):
            dual.evaluate(np.zeros(len(small.base)), 5)
        clock.spend(dual.work)
        value = problem.value(incumbent)
        result = solve_kernel(small, dual, clock, cutoff=value, gap=gap, seed=seed, effort=2.0, sure=False)
        if result.assignment is not None:
            better = undo.restore(result.assignment)
            if offer(better, "neighbourhood"):
                incumbent, stale = better, 0
        cells = min(MOST_CELLS, int(cells * 1.3)) if result.proven else max(LEAST_CELLS, int(cells * 0.7))


def _region(
    problem: Problem, incumbent: Ints, around: list[list[tuple[int, int]]], cells: int, rng: np.random.Generator, *, from_peak: bool
) -> set[int]:
    starts = [int(rng.integers(problem.size))]
    if from_peak and len(problem.base):
        peak = int(problem.profile(incumbent).argmax())
        live = sorted({c.node for c in problem.carriers if problem.mult[peak, c.column]})
        if live:
            starts = [int(v) for v in rng.choice(live, min(4, len(live)), replace=False)]
    region: set[int] = set()
    queue = deque(starts)
    total = 0
    while queue and total < cells:
        v = queue.popleft()
        if v in region:
            continue
        region.add(v)
        total += sum(size for w, size in around[v] if w in region) + int(problem.sizes[v])
        nearby = [w for w, _ in around[v] if w not in region]
        queue.extend(int(w) for w in rng.permutation(nearby))
    return region
