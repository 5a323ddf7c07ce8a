"""Runs one op on tensors: raw (as its arguments say) or on shards (shape-like arguments taken from the result shapes)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from solver_shard.program import Op, Ref

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "bool": torch.bool,
    "u8": torch.uint8,
}
SIZES = {"size", "input_sizes"}


def execute(op: Op, operands: list[torch.Tensor], shapes: tuple[tuple[int, ...], ...] | None) -> list[torch.Tensor]:
    def value(name: str, item: Any) -> Any:
        if isinstance(item, Ref):
            return operands[item.operand]
        if isinstance(item, tuple):
            return [value("", x) for x in item]
        if isinstance(item, str) and (name.endswith("dtype")) and item in DTYPES:
            return DTYPES[item]
        return item

    arguments = {name: value(name, item) for name, item in op.attributes.items()}
    if shapes is not None:
        for name in SIZES & set(arguments):
            arguments[name] = list(shapes[0])
        if "repeats" in arguments:
            own = operands[0].shape
            full = [1] * (len(shapes[0]) - len(own)) + list(own)
            arguments["repeats"] = [b // a if a else 1 for a, b in zip(full, shapes[0], strict=True)]
        if arguments.get("bias_sizes") is not None:
            arguments["bias_sizes"] = [arguments["grad_output"].shape[1]]
    if op.name.startswith("shard."):
        return list(_SHARD[op.name](arguments))
    _, name, overload = op.name.split(".")
    function = getattr(getattr(torch.ops.aten, name), overload)
    if name == "view":
        function = torch.ops.aten.reshape.default
        arguments = {"self": arguments["self"], "shape": arguments["size"]}
    positional, keywords = [], {}
    if name == "einsum":
        return [torch.einsum(arguments["equation"], *arguments["tensors"])]
    for argument in function._schema.arguments:
        if argument.name in arguments:
            if argument.kwarg_only:
                keywords[argument.name] = arguments[argument.name]
            else:
                positional.append(arguments[argument.name])
        else:
            break
    for argument in function._schema.arguments:
        if argument.kwarg_only and argument.name in arguments:
            keywords[argument.name] = arguments[argument.name]
    out = function(*positional, **keywords)
    return [x for x in out if isinstance(x, torch.Tensor)] if isinstance(out, list | tuple) else [out]


def _nll_forward(a: dict[str, Any]) -> Sequence[torch.Tensor]:
    x, target = a["self"], a["target"]
    flat, rows = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    total, weight = torch.ops.aten.nll_loss_forward.default(flat, rows, a["weight"], 2, a["ignore_index"])
    return total, weight


def _nll_backward(a: dict[str, Any]) -> Sequence[torch.Tensor]:
    x, target = a["self"], a["target"]
    flat, rows = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    kind = {"mean": 1, "sum": 2}[a["reduction"]]
    out = torch.ops.aten.nll_loss_backward.default(a["grad_output"], flat, rows, a["weight"], kind, a["ignore_index"], a["total_weight"])
    return (out.reshape(x.shape),)


_SHARD = {"shard.nll_loss_forward": _nll_forward, "shard.nll_loss_backward": _nll_backward}
