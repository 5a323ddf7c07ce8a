"""An applied model in one process: it is called, trained, saved and refused like a module; four processes are in tests/e2e."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from lowered import lowered, random_assignment
from process_model import Odd, built
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from traced_models import MLP, squares

from solver_shard.errors import InputError
from solver_shard.layout import Layout
from solver_shard.ops.random import Unsharded
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.runtime import apply as loading
from solver_shard.runtime.apply import apply, check_cuts, check_mesh, recorded_collectives, reseed
from solver_shard.runtime.optimizer import ShardedOptimizer, clip_grad_norm_
from solver_shard.tracing.torch import trace

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One process, which is the whole mesh."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def planned(program: Program, mesh: str = "dp=1", **options: Any) -> Plan:
    made = lowered(program, mesh, **options)
    plan = made.plan(random_assignment(made.graph, 0))
    return dataclasses.replace(plan, options=dataclasses.replace(plan.options, forward_only=not program.gradients))


@functools.cache
def odd_plan(dropout: float = 0.0) -> Plan:
    model, inputs = built(dropout=dropout)
    return planned(trace(model, inputs, name="odd"))


def mlp(dtype: torch.dtype = torch.float32) -> tuple[MLP, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return MLP().to(dtype), {"x": torch.randn(4, 8).to(dtype)}


@functools.cache
def mlp_plan(dtype: torch.dtype = torch.float32, **options: Any) -> Plan:
    model, inputs = mlp(dtype)
    return planned(trace(model, inputs, name="mlp", loss_fn=squares), **options)


def test_a_process_group_is_needed() -> None:
    with pytest.raises(InputError, match="this process has no process group; start 1 processes"):
        check_mesh(mlp_plan(), None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="device_mesh=None is not legal; give a DeviceMesh"):
        apply(mlp()[0], mlp_plan(), None, loss_fn=squares)  # type: ignore[arg-type]


def test_any_optimizer_trains_it_like_the_model(mesh: DeviceMesh) -> None:
    model, inputs = built(dropout=0.2)
    sharded = apply(model, odd_plan(0.2), mesh)
    assert {n: p.shape for n, p in sharded.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert sharded.state_dict().keys() == model.state_dict().keys()
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    assert sharded.get_parameter("head.weight") is sharded.get_parameter("tokens.weight")
    reseed(sharded, 7)
    ours, theirs = torch.optim.AdamW(sharded.parameters(), lr=0.01), torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        with Unsharded(7, step):
            expected = model(**inputs)
        loss = sharded(**inputs)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (sharded, model)]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])
        ours.step()
        theirs.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(sharded.state_dict()[name].full_tensor(), tensor, rtol=1e-4, atol=1e-5)
    assert recorded_collectives(sharded) == []


def test_the_model_itself_is_left_as_it_was(mesh: DeviceMesh) -> None:
    model, inputs = mlp()
    before = {name: p.clone() for name, p in model.named_parameters()}
    sharded = apply(model, mlp_plan(), mesh, loss_fn=squares)
    sharded(**inputs).backward()
    torch.optim.SGD(sharded.parameters(), lr=1.0).step()
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())


def test_positional_inputs_and_dtensors_are_taken_too(mesh: DeviceMesh) -> None:
    model, inputs = mlp()
    sharded = apply(model, mlp_plan(), mesh, loss_fn=squares)
    expected = squares(model(**inputs))
    torch.testing.assert_close(sharded(inputs["x"]), expected)
    layout = mlp_plan().layouts["x"].to_dtensor((1,))
    torch.testing.assert_close(sharded(x=DTensor.from_local(inputs["x"], mesh, layout)), expected)


def test_the_loss_may_be_scaled_before_its_backward(mesh: DeviceMesh) -> None:
    model, inputs = mlp()
    sharded = apply(model, mlp_plan(), mesh, loss_fn=squares)
    (sharded(**inputs) * 3).backward()
    (squares(model(**inputs)) * 3).backward()
    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), model.get_parameter(name).grad)


def test_gradients_of_calls_add_up_and_without_gradients_nothing_is_kept(mesh: DeviceMesh) -> None:
    model, inputs = mlp()
    sharded = apply(model, mlp_plan(), mesh, loss_fn=squares)
    for _ in range(2):
        sharded(**inputs).backward()
    squares(model(**inputs)).backward()
    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), 2 * model.get_parameter(name).grad)
    with torch.no_grad():
        assert sharded(**inputs).grad_fn is None
    loss = sharded(**inputs)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has run its backward pass already"):
        loss.backward()


def test_a_step_that_is_dropped_is_gone_at_once(mesh: DeviceMesh) -> None:
    model, inputs = mlp()
    sharded = apply(model, mlp_plan(), mesh, loss_fn=squares)
    gc.disable()
    try:
        for backward in (False, True):
            loss = sharded(**inputs)
            state = weakref.ref(loss.grad_fn.state)
            assert state() is not None
            if backward:
                loss.backward()
            del loss
            assert state() is None
    finally:
        gc.enable()


def test_microbatches_leave_their_gradients_with_the_last(mesh: DeviceMesh) -> None:
    model, inputs = mlp()
    sharded = apply(model, mlp_plan(microbatches=2), mesh, loss_fn=squares)
    optimizer = ShardedOptimizer(sharded, torch.optim.SGD, lr=0.1)
    batches = [inputs["x"], inputs["x"] + 1]
    (sharded(batches[0]) / 2).backward()
    assert all(p.grad is None for p in sharded.parameters())
    with pytest.raises(InputError, match="1 of the step's 2 microbatches have run backward"):
        optimizer.step()
    (sharded(batches[1]) / 2).backward()
    for batch in batches:
        (squares(model(batch)) / 2).backward()
    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), model.get_parameter(name).grad)
    optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.testing.assert_close(sharded.get_parameter("up.weight").full_tensor(), model.up.weight)


def test_parameters_of_sixteen_bits_are_stepped_by_their_masters(mesh: DeviceMesh) -> None:
    model, inputs = mlp(torch.bfloat16)
    plan = mlp_plan(torch.bfloat16, reduce_dtype="f32", clip=True)
    sharded = apply(model, plan, mesh, loss_fn=squares)
    optimizer = ShardedOptimizer(sharded, torch.optim.AdamW, lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    wide = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    reference = torch.optim.AdamW(wide.values(), lr=1e-4)
    for _ in range(4):
        optimizer.zero_grad()
        sharded(**inputs).backward()
        assert all(p.grad.dtype == torch.float32 for p in sharded.parameters())
        for name, p in sharded.named_parameters():
            wide[name].grad = p.grad.full_tensor().clone()
        norm = clip_grad_norm_(sharded, 0.1)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(wide.values(), 0.1), rtol=1e-4, atol=0)
        optimizer.step()
        reference.step()
        scheduler.step()
    for name, p in sharded.named_parameters():
        assert torch.equal(p.full_tensor(), wide[name].detach().to(torch.bfloat16))
    other = apply(mlp(torch.bfloat16)[0], plan, mesh, loss_fn=squares)
    again = ShardedOptimizer(other, torch.optim.AdamW, lr=1.0)
    other.load_state_dict(sharded.state_dict())
    again.load_state_dict(pytree.tree_map_only(torch.Tensor, torch.clone, optimizer.state_dict()))
    assert again.param_groups[0]["lr"] == 1e-4
    for one, two in ((sharded, optimizer), (other, again)):
        two.zero_grad()
        one(**inputs).backward()
        two.step()
    for name, p in sharded.named_parameters():
        assert torch.equal(p.full_tensor(), other.get_parameter(name).full_tensor())
    with pytest.raises(InputError, match="does not train"):
        ShardedOptimizer(sharded, torch.optim.SGD, params=[torch.zeros(2)], lr=0.1)


def test_groups_of_parameters_have_options_of_their_own(mesh: DeviceMesh) -> None:
    sharded = apply(mlp()[0], mlp_plan(), mesh, loss_fn=squares)
    up, down = [[p for n, p in sharded.named_parameters() if n.startswith(part)] for part in ("up", "down")]
    optimizer = ShardedOptimizer(sharded, torch.optim.SGD, params=[{"params": up}, {"params": down, "lr": 0.0}], lr=0.1)
    before = {name: p.full_tensor().clone() for name, p in sharded.named_parameters()}
    sharded(mlp()[1]["x"]).backward()
    optimizer.step()
    changed = {name for name, p in sharded.named_parameters() if not torch.equal(p.full_tensor(), before[name])}
    assert changed == {"up.weight", "up.bias"}


class Pair(nn.Module):
    """Returns a mapping, takes a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: torch.Tensor, double: bool = False) -> dict[str, torch.Tensor]:
        return {"one": x @ self.weight, "two": x * (2 if double else 1)}


