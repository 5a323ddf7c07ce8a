"""StableHLO gather and scatter.

Both walk the dims of the slices (a gather's result, a scatter's updates): a window dim belongs to a dim of the input, a batch
dim to a dim of the indices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from solver_shard.rulebook.draft import Call
from solver_shard.rulebook.families_stablehlo import REDUCTION_OF_BODY
from solver_shard.rulebook.rule import Kind
from solver_shard.rulebook.sheet import Sheet
from solver_shard.rulebook.table import Check, Family, Row

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


_NONE: dict[str, Check] = {}

FAMILIES: tuple[Family, ...] = (
    Family(name="hlo.gather", build=gather, keys=_NONE),
    Family(name="hlo.scatter", build=scatter, keys=_NONE),
)
