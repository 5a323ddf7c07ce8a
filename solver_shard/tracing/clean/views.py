"""Cleaning of ops that move no data or make it from nothing: views, copies that copy nothing, factories."""

from __future__ import annotations

from typing import Any

from solver_shard.program import Ref
from solver_shard.tracing.clean import dims as D
from solver_shard.tracing.clean.draft import Context, DraftValue, Result
from solver_shard.tracing.joint_graph import RawNode, Use


def same(ctx: Context, node: RawNode) -> Result:
    """detach, alias, clone, lift_fresh_copy: the operand itself."""
    return _seen(ctx.first(node), node, ctx.first(node).dims)


def view(ctx: Context, node: RawNode) -> Result:
    """view, reshape, squeeze, unsqueeze, flatten, ...: whatever gives the result's sizes."""
    value, (shape, dtype) = ctx.first(node), ctx.result(node)
    dims = D.reshape(value.dims, shape)
    if dims is not None:
        return _seen(value, node, dims)
    whole = ctx.draft.plain(value)
    made = ctx.draft.emit("aten.view.default", (whole,), {"self": Ref(0), "size": shape}, [(shape, dtype)], raws=value.raws, view=True)
    return ctx.draft.whole(made[0])


def permute(ctx: Context, node: RawNode) -> Result:
    """t, transpose, permute, movedim: another order of dims."""
    value, a = ctx.first(node), node.arguments
    rank = len(value.dims)
    order = list(range(rank))
    if "dims" in a:
        order = [d % rank for d in a["dims"]]
    elif "dim0" in a:
        i, j = a["dim0"] % max(rank, 1), a["dim1"] % max(rank, 1)
        if rank:
            order[i], order[j] = order[j], order[i]
    else:
        order.reverse()
    return _seen(value, node, D.permute(value.dims, order))


def expand(ctx: Context, node: RawNode) -> Result:
    value = ctx.first(node)
    return _seen(value, node, D.expand(value.dims, ctx.result(node)[0]))


def repeat(ctx: Context, node: RawNode) -> Result:
    value = ctx.first(node)
    return _seen(value, node, D.repeat(value.dims, node.arguments["repeats"]))


def to_copy(ctx: Context, node: RawNode) -> Result:
    """Only a change of dtype is a copy to us."""
    value, (_, dtype) = ctx.first(node), ctx.result(node)
    if ctx.draft.dtype(value) == dtype:
        return same(ctx, node)
    shape = ctx.draft.base_shape(value)
    made = ctx.draft.emit("aten._to_copy.default", (value.base,), {"self": Ref(0), "dtype": dtype}, [(shape, dtype)], raws=value.raws)
    return DraftValue(made[0], value.dims)


def copy(ctx: Context, node: RawNode) -> Result:
    """copy(self, src): src in the shape and dtype of self."""
    return _expanded(ctx, node, ctx.value(node.arguments["src"]))


def _expanded(ctx: Context, node: RawNode, source: DraftValue) -> Result:
    shape, dtype = ctx.result(node)
    source = _seen(source, node, D.expand(source.dims, shape))
    if ctx.draft.dtype(source) == dtype:
        return source
    made = ctx.draft.emit(
        "aten._to_copy.default", (source.base,), {"self": Ref(0), "dtype": dtype}, [(ctx.draft.base_shape(source), dtype)], raws=source.raws
    )
    return DraftValue(made[0], source.dims)


_FILL = {"ones": 1, "zeros": 0, "empty": 0, "new": 0}


def factory(ctx: Context, node: RawNode) -> Result:
    """ones, zeros_like, new_full, scalar_tensor, empty, ...: one aten.full of the result's shape."""
    shape, dtype = ctx.result(node)
    arguments = node.arguments
    fill: Any = None
    for name in ("fill_value", "value", "s"):
        if name in arguments:
            fill = arguments[name]
            break
    if isinstance(fill, Use):
        return _expanded(ctx, node, ctx.value(fill))
    if fill is None:
        kind = node.op.split(".")[1].removeprefix("new_")
        fill = _FILL[kind.split("_")[0]]
    made = ctx.draft.emit("aten.full.default", (), {"size": shape, "fill_value": number(fill, dtype), "dtype": dtype}, [(shape, dtype)])
    return ctx.draft.whole(made[0])


def arange(ctx: Context, node: RawNode) -> Result:
    (shape, dtype), a = ctx.result(node), node.arguments
    attributes = {"start": a.get("start", 0), "end": a["end"], "step": a.get("step", 1), "dtype": dtype}
    return ctx.draft.whole(ctx.draft.emit("aten.arange.start_step", (), attributes, [(shape, dtype)])[0])


