"""Propagation over traced programs: the rules that both share, pins in, layouts out, and the plan that follows."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from entry_models import mlp
from torch import nn
from traced_models import squares

from solver_shard.analysis.greedy_plans import propagate
from solver_shard.api import optimize
from solver_shard.baselines.propagated import Propagation
from solver_shard.errors import InputError
from solver_shard.graph.pins import parse_pin, resolve_pins
from solver_shard.mesh import Mesh
from solver_shard.program import Op, Program, Ref, Tensor
from solver_shard.rules.rulebook import build_rule
from solver_shard.rules.table import load_table
from solver_shard.shardy.passes import PassName, PropagationOptions
from solver_shard.shardy.program import PropagatedProgram, propagate_program, sharding_rule
from solver_shard.tracing.torch import trace

PASSES: tuple[PassName, ...] = ("basic", "aggressive", "op-priority", "user-priority")


def rule_of(name: str, *shapes: tuple[int, ...], result: tuple[int, ...], **attributes: object) -> str:
    """The text of an ATen op's rule for propagation."""
    operands = [Tensor(name=f"t{i}", shape=shape, dtype="f32") for i, shape in enumerate(shapes)]
    made = Tensor(name="made", shape=result, dtype="f32")
    op = Op(name=name, operands=tuple(range(len(shapes))), results=(len(shapes),), attributes=attributes)
    return str(sharding_rule(build_rule(op, operands, [made], load_table()))).removeprefix("#sdy.op_sharding_rule")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            rule_of("aten.mm.default", (8, 2), (2, 4), result=(8, 4), self=Ref(0), mat2=Ref(1)),
            "<([i, j], [j, k])->([i, k]) {i=8, j=2, k=4} reduction={j}>",
        ),
        (
            rule_of("aten.add.Tensor", (8, 4), (4,), result=(8, 4), self=Ref(0), other=Ref(1), alpha=1),
            "<([i, j], [j])->([i, j]) {i=8, j=4}>",
        ),
        (
            rule_of("aten._softmax.default", (8, 4), result=(8, 4), self=Ref(0), dim=1, half_to_float=False),
            "<([i, j])->([i, j]) {i=8, j=4} need_replication={j} blocked_propagation={j}>",
        ),
        (rule_of("aten.view.default", (8, 4), result=(32,), self=Ref(0), size=(32,)), "<([i, j])->([ij]) {i=8, j=4}>"),
        (rule_of("aten.made_up.default", (8,), result=(8,), self=Ref(0)), "None"),
    ],
)
def test_one_rule_serves_the_solver_and_the_passes(found: str, expected: str) -> None:
    assert found == expected


@functools.cache
def traced() -> Program:
    model, inputs, loss = mlp()
    return trace(model, inputs, name="mlp", loss_fn=loss)


def propagated(program: Program, mesh: str, pins: Sequence[str], name: PassName = "user-priority") -> PropagatedProgram:
    axes = Mesh.parse(mesh)
    return propagate_program(program, axes, resolve_pins([parse_pin(pin, axes) for pin in pins], program, axes), name)


@pytest.mark.parametrize("name", PASSES)
def test_two_pins_make_a_megatron_block(name: PassName) -> None:
    program = traced()
    made = propagated(program, "dp=4,tp=2", ["x=S(0),R", "up.weight=R,S(0)"], name)
    layouts = {tensor.name: str(layout) for tensor, layout in zip(program.tensors, made.layouts, strict=True)}
    assert {name: layouts[name] for name in ("x", "up.weight", "up.bias", "down.weight", "down.bias", "relu", "down.add", "loss")} == {
        "x": "S(0)R", "up.weight": "RS(0)", "up.bias": "RS(0)", "down.weight": "RS(1)", "down.bias": "RR",
        "relu": "S(0)S(1)", "down.add": "S(0)R", "loss": "RR",
    }  # fmt: skip
    assert layouts["grad(down.weight)"] == "RS(1)"
    assert made.lost == {}
    names = {program.tensors[t].name for t, decided in enumerate(made.decided) if not decided}
    assert "down.bias" in names
    assert "up.bias" not in names


def test_gradients_and_outputs_can_be_pinned() -> None:
    program = traced()
    made = propagated(program, "dp=4,tp=2", ["grad(up.weight)=S(0),R", "down.bias=S(0),R"])
    layouts = {tensor.name: str(layout) for tensor, layout in zip(program.tensors, made.layouts, strict=True)}
    assert layouts["grad(up.weight)"] == "S(0)R"
    assert layouts["down.add"] == "S(1)R"


