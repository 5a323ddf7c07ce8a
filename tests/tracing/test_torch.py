"""Tracing: what becomes of parameters, buffers, inputs, losses; and what is refused, with what advice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from traced_models import MLP, check, counts, squares

from solver_shard.errors import InputError, TraceError
from solver_shard.program import Phase, Program, Role
from solver_shard.tracing.torch import trace

X = torch.randn(4, 6, 8)


def named(program: Program, role: Role) -> list[str]:
    return [t.name for t in program.tensors if t.role is role]


def test_names_and_roles() -> None:
    program = trace(MLP(), {"x": X}, name="mlp", loss_fn=squares)
    assert program.name == "mlp"
    assert named(program, Role.PARAMETER) == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert named(program, Role.INPUT) == ["x"]
    assert named(program, Role.OUTPUT) == ["loss"]
    assert sorted(named(program, Role.GRADIENT)) == sorted(f"grad({name})" for name in named(program, Role.PARAMETER))
    assert program.tensors[program.outputs[0]].shape == ()
    assert all(program.tensors[p].trainable for p in program.gradients)


def test_every_op_has_phase_module_and_raw_nodes() -> None:
    program = trace(MLP(), {"x": X}, name="mlp", loss_fn=squares)
    products = [(op.phase, op.module) for op in program.ops if op.name == "aten.einsum.default"]
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    assert products == [(forward, "up"), (forward, "down"), (backward, "down"), (backward, "down"), (backward, "up")]
    raw = [name for op in program.ops for name in op.raw]
    assert len(raw) == len(set(raw))
    assert all(op.raw for op in program.ops if op.name == "aten.einsum.default")


def test_meta_real_and_fake_models_give_the_same_program() -> None:
    with torch.device("meta"):
        on_meta = MLP()
    real = trace(MLP(), {"x": X}, name="mlp", loss_fn=squares)
    assert trace(on_meta, {"x": X.to("meta")}, name="mlp", loss_fn=squares) == real
    with torch._subclasses.fake_tensor.FakeTensorMode():
        fake, x = MLP(), torch.empty(4, 6, 8)
    assert trace(fake, {"x": x}, name="mlp", loss_fn=squares) == real


def test_the_model_is_left_as_it_was() -> None:
    model = MLP()
    model.note = torch.ones(3, device="meta")
    before, note = dict(model.named_parameters()), model.note
    trace(model, {"x": X}, name="mlp", loss_fn=squares)
    with pytest.raises(TraceError):
        trace(model, {"y": X}, name="mlp", loss_fn=squares)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert model.note is note
    assert not dict(model.named_buffers())
    assert not any(child._forward_pre_hooks or child._forward_hooks for child in model.modules())


def test_tied_weights_are_one_parameter_with_one_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids)).logsumexp(-1).mean()

    program = check(Tied(), {"ids": torch.randint(0, 11, (4, 6))})
    assert named(program, Role.PARAMETER) == ["embed.weight"]
    assert len(program.gradients) == 1


def test_frozen_parameters_have_no_gradient() -> None:
    model = MLP()
    model.up.weight.requires_grad_(False)
    program = check(model, {"x": X}, loss_fn=squares)
    (frozen,) = (t for t in program.tensors if t.name == "up.weight")
    assert frozen.role is Role.PARAMETER
    assert not frozen.trainable
    assert "grad(up.weight)" not in named(program, Role.GRADIENT)


def test_a_parameter_that_the_loss_does_not_need_has_no_gradient() -> None:
    model = MLP()
    model.spare = nn.Linear(2, 2)
    program = check(model, {"x": X}, loss_fn=squares)
    assert "spare.weight" in named(program, Role.PARAMETER)
    assert "grad(spare.weight)" not in named(program, Role.GRADIENT)


def test_batch_norm_returns_its_updated_statistics() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))
    program = trace(model, {"input": torch.randn(10, 8)}, name="norm", loss_fn=squares)
    outputs = [program.tensors[t].name for t in program.outputs]
    assert outputs[0] == "loss"
    assert sorted(outputs[1:]) == ["updated(1.num_batches_tracked)", "updated(1.running_mean)", "updated(1.running_var)"]


def test_constants_of_the_model() -> None:
    class Scaled(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.tensor(2.0)
            self.shift = torch.ones(8, device="meta")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale + self.shift

    program = trace(Scaled(), {"x": X}, name="scaled", loss_fn=squares)
    assert named(program, Role.BUFFER) == ["shift"]
    assert [op.attributes["fill_value"] for op in program.ops if op.name == "aten.full.default"] == [2.0, 1.0]


class Many(nn.Module):
    """Takes nested inputs and returns nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], scale: float, **rest: torch.Tensor) -> dict[str, Any]:
        first = self.layer(pair[0]) * scale
        return {"first": first, "rest": [first + rest["bias"], None, pair[1]]}


