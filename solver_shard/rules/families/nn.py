"""Families of neural-network ops: norms, losses, convolution, pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from solver_shard.errors import RuleError
from solver_shard.layout import P, R
from solver_shard.rules.draft import DimFactors, OpCall, RuleDraft
from solver_shard.rules.families.pointwise import apply_linear, broadcast
from solver_shard.rules.row import LINEAR, Exclusion, Family, is_text
from solver_shard.rules.rule import InnerCollective


def layer_norm(call: OpCall) -> RuleDraft:
    """Rows can be cut; statistics are ``[*rows, 1, ...]``.

    ``norm-statistics`` cuts the normalised dim, where it is one: sums and sums of squares per row are all-reduced (the root
    mean square norm needs only the latter).
    """
    draft = RuleDraft(call)
    rows, normal = _norm_dims(draft, "input", reduction=None)
    draft.put("input", [*rows, *normal])
    draft.put("weight", normal)
    draft.put("bias", normal)
    draft.result(0, [*rows, *normal])
    for index in range(1, len(call.results)):
        draft.result(index, [*rows, *(() for _ in normal)])
    draft.linear([name for name in ("weight", "bias") if call.slot(name) is not None], ("sum", "avg"), fixed=range(1, len(call.results)))
    if call.slot("bias") is not None:
        draft.monotone("bias", increasing=True, fixed=range(1, len(call.results)))
    draft.flops = 8 * call.tensor("input").numel
    for held in normal:
        draft.implement("norm-statistics", held, _statistics(draft, rows))
    return draft


def layer_norm_backward(call: OpCall) -> RuleDraft:
    """Rows can be cut: the gradients of weight and bias are then partial sums; linear in the incoming gradient.

    ``norm-statistics`` cuts the normalised dim: two sums per row are all-reduced (one for the root mean square norm) where
    the input's gradient is wanted; the gradients of weight and bias are cut along it.
    """
    draft = RuleDraft(call)
    count = len(call.attribute("output_mask", (True,) * 3))
    made = call.present("output_mask", count)
    rows, normal = _norm_dims(draft, "input", reduction="sum")
    for name in ("grad_out", "input"):
        draft.put(name, [*rows, *normal])
    for name in ("mean", "rstd"):
        draft.put(name, [*rows, *(() for _ in normal)])
    draft.put("weight", normal)
    draft.put("bias", normal)
    if "bias" in call.names:
        draft.ignore("bias")
    draft.result(made[0], [*rows, *normal])
    for index in made[1:]:
        draft.result(index, normal)
    draft.linear(("grad_out",), ("sum", "avg"))
    draft.linear(("weight",), ("sum", "avg"), fixed=made[1:])
    draft.flops = 16 * call.tensor("input").numel
    wanted = tuple(bool(m) for m in call.attribute("output_mask", (True,) * count))
    if sum(wanted) == len(call.results):
        for held in normal:
            draft.implement("norm-statistics", held, *([_statistics(draft, rows)] if wanted[0] else []))
    else:
        draft.restrict(tuple(f for held in normal for f in held), cut=False)
    return draft


def _norm_dims(draft: RuleDraft, name: str, *, reduction: str | None) -> tuple[list[DimFactors], list[DimFactors]]:
    """Factors of rows and of normalised dims; the latter can be cut where they are one."""
    shape = draft.call.shape(name)
    split = len(shape) - len(draft.call.attributes["normalized_shape"])
    rows = [draft.factor(f"row{d}", size, reduction=reduction) for d, size in enumerate(shape[:split])]
    return rows, [draft.factor(f"norm{d}", size, cut=len(shape) - split == 1) for d, size in enumerate(shape[split:])]


def _statistics(draft: RuleDraft, rows: list[DimFactors]) -> InnerCollective:
    return draft.all_reduce(rows, 1 if "rms_norm" in draft.call.name else 2, draft.call.tensor("input").dtype)


def batch_norm(call: OpCall) -> RuleDraft:
    """Channels (dim 1) can be cut; batch and space as well where known statistics are used, which otherwise run over them.

    In training, ``batch-statistics`` cuts the batch: sum, sum of squares and count of every channel are all-reduced.
    """
    draft = RuleDraft(call)
    known = "no_training" in call.name or not call.attribute("training", True)
    channels, dims = _channels(draft, "input", cut=known)
    draft.put("input", dims)
    draft.result(0, dims)
    _per_channel(draft, channels)
    others = range(1, len(call.results))
    affine = [name for name in ("weight", "bias") if call.slot(name) is not None]
    draft.linear(affine, ("sum", "avg"), fixed=others)
    if known:
        draft.linear(["input", "running_mean", *affine[1:]], ("sum", "avg"), fixed=others)
    if call.slot("bias") is not None:
        draft.monotone("bias", increasing=True, fixed=others)
    draft.flops = 8 * call.tensor("input").numel
    if not known:
        draft.restrict(dims[0], cut=True)
        draft.implement("batch-statistics", dims[0], draft.all_reduce([channels], 3, call.tensor("input").dtype))
    return draft


def batch_norm_backward(call: OpCall) -> RuleDraft:
    """As ``batch_norm``, where cut batch and space make the gradients of the parameters sums; linear in the incoming gradient.

    ``batch-statistics`` all-reduces two sums per channel: the gradients of weight and bias, which every device then has.
    """
    draft = RuleDraft(call)
    made = call.present("output_mask", 3)
    channels, dims = _channels(draft, "input", cut=not call.attribute("train", False))
    draft.restrict(tuple(f for d, held in enumerate(dims) if d != 1 for f in held), reduction="sum")
    draft.put("grad_out", dims)
    draft.put("input", dims)
    draft.result(made[0], dims)
    _per_channel(draft, channels)
    draft.linear(("grad_out",), ("sum", "avg"))
    draft.linear(("weight",), ("sum", "avg"), fixed=made[1:])
    if not call.attribute("train", False) and call.slot("running_mean") is not None:
        draft.linear(("input", "running_mean"), ("sum", "avg"), fixed=(made[0], made[2]))
        draft.linear(("input", "running_mean", "weight"), ("sum", "avg"), fixed=(made[2],))
    for name in ("running_mean", "running_var") if call.attribute("train", False) else ("save_mean", "save_invstd"):
        if name in call.names:
            draft.ignore(name)
    draft.flops = 16 * call.tensor("input").numel
    if call.attribute("train", False) and len(call.results) == sum(map(bool, call.attribute("output_mask", (True,) * 3))):
        draft.restrict(dims[0], cut=True)
        draft.implement("batch-statistics", dims[0], draft.all_reduce([channels], 2, call.tensor("input").dtype))
    return draft


def _channels(draft: RuleDraft, name: str, *, cut: bool) -> tuple[DimFactors, list[DimFactors]]:
    """The channels, and all dims: the others are ``cut`` or whole."""
    shape = draft.call.shape(name)
    dims = [draft.factor("channels" if d == 1 else f"dim{d}", size, filled=True, cut=cut or d == 1) for d, size in enumerate(shape)]
    return dims[1], dims


def _per_channel(draft: RuleDraft, channels: DimFactors) -> None:
    """Vectors over channels: affine parameters and statistics; empty ones are alike on every device."""
    for name in ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd"):
        if draft.call.slot(name) is not None and draft.call.shape(name) != (0,):
            draft.put(name, [channels])
    for index, result in enumerate(draft.call.results):
        if len(result.shape) == 1 and draft.results[index] is None:
            if result.shape == (0,):
                draft.alike.append(index)
            else:
                draft.result(index, [channels])


def group_norm(call: OpCall) -> RuleDraft:
    """``input[n, c, *space]``, statistics ``[n, groups]``; affine in weight and bias."""
    draft = RuleDraft(call)
    batch, groups, channels, dims = _groups(draft)
    draft.put("input", dims)
    for name in ("weight", "bias"):
        draft.put(name, [channels])
    draft.result(0, dims)
    for index in (1, 2):
        draft.result(index, [batch, groups])
    affine = [name for name in ("weight", "bias") if call.slot(name) is not None]
    draft.linear(affine, ("sum", "avg"), fixed=(1, 2))
    if call.slot("bias") is not None:
        draft.monotone("bias", increasing=True, fixed=(1, 2))
    draft.flops = 8 * call.tensor("input").numel
    return draft


def group_norm_backward(call: OpCall) -> RuleDraft:
    """As ``group_norm``; cutting the batch sums the gradients of weight and bias; linear in the incoming gradient."""
    draft = RuleDraft(call)
    made = call.present("output_mask", 3)
    batch, groups, channels, dims = _groups(draft)
    draft.restrict(batch, reduction="sum")
    for name in ("grad_out", "input"):
        draft.put(name, dims)
    for name in ("mean", "rstd"):
        draft.put(name, [batch, groups])
    draft.put("weight", [channels])
    draft.result(made[0], dims)
    for index in made[1:]:
        draft.result(index, [channels])
    draft.linear(("grad_out",), ("sum", "avg"))
    if call.slot("weight") is not None:
        draft.linear(("weight",), ("sum", "avg"), fixed=made[1:])
    draft.flops = 16 * call.tensor("input").numel
    return draft


def _groups(draft: RuleDraft) -> tuple[DimFactors, DimFactors, DimFactors, Sequence[DimFactors]]:
    """Factors of the batch, the groups, the channels, and of every dim of the input."""
    shape, count = draft.call.shape("input"), int(draft.call.attributes["group"])
    batch, groups = draft.factor("batch", shape[0]), draft.factor("groups", count, even=True)
    channels = (*groups, *draft.factor("inside", shape[1] // count, cut=False))
    return batch, groups, channels, [batch, channels, *draft.whole(shape[2:])]


def loss(call: OpCall, **linear: Any) -> RuleDraft:
    """A loss of every element, or the sum or mean of all: then a cut dim makes it partial."""
    draft = RuleDraft(call)
    kind, shape = _reduction(call), call.shape("self")
    reduction = {"mean": "avg", "sum": "sum"}.get(kind)
    held = [draft.factor(draft.letter(), size, even=kind == "mean", reduction=reduction) for size in shape]
    for slot in range(len(call.slots)):
        draft.put_slot(slot, broadcast(call, call.at(slot).shape, shape, held))
    draft.result(0, held if kind == "none" else ())
    draft.flops = 8 * math.prod(shape)
    return apply_linear(draft, **linear)


def loss_backward(call: OpCall, **linear: Any) -> RuleDraft:
    """Every element by itself; the gradient of a mean depends on how many there are, so that nothing is cut."""
    draft = RuleDraft(call)
    shape = call.results[0].shape
    held = draft.letters(shape, whole=range(len(shape)) if _reduction(call) == "mean" else ())
    for slot in range(len(call.slots)):
        draft.put_slot(slot, broadcast(call, call.at(slot).shape, shape, held))
    draft.result(0, held)
    draft.flops = 8 * math.prod(shape)
    return apply_linear(draft, **linear)


def nll_sums(call: OpCall) -> RuleDraft:
    """Sums over rows of the weighted losses and of the weights: rows can be cut.

    ``own-classes`` cuts the classes: every device adds up the losses of the targets among its own, a pending sum; the weights
    follow from the targets alone, so that every device has all of their sum.
    """
    draft = RuleDraft(call)
    rows, classes = _class_rows(draft, reduction="sum")
    draft.put("self", [*rows, classes])
    draft.put("target", rows)
    draft.put("weight", [classes])
    for index in range(len(call.results)):
        draft.result(index, ())
    draft.linear(("self",), ("sum", "avg"), fixed=(1,))
    if call.slot("weight") is not None:
        draft.linear(("weight",), ("sum", "avg"))
    draft.flops = 2 * call.tensor("target").numel
    draft.restrict(classes, cut=True)
    draft.implement("own-classes", classes, arguments={"weight": R}, results={0: P("sum")}, share="whole")
    return draft


def nll_loss(call: OpCall) -> RuleDraft:
    """The raw loss op: rows can be cut without a reduction and for a sum; a mean needs all rows at once."""
    draft = RuleDraft(call)
    kind = _reduction(call)
    rows, classes = _class_rows(draft, reduction="sum")
    if kind == "mean":
        draft.restrict(tuple(f for held in rows for f in held), cut=False)
    draft.put("self", _scores(call, rows, classes))
    draft.put("target", rows)
    draft.put("weight", [classes])
    draft.result(0, rows if kind == "none" else ())
    if len(call.results) > 1:
        draft.result(1, ())
        if kind == "none":
            draft.alike.append(1)
    draft.linear(("self",), ("sum", "avg"), fixed=(1,))
    if call.slot("weight") is not None and kind != "mean":
        draft.linear(("weight",), ("sum", "avg"))
    draft.flops = 2 * call.tensor("target").numel
    return draft


def nll_loss_backward(call: OpCall) -> RuleDraft:
    """Rows of the result can be cut; the log-probabilities give only the shape.

    ``own-classes`` (of the op that takes a loss apart) cuts the classes: every device fills in the targets among its own.
    """
    draft = RuleDraft(call)
    rows, classes = _class_rows(draft, reduction=None)
    draft.put("self", _scores(call, rows, classes))
    draft.put("target", rows)
    draft.put("weight", [classes])
    if call.slot("grad_output") is not None:
        draft.put("grad_output", rows if call.shape("grad_output") else ())
    draft.put("total_weight", ())
    draft.ignore("self")
    draft.linear([name for name in ("grad_output",) if name in call.names], ("sum", "avg"))
    if call.slot("weight") is not None:
        draft.linear(("weight",), ("sum", "avg"))
    if "total_weight" in call.names and _reduction(call) != "mean":
        draft.ignore("total_weight")
    draft.result(0, _scores(call, rows, classes))
    if call.name.startswith("shard."):
        draft.restrict(classes, cut=True)
        draft.implement("own-classes", classes, arguments={"weight": R}, share="whole")
    return draft


def _class_rows(draft: RuleDraft, *, reduction: str | None) -> tuple[list[DimFactors], DimFactors]:
    shape = draft.call.shape("self")
    at = _classes_at(draft.call)
    rows = [draft.factor(f"row{d}", size, reduction=reduction) for d, size in enumerate((*shape[:at], *shape[at + 1 :]))]
    return rows, draft.factor("classes", shape[at], cut=False)


def _scores(call: OpCall, rows: list[DimFactors], classes: DimFactors) -> list[DimFactors]:
    at = _classes_at(call)
    return [*rows[:at], classes, *rows[at:]]


def _classes_at(call: OpCall) -> int:
    """The dim of the classes: the last one, but dim 1 of torch's losses of images."""
    return 1 if "nll_loss2d" in call.name else len(call.shape("self")) - 1


