"""A plan's choice graph, built anew, and the point of it that the plan is: where every question about other plans starts.

>>> found = reopen(plan, retrace(plan))
>>> found.problem.peak(found.assignment) == plan.memory.peak
True

A plan says layouts, strategies, reshards and what is kept. All other nodes of the graph (whose bytes an alias prolongs, in which storage
a view is kept) follow from these. That the point found is the plan is checked: it has the plan's objective and its peak to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from solver_shard.choice.nodes import Lowering
from solver_shard.choice.structure import node_classes
from solver_shard.choice.transients import Transients
from solver_shard.constraints import Relays
from solver_shard.errors import InputError
from solver_shard.export.loading import fitting
from solver_shard.export.points import Masks, Narrowing
from solver_shard.export.transfer import ORDER, Decisions
from solver_shard.lowered import Lowered, lower_program
from solver_shard.plan.legal import evaluated
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.solve.solution import objective_value
from solver_shard.stages import StageClock
from solver_shard.study.retrace import Retraced
from solver_shard.writing import Writer

if TYPE_CHECKING:
    from solver_shard.choice.graph import Ints


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

    def writer(self, lowered: Lowered | None = None) -> Writer:
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


def writer_of(plan: Plan, lowered: Lowered) -> Writer:
    """Writes solutions of a graph as plans with the options, cluster and origin of this one."""
    return Writer(
        program=lowered.program,
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
    found = {v: decisions.mask(node) for v, node in enumerate(lowering.nodes) if node.kind in ORDER}
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
