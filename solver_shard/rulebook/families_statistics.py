"""Families of reductions whose result over a cut dim is no plain sum or maximum: moments, norms, log-sum-exp, positions of extremes.

Rows (dims that are not reduced) can be cut. Each reduced dim can be cut by an implementation that all-reduces statistics of every
row, after which all devices have the result; with several reduced dims each has its own, as in ``moments:b``.
"""

from __future__ import annotations

import math

from solver_shard.rulebook.draft import Call, Draft, Held
from solver_shard.rulebook.rule import Inside
from solver_shard.rulebook.table import Family, Row


def moments(call: Call, row: Row) -> Draft:
    """Variance, standard deviation, variance and mean: ``moments`` all-reduces sum, sum of squares and count of every row."""
    del row
    draft, rows, reduced = _reduced(call)
    _implement(draft, "moments", reduced, draft.all_reduce(rows, 3, call.tensor("self").dtype))
    return draft


def logsumexp(call: Call, row: Row) -> Draft:
    """``class-statistics`` all-reduces the maximum, then the sum of the exponentials of every row."""
    del row
    draft, rows, reduced = _reduced(call)
    _implement(draft, "class-statistics", reduced, *(draft.all_reduce(rows, 1, call.results[0].dtype) for _ in range(2)))
    return draft


def vector_norm(call: Call, row: Row) -> Draft:
    """Norms of order 0 and 1 are sums, those of infinite order extremes; ``power-sum`` all-reduces a sum of powers for the others."""
    del row
    draft, rows, reduced = _reduced(call)
    order = float(call.attribute("ord", 2))
    plain = {0.0: "sum", 1.0: "sum", math.inf: "max", -math.inf: "min"}.get(order)
    for held in reduced:
        if plain is not None:
            draft.restrict(held, reduction=plain, even=plain != "sum")
    if plain is None:
        _implement(draft, "power-sum", reduced, draft.all_reduce(rows, 1, call.results[0].dtype))
    return draft


def first_extreme(call: Call, row: Row) -> Draft:
    """max, min, argmax and argmin along one dim: ``first-owner`` all-reduces the extreme of every row, then its first position."""
    del row
    if call.attributes.get("dim") is None:
        draft = Draft(call)
        draft.flops = call.tensor("self").numel
        return draft
    draft, rows, reduced = _reduced(call)
    factors = tuple(f for held in rows for f in held)
    value = Inside(kind="all_reduce", rows=factors, width=1, dtype=call.tensor("self").dtype)
    _implement(draft, "first-owner", reduced, value, Inside(kind="all_reduce", rows=factors, width=1, dtype="i64"))
    return draft


def _reduced(call: Call) -> tuple[Draft, list[Held], list[Held]]:
    """Factors of the rows and of the reduced dims, put on operand and results."""
    draft = Draft(call)
    shape = call.shape("self")
    dims = set(call.dims("dim", len(shape)))
    held = draft.letters(shape)
    draft.put("self", held)
    for index, result in enumerate(call.results):
        keep = len(result.shape) == len(shape)
        draft.result(index, [() if d in dims else h for d, h in enumerate(held) if keep or d not in dims])
    draft.flops = math.prod(shape)
    return draft, [h for d, h in enumerate(held) if d not in dims], [h for d, h in enumerate(held) if d in dims]


def _implement(draft: Draft, name: str, reduced: list[Held], *collectives: Inside) -> None:
    several = sum(bool(held) for held in reduced) > 1
    for held in reduced:
        for factor in held:
            draft.implement(f"{name}:{draft.factors[factor].name}" if several else name, held, *collectives)


FAMILIES = (
    Family(name="moments", build=moments, keys={}),
    Family(name="logsumexp", build=logsumexp, keys={}),
    Family(name="vector_norm", build=vector_norm, keys={}),
    Family(name="first_extreme", build=first_extreme, keys={}),
)
