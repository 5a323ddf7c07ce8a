"""Families of ops on images ``[n, c, *space]``: convolution, batch and group norms, pooling and resizing.

The batch and the channels can be cut; space stays whole, for windows reach over the edges of shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from solver_shard.errors import RuleError
from solver_shard.rulebook.draft import Call, Draft, Held
from solver_shard.rulebook.table import Family, Row, is_text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Channels:
    """Factors of a convolution. With several groups, the groups are the major factor of both channel dims, and what is inside stays."""

    batch: Held
    groups: Held
    outputs: Held
    inputs: Held


def convolution(call: Call, row: Row) -> Draft:
    """``input[n, c, *space]`` by ``weight[o, c, *kernel]``: batch and output channels can be cut, input channels are summed.

    A bias is added once: where input channels are cut it is partial too. With groups, whole groups can be cut.
    """
    del row
    draft = Draft(call)
    found = _convolution(draft)
    draft.restrict(found.inputs, reduction="sum")
    channels = (*found.groups, *found.outputs)
    draft.put("bias", [channels])
    draft.add("bias")
    draft.result(0, [found.batch, channels, *draft.whole(call.results[0].shape[2:])])
    joined = call.slot("bias") is not None
    for name in ("input", "weight"):
        draft.linear((name, "bias") if joined else (name,), ("sum", "avg"))
    draft.flops = _convolution_flops(call, call.results[0].shape)
    draft.matmul = True
    return draft


def convolution_backward(call: Call, row: Row) -> Draft:
    """Gradients of input, weight and bias; cutting the batch sums the last two, cutting output channels the first.

    The bias' gradient does not depend on the input: where input channels are cut, every device has it.
    """
    del row
    draft = Draft(call)
    made = call.present("output_mask", 3)
    wanted = tuple(bool(m) for m in call.attribute("output_mask", (True,) * 3))
    found = _convolution(draft)
    channels = (*found.groups, *found.outputs)
    draft.restrict(found.batch, reduction="sum")
    draft.restrict(found.outputs, reduction="sum")
    shape = call.shape("grad_output")
    draft.put("grad_output", [found.batch, channels, *draft.whole(shape[2:])])
    for index, argument in ((0, "input"), (1, "weight")):
        slot = call.slot(argument)
        if slot is not None and wanted[index]:
            draft.result(made[index], draft.slots[slot] or ())
    if wanted[2] and made[2] is not None:
        draft.result(made[2], [channels])
        draft.unaffected(found.inputs, made[2])
    draft.alike.extend(index for index, on in zip(made, wanted, strict=True) if index is not None and not on)
    draft.linear(("grad_output",), ("sum", "avg"))
    draft.flops = sum(wanted[:2]) * _convolution_flops(call, shape)
    draft.matmul = True
    return draft


def _convolution(draft: Draft) -> _Channels:
    """The factors of a convolution, put on input and weight."""
    call = draft.call
    transposed = bool(call.attribute("transposed", False))
    groups = int(call.attribute("groups", 1))
    shape, kernel = call.shape("input"), call.shape("weight")
    if len(shape) != len(kernel) or shape[1] % groups or kernel[0] % groups:
        raise RuleError(
            f"{call.name}: its rule expects a batch dim and channels in {groups} equal groups, got input {shape} and weight {kernel}"
        )
    outputs = kernel[1] if transposed else kernel[0] // groups
    found = _Channels(
        batch=draft.factor("batch", shape[0]),
        groups=draft.factor("groups", groups, even=True),
        outputs=draft.factor("outputs", outputs, even=True, cut=groups == 1),
        inputs=draft.factor("inputs", shape[1] // groups, even=True, cut=groups == 1),
    )
    pair = [(*found.groups, *found.inputs), found.outputs] if transposed else [(*found.groups, *found.outputs), found.inputs]
    draft.put("input", [found.batch, (*found.groups, *found.inputs), *draft.whole(shape[2:])])
    draft.put("weight", [*pair, *draft.whole(kernel[2:])])
    return found


def _convolution_flops(call: Call, result: tuple[int, ...]) -> int:
    """2 * output positions * kernel elements per output channel (a transposed one: per input position)."""
    kernel = call.shape("weight")
    positions = math.prod(call.shape("input")) if call.attribute("transposed", False) else math.prod(result)
    return 2 * positions * math.prod(kernel[1:])


def batch_norm(call: Call, row: Row) -> Draft:
    """Channels (dim 1) can be cut; without training all else too, for the statistics are given.

    In training, ``batch-statistics`` cuts the batch: sum, sum of squares and count of every channel are all-reduced.
    """
    del row
    draft = Draft(call)
    training = _training(call)
    channels, dims = _channels(draft, training)
    draft.put("input", dims)
    draft.result(0, dims)
    _per_channel(draft, channels)
    draft.flops = 8 * call.tensor("input").numel
    if training:
        draft.restrict(dims[0], cut=True)
        draft.implement("batch-statistics", dims[0], draft.all_reduce([channels], 3, call.tensor("input").dtype))
    return draft


def batch_norm_backward(call: Call, row: Row) -> Draft:
    """As ``batch_norm``; linear in the incoming gradient. ``batch-statistics`` all-reduces two sums per channel.

    These sums are the gradients of weight and bias, which every device then has.
    """
    del row
    draft = Draft(call)
    made = call.present("output_mask", 3)
    training = _training(call)
    channels, dims = _channels(draft, training)
    if not training:
        for held in (dims[0], *dims[2:]):
            draft.restrict(held, reduction="sum")
    draft.put("grad_out", dims)
    draft.put("input", dims)
    draft.result(made[0], dims)
    _per_channel(draft, channels)
    draft.linear(("grad_out",), ("sum", "avg"))
    draft.flops = 16 * call.tensor("input").numel
    if training and len(call.results) == sum(map(bool, call.attribute("output_mask", (True,) * 3))):
        draft.restrict(dims[0], cut=True)
        draft.implement("batch-statistics", dims[0], draft.all_reduce([channels], 2, call.tensor("input").dtype))
    return draft


def _training(call: Call) -> bool:
    return bool(call.attribute("train", call.attribute("training", "no_training" not in call.name)))


def _channels(draft: Draft, training: bool) -> tuple[Held, list[Held]]:
    shape = draft.call.shape("input")
    names = ["batch", "channels", *(f"space{d}" for d in range(len(shape) - 2))]
    dims = [draft.factor(names[d], size, even=d == 1, cut=d == 1 or not training) for d, size in enumerate(shape)]
    return dims[1], dims


def _per_channel(draft: Draft, channels: Held) -> None:
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


def group_norm(call: Call, row: Row) -> Draft:
    """Batch and whole groups of channels can be cut; statistics are ``[n, groups]``."""
    del row
    draft = Draft(call)
    batch, groups, channels, dims = _groups(draft)
    draft.put("input", dims)
    for name in ("weight", "bias"):
        draft.put(name, [channels])
    draft.result(0, dims)
    for index in (1, 2):
        draft.result(index, [batch, groups])
    draft.flops = 8 * call.tensor("input").numel
    return draft


def group_norm_backward(call: Call, row: Row) -> Draft:
    """As ``group_norm``; cutting the batch sums the gradients of weight and bias; linear in the incoming gradient."""
    del row
    draft = Draft(call)
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
    draft.flops = 16 * call.tensor("input").numel
    return draft


def _groups(draft: Draft) -> tuple[Held, Held, Held, Sequence[Held]]:
    """Factors of the batch, the groups, the channels, and of every dim of the input."""
    shape, count = draft.call.shape("input"), int(draft.call.attributes["group"])
    batch, groups = draft.factor("batch", shape[0]), draft.factor("groups", count, even=True)
    channels = (*groups, *draft.factor("inside", shape[1] // count, cut=False))
    return batch, groups, channels, [batch, channels, *draft.whole(shape[2:])]


def leading(call: Call, row: Row) -> Draft:
    """Batch and channels can be cut, space stays whole: ``space`` counts the trailing dims that it has (2 unless said)."""
    draft = Draft(call)
    shape = call.results[0].shape
    space = int(row.get("space", 2))
    first = [draft.factor(name, size) for name, size in zip(("batch", "channels"), shape[: len(shape) - space], strict=False)]
    for slot in range(len(call.slots)):
        draft.put_slot(slot, [*first, *draft.whole(call.at(slot).shape[len(first) :])])
    for index, result in enumerate(call.results):
        draft.result(index, [*first, *draft.whole(result.shape[len(first) :])])
    for name in row.names("unread"):
        draft.ignore(name)
    if row.get("linear"):
        draft.linear(row.names("linear"), ("sum", "avg"))
    draft.flops = max(t.numel for t in (*call.operands, *call.results))
    return draft


def is_space(value: object) -> str | None:
    """A number of spatial dims."""
    return None if value in (1, 2, 3) and not isinstance(value, bool) else "must be 1, 2 or 3"


FAMILIES = (
    Family(name="convolution", build=convolution, keys={}),
    Family(name="convolution_backward", build=convolution_backward, keys={}),
    Family(name="batch_norm", build=batch_norm, keys={}),
    Family(name="batch_norm_backward", build=batch_norm_backward, keys={}),
    Family(name="group_norm", build=group_norm, keys={}),
    Family(name="group_norm_backward", build=group_norm_backward, keys={}),
    Family(name="leading", build=leading, keys={"linear": is_text, "unread": is_text, "space": is_space}),
)
