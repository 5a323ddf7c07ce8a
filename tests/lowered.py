"""Programs lowered on a mesh, plans from any assignment of their choice graph, and random assignments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from points import plan_of, random_point

from solver_shard.costs.cluster import load_cluster
from solver_shard.costs.memory import OptimizerState
from solver_shard.costs.model import CostModel
from solver_shard.graph.choice_graph import ChoiceGraph
from solver_shard.graph.lowering import Schedule, lower
from solver_shard.graph.narrowing import Narrowing
from solver_shard.graph.nodes import HoldNode, Lowering, OpNode, Pins, StateNode
from solver_shard.graph.transient_memory import Transients
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.plan.evaluate import Evaluation, evaluate
from solver_shard.plan.plan import Plan
from solver_shard.program import Program, constrain
from solver_shard.rules.rulebook import Rulebook
from solver_shard.rules.table import load_table


@dataclass(frozen=True, kw_only=True, eq=False)
class Lowered:
    """A program on a mesh, and everything that made its choice graph."""

    program: Program
    rulebook: Rulebook
    costs: CostModel
    state: OptimizerState
    lowering: Lowering
    options: Options

    @property
    def graph(self) -> ChoiceGraph:
        return self.lowering.graph

    def plan(self, assignment: Sequence[int]) -> Plan:
        return plan_of(self.lowering, assignment, self.costs, self.options)

    def peak(self, assignment: Sequence[int]) -> int:
        """The true peak, with the intermediates of transitions, which the graph alone does not count."""
        return Transients(self.lowering, self.costs).peak(assignment)

    def evaluate(self, plan: Plan) -> Evaluation:
        return evaluate(plan, self.program, self.rulebook, self.costs)


def lowered(
    program: Program,
    mesh: str,
    *,
    cluster: str = "h100",
    overlap: float = 0.0,
    fusion: bool = False,
    optimizer: str = "adamw",
    master_weights: bool = True,
    state_bytes: int | None = None,
    reduce_dtype: str | None = None,
    clip: bool = False,
    microbatches: int = 1,
    objective: str = "time",
    memory_weight: int = 0,
    limit: int = 2**40,
    pins: Pins | None = None,
    schedule: Schedule = "sequential",
) -> Lowered:
    rulebook = Rulebook(load_table())
    options = Options(
        optimizer=optimizer,
        master_weights=master_weights,
        state_bytes=state_bytes,
        reduce_dtype=reduce_dtype,
        clip=clip,
        microbatches=microbatches,
        overlap=overlap,
        fusion=fusion,
        memory_limit=limit,
        objective=objective,  # type: ignore[arg-type]
        memory_weight=memory_weight,
    )
    costs = CostModel(Mesh.parse(mesh), load_cluster(cluster), overlap=overlap)
    return Lowered(
        program=program,
        rulebook=rulebook,
        costs=costs,
        state=options.optimizer_state(),
        lowering=lower(
            program,
            rulebook,
            costs,
            optimizer_state=options.optimizer_state(),
            pins=pins,
            limit=limit,
            fusion=fusion,
            microbatches=microbatches,
            schedule=schedule,
        ),
        options=options,
    )


def random_assignment(graph: ChoiceGraph, seed: int, fixed: Mapping[int, int] | None = None) -> tuple[int, ...]:
    """One strategy per node, drawn at random node after node; ``fixed`` gives the strategies of some nodes."""
    return random_point(graph, seed, fixed)


def allowed_beside(graph: ChoiceGraph, fixed: Mapping[int, int]) -> dict[int, list[int]]:
    """The strategies of every node that arc consistency leaves beside those of some nodes."""
    narrowing = Narrowing(graph)
    masks = {v: np.arange(len(graph.node_costs(v))) == strategy for v, strategy in fixed.items()}
    assert narrowing.keep(masks), "the fixed strategies do not fit together"
    return {v: np.flatnonzero(mask).tolist() for v, mask in narrowing.left.items()}


def agrees(case: Lowered, assignment: Sequence[int]) -> Plan:
    """Plan, evaluator and choice graph say the same of an assignment, to the integer; the graph without its intermediates."""
    plan, graph = case.plan(assignment), case.graph
    found = case.evaluate(plan)
    assert graph.allowed(assignment)
    assert found.total_ns == graph.cost(assignment)
    assert found.peak == case.peak(assignment)
    counted = [total - between for total, between in zip(found.totals, found.profile["intermediates"], strict=True)]
    assert counted == graph.profile(assignment).tolist()
    confirms(found, plan)
    return plan


def confirms(found: Evaluation, plan: Plan) -> None:
    """The evaluator found every price, life and byte that a plan states."""
    assert found.total_ns == plan.costs.total_ns
    assert (found.compute_ns, found.update_ns, found.communication_ns) == (
        plan.costs.compute_ns,
        plan.costs.update_ns,
        plan.costs.communication_ns,
    )
    assert found.unshared_ns == plan.costs.unshared_ns
    assert found.objective == plan.costs.objective
    assert found.peak == plan.memory.peak
    assert found.op_ns == tuple(op.nanoseconds for op in plan.ops)
    assert found.traffic_ns == tuple(reshard.traffic_ns for reshard in plan.reshards)
    assert found.reshard_ns == tuple(reshard.nanoseconds for reshard in plan.reshards)
    assert found.reshard_lives == tuple((reshard.start, reshard.stop, reshard.nbytes) for reshard in plan.reshards)
    assert found.hold_lives == tuple((hold.start, hold.stop, hold.nbytes) for hold in plan.holds)
    for category, series in plan.memory.series.items():
        assert [found.profile[category][t] for t in plan.memory.times] == list(series), category
    assert found.profile.keys() == plan.memory.series.keys()


def replicated(case: Lowered) -> Plan:
    """A plan with every op and optimizer state replicated, where tensors are kept as they are produced; the rest is drawn."""
    first = {v: 0 for v, node in enumerate(case.lowering.nodes) if isinstance(node, (OpNode, StateNode, HoldNode))}
    return case.plan(random_assignment(case.graph, 0, first))


def with_relays(program: Program, plan: Plan) -> Program:
    """The traced program, with the places in which the plan brings tensors to another layout for all of their readers."""
    return constrain(program, {}, plan.relays)[0] if plan.relays else program
