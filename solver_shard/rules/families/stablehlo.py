"""StableHLO families that go dim by dim: element-wise ops, slices, pads, sorts, broadcasts, reductions, collectives.

The factors, their order, sizes and kinds are those of the reference implementation; see the rows in rules/stablehlo.toml.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from solver_shard.errors import RuleError
from solver_shard.rules.draft import Call, Sheet
from solver_shard.rules.row import Check, Family, Row, is_text
from solver_shard.rules.rule import Kind

# StableHLO families of products, convolutions, triangular solves and reshapes.


def dot_general(call: Call, row: Row) -> Sheet:
    """Batch dims, free dims of the left side, free dims of the right side, then contracted dims, which are summed."""
    del row
    sheet = Sheet(call)
    left, right = call.operands[0].shape, call.operands[1].shape
    batch = tuple(zip(call.attribute("lhs_batching_dimensions", ()), call.attribute("rhs_batching_dimensions", ()), strict=True))
    summed = tuple(zip(call.attribute("lhs_contracting_dimensions", ()), call.attribute("rhs_contracting_dimensions", ()), strict=True))
    made = 0
    for a, b in batch:
        sheet.factor((a, b), (made,), left[a])
        made += 1
    for side, shape in enumerate((left, right)):
        bound = {pair[side] for pair in (*batch, *summed)}
        for d, size in enumerate(shape):
            if d not in bound:
                sheet.factor((d, None) if side == 0 else (None, d), (made,), size)
                made += 1
    for a, b in summed:
        sheet.factor((a, b), (None,), left[a], "reduction", reduction="sum")
    return sheet


def dot(call: Call, row: Row) -> Sheet:
    """A product of matrices or vectors: rows, columns, then the contracted dim."""
    del row
    sheet = Sheet(call)
    left, right = call.operands[0].shape, call.operands[1].shape
    made = 0
    if len(left) == 2:
        sheet.factor((0, None), (made,), left[0])
        made += 1
    if len(right) == 2:
        sheet.factor((None, 1), (made,), right[1])
    sheet.factor((len(left) - 1, 0), (None,), left[-1], "reduction", reduction="sum")
    return sheet


def convolution(call: Call, row: Row) -> Sheet:
    """Batch groups, batch, per spatial dim its windows and the positions in a window, feature groups, features in, features out.

    A spatial dim of the input can be cut by windows (the output's dim) or within windows (the kernel's dim), whichever is
    larger first; in conservative mode spatial dims are not cut.
    """
    del row
    sheet = Sheet(call)
    at = call.attributes
    lhs, kernel, out = call.operands[0].shape, call.operands[1].shape, call.results[0].shape
    batch, feature = at["input_batch_dimension"], at["input_feature_dimension"]
    kernel_in, kernel_out = at["kernel_input_feature_dimension"], at["kernel_output_feature_dimension"]
    out_batch, out_feature = at["output_batch_dimension"], at["output_feature_dimension"]
    batch_groups, feature_groups = call.attribute("batch_group_count", 1), call.attribute("feature_group_count", 1)
    if batch_groups > 1:
        sheet.factor((batch, kernel_out), (out_feature,), batch_groups)
    sheet.factor((batch, None), (out_batch,), out[out_batch])
    spatial = zip(at["input_spatial_dimensions"], at["kernel_spatial_dimensions"], at["output_spatial_dimensions"], strict=True)
    for d, k, o in () if call.conservative else spatial:
        left = lhs[d]
        for size, windows in sorted(((out[o], True), (kernel[k], False)), key=lambda pair: -pair[0]):
            share = min(left, size)
            if share > 1:
                if windows:
                    sheet.factor((d, None), (o,), share, "permutation")
                else:
                    sheet.factor((d, k), (None,), share, "reduction", reduction="sum")
                left //= share
    if feature_groups > 1:
        sheet.factor((feature, kernel_out), (out_feature,), feature_groups)
    sheet.factor((feature, kernel_in), (None,), kernel[kernel_in], "reduction", reduction="sum")
    per_group = out[out_feature] // (batch_groups * feature_groups)
    if per_group > 1:
        sheet.factor((None, kernel_out), (out_feature,), per_group)
    return sheet


def triangular_solve(call: Call, row: Row) -> Sheet:
    """Batch dims pass; the free dim, the solved dim and the contracted dim are gathered."""
    del row
    sheet = Sheet(call)
    a, b = call.operands[0].shape, call.operands[1].shape
    rank = len(a)
    transposed = call.attribute("transpose_a", "NO_TRANSPOSE") in ("TRANSPOSE", "ADJOINT")
    # In a x = b the rows of a are free, in x a = b its columns.
    free, contracted = (rank - 1, rank - 2) if transposed == call.attributes["left_side"] else (rank - 2, rank - 1)
    for d in range(rank - 2):
        sheet.shared(d, a[d])
    if call.attributes["left_side"]:
        sheet.factor((free, rank - 2), (None,), a[free], "need_replication")
        sheet.factor((None, rank - 1), (rank - 1,), b[-1], "need_replication")
        sheet.factor((contracted, None), (rank - 2,), a[contracted], "need_replication")
    else:
        sheet.factor((None, rank - 2), (rank - 2,), b[-2], "need_replication")
        sheet.factor((free, rank - 1), (None,), a[free], "need_replication")
        sheet.factor((contracted, None), (rank - 1,), a[contracted], "need_replication")
    return sheet


def reshape(call: Call, row: Row) -> Sheet:
    """Factors that split and merge dims: common ones while both sides are in step, private ones until they are again.

    Each side opens its dims one after the other and keeps the product of what it opened and of the factors it gave out; the
    quotient is what is next to be covered.
    """
    del row
    source, target = call.operands[0].shape, call.results[0].shape
    if 0 in (*source, *target):
        return Sheet.without(call)
    sheet = Sheet(call)
    sides = (_Cursor(source), _Cursor(target))
    left, right = sides
    while not (left.done and right.done):
        alone = next((side for side in sides if side.at_one), None)
        if alone is not None:
            sheet.factor(*_places(left, right, alone), 1)
            alone.skip()
            continue
        ahead, behind = left.next(), right.next()
        common = math.gcd(ahead, behind)
        if left.given == right.given:
            if common > 1:
                sheet.factor((left.dim,), (right.dim,), common)
                left.give(common)
                right.give(common)
            else:
                sheet.factor((left.dim,), (None,), ahead)
                sheet.factor((None,), (right.dim,), behind)
                left.give(ahead)
                right.give(behind)
        else:
            late, early = sides if left.given < right.given else (right, left)
            size = _catch_up(late, early, common)
            sheet.factor(*_places(left, right, late), size)
            late.give(size)
    return sheet


class _Cursor:
    """A side of a reshape: the dim it is at, the product of the dims it opened, and that of the factors it gave."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.dim = 0
        self.opened = 1
        self.given = 1
        self.open = False

    @property
    def done(self) -> bool:
        return self.dim == len(self.shape)

    @property
    def at_one(self) -> bool:
        """At a dim of size 1 that is not open."""
        return not self.done and not self.open and self.shape[self.dim] == 1

    def skip(self) -> None:
        self.dim += 1

    def next(self) -> int:
        """What is left to cover of the dim, which is opened if it was not."""
        if not self.done and not self.open:
            self.opened *= self.shape[self.dim]
            self.open = True
        return self.opened // self.given

    def give(self, size: int) -> None:
        """A factor was given out; the dim is done when it is covered."""
        self.given *= size
        if self.opened == self.given:
            self.dim += 1
            self.open = False


