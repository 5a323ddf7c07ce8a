"""Cleaning of row-wise ops (pointwise, reductions, softmax, norms, embeddings, losses, concatenation), and of views and factories.

Row-wise ops run on operands whose batch and sequence dims are apart; their result is a lazy view in the raw shape. Views, copies that copy
nothing and factories move no data or make it from nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from solver_shard.program import Ref
from solver_shard.tracing.clean import dims as D
from solver_shard.tracing.clean.draft import Context, DraftValue, ProgramDraft, Result, align, refer, uses_of
from solver_shard.tracing.joint_graph import RawNode, Use


def pointwise(ctx: Context, node: RawNode) -> Result:
    """Any op whose results take each element from its own place, dropout included."""
    shape, _ = ctx.result(node)
    dropped = _neutral(ctx, node, shape)
    if dropped is not None:
        return dropped
    found = uses_of(node)
    values = [ctx.value(use) for use in found]
    if not values or any(r is None or r[0] != shape for r in node.results):
        return ctx.generic(node)
    common = align(ctx.draft, values, shape, expanded=node.random)
    if node.random and not _straight(common.dims):
        return ctx.generic(node)  # draws go by an element's place, which is that in the model's own order of dims
    tensor_of = dict(zip(found, common.tensors, strict=True))
    operands: list[int] = []
    attributes = refer(node.arguments, tensor_of.__getitem__, operands)
    results = [(common.shape, r[1]) for r in node.results if r is not None]
    made = ctx.draft.emit(node.op, operands, attributes, results, raws=_raws(values), random=node.random)
    return tuple(DraftValue(t, common.dims) for t in made)


def physical(ctx: Context, node: RawNode) -> Result:
    """torch only notes that a tensor is to be read conjugated, or negated; a program has the tensor that is read, which can be sent."""
    return pointwise(ctx, replace(node, op={"_conj": "aten._conj_physical.default"}.get(node.op.split(".")[1], "aten.neg.default")))


def _straight(dims: D.Dims) -> bool:
    """Whether elements lie in the order in which the raw op sees them."""
    places = [D.place(atom) for group in dims for atom in group if atom[2] != 1]
    return places == sorted(places)


_NEUTRAL: dict[str, tuple[str, float]] = {
    "add.Tensor": ("other", 0), "add.Scalar": ("other", 0), "sub.Tensor": ("other", 0), "mul.Tensor": ("other", 1),
    "mul.Scalar": ("other", 1), "div.Tensor": ("other", 1), "div.Scalar": ("other", 1), "pow.Tensor_Scalar": ("exponent", 1),
}  # fmt: skip


def _neutral(ctx: Context, node: RawNode, shape: tuple[int, ...]) -> DraftValue | None:
    """x + 0, x * 1, x ** 1: nothing to do."""
    argument, neutral = _NEUTRAL.get(node.op.removeprefix("aten."), ("", 0))
    other = node.arguments.get(argument)
    if other is None or isinstance(other, Use | bool) or other != neutral:
        return None
    value = ctx.first(node)
    if value.shape != shape or ctx.draft.dtype(value) != ctx.result(node)[1]:
        return None
    return DraftValue(value.base, value.dims, (*value.raws, node.name))


def reduction(ctx: Context, node: RawNode) -> Result:
    """sum, mean, amax, ... over any dims: over the base's dims, so that a merged dim is reduced as several."""
    value, a = ctx.first(node), dict(node.arguments)
    rank, draft = len(value.dims), ctx.draft
    listed = a.get("dim")
    over = {d % rank for d in ((listed,) if isinstance(listed, int) else listed)} if listed not in (None, ()) and rank else set(range(rank))
    if not over:
        return pointwise(ctx, node) if node.op in _FULL else ctx.generic(node)
    if any(atom[0] == D.BROADCAST for d in over for atom in value.dims[d]):
        value = draft.settle(value, [d for d in over if any(atom[0] == D.BROADCAST for atom in value.dims[d])])
    base = draft.base_shape(value)
    gone = {atom[0] for d in over for atom in value.dims[d]}
    if any(atom[0] in gone for d, group in enumerate(value.dims) if d not in over for atom in group) or any(
        atom[2] != base[atom[0]] for d in over for atom in value.dims[d]
    ):
        value = draft.settle(value)
        base = draft.base_shape(value)
        gone = {atom[0] for d in over for atom in value.dims[d]}
    if not gone:
        value = draft.settle(value, over)
        base = draft.base_shape(value)
        gone = {atom[0] for d in over for atom in value.dims[d]}
    keep = _keep(ctx, node, value.shape, over, bool(a.get("keepdim", False)))
    name, listed_name = _FULL.get(node.op, (node.op, "dim"))
    dims_now = tuple(sorted(gone))
    attributes: dict[str, Any] = {"self": Ref(0), listed_name: dims_now, "keepdim": keep}
    attributes |= {k: v for k, v in a.items() if k not in ("self", "dim", "keepdim")}
    attributes.setdefault("dtype", None) if name in ("aten.sum.dim_IntList", "aten.mean.dim") else None
    shape = tuple(1 if d in gone else n for d, n in enumerate(base)) if keep else tuple(n for d, n in enumerate(base) if d not in gone)
    new = {d: d if keep else i for i, d in enumerate(d for d in range(len(base)) if keep or d not in gone)}
    made = draft.emit(name, (value.base,), attributes, [(shape, ctx.result(node)[1])], raws=value.raws)
    groups: list[D.Group] = []
    for d, group in enumerate(value.dims):
        if d not in over:
            groups.append(tuple(atom if atom[0] == D.BROADCAST else (new[atom[0]], atom[1], atom[2]) for atom in group))
        elif keep and a.get("keepdim", False):
            groups.append(tuple((new[atom[0]], 1, 1) for atom in group))
        elif a.get("keepdim", False):
            groups.append(())
    return DraftValue(made[0], tuple(groups))


