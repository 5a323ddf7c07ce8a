"""Shardings of tensors as shardings of a rule's factors, and back.

The axes that cut a dim are handed to the dim's factors, major to minor, each factor taking what fits its size; an axis that
reaches over two factors is split. What a factor that is not the last cannot take (sizes without a common divisor) is kept as its
overflow, so that the dim can be put together again.

>>> rule = ShardingRule(sizes=(2, 4), operands=(((0, 1),),), results=(((0,), (1,)),))
>>> x = AxisRef("x", 1, 4)
>>> sharding = TensorSharding(mesh="mesh", dims=(DimSharding((x, AxisRef("y", 1, 2))),))
>>> found = project(sharding, rule.operands[0], rule.sizes)
>>> [found.factors[f].axes for f in (0, 1)]
[(AxisRef(name='x', pre=1, size=2),), (AxisRef(name='x', pre=2, size=2), AxisRef(name='y', pre=1, size=2))]
>>> unproject(found, rule.operands[0], rule.sizes, "mesh") == sharding
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from solver_shard.rules.rule import FactorDims
from solver_shard.shardy.graph import Direction
from solver_shard.shardy.sharding import (
    AxisRef,
    DimSharding,
    MeshSpec,
    TensorSharding,
    append_merged,
    contains,
    is_prefix,
    is_strict_list_prefix,
    prefix_without_overlaps,
)


@dataclass(slots=True)
class FactorSharding:
    """How one tensor cuts one factor.

    Attributes:
        axes: major to minor.
        closed: no axes may be added.
        minor_most: the factor is the last of its dim, so that padding is allowed.
        overflow: axes of the dim that this factor could not take; the factors after it are then not to be cut.
    """

    axes: tuple[AxisRef, ...] = ()
    closed: bool = False
    minor_most: bool = False
    overflow: tuple[AxisRef, ...] = ()


@dataclass(slots=True)
class TensorFactors:
    """How one tensor cuts its factors; factors that a dim's overflow leaves unreachable are absent."""

    factors: dict[int, FactorSharding]
    replicated: tuple[AxisRef, ...] = ()
    unreduced: tuple[AxisRef, ...] = ()
    reduction: str = "sum"

    def shards(self) -> int:
        """Into how many parts the tensor is cut."""
        return math.prod(axis[2] for factor in self.factors.values() for axis in (*factor.axes, *factor.overflow))


def project(sharding: TensorSharding | None, dims: FactorDims, sizes: Sequence[int]) -> TensorFactors:
    """The factors of a tensor with these dims; a missing sharding is open and empty."""
    factors: dict[int, FactorSharding] = {}
    for position, held in enumerate(dims):
        dim = sharding.dims[position] if sharding else None
        _project_dim(factors, dim.axes if dim else (), not dim.open if dim else False, held, sizes)
    if sharding is None:
        return TensorFactors(factors)
    return TensorFactors(factors, sharding.replicated, sharding.unreduced, sharding.reduction)


