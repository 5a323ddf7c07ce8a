"""DTensor's decisions as a plan: priced by the evaluator, never better than the solver's, and kept where they can be said."""

from __future__ import annotations

import pytest
from dtensor_models import MODELS, inputs_of

from solver_shard.api import plan_program
from solver_shard.baselines.carry import NAME, dtensor_greedy_plan
from solver_shard.costs.cluster import load_cluster
from solver_shard.costs.collectives import Collectives
from solver_shard.costs.model import CostModel
from solver_shard.frontends.clean import clean
from solver_shard.frontends.raw import RawGraph
from solver_shard.frontends.torch import trace_raw
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.plan.evaluate import evaluate
from solver_shard.plan.plan import Options
from solver_shard.rulebook.build import Rulebook

pytestmark = pytest.mark.usefixtures("one_thread")


def raw_of(name: str) -> RawGraph:
    model = MODELS[name]()
    return trace_raw(model, inputs_of(model), name=name, loss_fn=lambda output: (output**2).mean())


@pytest.mark.parametrize(("mesh", "cut"), [("4", "S(1)"), ("2,2", "S(0)R")])
@pytest.mark.parametrize("name", ["mlp", "attention", "gpt2", "llama"])
def test_the_plan_is_priced_by_the_evaluator_and_never_beats_the_solvers(name: str, mesh: str, cut: str) -> None:
    raw, on, cluster = raw_of(name), Mesh.parse(mesh), load_cluster("h100")
    pins = {"x": Layout.parse(cut)}
    options = Options(memory_limit=2**30, tied=False, pins=(f"x={','.join(map(str, pins['x']))}",))
    plan, walked = dtensor_greedy_plan(raw, mesh=on, cluster=cluster, options=options, pins=pins)
    best = plan_program(clean(raw), mesh=on, cluster=cluster, options=options)
    assert best.certificate.objective <= plan.certificate.objective * (1 + best.certificate.gap + 1e-9)
    assert best.costs.communication_ns < walked.nanoseconds(Collectives(on, cluster))
    found = evaluate(plan, clean(raw), Rulebook(), CostModel(on, cluster))
    assert (found.objective, found.peak) == (plan.certificate.objective, plan.memory.peak)
    assert plan.options.propagation is not None
    assert plan.options.propagation.startswith(NAME)


def test_what_dtensor_decides_is_kept_and_the_rest_is_listed() -> None:
    raw, mesh = raw_of("mlp"), Mesh.parse("4")
    pins = {"x": Layout.parse("R"), "up.weight": Layout.parse("S(0)"), "down.weight": Layout.parse("S(1)"), "up.bias": Layout.parse("S(0)")}
    plan, walked = dtensor_greedy_plan(raw, mesh=mesh, cluster=load_cluster("h100"), options=Options(memory_limit=2**30), pins=pins)
    by_node = {op.node: op for op in walked.ops}
    names = {name: node for node in raw.nodes for name in [node.name]}
    kept = 0
    program = clean(raw)
    for op, made in zip(program.ops, plan.ops, strict=True):
        for name in op.raw:
            theirs = by_node.get(name)
            if theirs is not None and theirs.op == op.name and names[name].results[0] is not None:
                shape = names[name].results[0][0]  # type: ignore[index]
                if shape == program.tensors[op.results[0]].shape and theirs.results[0] is not None:
                    wanted = Layout(theirs.results[0])  # type: ignore[arg-type]
                    kept += made.result_layouts[0] == wanted
    assert kept >= 3
    gelu = next(made for op, made in zip(program.ops, plan.ops, strict=True) if op.name == "aten.gelu.default")
    assert gelu.result_layouts == (Layout.parse("S(2)"),)
    assert "aten.add.Tensor" in str(plan.options.propagation)