def _keep(ctx: Context, node: RawNode, shape: tuple[int, ...], over: set[int], keep: bool) -> bool:
    """Whether to keep the reduced dims: as asked, or as all readers view the result at once."""
    readers = ctx.readers.get(node.name, ())
    other = tuple(n for d, n in enumerate(shape) if d not in over) if keep else tuple(1 if d in over else n for d, n in enumerate(shape))
    viewed = all(
        r.op.split(".")[1] in ("view", "squeeze", "unsqueeze", "reshape") and r.results == ((other, r.results[0][1]),)
        for r in readers
        if r.results[0]
    )
    return keep != (bool(readers) and viewed)


_FULL = {"aten.sum.default": ("aten.sum.dim_IntList", "dim"), "aten.mean.default": ("aten.mean.dim", "dim")}


def along(ctx: Context, node: RawNode) -> Result:
    """softmax, cumsum, split, sort, topk, flip, ...: one operand, some dims whole, the rest untouched."""
    value, a = ctx.first(node), node.arguments
    listed: Any = a.get("dim", a.get("dims"))
    rank = len(value.dims)
    if not rank or any(isinstance(item, Use) for name, item in a.items() if name != "self"):
        return ctx.generic(node)
    where = [d % rank for d in ((listed,) if isinstance(listed, int) else listed)]
    value = ctx.draft.make_whole(ctx.draft.real(value), *where)
    at = {d: value.dims[d][0][0] for d in where}
    base = ctx.draft.base_shape(value)
    moved = at[where[0]] if isinstance(listed, int) else tuple(at[d] for d in where)
    attributes = {k: Ref(0) if isinstance(v, Use) else v for k, v in a.items()}
    attributes["dim" if "dim" in a else "dims"] = moved
    results, dims = [], []
    for found in node.results:
        assert found is not None
        shape, groups = list(base), list(value.dims)
        for d in where:
            shape[at[d]] = found[0][d]
            groups[d] = ((at[d], 1, found[0][d]),)
        results.append((tuple(shape), found[1]))
        dims.append(tuple(groups))
    made = ctx.draft.emit(node.op, (value.base,), attributes, results, raws=value.raws, random=node.random)
    return tuple(DraftValue(t, d) for t, d in zip(made, dims, strict=True))


