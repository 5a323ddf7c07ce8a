"""StableHLO families that go dim by dim: element-wise ops, slices, pads, sorts, broadcasts, reductions, collectives.

The factors, their order, sizes and kinds are those of the reference implementation; see the rows in rules/stablehlo.toml.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from solver_shard.errors import RuleError
from solver_shard.rulebook.draft import Call
from solver_shard.rulebook.rule import Kind
from solver_shard.rulebook.sheet import Sheet
from solver_shard.rulebook.table import Check, Family, Row, is_text

REDUCTION_OF_BODY = {"stablehlo.add": "sum", "stablehlo.maximum": "max", "stablehlo.minimum": "min"}
"""The reductions of layouts, by the op that a reduction's body consists of."""


def none(call: Call, row: Row) -> Sheet:
    """No rule."""
    del row
    return Sheet.without(call)


def pointwise(call: Call, row: Row) -> Sheet:
    """One factor per dim of the first result, in all operands and results that have the dim."""
    del row
    if not call.results:
        return Sheet.without(call)
    sheet = Sheet(call)
    shape = call.results[0].shape
    if any(len(tensor.shape) > len(shape) for tensor in (*call.operands, *call.results)):
        shapes = ", ".join(str(tensor.shape) for tensor in (*call.operands, *call.results))
        raise RuleError(f"{call.name} goes dim by dim of its first result, but others have more dims: {shapes}; check the op's operands")
    for d, size in enumerate(shape):
        sheet.factor(
            [d if d < len(tensor.shape) else None for tensor in call.operands],
            [d if d < len(tensor.shape) else None for tensor in call.results],
            size,
        )
    return sheet


def reverse(call: Call, row: Row) -> Sheet:
    """Reversed dims exchange shards."""
    del row
    return _alike(call, dims=call.attribute("dimensions", ()), kind="permutation")


def sort(call: Call, row: Row) -> Sheet:
    """The sorted dim is gathered; nothing is propagated along it where there is no other dim to cut."""
    del row
    dim = call.attributes["dimension"]
    shape = call.results[0].shape
    alone = math.prod(shape) == shape[dim]
    return _alike(call, dims=(dim,), kind="need_replication", blocked=(dim,) if alone else ())


def cholesky(call: Call, row: Row) -> Sheet:
    """Batch dims pass, the two dims of the matrices are gathered."""
    del row
    rank = len(call.results[0].shape)
    return _alike(call, dims=(rank - 2, rank - 1), kind="need_replication")


def fft(call: Call, row: Row) -> Sheet:
    """Transformed dims are gathered; the last one is blocked where it changes its size."""
    del row
    shape = call.operands[0].shape
    sheet = Sheet(call)
    first = len(shape) - len(call.attribute("fft_length", ()))
    for d, size in enumerate(shape):
        last = d == len(shape) - 1 and size != call.results[0].shape[d]
        sheet.shared(d, size, "pass_through" if d < first else "need_replication", blocked=last)
    return sheet


def transpose(call: Call, row: Row) -> Sheet:
    """A factor per dim of the result."""
    del row
    sheet = Sheet(call)
    for d, source in enumerate(call.attribute("permutation", ())):
        sheet.factor((source,), (d,), call.results[0].shape[d])
    return sheet


def bitcast_convert(call: Call, row: Row) -> Sheet:
    """Common dims pass; the extra minor dim of the narrower type is gathered."""
    del row
    source, target = call.operands[0].shape, call.results[0].shape
    sheet = Sheet(call)
    for d, size in enumerate(source if len(source) < len(target) else target):
        sheet.shared(d, size)
    if len(source) < len(target):
        sheet.factor((None,), (len(target) - 1,), target[-1], "need_replication")
    elif len(source) > len(target):
        sheet.factor((len(source) - 1,), (None,), source[-1], "need_replication")
    return sheet


def broadcast_in_dim(call: Call, row: Row) -> Sheet:
    """Kept dims pass; an expanded dim of size 1 and what it becomes are separate, as are new dims."""
    del row
    sheet = Sheet(call)
    shape = call.operands[0].shape
    source = {out: d for d, out in enumerate(call.attribute("broadcast_dimensions", ()))}
    for d, size in enumerate(call.results[0].shape):
        held = source.get(d)
        if held is not None and shape[held] == 1 and size != 1:
            sheet.factor((held,), (None,), 1)
            held = None
        sheet.factor((held,), (d,), size)
    return sheet


