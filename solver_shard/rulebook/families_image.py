"""Families of group norms: batch and whole groups of channels can be cut."""

from __future__ import annotations

from collections.abc import Sequence

from solver_shard.rulebook.draft import Call, Draft, Held
from solver_shard.rulebook.table import Family, Row


def group_norm(call: Call, row: Row) -> Draft:
    """``input[n, c, *space]``, statistics ``[n, groups]``; affine in weight and bias."""
    del row
    draft = Draft(call)
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
    if call.slot("weight") is not None:
        draft.linear(("weight",), ("sum", "avg"), fixed=made[1:])
    draft.flops = 16 * call.tensor("input").numel
    return draft


def _groups(draft: Draft) -> tuple[Held, Held, Held, Sequence[Held]]:
    """Factors of the batch, the groups, the channels, and of every dim of the input."""
    shape, count = draft.call.shape("input"), int(draft.call.attributes["group"])
    batch, groups = draft.factor("batch", shape[0]), draft.factor("groups", count, even=True)
    channels = (*groups, *draft.factor("inside", shape[1] // count, cut=False))
    return batch, groups, channels, [batch, channels, *draft.whole(shape[2:])]


FAMILIES = (
    Family(name="group_norm", build=group_norm, keys={}),
    Family(name="group_norm_backward", build=group_norm_backward, keys={}),
)
