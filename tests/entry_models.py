"""Entry points for the command line: ``entry_models:mlp``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from traced_models import MLP, squares


def mlp() -> tuple[Any, ...]:
    """Two layers, 128 rows."""
    return MLP(64, 256), {"x": torch.zeros(128, 64)}, squares


def closing_over() -> tuple[Any, ...]:
    """The same with a loss that closes over what it is held against."""
    wanted = torch.ones(128, 64)
    return MLP(64, 256), {"x": torch.zeros(128, 64)}, lambda output: (output - wanted).pow(2).mean()


class Stack(nn.Module):
    """Two blocks that widen and narrow again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(64), "up": nn.Linear(64, 256), "down": nn.Linear(256, 64)}) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["down"](nn.functional.gelu(layer["up"](layer["norm"](x))))
        return x


def clipped_stack() -> tuple[Any, ...]:
    """Blocks with norms, of which each process draws the same."""
    torch.manual_seed(0)
    return Stack(), {"x": torch.randn(64, 64)}, squares
