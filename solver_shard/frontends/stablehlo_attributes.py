"""The attributes of a StableHLO op that its sharding rule depends on, as plain data by the names that StableHLO gives them.

The members of dimension numbers (``#stablehlo.dot<lhs_batching_dimensions = [0], ...>``) are attributes of their own. Of a region
that combines pairs of values with one op, that op's name is the attribute ``body``. All else is left out: the values of constants,
configurations of kernels, and what anybody may hang on an op under a name of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from solver_shard.frontends.stablehlo_bindings import Bindings

_READ: Mapping[str, tuple[str, ...]] = {
    "stablehlo.all_gather": ("all_gather_dim",),
    "stablehlo.all_to_all": ("split_dimension", "concat_dimension"),
    "stablehlo.batch_norm_inference": ("feature_index",),
    "stablehlo.broadcast_in_dim": ("broadcast_dimensions",),
    "stablehlo.concatenate": ("dimension",),
    "stablehlo.convolution": ("dimension_numbers", "batch_group_count", "feature_group_count"),
    "stablehlo.custom_call": ("has_side_effect",),
    "stablehlo.dot_general": ("dot_dimension_numbers",),
    "stablehlo.fft": ("fft_length",),
    "stablehlo.gather": ("dimension_numbers",),
    "stablehlo.reduce": ("dimensions",),
    "stablehlo.reduce_scatter": ("scatter_dimension",),
    "stablehlo.reduce_window": ("window_dimensions", "window_strides", "padding"),
    "stablehlo.reverse": ("dimensions",),
    "stablehlo.scatter": ("scatter_dimension_numbers",),
    "stablehlo.select_and_scatter": ("window_dimensions", "window_strides", "padding"),
    "stablehlo.sort": ("dimension",),
    "stablehlo.transpose": ("permutation",),
    "stablehlo.triangular_solve": ("left_side", "transpose_a"),
}
"""Attributes of the ops' own definitions: the verifier has checked them."""

_NUMBERS = {
    "stablehlo.convolution": "ConvDimensionNumbers",
    "stablehlo.dot_general": "DotDimensionNumbers",
    "stablehlo.gather": "GatherDimensionNumbers",
    "stablehlo.scatter": "ScatterDimensionNumbers",
}
_REDUCING = ("stablehlo.reduce", "stablehlo.scatter")


def plain_attributes(op: Any, mlir: Bindings) -> dict[str, Any]:
    """Attributes of an op of the bindings."""
    name, attributes = op.name, op.attributes
    found: dict[str, Any] = {}
    for key in _READ.get(name, ()):
        if key in attributes:
            found.update(_plain(name, key, attributes[key], mlir))
    if name in _REDUCING:
        body = _body(op)
        if body is not None:
            found["body"] = body
    return found


def _plain(op: str, name: str, attribute: Any, mlir: Bindings) -> dict[str, Any]:
    if name.endswith("dimension_numbers"):
        kind = getattr(mlir.stablehlo, _NUMBERS[op])
        numbers = kind(attribute)
        members = (m for m, accessor in vars(kind).items() if isinstance(accessor, property))
        return {m: tuple(v) if isinstance(v := getattr(numbers, m), list) else v for m in members}
    if name == "padding":
        flat = tuple(attribute)
        return {name: tuple(zip(flat[::2], flat[1::2], strict=True))}
    if name == "transpose_a":
        return {name: mlir.stablehlo.TransposeAttr(attribute).value}
    return {name: tuple(attribute) if isinstance(attribute, mlir.ir.DenseI64ArrayAttr) else attribute.value}


def _body(op: Any) -> str | None:
    """The op with which a region combines each of its first arguments with its counterpart among the others; None if it does not.

    The region of a reduction of n tensors has 2n arguments and returns n values.
    """
    if len(op.regions) != 1 or len(op.regions[0].blocks) != 1:
        return None
    block = op.regions[0].blocks[0]
    arguments = list(block.arguments)
    returned = list(block.operations)[-1].operands
    if not len(returned) or len(arguments) != 2 * len(returned):
        return None
    names = set()
    for i, value in enumerate(returned):
        maker = value.owner
        pair = {arguments[i], arguments[len(returned) + i]}
        if value in arguments or len(maker.operands) != 2 or set(maker.operands) != pair:
            return None
        names.add(maker.name)
    return names.pop() if len(names) == 1 else None
