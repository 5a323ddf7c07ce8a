"""Plans of models that are hard to run, run: a slice of ``experiments/runnable.py``, which has all models, meshes and seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lowered import lowered
from points import random_point
from runnable_models import Drawing, build, squared
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from solver_shard.costs.layouts import free_move
from solver_shard.errors import InputError
from solver_shard.layout import Layout
from solver_shard.ops.random import Unsharded
from solver_shard.plan.io import plan_from_json, plan_to_json
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.runtime.apply import apply, reseed
from solver_shard.runtime.optimizer import clip_grad_norm_
from solver_shard.tracing.torch import trace
from solver_shard.verification import check, verify
from solver_shard.verification.simulate import simulate
from solver_shard.verification.subject import Subject, subject_of, widened

pytestmark = pytest.mark.usefixtures("one_thread")


def subject(name: str) -> Subject:
    model, inputs, options = build(name)
    return subject_of(model, inputs, name=name, **options)


def plan_of(program: Program, mesh: str, *, seed: int = 0, training: bool = True, **options: bool) -> Plan:
    made = lowered(program, mesh, optimizer="adamw" if training else "none", **options)
    plan = made.plan(random_point(made.graph, seed))
    return dataclasses.replace(plan, options=dataclasses.replace(plan.options, forward_only=not training))


SLICE = {
    "batch norm first, 2d": "2", "batch norm behind frozen layers, 1d": "3", "instance norm first, 1d": "2,2",
    "batch norm first, evaluation": "2", "batch norm first, without statistics": "2", "group norm first": "3",
    "convolution behind a frozen one": "2", "LSTM with a given state": "2", "LSTM, forward only": "3", "LSTM, without bias": "2",
    "GRU, dropout between layers": "2", "LSTM, dropout between layers": "2", "draws: mixed up": "3", "draws: normal of tensors": "2",
    "draws: sampled": "2,2", "draws: sampled gumbel": "2", "draws: other in place": "3", "draws: randomised leak": "2",
    "draws: picked": "2", "draws: poisson": "2", "draws again in backward": "2", "draws in columns first": "2",
    "causal attention with dropout": "2,2", "grouped attention with dropout": "2", "classes in dim 1": "2", "classes in dim 1, images": "3",
    "permuted: max pooling": "2", "permuted: convolution": "2", "complex: conjugated": "2,2", "complex: resolved": "3",
    "complex: negated": "2", "complex: products": "2", "fft: whole": "2", "one hot, asserted": "2", "algebra: solution": "2",
    "algebra: root": "3",
}  # fmt: skip


@pytest.mark.parametrize("name", SLICE)
def test_random_plans_run_and_hold(name: str) -> None:
    case = widened(subject(name))
    verdict = check(plan_of(case.program, SLICE[name], training=not case.forward_only), case)
    assert verdict.holds, str(verdict)
    assert {d.reference for d in verdict.differences} == {"graph", "model"}, verdict.notes


@pytest.mark.parametrize(("name", "mesh"), [("masked attention with dropout", "3"), ("grouped attention with dropout", "2,2")])
def test_where_keys_are_cut_dropout_leaves_the_scores_that_it_left_before(name: str, mesh: str) -> None:
    """Of the scores, a device of the backward pass has other keys than one of the forward pass."""
    case = widened(subject(name))
    plans = (plan_of(case.program, mesh, seed=seed) for seed in range(40))
    plan = next(plan for plan in plans if any("keys" in op.strategy for op in plan.ops))
    verdict = check(plan, case)
    assert verdict.holds, str(verdict)


@pytest.mark.parametrize("name", ["all of these at once", "complex: conjugated"])
def test_plans_hold_in_real_processes(name: str) -> None:
    case = subject(name)
    verdict = check(plan_of(case.program, "2", clip=True), case, processes=True, timeout=240)
    assert verdict.holds, str(verdict)
    assert {d.reference for d in verdict.differences} == {"graph", "model"}, verdict.notes
    assert sum(c.run for c in verdict.collectives) > 0


def test_the_norm_of_complex_gradients_counts_both_parts() -> None:
    case = widened(subject("complex: plain"))
    verdict = check(plan_of(case.program, "2", clip=True), case)
    assert verdict.holds, str(verdict)


@pytest.mark.parametrize("seed", range(4))
def test_the_new_value_of_a_buffer_is_made_where_the_buffer_lies(seed: int) -> None:
    program = subject("batch norm first, 2d").program
    plan = plan_of(program, "2,2", seed=seed)
    returned = {r.tensor: r.layout for r in plan.reshards if r.purpose == "output"}
    written = {t: program.written(t)[0] for t in program.outputs if program.written(t)}
    assert len(written) == 3
    assert all(free_move(returned[t], plan.tensors[s].layout) for t, s in written.items())


class Elsewhere(nn.Module):
    """Draws in its loss only when it runs, not when it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = 0 if torch.compiler.is_compiling() else torch.rand(3)[0]
        return (self.up(x) ** 2).mean() + noise


def test_a_model_that_draws_otherwise_than_its_trace_is_not_compared() -> None:
    case = widened(subject_of(Elsewhere(), {"x": torch.zeros(4, 6)}, name="elsewhere"))
    verdict = check(plan_of(case.program, "2"), case)
    assert verdict.holds, str(verdict)
    assert {d.reference for d in verdict.differences} == {"graph"}
    assert any("draw 0 has shape [3] in the model, none in the trace" in note for note in verdict.notes)


