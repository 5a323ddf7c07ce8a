"""Bring the operands of a row-wise op to one shape in which merged dims are apart again.

Pointwise ops, norms and losses do not care that (batch, sequence) was flattened: the operands' bases are read with
separate dims, the op runs on those, and its result is a lazy view that is flattened in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from solver_shard.frontends import dims as D
from solver_shard.frontends.draft import Draft, Shape, Value

Slot = tuple[int, int]
"""Raw dim, and which of the separate dims it became."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """Operands of one op in a common form.

    Attributes:
        tensors: one per value, each broadcasting against ``shape``.
        shape: sizes of the common form.
        dims: the raw result as a lazy view of a tensor of that shape.
        position: raw dim to its dim in the common form, for the whole ones.
    """

    tensors: tuple[int, ...]
    shape: Shape
    dims: D.Dims
    position: dict[int, int]


def align(
    draft: Draft,
    values: Sequence[Value],
    shape: Shape,
    *,
    whole: Collection[int] = (),
    expanded: bool = False,
    ordered: bool = False,
    tails: Sequence[int] | None = None,
) -> Aligned:
    """Find the common form of values that broadcast to ``shape``.

    Args:
        whole: raw dims that must be one dim each (softmax dim, normalised dims, the dim of a concatenation).
        expanded: lazily expanded operands must be real (random ops, ops that are not pointwise).
        ordered: keep the raw order of dims; otherwise the order that needs the fewest permutes.
        tails: per value, how many trailing dims of ``shape`` it lacks (row operands of losses and embeddings).
    """
    quick = None if ordered or tails else _same(draft, values, shape, whole, expanded)
    if quick is not None:
        return quick
    rank = len(shape)
    lacks = tuple(tails) if tails is not None else (0,) * len(values)
    padded = [((),) * (rank - lack - len(v.dims)) + v.dims + ((),) * lack for v, lack in zip(values, lacks, strict=True)]
    slots: list[Slot] = []
    sizes: dict[Slot, int] = {}
    parts: list[dict[Slot, D.Group]] = [{} for _ in values]
    lazy: dict[int, D.Group] = {}
    for d, n in enumerate(shape):
        groups = [dims[d] for dims in padded]
        lengths, hollow = _cut(groups, n, d in whole, expanded)
        if hollow is not None:
            lazy[d] = hollow
            continue
        for j, length in enumerate(lengths):
            slots.append((d, j))
            sizes[d, j] = length
        for part, group in zip(parts, groups, strict=True):
            if D.size(group) == 1 and n != 1:
                continue
            if len(lengths) == 1:
                pieces: list[D.Group] | None = [group]
            else:
                pieces = D.match(group, lengths)
            assert pieces is not None
            for j, piece in enumerate(pieces):
                hidden = not expanded and d not in whole and bool(piece) and all(atom[0] == D.BROADCAST for atom in piece)
                part[d, j] = () if hidden else piece
    hidden_slots = {s for s in slots if sizes[s] != 1 and s[0] not in whole and not expanded and not any(part.get(s) for part in parts)}
    every, slots = slots, [s for s in slots if s not in hidden_slots]
    if not ordered:
        slots = _order(slots, parts, values)
    tensors = []
    for value, part, lack in zip(values, parts, lacks, strict=True):
        if not value.dims and not lack and rank:
            tensors.append(draft.plain(value))
            continue
        keep = [slot for slot in slots if slot[0] < rank - lack]
        while keep and not lack and keep[0][0] < rank - len(value.dims):
            keep.pop(0)
        tensors.append(draft.form(value, tuple(part.get(slot, ()) for slot in keep), trim=not lack and not whole))
    common = tuple(sizes[slot] for slot in slots)
    if not any(lacks):
        have = max((len(draft.tensors[t].shape) for t in tensors), default=0)
        lost = len(common) - have
    else:
        lost = 0
    where = {slot: i - lost for i, slot in enumerate(slots)}
    dims: list[D.Group] = []
    for d in range(rank):
        if d in lazy:
            dims.append(lazy[d])
        else:
            mine = [s for s in every if s[0] == d and where.get(s, 0) >= 0]
            dims.append(tuple((D.BROADCAST, 0, sizes[s]) if s in hidden_slots else (where[s], 1, sizes[s]) for s in mine))
    position = {d: where[d, 0] for d in whole if (d, 0) in where}
    return Aligned(tensors=tuple(tensors), shape=common[lost:], dims=tuple(dims), position=position)


def _same(draft: Draft, values: Sequence[Value], shape: Shape, whole: Collection[int], expanded: bool) -> Aligned | None:
    """All operands are the same view of equal bases (or scalars): run on the bases as they are."""
    shaped = [v for v in values if v.dims]
    if not shaped or shaped[0].shape != shape:
        return None
    first, base = shaped[0], draft.base_shape(shaped[0])
    if any(v.dims != first.dims or draft.base_shape(v) != base for v in shaped[1:]):
        return None
    if any(not draft.is_whole(first, d) for d in whole):
        return None
    if expanded and any(atom[0] == D.BROADCAST for group in first.dims for atom in group):
        return None
    tensors = tuple(v.base if v.dims else draft.plain(v) for v in values)
    return Aligned(tensors=tensors, shape=base, dims=first.dims, position={d: first.dims[d][0][0] for d in whole})


def _cut(groups: Sequence[D.Group], n: int, whole: bool, expanded: bool) -> tuple[tuple[int, ...], D.Group | None]:
    """Sizes of the separate dims of one raw dim; or, where every operand is expanded along it, the expanded group."""
    if whole or n == 1:
        return (n,), None
    full = [group for group in groups if D.size(group) == n]
    solid = full if expanded else [group for group in full if D.real(group)]
    if not solid:
        return (), D.solid(full[0]) if full else ((D.BROADCAST, 0, n),)
    with_units = {tuple(atom[2] for atom in group) for group in solid}
    if len(with_units) == 1 and len(solid) == len(full):
        return with_units.pop(), None
    return D.common([D.solid(group) for group in full]), None


def _order(slots: list[Slot], parts: Sequence[dict[Slot, D.Group]], values: Sequence[Value]) -> list[Slot]:
    """Raw order, or the largest operand's own order where that leaves fewer operands to permute."""
    places = [{slot: max(map(D.place, D.real(piece))) for slot, piece in part.items() if D.real(piece)} for part in parts]
    largest = max(range(len(values)), key=lambda i: len(places[i]))
    keys: dict[Slot, tuple[int, int]] = {}
    last = (-1, 0)
    for slot in slots:
        last = keys[slot] = places[largest].get(slot, last)
    own = sorted(slots, key=lambda slot: keys[slot])

    def permuted(order: list[Slot]) -> int:
        return sum([p[s] for s in order if s in p] != sorted(p.values()) for p in places)

    return own if permuted(own) < permuted(slots) else slots
