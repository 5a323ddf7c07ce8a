"""Both integer programs against enumeration, with and without a cutoff."""

from __future__ import annotations

import numpy as np
import pytest
from random_graphs import best_value, points, random_graph, some_limit

from solver_shard.solve import kernel
from solver_shard.solve.clock import Clock
from solver_shard.solve.dual import Dual
from solver_shard.solve.kernel import solve_kernel
from solver_shard.solve.presolve import NoAssignment, presolve
from solver_shard.solve.problem import from_graph
from solver_shard.solve.solution import MIB


@pytest.mark.parametrize("tiny", [0, 10**6], ids=["highs", "cp-sat"])
@pytest.mark.parametrize("seed", range(40))
def test_optimum_of_a_kernel(seed: int, tiny: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "TINY_VALUES", tiny)
    rng = np.random.default_rng(1000 + seed)
    graph = random_graph(rng, 6, 4)
    found = points(graph)
    limit = some_limit(rng, found)
    objective = str(rng.choice(["time", "memory"]))
    weight = MIB if objective == "memory" else int(rng.choice([0, 0, 1000]))
    problem, _ = from_graph(graph, limit=limit, weight=weight, costs_count=objective == "time")
    try:
        small, undo = presolve(problem)
    except NoAssignment:
        return
    best = best_value(found, limit, objective, weight)
    dual = Dual(small)
    for _ in range(3):
        dual.evaluate(rng.random(len(small.base)) * dual.scale * (seed % 3), 2)
    for cutoff in (None, None if best is None else best + 1, best):
        result = solve_kernel(small, dual, Clock(None, None), cutoff=cutoff, gap=0.0, seed=seed, effort=10.0)
        if best is None or cutoff == best:
            assert result.assignment is None
            assert result.empty or (result.bound is not None and best is not None and result.bound <= best)
        else:
            assert result.assignment is not None
            assert problem.value(undo.restore(result.assignment)) == best
            assert result.bound is not None
            assert best - 1 <= result.bound <= best
