"""The plan that would be best if something were otherwise: one decision is forced, and the problem solved again from the plan there is.

>>> found = solve_instead(reopened, question, question.masks(allows), limits=Limits(seconds=30.0))
>>> found.objective, found.bound
(395101223, 395101223)

The forced decision narrows the choice graph; everything else (pins, template, limit, tied or free) is as it was. The search starts near
the present plan: first everything is kept but what is within some edges of the forced decision, then the whole problem is solved, with
what that gave as the incumbent. Of several best plans it ends with one near the present, because only a better one replaces an incumbent;
so what differs is what has to. The bound is of the whole problem.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from solver_shard.choice.graph import ChoiceGraph, Ints
from solver_shard.choice.transients import Transients
from solver_shard.export.points import Masks
from solver_shard.lowered import Lowered
from solver_shard.plan.plan import Plan
from solver_shard.solve.conflict import narrowed
from solver_shard.solve.engine import solve
from solver_shard.solve.rounds import solve_in_rounds
from solver_shard.solve.solution import Solution, Status, objective_value
from solver_shard.solving import is_enough
from solver_shard.stages import StageClock
from solver_shard.study.question import Question
from solver_shard.study.reopen import Reopened, decided, writer_of

NEAR = (4, 12)
"""Edges around the forced nodes within which the plan is decided anew, at first."""

NEAR_SHARE = 0.15
"""Of the limits: the most that each of these takes."""

LEAST_SHARE = 0.2
"""Of the limits: what the whole problem gets at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a search may take: ``seconds`` of wall time and units of ``work``, each None for as much as it needs."""

    seconds: float | None
    work: float | None = None

    def part(self, share: float) -> Limits:
        """A share of both."""
        return Limits(seconds=None if self.seconds is None else share * self.seconds, work=None if self.work is None else share * self.work)

    def less(self, seconds: float, work: float) -> Limits:
        """What is left of them, and at least the least share."""

        def left(whole: float | None, used: float) -> float | None:
            return None if whole is None else max(whole - used, LEAST_SHARE * whole)

        return Limits(seconds=left(self.seconds, seconds), work=left(self.work, work))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """What is known of the problem with the forced decision.

    Attributes:
        solution: with its status and, where nothing fits, what any plan needs.
        bound: no plan with the forced decision has a lower objective; never below the present plan's bound where the graph is the plan's.
        plan: the best that was found within the limit, or None.
        impossible: no plan runs so at all, whatever the memory.
        lowered: the graph that ``solution`` is of.
    """

    solution: Solution
    bound: int
    plan: Plan | None
    impossible: bool
    lowered: Lowered


def solve_instead(
    reopened: Reopened,
    question: Question,
    masks: Masks,
    *,
    limits: Limits,
    gap: float | None = None,
    seed: int | None = None,
    workers: int = 2,
    start: Sequence[int] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Answer | None:
    """The best plan with some nodes of the question's graph narrowed to ``masks``.

    None where the graph has relays only where they save time, and the best plan without the memory limit does not keep it: then bytes
    count, and the answer is to be looked for in the graph that has them everywhere (``with_all_relays``).

    Args:
        limits: of the whole search. Where only work is limited, the same limit and seed give the same answer.
        gap, seed: the plan's own where None.
        start: an assignment of the question's graph to start from, in place of the present plan.
    """
    options, lowered = reopened.plan.options, question.lowered
    lowering = dataclasses.replace(lowered.lowering, graph=narrowed(lowered.lowering.graph, masks))
    problem = Transients(lowering, lowered.costs, question.classes)
    asked = {"objective": options.objective, "memory_weight": options.memory_weight, "gap": options.gap if gap is None else gap}
    began, seed = time.monotonic(), options.seed if seed is None else seed
    starts = [] if start is None else [problem.complete(np.array(start), "the plan so far")]
    near, work = _near(reopened, question, masks, problem, asked, limits.part(NEAR_SHARE), seed, stop) if start is None else (None, 0.0)
    if near is not None:
        starts = [problem.complete(near, "the present plan, but for what is near")]
    left = limits.less(time.monotonic() - began, work)
    limited = lowered.relays != "shared"
    found = solve_in_rounds(
        problem,
        time_limit=left.seconds,
        work_limit=left.work,
        seed=seed,
        warm_starts=tuple(starts),
        workers=workers,
        stop=stop,
        limited=limited,
        **asked,  # type: ignore[arg-type]  # one value each of the types it asks for
    )
    if not (limited or is_enough(found)):
        return None
    bound = found.bound or 0
    if question.own and reopened.bounded:
        bound = max(bound, reopened.plan.certificate.bound)
    if found.feasible:
        assert found.objective is not None, "a feasible solution has an objective"
        bound = min(bound, found.objective)
        writer = dataclasses.replace(writer_of(reopened.plan, lowered), lowering=lowering)
        return Answer(solution=found, bound=bound, plan=writer.plan(found, problem, StageClock()), impossible=False, lowered=lowered)
    impossible = found.status is Status.INFEASIBLE and found.assignment is None and found.peak_bound <= options.usable_memory
    return Answer(solution=found, bound=bound, plan=None, impossible=impossible, lowered=lowered)


def _near(
    reopened: Reopened,
    question: Question,
    masks: Masks,
    problem: Transients,
    asked: Mapping[str, object],
    limits: Limits,
    seed: int,
    stop: Callable[[], bool] | None,
) -> tuple[Ints | None, float]:
    """The best plan, plain, that decides anew only what is near the forced nodes, None where none of these fits; and the work it took.

    ``limits`` are those of each try.
    """
    graph = problem.graph
    if question.own:
        kept: Masks = {v: np.arange(size) == k for v, (size, k) in enumerate(zip(_sizes(question), reopened.assignment, strict=True))}
    else:
        kept = {v: mask for v, mask in decided(reopened.plan, question.lowered.lowering).items() if mask.any()}
    member = np.arange(question.lowered.lowering.graph.size) if problem.folded is None else problem.folded.member
    there = {int(member[v]): mask for v, mask in kept.items()}
    best: tuple[int, Ints] | None = None
    work = 0.0
    for radius in NEAR:
        if stop is not None and stop():
            break
        around = _around(graph, [int(member[v]) for v in masks], radius)
        left = narrowed(graph, {c: mask for c, mask in there.items() if not around[c]})
        found = solve(left, time_limit=limits.seconds, work_limit=limits.work, seed=seed, **asked)  # type: ignore[arg-type]  # as above
        work += found.work
        if not found.feasible or found.assignment is None or found.cost is None:
            continue
        peak = problem.peak(found.assignment)
        value = objective_value(reopened.plan.options.objective, reopened.plan.options.memory_weight, found.cost, peak)
        if peak <= reopened.plan.options.usable_memory and (best is None or value < best[0]):
            best = value, problem.plain(found.assignment)
    return (None if best is None else best[1]), work


def _sizes(question: Question) -> Sequence[int]:
    sizes: list[int] = question.lowered.lowering.graph.sizes().tolist()
    return sizes


def _around(graph: ChoiceGraph, nodes: Sequence[int], radius: int) -> np.ndarray:
    """Which nodes are within so many edges of some."""
    near = np.zeros(graph.size, dtype=bool)
    near[list(nodes)] = True
    for _ in range(radius):
        touched = near[graph.edges].any(axis=1)
        near[graph.edges[touched]] = True
    return near