def test_nothing_pinned_is_all_replicated() -> None:
    made = propagated(traced(), "dp=4,tp=2", [])
    assert {str(layout) for layout in made.layouts} == {"RR"}
    assert not any(made.decided)


class Flat(nn.Module):
    """A view that puts a dim under another, so that its cut comes second."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.view(32)


def test_what_a_layout_cannot_say_is_told() -> None:
    """Dim 0 on tp above dim 1 on dp is one dim cut by tp first: the reversed order."""
    program = trace(Flat(), {"x": torch.zeros(32)}, name="flat", loss_fn=squares)
    made = propagated(program, "dp=2,tp=4", ["weight=S(1),S(0)"])
    layouts = {tensor.name: str(layout) for tensor, layout in zip(program.tensors, made.layouts, strict=True)}
    assert layouts["x"] == "RS(0)"
    assert {program.tensors[t].name: what for t, what in made.lost.items()}["x"] == "S(0) on dp"
    plan = propagate(program, mesh="dp=2,tp=4", pins=["weight=S(1),S(0)"], which="user-priority").plan
    assert "left out (too many shards, or an order that only parameters may have)" in str(plan)
    assert "x S(0) on dp" in str(plan)
    assert "no plan that keeps what propagation decided has less time" in str(plan)


@pytest.mark.parametrize(
    ("pin", "message"),
    [("up.weight=tp=S(*)", "leaves 'up.weight' S(0), S(1), _S(0), _S(1) on tp"), ("down.add=R,P", "leaves 'down.add' P(sum) on tp")],
)
def test_pins_without_one_placement_are_refused(pin: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        propagated(traced(), "dp=4,tp=2", [pin])
    assert message in str(caught.value)


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_gives_a_complete_plan_that_costs_no_less_than_the_best(name: PassName) -> None:
    pins = ["x=S(0),R", "up.weight=R,S(0)"]
    program = traced()
    plan = propagate(program, mesh="dp=4,tp=2", pins=pins, which=name).plan
    best = optimize(program, mesh="dp=4,tp=2", pins=pins, memory="80GiB", reserve=0)
    assert plan.costs.total_ns >= best.costs.total_ns
    assert plan.options.propagation == name
    assert {tensor.name: str(tensor.state) for tensor in plan.tensors if tensor.state is not None} == {
        tensor.name: str(tensor.layout) for tensor in plan.tensors if tensor.state is not None
    }
    assert f"layouts      by propagation: {name}" in str(plan)


def test_conflicts_become_transitions_with_a_price() -> None:
    """Input and weight both want tp; whoever loses is moved."""
    free = propagate(traced(), mesh="tp=4", pins=["x=S(0)"], which="user-priority").plan
    both = propagate(traced(), mesh="tp=4", pins=["x=S(0)", "up.weight=S(0)"], which="user-priority").plan

    assert {reshard.purpose for reshard in free.reshards if reshard.steps} == {"optimizer", "output"}
    moved = {both.tensors[reshard.tensor].name for reshard in both.reshards if reshard.purpose == "forward" and reshard.steps}
    assert moved & {"x", "up.weight", "up.einsum"}
    assert both.costs.by_kind_ns["all_gather"] > 0


def test_parameters_keep_the_order_in_which_axes_cut_a_dim() -> None:
    program = traced()
    made = propagated(program, "dp=4,tp=2", ["up.weight=_S(0),S(0)"])
    layouts = {tensor.name: str(layout) for tensor, layout in zip(program.tensors, made.layouts, strict=True)}
    assert layouts["up.weight"] == "_S(0)S(0)"
    assert layouts["grad(up.weight)"] == "_S(0)S(0)"
    assert layouts["relu"] == "RS(1)"  # what ops make for each other is cut in the mesh's order, as far as that goes
    assert {program.tensors[t].name: what for t, what in made.lost.items()}["relu"] == "S(1) on dp"


def test_a_plan_records_the_pass_and_its_options() -> None:
    assert str(Propagation(name="basic")) == "basic"
    options = PropagationOptions(strategy="basic-then-aggressive", run_op_priority=False)
    assert str(Propagation(name="op-priority", options=options)) == "op-priority (basic-then-aggressive, no op priorities)"