def test_forward_only_plans_return_what_the_model_does(mesh: DeviceMesh) -> None:
    model, example = Pair(), {"x": torch.randn(2, 3), "double": True}
    plan = planned(trace(model, example, name="pair", forward_only=True))
    sharded = apply(model, plan, mesh, inputs=example)
    found, expected = sharded(**example), model(**example)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name])
        assert not value.requires_grad
    with pytest.raises(InputError, match="double=False was given, but the plan's step was traced with double=True"):
        sharded(example["x"], double=False)


def test_a_meta_model_is_filled_from_a_checkpoint(mesh: DeviceMesh, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model, inputs = mlp()
    full = apply(model, mlp_plan(), mesh, loss_fn=squares)
    dcp.save(full.state_dict(), checkpoint_id=tmp_path / "step")
    sharded = apply(mlp()[0].to("meta"), mlp_plan(), mesh, loss_fn=squares)
    with pytest.raises(InputError, match=r"'up.weight' has no values: the model was on the meta device; load a checkpoint"):
        sharded(**inputs)
    state = sharded.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "step")
    sharded.load_state_dict(state)
    torch.testing.assert_close(sharded(**inputs), full(**inputs))


def test_compiling_it_changes_no_number(mesh: DeviceMesh) -> None:
    model, inputs = mlp()
    sharded = apply(model, mlp_plan(), mesh, loss_fn=squares)
    compiled = torch.compile(sharded, backend="eager")
    loss = compiled(**inputs)
    loss.backward()
    torch.testing.assert_close(loss, squares(model(**inputs)))


