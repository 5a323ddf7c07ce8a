"""Families of ops that pick or place elements: embedding, gather, scatter, index, concatenation, padding, histograms."""

from __future__ import annotations

import math
from typing import Any

from solver_shard.errors import RuleError
from solver_shard.layout import REDUCTIONS, P, R
from solver_shard.program import Ref
from solver_shard.rules.draft import DimFactors, OpCall, RuleDraft
from solver_shard.rules.families.pointwise import apply_linear, broadcast
from solver_shard.rules.row import LINEAR, Exclusion, Family, is_flag, is_text


def embedding(call: OpCall) -> RuleDraft:
    """``weight[vocabulary, hidden]`` by ``indices[*rows]``: rows and hidden can be cut.

    ``masked-lookup`` cuts the vocabulary: every device looks up its own rows and leaves zeros for the others, so that the
    result is a pending sum.
    """
    draft = RuleDraft(call)
    vocabulary, hidden = call.shape("weight")
    rows = [draft.factor(f"row{d}", size) for d, size in enumerate(call.shape("indices"))]
    width = draft.factor("hidden", hidden)
    words = draft.factor("vocabulary", vocabulary)
    draft.put("weight", [words, width])
    draft.put("indices", rows)
    draft.result(0, [*rows, width])
    draft.linear(("weight",), REDUCTIONS)
    draft.implement("masked-lookup", words, results={0: P("sum")}, share="whole")
    return draft


def embedding_backward(call: OpCall) -> RuleDraft:
    """Rows of the gradient are summed into the vocabulary: cutting them makes the result partial.

    ``own-rows`` cuts the vocabulary: every device reads the whole gradient and adds up what belongs to its own rows.
    """
    draft = RuleDraft(call)
    scaled = bool(call.attribute("scale_grad_by_freq", False))
    rows = [draft.factor(f"row{d}", size, cut=not scaled, reduction="sum") for d, size in enumerate(call.shape("indices"))]
    vocabulary, hidden = call.results[0].shape
    width = draft.factor("hidden", hidden)
    draft.put("grad_output", [*rows, width])
    draft.put("indices", rows)
    words = draft.factor("vocabulary", vocabulary)
    draft.result(0, [words, width])
    draft.linear(("grad_output",), ("sum", "avg"))
    draft.implement("own-rows", words, share="whole")
    draft.flops = call.tensor("grad_output").numel
    return draft


def embedding_bag(call: OpCall) -> RuleDraft:
    """Sums or means of the rows of each bag: ``weight[vocabulary, hidden]``, ``indices`` and where each bag begins among them.

    ``masked-lookup`` cuts the vocabulary, as of an embedding. With ``own-bags`` every device has all indices and adds up those of its own
    bags: what the devices of a data parallel step do, whose indices are few numbers beside the rows. Of a maximum only hidden is cut.
    """
    draft = RuleDraft(call)
    vocabulary, hidden = call.shape("weight")
    words, width = draft.factor("vocabulary", vocabulary, cut=False), draft.factor("hidden", hidden)
    bags = draft.factor("bags", call.results[0].shape[0], cut=False)
    draft.put("weight", [words, width])
    draft.result(0, [bags, width])
    draft.alike.extend((1, 2, 3))
    draft.flops = call.tensor("indices").numel * hidden
    if _mode(call) == "max":
        draft.alike.remove(3)
        draft.result(3, [bags, width])
        return draft
    draft.linear(("weight",), ("sum", "avg"), fixed=(1, 2, 3))
    draft.linear(("per_sample_weights",), ("sum", "avg"), fixed=(1, 2, 3))
    draft.restrict((*words, *bags), cut=True)
    draft.implement("masked-lookup", words, results={0: P("sum")}, share="whole")
    draft.implement("own-bags", bags)
    return draft


