"""Families of StableHLO ops: products, what goes dim by dim, known custom calls, gather and scatter.

The factors, their order, sizes and kinds are those of the reference implementation; see the rows in rules/stablehlo.toml.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from solver_shard.errors import RuleError
from solver_shard.rules.draft import OpCall, RuleDraft
from solver_shard.rules.row import Family, is_text
from solver_shard.rules.rule import FactorKind

REDUCTION_OF_BODY = {"stablehlo.add": "sum", "stablehlo.maximum": "max", "stablehlo.minimum": "min"}
"""The reductions of layouts, by the op that a reduction's body consists of."""
_REDUCTION_BODIES = (*REDUCTION_OF_BODY, "stablehlo.multiply")
_LOGICAL_BODIES = ("stablehlo.and", "stablehlo.or")
"""Reductions of truth values; of numbers they work bit by bit."""

# Products, convolutions, triangular solves and reshapes.


def dot_general(call: OpCall) -> RuleDraft:
    """Batch dims, free dims of the left side, free dims of the right side, then contracted dims, which are summed."""
    draft = RuleDraft(call, exact=False)
    left, right = call.operands[0].shape, call.operands[1].shape
    batch = tuple(zip(call.attribute("lhs_batching_dimensions", ()), call.attribute("rhs_batching_dimensions", ()), strict=True))
    summed = tuple(zip(call.attribute("lhs_contracting_dimensions", ()), call.attribute("rhs_contracting_dimensions", ()), strict=True))
    made = 0
    for a, b in batch:
        draft.span((a, b), (made,), left[a])
        made += 1
    for side, shape in enumerate((left, right)):
        bound = {pair[side] for pair in (*batch, *summed)}
        for d, size in enumerate(shape):
            if d not in bound:
                draft.span((d, None) if side == 0 else (None, d), (made,), size)
                made += 1
    for a, b in summed:
        draft.span((a, b), (None,), left[a], "reduction", reduction="sum")
    return draft


def dot(call: OpCall) -> RuleDraft:
    """A product of matrices or vectors: rows, columns, then the contracted dim."""
    draft = RuleDraft(call, exact=False)
    left, right = call.operands[0].shape, call.operands[1].shape
    made = 0
    if len(left) == 2:
        draft.span((0, None), (made,), left[0])
        made += 1
    if len(right) == 2:
        draft.span((None, 1), (made,), right[1])
    draft.span((len(left) - 1, 0), (None,), left[-1], "reduction", reduction="sum")
    return draft


def convolution(call: OpCall) -> RuleDraft:
    """Batch groups, batch, per spatial dim its windows and the positions in a window, feature groups, features in, features out.

    A spatial dim of the input can be cut by windows (the output's dim) or within windows (the kernel's dim), whichever is
    larger first; in conservative mode spatial dims are not cut.
    """
    draft = RuleDraft(call, exact=False)
    at = call.attributes
    lhs, kernel, out = call.operands[0].shape, call.operands[1].shape, call.results[0].shape
    batch, feature = at["input_batch_dimension"], at["input_feature_dimension"]
    kernel_in, kernel_out = at["kernel_input_feature_dimension"], at["kernel_output_feature_dimension"]
    out_batch, out_feature = at["output_batch_dimension"], at["output_feature_dimension"]
    batch_groups, feature_groups = call.attribute("batch_group_count", 1), call.attribute("feature_group_count", 1)
    if batch_groups > 1:
        draft.span((batch, kernel_out), (out_feature,), batch_groups)
    draft.span((batch, None), (out_batch,), out[out_batch])
    spatial = zip(at["input_spatial_dimensions"], at["kernel_spatial_dimensions"], at["output_spatial_dimensions"], strict=True)
    for d, k, o in () if call.conservative else spatial:
        left = lhs[d]
        for size, windows in sorted(((out[o], True), (kernel[k], False)), key=lambda pair: -pair[0]):
            share = min(left, size)
            if share > 1:
                if windows:
                    draft.span((d, None), (o,), share, "permutation")
                else:
                    draft.span((d, k), (None,), share, "reduction", reduction="sum")
                left //= share
    if feature_groups > 1:
        draft.span((feature, kernel_out), (out_feature,), feature_groups)
    draft.span((feature, kernel_in), (None,), kernel[kernel_in], "reduction", reduction="sum")
    per_group = out[out_feature] // (batch_groups * feature_groups)
    if per_group > 1:
        draft.span((None, kernel_out), (out_feature,), per_group)
    return draft