INPUTS = [
    ({"x": torch.zeros(2, 8)}, r"input 'x' has shape \[2, 8\], the plan was made for \[4, 8\]"),
    ({"x": torch.zeros(4, 8, dtype=torch.float64)}, r"input 'x' has dtype torch.float64, the plan was made for torch.float32"),
    ({}, "input 'x' of the step is missing"),
    ({"x": torch.zeros(4, 8), "y": torch.zeros(1)}, "input 'y' is not one of the plan's; it has x"),
    ({"x": torch.zeros(4, 8), "flag": True}, "flag=True was given, but the plan's step was traced without it"),
]


@pytest.mark.parametrize(("inputs", "message"), INPUTS, ids=["shape", "dtype", "missing", "unknown", "flag"])
def test_inputs_that_are_not_the_planned_ones_are_refused(mesh: DeviceMesh, inputs: dict[str, Any], message: str) -> None:
    sharded = apply(mlp()[0], mlp_plan(), mesh, loss_fn=squares)
    with pytest.raises(InputError, match=message):
        sharded(**inputs)


def test_another_mode_is_refused(mesh: DeviceMesh) -> None:
    sharded = apply(mlp()[0], mlp_plan(), mesh, loss_fn=squares)
    with pytest.raises(InputError, match="the plan is of a step in training mode, the module is in evaluation mode"):
        sharded.eval()(**mlp()[1])


