"""What every strategy costs at least, by compiled loops: against enumeration, with prices, on thousands of problems."""

from __future__ import annotations

import numpy as np
import pytest
from flat_problems import allowed, some_problem

from solver_shard.solve.bounds.subgradient import Rows
from solver_shard.solve.bounds.trws import scale_of
from solver_shard.solve.bounds.trws_compiled import Passing, _split, min_marginals
from solver_shard.solve.flat import Flat
from solver_shard.solve.problem import Problem

BLOCKS, PER_BLOCK = 20, 100


def all_rows(flat: Flat) -> Rows:
    rows = Rows(flat)
    for t in range(len(flat.base)):
        rows.add(t)
    return rows


def least_by_strategy(problem: Problem, flat: Flat, theta: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[list[float]]:
    """The least cost under theta of the allowed assignments with each strategy; infinite where there is none."""
    least = [[np.inf] * int(k) for k in problem.sizes]
    for x in allowed(problem):
        cost = flat.cost(x, theta)
        for row, i in zip(least, x.tolist(), strict=True):
            row[i] = min(row[i], cost)
    return least


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_allowed_assignment_is_below_the_bound_of_any_of_its_strategies(block: int) -> None:
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        rng = np.random.default_rng(seed)
        problem = some_problem(rng, nodes=int(rng.integers(1, 5)), strategies=3, forbidden=float(rng.choice([0.0, 0.2, 0.5])))
        flat = Flat.of(problem, scale_of(problem))
        rows = all_rows(flat)
        high = float(rng.choice([0.0, 1e-3, 1.0, 1e6])) * flat.scale
        multipliers = rng.random(len(rows)) * high * (rng.random(len(rows)) < 0.7)
        theta = rows.price(multipliers)
        passing = Passing(flat)
        for _ in range(int(rng.integers(0, 6))):
            passing.sweep(theta)
        base, extra = min_marginals(passing, theta, forests=int(rng.integers(0, 4)), rng=rng)
        assert (extra >= 0).all(), seed
        least = np.concatenate(least_by_strategy(problem, flat, theta))
        assert (base + extra <= least).all(), seed
        offset = problem.constant * flat.scale + (rows.offset(multipliers) if len(rows) else 0.0)
        for x in allowed(problem):
            value = problem.value(x)
            if value is not None:
                assert base + offset + extra[problem.offsets[:-1] + x].max() <= value * flat.scale, seed


@pytest.mark.parametrize("seed", range(60))
def test_the_parts_are_never_negative_and_sum_to_the_cost(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = some_problem(rng, nodes=int(rng.integers(1, 6)), consistent=bool(seed % 4))
    flat = Flat.of(problem, scale_of(problem))
    g, passing = flat.graph, Passing(flat)
    for _ in range(seed % 5):
        passing.sweep(flat.theta)
    passing.forward_pass(flat.theta)
    unary, rows, cols = np.empty_like(flat.theta), np.empty_like(passing.backward), np.empty_like(passing.forward)
    constant = _split(g, flat.theta, passing.forward, passing.backward, unary, rows, cols, passing.scratch)
    assert (unary >= 0).all()
    cells = []
    for e in range(len(g.ea)):
        core = g.pool[g.toff[e] : g.toff[e] + g.nr[e] * g.nc[e]].reshape(g.nr[e], g.nc[e])
        cells.append(core + rows[g.bo[e] : g.bo[e + 1], None] + cols[None, g.fo[e] : g.fo[e + 1]])
        assert (cells[-1] >= 0).all()
    for x in allowed(problem):
        r, c = flat.cells(x)
        total = constant + unary[problem.offsets[:-1] + x].sum() + sum(cell[i, j] for cell, i, j in zip(cells, r, c, strict=True))
        assert total == flat.cost(x)


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_without_prices_is_exact_after_enough_sweeps(seed: int) -> None:
    """One forest holds every edge of a tree: bounds are then what enumeration finds, up to the rounding of messages."""
    rng = np.random.default_rng(seed)
    problem = some_problem(rng, nodes=5, degree=0.0, high=1000)
    tree = some_problem(rng, nodes=5, degree=9.0, high=1000, forbidden=0.0)
    seen: dict[int, int] = {}
    edges = tuple(e for e in tree.edges if seen.setdefault(e.b, e.a) == e.a)
    problem = Problem(unary=tree.unary, edges=edges, carriers=(), spans=problem.spans[:0], base=problem.base[:0], times=problem.times[:0])
    flat = Flat.of(problem, scale_of(problem))
    passing = Passing(flat)
    for _ in range(30):
        passing.sweep(flat.theta)
    base, extra = min_marginals(passing, flat.theta, forests=1, rng=rng)
    least = np.concatenate(least_by_strategy(problem, flat, flat.theta))
    assert np.abs(base + extra - least).max() <= 1e-3 * flat.scale
