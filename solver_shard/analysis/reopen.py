"""A plan's choice graph, built anew, and the point of it that the plan is: where every question about other plans starts.

>>> found = reopen(plan, retrace(plan))
>>> found.problem.peak(found.assignment) == plan.memory.peak
True

A plan says layouts, strategies, reshards and what is kept. All other nodes of the graph (whose bytes an alias prolongs, in which storage
a view is kept) follow from these. That the point found is the plan is checked: it has the plan's objective and its peak to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from solver_shard.clock import StageClock
from solver_shard.errors import InputError
from solver_shard.graph.build import Lowered, lower_program
from solver_shard.graph.choice_graph import Masks
from solver_shard.graph.narrowing import Narrowing
from solver_shard.graph.nodes import Lowering
from solver_shard.graph.symmetry import node_classes
from solver_shard.graph.transient_memory import Transients
from solver_shard.options import part_of
from solver_shard.plan.decode import ORDER, Decisions, PlanWriter
from solver_shard.plan.evaluate import evaluated
from solver_shard.plan.plan import Plan
from solver_shard.program import Program, Relays
from solver_shard.runtime.apply import fitting
from solver_shard.solve.solution import objective_value
from solver_shard.tracing.load import is_entry_point, traced_of

if TYPE_CHECKING:
    import torch

    from solver_shard.graph.choice_graph import Ints
    from solver_shard.tracing.clean import TracedProgram


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reopened:
    """A plan's choice graph, and the plan in it.

    Attributes:
        lowered: of the plan's program, under its options, on its mesh.
        problem: what was solved, and what the plan's bound is of: tied or free.
        assignment: of ``lowered.lowering.graph``, one strategy per node.
    """

    plan: Plan
    lowered: Lowered
    problem: Transients
    assignment: tuple[int, ...]

    @property
    def bounded(self) -> bool:
        """Whether the plan's bound is of the whole graph: not where it keeps what a pass or a baseline decided, or with other relays."""
        return self.plan.options.propagation is None and self.lowered.relays == self.plan.relayed

    def writer(self, lowered: Lowered | None = None) -> PlanWriter:
        """Writes solutions of this graph, or of another one of the same plan, as plans."""
        return writer_of(self.plan, lowered or self.lowered)


def reopen(plan: Plan, retraced: Retraced, clock: StageClock | None = None) -> Reopened:
    """The choice graph of a plan and its point in it.

    Of a plan that keeps what a propagation pass or a baseline decided, the graph is the whole one, and the plan's bound is not of it.

    Raises:
        InputError: the graph does not have the plan: it was made by another version, or for other prices, or changed.
    """
    clock = clock or StageClock()
    lowered = _lowered(plan, retraced.program, clock, plan.relayed)
    if lowered.mesh != plan.mesh:
        raise _stale(plan, f"its mesh would be {lowered.mesh}")
    clock.say("finding the plan in its choice graph")
    tied = plan.certificate.problem == "tied"
    problem = Transients(lowered.lowering, lowered.costs, node_classes(lowered.lowering) if tied else None)
    assignment = point_of(plan, lowered.lowering)
    there = assignment if problem.folded is None else _folded(plan, problem.folded.member, assignment)
    cost, peak = int(lowered.lowering.graph.cost(assignment)), problem.peak(there)
    value = objective_value(plan.options.objective, plan.options.memory_weight, cost, peak)
    if (value, peak) != (plan.costs.objective, plan.memory.peak):
        values = f"its objective is {value} here and {plan.costs.objective} in the plan"
        raise _stale(plan, f"{values}, its peak {peak} bytes here and {plan.memory.peak} there")
    evaluated(plan, fitting(plan, lowered.given))
    return Reopened(plan=plan, lowered=lowered, problem=problem, assignment=tuple(assignment.tolist()))


def with_all_relays(reopened: Reopened, clock: StageClock | None = None) -> Reopened:
    """The plan in the graph that has relays everywhere: for plans that meet the memory limit, where this one does not.

    What repeats may be other copies there, so the plan's bound is not of it, and copies may decide otherwise than each other.
    """
    lowered = _lowered(reopened.plan, reopened.lowered.given, clock, "everywhere")
    problem = Transients(lowered.lowering, lowered.costs, None if reopened.problem.folded is None else node_classes(lowered.lowering))
    return Reopened(
        plan=reopened.plan, lowered=lowered, problem=problem, assignment=tuple(point_of(reopened.plan, lowered.lowering).tolist())
    )


def _lowered(plan: Plan, program: Program, clock: StageClock | None, relays: Relays) -> Lowered:
    return lower_program(program, mesh=plan.mesh, cluster=plan.cluster, options=plan.options, clock=clock, relays=relays)


