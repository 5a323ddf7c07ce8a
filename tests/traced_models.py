"""Small models with random weights, and the comparison of a traced program with the model itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from solver_shard.export.interpret import run
from solver_shard.frontends.torch import trace
from solver_shard.program import Program, Role


class MLP(nn.Module):
    """Two layers; returns the hidden size again."""

    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def values_of(program: Program, model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Real values for every source of the program."""
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False)) | inputs
    return {t: state[program.tensors[t].name].detach() for t in program.sources()}


def loss_of(model: nn.Module, inputs: dict[str, torch.Tensor], loss_fn: Callable[..., Any] | None) -> torch.Tensor:
    result = model(**inputs)
    if loss_fn is not None:
        return loss_fn(result)
    return result if isinstance(result, torch.Tensor) else result.loss


def check(
    model: nn.Module, inputs: dict[str, torch.Tensor], *, loss_fn: Callable[..., Any] | None = None, tolerance: float = 2e-6
) -> Program:
    """Trace, run the program on the model's own weights, and hold loss and gradients against autograd's."""
    program = trace(model, inputs, name="test", loss_fn=loss_fn)
    program.validate()
    result = run(program, values_of(program, model, inputs))
    model.zero_grad()
    loss = loss_of(model, inputs, loss_fn)
    loss.backward()
    assert program.tensors[program.outputs[0]].name == "loss"
    torch.testing.assert_close(result[program.outputs[0]], loss.detach(), rtol=1e-5, atol=1e-6)
    gradients = {program.tensors[p].name: result[g] for p, g in program.gradients.items()}
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    missing = {name: g for name, g in expected.items() if name not in gradients and bool(g.any())}
    assert not missing, sorted(missing)
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=tolerance * max(largest, 1.0), msg=lambda m, n=name: f"{n}: {m}"
        )
    return program


def roles(program: Program, role: Role) -> list[str]:
    return [t.name for t in program.tensors if t.role is role]
