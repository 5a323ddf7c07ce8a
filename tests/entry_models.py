"""Entry points for the command line: ``entry_models:mlp``."""

from __future__ import annotations

from typing import Any

import torch
from traced_models import MLP, squares


def mlp() -> tuple[Any, ...]:
    """Two layers, 128 rows."""
    return MLP(64, 256), {"x": torch.zeros(128, 64)}, squares