def triangular_solve(call: OpCall) -> RuleDraft:
    """Batch dims pass; the free dim, the solved dim and the contracted dim are gathered."""
    draft = RuleDraft(call, exact=False)
    a, b = call.operands[0].shape, call.operands[1].shape
    rank = len(a)
    transposed = call.attribute("transpose_a", "NO_TRANSPOSE") in ("TRANSPOSE", "ADJOINT")
    # In a x = b the rows of a are free, in x a = b its columns.
    free, contracted = (rank - 1, rank - 2) if transposed == call.attributes["left_side"] else (rank - 2, rank - 1)
    for d in range(rank - 2):
        draft.span(d, d, a[d])
    if call.attributes["left_side"]:
        draft.span((free, rank - 2), (None,), a[free], "need_replication")
        draft.span((None, rank - 1), (rank - 1,), b[-1], "need_replication")
        draft.span((contracted, None), (rank - 2,), a[contracted], "need_replication")
    else:
        draft.span((None, rank - 2), (rank - 2,), b[-2], "need_replication")
        draft.span((free, rank - 1), (None,), a[free], "need_replication")
        draft.span((contracted, None), (rank - 1,), a[contracted], "need_replication")
    return draft


def reshape(call: OpCall) -> RuleDraft:
    """Factors that split and merge dims: common ones while both sides are in step, private ones until they are again.

    Each side opens its dims one after the other and keeps the product of what it opened and of the factors it gave out; the
    quotient is what is next to be covered.
    """
    source, target = call.operands[0].shape, call.results[0].shape
    if 0 in (*source, *target):
        return none(call)
    draft = RuleDraft(call, exact=False)
    sides = (_Cursor(source), _Cursor(target))
    left, right = sides
    while not (left.done and right.done):
        alone = next((side for side in sides if side.at_one), None)
        if alone is not None:
            draft.span(*_places(left, right, alone), 1)
            alone.skip()
            continue
        ahead, behind = left.next(), right.next()
        common = math.gcd(ahead, behind)
        if left.given == right.given:
            if common > 1:
                draft.span((left.dim,), (right.dim,), common)
                left.give(common)
                right.give(common)
            else:
                draft.span((left.dim,), (None,), ahead)
                draft.span((None,), (right.dim,), behind)
                left.give(ahead)
                right.give(behind)
        else:
            late, early = sides if left.given < right.given else (right, left)
            size = _catch_up(late, early, common)
            draft.span(*_places(left, right, late), size)
            late.give(size)
    return draft


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


# Ops that go dim by dim.


def none(call: OpCall) -> RuleDraft:
    """No rule: propagation does not go through the op."""
    draft = RuleDraft(call, exact=False)
    draft.propagates = False
    return draft


def pointwise(call: OpCall) -> RuleDraft:
    """One factor per dim of the first result, in all operands and results that have the dim."""
    if not call.results:
        return none(call)
    draft = RuleDraft(call, exact=False)
    shape = call.results[0].shape
    if any(len(tensor.shape) > len(shape) for tensor in (*call.operands, *call.results)):
        shapes = ", ".join(str(tensor.shape) for tensor in (*call.operands, *call.results))
        raise RuleError(f"{call.name} goes dim by dim of its first result, but others have more dims: {shapes}; check the op's operands")
    for d, size in enumerate(shape):
        draft.span(
            [d if d < len(tensor.shape) else None for tensor in call.operands],
            [d if d < len(tensor.shape) else None for tensor in call.results],
            size,
        )
    return draft