def select(ctx: Context, node: RawNode) -> Result:
    """select is a slice of length one whose dim goes."""
    value = ctx.first(node)
    d = node.arguments["dim"] % len(value.dims)
    index = node.arguments["index"] % value.shape[d]
    piece = slice_dim(ctx, value, d, index, index + 1, 1)
    return DraftValue(piece.base, piece.dims[:d] + piece.dims[d + 1 :], piece.raws)


def slice_(ctx: Context, node: RawNode) -> Result:
    value, a = ctx.first(node), node.arguments
    d = a["dim"] % len(value.dims)
    start, stop, step = slice(a["start"], a["end"], a["step"]).indices(value.shape[d])
    if (start, step) == (0, 1) and stop >= value.shape[d]:
        return same(ctx, node)
    return slice_dim(ctx, value, d, start, max(stop, start), step)


def slice_dim(ctx: Context, value: DraftValue, d: int, start: int, end: int, step: int) -> DraftValue:
    """Slice one raw dim, the others as they lie in the base."""
    value = ctx.draft.make_whole(value, d)
    at = value.dims[d][0][0]
    length = len(range(start, end, step))
    shape = list(ctx.draft.base_shape(value))
    shape[at] = length
    attributes = {"self": Ref(0), "dim": at, "start": start, "end": end, "step": step}
    made = ctx.draft.emit("aten.slice.Tensor", (value.base,), attributes, [(tuple(shape), ctx.draft.dtype(value))], raws=value.raws)
    return DraftValue(made[0], (*value.dims[:d], ((at, 1, length),), *value.dims[d + 1 :]))


def slice_backward(ctx: Context, node: RawNode) -> Result:
    """slice_backward and select_backward: the gradient placed in zeros."""
    value, a, (shape, dtype) = ctx.value(node.arguments["grad_output"]), node.arguments, ctx.result(node)
    d = a["dim"] % len(shape)
    if "index" in a:
        index = a["index"] % shape[d]
        value = DraftValue(value.base, (*value.dims[:d], (), *value.dims[d:]), value.raws)
        start, stop, step = index, index + 1, 1
    else:
        start, stop, step = slice(a["start"], a["end"], a["step"]).indices(shape[d])
    value = ctx.draft.make_whole(value, d)
    at = value.dims[d][0][0]
    sizes = list(ctx.draft.base_shape(value))
    sizes[at] = shape[d]
    attributes = {"grad_output": Ref(0), "input_sizes": tuple(sizes), "dim": at, "start": start, "end": max(stop, start), "step": step}
    made = ctx.draft.emit("aten.slice_backward.default", (value.base,), attributes, [(tuple(sizes), dtype)], raws=value.raws)
    return DraftValue(made[0], (*value.dims[:d], ((at, 1, shape[d]),), *value.dims[d + 1 :]))


def number(value: Any, dtype: str) -> bool | int | float | complex:
    """A fill value as the dtype holds it, so that equal fills compare equal."""
    if dtype == "bool":
        return bool(value)
    if dtype[0] in "iu":
        return int(value)
    return complex(value) if dtype[0] == "c" else float(value)


def _seen(value: DraftValue, node: RawNode, dims: D.Dims) -> DraftValue:
    return DraftValue(value.base, dims, (*value.raws, node.name))


VIEWS = {
    "detach": same, "alias": same, "clone": same, "lift_fresh_copy": same, "lift": same, "contiguous": same,
    "view": view, "_unsafe_view": view, "reshape": view, "_reshape_alias": view, "squeeze": view, "unsqueeze": view,
    "flatten": view, "unflatten": view, "view_copy": view,
    "t": permute, "transpose": permute, "permute": permute, "numpy_T": permute,
    "expand": expand, "repeat": repeat, "_to_copy": to_copy, "copy": copy,
    "ones": factory, "zeros": factory, "full": factory, "empty": factory, "scalar_tensor": factory,
    "ones_like": factory, "zeros_like": factory, "full_like": factory, "empty_like": factory,
    "new_ones": factory, "new_zeros": factory, "new_full": factory, "new_empty": factory,
    "empty_strided": factory, "new_empty_strided": factory, "fill": factory, "arange": arange,
    "select": select, "slice": slice_, "slice_backward": slice_backward, "select_backward": slice_backward,
}  # fmt: skip
