"""A compiled step on every device, in threads, gives the unsharded step, by the collectives that the plan lists."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from device_threads import compiled, together
from lowered import lowered, random_assignment
from programs import Builder, trained_mlp
from torch import nn
from traced_models import values_of

from solver_shard.errors import InternalError
from solver_shard.layout import Layout
from solver_shard.ops.random import Unsharded
from solver_shard.ops.run import run
from solver_shard.ops.shards import join, split
from solver_shard.plan.plan import Plan
from solver_shard.program import Program, Role
from solver_shard.tracing.clean import clean
from solver_shard.tracing.torch import trace_raw
from solver_shard.verification.simulate import simulate

pytestmark = pytest.mark.usefixtures("one_thread")


def collectives_of(plan: Plan, *, purposes: tuple[str, ...] = ("forward", "backward", "optimizer", "output")) -> Counter[Any]:
    """Those of one microbatch: kind, axes and bytes."""
    found: Counter[Any] = Counter()
    for reshard in plan.reshards:
        if reshard.purpose in purposes:
            found.update((step.kind, step.axes, step.nbytes) for step in reshard.steps if step.kind != "slice")
    found.update((inside.kind, inside.axes, inside.nbytes) for op in plan.ops for inside in op.collectives)
    return found


def step_of(plan: Plan, program: Program, values: dict[int, torch.Tensor], *, steps: int = 1, seed: int = 0, tangent: float | None = None):
    """Outputs and gradients of the last of several steps, put together; and what every device has called."""
    devices = compiled(plan, program)
    parts = {t: split(values[t], plan.tensors[t].layout, plan.mesh) for t in program.sources()}
    outputs: list[dict[int, torch.Tensor]] = [{} for _ in devices]
    gradients: list[dict[int, torch.Tensor]] = [{} for _ in devices]

    def work(k: int) -> None:
        step = devices[k][0]
        for _ in range(steps):
            state = step.forward({t: part[k] for t, part in parts.items()}, seed=seed)
            outputs[k] = dict(state.outputs)
            gradients[k] = step.backward(state, None if tangent is None else torch.tensor(tangent))

    together([lambda k=k: work(k) for k in range(len(devices))])
    whole = {}
    for t, (_, position) in devices[0][0].order.outputs.items():
        whole[t] = join([o[t] for o in outputs], plan.reshards[position].layout, program.tensors[t].shape, plan.mesh)
    last = {r.tensor: r.layout for r in plan.reshards if r.purpose == "optimizer"}
    for p, g in program.gradients.items():
        whole[g] = join([found[p] for found in gradients], last[g], program.tensors[g].shape, plan.mesh)
    return whole, [device.counts for _, device in devices]


class Dropped(nn.Module):
    """Dropout, a batch norm's buffers, in-place ops, a constant, noise, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm = nn.BatchNorm1d(12)
        self.again = nn.Linear(8, 12)
        self.again.weight = self.up.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.shift = torch.arange(12.0) / 12  # neither parameter nor buffer

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.up(x)) + self.shift
        h = F.dropout(h.relu_(), 0.25)
        h = h + torch.rand_like(h) * 0.1
        z = self.down(h) * self.scale
        z.add_(1.0)
        z = F.dropout(self.again(z), 0.5)
        return F.mse_loss(z.sum(-1), y)