def test_a_draw_that_must_be_whole_is_not_cut() -> None:
    case = subject_of(Drawing(lambda x: torch.poisson(F.softplus(x.detach()))), {"x": torch.zeros(4, 6)}, name="counts", loss_fn=squared)
    made = plan_of(case.program, "2")
    i = next(i for i, op in enumerate(made.ops) if "poisson" in op.name)
    cut = Layout.parse("S(0)")
    op = dataclasses.replace(made.ops[i], operand_layouts=(cut,), result_layouts=(cut,))
    broken = dataclasses.replace(made, ops=(*made.ops[:i], op, *made.ops[i + 1 :]))
    with pytest.raises(InputError, match=r"random op aten.poisson.default \(model\) cannot be drawn shard by shard"):
        simulate(broken, case.program, list(case.values))


def test_a_traced_model_leaves_the_settings_of_torch_as_they_were() -> None:
    before = torch.backends.mkldnn.enabled
    model, inputs, options = build("LSTM, forward only")
    names = {op.name for op in trace(model, inputs, name="lstm", **options).ops}
    assert not any("mkldnn" in name for name in names)
    assert torch.backends.mkldnn.enabled == before


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One process, which is the whole mesh."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


ALONE = (
    "batch norm first, 2d", "instance norm first, 1d", "LSTM", "LSTM with a given state", "LSTM, dropout between layers",
    "LSTM, two layers, both ways, batch first", "LSTM, projected, both ways", "LSTM, without bias", "LSTM, forward only",
    "GRU, evaluation, two layers", "draws: mixed up", "draws: sampled", "masked attention with dropout", "classes in dim 1",
    "complex: conjugated", "one hot, asserted",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # where the model itself runs
@pytest.mark.parametrize("name", ALONE)
def test_an_applied_model_takes_the_step_of_the_model(name: str, mesh: DeviceMesh) -> None:
    """The plan comes from a file, and the model is built anew."""
    model, inputs, options = build(name)
    training = not options.get("forward_only", False)
    plan = plan_from_json(plan_to_json(plan_of(trace(model, inputs, name=name, **options), "dp=1", training=training)))
    model, inputs, _ = build(name)
    loss_fn = options.get("loss_fn")
    sharded = apply(model, plan, mesh, inputs=inputs, loss_fn=loss_fn)
    reseed(sharded, 7)
    made = sharded(**inputs)
    with Unsharded(7):
        expected = loss_fn(model(**inputs)) if loss_fn else model(**inputs)
    torch.testing.assert_close(made.full_tensor() if isinstance(made, DTensor) else made, expected)
    if not training:
        return
    made.backward()
    expected.backward()
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(sharded.get_parameter(key).grad.full_tensor(), parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["LSTM, dropout between layers", "batch norm first, 2d"])
def test_a_model_in_the_other_mode_is_told_so(name: str, mesh: DeviceMesh) -> None:
    model, inputs, options = build(name)
    plan = plan_of(trace(model, inputs, name=name, **options), "dp=1")
    list(model.eval().modules())[-1].train()  # one may be in another mode than the whole
    modes = [module.training for module in model.modules()]
    with pytest.raises(InputError, match=r"op \d+ of the plan is .* The model is in evaluation mode, .* call model.train\(\) first"):
        apply(model, plan, mesh, inputs=inputs, **options)
    assert [module.training for module in model.modules()] == modes


def test_a_model_in_the_other_mode_is_told_so_in_verify() -> None:
    model, inputs, options = build("LSTM, evaluation, two layers")
    plan = plan_of(trace(model, inputs, name="lstm", **options), "2")
    dropout = build("LSTM, dropout between layers")[0]
    with pytest.raises(InputError, match=r"the model is in training mode, .* call model.eval\(\) first"):
        verify(plan, dropout, inputs, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.double(), r"trained parameter 'up.weight' f32\[6, 5\], the model trained parameter 'up.weight' f64\[6, 5\]"),
        (lambda model: build("LSTM, without bias")[0], r"trained parameter 'cell.bias_ih_l0' f32\[16\], the model no 'cell.bias_ih_l0'"),
        (lambda model: build("LSTM, evaluation, two layers")[0], r"no 'cell.weight_ih_l1', the model trained parameter"),
    ],
    ids=["dtype", "less", "more"],
)
def test_the_first_tensor_that_differs_is_named(change: Any, message: str, mesh: DeviceMesh) -> None:
    model, inputs, options = build("LSTM")
    plan = plan_of(trace(model, inputs, name="lstm", **options), "dp=1")
    with pytest.raises(InputError, match=f"the plan has {message}"):
        apply(change(model), plan, mesh, inputs=inputs, **options)


def test_a_conjugated_input_is_read_conjugated(mesh: DeviceMesh) -> None:
    model, inputs, options = build("complex: plain")
    plan = plan_of(trace(model, inputs, name="complex", **options), "dp=1")
    x = inputs["x"].conj()
    torch.testing.assert_close(apply(model, plan, mesh, loss_fn=squared)(x=x), squared(model(x)))


def test_complex_gradients_are_clipped_to_their_norm(mesh: DeviceMesh) -> None:
    model, inputs, options = build("complex: plain")
    plan = plan_of(trace(model, inputs, name="complex", **options), "dp=1", clip=True)
    sharded = apply(model, plan, mesh, loss_fn=squared)
    sharded(**inputs).backward()
    squared(model(**inputs)).backward()
    torch.testing.assert_close(clip_grad_norm_(sharded, 0.1), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    torch.testing.assert_close(sharded.get_parameter("weight").grad.full_tensor(), model.weight.grad)
