"""Every device's shard as a numpy array, and the collectives between them: the meaning of layouts, steps and free moves.

Nothing here knows the rules of ``solver_shard.costs``; a step that those allow must give the right tensor here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from solver_shard.layout import Layout, P

Array = NDArray[np.float64]
Coordinate = tuple[int, ...]
Shards = dict[Coordinate, Array]

_REDUCE = {"sum": np.sum, "avg": np.mean, "max": np.max, "min": np.min}


class WrongStepError(AssertionError):
    """A device would need values that it does not hold."""


def coordinates(mesh_shape: Sequence[int]) -> list[Coordinate]:
    return list(itertools.product(*(range(n) for n in mesh_shape)))


def region(layout: Layout, shape: Sequence[int], mesh_shape: Sequence[int], at: Coordinate) -> tuple[slice, ...]:
    """Where in the global tensor the device's shard sits."""
    sizes, starts = layout.local_shape(shape, mesh_shape, at), layout.local_offset(shape, mesh_shape, at)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def scatter(value: Array, layout: Layout, mesh_shape: Sequence[int], rng: np.random.Generator) -> Shards:
    """Shards of a tensor; what partial axes hold is random, and reduces to the value."""
    partial = [axis for axis, placement in enumerate(layout) if placement.is_partial]
    kinds = {layout[axis].reduction for axis in partial}
    combos = list(itertools.product(*(range(mesh_shape[a]) for a in partial)))
    parts = {combo: rng.integers(-50, 50, value.shape).astype(np.float64) for combo in combos}
    if kinds <= {"sum", "avg"}:
        averaged = math.prod(mesh_shape[a] for a in partial if layout[a].reduction == "avg")
        first = combos[0]
        parts[first] = value * averaged - sum((parts[c] for c in combos[1:]), np.zeros_like(value))
    else:
        (kind,) = kinds
        offset = rng.integers(1, 50, (len(combos), *value.shape)) * (-1 if kind == "max" else 1)
        owner = rng.integers(0, len(combos), value.shape)
        for i, combo in enumerate(combos):
            parts[combo] = value + np.where(owner == i, 0, offset[i])
    return {at: parts[tuple(at[a] for a in partial)][region(layout, value.shape, mesh_shape, at)] for at in coordinates(mesh_shape)}


def rebuild(shards: Shards, layout: Layout, shape: Sequence[int], mesh_shape: Sequence[int]) -> Array:
    """The tensor that shards in this layout stand for; AssertionError when replicas differ or shapes are wrong."""
    full = np.full(tuple(shape), np.nan)
    seen: dict[tuple[Coordinate, ...], Array] = {}
    partial = [axis for axis, placement in enumerate(layout) if placement.is_partial]
    for at in coordinates(mesh_shape):
        pieces = []
        # reduce axis by axis, outermost first: the result must not depend on the order
        for order in (partial, partial[::-1]):
            block = {c: shards[_with(at, partial, c)] for c in itertools.product(*(range(mesh_shape[a]) for a in partial))}
            axes = list(partial)
            for axis in order:
                i = axes.index(axis)
                groups: dict[Coordinate, list[Array]] = {}
                for c, x in block.items():
                    groups.setdefault(c[:i] + c[i + 1 :], []).append(x)
                block = {c: _REDUCE[layout[axis].reduction](np.stack(xs), axis=0) for c, xs in groups.items()}
                axes.pop(i)
            pieces.append(block[()])
        assert np.allclose(pieces[0], pieces[1]), "the reductions do not commute"
        where = region(layout, shape, mesh_shape, at)
        assert full[where].shape == pieces[0].shape, f"device {at}: shard {pieces[0].shape} does not fit {layout}"
        holders = tuple(c for a, c in enumerate(at) if layout[a].is_shard)
        if holders in seen:
            assert np.allclose(seen[holders], pieces[0]), f"replicas of {layout} differ"
        seen[holders] = pieces[0]
        full[where] = pieces[0]
    return full


def collective(
    kind: str, axes: Sequence[int], shards: Shards, before: Layout, after: Layout, shape: Sequence[int], mesh_shape: Sequence[int]
) -> Shards:
    """Run one step on every group; a device uses what the group's members hold, nothing else."""
    axes = sorted(axes)
    was, target = before[axes[0]], after[axes[0]]
    result = {}
    for at in coordinates(mesh_shape):
        group = [_with(at, axes, c) for c in itertools.product(*(range(mesh_shape[a]) for a in axes))]
        held = [shards[member] for member in group]
        if kind == "all_gather":
            result[at] = np.concatenate(held, axis=was.dim)
        elif kind == "all_reduce":
            result[at] = _REDUCE[was.reduction](np.stack(held), axis=0)
        elif kind == "reduce_scatter":
            result[at] = _cut(_REDUCE[was.reduction](np.stack(held), axis=0), target.dim, before, after, shape, mesh_shape, at)
        elif kind == "all_to_all":
            joined = np.concatenate(held, axis=was.dim)
            result[at] = _cut(joined, target.dim, before, after, shape, mesh_shape, at)
        else:
            assert kind == "slice", kind
            result[at] = _cut(shards[at], target.dim, before, after, shape, mesh_shape, at)
    return result


def local_move(shards: Shards, src: Layout, dst: Layout, shape: Sequence[int], mesh_shape: Sequence[int]) -> Shards:
    """Make dst shards from src shards without communication."""
    result = {}
    for at, x in shards.items():
        for dim in range(len(shape)):
            x = _cut(x, dim, src, dst, shape, mesh_shape, at)
        new = [a for a in range(len(src)) if src[a] != dst[a] and dst[a] == P("sum")]
        result[at] = np.zeros_like(x) if any(at[a] for a in new) else x
    return result


def _cut(x: Array, dim: int, before: Layout, after: Layout, shape: Sequence[int], mesh_shape: Sequence[int], at: Coordinate) -> Array:
    """Keep the part of dim that ``after`` gives the device, out of what ``before`` gave it."""
    have, want = region(before, shape, mesh_shape, at)[dim], region(after, shape, mesh_shape, at)[dim]
    if want.stop == want.start:
        return x.take(range(0), axis=dim)
    if not (have.start <= want.start and want.stop <= have.stop):
        raise WrongStepError(f"device {at} holds {have} of dim {dim} and needs {want}")
    return x.take(range(want.start - have.start, want.stop - have.start), axis=dim)


def _with(at: Coordinate, axes: Sequence[int], values: Coordinate) -> Coordinate:
    changed = list(at)
    for axis, value in zip(axes, values, strict=True):
        changed[axis] = value
    return tuple(changed)