def embedding_bag_backward(call: OpCall) -> RuleDraft:
    """Gradients of bags are summed into the vocabulary: ``own-rows`` cuts the latter, ``own-bags`` the bags, a pending sum.

    Which bag an index is in follows from the offsets, and so does how many each has; of the further results of the forward op only a
    maximum's are read.
    """
    draft = RuleDraft(call)
    vocabulary, hidden = call.results[0].shape
    words, width = draft.factor("vocabulary", vocabulary, cut=False), draft.factor("hidden", hidden)
    bags = draft.factor("bags", call.shape("grad")[0], cut=False)
    draft.put("grad", [bags, width])
    draft.result(0, [words, width])
    draft.linear(("grad",), ("sum", "avg"))
    draft.flops = call.tensor("indices").numel * hidden
    if _mode(call) == "max":
        draft.put("maximum_indices", [bags, width])
        return draft
    draft.linear(("per_sample_weights",), ("sum", "avg"))
    for name in ("offset2bag", "bag_size", "maximum_indices"):
        draft.ignore(name)
    draft.restrict((*words, *bags), cut=True)
    draft.implement("own-rows", words, share="whole")
    draft.implement("own-bags", bags, results={0: P("sum")})
    return draft


def _mode(call: OpCall) -> str:
    return ("sum", "mean", "max")[call.attribute("mode", 0)]


def gather(call: OpCall, **linear: Any) -> RuleDraft:
    """Along ``dim`` the operand stays whole and the index can be cut; other dims pass where their sizes agree.

    ``masked-lookup`` cuts the operand along ``dim``: every device picks what lies in its part and leaves zeros for the rest, a pending
    sum. So the log-probabilities of some tokens need none of the others'.
    """
    draft = RuleDraft(call)
    shape, index = call.shape("self"), call.shape("index")
    if len(index) != len(shape):  # a number in place of a tensor of one dim
        return draft
    dim = call.dim(call.attributes["dim"], len(shape))
    operand: list[DimFactors] = []
    picked: list[DimFactors] = []
    for d, size in enumerate(shape):
        same = d != dim and size == index[d]
        operand.append(draft.factor(draft.letter(), size, cut=same))
        picked.append(operand[-1] if same else draft.factor(draft.letter(), index[d], cut=d == dim))
    draft.put("self", operand)
    draft.put("index", picked)
    draft.result(0, picked)
    _looked_up(draft, operand[dim] if shape else ())
    return apply_linear(draft, **linear)


def _looked_up(draft: RuleDraft, rows: DimFactors) -> None:
    """Rows that an index picks may be cut: ``masked-lookup``."""
    if draft.call.results[0].dtype != "bool":
        draft.restrict(rows, cut=True)
        draft.implement("masked-lookup", rows, results={0: P("sum")}, share="whole")


def _written(draft: RuleDraft, rows: DimFactors) -> None:
    """Rows that an index writes to may be cut: with ``own-rows`` every device reads all that is written and keeps what is its own."""
    draft.restrict(rows, cut=True)
    draft.implement("own-rows", rows, share="whole")


def scatter(call: OpCall, *, adds: bool = False, **linear: Any) -> RuleDraft:
    """Along ``dim`` the operand stays whole; other dims pass where operand, index and source agree in size.

    What is added can be cut along ``dim`` (setting ``adds``): the result is then a pending sum, to which the operand adds once.
    ``own-rows`` cuts the operand along ``dim``.
    """
    draft = _scattered(call, "sum" if adds else None, addends=("self",))
    if draft.factors:
        draft.flops = math.prod(call.shape("index"))
        draft.window = draft.flops * (2 if adds else 1)
    return apply_linear(draft, **linear)


def scatter_reduce(call: OpCall) -> RuleDraft:
    """As ``scatter``: cut sources make pending sums, maxima and minima of what includes the operand; sums and means are linear."""
    kind, included = str(call.attributes["reduce"]), bool(call.attribute("include_self", True))
    reduction = {"sum": "sum", "amax": "max", "amin": "min"}.get(kind) if included else None
    draft = _scattered(call, reduction, addends=("self",))
    draft.flops = math.prod(call.shape("index"))
    if kind in ("sum", "mean"):
        draft.linear(("self", "src"), ("sum", "avg"))
    else:
        draft.linear(("self",), ("sum", "avg") if included and kind == "prod" else () if included else ("avg",))
    if kind in ("amax", "amin"):
        own = "max" if kind == "amax" else "min"
        draft.linear(("self", "src"), (own,))
        draft.monotone("src", increasing=True, only=own)
    if kind != "prod":
        draft.monotone("self", increasing=True)
    return draft