def reverse(call: OpCall) -> RuleDraft:
    """Reversed dims exchange shards."""
    return _alike(call, dims=call.attribute("dimensions", ()), kind="permutation")


def sort(call: OpCall) -> RuleDraft:
    """The sorted dim is gathered; nothing is propagated along it where there is no other dim to cut."""
    dim = call.attributes["dimension"]
    shape = call.results[0].shape
    alone = math.prod(shape) == shape[dim]
    return _alike(call, dims=(dim,), kind="need_replication", blocked=(dim,) if alone else ())


def cholesky(call: OpCall) -> RuleDraft:
    """Batch dims pass, the two dims of the matrices are gathered."""
    rank = len(call.results[0].shape)
    return _alike(call, dims=(rank - 2, rank - 1), kind="need_replication")


def fft(call: OpCall) -> RuleDraft:
    """Transformed dims are gathered; the last one is blocked where it changes its size."""
    shape = call.operands[0].shape
    draft = RuleDraft(call, exact=False)
    first = len(shape) - len(call.attribute("fft_length", ()))
    for d, size in enumerate(shape):
        last = d == len(shape) - 1 and size != call.results[0].shape[d]
        draft.span(d, d, size, "pass_through" if d < first else "need_replication", blocked=last)
    return draft


def transpose(call: OpCall) -> RuleDraft:
    """A factor per dim of the result."""
    draft = RuleDraft(call, exact=False)
    for d, source in enumerate(call.attribute("permutation", ())):
        draft.span((source,), (d,), call.results[0].shape[d])
    return draft


def bitcast_convert(call: OpCall) -> RuleDraft:
    """Common dims pass; the extra minor dim of the narrower type is gathered."""
    source, target = call.operands[0].shape, call.results[0].shape
    draft = RuleDraft(call, exact=False)
    for d, size in enumerate(source if len(source) < len(target) else target):
        draft.span(d, d, size)
    if len(source) < len(target):
        draft.span((None,), (len(target) - 1,), target[-1], "need_replication")
    elif len(source) > len(target):
        draft.span((len(source) - 1,), (None,), source[-1], "need_replication")
    return draft


def broadcast_in_dim(call: OpCall) -> RuleDraft:
    """Kept dims pass; an expanded dim of size 1 and what it becomes are separate, as are new dims."""
    draft = RuleDraft(call, exact=False)
    shape = call.operands[0].shape
    source = {out: d for d, out in enumerate(call.attribute("broadcast_dimensions", ()))}
    for d, size in enumerate(call.results[0].shape):
        held = source.get(d)
        if held is not None and shape[held] == 1 and size != 1:
            draft.span((held,), (None,), 1)
            held = None
        draft.span((held,), (d,), size)
    return draft


def slice_(call: OpCall) -> RuleDraft:
    """Slice and pad: dims that keep their size pass, others exchange shards and are blocked in conservative mode."""
    draft = RuleDraft(call, exact=False)
    for d, (size, made) in enumerate(zip(call.operands[0].shape, call.results[0].shape, strict=True)):
        if size == made:
            draft.span(d, d, size)
        else:
            draft.span(d, d, size, "permutation", blocked=call.conservative)
    return draft


def dynamic_slice(call: OpCall) -> RuleDraft:
    """Dims that keep their size pass; others need all of the operand, and nothing is propagated along them."""
    draft = RuleDraft(call, exact=False)
    scalars = (None,) * (len(call.operands) - 1)
    for d, (size, made) in enumerate(zip(call.operands[0].shape, call.results[0].shape, strict=True)):
        if size == made:
            draft.span(d, d, size)
        else:
            draft.span((d, *scalars), (d,), size, "need_replication", blocked=True)
    return draft


