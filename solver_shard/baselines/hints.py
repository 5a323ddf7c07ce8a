"""What baselines make of a problem: hints from which the solver starts, and plans to fall back to where it proves nothing.

``dtensor-greedy`` and ``dijkstra-greedy`` decide op by op (:mod:`solver_shard.baselines.dtensor_greedy`,
:mod:`solver_shard.baselines.dijkstra_greedy`), the four propagation passes spread what is given
(:mod:`solver_shard.baselines.propagated`). All start from the same place: pinned tensors as pinned, inputs that are not cut by batch as far
as they may be, everything else replicated. Of equal hints one is kept, under both names.

A hint restricts some nodes; the solver completes it at the least cost. Of a tied problem the copies of a repeated layer decide as the one
in their middle does, for the first and the last of them may differ from all others by what lies before and behind.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from solver_shard.baselines import dijkstra_greedy
from solver_shard.baselines import dtensor_greedy as carry
from solver_shard.baselines.candidates import Candidate, candidates, completed, within
from solver_shard.baselines.dijkstra_greedy import greedy_walk, walk_masks
from solver_shard.baselines.dtensor_greedy import walk
from solver_shard.baselines.propagated import propagated_masks
from solver_shard.costs.collectives import Collectives
from solver_shard.costs.model import CostModel
from solver_shard.errors import SolverShardError
from solver_shard.graph.choice_graph import ChoiceGraph, Masks, WarmStart
from solver_shard.graph.narrowing import shrink
from solver_shard.graph.nodes import Lowering, SourceNode
from solver_shard.graph.pins import Allowed
from solver_shard.graph.symmetry import Folded
from solver_shard.graph.templates import restrictions, warm_starts
from solver_shard.graph.transient_memory import Transients
from solver_shard.layout import Layout, R, S
from solver_shard.mesh import Mesh
from solver_shard.program import Role
from solver_shard.rules.rulebook import Rulebook
from solver_shard.shardy.passes import PassName
from solver_shard.shardy.program import propagate_program
from solver_shard.solve.solution import Solution, Stage, Status, relative_gap

if TYPE_CHECKING:
    from solver_shard.clock import StageClock
    from solver_shard.graph.build import Lowered
    from solver_shard.options import Options
    from solver_shard.tracing.clean import TracedProgram


def hints(
    lowering: Lowering,
    costs: CostModel,
    rulebook: Rulebook,
    pinned: Mapping[int, Allowed],
    traced: TracedProgram | None = None,
    nodes: frozenset[int] | None = None,
) -> dict[str, Masks]:
    """Name to restriction of every greedy baseline; without ``traced`` there is none of DTensor.

    ``nodes``: those that are restricted; all by default. A baseline that cannot be had of this problem (a pin that leaves several
    placements, say) is left out.
    """
    stored = starting_layouts(lowering)
    program, mesh = lowering.program, costs.mesh

    def dtensor() -> Masks:
        assert traced is not None
        names = {program.tensors[t].name: layout for t, layout in stored.items()}
        known = {node.source.name for node in traced.raw.nodes if node.source is not None}
        pins = {name: layout for name, layout in names.items() if name in known}
        found = walk(traced.raw, mesh, pins, devices_per_host=costs.cluster.levels[0].size or mesh.size)
        return carry.dtensor_masks(lowering, carry.carry(program, traced, found, pins), nodes)[0]

    def dijkstra() -> Masks:
        made = greedy_walk(program, mesh, stored, rulebook, Collectives(mesh, costs.cluster))
        return walk_masks(lowering, made, nodes)[0]

    def propagated(name: PassName) -> Masks:
        given = {t: _open(layout) for t, layout in stored.items() if any(p != R for p in layout)} | dict(pinned)
        return propagated_masks(lowering, propagate_program(program, mesh, given, name, rulebook).layouts, nodes)

    makers: dict[str, Callable[[], Masks]] = {carry.NAME: dtensor} if traced is not None else {}
    makers[dijkstra_greedy.NAME] = dijkstra
    makers |= {name: lambda name=name: propagated(name) for name in get_args(PassName)}
    found: dict[str, Masks] = {}
    named: dict[tuple[tuple[int, bytes], ...], str] = {}
    for name, make in makers.items():
        try:
            masks = make()
        except SolverShardError:
            continue
        except Exception:
            if make is not dtensor:
                raise
            continue  # DTensor's own parts raise what they like; the solver needs no hint
        key = tuple((v, mask.tobytes()) for v, mask in masks.items())
        if key in named:
            both = f"{named[key]}, {name}"
            found[both] = found.pop(named[key])
            named[key] = both
        else:
            named[key], found[name] = name, masks
    return found


def middles(folded: Folded | None) -> frozenset[int] | None:
    """Of every class of tied nodes the one in the middle; None where nothing is tied."""
    if folded is None:
        return None
    members: dict[int, list[int]] = {}
    for v, c in enumerate(folded.member.tolist()):
        members.setdefault(c, []).append(v)
    return frozenset(copies[len(copies) // 2] for copies in members.values())


def starting_layouts(lowering: Lowering) -> dict[int, Layout]:
    """Where the walks start: inputs cut by batch, the rest replicated, as far as the pins allow."""

    def stored(node: SourceNode) -> Layout:
        if lowering.program.tensors[node.tensor].role is Role.INPUT:
            by_batch = [layout for layout in node.layouts if all(p in (R, S(0)) for p in layout)]
            if by_batch:
                return max(by_batch, key=lambda layout: sum(p == S(0) for p in layout))
        return node.layouts[0]

    return {node.tensor: stored(node) for node in lowering.nodes if isinstance(node, SourceNode)}


def _open(layout: Layout) -> Allowed:
    """A layout as what a pass starts from: cut as it is, open on the other axes."""
    return Allowed(axes=tuple(None if p == R else frozenset({p}) for p in layout), pins=("by batch",))


OWN_STARTS = ("the last round's plan", "the best plan so far", "the tied plan", "the least peak")
"""Warm starts that the solver makes itself: no baselines."""

OVERTIME = 0.05
"""Part of the time limit by which a solve may run over."""

LEAST = 3.0
"""Seconds that the baselines have, however short the time limit."""


def fall_back_to_baseline(
    lowered: Lowered, solution: Solution, problem: Transients, traced: TracedProgram | None, clock: StageClock
) -> tuple[Solution, str | None]:
    """``with_baselines`` of a lowered program: the greedy ones and the templates; they are only made where nothing is proven.

    A solve that ends with a proof needs none: no plan is better by more than the gap, a baseline's neither. When time or work run out
    before that, the plan with everything replicated and those of all templates (:mod:`solver_shard.baselines.candidates`) are held against
    the solver's, however short the limit was: nearly all of them are decided, and those whose least cost is above what is known are left
    out. Then the baselines that the search has not come to are completed by themselves, each in a little work, the greedy ones first. The
    cheapest that keeps the memory limit replaces the solver's plan if it is better, or if there is none. The dual bound stays what it was.
    With a plan in hand the greedy ones end ``OVERTIME`` after the time limit (``LEAST`` seconds, if that is more); without one all are
    tried, for any plan is better than none, and so they are where a limit on work ended the search, whose plan must not depend on the
    machine.

    ``traced``: the trace that the program was cleaned from; without it there is none of DTensor.
    """
    if solution.status not in (Status.FEASIBLE, Status.UNKNOWN):
        return solution, None
    started, options, lowering, costs = time.monotonic(), lowered.options, lowered.lowering, lowered.costs
    with clock.stage("baselines", "holding the plan against greedy ones and templates"):
        plain = Transients(lowering, costs, problem.classes)
        best, name = with_templates(solution, plain, costs.mesh, options)
        seconds = clock.solver_seconds * (1 + OVERTIME) - clock.seconds["solve"]
        if options.work_limit is not None and clock.seconds["solve"] < clock.solver_seconds:
            seconds = math.inf  # the work ended, not the time, and what the plan is must not depend on the machine
        spent = time.monotonic() - started
        if best.feasible and spent > max(seconds, LEAST):
            return best, name
        others = hints(lowering, costs, lowered.rulebook, lowered.pinned, traced, middles(plain.folded))
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
    best, name = _cheapest(found, plain, mesh, options, ease=False)
    if not best.feasible:
        best, name = _cheapest(found, plain, mesh, options, ease=True)
    return _staged(best, found, name, started), name


def _cheapest(found: Solution, plain: Transients, mesh: Mesh, options: Options, *, ease: bool) -> tuple[Solution, str | None]:
    """``with_templates`` with those that are of the graph as it stands, or (``ease``) with those that are but for their dead ends, too."""
    best, name = found, origin(found)
    plans = candidates(
        plain,
        restrictions(plain.lowering.program, mesh, accumulates=options.microbatches > 1),
        objective=options.objective,
        memory_weight=options.memory_weight,
        gap=options.gap,
        seed=options.seed,
        worth=lambda _, objective: not best.feasible or objective < _value(best),
        ease=ease,
    )
    for template, plan in plans:
        if plan is not None and (not best.feasible or plan.objective < _value(best)):
            best, name = _replaced(found, plan), f"{template}, eased" if ease else template
    return best, name


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