def _scattered(call: OpCall, reduction: str | None, *, addends: tuple[str, ...]) -> RuleDraft:
    """``self``, ``index``, ``src`` and the result of what scatters along ``dim``; nothing where they have not one rank."""
    draft = RuleDraft(call)
    shape, index = call.shape("self"), call.shape("index")
    source = call.shape("src") if call.slot("src") is not None else index
    if not len(index) == len(source) == len(shape) or not shape:  # numbers in place of tensors of one dim
        return draft
    dim = call.dim(call.attributes["dim"], len(shape))
    passing = {d: draft.factor(draft.letter(), size) for d, size in enumerate(shape) if d != dim and size == index[d] == source[d]}
    rows = draft.factor(draft.letter(), shape[dim])
    for name in ("self", "index", "src"):
        if call.slot(name) is not None:
            sizes = call.shape(name)
            known = passing | ({dim: rows} if name == "self" else {})
            draft.put(name, [known[d] if d in known else draft.factor(draft.letter(), size, cut=False) for d, size in enumerate(sizes)])
    if reduction and index[dim] == source[dim]:
        added = draft.factor(draft.letter(), index[dim])
        draft.restrict(added, reduction=reduction, addends=addends)
        for name in ("index", "src"):
            held = list(draft.slots[call.names[name][0]] or ())
            draft.put(name, [*held[:dim], added, *held[dim + 1 :]])
    known = passing | {dim: rows}
    draft.result(0, [known[d] if d in known else draft.factor(draft.letter(), size, cut=False) for d, size in enumerate(shape)])
    _written(draft, rows)
    return draft


def index(call: OpCall) -> RuleDraft:
    """``self[indices]``: dims without an index pass, indexed dims stay whole, dims of the indices can be cut."""
    draft = RuleDraft(call)
    layout = _indexed(call)
    if layout is None:
        return draft
    free, picked, position, shape = layout
    _, placed = _addressed(draft, free, picked, position)
    draft.result(0, placed)
    draft.linear(("self",), REDUCTIONS)
    if call.results[0].shape != shape:
        raise RuleError(f"{call.name}: indexing {call.shape('self')} gives {shape}, the call's result is {call.results[0].shape}")
    return draft


def index_put(call: OpCall) -> RuleDraft:
    """``self[indices] = values``: dims without an index pass; operand and values are linear.

    Where values are added up, the dims of the indices can be cut: a pending sum, to which the operand adds once. Where one dim is
    indexed, ``own-rows`` cuts it.
    """
    draft = RuleDraft(call)
    layout = _indexed(call)
    if layout is None:
        return draft
    free, picked, position, shape = layout
    adds = bool(call.attribute("accumulate", False))
    operand, placed = _addressed(draft, free, picked, position, whole=not adds)
    if adds:
        draft.restrict(tuple(f for held in placed[position : position + len(picked)] for f in held), reduction="sum", addends=("self",))
        draft.monotone("self", increasing=True)
    draft.put("values", broadcast(call, call.shape("values"), shape, placed))
    draft.result(0, operand)
    draft.linear(("self", "values"), ("sum", "avg") if adds else REDUCTIONS)
    draft.window = math.prod(shape) * (2 if adds else 1)
    indexed = [held for d, held in enumerate(operand) if d not in free]
    if len(indexed) == 1:
        _written(draft, indexed[0])
    return draft