def softmax_backward(ctx: Context, node: RawNode) -> Result:
    """_softmax_backward_data and _log_softmax_backward_data: gradient and output in one form."""
    a, (shape, dtype) = node.arguments, ctx.result(node)
    if not shape:
        return ctx.generic(node)
    d = a["dim"] % len(shape)
    values = [ctx.value(a["grad_output"]), ctx.value(a["output"])]
    common = align(ctx.draft, values, shape, whole={d}, expanded=True)
    attributes = {"grad_output": Ref(0), "output": Ref(1), "dim": common.position[d], "input_dtype": a["input_dtype"]}
    made = ctx.draft.emit(node.op, common.tensors, attributes, [(common.shape, dtype)], raws=_raws(values))
    return DraftValue(made[0], common.dims)


def concatenate(ctx: Context, node: RawNode) -> Result:
    """cat: all dims but the joined one may be apart."""
    (shape, dtype), draft = ctx.result(node), ctx.draft
    values = [ctx.value(use) for use in node.arguments["tensors"]]
    values = [v for v in values if v.shape != (0,) or len(shape) == 1]
    d = node.arguments["dim"] % len(shape)
    if len(values) == 1:
        return DraftValue(values[0].base, values[0].dims, (*values[0].raws, node.name))
    common = align(draft, values, shape, whole={d}, expanded=True)
    at = common.position[d]
    operands: list[int] = []
    for tensor in common.tensors:
        if tensor not in operands:
            operands.append(tensor)
    attributes = {"tensors": tuple(Ref(operands.index(t)) for t in common.tensors), "dim": at}
    made = draft.emit("aten.cat.default", operands, attributes, [(common.shape, dtype)], raws=_raws(values))
    return DraftValue(made[0], common.dims)


def pick(ctx: Context, node: RawNode) -> Result:
    """gather and scatter along the last dim: rows apart as those of the index are."""
    (shape, dtype), a, draft = ctx.result(node), node.arguments, ctx.draft
    last, index = len(shape) - 1, ctx.value(a["index"])
    found = uses_of(node)
    values = [ctx.value(use) for use in found]
    if not shape or a["dim"] % len(shape) != last or any(v.shape[:last] != shape[:last] for v in values):
        return ctx.generic(node)
    rows = [tuple(atom[2] for atom in D.solid(group)) or (1,) for group in index.dims[:last]]
    sizes = [n for group in rows for n in group]
    forms = [D.reshape(v.dims, (*sizes, v.shape[last])) for v in values]
    if any(form is None for form in forms):
        return ctx.generic(node)
    tensor_of = {use: _filled(draft, v, form) for use, v, form in zip(found, values, forms, strict=True) if form is not None}
    operands: list[int] = []
    attributes = refer(node.arguments, tensor_of.__getitem__, operands) | {"dim": len(sizes)}
    made = draft.emit(node.op, operands, attributes, [((*sizes, shape[last]), dtype)], raws=_raws(values))
    places = iter(range(len(sizes)))
    groups = [tuple((next(places), 1, n) for n in group) for group in rows]
    return DraftValue(made[0], (*groups, ((len(sizes), 1, shape[last]),)))


def _filled(draft: ProgramDraft, value: DraftValue, form: D.Dims) -> int:
    """The tensor in this form; a new one where it is filled with one number."""
    maker = next((op for op in reversed(draft.ops) if value.base in op.results), None)
    if maker is None or maker.name != "aten.full.default":
        return draft.form(value, form)
    shape = D.shape(form)
    return draft.emit("aten.full.default", (), maker.attributes | {"size": shape}, [(shape, draft.dtype(value))])[0]


def masked(ctx: Context, node: RawNode) -> Result:
    """masked_scatter and its gradient: the mask without the dims at its end that it is only expanded to, along which elements are whole."""
    draft, use = ctx.draft, node.arguments["mask"]
    mask = ctx.value(use)
    dims = list(mask.dims)
    for d in reversed(range(len(dims))):
        if not dims[d] or any(atom[0] != D.BROADCAST for atom in dims[d]):
            break
        dims[d] = ()
    operands: list[int] = []
    narrow = DraftValue(mask.base, tuple(dims), mask.raws)
    attributes = refer(node.arguments, lambda u: draft.plain(narrow if u == use else ctx.value(u)), operands)
    return ctx.write(node, node.op, operands, attributes)


