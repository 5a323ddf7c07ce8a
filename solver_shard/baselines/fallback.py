"""What is returned when the solver stops early: never less than the best of the baselines.

A solve that ends with a proof needs none: no plan is better by more than the gap, a baseline's neither. When time or work run out before
that, the baselines that the search has not come to are completed by themselves, each in a little work, the greedy ones first; the cheapest
that keeps the memory limit replaces the solver's plan if it is better, or if there is none. The dual bound stays what it was. With a plan
in hand this ends ``OVERTIME`` after the time limit (``LEAST`` seconds, if that is more); without one it ends when all have been tried, for
any plan is better than none.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from solver_shard.baselines.hints import hints, middles
from solver_shard.baselines.templates import warm_starts
from solver_shard.choice.graph import FORBIDDEN, ChoiceGraph
from solver_shard.choice.nodes import Lowering
from solver_shard.choice.structure import node_classes
from solver_shard.choice.transients import Transients
from solver_shard.costs.model import CostModel
from solver_shard.pins import Allowed
from solver_shard.solve.engine import solve
from solver_shard.solve.solution import Solution, Stage, Status, WarmStart, objective_value, relative_gap

if TYPE_CHECKING:
    from solver_shard.frontends.clean import Traced
    from solver_shard.plan.plan import Options
    from solver_shard.rulebook.build import Rulebook
    from solver_shard.stages import StageClock

WORK = 0.3
"""Work units for one baseline: most of its nodes are decided, and what is left falls apart."""

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
    with clock.stage("baselines", "holding the plan against greedy ones and templates"):
        plain = Transients(lowering, costs, None if problem.folded is None else node_classes(lowering))
        others = hints(lowering, costs, rulebook, pinned, traced, middles(plain.folded))
        return with_baselines(
            solution,
            problem,
            plain.graph,
            warm_starts(lowering, plain.folded, costs.mesh, others),
            objective=options.objective,
            memory_weight=options.memory_weight,
            seed=options.seed,
            seconds=clock.solver_seconds * (1 + OVERTIME) - clock.seconds["solve"],
        )


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
) -> tuple[Solution, str | None]:
    """The solution, or the cheapest baseline where that is better; and its name where the plan is a baseline's that nothing proves.

    ``graph`` is the problem's before anything was added to it, ``baselines`` are restrictions of that graph; ``seconds`` is what is left
    of the time limit, less than nothing where it is over.
    """
    if found.status not in (Status.FEASIBLE, Status.UNKNOWN):
        return found, None
    started = time.monotonic()
    best, name = found, origin(found)
    tried = {stage.name.removeprefix("free, ").removeprefix("warm start ") for stage in found.stages if not stage.note.endswith("None")}
    for baseline in baselines:
        if baseline.name in tried and best.feasible:
            continue
        if best.feasible and time.monotonic() - started > max(seconds, LEAST):
            break
        made = _completed(problem, graph, baseline, objective, memory_weight, seed, found)
        if made is not None and (not best.feasible or _value(made) < _value(best)):
            best, name = made, baseline.name
    if best is not found:
        stage = Stage(name="baselines", seconds=time.monotonic() - started, note=f"the plan is that of {name}")
        best = dataclasses.replace(best, stages=(*found.stages, stage))
    return best, name


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
    costs = graph.costs.copy()
    for v, mask in baseline.allowed.items():
        if mask.any():
            costs[graph.offsets[v] : graph.offsets[v + 1]][~mask] = FORBIDDEN
    narrowed = dataclasses.replace(graph, costs=costs)
    if graph.limit is not None and _least(narrowed) > graph.limit:
        return None
    made = solve(narrowed, objective=objective, memory_weight=memory_weight, gap=0.01, time_limit=None, work_limit=WORK, seed=seed)
    if not made.feasible or made.assignment is None or made.cost is None:
        return None
    peak = problem.peak(made.assignment)
    if graph.limit is not None and peak > graph.limit:
        return None
    value = objective_value(objective, memory_weight, made.cost, peak)
    bound = min(value, max([found.bound or 0, *(event.bound or 0 for event in found.history)]))
    return dataclasses.replace(
        found,
        status=Status.FEASIBLE,
        assignment=tuple(np.asarray(problem.plain(made.assignment)).tolist()),
        cost=made.cost,
        peak=peak,
        objective=value,
        bound=bound,
        gap=relative_gap(value, bound),
    )


def _least(graph: ChoiceGraph) -> int:
    """No allowed assignment has a smaller peak: every node at its smallest usage."""
    smallest = [int(np.where(graph.node_costs(v) < FORBIDDEN, graph.node_usages(v), FORBIDDEN).argmin()) for v in range(graph.size)]
    return graph.peak(smallest)