def _catch_up(late: _Cursor, early: _Cursor, common: int) -> int:
    """The size of the private factor of the side that is behind."""
    left = late.next()
    ratio, rest = divmod(early.given, late.given)
    if rest == 0 and left % ratio == 0:
        return ratio
    return left // common if left > common else left


def _places(left: _Cursor, right: _Cursor, side: _Cursor) -> tuple[tuple[int | None], tuple[int | None]]:
    return (left.dim if side is left else None,), (right.dim if side is right else None,)


_NONE: dict[str, Check] = {}

PRODUCT_FAMILIES: tuple[Family, ...] = (
    Family(name="hlo.dot_general", build=dot_general, keys=_NONE),
    Family(name="hlo.dot", build=dot, keys=_NONE),
    Family(name="hlo.convolution", build=convolution, keys=_NONE),
    Family(name="hlo.triangular_solve", build=triangular_solve, keys=_NONE),
    Family(name="hlo.reshape", build=reshape, keys=_NONE),
)


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


PLAIN_FAMILIES: tuple[Family, ...] = (
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


# Families of known custom calls; their rows are named ``stablehlo.custom_call@TARGET``.


def combine(call: Call, row: Row) -> Sheet:
    """Two halves of 64-bit numbers; whole where they are the state of a random generator (``feeds_rng``)."""
    del row
    sheet = Sheet(call)
    state = call.attribute("feeds_rng", False)
    for d, size in enumerate(call.results[0].shape):
        sheet.shared(d, size, "need_replication" if state else "pass_through", blocked=state)
    return sheet


def eigh(call: Call, row: Row) -> Sheet:
    """Batch dims; rows of matrix and vectors; columns of both and the values."""
    del row
    sheet = Sheet(call)
    shape = call.operands[0].shape
    rank = len(shape)
    for d in range(rank - 2):
        sheet.shared(d, shape[d])
    count = len(call.results)
    sheet.factor((rank - 2,), (rank - 2, None)[:count], shape[-2])
    sheet.factor((rank - 1,), (rank - 1, rank - 2)[:count], shape[-1])
    return sheet


def reflectors(call: Call, row: Row) -> Sheet:
    """QR and Householder products: batch dims pass; matrices are whole, as are the vectors of their reflectors.

    The vectors are the second operand or the second result.
    """
    del row
    sheet = Sheet(call)
    shape = call.operands[0].shape
    rank = len(shape)
    for d in range(rank - 2):
        sheet.shared(d, shape[d])
    operands, results = len(call.operands), len(call.results)
    for d in (rank - 2, rank - 1):
        sheet.factor((d, None)[:operands], (d, None)[:results], shape[d], "need_replication")
    vectors = (*call.operands[1:], *call.results[1:])[0]
    sheet.factor((None, rank - 2)[:operands], (None, rank - 2)[:results], vectors.shape[rank - 2], "need_replication")
    return sheet


def topk(call: Call, row: Row) -> Sheet:
    """The dim of which the largest are taken is whole, and nothing is propagated along it."""
    del row
    sheet = Sheet(call)
    for d, (size, made) in enumerate(zip(call.operands[0].shape, call.results[0].shape, strict=False)):
        sheet.shared(d, size, "pass_through" if size == made else "need_replication", blocked=size != made)
    return sheet


def partial_topk(call: Call, row: Row) -> Sheet:
    """Approximate top-k: the operands may be cut along the searched dim; what is found is whole."""
    del row
    sheet = Sheet(call)
    for d, (size, made) in enumerate(zip(call.operands[0].shape, call.results[0].shape, strict=False)):
        if size == made:
            sheet.shared(d, size)
        else:
            sheet.private(operands=d, size=size)
            sheet.private(results=d, size=made, kind="need_replication", blocked=True)
    return sheet


CALL_FAMILIES: tuple[Family, ...] = (
    Family(name="hlo.combine", build=combine, keys=_NONE),
    Family(name="hlo.eigh", build=eigh, keys=_NONE),
    Family(name="hlo.reflectors", build=reflectors, keys=_NONE),
    Family(name="hlo.topk", build=topk, keys=_NONE),
    Family(name="hlo.partial_topk", build=partial_topk, keys=_NONE),
)


# StableHLO gather and scatter.
#
# Both walk the dims of the slices (a gather's result, a scatter's updates): a window dim belongs to a dim of the input, a batch
# dim to a dim of the indices.

_REDUCTION_BODIES = (*REDUCTION_OF_BODY, "stablehlo.multiply")
_LOGICAL_BODIES = ("stablehlo.and", "stablehlo.or")
"""Reductions of truth values; of numbers they work bit by bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dim:
    """A dim of the slices: the input dim of a window or explicit batch dim, the indices dim of a batch dim."""

    slices: int
    input: int | None
    indices: int | None


def gather(call: Call, row: Row) -> Sheet:
    """Whole windows pass; a gathered dim is summed over the parts of the input where the slice has one element.

    A device that has not the indexed row contributes nothing, so cutting a collapsed dim leaves partial sums.
    """
    del row
    sheet = Sheet(call)
    source, result = call.operands[0].shape, call.results[0].shape
    collapsed = call.attribute("collapsed_slice_dims", ())
    walk = _walk(call, result, "offset_dims", collapsed, "operand_batching_dims", "start_indices_batching_dims")
    for dim in walk:
        if dim.indices is not None:
            sheet.factor((dim.input, dim.indices), (dim.slices,), result[dim.slices])
        elif dim.input is not None:
            size, made = source[dim.input], result[dim.slices]
            if size == made:
                sheet.factor((dim.input, None), (dim.slices,), size)
            elif made == 1:
                sheet.factor((dim.input, None), (None,), size, "reduction", reduction="sum")
                sheet.factor((None, None), (dim.slices,), made, "need_replication")
            else:
                sheet.factor((dim.input, None), (dim.slices,), size, "need_replication", blocked=True)
    for d in collapsed:
        kind: Kind = "need_replication" if source[d] == 1 else "reduction"
        sheet.factor((d, None), (None,), source[d], kind, reduction="sum" if kind == "reduction" else None)
    vector = call.attributes["index_vector_dim"]
    if vector < len(call.operands[1].shape):
        sheet.factor((None, vector), (None,), call.operands[1].shape[vector], "need_replication")
    return sheet


def scatter(call: Call, row: Row) -> Sheet:
    """Whole windows pass; updates cut along a batch dim are partial results where the body is a reduction."""
    del row
    sheet = Sheet(call)
    count = (len(call.operands) - 1) // 2
    source, updates = call.operands[0].shape, call.operands[count + 1].shape
    inserted = call.attribute("inserted_window_dims", ())
    body = call.attribute("body", "")
    reduces = body in _REDUCTION_BODIES or (body in _LOGICAL_BODIES and call.operands[0].dtype in ("i1", "bool"))

    def add(
        input_: int | None, indices: int | None, update: int | None, size: int, kind: Kind = "pass_through", reduction: str | None = None
    ) -> None:
        sheet.factor((*(input_,) * count, indices, *(update,) * count), (input_,) * len(call.results), size, kind, reduction=reduction)

    walk = _walk(call, updates, "update_window_dims", inserted, "input_batching_dims", "scatter_indices_batching_dims")
    for dim in walk:
        size = updates[dim.slices]
        if dim.indices is not None:
            if dim.input is not None:
                add(dim.input, dim.indices, dim.slices, size)
            elif reduces:
                add(None, dim.indices, dim.slices, size, "reduction", REDUCTION_OF_BODY.get(body))
            else:
                add(None, dim.indices, dim.slices, size, "need_replication")
        elif dim.input is not None:
            if source[dim.input] == size:
                add(dim.input, None, dim.slices, size)
            else:
                add(dim.input, None, None, source[dim.input], "need_replication")
                add(None, None, dim.slices, size, "need_replication")
    for d in inserted:
        add(d, None, None, source[d])
    vector = call.attributes["index_vector_dim"]
    if vector < len(call.operands[count].shape):
        add(None, vector, None, call.operands[count].shape[vector], "need_replication")
    return sheet


def _walk(
    call: Call, slices: tuple[int, ...], windows: str, dropped: tuple[int, ...], batching: str, indices_batching: str
) -> Iterator[_Dim]:
    """The dims of the slices, in order."""
    batched = call.attribute(batching, ())
    by_indices = dict(zip(call.attribute(indices_batching, ()), batched, strict=True))
    kept = iter(d for d in range(len(call.operands[0].shape)) if d not in dropped and d not in batched)
    batch = 0
    for d in range(len(slices)):
        if d in call.attribute(windows, ()):
            yield _Dim(slices=d, input=next(kept), indices=None)
        else:
            held = batch if batch < call.attributes["index_vector_dim"] else batch + 1
            yield _Dim(slices=d, input=by_indices.get(held), indices=held)
            batch += 1


INDEX_FAMILIES: tuple[Family, ...] = (
    Family(name="hlo.gather", build=gather, keys=_NONE),
    Family(name="hlo.scatter", build=scatter, keys=_NONE),
)

FAMILIES: tuple[Family, ...] = (*PLAIN_FAMILIES, *PRODUCT_FAMILIES, *INDEX_FAMILIES, *CALL_FAMILIES)
