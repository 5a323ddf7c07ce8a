"""Which layouts a tensor may have on a mesh, and which moves between them need no communication.

>>> legal_layouts((8, 3), (2, 4), ("sum",))  # the second dim is too small for 4 shards
(RR, RS(0), RP(sum), S(0)R, S(0)S(0), S(0)P(sum), S(1)R, S(1)S(0), S(1)P(sum), P(sum)R, P(sum)S(0), P(sum)P(sum))
>>> free_move(Layout.parse("S(0)R"), Layout.parse("S(0)S(0)"))  # the right axis cuts what each device already holds
True
>>> free_move(Layout.parse("RS(0)"), Layout.parse("S(0)S(0)"))  # the left axis is the major one: rows would change hands
False
>>> free_move(Layout.parse("RS(0)"), Layout.parse("_S(0)S(0)"))  # here it is the minor one
True
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from solver_shard.layout import STRIDED, Layout, P, Placement, R, S, strided

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MAX_ORDERED = 200
"""Matrices have 11 layouts on two axes, 45 on three, 197 on four and 903 on five; transitions take the cube of that to price."""

_SUM, _AVG = int(P("sum")), int(P("avg"))


def legal_layouts(
    shape: Sequence[int], mesh_shape: Sequence[int], reductions: Sequence[str] = ("sum",), wholes: Sequence[str] | None = None
) -> tuple[Layout, ...]:
    """Every layout that can be executed, in a fixed order: per axis R, then S(0), S(1), ..., then the partials as given.

    Given ``wholes``, the name of the axis that each axis is (a part of), layouts in which several axes cut one dim in another
    order follow: with ``_S(d)`` on some of them. An axis gets it only where one to its right, and not of the same whole axis,
    keeps ``S(d)``: the parts of an axis stay in the order in which they make up the axis. A tensor that would have more than
    ``MAX_ORDERED`` layouts without partials has those of the plain order alone.

    A layout is legal when every dim is at least as long as the number of shards it is cut into (uneven shards are
    fine; torch.chunk may leave the last ones empty), and when its partials commute: one reduction, or sum with avg. A
    mesh axis of size 1 is always R, so that adding one changes nothing.

    >>> legal_layouts((), (2, 1), ("sum",))
    (RR, P(sum)R)
    >>> legal_layouts((8,), (2, 2), (), ("dp", "tp"))
    (RR, RS(0), S(0)R, S(0)S(0), _S(0)S(0))
    """
    options = _placements(len(shape), reductions)
    legal: list[tuple[tuple[Placement, ...], tuple[int, ...]]] = [((), tuple(shape))]
    for size in mesh_shape:
        grown = []
        for prefix, left in legal:
            for placement in options if size > 1 else (R,):
                if placement >= 0:
                    # `left` holds, per dim, how many more shards its length allows
                    if left[placement] < size:
                        continue
                    grown.append(((*prefix, placement), (*left[:placement], left[placement] // size, *left[placement + 1 :])))
                elif placement == R or _commute(placement, prefix):
                    grown.append(((*prefix, placement), left))
        legal = grown
    plain = tuple(Layout(placements) for placements, _ in legal)
    if wholes is None:
        return plain
    every = (*plain, *(other for layout in plain for other in _other_orders(layout, wholes)))
    return every if sum(not any(p.is_partial for p in layout) for layout in every) <= MAX_ORDERED else plain


def _other_orders(layout: Layout, wholes: Sequence[str]) -> Iterator[Layout]:
    """The layouts with the same cuts in another order."""
    cut = [axis for axis, placement in enumerate(layout) if placement.is_shard and placement in layout[axis + 1 :]]
    for late in itertools.product((False, True), repeat=len(cut)):
        if any(late):
            changed = dict(zip(cut, late, strict=True))
            other = Layout(strided(p.dim) if changed.get(axis) else p for axis, p in enumerate(layout))
            if is_ordered(other, wholes):
                yield other


def is_ordered(layout: Layout, wholes: Sequence[str]) -> bool:
    """Whether every strided axis has a plain one to its right that is not of the same whole axis."""
    return all(
        any(p == placement.dim and wholes[axis] != wholes[right] for right, p in enumerate(layout) if right > axis)
        for axis, placement in enumerate(layout)
        if placement.is_strided
    )


def is_legal(layout: Layout, shape: Sequence[int], mesh_shape: Sequence[int], wholes: Sequence[str] | None = None) -> bool:
    """Whether one layout can be executed; the law of ``legal_layouts``, for any reductions.

    >>> is_legal(Layout.parse("S(0)S(0)"), (6,), (2, 4))
    False
    >>> strided = Layout.parse("_S(0)S(0)")
    >>> is_legal(strided, (8,), (2, 4)), is_legal(strided, (8,), (2, 4), ("dp", "tp"))
    (False, True)
    """
    if any(placement.is_strided for placement in layout) and (wholes is None or not is_ordered(layout, wholes)):
        return False
    shards = [1] * len(shape)
    for axis, (placement, size) in enumerate(zip(layout, mesh_shape, strict=True)):
        if size == 1 and placement != R:
            return False
        if placement.is_shard:
            if placement.dim >= len(shape):
                return False
            shards[placement.dim] *= size
        elif placement != R and not _commute(placement, layout[:axis]):
            return False
    return all(length >= count or count == 1 for length, count in zip(shape, shards, strict=True))


def is_even(layout: Layout, shape: Sequence[int], mesh_shape: Sequence[int]) -> bool:
    """Whether all devices hold shards of one size.

    >>> is_even(Layout.parse("S(0)"), (8,), (4,)), is_even(Layout.parse("S(0)"), (6,), (4,))
    (True, False)
    """
    shards = [math.prod(n for p, n in zip(layout, mesh_shape, strict=True) if p.is_shard and p.dim == d) for d in range(len(shape))]
    return all(size % n == 0 for size, n in zip(shape, shards, strict=True))


def free_move(src: Layout, dst: Layout) -> bool:
    """Whether every device can make its ``dst`` shard from its own ``src`` shard.

    Per axis: equal; R → S(d) or _S(d), a slice, which needs every axis that is minor to it in the order of d in ``dst`` to be
    newly cut too; R → P(sum), where coordinate 0 keeps its value and the others take zeros; R → P(avg), P(max) or P(min), where
    all keep theirs.
    """
    for axis, (a, b) in enumerate(zip(src, dst, strict=True)):
        if a == b:
            continue
        if a != R:
            return False
        if b.is_shard:
            order = dst.order(b.dim)
            if any(src[minor] != R for minor in order[order.index(axis) + 1 :]):
                return False
        elif not _commute(b, dst):
            return False
    return True


def free_moves(srcs: Sequence[Layout], dsts: Sequence[Layout]) -> Bools:
    """``free_move`` for all pairs: bool[len(srcs), len(dsts)].

    >>> free_moves([Layout.parse("RR"), Layout.parse("RS(0)")], [Layout.parse("RS(0)")])[:, 0]
    array([ True,  True])
    """
    return free_moves_of(codes_of(srcs), codes_of(dsts))


def free_moves_of(src: Ints, dst: Ints) -> Bools:
    """``free_moves`` on layouts as int codes, int64[n, axes] and int64[m, axes]."""
    axes = src.shape[1]
    commuting = np.array([all(_commute(int(p), row) for p in row if p <= _SUM) for row in dst.tolist()], dtype=np.bool_)
    free = np.ones((len(src), len(dst)), dtype=np.bool_)
    for axis in range(axes):
        a, b = src[:, axis, None], dst[None, :, axis]
        new_slice = b >= 0
        for other in range(axes):
            if other != axis:
                kept = is_minor(dst, other, axis)[None, :] & (src[:, other] != R)[:, None]
                new_slice = new_slice & ~kept
        free &= (a == b) | ((a == R) & (new_slice | ((b <= _SUM) & commuting[None, :])))
    return free


def is_minor(codes: Ints, other: int, axis: int) -> Bools:
    """Per layout, whether ``other`` cuts the dim that ``axis`` cuts, and after it: bool[n].

    >>> is_minor(codes_of([Layout.parse("S(0)S(0)"), Layout.parse("_S(0)S(0)")]), 1, 0)
    array([ True, False])
    """
    step = codes[:, other] - codes[:, axis]  # STRIDED where only the other is strided
    return np.asarray((codes[:, axis] >= 0) & ((step == STRIDED) | ((step == 0) & (other > axis))))


def codes_of(layouts: Sequence[Layout]) -> Ints:
    """Layouts as an int64[n, axes] array of placement codes."""
    if not layouts:
        return np.empty((0, 0), dtype=np.int64)
    axes = len(layouts[0])
    flat = itertools.chain.from_iterable(layouts)
    return np.fromiter(flat, dtype=np.int64, count=len(layouts) * axes).reshape(len(layouts), axes)


def local_sizes(shape: Sequence[int], mesh_shape: Sequence[int], codes: Ints) -> Ints:
    """Per layout and dim, the length of the largest shard (device 0's), by torch.chunk's rule: int64[n, dims]."""
    local = np.tile(np.asarray(shape, dtype=np.int64), (len(codes), 1)).reshape(len(codes), len(shape))
    for axis, size in enumerate(mesh_shape):
        for dim in range(len(shape)):
            cut = (codes[:, axis] == dim) | (codes[:, axis] == STRIDED + dim)
            local[cut, dim] = -(-local[cut, dim] // size)
    return local


def local_numels(shape: Sequence[int], mesh_shape: Sequence[int], layouts: Sequence[Layout]) -> Ints:
    """Elements that the fullest device holds, per layout: int64[n].

    >>> local_numels((5, 3), (2, 2), [Layout.parse("RR"), Layout.parse("S(0)S(1)")])
    array([15,  6])
    """
    return np.asarray(local_sizes(shape, mesh_shape, codes_of(layouts)).prod(axis=1))


def _placements(dims: int, reductions: Sequence[str]) -> tuple[Placement, ...]:
    return (R, *(S(d) for d in range(dims)), *dict.fromkeys(P(reduction) for reduction in reductions))


def _commute(placement: int, others: Sequence[int]) -> bool:
    """Whether a partial can stand beside the others: the reductions over several axes must not depend on their order."""
    return all(other > _SUM or other == placement or (other in (_SUM, _AVG) and placement in (_SUM, _AVG)) for other in others)
