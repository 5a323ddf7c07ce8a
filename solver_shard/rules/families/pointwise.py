"""Families whose rule follows from shapes alone: einsum, notation, pointwise, per-dim ops, reductions, factories."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from solver_shard.errors import RuleError
from solver_shard.layout import REDUCTIONS
from solver_shard.rules.draft import FLOATING, DimFactors, OpCall, RuleDraft
from solver_shard.rules.row import DEFAULT_PASSES, LINEAR, Family, is_dims, is_flag, is_number, is_reduction, is_text, linear_sets
from solver_shard.rules.rule import InnerCollective


def apply_linear(
    draft: RuleDraft,
    *,
    linear: str | Sequence[str] = (),
    passes: str = DEFAULT_PASSES,
    sum_if_zero: str | None = None,
    monotone: str = "",
    only: str | None = None,
    truth: bool = False,
) -> RuleDraft:
    """Add a row's linear sets and monotone arguments; sums do not pass where ``sum_if_zero`` is a number other than 0.

    ``only = "min"``: of a root, whose argument's maximum has parts for which there is none. ``truth``: of operands that are
    truth values, and no others.
    """
    constant = sum_if_zero is not None and draft.call.attributes.get(sum_if_zero, 0) != 0
    if truth and any(tensor.dtype != "bool" for tensor in draft.call.operands):
        return draft
    for arguments, reductions in linear_sets(linear, passes):
        draft.linear(arguments, [r for r in reductions if r != "sum" or not constant])
    for term in monotone.split():
        scale, _, name = term.removeprefix("-").rpartition("*")
        sign = _sign(draft, scale) if scale else 1
        if isinstance(sign, int | float) and sign and draft.call.slot(name) is not None:
            draft.monotone(name, increasing=(sign > 0) != term.startswith("-"), only=only)
    return draft


def _sign(draft: RuleDraft, name: str) -> Any:
    """A number, or that of truth values, which are not negative; 0 for other tensors."""
    slot = draft.call.slot(name)
    if slot is None:
        return draft.call.attribute(name, 1)
    return int(draft.call.at(slot).dtype == "bool")


def einsum(call: OpCall) -> RuleDraft:
    """``ab,bc->ac``: a factor per letter; letters that the result lacks are summed; linear in each operand alone."""
    draft = RuleDraft(call)
    inputs, output = einsum_terms(call)
    sizes: dict[str, int] = {}
    for slot, term in enumerate(inputs):
        shape = call.at(slot).shape
        for letter, size in zip(term, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise RuleError(f"{call.name} {call.attributes['equation']!r}: letter {letter!r} has sizes {sizes[letter]} and {size}")
    held = {
        letter: draft.factor(letter, size, reduction=None if letter in output else "sum", cut=all(t.count(letter) < 2 for t in inputs))
        for letter, size in sizes.items()
    }
    for slot, term in enumerate(inputs):
        draft.put_slot(slot, [held[letter] for letter in term])
        draft.linear_slots((slot,), ("sum", "avg"))
    draft.result(0, [held[letter] for letter in output])
    draft.flops = 2 * math.prod(sizes.values())
    draft.matmul = len(inputs) > 1
    return draft


def einsum_terms(call: OpCall) -> tuple[list[str], str]:
    """Input terms and the output term of the equation, checked against the operands."""
    equation = str(call.attributes.get("equation", "")).replace(" ", "")
    left, arrow, output = equation.partition("->")
    inputs = left.split(",")
    if not arrow or not all(term.isalpha() or not term for term in (*inputs, output)):
        raise RuleError(f"{call.name}: cannot read equation {equation!r}; write letters only, as in 'abc,dc->abd'")
    if len(inputs) != len(call.slots) or any(len(term) != len(call.at(i).shape) for i, term in enumerate(inputs)):
        shapes = ", ".join(str(call.at(i).shape) for i in range(len(call.slots)))
        raise RuleError(f"{call.name}: equation {equation!r} does not fit operands of shapes {shapes}")
    if not set(output) <= set(left) or len(set(output)) != len(output):
        raise RuleError(f"{call.name}: equation {equation!r} has an output letter that is repeated or in no input")
    return inputs, output


def add_product(call: OpCall, *, factors: str) -> RuleDraft:
    """``self`` plus the product of the two operands that ``factors`` names: a batch dim where they have three dims.

    ``self`` is broadcast to the result and added once: where the contracted dim is cut, it is partial too.
    """
    draft = RuleDraft(call)
    one, two = factors.split()
    left, right, shape = call.shape(one), call.shape(two), call.results[0].shape
    batch = [draft.factor("b", left[0])] if len(left) == 3 else []
    rows, inner = draft.factor("m", left[-2]), draft.factor("k", left[-1])
    draft.restrict(inner, reduction="sum", addends=("self",))
    columns = [draft.factor("n", right[-1])] if len(right) > 1 else []
    placed = [*batch, rows, *columns]
    draft.put(one, [*batch, rows, inner])
    draft.put(two, [*(batch if len(right) == 3 else []), inner, *columns])
    draft.put("self", broadcast(call, call.shape("self"), shape, placed))
    draft.result(0, placed)
    for name in (one, two):
        draft.linear(("self", name), ("sum", "avg"))
    beta = call.attribute("beta", 1)
    if isinstance(beta, int | float) and beta:
        draft.monotone("self", increasing=beta > 0)
    draft.flops = 2 * math.prod(left) * (right[-1] if columns else 1)
    draft.matmul = True
    return draft


def unscale(call: OpCall) -> RuleDraft:
    """A gradient by the inverse of the loss scale, and whether it overflowed: a pending maximum where the gradient is cut."""
    draft = RuleDraft(call)
    held = draft.letters(call.shape("self"))
    for factor in held:
        draft.restrict(factor, reduction="max", addends=("found_inf",))
    draft.put("self", held)
    draft.result(0, held)
    draft.flops = 2 * call.tensor("self").numel
    return draft


def replicated(call: OpCall, *, reason: str, **linear: Any) -> RuleDraft:
    """Nothing can be cut, for the ``reason`` that the row gives; what is linear may be partial."""
    del reason  # reports read it off the row
    return apply_linear(RuleDraft(call), **linear)


def pointwise(call: OpCall, *, unread: str = "", flops: int = 1, filled: bool = False, **linear: Any) -> RuleDraft:
    """A factor per result dim; operands are broadcast against the result; ``unread`` arguments give only their dtype.

    Further results of another shape (a step count, an empty buffer) are alike on every device.
    """
    draft = RuleDraft(call)
    shape = call.results[0].shape if call.results else call.at(0).shape
    letters = draft.letters(shape, filled=filled)
    for slot in range(len(call.slots)):
        draft.put_slot(slot, broadcast(call, call.at(slot).shape, shape, letters))
    for index, result in enumerate(call.results):
        if result.shape == shape:
            draft.result(index, letters)
        else:
            draft.alike.append(index)
    for name in unread.split():
        draft.ignore(name)
    draft.flops = flops * math.prod(shape)
    return apply_linear(draft, **linear)


def broadcast(call: OpCall, shape: tuple[int, ...], target: tuple[int, ...], letters: list[DimFactors]) -> list[DimFactors]:
    """Factors of a tensor that is broadcast to ``target``, whose dims hold ``letters``."""
    skip = len(target) - len(shape)
    if skip < 0 or any(size not in (1, target[skip + d]) for d, size in enumerate(shape)):
        raise RuleError(
            f"{call.name}: a tensor of shape {shape} does not broadcast to {target}; correct the op's row, whose family expects it"
        )
    return [letters[skip + d] if size == target[skip + d] else () for d, size in enumerate(shape)]


def cast(call: OpCall) -> RuleDraft:
    """A change of dtype: pointwise, linear unless it rounds to integers or truth values."""
    draft = pointwise(call)
    draft.linear_slots((0,), REDUCTIONS if call.results[0].dtype != "bool" else ())
    return draft


def along(
    call: OpCall, *, whole: str | Sequence[int], unread: str = "", flops: int = 1, view: bool = False, writes: str = "", **linear: Any
) -> RuleDraft:
    """Every dim passes but those that the ``whole`` setting names; tensors may lack these (``select``, ``argmax``).

    ``whole`` is the argument that holds the dims, or a list of dims. All tensors have the full rank, or the rank less
    those dims. ``writes`` is the argument that is written into ``self``.
    """
    draft = RuleDraft(call)
    shapes = [call.at(slot).shape for slot in range(len(call.slots))] + [result.shape for result in call.results]
    rank = max(len(shape) for shape in shapes)
    if isinstance(whole, str):
        call.known(whole)
    dims = call.dims(whole, rank) if isinstance(whole, str) else tuple(call.dim(d, rank) for d in whole if -rank <= d < rank)
    kept = [d for d in range(rank) if d not in dims]
    passing: dict[int, DimFactors] = {}
    for d in kept:
        sizes = {shape[_position(call, shape, d, rank, kept)] for shape in shapes if shape or not rank}
        if len(sizes) == 1:
            passing[d] = draft.factor(draft.letter(), sizes.pop())
    made = []
    for shape in shapes:
        held: list[DimFactors] = []
        for position, size in enumerate(shape):
            d = position if len(shape) == rank else kept[position]
            held.append(passing[d] if d in passing else draft.factor(draft.letter(), size, cut=False))
        made.append(held)
    for slot in range(len(call.slots)):
        draft.put_slot(slot, made[slot])
    for index in range(len(call.results)):
        draft.result(index, made[len(call.slots) + index])
    for name in unread.split():
        draft.ignore(name)
    draft.view = view
    draft.window = call.tensor(writes).numel if writes else 0
    if not draft.view:
        draft.flops = flops * max((math.prod(shape) for shape in shapes), default=0)
    return apply_linear(draft, **linear)


def _position(call: OpCall, shape: tuple[int, ...], d: int, rank: int, kept: list[int]) -> int:
    if len(shape) == rank:
        return d
    if len(shape) == len(kept):
        return kept.index(d)
    raise RuleError(
        f"{call.name}: a tensor of {len(shape)} dims does not fit its rule, which expects {rank} or {len(kept)}; correct its row"
    )


def reduce(call: OpCall, *, reduction: str | None = None, even: bool = False, filled: bool = False, **linear: Any) -> RuleDraft:
    """The dims named by ``dim`` are reduced: cutting them makes the result partial in ``reduction``; without one they stay whole."""
    draft = RuleDraft(call)
    shape = call.at(0).shape
    reduced = set(call.dims("dim", len(shape)))
    held = [
        draft.factor(draft.letter(), size, even=even, filled=filled, cut=reduction is not None, reduction=reduction)
        if d in reduced
        else draft.factor(draft.letter(), size)
        for d, size in enumerate(shape)
    ]
    draft.put_slot(0, held)
    for index, result in enumerate(call.results):
        keep = len(result.shape) == len(shape)
        draft.result(index, [() if d in reduced else h for d, h in enumerate(held) if keep or d not in reduced])
    draft.flops = math.prod(shape)
    return apply_linear(draft, **linear)


def statistics(call: OpCall, *, whole: str | Sequence[int], way: str) -> RuleDraft:
    """As ``along``; where one dim is whole, an implementation cuts it and all-reduces what the row asks of every row of the tensor.

    ``class-statistics``: a maximum and a sum. ``moment-statistics``: a sum, and a sum of squares around the mean.
    ``extreme-statistics``: a maximum, and the first position that has it.
    """
    draft = along(call, whole=whole)
    tensor = call.tensor("self")
    dims = call.dims("dim", len(tensor.shape)) if call.attributes.get("dim") is not None else ()
    if len(dims) != 1 or not tensor.shape or (way != "extreme-statistics" and tensor.dtype not in FLOATING):
        return draft
    held = draft.slots[call.names["self"][0]] or ()
    rows = [h for d, h in enumerate(held) if d != dims[0]]
    if way == "extreme-statistics":
        flat = tuple(f for h in rows for f in h)
        inside = [InnerCollective(kind="all_reduce", rows=flat, width=1, dtype=dtype) for dtype in (tensor.dtype, "i64")]
    else:
        inside = [draft.all_reduce(rows, 1, tensor.dtype) for _ in range(2)]
    draft.restrict(held[dims[0]], cut=tensor.dtype != "bool")
    draft.implement(way, held[dims[0]], *inside)
    return draft


def vector_norm(call: OpCall) -> RuleDraft:
    """Sums of magnitudes (order 1) and of non-zeros (0) add up, largest and smallest ones have a maximum; others stay whole.

    ``square-statistics`` cuts a dim of a norm of order 2: the sums of squares are all-reduced. Of several dims, each has its own, as
    in ``square-statistics:b``.
    """
    order = call.attribute("ord", 2)
    kinds: Mapping[float, Mapping[str, Any]] = {
        0: {"reduction": "sum"},
        1: {"reduction": "sum"},
        math.inf: {"reduction": "max", "filled": True},
        -math.inf: {"reduction": "min", "filled": True},
    }
    draft = reduce(call, **kinds.get(order, {}))
    shape = call.shape("self")
    if order == 2 and shape and call.attribute("dtype") is None:
        dims, held = call.dims("dim", len(shape)), draft.slots[call.names["self"][0]] or ()
        rows = [h for d, h in enumerate(held) if d not in dims]
        several = sum(bool(held[d]) for d in dims) > 1
        for factor in (f for d in dims for f in held[d]):
            draft.restrict((factor,), cut=True)
            name = "square-statistics" + (f":{draft.factors[factor].name}" if several else "")
            draft.implement(name, (factor,), draft.all_reduce(rows, 1, call.tensor("self").dtype))
    return draft


def factory(call: OpCall, *, ordered: bool = False) -> RuleDraft:
    """A tensor made from its size: any dim can be cut; ``ordered`` ones (arange) depend on the position and stay whole.

    Tensor arguments give only shape and dtype; those of the result's shape follow its layout.
    """
    draft = RuleDraft(call)
    shape = call.results[0].shape
    letters = draft.letters(shape, whole=range(len(shape)) if ordered else ())
    draft.result(0, letters)
    for slot in range(len(call.slots)):
        if call.at(slot).shape == shape:
            draft.put_slot(slot, letters)
        draft.unread.add(slot)
    return draft


def notation(
    call: OpCall,
    *,
    dims: str,
    reduce: Mapping[str, str] = MappingProxyType({}),
    whole: str = "",
    even: str = "",
    matmul: bool = False,
    unread: str = "",
    **linear: Any,
) -> RuleDraft:
    """Factors written out: ``"... m k, k n -> ... m n"``; ``1`` is a dim of size 1, ``...`` any leading dims.

    ``reduce`` says what results become when a factor that they lack is cut; ``whole`` factors are not cut; ``even``
    ones only into equal shards.
    """
    draft = RuleDraft(call)
    inputs, outputs = notation_terms(dims)
    tensors = [call.at(slot) for slot in range(len(call.slots))]
    if len(inputs) != len(tensors) or len(outputs) != len(call.results):
        raise RuleError(
            f"{call.name}: dims describes {len(inputs)} operands and {len(outputs)} results, "
            f"the op has {len(tensors)} and {len(call.results)}; write one comma-separated term per tensor"
        )
    held: dict[str, DimFactors] = {}
    sizes: dict[str, int] = {}
    made = []
    shapes = ", ".join(str(tensor.shape) for tensor in (*tensors, *call.results))
    for term, tensor in zip((*inputs, *outputs), (*tensors, *call.results), strict=True):
        names = term
        if names[:1] == ["..."]:
            lead = len(tensor.shape) - len(names) + 1
            names = [f"...{lead - i}" for i in range(max(lead, 0))] + names[1:]
        if len(names) != len(tensor.shape):
            raise RuleError(f"{call.name}: dims has {' '.join(term)!r} for a tensor of shape {tensor.shape}; write one name per dim")
        for name, size in zip(names, tensor.shape, strict=True):
            if name == "1":
                held[name], sizes[name] = (), 1
            if name not in held:
                sizes[name] = size
                held[name] = draft.factor(name, size, even=name in even.split(), cut=name not in whole.split(), reduction=reduce.get(name))
            if sizes[name] != size:
                raise RuleError(f"{call.name}: factor {name!r} has sizes {sizes[name]} and {size} in shapes {shapes}; use two names")
        made.append([held[name] for name in names])
    for slot in range(len(tensors)):
        draft.put_slot(slot, made[slot])
    for index in range(len(call.results)):
        draft.result(index, made[len(tensors) + index])
    draft.matmul = matmul
    draft.flops = 2 * math.prod(sizes.values()) if draft.matmul else max((r.numel for r in call.results), default=0)
    for name in unread.split():
        draft.ignore(name)
    return apply_linear(draft, **linear)


_TERM = re.compile(r"(\.\.\.)?(\s*([A-Za-z_]\w*|1))*\s*\Z")


def notation_terms(text: str) -> tuple[list[list[str]], list[list[str]]]:
    """Names per dim of every operand and result."""
    left, _, right = text.partition("->")
    return [term.split() for term in left.split(",") if left.strip()], [term.split() for term in right.split(",")]


def is_notation(value: Any) -> str | None:
    """Terms on both sides of one arrow."""
    if isinstance(value, str) and value.count("->") == 1:
        left, right = value.split("->")
        if all(_TERM.match(term.strip()) for term in (*left.split(","), *right.split(","))):
            return None
    return 'must name the dims of every operand and result, as in "... m k, k n -> ... m n"'


def is_reduce_map(value: Any) -> str | None:
    """Factor name to reduction."""
    if isinstance(value, dict) and value and all(r in REDUCTIONS for r in value.values()):
        return None
    return f'must map factors to reductions, as in {{ k = "sum" }}; legal: {", ".join(REDUCTIONS)}'


def check_notation(settings: Mapping[str, Any]) -> str | None:
    """``reduce``, ``whole`` and ``even`` name factors of ``dims``; a summed factor is missing in some result."""
    inputs, outputs = notation_terms(settings["dims"])
    for term in (*inputs, *outputs):
        twice = next((name for name in term if name != "1" and term.count(name) > 1), None)
        if twice is not None:
            return f"dims has factor {twice!r} twice in {' '.join(term)!r}; a factor is one dim of a tensor: use two names"
    given = {name for term in inputs for name in term} | set(settings.get("whole", "").split()) | {"1"}
    made = next((name for term in outputs for name in term if inputs and name not in given), None)
    if made is not None:
        return f"dims has factor {made!r} in a result and in no operand, so nothing says how to cut it; name it under whole"
    known = {name for term in (*inputs, *outputs) for name in term} - {"...", "1"}
    for key in ("reduce", "whole", "even"):
        value = settings.get(key, ())
        for name in value.split() if isinstance(value, str) else value:
            if name not in known:
                return f"{key} names factor {name!r}, which is in none of the dims; legal: {', '.join(sorted(known)) or 'none'}"
    return None


FAMILIES = (
    Family(name="einsum", build=einsum),
    Family(name="pointwise", build=pointwise, keys={**LINEAR, "unread": is_text, "flops": is_number, "filled": is_flag}),
    Family(name="cast", build=cast),
    Family(name="add_product", build=add_product, keys={"factors": is_text}, required=("factors",)),
    Family(name="unscale", build=unscale),
    Family(name="replicated", build=replicated, keys={**LINEAR, "reason": is_text}, required=("reason",)),
    Family(
        name="along",
        build=along,
        keys={**LINEAR, "whole": is_dims, "unread": is_text, "view": is_flag, "flops": is_number, "writes": is_text},
        required=("whole",),
    ),
    Family(name="reduce", build=reduce, keys={**LINEAR, "reduction": is_reduction, "even": is_flag, "filled": is_flag}),
    Family(name="vector_norm", build=vector_norm),
    Family(name="statistics", build=statistics, keys={"whole": is_dims, "way": is_text}, required=("whole", "way")),
    Family(name="factory", build=factory, keys={"ordered": is_flag}),
    Family(
        name="dims",
        build=notation,
        keys={
            **LINEAR,
            "dims": is_notation,
            "reduce": is_reduce_map,
            "whole": is_text,
            "even": is_text,
            "matmul": is_flag,
            "unread": is_text,
        },
        required=("dims",),
        check=check_notation,
    ),
)
