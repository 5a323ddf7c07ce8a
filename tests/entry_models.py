"""Entry points for the command line: ``entry_models:mlp``."""

from __future__ import annotations

from typing import Any

import torch
from traced_models import MLP, squares


def mlp() -> tuple[Any, ...]:
    """Two layers, 128 rows."""
    return MLP(64, 256), {"x": torch.zeros(128, 64)}, squares


def closing_over() -> tuple[Any, ...]:
    """The same with a loss that closes over what it is held against."""
    wanted = torch.ones(128, 64)
    return MLP(64, 256), {"x": torch.zeros(128, 64)}, lambda output: (output - wanted).pow(2).mean()