def test_nested_inputs_and_outputs_have_paths_for_names() -> None:
    inputs = {"pair": (X, X), "scale": 2.0, "bias": torch.zeros(8)}
    program = trace(Many(), inputs, name="many", forward_only=True)
    assert named(program, Role.INPUT) == ["pair.0", "pair.1", "bias"]
    assert [program.tensors[t].name for t in program.outputs] == ["output.first", "output.rest.0", "output.rest.2"]
    assert not program.gradients
    assert {op.phase for op in program.ops} == {Phase.FORWARD}


def test_positional_inputs_are_named_after_the_arguments() -> None:
    assert named(trace(MLP(), (X,), name="mlp", loss_fn=squares), Role.INPUT) == ["x"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_are_the_models_own(dtype: torch.dtype) -> None:
    program = trace(MLP().to(dtype), {"x": X.to(dtype)}, name="mlp", loss_fn=squares)
    assert len({t.dtype for t in program.tensors}) == 1


def test_a_step_over_no_elements_is_refused_and_an_empty_past_is_not() -> None:
    with pytest.raises(InputError, match=r"input 'x' of shape \[0, 8\] has no elements"):
        trace(MLP(), {"x": torch.zeros(0, 8)}, name="mlp", loss_fn=squares)
    trace(MLP(), {"x": torch.zeros(0, 8)}, name="mlp", forward_only=True)


def test_a_loss_function_may_take_the_inputs_too() -> None:
    def loss(output: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(output, inputs["x"])

    assert named(trace(MLP(), {"x": X}, name="mlp", loss_fn=loss), Role.OUTPUT) == ["loss"]


def test_dropout_is_kept_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))
    assert counts(trace(model, {"input": X}, name="drop", loss_fn=squares))["native_dropout"] == 1
    assert counts(trace(model.eval(), {"input": X}, name="drop", loss_fn=squares))["native_dropout"] == 0


def test_in_place_ops_and_checkpoints_are_traced() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checked(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(lambda t: torch.relu_(self.up(t)), x, use_reentrant=False)
            return self.down(hidden).add_(1)

    check(Checked(), {"x": X}, loss_fn=squares)


class Fails(MLP):
    """Looks at values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return hidden * hidden.sum().item()


REFUSED: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (InputError, "loss", {"loss_fn": None}),
    (InputError, "one floating-point number, got shape", {"loss_fn": lambda y: y}),
    (InputError, "one floating-point number, got int", {"loss_fn": lambda y: 3}),
    (InputError, "one floating-point number, got shape", {"loss_fn": lambda y: y.argmax()}),
    (InputError, "give a Module", {"model": print}),
    (InputError, "dict of keyword arguments", {"inputs": 3}),
    (InputError, "no trainable parameter", {"model": nn.Dropout(0.5)}),
    (TraceError, "item", {"model": Fails()}),
    (TraceError, "in module 'up'", {"inputs": {"x": torch.randn(4, 7)}}),
    (TraceError, "unexpected keyword argument", {"inputs": {"y": X}}),
    (TraceError, "no trainable parameter gets a gradient", {"loss_fn": lambda y: y.detach().sum()}),
    (TraceError, "ValueError: nothing", {"loss_fn": lambda y: (_ for _ in ()).throw(ValueError("nothing"))}),
]


@pytest.mark.parametrize(("error", "message", "change"), REFUSED)
def test_what_cannot_be_traced_is_said(error: type[Exception], message: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"model": MLP(), "inputs": {"x": X}, "loss_fn": squares} | change
    with pytest.raises(error, match=message):
        trace(arguments["model"], arguments["inputs"], name="bad", loss_fn=arguments["loss_fn"])


def test_without_a_loss_the_way_out_is_named() -> None:
    with pytest.raises(InputError, match="--forward-only"):
        trace(MLP(), {"x": X}, name="mlp")


def test_an_aborted_trace_leaves_no_trace() -> None:
    for _ in range(2):
        with pytest.raises(TraceError):
            trace(Fails(), {"x": X}, name="bad", loss_fn=squares)
    assert not torch.compiler.is_compiling()
    assert trace(MLP(), {"x": X}, name="mlp", loss_fn=squares).ops[0].module == "up"