def attention(ctx: Context, node: RawNode) -> Result:
    """A mask of zeros, which T5 adds where positions have no bias, is none: it would be kept whole for the backward pass."""
    mask = node.arguments.get("attn_mask")
    if isinstance(mask, Use) and _filled_with(ctx, ctx.value(mask)) == 0:
        return ctx.generic(replace(node, arguments=node.arguments | {"attn_mask": None}))
    return ctx.generic(node)


def _filled_with(ctx: Context, value: DraftValue) -> Any:
    """The number of which a tensor is full; None where it is not known to be."""
    maker = next((op for op in reversed(ctx.draft.ops) if value.base in op.results), None)
    return None if maker is None or maker.name != "aten.full.default" else maker.attributes["fill_value"]


def layer_norm(ctx: Context, node: RawNode) -> Result:
    """native_layer_norm: rows apart, normalised dims last."""
    a, (shape, dtype) = node.arguments, ctx.result(node)
    tail = len(a["normalized_shape"])
    whole = range(len(shape) - tail, len(shape))
    common = align(ctx.draft, [ctx.value(a["input"])], shape, whole=whole, expanded=True, ordered=True)
    operands = list(common.tensors)
    attributes = dict(a) | {"input": Ref(0)}
    for name in ("weight", "bias"):
        if isinstance(a[name], Use):
            attributes[name] = Ref(len(operands))
            operands.append(ctx.draft.plain(ctx.value(a[name])))
    rows = common.shape[: len(common.shape) - tail]
    stats = (*rows, *(1,) * tail)
    second, third = ctx.result(node, 1)[1], ctx.result(node, 2)[1]
    made = ctx.draft.emit(
        node.op, operands, attributes, [(common.shape, dtype), (stats, second), (stats, third)], raws=ctx.value(a["input"]).raws
    )
    small = common.dims[: len(shape) - tail] + tuple(((len(rows) + i, 1, 1),) for i in range(tail))
    return DraftValue(made[0], common.dims), DraftValue(made[1], small), DraftValue(made[2], small)


def layer_norm_backward(ctx: Context, node: RawNode) -> Result:
    a, shape = node.arguments, ctx.value(node.arguments["input"]).shape
    tail = len(a["normalized_shape"])
    names = ("grad_out", "input", "mean", "rstd")
    values = [ctx.value(a[name]) for name in names]
    common = align(ctx.draft, values, shape, whole=range(len(shape) - tail, len(shape)), expanded=True, ordered=True)
    attributes, operands = dict(a), list(common.tensors)
    attributes |= {name: Ref(i) for i, name in enumerate(names)}
    for name in ("weight", "bias"):
        if isinstance(a[name], Use):
            attributes[name] = Ref(len(operands))
            operands.append(ctx.draft.plain(ctx.value(a[name])))
    results = [(common.shape if i == 0 else r[0], r[1]) for i, r in enumerate(node.results) if r is not None]
    made = iter(ctx.draft.emit(node.op, operands, attributes, results, raws=_raws(values)))
    found: list[DraftValue | None] = []
    for i, r in enumerate(node.results):
        found.append(None if r is None else DraftValue(next(made), common.dims if i == 0 else D.identity(r[0])))
    return tuple(found)


def embedding(ctx: Context, node: RawNode) -> Result:
    """embedding: one row of the table per index, indices as they lie."""
    a, draft = node.arguments, ctx.draft
    table, indices = draft.plain(ctx.value(a["weight"])), ctx.value(a["indices"])
    base, width = draft.base_shape(indices), draft.tensors[table].shape[1]
    attributes = dict(a) | {"weight": Ref(0), "indices": Ref(1)}
    shape = (*base, width)
    made = draft.emit(node.op, (table, indices.base), attributes, [(shape, ctx.result(node)[1])], raws=indices.raws)
    return DraftValue(made[0], (*indices.dims, ((len(base), 1, width),)))


