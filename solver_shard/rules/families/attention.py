"""Scaled dot-product attention, forward and backward: one family for all variants.

``query[b, h, q, d]``, ``key[b, kv, s, d]``, ``value[b, kv, s, e]``: the batch can be cut, and heads in whole groups of
one key-value head (``h`` is a multiple of ``kv``). Where every device has a single key-value head, further axes can cut
the queries of its group (keys and values whole, their gradients pending sums).
Head dims stay whole, and so do keys, but for the backward pass without
a causal mask: it has the statistics of all keys, so that keys, values and their gradients can be cut, which leaves the
gradient of the queries a pending sum.

``cut-queries``, an implementation of the kernels that run here, cuts the query's sequence and gathers keys and values (their
gradients are pending sums): every device attends from its own queries, with its offset in the causal mask. Contiguous
queries are not balanced under a causal mask, and the busiest device, the last, is what is priced.

Functions of scores (``flex_attention``) follow: they run at the positions that a device has, of the batch (``batches``) and of heads
(``heads``) as operands that are cut with the queries, of queries as ``cut-queries`` says. What they read of other tensors is cut along dims
of sequences and heads (``own_dims``) and else whole, and the gradients of that are pending sums. Keys that a mask function hides are not
computed (``ops.kernels.visible``).

**Price**: matrix products of 2 b h q s d operations: scores and attended values, d and e wide, then backward the scores again and the
gradients of query and key, d wide, of value and weights, e wide (Dao, "FlashAttention-2", arXiv:2307.08691, section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from solver_shard.errors import RuleError
from solver_shard.layout import P
from solver_shard.ops import kernels
from solver_shard.rules.draft import DimFactors, OpCall, RuleDraft
from solver_shard.rules.row import Exclusion, Family
from solver_shard.tracing.attention import ATTENTION, ATTENTION_BACKWARD, own_dims

_MASKS = ("attn_mask", "attn_bias")
_GRADIENTS = ("grad_out", "grad_out_")
_OWN = (ATTENTION, ATTENTION_BACKWARD)
_UNREAD = ("cum_seq_q", "cum_seq_k", "philox_seed", "philox_offset")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Factors of one call."""

    batch: DimFactors
    heads: DimFactors
    queries: DimFactors
    """All query heads: of each key-value head the group that it serves."""
    query: DimFactors
    keys: DimFactors
    width: DimFactors
    value: DimFactors


def sdpa(call: OpCall) -> RuleDraft:
    """Output ``[b, h, q, e]``, log-sum-exp ``[b, h, ...]``; seeds and placeholders are alike on every device."""
    draft = RuleDraft(call)
    parts = _parts(draft)
    _operands(draft, parts)
    draft.linear(("value",), ("sum", "avg"), fixed=range(1, len(call.results)))
    for index, result in enumerate(call.results):
        _result(draft, parts, index, result.shape)
    draft.flops = _flops(call, 1, 1)
    draft.matmul = True
    draft.implement("cut-queries", parts.query, share=_share(call))
    return draft


