"""The attributes of a StableHLO op as plain data: numbers, texts and tuples, by the names that StableHLO gives them.

The members of dimension numbers (``#stablehlo.dot<lhs_batching_dimensions = [0], ...>``) are attributes of their own. Of a
region that combines pairs of values with one op, that op's name is the attribute ``body``. What no sharding rule asks for (the
values of constants, configurations of kernels) is left out.
"""

from __future__ import annotations

from typing import Any

from solver_shard.frontends.stablehlo_bindings import Bindings

_NUMBERS = {
    "dot_dimension_numbers": "DotDimensionNumbers",
    "dimension_numbers": "",
    "scatter_dimension_numbers": "ScatterDimensionNumbers",
}
_NUMBERS_OF = {"stablehlo.gather": "GatherDimensionNumbers", "stablehlo.convolution": "ConvDimensionNumbers"}
_BY_NAME = ("sdy.sharding", "sdy.sharding_rule", "mhlo.sharding", "value", "backend_config")


def plain_attributes(op: Any, mlir: Bindings) -> dict[str, Any]:
    """Attributes of an op of the bindings."""
    found: dict[str, Any] = {}
    for name in op.attributes:
        if name not in _BY_NAME:
            found.update(_plain(op.name, name, op.attributes[name], mlir))
    body = _body(op)
    if body is not None:
        found["body"] = body
    return found


def _plain(op: str, name: str, attribute: Any, mlir: Bindings) -> dict[str, Any]:
    ir, hlo = mlir.ir, mlir.stablehlo
    if name in _NUMBERS:
        kind = getattr(hlo, _NUMBERS[name] or _NUMBERS_OF.get(op, ""), None)
        if kind is None or not kind.isinstance(attribute):
            return {}
        numbers = kind(attribute)
        members = (m for m, accessor in vars(kind).items() if isinstance(accessor, property))
        return {m: tuple(v) if isinstance(v := getattr(numbers, m), list) else v for m in members}
    if isinstance(attribute, ir.BoolAttr | ir.IntegerAttr | ir.StringAttr):
        return {name: attribute.value}
    if isinstance(attribute, ir.DenseI64ArrayAttr | ir.DenseBoolArrayAttr):
        return {name: tuple(attribute)}
    if name == "padding" and isinstance(attribute, ir.DenseIntElementsAttr):
        flat = tuple(attribute)
        return {name: tuple(zip(flat[::2], flat[1::2], strict=True))}
    if name == "transpose_a":
        return {name: hlo.TransposeAttr(attribute).value}
    return {}


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
