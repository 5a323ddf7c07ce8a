"""What training keeps and moves per parameter element besides the parameter: gradient, optimizer state, master copy.

>>> adamw = optimizer_state("adamw")
>>> adamw.gradient_bytes("bf16"), adamw.state_bytes("bf16"), adamw.master_bytes("bf16")
(2, 8, 4)
>>> adamw.held_bytes("bf16", 1000), adamw.held_bytes("f32", 1000)  # optimizer state and master copy
(12000, 8000)
>>> adamw.update_bytes("bf16", 1000)  # read the gradient; read and write state and master; write the parameter
28000

AdamW keeps two moments; with a master copy they and the copy are f32 (Micikevicius et al., "Mixed precision training",
ICLR 2018; the 12 bytes per element of Rajbhandari et al., "ZeRO", SC 2020, section 3.1), otherwise they have the
parameter's dtype, as torch.optim does. Plain SGD keeps nothing. Parameters of 16 bits or less get a master copy unless
told otherwise, wider ones never do. Gradients have the parameter's dtype.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from solver_shard.errors import InputError
from solver_shard.program import DTYPE_BYTES

OPTIMIZERS: Mapping[str, int] = MappingProxyType({"adamw": 2, "sgd": 0, "none": 0})
"""Optimizers and how many values per element they keep."""

MAX_STATE_BYTES = 1024.0

Count = TypeVar("Count", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """Bytes per parameter element, by the parameter's dtype. Made by ``optimizer_state``.

    Attributes:
        optimizer: a key of ``OPTIMIZERS``; with ``none`` nothing is kept and nothing is updated.
        master_weights: parameters of 16 bits or less have an f32 copy that the optimizer steps.
        state_override: bytes of optimizer state per element instead of the optimizer's own (8-bit states: 2.0).
    """

    optimizer: str
    master_weights: bool = True
    state_override: float | None = None

    def gradient_bytes(self, dtype: str) -> int:
        """Of one element of the gradient."""
        return DTYPE_BYTES[dtype]

    def state_bytes(self, dtype: str) -> float:
        """Of the optimizer's own values per element; whole unless the user's override is not."""
        if self.optimizer == "none":
            return 0
        if self.state_override is not None:
            return self.state_override
        return OPTIMIZERS[self.optimizer] * (self.master_bytes(dtype) or DTYPE_BYTES[dtype])

    def master_bytes(self, dtype: str) -> int:
        """Of the master copy per element; 0 where there is none."""
        return 4 if self.optimizer != "none" and self.master_weights and DTYPE_BYTES[dtype] <= 2 else 0

    def held_bytes(self, dtype: str, numel: Count) -> Count:
        """Optimizer state and master copy of ``numel`` local elements (an int or an int64 array), rounded up."""
        return _times(self.state_bytes(dtype) + self.master_bytes(dtype), numel)

    def update_bytes(self, dtype: str, numel: Count) -> Count:
        """Device memory that one update of ``numel`` local elements reads and writes, rounded up.

        The gradient is read, the state read and written; with a master copy that is read and written and the
        parameter only written, otherwise the parameter is read and written. 0 for ``none``.
        """
        if self.optimizer == "none":
            return _times(0, numel)
        stepped = 2 * self.master_bytes(dtype) + DTYPE_BYTES[dtype] if self.master_bytes(dtype) else 2 * DTYPE_BYTES[dtype]
        return _times(self.gradient_bytes(dtype) + 2 * self.state_bytes(dtype) + stepped, numel)

    def __str__(self) -> str:
        parts = [self.optimizer]
        if self.optimizer != "none":
            parts.append("f32 master weights for parameters of 16 bits or less" if self.master_weights else "no master weights")
            if self.state_override is not None:
                parts.append(f"{self.state_override:g} bytes of state per element")
        return ", ".join(parts)


def optimizer_state(name: str = "adamw", *, master_weights: bool = True, state_bytes: float | None = None) -> OptimizerState:
    """The memory rules of an optimizer; InputError names the legal ones.

    >>> print(optimizer_state("adamw", state_bytes=2))
    adamw, f32 master weights for parameters of 16 bits or less, 2 bytes of state per element
    """
    if name not in OPTIMIZERS:
        close = difflib.get_close_matches(name, OPTIMIZERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "; for another one give its bytes of state per element with 'adamw'"
        raise InputError(f"unknown optimizer {name!r}; legal: {', '.join(OPTIMIZERS)}{hint}")
    if state_bytes is not None and (
        isinstance(state_bytes, bool) or not isinstance(state_bytes, int | float) or not 0 <= state_bytes <= MAX_STATE_BYTES
    ):
        raise InputError(
            f"{state_bytes!r} bytes of optimizer state per element is not legal; legal: a number from 0 to {MAX_STATE_BYTES:g}"
        )
    return OptimizerState(optimizer=name, master_weights=master_weights, state_override=state_bytes)


def _times(per_element: float, numel: Count) -> Count:
    if per_element == int(per_element):
        return int(per_element) * numel
    if isinstance(numel, int):
        return math.ceil(per_element * numel)
    return np.ceil(per_element * numel.astype(np.float64)).astype(np.int64)