def sdpa_backward(call: OpCall) -> RuleDraft:
    """Gradients of query, key, value (mask, summed where it was broadcast, what functions read); linear in the incoming gradient."""
    draft = RuleDraft(call)
    made, learned = _gradients(call)
    parts = _parts(draft)
    _operands(draft, parts)
    for name in _GRADIENTS:
        draft.put(name, [parts.batch, parts.queries, parts.query, parts.value])
    draft.put("out", [parts.batch, parts.queries, parts.query, parts.value])
    for index, argument in zip(made, ("query", "key", "value"), strict=False):
        slot = call.slot(argument)
        if slot is not None:
            draft.result(index, draft.slots[slot] or ())
    if len(made) > 3 and made[3] is not None:
        mask = next((name for name in _MASKS if call.slot(name) is not None), None)
        shape = call.results[made[3]].shape
        if mask is not None and shape == call.shape(mask):
            draft.result(made[3], _mask(draft, parts, shape))
            draft.restrict((*parts.batch, *parts.queries), reduction="sum")
        else:
            draft.alike.append(made[3])
    for index, place in learned.items():
        draft.result(index, _buffer(draft, parts, place))
        draft.restrict((*parts.batch, *parts.queries), reduction="sum")
    draft.linear((name for name in (*_GRADIENTS, "grad_logsumexp") if call.attributes.get(name) is not None), ("sum", "avg"))
    forward = [name for name in ("value", "out", "grad_logsumexp") if call.attributes.get(name) is not None]
    draft.linear(forward, ("sum", "avg"), fixed=(made[2],))
    for name in _UNREAD:
        if name in call.names:
            draft.ignore(name)
    if not any(call.attribute(name, False) for name in ("is_causal", "score", "mask")):
        draft.restrict(parts.keys, cut=True, reduction="sum")
    draft.flops = _flops(call, 3, 2)
    draft.matmul = True
    if "grad_input_mask" in call.attributes:
        draft.restrict(parts.query, cut=False)
    else:
        pending = [index for index in (*made[1:3], *learned) if index is not None]
        draft.implement("cut-queries", parts.query, results=dict.fromkeys(pending, P("sum")), share=_share(call))
    return draft


def _gradients(call: OpCall) -> tuple[tuple[int | None, ...], dict[int, int]]:
    """Where the gradients of query, key, value and mask are among the results, and of which captured tensors the others are."""
    if "grad_input_mask" in call.attributes:
        return call.present("grad_input_mask", 4), {}
    if "wanted" not in call.attributes:
        return tuple(range(len(call.results))), {}
    mask, *buffers = call.attributes["wanted"]
    of = [place for place, asked in enumerate(buffers) if asked]
    return (0, 1, 2, 3 if mask else None), dict(zip(range(3 + bool(mask), len(call.results)), of, strict=True))


def _buffer(draft: RuleDraft, parts: _Parts, place: int) -> list[DimFactors]:
    """What functions of scores read, cut where they read what is of the same sequence or head."""
    call = draft.call
    own = own_dims(str(call.attribute("score", "")), str(call.attribute("mask", "")), place)
    shape = call.at(call.names["buffers"][place]).shape
    held = {"%b": parts.batch, "%h": parts.queries}
    return [held[own[d]] if d in own else draft.factor(draft.letter(), size, cut=False) for d, size in enumerate(shape)]


def _share(call: OpCall) -> Literal["even", "triangle"]:
    """A triangle where the last queries see much more than the mean."""
    bands = _seen(call)
    return "triangle" if call.attribute("is_causal", False) or bands[-1] * len(bands) > _STEEP * sum(bands) else "even"


def _seen(call: OpCall) -> tuple[float, ...]:
    """Which part of the keys each band of queries sees through the mask function."""
    mask = str(call.attribute("mask", ""))
    return kernels.visible(mask, call.shape("query")[2], call.shape("key")[2]) if mask else (1.0,)


_STEEP = 1.25
"""Of a causal mask it is 2, of a sliding window over a short part of the sequence 1: from here on cuts are priced as triangles."""


def _cuttable(call: OpCall) -> bool:
    """Whether the query's sequence can be cut: kernels whose statistics are ``[b, h, q]``; causal ones of square masks."""
    query, keys = call.shape("query"), call.shape("key")[2]
    square = query[2] == keys or not call.attribute("is_causal", False)
    if call.name in _OWN:  # told where its queries begin
        square = True
    found = [call.shape("logsumexp")] if call.slot("logsumexp") is not None else [r.shape for r in call.results if len(r.shape) == 3]
    return ("flash_attention_for_cpu" in call.name or call.name in _OWN) and square and found == [query[:3]]