def dynamic_update_slice(call: OpCall) -> RuleDraft:
    """Dims that the update covers pass through all; others pass from operand to result, and the update needs them whole.

    Except where the start indices are known (``constant_start``).
    """
    draft = RuleDraft(call, exact=False)
    scalars = (None,) * (len(call.operands) - 2)
    for d, (size, update) in enumerate(zip(call.operands[0].shape, call.operands[1].shape, strict=True)):
        if size == update:
            draft.span(d, d, size)
        else:
            draft.span((d, None, *scalars), (d,), size)
            kind: FactorKind = "pass_through" if call.attribute("constant_start", False) else "need_replication"
            draft.span((None, d, *scalars), (None,), update, kind)
    return draft


def concatenate(call: OpCall) -> RuleDraft:
    """The dim that grows exchanges shards where its parts are slices, and is gathered otherwise; conservative: separate dims.

    ``sliced`` and ``one_origin`` say which operands are results of slices, and whether all are parts of one tensor.
    """
    draft = RuleDraft(call, exact=False)
    sliced = call.attribute("sliced", (False,))
    exchanges = all(sliced) or (any(sliced) and call.attribute("one_origin", False))
    for d, size in enumerate(call.results[0].shape):
        if d != call.attributes["dimension"]:
            draft.span(d, d, size)
        elif not call.conservative:
            draft.span(d, d, size, "permutation" if exchanges else "need_replication")
    return draft


def reduce(call: OpCall) -> RuleDraft:
    """Kept dims are in all inputs and results, reduced ones in the inputs alone."""
    draft = RuleDraft(call, exact=False)
    inputs = len(call.operands) // 2
    scalars = (None,) * (len(call.operands) - inputs)
    reduced = call.attribute("dimensions", ())
    reduction = REDUCTION_OF_BODY.get(call.attribute("body", ""))
    made = 0
    for d, size in enumerate(call.operands[0].shape):
        if d in reduced:
            draft.span((*(d,) * inputs, *scalars), (None,) * len(call.results), size, "reduction", reduction=reduction)
        else:
            draft.span((*(d,) * inputs, *scalars), (made,) * len(call.results), size)
            made += 1
    return draft


def reduce_window(call: OpCall) -> RuleDraft:
    """Dims with a trivial window pass, others exchange shards and are blocked in conservative mode."""
    draft = RuleDraft(call, exact=False)
    for d, size in enumerate(call.results[0].shape):
        if _trivial(call, d):
            draft.span(d, d, size)
        else:
            draft.span(d, d, size, "permutation", blocked=call.conservative)
    return draft


def select_and_scatter(call: OpCall) -> RuleDraft:
    """Dims with a trivial window pass; others gather the source, and exchange shards of operand and result."""
    draft = RuleDraft(call, exact=False)
    operand, source = call.operands[0].shape, call.operands[1].shape
    for d, size in enumerate(operand):
        if _trivial(call, d):
            draft.span(d, d, size)
        else:
            draft.span((None, d, None), (None,), source[d], "need_replication", blocked=call.conservative)
            draft.span((d, None, None), (d,), size, "permutation", blocked=call.conservative)
    return draft


def _trivial(call: OpCall, dim: int) -> bool:
    """Window 1, stride 1, no padding; attributes that are left out are trivial."""
    window = call.attribute("window_dimensions")
    strides = call.attribute("window_strides")
    padding = call.attribute("padding")
    return (
        (window is None or window[dim] == 1)
        and (strides is None or strides[dim] == 1)
        and (padding is None or tuple(padding[dim]) == (0, 0))
    )


def collective(call: OpCall, *, dims: str) -> RuleDraft:
    """Collectives that change the size of dims: those dims are separate before and after, and gathered."""
    draft = RuleDraft(call, exact=False)
    changed = [call.attributes[name] for name in dims.split()]
    for d, size in enumerate(call.operands[0].shape):
        if d not in changed:
            draft.span(d, d, size)
    for d in dict.fromkeys(changed):
        draft.span(d, None, call.operands[0].shape[d], "need_replication")
        draft.span(None, d, call.results[0].shape[d], "need_replication")
    return draft