def writer_of(plan: Plan, lowered: Lowered) -> PlanWriter:
    """Writes solutions of a graph as plans with the options, cluster and origin of this one."""
    return PlanWriter(
        lowering=lowered.lowering,
        costs=lowered.costs,
        cluster=plan.cluster,
        options=lowered.options,
        origin=plan.provenance,
        relayed=lowered.relays,
    )


def point_of(plan: Plan, lowering: Lowering) -> Ints:
    """The assignment that does what the plan does, in the graph of the plan's own program.

    Raises:
        InputError: there is none.
    """
    narrowing = Narrowing(lowering.graph)
    masks = decided(plan, lowering)
    for v, mask in masks.items():
        if not mask.any():
            raise _stale(plan, f"no strategy of {lowering.graph.names[v]!r} does what it says")
    if not narrowing.keep(masks):
        raise _stale(plan, "its decisions do not fit together")
    for v in range(lowering.graph.size):
        left = np.flatnonzero(narrowing.left[v])
        cheapest = left[np.argsort(lowering.graph.node_costs(v)[left], kind="stable")]  # alike in all that a plan says
        if len(left) > 1 and not any(narrowing.only(v, int(k)) for k in cheapest):
            raise _stale(plan, f"what it decides leaves nothing for {lowering.graph.names[v]!r}")
    return np.array([int(np.flatnonzero(narrowing.left[v])[0]) for v in range(lowering.graph.size)], dtype=np.int64)


def decided(plan: Plan, lowering: Lowering) -> Masks:
    """What the plan leaves of the nodes of its own program's graph; nodes of which it says nothing are not named."""
    decisions = Decisions(plan, lowering)
    found = {v: decisions.mask(node) for v, node in enumerate(lowering.nodes) if isinstance(node, ORDER)}
    return {v: mask for v, mask in found.items() if mask is not None}


def _folded(plan: Plan, member: Ints, assignment: Ints) -> Ints:
    """The assignment of the tied graph that stands for one of the free graph."""
    found = np.zeros(int(member.max()) + 1, dtype=np.int64)
    found[member] = assignment
    if (found[member] != assignment).any():
        raise _stale(plan, "its repeated layers do not decide alike")
    return found


def _stale(plan: Plan, why: str) -> InputError:
    made = plan.provenance.tool or "another tool"
    return InputError(
        f"the plan is no point of the choice graph that this version makes for it: {why}. It was made by {made}, perhaps of another state, "
        "or edited; solve it again with the same options"
    )


# The model behind a plan, traced anew: a plan names its model, and every question about other plans needs the program.
#
# >>> found = retrace(load_plan("plan.json"))                              # a preset is known from the plan
# >>> found = retrace(load_plan("plan.json"), "my_models:build")           # anything else is given
# >>> found.program.name, found.source
# ('llama3-8b', 'llama3-8b, batch 64, seq 8192, bf16')
#
# A plan file may come from anywhere, so a plan alone never makes a module be imported or a file be read: only presets are taken from it.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Retraced:
    """The program of a plan, before pins.

    Attributes:
        traced: the trace that it was cleaned from; None where a Program was given.
        source: what to record as the origin of plans for it.
    """

    program: Program
    traced: TracedProgram | None
    source: str


def retrace(
    plan: Plan,
    model: str | torch.nn.Module | Program | None = None,
    inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
) -> Retraced:
    """Trace the model that a plan was made for, with the plan's batch, sequence, dtype and checkpointing.

    Args:
        model: as of ``solver_shard.optimize``; None for the preset that the plan names.
        inputs, loss_fn: of a module, as they were when the plan was made.

    Raises:
        InputError: the plan names no preset and no model is given, or the model's step is not the plan's: the first difference is named.
        TraceError: the model cannot be traced.
    """
    from solver_shard.runtime.apply import fitting

    options = plan.options
    model = named_model(plan) if model is None else model
    named = isinstance(model, str) and not is_entry_point(model)
    if named and options.batch is None:
        raise InputError(f"the plan was not made from a preset or config; give the module or entry point of {plan.name!r}, not {model!r}")
    program, traced, source = traced_of(
        model,
        inputs,
        batch=part_of(options.batch, options.microbatches) if named else None,
        seq=options.seq if named else None,
        dtype=options.dtype if named else None,
        loss_fn=loss_fn,
        forward_only=options.forward_only,
        checkpoint=options.checkpoint and named,
    )
    fitting(plan, program)
    return Retraced(program=program, traced=traced, source=plan.provenance.source or source)


def named_model(plan: Plan) -> str:
    """The preset that a plan says it was made from; InputError where it names none."""
    from solver_shard.tracing.huggingface import PRESETS

    name = plan.provenance.source.partition(", ")[0]
    if name in PRESETS:
        return name
    raise InputError(
        f"the plan was made from {plan.provenance.source or 'an unknown model'!r}, which is no preset; say which model it is: --model "
        "package.module:function, or --config FILE for a config.json (retrace(plan, model))"
    )
