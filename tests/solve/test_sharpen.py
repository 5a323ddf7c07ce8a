"""Exact margins and multipliers: valid at every step, never worse than before, and at least as good as any multipliers can be."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from flat_problems import allowed, optimum, some_problem

from solver_shard.solve import search
from solver_shard.solve.bounds.bounding import Bounding, SmallBounding
from solver_shard.solve.bounds.elimination import CuttingPlanes, TooWide, between
from solver_shard.solve.bounds.subgradient import LargeBounding
from solver_shard.solve.bounds.trws import Parts
from solver_shard.solve.integer_program import MinMarginals
from solver_shard.solve.limits import Clock
from solver_shard.solve.parameters import SHARPEN_STEPS
from solver_shard.solve.problem import Problem
from solver_shard.solve.search import Sharpening


def bounding_of(problem: Problem, rng: np.random.Generator, *, large: bool, value: int | None, steps: int) -> Bounding:
    """Some steps of bounding, large or small."""
    prices = {int(t): float(rng.random()) for t in problem.times} if rng.random() < 0.5 else {}
    found: Bounding
    if large:
        found = LargeBounding(problem, Clock(None, None), found=lambda *told: None, value=lambda: value, prices=prices, known=None, rng=rng)
    else:
        found = SmallBounding(
            problem, Clock(None, None), gap=0.0, found=lambda *told: None, value=lambda: value, prices=prices, least_peak=0, rng=rng
        )
    for step, _ in enumerate(found.steps()):
        if step >= steps:
            break
    return found


def solvable(seed: int) -> tuple[np.random.Generator, Problem, int] | None:
    rng = np.random.default_rng(seed)
    problem = some_problem(rng, nodes=int(rng.integers(1, 6)), strategies=3, high=int(rng.choice([5, 1000, 10**6])))
    best = optimum(problem)
    return None if best is None or not len(problem.base) else (rng, problem, best)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("block", range(10))
def test_margins_hold_and_only_rise(block: int, large: bool) -> None:
    for seed in range(20 * block, 20 * block + 20):
        case = solvable(seed)
        if case is None:
            continue
        rng, problem, best = case
        value = best + int(rng.choice([1, 1 + best // 10, 10 + best]))
        bounding = bounding_of(problem, rng, large=large, value=value, steps=int(rng.integers(0, 4)))
        sharpening = Sharpening(problem, bounding, bounding.margins(), Clock(None, None))
        for _ in range(SHARPEN_STEPS + 1):
            before = sharpening.margins
            if sharpening.finished:
                break
            sharpening.step(value, 0.0)
            after = sharpening.margins
            assert after.base >= before.base
            assert all((row >= 0).all() for row in after.extra)
            for old, new in zip(before.extra, after.extra, strict=True):
                assert (after.base + new >= before.base + old - 1e-9 * abs(before.base)).all()
            extra = np.concatenate(after.extra)
            for x in allowed(problem):
                total = problem.value(x)
                if total is not None:
                    assert after.base + extra[problem.offsets[:-1] + x].max() <= max(total, value) * (1 + 1e-12), (seed, x)
                    assert after.base + extra[problem.offsets[:-1] + x].max() <= total * (1 + 1e-12) or total >= value, (seed, x)
            for x in sharpening.found:
                assert problem.allowed(x)
        assert sharpening.finished


def knapsack(seed: int) -> Problem:
    """No edges, one time, a limit that binds: the best bound of any multiplier is that of the linear program."""
    rng = np.random.default_rng(seed)
    while True:
        problem = some_problem(rng, nodes=8, strategies=3, degree=0.0, times=1, high=1000)
        if len(problem.base) and len(problem.carriers) > 6 and optimum(problem) is not None:
            return problem


@pytest.mark.parametrize("seed", range(20))
def test_planes_find_the_best_multiplier(seed: int) -> None:
    problem = knapsack(seed)
    best = optimum(problem)
    assert best is not None
    assert problem.limit is not None

    points = allowed(problem)
    costs = np.array([problem.cost(x) for x in points])
    excess = np.array([int(problem.profile(x)[0]) - problem.limit for x in points])

    def dual(price: float) -> float:
        return float((costs + price * excess).min())

    prices = [0.0, *np.geomspace(1e-14, 1e4, 2000)]
    grid = max(dual(price) for price in prices)
    (time,) = problem.times.tolist()
    near = {time: 1.5 * max(prices, key=dual)}
    bounding = bounding_of(problem, np.random.default_rng(seed), large=False, value=None, steps=0)
    sharpening = Sharpening(problem, bounding, bounding.margins(), Clock(None, None))
    sharpening.prices = sharpening.next = near
    while not sharpening.finished:
        sharpening.step(best + 100, 0.0)
    assert sharpening.margins.base >= grid - 0.05 * (best + 100 - grid) - 1, "but for what was not worth another step"
    assert sharpening.margins.base <= best


def test_a_problem_that_is_too_wide_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def wide(*args: object, **options: object) -> None:
        raise TooWide(3.0, 1.5)

    monkeypatch.setattr(search, "eliminate", wide)
    case = solvable(2)
    assert case is not None
    rng, problem, best = case
    clock = Clock(None, None)
    bounding = bounding_of(problem, rng, large=False, value=None, steps=2)
    margins = bounding.margins()
    sharpening = Sharpening(problem, bounding, margins, clock)
    sharpening.step(best + 10**9, 0.0)
    assert sharpening.wide
    assert sharpening.finished
    assert clock.work == 1.5
    assert margins.base <= sharpening.margins.base <= best
    sharpening.again()
    assert sharpening.finished, "nothing makes it narrower"


def test_an_incumbent_that_comes_nearer_opens_it_again() -> None:
    case = solvable(2)
    assert case is not None
    rng, problem, best = case
    bounding = bounding_of(problem, rng, large=False, value=None, steps=2)
    sharpening = Sharpening(problem, bounding, bounding.margins(), Clock(None, None))
    while not sharpening.finished:
        sharpening.step(best + 1000, 0.0)
    sharpening.again()
    assert not sharpening.finished
    assert sharpening.next == sharpening.prices


def test_multipliers_stay_in_reach_and_no_larger_than_they_must() -> None:
    problem = knapsack(0)
    planes = CuttingPlanes(problem)
    assert problem.limit is not None
    over = next(x for x in allowed(problem) if problem.profile(x)[0] > problem.limit)
    planes.add(over, {})
    cost, excess = problem.cost(over), int(problem.profile(over)[0]) - problem.limit
    answer = planes.best(cost + 100.0, near={}, reach=2.0)
    assert answer is not None
    (time,) = problem.times.tolist()
    assert answer[0] == pytest.approx(cost + 100.0)
    assert answer[1][time] == pytest.approx(100.0 / excess)
    near = {time: 10.0 / excess}
    answer = planes.best(cost + 100.0, near=near, reach=2.0)
    assert answer is not None
    assert answer[1][time] == pytest.approx(20.0 / excess)
    assert answer[0] == pytest.approx(cost + 20.0)


def test_prices_without_end_prove_nothing() -> None:
    """Sums beyond 2**53 are not exact: there is no bound then, rather than one that may be above the optimum."""
    for large in (False, True):
        for seed in range(20):
            case = solvable(seed)
            if case is None:
                continue
            rng, problem, best = case
            bounding = bounding_of(problem, rng, large=large, value=None, steps=2)
            margins = bounding.margins()
            for price in (1e6, 1e12, 1e18, 1e29):
                sharpening = Sharpening(problem, bounding, margins, Clock(None, None))
                sharpening.next = {int(t): price for t in problem.times}
                sharpening.step(best + 10, 0.0)
                assert sharpening.margins.base <= best, (seed, price)


def test_parts_that_are_not_exact_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = solvable(2)
    assert case is not None
    rng, problem, best = case
    bounding = bounding_of(problem, rng, large=False, value=None, steps=2)
    margins = bounding.margins()
    parts = bounding.split({})
    below = [row - 1 for row in parts.unary]
    for wrong in (Parts(-(2.0**60), parts.unary, parts.tables), Parts(parts.constant, below, parts.tables)):
        monkeypatch.setattr(bounding, "split", lambda prices, wrong=wrong: wrong)
        sharpening = Sharpening(problem, bounding, margins, Clock(None, None))
        sharpening.step(best + 1, 0.0)
        assert sharpening.margins.base == margins.base
        assert not sharpening.found
        assert sharpening.finished


def test_what_is_looked_for_costs_less_than_the_incumbent_to_the_last_digit() -> None:
    """Beyond 2**53 the float of a value may be below it: a strategy between the two may still be in a better solution."""
    value = 2**60 + 2**11 + 3
    assert float(value) < value
    margins = MinMarginals(0.0, [np.array([float(value), float(value) - 2**11, float(value) + 2**11])])
    assert (margins.extra[0] < margins.room(value)).tolist() == [True, True, False]
    assert MinMarginals(0.5, []).room(3) == 2.5
    for scale in (1.0, 2.0**20, 2.0**-11):
        assert Fraction(search._whole(value, scale)) / Fraction(scale) >= value
    assert search._whole(value, 2.0**-11) == 2**49 + 2
    assert search._whole(7, 2.0**20) == 7 * 2**20


def test_half_way_between_multipliers() -> None:
    assert between({1: 4.0, 3: 2.0}, {1: 2.0, 7: 6.0}) == {1: 3.0, 3: 1.0, 7: 3.0}