def _project_dim(
    factors: dict[int, FactorSharding], axes: Sequence[AxisRef], closed: bool, held: Sequence[int], sizes: Sequence[int]
) -> None:
    queue = list(reversed(axes))
    for index, factor in enumerate(held):
        if index == len(held) - 1:
            rest: list[AxisRef] = []
            while queue:
                append_merged(rest, queue.pop())
            factors[factor] = FactorSharding(tuple(rest), closed, True)
            return
        left, taken = sizes[factor], list[AxisRef]()
        while queue:
            name, pre, size = queue[-1]
            piece = math.gcd(left, size)
            if size > 1 and piece == 1:
                break
            queue.pop()
            if piece < size:
                queue.append(AxisRef(name, pre * piece, size // piece))
            taken.append(AxisRef(name, pre, piece))
            left //= piece
        factors[factor] = FactorSharding(tuple(taken), closed, False)
        if left > 1 and queue:
            overflow: list[AxisRef] = []
            while queue:
                append_merged(overflow, queue.pop())
            factors[factor].overflow = tuple(overflow)
            factors[held[index + 1]] = FactorSharding((), True, index + 2 == len(held))
            return


def unproject(tensor: TensorFactors, dims: FactorDims, sizes: Sequence[int], mesh: str | MeshSpec) -> TensorSharding:
    """The sharding of a tensor whose factors are cut so; axes that would need a strided dim are left out."""
    made = []
    for held in dims:
        closed, axes = False, list[AxisRef]()
        for factor in held:
            sharding = tensor.factors[factor]
            closed = closed or sharding.closed
            _add(axes, sharding.axes)
            if sharding.overflow:
                _add(axes, sharding.overflow)
                break
            if math.prod(axis[2] for axis in sharding.axes) < sizes[factor]:
                break
        made.append(DimSharding(tuple(axes), not closed))
    return TensorSharding(mesh=mesh, dims=tuple(made), replicated=tensor.replicated, unreduced=tensor.unreduced, reduction=tensor.reduction)


def _add(axes: list[AxisRef], more: Sequence[AxisRef]) -> None:
    """Concatenate, merging at the seam only."""
    for index, axis in enumerate(more):
        if index == 0:
            append_merged(axes, axis)
        else:
            axes.append(axis)


Axes = tuple[AxisRef, ...]


def major_axes(tensors: Sequence[TensorFactors], operands: int, factor: int, direction: Direction) -> Axes:
    """The axes that the tensors agree on for a factor, ignoring conflicts with other factors.

    Which axes a factor may be cut along: what the tensors agree on from the major end, then what nothing stands against.

    ``major_axes`` finds the longest list of axes that the tensors of an op can agree on for a factor, ``cut`` shortens a list before
    the first axis that one of two tests objects to: ``across`` (another factor of the tensor uses the axis) and ``within`` (the tensor
    keeps the axis replicated or unreduced, or its dim is closed or cannot be cut evenly).

    The first ``operands`` tensors are operands. Going forward, results may object but not add; going backward, operands.
    """
    if direction is Direction.NONE:
        return ()
    first, second = tensors[:operands], tensors[operands:]
    if direction is Direction.BACKWARD:
        first, second = second, first
    axes: Axes = ()
    grow = True
    for group in (first, second):
        if group is second and direction is not Direction.BOTH:
            grow = False
        for tensor in group:
            if factor in tensor.factors:
                axes, grow = _agree(axes, tensor.factors[factor].axes, grow)
    return axes


def _agree(known: Axes, seen: Axes, grow: bool) -> tuple[Axes, bool]:
    """Fold one tensor's axes into the list known so far; the second result says whether the list may still grow."""
    found: list[AxisRef] = []
    shared = min(len(known), len(seen))
    for index in range(shared):
        a, b = known[index], seen[index]
        if a == b:
            found.append(a)
        elif is_prefix(b, a):
            if len(seen) > index + 1:
                return (*found, b), False
            found.append(a)
        elif is_prefix(a, b):
            if not grow or len(known) > index + 1:
                return (*found, a), False
            found.append(b)
        else:
            return tuple(found), False
    found.extend(known[shared:])
    if grow:
        found.extend(seen[shared:])
    return tuple(found), grow


def cut(axes: Axes, conservative: bool, whole: Callable[[AxisRef], bool], test: Callable[[AxisRef, int], AxisRef | None]) -> Axes:
    """Shorten a list to what the test lets pass; it gets an axis and the product of the sizes before it."""
    before = 1
    for index, axis in enumerate(axes):
        left = test(axis, before)
        if left is None or (conservative and not whole(left)):
            return axes[:index]
        if left != axis:
            return (*axes[:index], left)
        before *= axis[2]
    return axes


def across(axis: AxisRef, tensor: TensorFactors, factor: int, order: Sequence[int]) -> AxisRef | None:
    """What is left of the axis beside the other factors of the tensor, visited in ``order``."""
    left: AxisRef | None = axis
    for other in order:
        if other != factor and other in tensor.factors:
            held = tensor.factors[other]
            if held.overflow:
                left = prefix_without_overlaps(axis, held.overflow)
                if left is None:
                    return None
                axis = left
            if held.axes:
                left = prefix_without_overlaps(axis, held.axes)
                if left is None:
                    return None
                axis = left
    return axis


def within(axis: AxisRef, tensor: TensorFactors, factor: int, before: int, size: int) -> AxisRef | None:
    """What the tensor lets its factor be cut by: of the axis, or of the last axis that it has already."""
    left = prefix_without_overlaps(axis, tensor.replicated)
    left = prefix_without_overlaps(left, tensor.unreduced) if left else None
    if left is None:
        return None
    held = tensor.factors[factor]
    if any(contains(own, left) for own in held.axes):
        return left
    if not held.closed and not held.overflow:
        if held.minor_most:
            return left
        if size % before == 0:
            piece = math.gcd(size // before, left[2])
            if piece > 1 or left[2] == 1:
                return left if piece == left[2] else AxisRef(left[0], left[1], piece)
    if held.axes and is_prefix(held.axes[-1], left):
        return held.axes[-1]
    return None


# The two ways to settle what the factors of one op are cut by.
#
# ``basic``: factor after factor, all tensors of a factor get the same axes, and any objection stops everybody. ``aggressive``: every
# tensor gets as much of the candidates as it can take; where factors compete for an axis, the one whose source is the largest wins.
#
# Both change the projected tensors in place and return the positions of those that changed.


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a strategy needs to know beside the tensors.

    Attributes:
        sizes: of the factors.
        operands: how many of the tensors are operands; the rest are results.
        directions: per factor, where its axes may flow.
        mesh: the mesh of all tensors.
        elementwise: whether the op is element-wise.
        conservative: never propagate a part of an axis.
    """

    sizes: tuple[int, ...]
    operands: int
    directions: tuple[Direction, ...]
    mesh: MeshSpec
    elementwise: bool = False
    conservative: bool = False

    def is_whole(self, axis: AxisRef) -> bool:
        """Whether this is an axis of the mesh, not a part of one."""
        return axis[1] == 1 and (axis[0], axis[2]) in self.mesh.axes


Strategy = Callable[[Sequence[TensorFactors], Setting], set[int]]


def basic(tensors: Sequence[TensorFactors], setting: Setting) -> set[int]:
    """All tensors of a factor get the same axes; any objection stops everybody."""
    changed: set[int] = set()
    order = _hash_order(len(setting.sizes))
    for factor, size in enumerate(setting.sizes):
        axes = major_axes(tensors, setting.operands, factor, setting.directions[factor])
        if not axes:
            continue

        def test(axis: AxisRef, before: int, factor: int = factor, size: int = size) -> AxisRef | None:
            left: AxisRef | None = axis
            for tensor in tensors:
                left = across(axis, tensor, factor, order)
                if left is not None and factor in tensor.factors:
                    left = within(left, tensor, factor, before, size)
                if left is None:
                    return None
                axis = left
            return axis

        axes = cut(axes, setting.conservative, setting.is_whole, test)
        for position, tensor in enumerate(tensors):
            if factor in tensor.factors and is_strict_list_prefix(tensor.factors[factor].axes, axes):
                tensor.factors[factor].axes = axes
                changed.add(position)
    return changed


def aggressive(tensors: Sequence[TensorFactors], setting: Setting) -> set[int]:
    """Every tensor gets as much as it can take; competing factors are ranked by their sources."""
    count = len(setting.sizes)
    candidates = [major_axes(tensors, setting.operands, f, setting.directions[f]) for f in range(count)]
    if not any(candidates):
        return set()
    changed: set[int] = set()
    order = _hash_order(count)
    ranked = _ranked(tensors, candidates, setting)
    results = range(setting.operands, len(tensors))
    for position in (*results, *range(setting.operands)):
        tensor = tensors[position]
        for factor in ranked:
            held = tensor.factors.get(factor)
            if held is None or not candidates[factor]:
                continue

            def inside(axis: AxisRef, before: int, tensor: TensorFactors = tensor, factor: int = factor) -> AxisRef | None:
                return within(axis, tensor, factor, before, setting.sizes[factor])

            def beside(axis: AxisRef, before: int, tensor: TensorFactors = tensor, factor: int = factor) -> AxisRef | None:
                return across(axis, tensor, factor, order)

            axes = cut(candidates[factor], setting.conservative, setting.is_whole, inside)
            if not is_strict_list_prefix(held.axes, axes):
                continue
            axes = cut(axes, setting.conservative, setting.is_whole, beside)
            if position < setting.operands and setting.elementwise:
                for result in results:
                    theirs = tensors[result].factors.get(factor)
                    if theirs is not None and is_strict_list_prefix(theirs.axes, axes):
                        axes = theirs.axes
            if is_strict_list_prefix(held.axes, axes):
                held.axes = axes
                changed.add(position)
    return changed


def _ranked(tensors: Sequence[TensorFactors], candidates: Sequence[Axes], setting: Setting) -> list[int]:
    """The factors in the order in which they may claim axes."""
    sizes = [math.prod(setting.sizes[f] for f in tensor.factors) for tensor in tensors]

    def key(factor: int) -> tuple[int, int, int, int]:
        source, largest = len(tensors), -1
        for position, tensor in enumerate(tensors):
            held = tensor.factors.get(factor)
            if held is not None and sizes[position] > largest and _begins_with(held.axes, candidates[factor]):
                source, largest = position, sizes[position]
        shards = math.prod(axis[2] for axis in candidates[factor]) if setting.elementwise else 0
        return (-largest, -shards, source, factor)

    return sorted(range(len(candidates)), key=key)


def _begins_with(axes: Axes, start: Axes) -> bool:
    return axes == start or is_strict_list_prefix(start, axes)


@lru_cache
def _hash_order(count: int) -> tuple[int, ...]:
    """The order in which the reference visits the factors of a tensor: that of its hash table.

    Where one axis has to make room for several others, the order can matter (sizes such as 12 or 24).
    """
    buckets = 64
    while buckets * 3 < count * 4:
        buckets *= 2
    return tuple(sorted(range(count), key=lambda factor: factor * 37 % buckets))
