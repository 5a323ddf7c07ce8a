"""What training keeps and moves per parameter element besides the parameter: gradient, optimizer state, master copy.

>>> adamw = optimizer_state("adamw")
>>> adamw.gradient_bytes("bf16"), adamw.state_bytes("bf16"), adamw.master_bytes("bf16")
(2, 8, 4)
>>> adamw.resident_bytes("bf16"), adamw.resident_bytes("f32")  # optimizer state and master copy
(12, 8)
>>> adamw.update_bytes("bf16")  # read the gradient; read and write state and master; write the parameter
28

AdamW keeps two moments; with a master copy they and the copy are f32 (Micikevicius et al., "Mixed precision training",
ICLR 2018; the 12 bytes per element of Rajbhandari et al., "ZeRO", SC 2020, section 3.1), otherwise they have the
parameter's dtype, as torch.optim does. Plain SGD keeps nothing. Parameters of 16 bits or less get a master copy unless
told otherwise, wider ones never do. Gradients have the parameter's dtype, unless they are reduced in another one and held in
it until the update, as FSDP2's ``MixedPrecisionPolicy(reduce_dtype=...)`` and Megatron-LM's f32 main gradients are:

>>> megatron = optimizer_state("adamw", reduce_dtype="f32")  # 18 bytes per element of a bf16 parameter, with its own 2
>>> megatron.gradient_bytes("bf16") + megatron.resident_bytes("bf16")
16

**While it steps** AdamW holds more. torch has three ways of it (torch 2.13, ``torch/optim/adam.py``), and each is an optimizer here:

- ``adamw``, torch's default on accelerators: one kernel over all parameters of a device at once (``foreach=True``). ``_multi_tensor_adam``
  makes the roots of the second moments of all of them, and works in these: as many bytes as one moment has.
- ``adamw-forloop`` (``foreach=False``, the default on CPUs): parameter after parameter. ``_single_tensor_adam`` has the root, the root over
  its correction, and still the latter of the parameter before: three times the bytes of a moment at most, and that is counted.
- ``adamw-fused`` (``fused=True``): one kernel that makes nothing.

>>> [optimizer_state(name).step_bytes("f32") for name in ("adamw", "adamw-forloop", "adamw-fused")]  # of all parameters at once
[4, 0, 0]
>>> [optimizer_state(name).turn_bytes("f32") for name in ("adamw", "adamw-forloop", "adamw-fused")]  # of one after the other
[0, 12, 0]

A master copy is stepped with a gradient in its own dtype: where gradients arrive in another one, all of them are converted first. Plain
SGD works in place. An optimizer that is told by its ``state_bytes`` is not torch's; only those conversions are counted for it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from solver_shard.errors import InputError
from solver_shard.program import DTYPE_BYTES

OPTIMIZERS: Mapping[str, int] = MappingProxyType({"adamw": 2, "adamw-fused": 2, "adamw-forloop": 2, "sgd": 0, "none": 0})
"""Optimizers and how many values per element they keep."""

WAYS: Mapping[str, Mapping[str, bool]] = MappingProxyType(
    {"adamw": {"foreach": True}, "adamw-fused": {"fused": True}, "adamw-forloop": {"foreach": False}}
)
"""By optimizer, the arguments that make torch's own step in this way."""