def embedding_backward(ctx: Context, node: RawNode) -> Result:
    a = node.arguments
    grad, indices = ctx.value(a["grad_output"]), ctx.value(a["indices"])
    common = align(ctx.draft, [grad, indices], grad.shape, whole={len(grad.dims) - 1}, expanded=True, ordered=True, tails=(0, 1))
    attributes = dict(a) | {"grad_output": Ref(0), "indices": Ref(1)}
    made = ctx.draft.emit(node.op, common.tensors, attributes, [ctx.result(node)], raws=(*grad.raws, *indices.raws))
    return ctx.draft.whole(made[0])


_REDUCTIONS = ("none", "mean", "sum")


def nll_forward(ctx: Context, node: RawNode) -> Result:
    """nll_loss_forward, nll_loss2d_forward: sums over all rows, then for a mean one division, so that rows may be cut."""
    a, draft = node.arguments, ctx.draft
    scores, target = _classes_last(ctx.value(a["self"])), ctx.value(a["target"])
    kind = _REDUCTIONS[a["reduction"]]
    if kind == "none" or len(scores.dims) < 2:
        return ctx.generic(node)
    last = len(scores.dims) - 1
    common = align(draft, [scores, target], scores.shape, whole={last}, expanded=True, ordered=True, tails=(0, 1))
    operands = list(common.tensors)
    attributes: dict[str, Any] = {"self": Ref(0), "target": Ref(1), "weight": None, "ignore_index": a["ignore_index"]}
    if isinstance(a["weight"], Use):
        attributes["weight"] = Ref(2)
        operands.append(draft.plain(ctx.value(a["weight"])))
    dtype = ctx.result(node)[1]
    total, weight = draft.emit(
        "shard.nll_loss_forward", operands, attributes, [((), dtype), ((), dtype)], raws=(*scores.raws, *target.raws)
    )
    if kind == "mean":
        total = draft.emit("aten.div.Tensor", (total, weight), {"self": Ref(0), "other": Ref(1)}, [((), dtype)])[0]
    return draft.whole(total), draft.whole(weight)


def nll_backward(ctx: Context, node: RawNode) -> Result:
    a, draft = node.arguments, ctx.draft
    scores, target = _classes_last(ctx.value(a["self"])), ctx.value(a["target"])
    kind = _REDUCTIONS[a["reduction"]]
    if kind == "none" or len(scores.dims) < 2:
        return ctx.generic(node)
    last = len(scores.dims) - 1
    common = align(draft, [scores, target], scores.shape, whole={last}, expanded=True, ordered=True, tails=(0, 1))
    operands = [draft.plain(ctx.value(a["grad_output"])), *common.tensors]
    attributes: dict[str, Any] = {"grad_output": Ref(0), "self": Ref(1), "target": Ref(2), "weight": None}
    attributes["ignore_index"] = a["ignore_index"]
    if isinstance(a["weight"], Use):
        attributes["weight"] = Ref(len(operands))
        operands.append(draft.plain(ctx.value(a["weight"])))
    attributes["total_weight"] = Ref(len(operands))
    operands.append(draft.plain(ctx.value(a["total_weight"])))
    attributes["reduction"] = kind
    made = draft.emit(
        "shard.nll_loss_backward", operands, attributes, [(common.shape, ctx.result(node)[1])], raws=(*scores.raws, *target.raws)
    )
    return DraftValue(made[0], D.permute(common.dims, (0, last, *range(1, last))))


