"""Which axes a factor may be cut along: what the tensors agree on from the major end, then what nothing stands against.

``major_axes`` finds the longest list of axes that the tensors of an op can agree on for a factor, ``cut`` shortens a list before
the first axis that one of two tests objects to: ``across`` (another factor of the tensor uses the axis) and ``within`` (the tensor
keeps the axis replicated or unreduced, or its dim is closed or cannot be cut evenly).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from solver_shard.annotations import AxisRef
from solver_shard.propagation.axes import contains, is_prefix, prefix_without_overlaps
from solver_shard.propagation.graph import Direction
from solver_shard.propagation.projection import TensorFactors

Axes = tuple[AxisRef, ...]


def major_axes(tensors: Sequence[TensorFactors], operands: int, factor: int, direction: Direction) -> Axes:
    """The axes that the tensors agree on for a factor, ignoring conflicts with other factors.

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
