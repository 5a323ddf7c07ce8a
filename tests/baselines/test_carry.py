"""DTensor's decisions as a plan: priced by the evaluator, never better than the solver's, and kept where they can be said."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from dtensor_models import MODELS, inputs_of, random_pins

from solver_shard.analysis.greedy_plans import dtensor_greedy_plan
from solver_shard.baselines import left_over
from solver_shard.baselines.dtensor_greedy import NAME, Carried, Walk, carry, dtensor_masks, walk
from solver_shard.costs.cluster import load_cluster
from solver_shard.costs.collectives import Collectives
from solver_shard.costs.model import CostModel
from solver_shard.graph.lowering import lower
from solver_shard.graph.nodes import Lowering
from solver_shard.layout import Layout, strided
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.pipeline import plan_program
from solver_shard.plan.evaluate import evaluate
from solver_shard.rules.rulebook import Rulebook
from solver_shard.tracing.clean import TracedProgram, clean, clean_with_values
from solver_shard.tracing.joint_graph import RawGraph
from solver_shard.tracing.torch import trace_raw

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
    plan, walked = dtensor_greedy_plan(clean_with_values(raw), mesh=on, cluster=cluster, options=options, pins=pins)
    best = plan_program(clean(raw), mesh=on, cluster=cluster, options=options)
    assert best.certificate.objective <= plan.certificate.objective * (1 + best.certificate.gap + 1e-9)
    assert best.costs.communication_ns < walked.nanoseconds(Collectives(on, cluster))
    found = evaluate(plan, clean(raw), Rulebook(), CostModel(on, cluster))
    assert (found.objective, found.peak) == (plan.certificate.objective, plan.memory.peak)
    assert plan.options.propagation is not None
    assert plan.options.propagation.startswith(NAME)


def carried(name: str, mesh: Mesh, pins: dict[str, Layout]) -> tuple[TracedProgram, Walk, Lowering, Carried]:
    traced = clean_with_values(raw_of(name))
    found = walk(traced.raw, mesh, pins)
    costs, state = CostModel(mesh, load_cluster("h100")), Options(memory_limit=2**30).optimizer_state()
    lowering = lower(traced.program, Rulebook(), costs, optimizer_state=state, limit=2**30)
    return traced, found, lowering, carry(traced.program, traced, found, pins)


def test_what_dtensor_decides_is_kept() -> None:
    raw, mesh = raw_of("mlp"), Mesh.parse("4")
    pins = {"x": Layout.parse("R"), "up.weight": Layout.parse("S(0)"), "down.weight": Layout.parse("S(1)"), "up.bias": Layout.parse("S(0)")}
    plan, _ = dtensor_greedy_plan(
        clean_with_values(raw), mesh=mesh, cluster=load_cluster("h100"), options=Options(memory_limit=2**30), pins=pins
    )
    assert plan.options.propagation == NAME  # nothing is left to the solver
    made = [(op.name.split(".")[1], *map(str, op.result_layouts)) for op in plan.ops]
    forward, backward = made[:7], made[8:]
    assert forward == [
        ("einsum", "S(2)"), ("add", "S(2)"), ("gelu", "S(2)"), ("einsum", "P(sum)"), ("add", "P(sum)"), ("pow", "R"), ("mean", "R"),
    ]  # fmt: skip
    assert [row for row in backward if row[0] in ("einsum", "gelu_backward")] == [
        ("einsum", "S(2)"), ("einsum", "S(1)"), ("gelu_backward", "S(2)"), ("einsum", "S(0)"),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "mesh"), [("attention", "2,2"), ("gpt2", "4"), ("llama", "4")])
def test_only_strided_shards_are_left_to_the_solver(name: str, mesh: str) -> None:
    on = Mesh.parse(mesh)
    pins = random_pins(raw_of(name), on, random.Random(5))
    traced, found, lowering, decided = carried(name, on, pins)
    masks, missing = dtensor_masks(lowering, decided)
    assert len(missing) <= 0.05 * len(traced.program.ops)
    walked = {op.node: op for op in found.ops}
    for i in missing:
        results = [kind for raw in traced.program.ops[i].raw if raw in walked for kinds in walked[raw].results for kind in kinds or ()]
        assert not results or any(kind.is_strided for kind in results), traced.program.ops[i]
    assert all(mask.any() for mask in masks.values())


class Dispatch(torch.nn.Module):
    """Rows are sorted by expert and come back, as in a mixture of experts; each sequence sorts its own in the program."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        order = torch.argsort(experts.reshape(-1))
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0])
        rows = (x @ self.weight).reshape(-1, 6)[order // experts.shape[2]]
        return rows.relu()[inverse].sum()


def test_of_results_that_the_trace_does_not_have_nothing_is_said() -> None:
    inputs, mesh = {"x": torch.randn(4, 6, 6), "experts": torch.randint(4, (4, 6, 2))}, Mesh.parse("2,2")
    traced, pins = clean_with_values(trace_raw(Dispatch(), inputs, name="dispatch")), {"x": Layout.parse("S(0)R")}
    (values, order), *_ = [op.results for op in traced.program.ops if op.name == "aten.sort.default" and "index_put" in op.raw]
    assert values not in traced.program.readers()
    made = carry(traced.program, traced, walk(traced.raw, mesh, pins), pins).made
    assert values not in made
    assert order in made
    plan, _ = dtensor_greedy_plan(traced, mesh=mesh, cluster=load_cluster("h100"), options=Options(memory_limit=2**30), pins=pins)
    assert plan.layouts["x"] == pins["x"]


def test_what_cannot_be_said_is_listed() -> None:
    # the heads are cut on one device each, and DTensor keeps that through the view that merges them: a strided shard of (batch, heads)
    on, pins = Mesh.parse("4"), {"v.weight": Layout.parse("S(0)")}
    traced, found, lowering, decided = carried("llama", on, pins)
    _, before = dtensor_masks(lowering, decided)
    node = next(op for op in found.ops if op.op == "aten.mul.Tensor")
    strange = dataclasses.replace(node, results=((strided(0, 2),),))
    changed = dataclasses.replace(found, ops=tuple(strange if op is node else op for op in found.ops))
    _, missing = dtensor_masks(lowering, carry(traced.program, traced, changed, pins))
    (one,) = set(missing) - set(before)
    assert node.node in traced.program.ops[one].raw
    assert left_over(traced.program, (one,)) == "; left to the solver: norm1: aten.mul.Tensor"
