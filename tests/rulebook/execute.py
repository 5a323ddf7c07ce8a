"""Runs one op on whole tensors as its arguments say, or on shards as the library does.

Programs hold canonical ops only (one factory, no ``repeat``); the few others that have rules get their sizes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from solver_shard.export.interpret import DTYPES, call
from solver_shard.program import Op, Ref

SIZED = {
    "aten.zeros.default": "size",
    "aten.ones.default": "size",
    "aten.new_zeros.default": "size",
    "aten.new_ones.default": "size",
    "aten.select_backward.default": "input_sizes",
}


def execute(op: Op, operands: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]] | None) -> Sequence[torch.Tensor]:
    """Results of an op; without shapes it runs with the sizes in its arguments."""
    if shapes is None and op.name.startswith("shard."):
        return call(op, operands, [operands[1].shape + operands[0].shape[-1:]] if "backward" in op.name else [(), ()])
    if shapes is not None and op.name not in SIZED and op.name != "aten.repeat.default":
        return call(op, operands, shapes)
    return aten(op, operands, None if shapes is None else tuple(shapes[0]))


def aten(op: Op, operands: Sequence[torch.Tensor], shape: tuple[int, ...] | None) -> Sequence[torch.Tensor]:
    """Call the ATen overload; its size argument is replaced by the shape."""

    def value(name: str, item: Any) -> Any:
        if isinstance(item, Ref):
            return operands[item.operand]
        if isinstance(item, tuple):
            return [value("", x) for x in item]
        return DTYPES[item] if name.endswith("dtype") and isinstance(item, str) else item

    arguments = {name: value(name, item) for name, item in op.attributes.items()}
    if shape is not None and "repeats" in arguments:
        own = (1,) * (len(shape) - operands[0].dim()) + tuple(operands[0].shape)
        arguments["repeats"] = [b // a if a else 1 for a, b in zip(own, shape, strict=True)]
    elif shape is not None:
        arguments[SIZED[op.name]] = shape
    if op.name == "aten.einsum.default":
        return [torch.einsum(arguments["equation"], *arguments["tensors"])]
    _, name, overload = op.name.split(".")
    function = getattr(getattr(torch.ops.aten, name), overload)
    out = function(**arguments)
    return [x for x in out if isinstance(x, torch.Tensor)] if isinstance(out, list | tuple) else [out]
