"""Lazy views: a tensor seen through reshapes, permutes and expands, written as groups of atoms of its base's dims.

Every view op of a trace is arithmetic on these groups, so that a chain of views costs nothing and two chains that
mean the same are equal. Flattening (batch, sequence) and splitting it again gives back what was there:

>>> dims = identity((4, 16, 64))
>>> flat = reshape(dims, (64, 64))
>>> flat
(((0, 1, 4), (1, 1, 16)), ((2, 1, 64),))
>>> reshape(flat, (4, 16, 64)) == dims
True

An atom is (dim of the base, stride inside that dim, size); an expanded dim is an atom of dim ``BROADCAST``; an atom of
size 1 is a unit and may be lost or invented freely.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

BROADCAST = -1
Atom = tuple[int, int, int]
Group = tuple[Atom, ...]
Dims = tuple[Group, ...]


def identity(shape: Sequence[int]) -> Dims:
    """Every dim of the base as it is."""
    return tuple(((d, 1, n),) for d, n in enumerate(shape))


def size(group: Iterable[Atom]) -> int:
    """Number of elements along the group."""
    return math.prod(atom[2] for atom in group)


def shape(dims: Dims) -> tuple[int, ...]:
    """Sizes of the view."""
    return tuple(size(group) for group in dims)


def solid(group: Iterable[Atom]) -> Group:
    """The atoms that are not units."""
    return tuple(atom for atom in group if atom[2] != 1)


def real(group: Iterable[Atom]) -> Group:
    """The atoms that are neither units nor expanded."""
    return tuple(atom for atom in group if atom[2] != 1 and atom[0] != BROADCAST)


def place(atom: Atom) -> tuple[int, int]:
    """Sort key: the order in which atoms lie in the base."""
    return (atom[0], -atom[1])


def permute(dims: Dims, order: Sequence[int]) -> Dims:
    """The groups in another order."""
    return tuple(dims[d] for d in order)


def expand(dims: Dims, sizes: Sequence[int]) -> Dims:
    """Groups of size 1 become expanded atoms; missing leading dims are added."""
    padded: Dims = ((),) * (len(sizes) - len(dims)) + dims
    return tuple(group if size(group) == n else ((BROADCAST, 0, n),) for group, n in zip(padded, sizes, strict=True))


def repeat(dims: Dims, repeats: Sequence[int]) -> Dims:
    """torch.repeat: each dim is read over and over, which is an expanded atom before it."""
    padded: Dims = ((),) * (len(repeats) - len(dims)) + dims
    return tuple(group if n == 1 else ((BROADCAST, 0, n), *group) for group, n in zip(padded, repeats, strict=True))


def reshape(dims: Dims, sizes: Sequence[int]) -> Dims | None:
    """The same elements in row-major order under other sizes; None where a size cuts across atoms."""
    atoms = [atom for group in dims for atom in group]
    atoms.reverse()
    result: list[Group] = []
    for n in sizes:
        group: list[Atom] = []
        if n == 1:
            if atoms and atoms[-1][2] == 1:
                group.append(atoms.pop())
        else:
            rest = n
            while rest != 1:
                if not atoms:
                    return None
                dim, stride, length = atoms.pop()
                if length == 0:
                    return None
                if rest % length == 0:
                    group.append((dim, stride, length))
                    rest //= length
                elif length % rest == 0:
                    inner = length // rest
                    group.append((dim, stride * inner if dim != BROADCAST else 0, rest))
                    atoms.append((dim, stride, inner))
                    rest = 1
                else:
                    return None
        result.append(_join(group))
    if any(atom[2] != 1 for atom in atoms):
        return None
    if atoms and result:
        result[-1] = (*result[-1], *reversed(atoms))
    return tuple(result)


def _join(group: list[Atom]) -> Group:
    """Neighbouring parts of one base dim become one atom again."""
    joined: list[Atom] = []
    for atom in group:
        if joined and atom[0] == joined[-1][0] != BROADCAST and atom[2] != 1 and joined[-1][1] == atom[1] * atom[2]:
            joined[-1] = (atom[0], atom[1], joined[-1][2] * atom[2])
        else:
            joined.append(atom)
    return tuple(joined)


def common(groups: Sequence[Group]) -> tuple[int, ...]:
    """Sizes of the finest parts into which every group falls, major to minor.

    >>> common([((0, 1, 4), (1, 1, 6)), ((0, 1, 4), (1, 1, 2), (BROADCAST, 0, 3))])
    (4, 6)
    """
    total = size(groups[0])
    wanted = sorted({edge for group in groups for edge in _edges(group)})
    sizes, last = [], 1
    for edge in wanted:
        if edge % last == 0 and total % edge == 0 and all(_falls(group, edge) for group in groups):
            sizes.append(edge // last)
            last = edge
    return tuple(n for n in sizes if n != 1)


def _edges(group: Group) -> list[int]:
    """Products of the leading sizes: where one part may end."""
    edges, product = [], 1
    for atom in group:
        product *= atom[2]
        edges.append(product)
    return edges


def _falls(group: Group, edge: int) -> bool:
    """Whether the group can be parted there; an expanded atom can be cut at any divisor."""
    product = 1
    for dim, _, length in group:
        if product == edge:
            return True
        if product < edge < product * length:
            return dim == BROADCAST and edge % product == 0 and length % (edge // product) == 0
        product *= length
    return product == edge


def match(group: Group, sizes: Sequence[int]) -> list[Group] | None:
    """Hand the group's solid atoms out to consecutive dims of these sizes; only expanded atoms may be cut for it."""
    atoms = list(reversed(solid(group)))
    parts: list[Group] = []
    for n in sizes:
        rest = n
        part: list[Atom] = []
        while rest != 1:
            if not atoms:
                return None
            dim, stride, length = atoms.pop()
            if length > rest and dim == BROADCAST and length % rest == 0:
                atoms.append((dim, stride, length // rest))
                length = rest
            if rest % length:
                return None
            part.append((dim, stride, length))
            rest //= length
        parts.append(tuple(part))
    return parts if not atoms else None