def batch_norm_inference(call: OpCall) -> RuleDraft:
    """A factor per dim; the feature dim is also that of the statistics."""
    draft = RuleDraft(call, exact=False)
    feature = call.attributes["feature_index"]
    for d, size in enumerate(call.operands[0].shape):
        draft.span((d, *(0 if d == feature else None,) * (len(call.operands) - 1)), (d,), size)
    return draft


def rng_bit_generator(call: OpCall) -> RuleDraft:
    """The state must be whole everywhere; the drawn numbers can be cut."""
    draft = RuleDraft(call, exact=False)
    for d, size in enumerate(call.operands[0].shape):
        draft.span((d,), (d, None), size, "need_replication", blocked=True)
    for d, size in enumerate(call.results[1].shape):
        draft.span((None,), (None, d), size)
    return draft


def _alike(call: OpCall, *, dims: Collection[int] = (), kind: FactorKind = "pass_through", blocked: Collection[int] = ()) -> RuleDraft:
    """All operands and results have the dims of the first result, scalars aside; some dims are of another kind."""
    draft = RuleDraft(call, exact=False)
    for d, size in enumerate(call.results[0].shape):
        draft.span(d, d, size, kind if d in dims else "pass_through", blocked=d in blocked)
    return draft


# Known custom calls; their rows are named ``stablehlo.custom_call@TARGET``.


def combine(call: OpCall) -> RuleDraft:
    """Two halves of 64-bit numbers; whole where they are the state of a random generator (``feeds_rng``)."""
    draft = RuleDraft(call, exact=False)
    state = call.attribute("feeds_rng", False)
    for d, size in enumerate(call.results[0].shape):
        draft.span(d, d, size, "need_replication" if state else "pass_through", blocked=state)
    return draft


def eigh(call: OpCall) -> RuleDraft:
    """Batch dims; rows of matrix and vectors; columns of both and the values."""
    draft = RuleDraft(call, exact=False)
    shape = call.operands[0].shape
    rank = len(shape)
    for d in range(rank - 2):
        draft.span(d, d, shape[d])
    count = len(call.results)
    draft.span((rank - 2,), (rank - 2, None)[:count], shape[-2])
    draft.span((rank - 1,), (rank - 1, rank - 2)[:count], shape[-1])
    return draft


def reflectors(call: OpCall) -> RuleDraft:
    """QR and Householder products: batch dims pass; matrices are whole, as are the vectors of their reflectors.

    The vectors are the second operand or the second result.
    """
    draft = RuleDraft(call, exact=False)
    shape = call.operands[0].shape
    rank = len(shape)
    for d in range(rank - 2):
        draft.span(d, d, shape[d])
    operands, results = len(call.operands), len(call.results)
    for d in (rank - 2, rank - 1):
        draft.span((d, None)[:operands], (d, None)[:results], shape[d], "need_replication")
    vectors = (*call.operands[1:], *call.results[1:])[0]
    draft.span((None, rank - 2)[:operands], (None, rank - 2)[:results], vectors.shape[rank - 2], "need_replication")
    return draft


def topk(call: OpCall) -> RuleDraft:
    """The dim of which the largest are taken is whole, and nothing is propagated along it."""
    draft = RuleDraft(call, exact=False)
    for d, (size, made) in enumerate(zip(call.operands[0].shape, call.results[0].shape, strict=False)):
        draft.span(d, d, size, "pass_through" if size == made else "need_replication", blocked=size != made)
    return draft


