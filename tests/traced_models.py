"""Small models with random weights, and the comparison of a traced program with the model itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from solver_shard.ops.run import run
from solver_shard.program import Program
from solver_shard.tracing.clean import clean
from solver_shard.tracing.torch import trace_raw


class MLP(nn.Module):
    """Two layers; returns the width it was given."""

    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Function(nn.Module):
    """A function of one weight and one input, as a module."""

    def __init__(self, function: Callable[..., torch.Tensor], *weight: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(*weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.weight, x)


def squares(output: torch.Tensor) -> torch.Tensor:
    """A loss for modules that have none."""
    return (output**2).mean()


def values_of(program: Program, model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Real values for every source of the program, by name."""
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False)) | inputs
    return {t: state[program.tensors[t].name].detach() for t in program.sources()}


def check(
    model: nn.Module, inputs: dict[str, torch.Tensor], *, loss_fn: Callable[..., Any] | None = None, tolerance: float = 2e-6
) -> Program:
    """Trace; run the program on the model's own weights; hold the loss and every gradient against autograd's."""
    raw = trace_raw(model, inputs, name="test", loss_fn=loss_fn)
    program = clean(raw)
    result = run(program, values_of(program, model, {**raw.constants, **inputs}))
    model.zero_grad()
    output = model(**inputs)
    loss = loss_fn(output) if loss_fn is not None else output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    assert program.tensors[program.outputs[0]].name == "loss"
    torch.testing.assert_close(result[program.outputs[0]], loss.detach(), rtol=1e-5, atol=1e-6)
    gradients = {program.tensors[p].name: result[g] for p, g in program.gradients.items()}
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    scale = max(1.0, *(float(g.abs().max()) for g in expected.values()))
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=tolerance * scale), name
    return program


def counts(program: Program) -> Counter[str]:
    """How often each op occurs, without namespace and overload."""
    return Counter(op.name.split(".")[1] for op in program.ops)


def text(program: Program) -> list[str]:
    """Ops in short: einsum by its equation, views by their sizes, others by name."""
    said = []
    for op in program.ops:
        name = op.name.split(".")[1]
        detail = {"einsum": "equation", "view": "size", "permute": "dims", "sum": "dim", "expand": "size"}.get(name)
        value = op.attributes[detail] if detail else None
        said.append(name if value is None else f"{name} {value}" if isinstance(value, str) else f"{name} {list(value)}")
    return said
