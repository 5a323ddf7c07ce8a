"""Two key-value heads on four devices: attention is cut by the part of the axis that they allow, and never inside a head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from e2e.test_simulate import Case, check, llama, near, widened
from lowered import lowered, random_assignment, with_relays
from torch import nn
from torch.nn import functional as F
from traced_models import squares, values_of

from solver_shard.api import optimize
from solver_shard.costs.model import CostModel
from solver_shard.graph.nodes import OpNode
from solver_shard.mesh import Mesh
from solver_shard.ops.run import run
from solver_shard.plan.evaluate import evaluate
from solver_shard.plan.io import plan_from_json, plan_to_json
from solver_shard.plan.plan import Plan
from solver_shard.rules.rulebook import Rulebook
from solver_shard.tracing.torch import trace


class Grouped(nn.Module):
    """Attention that takes fewer key-value heads than query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, width, bias=False) for width in (64, 16, 16, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (made.unflatten(-1, (-1, 8)).transpose(1, 2) for made in (self.q(x), self.k(x), self.v(x)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


@functools.cache
def grouped() -> Case:
    torch.manual_seed(0)
    model, inputs = Grouped(), {"x": torch.randn(4, 16, 64)}
    traced = trace(model, inputs, name="grouped", loss_fn=squares)
    program, values = widened(traced, values_of(traced, model, inputs))
    return Case(program, values, run(program, values))


@functools.cache
def repeated() -> Case:
    """A Llama with fewer heads of keys and values than of queries; without a mask, its attention reads them as they are."""
    return llama(4, 16, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=2)


def planned(case: Case, **options: Any) -> Plan:
    """The solver's plan, priced anew by the evaluator and run on all devices; no tensor of heads is cut inside one."""
    plan = optimize(case.program, mesh="dp=2,tp=4", cluster=near(), gap=0.05, time_limit=15, **options)
    found = evaluate(plan, with_relays(case.program, plan), Rulebook(), CostModel(plan.mesh, plan.cluster, overlap=plan.options.overlap))
    assert (found.objective, found.peak) == (plan.certificate.objective, plan.memory.peak)
    check(case, plan)
    for op in plan.ops:
        for t, layout in [*zip(op.operands, op.operand_layouts, strict=True), *zip(op.results, op.result_layouts, strict=True)]:
            shape = plan.tensors[t].shape
            if len(shape) == 4 and shape[3] == 8 and (dims := [d for d in (1, 2) if shape[d] in (2, 8)]):  # heads of 8
                (dim,) = dims
                assert shape[dim] % cut(plan, layout, dim) == 0, f"{op.name} cuts the heads of {shape} as {layout}"
                assert 3 not in layout or "scaled_dot_product" not in op.name, f"{op.name} cuts inside a head of {shape}: {layout}"
    return plan


def cut(plan: Plan, layout: tuple[int, ...], dim: int) -> int:
    shards = 1
    for placement, size in zip(layout, plan.mesh.shape, strict=True):
        shards *= size if placement == dim else 1
    return shards


def attention(plan: Plan) -> list[tuple[str, ...]]:
    return [op.strategy for op in plan.ops if "scaled_dot_product" in op.name]


@pytest.mark.parametrize("seed", range(3))
def test_random_plans_that_cut_groups_give_the_unsharded_step(seed: int) -> None:
    case = grouped()
    made = lowered(case.program, "dp=2,tp=2x2", overlap=0.25)
    fixed = {}
    for i, op in enumerate(case.program.ops):
        if "scaled_dot_product" in op.name:
            column = made.lowering.strategies[i]
            options = [k for k in range(len(column.axis_choice)) if "group" in column.names(k)]
            assert options
            assert all("heads" in column.names(k)[:2] and column.names(k)[2] == "group" for k in options)
            fixed[made.lowering.index[OpNode, i, 0]] = options[seed % len(options)]
    assignment = random_assignment(made.graph, seed, fixed)
    plan = made.plan(assignment)
    found = made.evaluate(plan)
    assert (found.total_ns, found.peak) == (made.graph.cost(assignment), made.peak(assignment))
    check(case, plan)


@pytest.mark.parametrize("seed", range(2))
def test_random_plans_on_sub_axes_give_the_unsharded_step(seed: int) -> None:
    case = repeated()
    made = lowered(case.program, "dp=2,tp=2x2", overlap=0.25)
    assignment = random_assignment(made.graph, seed)
    plan = made.plan(assignment)
    found = made.evaluate(plan)
    assert (found.total_ns, found.peak) == (made.graph.cost(assignment), made.peak(assignment))
    check(case, plan)


@pytest.mark.parametrize("case", [grouped, repeated])
def test_the_solver_splits_the_axis_and_says_so(case: Callable[[], Case]) -> None:
    plan = planned(case())
    assert (plan.mesh, plan.options.split) == (Mesh.parse("dp=2,tp=2x2"), "auto")
    text = str(plan)
    assert "on dp=2,tp=4 (8 devices)" in text
    assert "tp=4 as tp.0=2,tp.1=2; a layout has one placement for each of dp, tp.0, tp.1" in text
    assert plan_from_json(plan_to_json(plan)) == plan


@pytest.mark.parametrize(
    ("case", "strategy", "names"), [(grouped, "group", "qkvo"), (repeated, "group", "model.layers.0.self_attn.{}_proj")]
)
def test_megatron_cuts_queries_by_the_axis_and_keys_by_its_part(case: Callable[[], Case], strategy: str, names: str) -> None:
    plan = planned(case(), template="dp=ddp,tp=megatron")
    assert attention(plan) == [("batch", "heads", strategy)] * 2
    layouts = [str(plan.layouts[f"{names.format(x) if '{' in names else x}.weight"]) for x in "qkvo"]
    assert layouts == ["RS(0)S(0)", "RS(0)R", "RS(0)R", "RS(1)S(1)"]
    assert {s.kind for r in plan.reshards for s in r.steps if "tp.0" in s.axes} == {"all_reduce"}


def test_pins_of_the_axis_hold_for_its_parts() -> None:
    plan = planned(grouped(), pins=["q.weight=tp=S(0)", "o.weight=R,S(1)", "x=S(0),R"])
    assert str(plan.layouts["q.weight"])[-8:] == "S(0)S(0)"
    assert str(plan.layouts["o.weight"]) == "RS(1)S(1)"
    assert str(plan.layouts["x"]) == "S(0)RR"


def test_a_split_by_hand_names_its_parts_in_pins_and_no_split_forbids_it() -> None:
    plan = planned(grouped(), split={"tp": (2, 2)}, pins=["k.weight=tp.0=S(0),tp.1=R"])
    assert str(plan.layouts["k.weight"])[-5:] == "S(0)R"
    assert plan.options.split == "tp=2x2"
    whole = planned(grouped(), split=False)
    assert (str(whole.mesh), whole.options.split) == ("dp=2,tp=4", "off")
