"""Families of a mixture of experts: matrix products per expert, and the tokens that are brought to them and back.

Rows are sorted by expert, and ``offs`` says where those of each expert end. *Expert parallelism* (``own-experts``) cuts the
weights by expert and the rows by the expert that they belong to: a device has its experts' rows and multiplies these alone.
In a layout such rows are ``S(rows)`` like any other cut; the price assumes that routing is balanced, so that every device
has its even part of the rows. Imbalance is not modelled: with a busiest device that has c times its part, time and memory
of these ops are up to c times as large.
"""

from __future__ import annotations

import math

from solver_shard.layout import REDUCTIONS, P, R, S
from solver_shard.program import DTYPE_BYTES
from solver_shard.rules.draft import DimFactors, OpCall, RuleDraft
from solver_shard.rules.row import Exclusion, Family


def grouped_mm(call: OpCall) -> RuleDraft:
    """Matrix products per expert: ``[t, k] x [e, k, n]``, ``[k, t] x [t, n] -> [e, k, n]``, ``[e, m, k] x [e, k, n]``.

    Rows that ``offs`` divides among the experts are cut by ``own-experts`` alone; contracted columns are summed. Columns are
    cut in units of 16 bytes, which the kernels ask of their strides.
    """
    draft = RuleDraft(call)
    left, right, result = call.shape("self"), call.shape("mat2"), call.results[0].shape
    ragged = call.slot("offs") is not None
    bias = call.slot("bias") is not None
    sum_rows = len(left) == len(right) == 2
    by_expert = ragged and not bias and (sum_rows or len(right) == 3)
    experts = draft.factor("experts", _experts(left, right, result), cut=not ragged or by_expert)
    m = draft.factor("m", left[-2], cut=sum_rows or not ragged or len(left) == 3)
    n = _lanes(draft, "n", right[-1], cut=sum_rows or not ragged or len(right) == 3)
    k = _lanes(draft, "k", left[-1], cut=not sum_rows and not bias)
    draft.restrict(k, reduction="sum")
    draft.put("self", ([experts] if len(left) == 3 else []) + [m, k])
    draft.put("mat2", ([experts] if len(right) == 3 else []) + [k, n])
    draft.put("offs", [experts])
    if bias:
        draft.put("bias", [experts, n] if len(call.shape("bias")) == 2 else [n])
    draft.result(0, ([experts] if len(result) == 3 else []) + [m, n])
    if not bias:
        for name in ("self", "mat2"):
            draft.linear((name,), ("sum", "avg"))
    if by_expert and sum_rows:
        draft.implement("own-experts", experts, arguments={"self": S(1), "mat2": S(0), "offs": R})
    elif by_expert:
        draft.implement("own-experts", experts, arguments={"self": S(0), "offs": R}, results={0: S(0)})
    draft.flops = 2 * math.prod(left[-2:]) * right[-1] * (1 if ragged else (left[0] if len(left) == 3 else 1))
    draft.matmul = True
    return draft


def sequence_mm(call: OpCall) -> RuleDraft:
    """``rows[b, n, k] x weights[e, k, m] -> [b, n, m]``, where ``offs[b, e]`` ends the rows of each expert in a sequence.

    Sequences and columns can be cut, contracted columns are summed; ``own-experts`` cuts weights and rows by expert.
    """
    draft = RuleDraft(call)
    (batch, rows, _), (count, _, width) = call.shape("self"), call.shape("mat2")
    b, n = draft.factor("batch", batch), draft.factor("rows", rows, cut=False)
    k, m = (_lanes(draft, name, size, cut=True) for name, size in (("k", call.shape("self")[2]), ("m", width)))
    experts = draft.factor("experts", count)
    draft.restrict(k, reduction="sum")
    draft.put("self", [b, n, k])
    draft.put("mat2", [experts, k, m])
    draft.put("offs", [b, experts])
    draft.result(0, [b, n, m])
    for name in ("self", "mat2"):
        draft.linear((name,), ("sum", "avg"))
    draft.implement("own-experts", experts, arguments={"self": S(1), "offs": R}, results={0: S(1)})
    draft.flops = 2 * math.prod(call.shape("self")) * width
    draft.matmul = True
    return draft