def loss(ctx: Context, node: RawNode) -> Result:
    """mse_loss, huber_loss, ...: a sum over all elements, then for a mean one division, so that any dim may be cut, also unevenly."""
    a, draft = node.arguments, ctx.draft
    shape, (_, dtype), kind = ctx.value(a["self"]).shape, ctx.result(node), _REDUCTIONS[a["reduction"]]
    if kind == "none":
        return pointwise(ctx, node) if ctx.result(node)[0] == shape else ctx.generic(node)
    found = uses_of(node)
    values = [ctx.value(use) for use in found]
    if not shape or any(len(v.shape) > len(shape) for v in values) or ctx.value(a["target"]).shape != shape:
        return ctx.generic(node)
    common = align(draft, values, shape)
    operands: list[int] = []
    attributes = refer(node.arguments, dict(zip(found, common.tensors, strict=True)).__getitem__, operands)
    (total,) = draft.emit(node.op, operands, attributes | {"reduction": _REDUCTIONS.index("sum")}, [((), dtype)], raws=_raws(values))
    return draft.whole(_over(draft, total, dtype, math.prod(shape)) if kind == "mean" else total)


def loss_backward(ctx: Context, node: RawNode) -> Result:
    """The gradient of a mean is that of the sum by the gradient over the number of elements.

    In f16 it is left as it is: a gradient over many elements would be too small a number.
    """
    a, draft, (shape, dtype) = node.arguments, ctx.draft, ctx.result(node)
    kind, gradient = _REDUCTIONS[a["reduction"]], a["grad_output"]
    if kind == "none":
        return pointwise(ctx, node)
    found = [use for use in dict.fromkeys(uses_of(node)) if use != gradient]
    values = [ctx.value(use) for use in found]
    if not shape or dtype == "f16" or any(v.shape != shape for v in values) or ctx.value(gradient).shape:
        return ctx.generic(node)
    given = draft.plain(ctx.value(gradient))
    given = _over(draft, given, dtype, math.prod(shape)) if kind == "mean" else given
    common = align(draft, values, shape)
    tensor_of = dict(zip(found, common.tensors, strict=True)) | {gradient: given}
    operands: list[int] = []
    attributes = refer(node.arguments, tensor_of.__getitem__, operands) | {"reduction": _REDUCTIONS.index("sum")}
    made = draft.emit(node.op, operands, attributes, [(common.shape, dtype)], raws=_raws(values))
    return DraftValue(made[0], common.dims)


def _over(draft: ProgramDraft, number: int, dtype: str, count: int) -> int:
    return draft.emit("aten.div.Scalar", (number,), {"self": Ref(0), "other": count}, [((), dtype)])[0]


def _classes_last(scores: DraftValue) -> DraftValue:
    """Classes are dim 1 of what torch's loss reads, whether images follow or not."""
    order = (0, *range(2, len(scores.dims)), 1)
    return DraftValue(scores.base, D.permute(scores.dims, order), scores.raws) if len(scores.dims) > 2 else scores


def _raws(values: list[DraftValue]) -> list[str]:
    return [raw for value in values for raw in value.raws]


_LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")

ROWS = {
    "sum": reduction, "mean": reduction, "amax": reduction, "amin": reduction, "logsumexp": reduction,
    "_softmax": along, "_log_softmax": along, "_safe_softmax": along, "cumsum": along, "flip": along,
    "split": along, "split_with_sizes": along, "sort": along, "topk": along,
    "_softmax_backward_data": softmax_backward, "_log_softmax_backward_data": softmax_backward, "cat": concatenate,
    "gather": pick, "scatter": pick, "native_layer_norm": layer_norm, "native_layer_norm_backward": layer_norm_backward,
    "embedding": embedding, "embedding_dense_backward": embedding_backward,
    "nll_loss_forward": nll_forward, "nll_loss_backward": nll_backward,
    "nll_loss2d_forward": nll_forward, "nll_loss2d_backward": nll_backward,
    **dict.fromkeys(("binary_cross_entropy_with_logits", *_LOSSES), loss),
    **{f"{name}_backward": loss_backward for name in _LOSSES},
    "masked_scatter": masked, "masked_scatter_backward": masked,
    "_scaled_dot_product_flash_attention_for_cpu": attention, "_scaled_dot_product_flash_attention_for_cpu_backward": attention,
    "_conj": physical, "_neg_view": physical,
    "native_dropout": pointwise, "native_dropout_backward": pointwise,
}  # fmt: skip


# Views, copies that copy nothing, factories.


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