def _addressed(
    draft: RuleDraft, free: list[int], picked: tuple[int, ...], position: int, *, whole: bool = False
) -> tuple[list[DimFactors], list[DimFactors]]:
    """Put ``self`` and the indices (which stay ``whole``); the factors of ``self``, and those of ``self[indices]``."""
    call = draft.call
    operand = [draft.factor(draft.letter(), size, cut=d in free) for d, size in enumerate(call.shape("self"))]
    letters = draft.letters(picked, whole=range(len(picked)) if whole else ())
    draft.put("self", operand)
    for slot in call.names["indices"]:
        draft.put_slot(slot, broadcast(call, call.at(slot).shape, picked, letters))
    passing = [operand[d] for d in free]
    return operand, [*passing[:position], *letters, *passing[position:]]


def _indexed(call: OpCall) -> tuple[list[int], tuple[int, ...], int, tuple[int, ...]] | None:
    """Dims without an index, broadcast shape of the indices, where it goes among them, and the shape of ``self[indices]``.

    None where an index is a mask: its result has no static shape.
    """
    shape = call.shape("self")
    entries = list(call.attributes["indices"])
    entries += [None] * (len(shape) - len(entries))
    dims = [d for d, entry in enumerate(entries) if isinstance(entry, Ref)]
    tensors = [call.at(slot) for slot in call.names["indices"]]
    if not dims or len(entries) > len(shape) or any(t.dtype in ("bool", "u8") for t in tensors):
        return None
    rank = max(len(t.shape) for t in tensors)
    padded = [(1,) * (rank - len(t.shape)) + t.shape for t in tensors]
    picked = tuple(next((s[d] for s in padded if s[d] != 1), 1) for d in range(rank))
    free = [d for d in range(len(shape)) if d not in dims]
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    position = dims[0] if adjacent else 0
    sizes = [shape[d] for d in free]
    return free, picked, position, (*sizes[:position], *picked, *sizes[position:])


def index_select(call: OpCall, **linear: Any) -> RuleDraft:
    """``self`` along ``dim`` by a vector ``index``: other dims pass, the index can be cut; ``masked-lookup`` cuts ``dim``."""
    draft = RuleDraft(call)
    shape = call.shape("self")
    dim = call.dim(call.attributes["dim"], len(shape))
    held = draft.letters(shape, whole=(dim,))
    rows = draft.factor(draft.letter(), math.prod(call.shape("index")))
    draft.put("self", held)
    draft.put("index", [rows] if call.shape("index") else [])
    draft.result(0, [rows if d == dim else h for d, h in enumerate(held)])
    if shape:
        _looked_up(draft, held[dim])
    return apply_linear(draft, **linear)


def index_add(call: OpCall, **linear: Any) -> RuleDraft:
    """``source`` added to ``self`` along ``dim`` at ``index``: other dims pass.

    The index can be cut, which makes the result a pending sum, to which ``self`` adds once; ``own-rows`` cuts ``dim``.
    """
    draft, rows = _rows_written(call)
    draft.restrict(rows, cut=True, reduction="sum", addends=("self",))
    draft.monotone("self", increasing=True)
    draft.window = 2 * call.tensor("source").numel
    return apply_linear(draft, **linear)


def index_copy(call: OpCall, **linear: Any) -> RuleDraft:
    """``source`` in place of the rows of ``self`` at ``index`` along ``dim``: other dims pass, ``own-rows`` cuts ``dim``."""
    draft, _ = _rows_written(call)
    draft.window = call.tensor("source").numel
    return apply_linear(draft, **linear)


def _rows_written(call: OpCall) -> tuple[RuleDraft, DimFactors]:
    """``self``, ``index``, ``source`` and result of what writes rows along ``dim``; the factor of the index, which is not cut."""
    draft = RuleDraft(call)
    shape, source = call.shape("self"), call.shape("source")
    dim = call.dim(call.attributes["dim"], len(shape))
    held = draft.letters(shape, whole=(dim,))
    rows = draft.factor(draft.letter(), math.prod(call.shape("index")), cut=False)
    draft.put("self", held)
    draft.put("index", [rows] if call.shape("index") else [])
    draft.put("source", [rows if d == dim else h for d, h in enumerate(held)] if source else [])
    draft.result(0, held)
    draft.flops = math.prod(source)
    if source:
        _written(draft, held[dim])
    return draft, rows