MAX_STATE_BYTES = 1024
_MASTER_BYTES = 4
REDUCE_DTYPES = ("f32", "bf16", "f16")
"""What gradients can be reduced in, besides their own dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """Bytes per parameter element, by the parameter's dtype. Made by ``optimizer_state``.

    Attributes:
        optimizer: a key of ``OPTIMIZERS``; with ``none`` nothing is kept and nothing is updated.
        master_weights: parameters of 16 bits or less have an f32 copy that the optimizer steps.
        state_override: bytes of optimizer state per element instead of the optimizer's own (2 for 8-bit AdamW).
        reduce_dtype: in which gradients are reduced, accumulated and handed to the update; None for their own.
        clip: gradients are scaled to a norm before the update.
    """

    optimizer: str
    master_weights: bool = True
    state_override: int | None = None
    reduce_dtype: str | None = None
    clip: bool = False

    def gradient_dtype(self, dtype: str) -> str:
        """In which a gradient is reduced, accumulated and read by the update; ``dtype`` is its own."""
        return self.reduce_dtype or dtype

    def gradient_bytes(self, dtype: str) -> int:
        """Of the gradient that the update reads."""
        return DTYPE_BYTES[self.gradient_dtype(dtype)]

    def state_bytes(self, dtype: str) -> int:
        """Of the optimizer's own values."""
        if self.optimizer == "none":
            return 0
        if self.state_override is not None:
            return self.state_override
        return OPTIMIZERS[self.optimizer] * (self.master_bytes(dtype) or DTYPE_BYTES[dtype])

    def master_bytes(self, dtype: str) -> int:
        """Of the master copy; 0 where there is none."""
        return _MASTER_BYTES if self.optimizer != "none" and self.master_weights and DTYPE_BYTES[dtype] <= 2 else 0

    def resident_bytes(self, dtype: str) -> int:
        """Of optimizer state and master copy together: what stays for the whole step beside the parameter."""
        return self.state_bytes(dtype) + self.master_bytes(dtype)

    def apart_bytes(self, dtype: str) -> int:
        """That stay beside the parameter where a device does not store what it steps: a copy of that, unless there is a master already.

        >>> optimizer_state("adamw").apart_bytes("f32"), optimizer_state("adamw").apart_bytes("bf16")
        (4, 0)
        """
        return 0 if self.optimizer == "none" or self.master_bytes(dtype) else DTYPE_BYTES[dtype]

    def step_bytes(self, dtype: str) -> int:
        """That the step holds of all parameters at once: gradients in the dtype of what is stepped, and roots of moments."""
        if self.optimizer == "none":
            return 0
        stepped = self.master_bytes(dtype) or DTYPE_BYTES[dtype]
        converted = self.gradient_dtype(dtype) != ("f32" if self.master_bytes(dtype) else dtype)
        roots = self.optimizer == "adamw" and self.state_override is None
        return stepped * (converted + roots)

    def turn_bytes(self, dtype: str) -> int:
        """That the step holds of one parameter after the other."""
        if self.optimizer != "adamw-forloop" or self.state_override is not None:
            return 0
        return 3 * (self.master_bytes(dtype) or DTYPE_BYTES[dtype])

    def update_bytes(self, dtype: str) -> int:
        """Device memory that one update reads and writes; 0 for ``none``.

        The gradient is read, the state read and written; a master copy is read and written and the parameter then
        only written, otherwise the parameter is read and written. Clipping reads and writes the gradient once more to scale it
        (``torch.nn.utils.clip_grad_norm_`` always does, to spare the host a wait); the pass for its norm is ``norm_bytes``.
        """
        if self.optimizer == "none":
            return 0
        master = self.master_bytes(dtype)
        stepped = 2 * master + DTYPE_BYTES[dtype] if master else 2 * DTYPE_BYTES[dtype]
        gradient = (3 if self.clip else 1) * self.gradient_bytes(dtype)
        return gradient + 2 * self.state_bytes(dtype) + stepped

    def norm_bytes(self, dtype: str) -> int:
        """Device memory that is read for the norm of the gradient, by a reduction kernel; 0 without clipping."""
        return self.gradient_bytes(dtype) if self.clip and self.optimizer != "none" else 0

    def __str__(self) -> str:
        parts = [self.optimizer]
        if self.optimizer != "none":
            parts.append("f32 master weights for parameters of 16 bits or less" if self.master_weights else "no master weights")
            if self.state_override is not None:
                parts.append(f"{self.state_override} bytes of state per element")
        if self.reduce_dtype is not None:
            parts.append(f"gradients reduced in {self.reduce_dtype}")
        if self.clip:
            parts.append("clipped to a norm")
        return ", ".join(parts)


def optimizer_state(
    name: str = "adamw",
    *,
    master_weights: bool = True,
    state_bytes: int | None = None,
    reduce_dtype: str | None = None,
    clip: bool = False,
) -> OptimizerState:
    """The memory rules of an optimizer; InputError names the legal ones.

    >>> print(optimizer_state("adamw", state_bytes=2))
    adamw, f32 master weights for parameters of 16 bits or less, 2 bytes of state per element
    """
    if name not in OPTIMIZERS:
        close = difflib.get_close_matches(name, OPTIMIZERS, n=1)
        hint = (
            f"did you mean {close[0]!r}?" if close else "for another one take 'adamw' and say how many bytes of state it keeps per element"
        )
        raise InputError(f"unknown optimizer {name!r}; legal: {', '.join(OPTIMIZERS)}; {hint}")
    if state_bytes is not None and (
        isinstance(state_bytes, bool) or not isinstance(state_bytes, int) or not 0 <= state_bytes <= MAX_STATE_BYTES
    ):
        raise InputError(
            f"{state_bytes!r} bytes of optimizer state per element is not legal; legal: a whole number from 0 to {MAX_STATE_BYTES}"
        )
    if reduce_dtype is not None and reduce_dtype not in REDUCE_DTYPES:
        raise InputError(
            f"gradients cannot be reduced in {reduce_dtype!r}; legal: {', '.join(REDUCE_DTYPES)}; left out, it is each gradient's own dtype"
        )
    if clip and name == "none":
        raise InputError(
            "clipping to a gradient norm was asked without an optimizer that steps; choose adamw or sgd, or leave clipping out"
        )
    return OptimizerState(optimizer=name, master_weights=master_weights, state_override=state_bytes, reduce_dtype=reduce_dtype, clip=clip)
