"""What is returned when the solver stops early: never less than the best of the baselines.

A solve that ends with a proof needs none: no plan is better by more than the gap, a baseline's neither. When time or work run out before
that, the plan with everything replicated and those of all templates (:mod:`solver_shard.baselines.candidates`) are held against the
solver's, however short the limit was: nearly all of them are decided, and those whose least cost is above what is known are left out.
Then the baselines that the search has not come to are completed by themselves, each in a little work, the greedy ones first. The cheapest
that keeps the memory limit replaces the solver's plan if it is better, or if there is none. The dual bound stays what it was. With a plan
in hand the greedy ones end ``OVERTIME`` after the time limit (``LEAST`` seconds, if that is more); without one all are tried, for
any plan is better than none, and so they are where a limit on work ended the search, whose plan must not depend on the machine.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from solver_shard.baselines.candidates import Candidate, candidates, completed, within
from solver_shard.baselines.hints import hints, middles
from solver_shard.baselines.templates import warm_starts
from solver_shard.choice.graph import ChoiceGraph
from solver_shard.choice.nodes import Lowering
from solver_shard.choice.shrink import shrink
from solver_shard.choice.transients import Transients
from solver_shard.costs.model import CostModel
from solver_shard.mesh import Mesh
from solver_shard.pins import Allowed
from solver_shard.solve.solution import Solution, Stage, Status, WarmStart, relative_gap

if TYPE_CHECKING:
    from solver_shard.frontends.clean import Traced
    from solver_shard.plan.plan import Options
    from solver_shard.rulebook.build import Rulebook
    from solver_shard.stages import StageClock

OWN_STARTS = ("the last round's plan", "the best plan so far", "the tied plan", "the least peak")
"""Warm starts that the solver makes itself: no baselines."""

OVERTIME = 0.05
"""Part of the time limit by which a solve may run over."""

LEAST = 3.0
"""Seconds that the baselines have, however short the time limit."""


def or_baseline(
    solution: Solution,
    problem: Transients,
    lowering: Lowering,
    costs: CostModel,
    rulebook: Rulebook,
    pinned: Mapping[int, Allowed],
    traced: Traced | None,
    options: Options,
    clock: StageClock,
) -> tuple[Solution, str | None]:
    """``with_baselines`` of a lowered program: the greedy ones and the templates; they are only made where nothing is proven.

    ``traced``: the trace that the program was cleaned from; without it there is none of DTensor.
    """
    if solution.status not in (Status.FEASIBLE, Status.UNKNOWN):
        return solution, None
    started = time.monotonic()
    with clock.stage("baselines", "holding the plan against greedy ones and templates"):
        plain = Transients(lowering, costs, problem.classes)
        best, name = with_templates(solution, plain, costs.mesh, options)
        seconds = clock.solver_seconds * (1 + OVERTIME) - clock.seconds["solve"]
        if options.work_limit is not None and clock.seconds["solve"] < clock.solver_seconds:
            seconds = math.inf  # the work ended, not the time, and what the plan is must not depend on the machine
        spent = time.monotonic() - started
        if best.feasible and spent > max(seconds, LEAST):
            return best, name
        others = hints(lowering, costs, rulebook, pinned, traced, middles(plain.folded))
        return with_baselines(
            best,
            problem,
            plain.graph,
            warm_starts(lowering, plain.folded, costs.mesh, others),
            objective=options.objective,
            memory_weight=options.memory_weight,
            seed=options.seed,
            seconds=seconds - spent,
            name=name,
        )


def with_templates(found: Solution, plain: Transients, mesh: Mesh, options: Options) -> tuple[Solution, str | None]:
    """The solution, or the cheapest template where that is better; and the name of the baseline whose plan it is, if it is one's."""
    started = time.monotonic()
    best, name = found, origin(found)
    plans = candidates(
        plain,
        mesh,
        objective=options.objective,
        memory_weight=options.memory_weight,
        gap=options.gap,
        seed=options.seed,
        worth=lambda objective: not best.feasible or objective < _value(best),
    )
    for template, plan in plans:
        if plan is not None and (not best.feasible or plan.objective < _value(best)):
            best, name = _replaced(found, plan), template
    return _staged(best, found, name, started), name


def _staged(best: Solution, found: Solution, name: str | None, started: float) -> Solution:
    """What took a baseline's place says so."""
    if best is found:
        return best
    stage = Stage(name="baselines", seconds=time.monotonic() - started, note=f"the plan is that of {name}")
    return dataclasses.replace(best, stages=(*found.stages, stage))


def with_baselines(
    found: Solution,
    problem: Transients,
    graph: ChoiceGraph,
    baselines: Sequence[WarmStart],
    *,
    objective: str,
    memory_weight: int,
    seed: int,
    seconds: float,
    name: str | None = None,
) -> tuple[Solution, str | None]:
    """The solution, or the cheapest baseline where that is better; and its name where the plan is a baseline's that nothing proves.

    ``graph`` is the problem's before anything was added to it, ``baselines`` are restrictions of that graph; ``seconds`` is what is left
    of the time limit, less than nothing where it is over; ``name`` of the baseline whose plan the solution is, if that is known.
    """
    if found.status not in (Status.FEASIBLE, Status.UNKNOWN):
        return found, None
    started = time.monotonic()
    best, name = found, name or origin(found)
    tried = {stage.name.removeprefix("free, ").removeprefix("warm start ") for stage in found.stages if not stage.note.endswith("None")}
    for baseline in baselines:
        if baseline.name in tried and best.feasible:
            continue
        if best.feasible and time.monotonic() - started > max(seconds, LEAST):
            break
        made = _completed(problem, graph, baseline, objective, memory_weight, seed, found)
        if made is not None and (not best.feasible or _value(made) < _value(best)):
            best, name = made, baseline.name
    return _staged(best, found, name, started), name


def origin(found: Solution) -> str | None:
    """The warm start whose completion a solution is; None where the solver found it."""
    sources = [event.source.removeprefix("free, ") for event in found.history if event.objective is not None]
    words = sources[-1].removeprefix("warm start ") if sources and sources[-1].startswith("warm start ") else ""
    name = words.rpartition(", ")[0]
    return name if name and name not in OWN_STARTS else None


def _value(solution: Solution) -> int:
    assert solution.objective is not None, "a feasible solution has an objective"
    return solution.objective


def _completed(
    problem: Transients, graph: ChoiceGraph, baseline: WarmStart, objective: str, memory_weight: int, seed: int, found: Solution
) -> Solution | None:
    """A baseline as a plan, with what is proven of the problem; None where it cannot be had within the memory limit."""
    small = shrink(graph, {v: mask for v, mask in baseline.allowed.items() if mask.any()})
    if small is None:
        return None
    made = completed(small.graph, objective=objective, memory_weight=memory_weight, gap=0.01, seed=seed)
    plan = within(problem, small, made, objective, memory_weight)
    return None if plan is None else _replaced(found, plan)


def _replaced(found: Solution, plan: Candidate) -> Solution:
    """A baseline's plan in place of a solution, with what is proven of the problem."""
    bound = min(plan.objective, max([found.bound or 0, *(event.bound or 0 for event in found.history)]))
    return dataclasses.replace(
        found,
        status=Status.FEASIBLE,
        assignment=tuple(plan.assignment.tolist()),
        cost=plan.cost,
        peak=plan.peak,
        objective=plan.objective,
        bound=bound,
        gap=relative_gap(plan.objective, bound),
    )