def _reduction(call: OpCall) -> str:
    value = call.attributes.get("reduction", 1)
    return ("none", "mean", "sum")[value] if isinstance(value, int) else str(value)


def softmax(call: OpCall) -> RuleDraft:
    """Every dim but ``dim`` passes, for softmax and log-softmax alike.

    ``class-statistics`` cuts ``dim``: the maximum and the sum of the exponentials of every row are all-reduced.
    """
    draft, rows, classes = _softmax_dims(call, "self")
    dtype = call.results[0].dtype
    draft.flops = 5 * call.tensor("self").numel
    draft.implement("class-statistics", classes, *(draft.all_reduce(rows, 1, dtype) for _ in range(2)))
    return draft


def softmax_backward(call: OpCall) -> RuleDraft:
    """As ``softmax``, linear in the incoming gradient; ``class-statistics`` all-reduces one sum per row."""
    draft, rows, classes = _softmax_dims(call, "grad_output")
    draft.linear(("grad_output",), ("sum", "avg"))
    draft.flops = 5 * call.tensor("grad_output").numel
    draft.implement("class-statistics", classes, draft.all_reduce(rows, 1, call.tensor("grad_output").dtype))
    return draft


def _softmax_dims(call: OpCall, name: str) -> tuple[RuleDraft, list[DimFactors], DimFactors]:
    """All tensors of one shape; the factors of the rows, and the one along ``dim``."""
    draft = RuleDraft(call)
    shape = call.shape(name)
    held = draft.letters(shape)
    for slot in range(len(call.slots)):
        draft.put_slot(slot, held)
    draft.result(0, held)
    dim = call.dim(call.attributes["dim"], len(shape))
    return draft, [factor for d, factor in enumerate(held) if d != dim], held[dim] if shape else ()


