"""The relaxation of flat problems: at every step its bound is at most the optimum, and what it finds keeps the limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flat_problems import allowed, optimum, some_problem

from solver_shard.solve.bounds.subgradient import Relaxation
from solver_shard.solve.bounds.trws import scale_of
from solver_shard.solve.flat import Flat
from solver_shard.solve.problem import Problem

SEEDS = range(80)
MOST_STEPS = 2000


def relaxed(problem: Problem, rng: np.random.Generator, prices: dict[int, float] | None = None) -> Relaxation:
    return Relaxation(Flat.of(problem, scale_of(problem)), prices or {}, rng)


@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_and_assignments_enclose_the_optimum_at_every_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = some_problem(rng, nodes=int(rng.integers(1, 6)), consistent=bool(seed % 4), limited=bool(seed % 8))
    best = optimum(problem)
    prices = {int(t): float(rng.random() * 10.0 ** rng.integers(-6, 6)) for t in problem.times} if seed % 2 else {}
    relaxation = relaxed(problem, rng, prices)
    scale = relaxation.flat.scale
    for steps, _ in enumerate(relaxation.steps(), 1):
        assert best is None or relaxation.best <= best * scale
        for x in relaxation.found:
            if problem.allowed(x):
                value = problem.value(x)
                assert value is not None, "found assignments are within the limit"
                assert best is not None
                assert value >= best
        relaxation.found.clear()
        if best is None and steps > 200:  # nothing keeps the limit: the bound has no end
            break
        if steps % 7 == 0:
            relaxation.target = float("inf") if best is None else best * scale
        assert steps < MOST_STEPS
    base, extra = relaxation.margins()
    assert (extra >= 0).all()
    for x in allowed(problem):
        value = problem.value(x)
        if value is not None:
            assert base + extra[problem.offsets[:-1] + x].max() <= value * scale


def test_the_bound_exceeds_any_cost_where_nothing_keeps_the_limit() -> None:
    seen = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        problem = some_problem(rng, nodes=4, forbidden=0.0, degree=1.0)
        problem = replace(problem, limit=max(0, problem.least() - 1))
        if optimum(problem) is not None or not len(problem.base):
            continue
        relaxation = relaxed(problem, rng)
        for step, _ in enumerate(relaxation.steps()):
            if relaxation.best > problem.most() * relaxation.flat.scale or step > 2000:
                break
        assert relaxation.best > problem.most() * relaxation.flat.scale, seed
        seen += 1
        if seen == 20:
            return
    raise AssertionError("too few such problems")


@pytest.mark.parametrize("seed", range(20))
def test_prices_carry_a_bound_over(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = some_problem(rng, nodes=5, consistent=True)
    if optimum(problem) is None:
        return
    first = relaxed(problem, rng)
    for _ in first.steps():
        pass
    second = relaxed(problem, rng, first.prices())
    theta = second.theta()
    assert (theta <= first.theta() + 1).all(), "but for rounding"
    bound = max(second.passing.sweep(theta) for _ in range(300)) + second.offset()
    assert bound >= first.best - 1e-3 * abs(first.best) - 100 * problem.size


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3, 1e9, 1e20, 1e29])
def test_bounds_hold_for_any_multipliers(size: float) -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        problem = some_problem(rng, nodes=4)
        best = optimum(problem)
        relaxation = relaxed(problem, rng)
        for t in range(len(problem.base)):
            relaxation.rows.add(t)
        multipliers = rng.random(len(problem.base)) * size * relaxation.flat.scale
        theta = relaxation.theta(multipliers)
        for _ in range(3):
            bound = relaxation.passing.sweep(theta) + relaxation.offset(multipliers)
            assert best is None or bound <= best * relaxation.flat.scale


@pytest.mark.parametrize("seed", range(20))
def test_settled_multipliers_are_worth_what_they_were(seed: int) -> None:
    """``settled`` sweeps at the given multipliers alone: a valid bound, no other multipliers, and no less than where they came from."""
    rng = np.random.default_rng(seed)
    problem = some_problem(rng, nodes=5, consistent=True)
    best = optimum(problem)
    if best is None:
        return
    first = relaxed(problem, rng)
    for _ in first.steps():
        pass
    second = relaxed(problem, rng, first.prices())
    given = second.multipliers.copy()
    for _ in second.settled():
        assert second.best <= best * second.flat.scale, "a bound at every sweep"
    assert (second.multipliers == given).all()
    assert second.best >= first.best - 0.05 * abs(first.best) - 100 * problem.size
