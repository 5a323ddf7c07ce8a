"""Algebra of axis references: which contain, precede, overlap or exclude each other.

An axis reference is the triple (name, pre, size): of an axis of size n seen as pre x size x n / (pre * size), the middle part. It
covers the half-open range from ``pre`` to ``pre * size`` on a multiplicative scale. A whole axis is (name, 1, n).

>>> a = AxisRef("a", 1, 8)
>>> prefix_without_overlap(a, AxisRef("a", 4, 2)), prefix_without_overlap(a, AxisRef("a", 1, 2))
(AxisRef(name='a', pre=1, size=4), None)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from solver_shard.annotations import AxisRef


def contains(outer: AxisRef, inner: AxisRef) -> bool:
    """Whether ``inner`` is ``outer`` or a part of it."""
    return outer[0] == inner[0] and outer[1] <= inner[1] and outer[1] * outer[2] >= inner[1] * inner[2]


def is_prefix(a: AxisRef, b: AxisRef) -> bool:
    """Whether ``a`` is ``b`` or its major part."""
    return a[0] == b[0] and a[1] == b[1] and a[2] <= b[2]


def can_coexist(a: AxisRef, b: AxisRef) -> bool:
    """Whether some factorization of the axis has both as products of neighbouring parts."""
    if a[0] != b[0]:
        return True
    start, end, other_start, other_end = a[1], a[1] * a[2], b[1], b[1] * b[2]
    low, high = min(start, other_start), max(start, other_start)
    near, far = min(end, other_end), max(end, other_end)
    if high < near:
        return near % high == 0 and high % low == 0 and far % near == 0
    return high % near == 0


def prefix_without_overlap(axis: AxisRef, other: AxisRef) -> AxisRef | None:
    """The largest major part of ``axis`` that does not overlap with ``other``; None if there is none or they cannot coexist."""
    if axis[0] != other[0]:
        return axis
    if axis == other:  # of an axis of size 1 the range is empty, yet it overlaps itself
        return None
    if not can_coexist(axis, other):
        return None
    if not (axis[1] < other[1] * other[2] and other[1] < axis[1] * axis[2]):
        return axis
    return None if axis[1] >= other[1] else AxisRef(axis[0], axis[1], other[1] // axis[1])


def prefix_without_overlaps(axis: AxisRef, others: Iterable[AxisRef]) -> AxisRef | None:
    """``prefix_without_overlap`` with one after the other."""
    for other in others:
        if axis[0] == other[0]:
            left = prefix_without_overlap(axis, other)
            if left is None:
                return None
            axis = left
    return axis


def is_strict_list_prefix(first: Sequence[AxisRef], second: Sequence[AxisRef]) -> bool:
    """Whether ``second`` begins with ``first``, whose last axis may be a major part of its counterpart, and is longer."""
    if not first:
        return bool(second)
    if len(first) > len(second):
        return False
    last = len(first) - 1
    if any(first[i] != second[i] for i in range(last)):
        return False
    if len(first) == len(second) and first[last] == second[last]:
        return False
    return is_prefix(first[last], second[last])


def append_merged(axes: list[AxisRef], axis: AxisRef) -> None:
    """Append, or lengthen the last axis where the two are neighbouring parts of one axis."""
    if axes:
        last = axes[-1]
        if last[0] == axis[0] and last[1] * last[2] == axis[1] and last[2] > 1 and axis[2] > 1:
            axes[-1] = AxisRef(last[0], last[1], last[2] * axis[2])
            return
    axes.append(axis)