def partial_topk(call: OpCall) -> RuleDraft:
    """Approximate top-k: the operands may be cut along the searched dim; what is found is whole."""
    draft = RuleDraft(call, exact=False)
    for d, (size, made) in enumerate(zip(call.operands[0].shape, call.results[0].shape, strict=False)):
        if size == made:
            draft.span(d, d, size)
        else:
            draft.span(d, None, size)
            draft.span(None, d, made, "need_replication", blocked=True)
    return draft


# Gather and scatter. Both walk the dims of the slices (a gather's result, a scatter's updates): a window dim belongs to a dim of the
# input, a batch dim to a dim of the indices.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dim:
    """A dim of the slices: the input dim of a window or explicit batch dim, the indices dim of a batch dim."""

    slices: int
    input: int | None
    indices: int | None


def gather(call: OpCall) -> RuleDraft:
    """Whole windows pass; a gathered dim is summed over the parts of the input where the slice has one element.

    A device that has not the indexed row contributes nothing, so cutting a collapsed dim leaves partial sums.
    """
    draft = RuleDraft(call, exact=False)
    source, result = call.operands[0].shape, call.results[0].shape
    collapsed = call.attribute("collapsed_slice_dims", ())
    walk = _walk(call, result, "offset_dims", collapsed, "operand_batching_dims", "start_indices_batching_dims")
    for dim in walk:
        if dim.indices is not None:
            draft.span((dim.input, dim.indices), (dim.slices,), result[dim.slices])
        elif dim.input is not None:
            size, made = source[dim.input], result[dim.slices]
            if size == made:
                draft.span((dim.input, None), (dim.slices,), size)
            elif made == 1:
                draft.span((dim.input, None), (None,), size, "reduction", reduction="sum")
                draft.span((None, None), (dim.slices,), made, "need_replication")
            else:
                draft.span((dim.input, None), (dim.slices,), size, "need_replication", blocked=True)
    for d in collapsed:
        kind: FactorKind = "need_replication" if source[d] == 1 else "reduction"
        draft.span((d, None), (None,), source[d], kind, reduction="sum" if kind == "reduction" else None)
    vector = call.attributes["index_vector_dim"]
    if vector < len(call.operands[1].shape):
        draft.span((None, vector), (None,), call.operands[1].shape[vector], "need_replication")
    return draft


def scatter(call: OpCall) -> RuleDraft:
    """Whole windows pass; updates cut along a batch dim are partial results where the body is a reduction."""
    draft = RuleDraft(call, exact=False)
    count = (len(call.operands) - 1) // 2
    source, updates = call.operands[0].shape, call.operands[count + 1].shape
    inserted = call.attribute("inserted_window_dims", ())
    body = call.attribute("body", "")
    reduces = body in _REDUCTION_BODIES or (body in _LOGICAL_BODIES and call.operands[0].dtype in ("i1", "bool"))

    def add(
        input_: int | None,
        indices: int | None,
        update: int | None,
        size: int,
        kind: FactorKind = "pass_through",
        reduction: str | None = None,
    ) -> None:
        draft.span((*(input_,) * count, indices, *(update,) * count), (input_,) * len(call.results), size, kind, reduction=reduction)

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
    return draft


def _walk(
    call: OpCall, slices: tuple[int, ...], windows: str, dropped: tuple[int, ...], batching: str, indices_batching: str
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


_BUILDERS = (
    none, pointwise, reverse, sort, cholesky, fft, transpose, bitcast_convert, broadcast_in_dim, slice_, dynamic_slice,
    dynamic_update_slice, concatenate, reduce, reduce_window, select_and_scatter, batch_norm_inference, rng_bit_generator,
    dot_general, dot, convolution, triangular_solve, reshape, gather, scatter, combine, eigh, reflectors, topk, partial_topk,
)  # fmt: skip
"""What drafts the rules of a family without settings, which has its name."""

FAMILIES = (
    *(Family(name=f"hlo.{build.__name__.rstrip('_')}", build=build) for build in _BUILDERS),
    Family(name="hlo.collective", build=collective, keys={"dims": is_text}, required=("dims",)),
)
