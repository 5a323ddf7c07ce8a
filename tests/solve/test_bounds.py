"""Bounds hold, for any messages and multipliers, and say for each strategy what it costs at least."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from random_graphs import points, random_graph, some_limit

from solver_shard.graph.choice_graph import MIB, Ints
from solver_shard.solve.bounds.lagrangian import LagrangianDual, RestrictedMaster
from solver_shard.solve.bounds.trws import Messages, min_marginals, scale_of
from solver_shard.solve.presolve import presolve
from solver_shard.solve.presolve.reducer import NoAssignment
from solver_shard.solve.problem import Problem, from_graph

SEEDS = range(60)


def some_problem(seed: int) -> Problem | None:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, 5, 4)
    limit = some_limit(rng, points(graph))
    problem, _ = from_graph(graph, limit=limit, weight=int(rng.choice([0, 0, 7, MIB])))
    try:
        return presolve(problem)[0]
    except NoAssignment:
        return None


def allowed(problem: Problem) -> list[Ints]:
    every = (np.array(x, dtype=np.int64) for x in itertools.product(*[range(int(k)) for k in problem.sizes]))
    return [x for x in every if problem.allowed(x)]


@pytest.mark.parametrize("seed", SEEDS)
def test_message_bounds_rise_and_stay_below_every_cost(seed: int) -> None:
    problem = some_problem(seed)
    if problem is None:
        return
    messages = Messages(problem, scale_of(problem))
    bounds = [messages.sweep(messages.theta) for _ in range(10)]
    assert all(later >= earlier - len(problem.edges) for earlier, later in itertools.pairwise(bounds)), "but for rounding"
    least = min((problem.cost(x) for x in allowed(problem)), default=None)
    if least is not None:
        assert bounds[-1] + messages.constant <= least * messages.scale


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reparametrisation_is_the_same_function_without_negative_entries(seed: int) -> None:
    problem = some_problem(seed)
    if problem is None:
        return
    messages = Messages(problem, scale_of(problem))
    for _ in range(1 + seed % 4):
        messages.sweep(messages.theta)
    parts = messages.reparametrise(messages.theta)
    assert all((row >= 0).all() for row in [*parts.unary, *parts.tables])
    for x in allowed(problem):
        total = parts.constant + sum(row[i] for row, i in zip(parts.unary, x, strict=True))
        total += sum(table[e.rows[x[e.a]], e.cols[x[e.b]]] for e, table in zip(problem.edges, parts.tables, strict=True))
        assert total == problem.cost(x) * messages.scale


@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_hold_for_any_multipliers(seed: int) -> None:
    problem = some_problem(seed)
    if problem is None:
        return
    rng = np.random.default_rng(seed)
    dual = LagrangianDual(problem)
    values = [value for x in allowed(problem) if (value := problem.value(x)) is not None]
    for size in (0.0, 1e-3, 1.0, 1e3, 1e6):
        dual.evaluate(rng.random(len(problem.base)) * size * dual.scale, 2)
        assert not values or dual.bound <= min(values)


@pytest.mark.parametrize("seed", SEEDS)
def test_marginals_are_what_a_strategy_costs_at_least(seed: int) -> None:
    problem = some_problem(seed)
    if problem is None or problem.size == 0:
        return
    rng = np.random.default_rng(seed)
    dual = LagrangianDual(problem)
    multipliers = rng.random(len(problem.base)) * rng.choice([0.0, 1e-3, 1.0]) * dual.scale
    for _ in range(3):
        dual.evaluate(multipliers, 2)
    dual.multipliers = multipliers
    parts = dual.parts()
    extra = min_marginals(dual.messages, parts, 3, rng)
    base = parts.constant + dual.offset(multipliers)
    for x in allowed(problem):
        value = problem.value(x)
        if value is not None:
            for row, i in zip(extra, x, strict=True):
                assert base + row[i] <= (value + (problem.weight % MIB > 0)) * dual.scale


def test_the_linear_program_over_columns_bounds_the_bound() -> None:
    for seed in SEEDS:
        problem = some_problem(seed)
        if problem is None or not len(problem.base) or problem.limit is None:
            continue
        dual = LagrangianDual(problem)
        for x in allowed(problem):
            dual.column(x)
        if not dual.columns:
            continue
        for _ in range(5):
            dual.evaluate(dual.multipliers, 3)
            answer = RestrictedMaster(dual).solve(dual.multipliers, 1.0 * dual.scale)
            assert answer is not None
            assert answer[0] >= dual.best - 1e-6 * abs(dual.best) - 1.0
            dual.evaluate(answer[1], 3)
