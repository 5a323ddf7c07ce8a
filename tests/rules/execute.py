"""Runs one op on whole tensors as its arguments say, or on shards as the library does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from solver_shard.program import Op
from solver_shard.rules.check.shards import run_local, run_whole


def execute(op: Op, operands: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]] | None) -> Sequence[torch.Tensor]:
    """Results of an op; without shapes it runs with the sizes in its arguments."""
    return run_whole(op, operands) if shapes is None else run_local(op, operands, shapes)