MODELS = [
    (lambda: MLP(hidden=16), {"loss_fn": squares}, r"the plan has trained parameter 'up.weight' f32\[12, 8\], the model .* f32\[16, 8\]"),
    (
        lambda: MLP(),
        {"loss_fn": lambda y: (y.abs()).mean()},
        r"op \d+ of the plan is aten.pow.* in the model \(forward\), the model's is aten.abs",
    ),
    (lambda: MLP().requires_grad_(False), {"loss_fn": squares}, "has no trainable parameter"),
]


@pytest.mark.parametrize(("build", "options", "message"), MODELS, ids=["sizes", "loss", "frozen"])
def test_another_model_is_refused_by_the_first_difference(mesh: DeviceMesh, build: Any, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        apply(build(), mlp_plan(), mesh, **options)


def test_another_mesh_is_refused(mesh: DeviceMesh) -> None:
    model, _ = mlp()
    other = mlp_plan(mesh="dp=2,tp=2")
    with pytest.raises(InputError, match=r"the device mesh is dp=1, the plan is for dp=2,tp=2; give init_device_mesh"):
        apply(model, other, mesh, loss_fn=squares)
    with pytest.raises(InputError, match=r"the device mesh is tp=1, the plan is for dp=1"):
        apply(model, mlp_plan(), init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), loss_fn=squares)
    with pytest.raises(InputError, match="has no names for its axes"):
        apply(model, mlp_plan(), init_device_mesh("cpu", (1,)), loss_fn=squares)
    with pytest.raises(InputError, match="device_mesh='cpu' is not legal; give a DeviceMesh"):
        apply(model, mlp_plan(), "cpu", loss_fn=squares)  # type: ignore[arg-type]


def test_uneven_cuts_by_several_axes_are_refused_on_a_mesh_with_a_flattened_axis(mesh: DeviceMesh) -> None:
    """DTensor would put them together wrongly, in a step of torch's optimizers as in full_tensor."""
    plan, devices = mlp_plan(mesh="dp=2,tp=3"), init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    at = next(t for t, tensor in enumerate(plan.tensors) if tensor.name == "down.bias")
    assert plan.tensors[at].shape == (8,)

    def cut(layout: str) -> Plan:
        changed = dataclasses.replace(plan.tensors[at], layout=Layout.parse(layout), state=None)
        whole = Layout.parse("RR")
        others = [dataclasses.replace(t, layout=whole, state=None) for t in plan.tensors]
        return dataclasses.replace(plan, tensors=(*others[:at], changed, *others[at + 1 :]), reshards=())

    check_cuts(cut("S(0)S(0)"), devices)
    devices._flatten("all")
    check_cuts(cut("S(0)R"), devices)
    with pytest.raises(InputError, match=r"flattened axis 'all', .* puts the 6 uneven parts of 'down.bias' \[8\], S\(0\)S\(0\), together"):
        check_cuts(cut("S(0)S(0)"), devices)
    with pytest.raises(InputError, match=r"'down.bias' \[8\], _S\(0\)S\(0\)"):
        check_cuts(cut("_S(0)S(0)"), devices)


def test_wrong_things_are_refused(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"cannot read plan 'no\.json'"):
        apply(mlp()[0], "no.json", mesh)
    with pytest.raises(InputError, match="model='gpt2' is not legal; give a Module"):
        apply("gpt2", mlp_plan(), mesh)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"give what solver_shard.apply returned"):
        recorded_collectives(Odd())
    with pytest.raises(InputError, match="made without clipping"):
        clip_grad_norm_(apply(mlp()[0], mlp_plan(), mesh, loss_fn=squares), 1.0)
    monkeypatch.setattr(loading.torch, "__version__", "2.12.1")
    with pytest.raises(InputError, match=r"torch 2.12.1 is installed; plans run with torch >= 2.13, < 2.14"):
        apply(mlp()[0], mlp_plan(), mesh)
