"""Deciding op by op with our rules and costs, carried over to plans that the evaluator prices."""

from __future__ import annotations

import pytest
from dtensor_models import MODELS, inputs_of

from solver_shard.analysis.greedy_plans import dijkstra_greedy_plan
from solver_shard.baselines.dijkstra_greedy import NAME, greedy_walk
from solver_shard.costs.cluster import load_cluster
from solver_shard.costs.collectives import Collectives
from solver_shard.costs.model import CostModel
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.pipeline import plan_program
from solver_shard.plan.evaluate import evaluate
from solver_shard.program import Program
from solver_shard.rules.rulebook import Rulebook
from solver_shard.tracing.torch import trace

pytestmark = pytest.mark.usefixtures("one_thread")


def program_of(name: str) -> Program:
    model = MODELS[name]()
    return trace(model, inputs_of(model), name=name, loss_fn=lambda output: (output**2).mean())


@pytest.mark.parametrize("mesh", ["4", "2,2"])
@pytest.mark.parametrize("name", ["mlp", "attention", "gpt2", "llama"])
def test_the_plan_is_priced_by_the_evaluator_and_never_beats_the_solvers(name: str, mesh: str) -> None:
    program, on, cluster = program_of(name), Mesh.parse(mesh), load_cluster("h100")
    cut = "S(0)" if mesh == "4" else "S(0),R"
    options = Options(memory_limit=2**30, tied=False, pins=(f"x={cut}",))
    plan = dijkstra_greedy_plan(program, mesh=on, cluster=cluster, options=options)
    assert plan.options.propagation is not None
    assert plan.options.propagation.startswith(NAME)
    best = plan_program(program, mesh=on, cluster=cluster, options=options)
    assert best.certificate.bound <= plan.certificate.objective
    assert best.certificate.objective <= plan.certificate.objective * (1 + best.certificate.gap + 1e-9)
    found = evaluate(plan, program, Rulebook(), CostModel(on, cluster))
    assert (found.objective, found.peak) == (plan.certificate.objective, plan.memory.peak)


def test_ops_of_the_plan_run_as_the_walk_decides() -> None:
    program, mesh, cluster = program_of("mlp"), Mesh.parse("4"), load_cluster("h100")
    x = next(t for t, tensor in enumerate(program.tensors) if tensor.name == "x")
    walk = greedy_walk(program, mesh, {x: Layout.parse("S(0)")}, Rulebook(), Collectives(mesh, cluster))
    options = Options(memory_limit=2**30, pins=("x=S(0)",))
    plan = dijkstra_greedy_plan(program, mesh=mesh, cluster=cluster, options=options)
    assert plan.options.propagation == NAME
    for op, made in zip(plan.ops, walk.ops, strict=True):
        assert tuple(map(tuple, op.operand_layouts)) == made.inputs
        assert tuple(map(tuple, op.result_layouts)) == made.results


def test_the_walk_only_sees_one_op_at_a_time() -> None:
    # a cut sum that is cheaper to leave pending than to gather first stays pending into the next op that can take it
    program, mesh, cluster = program_of("mlp"), Mesh.parse("4"), load_cluster("h100")
    weights = {t: Layout.parse("S(1)") for t, tensor in enumerate(program.tensors) if tensor.name == "up.weight"}
    walk = greedy_walk(program, mesh, weights, Rulebook(), Collectives(mesh, cluster))
    assert sum(len(op.moves) for op in walk.ops) > 0
    assert walk.nanoseconds == sum(round(move.cost) for op in walk.ops for move in op.moves)