def convolution(call: OpCall) -> RuleDraft:
    """``input[n, c, *space]`` by ``weight[o, c, *kernel]``: batch and output channels can be cut, input channels are summed.

    A bias is added to the pending sum of cut input channels once. Where there are groups, whole groups are cut.
    """
    draft = RuleDraft(call)
    batch, outputs, inputs = _convolution(draft, "input")
    joined = call.slot("bias") is not None
    if _plain(call):
        draft.restrict(inputs, reduction="sum", addends=("bias",))
    draft.put("bias", [outputs])
    if joined:
        draft.monotone("bias", increasing=True)
    draft.result(0, [batch, outputs, *draft.whole(call.results[0].shape[2:])])
    for name in ("input", "weight"):
        draft.linear((name, "bias") if joined else (name,), ("sum", "avg"))
    draft.flops = _convolution_flops(call, call.results[0].shape)
    draft.matmul = True
    return draft


def convolution_backward(call: OpCall) -> RuleDraft:
    """Gradients of input, weight and bias; cutting the batch sums the last two, cutting output channels the first.

    Linear in the incoming gradient; each of the first two also in what the other is the gradient of.
    """
    draft = RuleDraft(call)
    made = call.present("output_mask", 3)
    wanted = tuple(bool(m) for m in call.attribute("output_mask", (True,) * 3))
    batch, outputs, inputs = _convolution(draft, "input")
    draft.restrict(batch, reduction="sum")
    if _plain(call):
        draft.restrict(outputs, reduction="sum")
        draft.restrict(inputs, apart=(made[2],) if wanted[2] else ())
    shape = call.shape("grad_output")
    draft.put("grad_output", [batch, outputs, *draft.whole(shape[2:])])
    for index, argument in ((0, "input"), (1, "weight")):
        slot = call.slot(argument)
        if slot is not None and wanted[index]:
            draft.result(made[index], draft.slots[slot] or ())
    if wanted[2]:
        draft.result(made[2], [outputs])
    draft.alike.extend(index for index, on in zip(made, wanted, strict=True) if index is not None and not on)
    draft.linear(("grad_output",), ("sum", "avg"))
    for names, still in ((("input",), (0, 2)), (("weight",), (1, 2)), (("input", "weight"), (2,))):
        draft.linear(names, ("sum", "avg"), fixed=(made[i] for i in still))
    draft.flops = sum(wanted[:2]) * _convolution_flops(call, shape)
    draft.matmul = True
    return draft