def masked_scatter(call: OpCall) -> RuleDraft:
    """``source``, element after element, where the mask is true: dims at the end along which the mask is 1 long pass.

    So rows of an image go to the tokens that stand for it. Where the next element is taken from depends on the whole mask before:
    ``own-rows`` cuts dim 0 of what is written into, beside a whole mask and source.
    """
    draft = RuleDraft(call)
    held, tail = _masked_rows(draft, "self", call.shape("source"))
    draft.put("self", held)
    draft.put("source", [*draft.whole(call.shape("source")[: len(call.shape("source")) - len(tail)]), *tail])
    draft.result(0, held)
    draft.linear(("self", "source"), REDUCTIONS)
    if len(held) > len(tail):
        draft.restrict(held[0], cut=True)
        draft.implement("own-rows", held[0], arguments={"mask": R})
    return draft


def masked_scatter_backward(call: OpCall) -> RuleDraft:
    """The gradient of ``masked_scatter``'s source; ``own-rows`` cuts dim 0 of the incoming one: every device fills in its rows, a sum."""
    draft = RuleDraft(call)
    held, tail = _masked_rows(draft, "grad_output", call.results[0].shape)
    draft.put("grad_output", held)
    draft.result(0, [*draft.whole(call.results[0].shape[: len(call.results[0].shape) - len(tail)]), *tail])
    draft.linear(("grad_output",), REDUCTIONS)
    if len(held) > len(tail):
        draft.restrict(held[0], cut=True)
        draft.implement("own-rows", held[0], arguments={"mask": R}, results={0: P("sum")})
    return draft


def _masked_rows(draft: RuleDraft, name: str, source: tuple[int, ...]) -> tuple[list[DimFactors], list[DimFactors]]:
    """Factors of what a mask lies over, which whole elements of the source take the place of; and those of the elements."""
    shape, mask = draft.call.shape(name), draft.call.shape("mask")
    count = 0
    while count < min(len(shape), len(mask), len(source)) and mask[-1 - count] == 1 and shape[-1 - count] == source[-1 - count] > 1:
        count += 1
    first = len(shape) - count
    held = [draft.factor(draft.letter(), size, cut=d >= first) for d, size in enumerate(shape)]
    return held, held[first:]


def unfold(call: OpCall, **linear: Any) -> RuleDraft:
    """Windows along one dim, which stays whole; others pass."""
    draft = RuleDraft(call)
    shape, result = call.shape("self"), call.results[0].shape
    dim = call.dim(call.attributes["dimension"], len(shape))
    held = draft.letters(shape, whole=(dim,))
    draft.put("self", held)
    if shape:
        windows, inside = (draft.factor(draft.letter(), result[d], cut=False) for d in (dim, -1))
        draft.result(0, [*(windows if d == dim else h for d, h in enumerate(held)), inside])
    return apply_linear(draft, **linear)


def unfold_backward(call: OpCall, **linear: Any) -> RuleDraft:
    """Windows added up along one dim, which stays whole; others pass."""
    draft = RuleDraft(call)
    result, given = call.results[0].shape, call.shape("grad_in")
    dim = call.dim(call.attributes["dim"], len(result))
    held = draft.letters(result, whole=(dim,))
    draft.result(0, held)
    windows, inside = (draft.factor(draft.letter(), given[d], cut=False) for d in (dim, -1))
    draft.put("grad_in", [*(windows if d == dim else h for d, h in enumerate(held)), inside])
    draft.flops = math.prod(given)
    return apply_linear(draft, **linear)


def searchsorted(call: OpCall, *, sequence: str, values: str) -> RuleDraft:
    """How many of a sorted sequence come before each value: parts of the sequence count their own, a pending sum; values can be cut."""
    draft = RuleDraft(call)
    steps = call.shape(sequence)
    if call.slot(values) is None:
        return draft
    shape = call.shape(values)
    held = draft.letters(shape)
    counted = draft.factor(draft.letter(), steps[-1], cut=call.attribute("sorter") is None, reduction="sum")
    draft.put(values, held)
    draft.put(sequence, [*(held[:-1] if len(steps) > 1 else ()), counted])
    draft.put("sorter", [*(held[:-1] if len(steps) > 1 else ()), counted])
    draft.result(0, held)
    draft.monotone(values, increasing=True)
    draft.flops = math.prod(shape) * max(steps[-1], 2).bit_length()
    return draft