def traced(model: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[Program, dict[int, torch.Tensor]]:
    raw = trace_raw(model, inputs, name="dropped")
    program = clean(raw)
    return program, {t: v.clone() for t, v in values_of(program, model, inputs | dict(raw.constants)).items()}


def close(found: dict[int, torch.Tensor], expected: dict[int, torch.Tensor], *, tolerance: float = 1e-5) -> None:
    for t, value in found.items():
        scale = max(1.0, float(expected[t].abs().max()))
        torch.testing.assert_close(value, expected[t], rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("mesh", ["2,2", "3"])
@pytest.mark.parametrize("sizes", [(12, 8, 20), (13, 7, 23)], ids=["even", "odd"])
def test_random_plans_give_the_unsharded_step(mesh: str, sizes: tuple[int, int, int]) -> None:
    program = trained_mlp(*sizes, 2)
    torch.manual_seed(0)
    values = {t: torch.randn(program.tensors[t].shape) * 0.5 for t in program.sources()}
    expected = run(program, values)
    made = lowered(program, mesh)
    for seed in range(3):
        plan = made.plan(random_assignment(made.graph, seed))
        found, counts = step_of(plan, program, values, steps=2)
        close(found, expected)
        assert counts[0] == Counter({key: 2 * n for key, n in collectives_of(plan).items()})
        calls = [Counter((kind, axes) for kind, axes, _ in device.elements()) for device in counts]
        assert all(device == calls[0] for device in calls)


@pytest.mark.parametrize("seed", range(3))
def test_dropout_buffers_constants_and_in_place_ops_are_those_of_the_model(seed: int) -> None:
    torch.manual_seed(0)
    model, inputs = Dropped(), {"x": torch.randn(6, 8), "y": torch.randn(6)}
    program, values = traced(model, inputs)
    with Unsharded(seed=5):
        loss = model(**inputs)
    loss.backward()
    made = lowered(program, "2,2")
    plan = made.plan(random_assignment(made.graph, seed))
    found, _ = step_of(plan, program, values, seed=5)
    close(found, run(program, values, seed=5))
    torch.testing.assert_close(found[program.outputs[0]], loss.detach())
    for p, g in program.gradients.items():
        torch.testing.assert_close(found[g], model.get_parameter(program.tensors[p].name).grad, rtol=1e-4, atol=1e-5)
    names = {program.tensors[t].name: t for t in program.outputs}
    torch.testing.assert_close(found[names["updated(norm.running_mean)"]], model.norm.running_mean)
    simulated = simulate(plan, program, values, seed=5)
    torch.testing.assert_close(simulated.outputs[0], loss.detach())


def test_the_gradient_of_the_loss_is_where_the_backward_pass_starts() -> None:
    torch.manual_seed(0)
    model, inputs = Dropped(), {"x": torch.randn(6, 8), "y": torch.randn(6)}
    program, values = traced(model, inputs)
    made = lowered(program, "2")
    plan = made.plan(random_assignment(made.graph, 0))
    once, _ = step_of(plan, program, values)
    found, _ = step_of(plan, program, values, tangent=0.25)
    for g in program.gradients.values():
        torch.testing.assert_close(found[g], once[g] * 0.25)


def test_two_parameters_may_have_one_gradient() -> None:
    b = Builder()
    x, v, w = b.input("x", 8, 6), b.weight("v", 8, 6, trainable=True), b.weight("w", 8, 6, trainable=True)
    h = b.relu(x)
    loss = b.add(b.einsum("ab,ab->", h, v), b.einsum("ab,ab->", h, w), role=Role.OUTPUT, result="loss")
    program = b.program(loss, gradients={v: h, w: h})
    values = {t: torch.randn(program.tensors[t].shape) for t in program.sources()}
    made = lowered(program, "2")
    plan = made.plan(random_assignment(made.graph, 1))
    found, _ = step_of(plan, program, values)
    torch.testing.assert_close(found[h], values[x].relu())
    ((step, _), *_) = compiled(plan, program)
    assert set(step.gradients) == {v, w}


def test_a_step_that_makes_another_shape_than_its_shard_is_found_out() -> None:
    program = trained_mlp(12, 8, 20, 2)
    values = {t: torch.randn(program.tensors[t].shape) for t in program.sources()}
    made = lowered(program, "2")
    plans = (made.plan(random_assignment(made.graph, seed)) for seed in range(200))
    plan = next(plan for plan in plans if plan.ops[0].strategy == ("c",))
    ops = (dataclasses.replace(plan.ops[0], result_layouts=(Layout.parse("S(0)"),)), *plan.ops[1:])
    with pytest.raises(InternalError, match=r"op 0 .* made \(12, 20\) where its device holds \(6, 20\)"):
        step_of(dataclasses.replace(plan, ops=ops), program, values)


def test_what_is_kept_for_the_backward_pass_is_gone_after_it() -> None:
    program = trained_mlp(12, 8, 20, 2)
    values = {t: torch.randn(program.tensors[t].shape) for t in program.sources()}
    made = lowered(program, "1")
    ((step, _),) = compiled(made.plan(random_assignment(made.graph, 0)), program)
    state = step.forward(values)
    step.backward(state)
    with pytest.raises(RuntimeError, match="has run its backward pass already"):
        step.backward(state)