def slice_(call: Call, row: Row) -> Sheet:
    """Slice and pad: dims that keep their size pass, others exchange shards and are blocked in conservative mode."""
    del row
    sheet = Sheet(call)
    for d, (size, made) in enumerate(zip(call.operands[0].shape, call.results[0].shape, strict=True)):
        if size == made:
            sheet.shared(d, size)
        else:
            sheet.shared(d, size, "permutation", blocked=call.conservative)
    return sheet


def dynamic_slice(call: Call, row: Row) -> Sheet:
    """Dims that keep their size pass; others need all of the operand, and nothing is propagated along them."""
    del row
    sheet = Sheet(call)
    scalars = (None,) * (len(call.operands) - 1)
    for d, (size, made) in enumerate(zip(call.operands[0].shape, call.results[0].shape, strict=True)):
        if size == made:
            sheet.shared(d, size)
        else:
            sheet.factor((d, *scalars), (d,), size, "need_replication", blocked=True)
    return sheet


def dynamic_update_slice(call: Call, row: Row) -> Sheet:
    """Dims that the update covers pass through all; others pass from operand to result, and the update needs them whole.

    Except where the start indices are known (``constant_start``).
    """
    del row
    sheet = Sheet(call)
    scalars = (None,) * (len(call.operands) - 2)
    for d, (size, update) in enumerate(zip(call.operands[0].shape, call.operands[1].shape, strict=True)):
        if size == update:
            sheet.shared(d, size)
        else:
            sheet.factor((d, None, *scalars), (d,), size)
            kind: Kind = "pass_through" if call.attribute("constant_start", False) else "need_replication"
            sheet.factor((None, d, *scalars), (None,), update, kind)
    return sheet


def concatenate(call: Call, row: Row) -> Sheet:
    """The dim that grows exchanges shards where its parts are slices, and is gathered otherwise; conservative: separate dims.

    ``sliced`` and ``one_origin`` say which operands are results of slices, and whether all are parts of one tensor.
    """
    del row
    sheet = Sheet(call)
    sliced = call.attribute("sliced", (False,))
    exchanges = all(sliced) or (any(sliced) and call.attribute("one_origin", False))
    for d, size in enumerate(call.results[0].shape):
        if d != call.attributes["dimension"]:
            sheet.shared(d, size)
        elif not call.conservative:
            sheet.shared(d, size, "permutation" if exchanges else "need_replication")
    return sheet


def reduce(call: Call, row: Row) -> Sheet:
    """Kept dims are in all inputs and results, reduced ones in the inputs alone."""
    del row
    sheet = Sheet(call)
    inputs = len(call.operands) // 2
    scalars = (None,) * (len(call.operands) - inputs)
    reduced = call.attribute("dimensions", ())
    reduction = REDUCTION_OF_BODY.get(call.attribute("body", ""))
    made = 0
    for d, size in enumerate(call.operands[0].shape):
        if d in reduced:
            sheet.factor((*(d,) * inputs, *scalars), (None,) * len(call.results), size, "reduction", reduction=reduction)
        else:
            sheet.factor((*(d,) * inputs, *scalars), (made,) * len(call.results), size)
            made += 1
    return sheet


def reduce_window(call: Call, row: Row) -> Sheet:
    """Dims with a trivial window pass, others exchange shards and are blocked in conservative mode."""
    del row
    sheet = Sheet(call)
    for d, size in enumerate(call.results[0].shape):
        if _trivial(call, d):
            sheet.shared(d, size)
        else:
            sheet.shared(d, size, "permutation", blocked=call.conservative)
    return sheet


def select_and_scatter(call: Call, row: Row) -> Sheet:
    """Dims with a trivial window pass; others gather the source, and exchange shards of operand and result."""
    del row
    sheet = Sheet(call)
    operand, source = call.operands[0].shape, call.operands[1].shape
    for d, size in enumerate(operand):
        if _trivial(call, d):
            sheet.shared(d, size)
        else:
            sheet.factor((None, d, None), (None,), source[d], "need_replication", blocked=call.conservative)
            sheet.factor((d, None, None), (d,), size, "permutation", blocked=call.conservative)
    return sheet