def concat(call: OpCall) -> RuleDraft:
    """Tensors joined along ``dim``, which stays whole; partial only all together."""
    draft = RuleDraft(call)
    shape = call.results[0].shape
    dim = call.dim(call.attributes.get("dim", 0), len(shape))
    letters = draft.letters(shape, whole=(dim,))
    for slot in call.names["tensors"]:
        own = call.at(slot).shape
        if len(own) == len(shape):
            draft.put_slot(slot, [draft.factor(draft.letter(), size, cut=False) if d == dim else letters[d] for d, size in enumerate(own)])
    draft.result(0, letters)
    draft.linear(("tensors",), REDUCTIONS)
    return draft


def pad(call: OpCall, **linear: Any) -> RuleDraft:
    """Padded or trimmed dims stay whole; sums pass where the padding is zero."""
    draft = RuleDraft(call)
    shape, result = call.shape("self"), call.results[0].shape
    amounts = list(call.attributes["pad"])
    touched = {len(shape) - 1 - i // 2 for i, amount in enumerate(amounts) if amount}
    letters = draft.letters(shape, whole=touched)
    draft.put("self", letters)
    draft.result(0, [draft.factor(draft.letter(), result[d], cut=False) if d in touched else held for d, held in enumerate(letters)])
    return apply_linear(draft, **linear)


def histogram(call: OpCall) -> RuleDraft:
    """Counts per bin: elements can be cut where the range is given, which makes the counts partial sums."""
    draft = RuleDraft(call)
    fixed = call.attributes.get("min", 0) != call.attributes.get("max", 0)
    draft.put("self", [draft.factor(f"row{d}", size, cut=fixed, reduction="sum") for d, size in enumerate(call.shape("self"))])
    draft.result(0, [draft.factor("bins", size, cut=False) for size in call.results[0].shape])
    draft.flops = call.tensor("self").numel
    return draft


_SHORTER = Exclusion(what="self=S index=S", reason="an index shorter than the tensor is cut where the tensor is for some sizes only")
FAMILIES = (
    Family(name="embedding", build=embedding),
    Family(name="embedding_backward", build=embedding_backward),
    Family(name="embedding_bag", build=embedding_bag),
    Family(name="embedding_bag_backward", build=embedding_bag_backward),
    Family(name="gather", build=gather, keys={**LINEAR}, excludes=(_SHORTER,)),
    Family(name="scatter", build=scatter, keys={**LINEAR, "adds": is_flag}, excludes=(_SHORTER,)),
    Family(name="index_select", build=index_select, keys={**LINEAR}),
    Family(name="index_add", build=index_add, keys={**LINEAR}),
    Family(name="index_copy", build=index_copy, keys={**LINEAR}),
    Family(name="scatter_reduce", build=scatter_reduce, excludes=(_SHORTER,)),
    Family(name="index", build=index),
    Family(
        name="index_put",
        build=index_put,
        excludes=tuple(Exclusion(what=f"values=P({r})", reason="true of a single value only, added everywhere") for r in ("max", "min")),
    ),
    Family(name="masked_scatter", build=masked_scatter),
    Family(name="masked_scatter_backward", build=masked_scatter_backward),
    Family(name="unfold", build=unfold, keys={**LINEAR}),
    Family(name="unfold_backward", build=unfold_backward, keys={**LINEAR}),
    Family(
        name="searchsorted",
        build=searchsorted,
        keys={"sequence": is_text, "values": is_text},
        required=("sequence", "values"),
        excludes=tuple(Exclusion(what=f"{name}=P", reason="parts need not be sorted") for name in ("sorted_sequence", "boundaries")),
    ),
    Family(name="concat", build=concat),
    Family(name="pad", build=pad, keys={**LINEAR}),
    Family(name="histogram", build=histogram),
)
