"""A stack of equal blocks, large enough to be cut and small enough to be solved at once, for questions about other plans."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import nn
from traced_models import squares

import solver_shard
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.tracing.load import program_of

WIDTH, HIDDEN, ROWS = 4096, 8192, 4096
MESH = "dp=2,tp=2"


class Block(nn.Module):
    """A residual pair of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    """Three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def blocks() -> tuple[Any, ...]:
    """An entry point: the model, its input and a loss."""
    with torch.device("meta"):
        return Blocks(), {"x": torch.zeros(ROWS, WIDTH)}, squares


@functools.cache
def traced() -> tuple[Program, str]:
    """Its step and source."""
    return program_of("blocks:blocks")


@functools.cache
def planned(pins: tuple[str, ...] = (), mesh: str = MESH, **options: Any) -> Plan:
    """A plan of it, proven optimal unless asked otherwise."""
    program, source = traced()
    plan = solver_shard.optimize(program, mesh=mesh, pins=pins, **{"gap": 0.0, "time_limit": 120, **options})
    return dataclasses.replace(plan, provenance=dataclasses.replace(plan.provenance, source=source))