def sequence_mm_weights(call: OpCall) -> RuleDraft:
    """Gradient of the weights: ``[b, n, k] x [b, n, m] -> [e, k, m]``; cutting sequences makes it a partial sum.

    ``own-experts``: every device sums up the rows of its experts, which needs no collective.
    """
    draft = RuleDraft(call)
    batch, rows, inner = call.shape("self")
    b, n = draft.factor("batch", batch, reduction="sum"), draft.factor("rows", rows, cut=False)
    k, m = (_lanes(draft, name, size, cut=True) for name, size in (("k", inner), ("m", call.shape("mat2")[2])))
    experts = draft.factor("experts", call.results[0].shape[0])
    draft.put("self", [b, n, k])
    draft.put("mat2", [b, n, m])
    draft.put("offs", [b, experts])
    draft.result(0, [experts, k, m])
    for name in ("self", "mat2"):
        draft.linear((name,), ("sum", "avg"))
    draft.implement("own-experts", experts, arguments={"self": S(1), "mat2": S(1), "offs": R})
    draft.flops = 2 * math.prod(call.shape("self")) * call.shape("mat2")[2]
    draft.matmul = True
    return draft


def take(call: OpCall) -> RuleDraft:
    """``self[b, m, ...]`` by ``index[b, n]`` -> ``[b, n, ...]``: picks rows inside each sequence; rows of the index can be cut.

    ``masked-lookup`` cuts the rows that are picked from: every device gives its own and zeros for the others, a pending sum.
    Before the experts this is the dispatch: tokens are gathered over the expert axis and each device picks the rows of its
    experts, or each device picks for its own sequences and an all-to-all brings the rows to their experts. After them it is
    the combine: an all-to-all back, or a pending sum that is scattered over the tokens.
    """
    draft = RuleDraft(call)
    shape = call.shape("self")
    b, rows = draft.factor("batch", shape[0]), draft.factor("rows", call.shape("index")[1])
    source = draft.factor("source", shape[1])
    rest = [draft.factor(f"column{d}" if d else "column", size) for d, size in enumerate(shape[2:])]
    draft.put("self", [b, source, *rest])
    draft.put("index", [b, rows])
    draft.result(0, [b, rows, *rest])
    draft.linear(("self",), REDUCTIONS)
    draft.implement("masked-lookup", source, results={0: P("sum")}, share="whole")
    return draft


def count(call: OpCall) -> RuleDraft:
    """How often each number below ``bins`` is in ``self[b, n]`` -> ``[b, bins]``; cutting ``n`` leaves a pending sum."""
    draft = RuleDraft(call)
    batch, rows = call.shape("self")
    b = draft.factor("batch", batch)
    draft.put("self", [b, draft.factor("rows", rows, reduction="sum")])
    draft.result(0, [b, draft.factor("bins", call.results[0].shape[1], cut=False)])
    draft.flops = batch * rows
    return draft


def _lanes(draft: RuleDraft, name: str, size: int, *, cut: bool) -> DimFactors:
    """A factor in units of 16 bytes."""
    unit = max(1, 16 // DTYPE_BYTES[draft.call.tensor("self").dtype])
    fits = size % unit == 0 and size > unit
    return draft.factor(name, size // unit if fits else size, even=True, cut=cut and fits)


def _in_lanes(what: str) -> Exclusion:
    return Exclusion(what=what, reason="columns are cut in units of 16 bytes, which the kernels ask of their strides")


def _experts(*shapes: tuple[int, ...]) -> int:
    return next((shape[0] for shape in shapes if len(shape) == 3), 1)


FAMILIES = (
    Family(name="grouped_mm", build=grouped_mm),
    Family(name="sequence_mm", build=sequence_mm, excludes=(_in_lanes("self=S(2)"), _in_lanes("mat2=S(2)"))),
    Family(name="sequence_mm_weights", build=sequence_mm_weights, excludes=(_in_lanes("self=S(2)"), _in_lanes("mat2=S(2)"))),
    Family(name="take", build=take),
    Family(name="count", build=count),
)
