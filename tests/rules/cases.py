"""Small op instances for the numeric checks of the rules: real operands, canonical arguments, result shapes.

Each case is written like the call itself: ``case("aten.add.Tensor", self=t(4, 6), other=t(6), alpha=1)``. Tensors become
operands, and the results' shapes and dtypes come from running the op once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from solver_shard.program import Op, Ref, Tensor

NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    op: Op
    values: tuple[torch.Tensor, ...]
    label: str

    def tensors(self, execute: Callable[..., Sequence[torch.Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
        operands = [tensor_of(f"x{i}", value) for i, value in enumerate(self.values)]
        results = execute(self.op, list(self.values), None)
        return operands, [tensor_of(f"y{i}", value) for i, value in enumerate(results)]


def tensor_of(name: str, value: torch.Tensor) -> Tensor:
    return Tensor(name=name, shape=tuple(value.shape), dtype=NAMES[value.dtype])


def case(name: str, **arguments: Any) -> Case:
    """A call; the same tensor object passed twice is one operand."""
    values: list[torch.Tensor] = []

    def ref(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            for i, known in enumerate(values):
                if known is value:
                    return Ref(i)
            values.append(value)
            return Ref(len(values) - 1)
        if isinstance(value, list | tuple):
            return tuple(ref(item) for item in value)
        return value

    attributes = {key: ref(value) for key, value in arguments.items()}
    op = Op(name=name, operands=tuple(range(len(values))), results=(), attributes=attributes)
    shapes = ",".join("x".join(map(str, v.shape)) or "scalar" for v in values)
    rest = ",".join(
        f"{k}={v}" for k, v in arguments.items() if isinstance(v, int | str | tuple) and not isinstance(v, bool) and "tensor(" not in str(v)
    )
    return Case(op=op, values=tuple(values), label=f"{name}[{shapes}]{rest}"[:110])


_GENERATOR = torch.Generator().manual_seed(7)


def t(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(shape, generator=_GENERATOR, dtype=torch.float64).to(dtype)


def pos(*shape: int) -> torch.Tensor:
    """Random numbers away from zero."""
    return t(*shape).abs() + 0.5


def ints(high: int, *shape: int) -> torch.Tensor:
    """Random indices below ``high``."""
    return torch.randint(high, shape, generator=_GENERATOR)


def flags(*shape: int) -> torch.Tensor:
    """Random truth values."""
    return torch.randint(2, shape, generator=_GENERATOR).bool()


def numel(shape: Sequence[int]) -> int:
    return math.prod(shape)