def _parts(draft: RuleDraft) -> _Parts:
    call = draft.call
    query, key, value = call.shape("query"), call.shape("key"), call.shape("value")
    if not len(query) == len(key) == len(value) == 4 or query[1] % max(key[1], 1) or key[1] != value[1]:
        raise RuleError(
            f"{call.name}: its rule expects query [b, h, q, d], key [b, kv, s, d], value [b, kv, s, e] with h a multiple of kv, "
            f"got {query}, {key}, {value}"
        )
    batch, heads = draft.factor("batch", query[0]), draft.factor("heads", key[1], even=True)
    group = draft.factor("group", query[1] // max(key[1], 1), even=True, reduction="sum")
    return _Parts(
        batch=batch,
        heads=heads,
        queries=(*heads, *group),
        query=draft.factor("query", query[2], cut=_cuttable(call)),
        keys=draft.factor("keys", key[2], cut=False),
        width=draft.factor("width", query[3], cut=False),
        value=draft.factor("value", value[3], cut=False),
    )


def _operands(draft: RuleDraft, parts: _Parts) -> None:
    call = draft.call
    draft.put("query", [parts.batch, parts.queries, parts.query, parts.width])
    draft.put("key", [parts.batch, parts.heads, parts.keys, parts.width])
    draft.put("value", [parts.batch, parts.heads, parts.keys, parts.value])
    for name in _MASKS:
        if call.slot(name) is not None:
            draft.put(name, _mask(draft, parts, call.shape(name)))
    for name in ("logsumexp", "log_sumexp", "grad_logsumexp"):
        if call.slot(name) is not None:
            draft.put(name, _statistics(draft, parts, call.shape(name)))
    for place, slot in enumerate(call.names.get("buffers", ())):
        draft.put_slot(slot, _buffer(draft, parts, place))
    draft.put("batches", [parts.batch])
    draft.put("heads", [parts.queries, ()])


def _mask(draft: RuleDraft, parts: _Parts, shape: tuple[int, ...]) -> list[DimFactors]:
    """A mask broadcast to ``[b, h, q, s]``."""
    batch, heads, query, _ = draft.call.shape("query")
    keys = draft.call.shape("key")[2]
    leads = {-4: (batch, parts.batch), -3: (heads, parts.queries), -2: (query, parts.query), -1: (keys, parts.keys)}
    held: list[DimFactors] = []
    for d, size in enumerate(shape, start=-len(shape)):
        full, factor = leads.get(d, (0, ()))
        held.append(factor if size == full and factor else draft.factor(f"mask{-d}", size, cut=False))
    return held


def _statistics(draft: RuleDraft, parts: _Parts, shape: tuple[int, ...]) -> list[DimFactors]:
    """``[b, h, q, ...]`` per query; dims that are padded stay whole."""
    if len(shape) < 2 or shape[:2] != draft.call.shape("query")[:2]:
        return draft.whole(shape)
    if shape[2:3] == draft.call.shape("query")[2:3]:
        return [parts.batch, parts.queries, parts.query, *draft.whole(shape[3:])]
    return [parts.batch, parts.queries, *draft.whole(shape[2:])]


def _result(draft: RuleDraft, parts: _Parts, index: int, shape: tuple[int, ...]) -> None:
    lead = draft.call.shape("query")[:2]
    if len(shape) >= 3 and shape[:2] == lead:
        draft.result(index, _statistics(draft, parts, shape))
    else:
        draft.alike.append(index)


def _flops(call: OpCall, narrow: int, wide: int) -> int:
    """Of matrix products along the width of queries and along that of values: half when causal, less where a mask function hides."""
    batch, heads, query, width = call.shape("query")
    keys, value = call.shape("value")[2:]
    total = 2 * batch * heads * query * keys * (narrow * width + wide * value)
    bands = _seen(call)
    return round(total * sum(bands) / len(bands)) // (2 if call.attribute("is_causal", False) else 1)


_EXCLUDED = (
    Exclusion(what="value=S(3)", reason="head dims stay whole: fused kernels know few sizes of them, and heads are cut first"),
    Exclusion(what="query=S(2)", reason="queries are cut by cut-queries, of the kernel that it can run; others pad their statistics"),
)
FAMILIES = (
    Family(name="sdpa", build=sdpa, excludes=_EXCLUDED),
    Family(name="sdpa_backward", build=sdpa_backward, excludes=_EXCLUDED),
)