def _plain(call: OpCall) -> bool:
    return bool(call.attribute("groups", 1) == 1)


def _convolution(draft: RuleDraft, name: str) -> tuple[DimFactors, DimFactors, DimFactors]:
    """Factors of batch, output and input channels, put on input and weight."""
    call = draft.call
    transposed = bool(call.attribute("transposed", False))
    shape, kernel = call.shape(name), call.shape("weight")
    if len(shape) != len(kernel):
        raise RuleError(f"{call.name}: its rule expects a batch dim, got input {shape} and weight {kernel}")
    batch = draft.factor("batch", shape[0])
    if _plain(call):
        outputs = draft.factor("outputs", kernel[1 if transposed else 0], filled=True)
        inputs = draft.factor("inputs", shape[1], filled=True)
        pair = [inputs, outputs] if transposed else [outputs, inputs]
        draft.put(name, [batch, inputs, *draft.whole(shape[2:])])
        draft.put("weight", [*pair, *draft.whole(kernel[2:])])
        return batch, outputs, inputs
    result = call.shape("grad_output") if call.slot("grad_output") is not None else call.results[0].shape
    count = int(call.attribute("groups", 1))
    groups = draft.factor("groups", count, even=True, cut=not transposed)
    outputs = (*groups, *draft.factor("outputs", result[1] // count, cut=False))
    inner = draft.factor("inputs", shape[1] // count, cut=False)
    inputs = (*groups, *inner)
    draft.put(name, [batch, inputs, *draft.whole(shape[2:])])
    draft.put("weight", draft.whole(kernel) if transposed else [outputs, inner, *draft.whole(kernel[2:])])
    return batch, outputs, inputs


def _convolution_flops(call: OpCall, result: tuple[int, ...]) -> int:
    """2 * output positions * kernel elements per output channel (a transposed one: per input position)."""
    kernel = call.shape("weight")
    positions = math.prod(call.shape("input")) if call.attribute("transposed", False) else math.prod(result)
    return 2 * positions * math.prod(kernel[1:])


def leading(call: OpCall, *, unread: str = "", **linear: Any) -> RuleDraft:
    """Batch and channels (the first two dims of images ``[n, c, h, w]``) can be cut, space stays whole."""
    draft = RuleDraft(call)
    shape = call.results[0].shape
    first = [draft.factor(name, size) for name, size in zip(("batch", "channels"), shape[: len(shape) - 2], strict=False)]
    for slot in range(len(call.slots)):
        draft.put_slot(slot, [*first, *draft.whole(call.at(slot).shape[len(first) :])])
    for index, result in enumerate(call.results):
        draft.result(index, [*first, *draft.whole(result.shape[len(first) :])])
    for name in unread.split():
        draft.ignore(name)
    draft.flops = max(t.numel for t in (*call.operands, *call.results))
    return apply_linear(draft, **linear)


_BUFFERS = tuple(
    Exclusion(what=f"{name}=P", reason="running statistics are buffers, which are never pending")
    for name in ("running_mean", "running_var")
)

_SIGNS = tuple(
    Exclusion(what=what, reason="weights are positive by custom only, so that a loss or a gradient need not fall with this")
    for what in ("self=P(max)", "self=P(min)", "grad_output=P(max)", "grad_output=P(min)", "total_weight=P")
)
_SPACE = tuple(
    Exclusion(what=f"input=S({d})", reason="space is cut where kernels do not overlap, for some sizes; programs write those as products")
    for d in (2, 3)
)

FAMILIES = (
    Family(name="layer_norm", build=layer_norm),
    Family(name="layer_norm_backward", build=layer_norm_backward),
    Family(name="batch_norm", build=batch_norm, excludes=_BUFFERS),
    Family(name="batch_norm_backward", build=batch_norm_backward, excludes=_BUFFERS),
    Family(name="group_norm", build=group_norm),
    Family(name="group_norm_backward", build=group_norm_backward),
    Family(name="softmax", build=softmax),
    Family(name="softmax_backward", build=softmax_backward),
    Family(name="loss", build=loss, keys={**LINEAR}),
    Family(name="loss_backward", build=loss_backward, keys={**LINEAR}),
    Family(name="nll_sums", build=nll_sums),
    Family(name="nll_loss", build=nll_loss, excludes=_SIGNS),
    Family(name="nll_loss_backward", build=nll_loss_backward, excludes=_SIGNS),
    Family(name="convolution", build=convolution, excludes=_SPACE),
    Family(name="convolution_backward", build=convolution_backward),
    Family(name="leading", build=leading, keys={**LINEAR, "unread": is_text}),
)