def _trivial(call: Call, dim: int) -> bool:
    """Window 1, stride 1, no padding; attributes that are left out are trivial."""
    window = call.attribute("window_dimensions")
    strides = call.attribute("window_strides")
    padding = call.attribute("padding")
    return (
        (window is None or window[dim] == 1)
        and (strides is None or strides[dim] == 1)
        and (padding is None or tuple(padding[dim]) == (0, 0))
    )


def collective(call: Call, row: Row) -> Sheet:
    """Collectives that change the size of dims: those dims are separate before and after, and gathered."""
    sheet = Sheet(call)
    dims = [call.attributes[name] for name in row.names("dims")]
    for d, size in enumerate(call.operands[0].shape):
        if d not in dims:
            sheet.shared(d, size)
    for d in dict.fromkeys(dims):
        sheet.private(operands=d, size=call.operands[0].shape[d], kind="need_replication")
        sheet.private(results=d, size=call.results[0].shape[d], kind="need_replication")
    return sheet


def batch_norm_inference(call: Call, row: Row) -> Sheet:
    """A factor per dim; the feature dim is also that of the statistics."""
    del row
    sheet = Sheet(call)
    feature = call.attributes["feature_index"]
    for d, size in enumerate(call.operands[0].shape):
        sheet.factor((d, *(0 if d == feature else None,) * (len(call.operands) - 1)), (d,), size)
    return sheet


def rng_bit_generator(call: Call, row: Row) -> Sheet:
    """The state must be whole everywhere; the drawn numbers can be cut."""
    del row
    sheet = Sheet(call)
    for d, size in enumerate(call.operands[0].shape):
        sheet.factor((d,), (d, None), size, "need_replication", blocked=True)
    for d, size in enumerate(call.results[1].shape):
        sheet.factor((None,), (None, d), size)
    return sheet


def _alike(call: Call, *, dims: Collection[int] = (), kind: Kind = "pass_through", blocked: Collection[int] = ()) -> Sheet:
    """All operands and results have the dims of the first result, scalars aside; some dims are of another kind."""
    sheet = Sheet(call)
    for d, size in enumerate(call.results[0].shape):
        sheet.shared(d, size, kind if d in dims else "pass_through", blocked=d in blocked)
    return sheet


_NONE: dict[str, Check] = {}

FAMILIES: tuple[Family, ...] = (
    Family(name="hlo.none", build=none, keys=_NONE),
    Family(name="hlo.pointwise", build=pointwise, keys=_NONE),
    Family(name="hlo.reverse", build=reverse, keys=_NONE),
    Family(name="hlo.sort", build=sort, keys=_NONE),
    Family(name="hlo.cholesky", build=cholesky, keys=_NONE),
    Family(name="hlo.fft", build=fft, keys=_NONE),
    Family(name="hlo.transpose", build=transpose, keys=_NONE),
    Family(name="hlo.bitcast_convert", build=bitcast_convert, keys=_NONE),
    Family(name="hlo.broadcast_in_dim", build=broadcast_in_dim, keys=_NONE),
    Family(name="hlo.slice", build=slice_, keys=_NONE),
    Family(name="hlo.dynamic_slice", build=dynamic_slice, keys=_NONE),
    Family(name="hlo.dynamic_update_slice", build=dynamic_update_slice, keys=_NONE),
    Family(name="hlo.concatenate", build=concatenate, keys=_NONE),
    Family(name="hlo.reduce", build=reduce, keys=_NONE),
    Family(name="hlo.reduce_window", build=reduce_window, keys=_NONE),
    Family(name="hlo.select_and_scatter", build=select_and_scatter, keys=_NONE),
    Family(name="hlo.collective", build=collective, keys={"dims": is_text}, required=("dims",)),
    Family(name="hlo.batch_norm_inference", build=batch_norm_inference, keys=_NONE),
    Family(name="hlo.rng_bit_generator", build=rng_bit_generator, keys=_NONE),
)
