"""Labels find the best assignment below a target, or that there is none, whatever the order, the prices and the size of numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flat_problems import allowed, some_problem
from random_graphs import hard_graph

from solver_shard.graph.choice_graph import MIB
from solver_shard.solve import parameters
from solver_shard.solve.bounds.labels import TooMany, best_below, split_of
from solver_shard.solve.bounds.lagrangian import LagrangianDual
from solver_shard.solve.presolve import presolve
from solver_shard.solve.problem import Problem, from_graph


def some_question(seed: int) -> tuple[Problem, LagrangianDual | None, list[int]]:
    """A problem with or without a limit and a weight on the peak, a dual at some multipliers or none, and all objectives, ascending."""
    rng = np.random.default_rng(seed)
    problem = some_problem(rng, nodes=int(rng.integers(1, 7)), degree=float(rng.choice([0.8, 1.6, 3.0])))
    if rng.random() < 0.4:
        problem = replace(problem, weight=int(rng.choice([1, 1000, MIB])), limit=problem.limit if rng.random() < 0.5 else None)
    values = sorted(value for x in allowed(problem) if (value := problem.value(x)) is not None)
    dual = None
    if rng.random() < 0.7:
        dual = LagrangianDual(problem)
        for _ in range(2):
            dual.evaluate(rng.random(len(problem.base)) * dual.scale * float(rng.choice([0.0, 1e-3, 1.0])), 2)
    return problem, dual, values


@pytest.mark.parametrize("block", range(4))
def test_the_best_below_a_target_by_enumeration(block: int) -> None:
    none = found = 0
    for seed in range(block * 40, block * 40 + 40):
        problem, dual, values = some_question(seed)
        split = None if dual is None else split_of(dual)
        targets = [None] if not values else [None, values[0], values[0] + 1, values[len(values) // 2], values[-1] + 1]
        for target in targets:
            answer = best_below(problem, target, split, least_peak=0 if dual is None else dual.low).assignment
            best = next((value for value in values if target is None or value < target), None)
            none, found = none + (best is None), found + (best is not None)
            assert (None if answer is None else problem.value(answer)) == best, (seed, target)
    assert min(none, found) > 15


def test_more_labels_than_allowed_prove_nothing() -> None:
    problem, _ = from_graph(hard_graph(np.random.default_rng(0), 16, degree=6), limit=None)
    with pytest.raises(TooMany) as many:
        best_below(problem, None, most_work=0.05)
    assert many.value.work >= 0.05
    with pytest.raises(TooMany):
        best_below(problem, None, over=lambda: True)


def test_a_problem_that_is_too_wide_or_has_too_many_times_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = from_graph(hard_graph(np.random.default_rng(0), 16, degree=6, room=2.0), limit=10**6)
    for name in ("LABEL_WIDEST", "LABEL_USES", "LABEL_CELLS"):
        with monkeypatch.context() as less:
            less.setattr(parameters, name, 1)
            with pytest.raises(TooMany):
                best_below(problem, None)


def test_the_same_question_has_the_same_answer_and_takes_the_same_work() -> None:
    small, _ = presolve(from_graph(hard_graph(np.random.default_rng(1), 9, degree=3, room=1.5), limit=None, weight=1000)[0])
    once, again = best_below(small, None), best_below(small, None)
    assert once.assignment is not None
    assert again.assignment is not None
    assert (once.assignment.tolist(), once.work) == (again.assignment.tolist(), again.work)
