"""Where a raw value lies among the tensors of the cleaned program, and what its placements say of them.

Cleaning reads tensors through lazy views (:mod:`solver_shard.frontends.dims`): a raw value is a tensor of the program whose dims are
parted, merged, permuted or expanded. So a cut of a raw dim is a cut of the part that comes first in it, and a strided shard with the
product of the first parts as split factor is a cut of the part after them:

>>> from solver_shard.layout import R
>>> from solver_shard.frontends.dims import identity
>>> whole, rows_merged = identity((4, 8, 16)), (((0, 1, 4), (1, 1, 8)), ((2, 1, 16),))
>>> through((S(0), R), rows_merged, whole, (2, 2)), through((Strided(0, 4), S(1)), rows_merged, whole, (2, 2))
(S(0)R, S(1)S(2))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from solver_shard.expand.call import Kinds, Strided, kinds_of
from solver_shard.frontends import dims as D
from solver_shard.layout import Layout, Placement, R, S, strided
from solver_shard.program import Op, Program

Seen = tuple[int, D.Dims]
"""A tensor that an op computes or the step is given, and a view of it."""


def roots(program: Program) -> dict[int, Seen]:
    """Every tensor as a view of one that is no view; tensors whose view cuts across dims are their own."""
    found: dict[int, Seen] = {t: (t, D.identity(program.tensors[t].shape)) for t in program.sources()}
    for op in program.ops:
        for t in op.results:
            viewed = _viewed(op, found)
            found[t] = (t, D.identity(program.tensors[t].shape)) if viewed is None else viewed
    return found


def is_view(op: Op) -> bool:
    """Whether the op only shows its operand in another form."""
    return op.name in ("aten.view.default", "aten.permute.default", "aten.expand.default", "aten.alias.default")


def _viewed(op: Op, found: Mapping[int, Seen]) -> Seen | None:
    if not is_view(op):
        return None
    base, dims = found[op.operands[0]]
    if op.name == "aten.view.default":
        shaped = D.reshape(dims, op.attributes["size"])
        return None if shaped is None else (base, shaped)
    if op.name == "aten.permute.default":
        return base, D.permute(dims, op.attributes["dims"])
    return base, D.expand(dims, op.attributes["size"]) if op.name == "aten.expand.default" else dims


def rooted(seen: Seen, of: Mapping[int, Seen]) -> Seen | None:
    """A view of any tensor as a view of what that one shows; None where it cuts across dims."""
    base, dims = of[seen[0]]
    groups = []
    for group in seen[1]:
        atoms: list[D.Atom] = []
        for dim, stride, size in group:
            if dim == D.BROADCAST:
                atoms.append((dim, stride, size))
                continue
            parts = D.reshape((dims[dim],), (D.size(dims[dim]) // (stride * size), size, stride))
            if parts is None:
                return None
            atoms += parts[1]
        groups.append(tuple(atoms))
    return base, tuple(groups)


def through(kinds: Kinds, dims: D.Dims, wanted: D.Dims, mesh_shape: Sequence[int]) -> Layout | None:
    """The layout of one view of a tensor, given the placements of another view of the same tensor.

    None where no layout says it: a cut that falls across dims, a part behind others, a reduction of DTensor's own kind.
    """
    if dims == wanted:  # the orders of axes that parameters may have need no parts
        plain = [strided(kind.dim) if isinstance(kind, Strided) else kind for kind in kinds]
        if all(isinstance(placement, Placement) for placement in plain):
            same = Layout(p for p in plain if isinstance(p, Placement))
            if kinds_of(same, mesh_shape) == kinds:
                return same
    left = {atom: atom[2] for group in dims for atom in group}
    placements = []
    for kind, parts in zip(kinds, mesh_shape, strict=True):
        if not kind.is_shard:
            if not isinstance(kind, Placement):
                return None
            placements.append(kind)
            continue
        atom = _cut(D.solid(dims[kind.dim]), left, kind.split if isinstance(kind, Strided) else 1)
        if atom is None:
            return None
        if atom[0] == D.BROADCAST:
            if any(a[0] == D.BROADCAST for group in wanted for a in group):
                return None
            placements.append(R)  # every device reads the same element
            continue
        even = left[atom] % parts == 0
        left[atom] = left[atom] // parts if even else 0
        place = _place(atom, wanted, left)
        if place is None or (not even and not D.solid(wanted[place]) == D.solid(dims[kind.dim]) == (atom,)):
            return None
        placements.append(S(place))
    return Layout(placements)


def _cut(group: D.Group, left: Mapping[D.Atom, int], split: int) -> D.Atom | None:
    """The part of a dim that an axis cuts: the first that is not cut up yet, behind so many pieces."""
    before = 1
    for atom in group:
        if before == split and left[atom] != 1:
            return atom if left[atom] else None
        before *= left[atom]
    return None


def _place(atom: D.Atom, wanted: D.Dims, left: Mapping[D.Atom, int]) -> int | None:
    """The dim whose outermost part, but for what is cut up, is the outermost part of this atom."""
    pieces = atom[2] // left[atom] if left[atom] else 1
    for e, group in enumerate(wanted):
        for first in D.solid(group):
            if first[0] == atom[0] and first[1] * first[2] == atom[1] * atom[2]:
                return e if math.gcd(first[2], pieces) == pieces else None
            if left.get(first) != 1:
                break
    return None
