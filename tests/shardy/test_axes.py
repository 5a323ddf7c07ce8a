"""Axis algebra: specification section 2."""

from __future__ import annotations

import itertools

import pytest

from solver_shard.shardy.sharding import (
    AxisRef,
    append_merged,
    can_coexist,
    contains,
    is_prefix,
    is_strict_list_prefix,
    prefix_without_overlap,
    prefix_without_overlaps,
)


def a(pre: int = 1, size: int = 8) -> AxisRef:
    """A part of axis a of size 8, by default all of it."""
    return AxisRef("a", pre, size)


B = AxisRef("b", 1, 2)


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [(a(), a(), True), (a(), a(2, 2), True), (a(2, 2), a(), False), (a(1, 4), a(2, 4), False), (a(), B, False)],
)
def test_contains(outer: AxisRef, inner: AxisRef, expected: bool) -> None:
    assert contains(outer, inner) is expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(a(1, 2), a(), True), (a(), a(1, 2), False), (a(2, 2), a(2, 4), True), (a(2, 2), a(), False), (a(), a(), True), (B, a(), False)],
)
def test_is_prefix(first: AxisRef, second: AxisRef, expected: bool) -> None:
    assert is_prefix(first, second) is expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (a(1, 4), a(2, 4), True),  # 1, 2, 4, 8 is a chain of divisors
        (AxisRef("c", 1, 4), AxisRef("c", 2, 3), False),  # of size 12: cut at 4 and at 6, which does not divide
        (AxisRef("c", 1, 2), AxisRef("c", 3, 4), False),  # apart, but 2 does not divide 3
        (AxisRef("c", 1, 2), AxisRef("c", 4, 3), True),
        (a(), B, True),
    ],
)
def test_can_coexist(first: AxisRef, second: AxisRef, expected: bool) -> None:
    assert can_coexist(first, second) is expected
    assert can_coexist(second, first) is expected


@pytest.mark.parametrize(
    ("axis", "other", "expected"),
    [
        (a(), B, a()),
        (a(1, 2), a(2, 4), a(1, 2)),
        (a(), a(4, 2), a(1, 4)),
        (a(), a(1, 2), None),
        (a(2, 4), a(), None),
        (a(), a(), None),
        (AxisRef("c", 1, 4), AxisRef("c", 2, 3), None),
        (AxisRef("one", 1, 1), AxisRef("one", 1, 1), None),
    ],
)
def test_prefix_without_overlap(axis: AxisRef, other: AxisRef, expected: AxisRef | None) -> None:
    assert prefix_without_overlap(axis, other) == expected


def test_the_prefix_beside_many_is_taken_one_after_the_other() -> None:
    assert prefix_without_overlaps(a(), [B, a(4, 2), a(2, 2)]) == a(1, 2)
    assert prefix_without_overlaps(a(), [a(4, 2), a(1, 2)]) is None
    assert prefix_without_overlaps(a(), []) == a()


def test_no_prefix_overlaps_with_what_it_was_cut_by() -> None:
    """All parts of an axis of size 24, in pairs, against the devices that they tell apart."""
    parts = [AxisRef("c", p, k) for p in range(1, 25) for k in range(2, 25) if 24 % (p * k) == 0]
    for axis, other in itertools.product(parts, parts):
        left = prefix_without_overlap(axis, other)
        if left is not None:
            assert is_prefix(left, axis)
            assert left.pre * left.size <= other.pre or other.pre * other.size <= left.pre


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([], [], False),
        ([], [B], True),
        ([B], [B], False),
        ([B], [B, a()], True),
        ([a(1, 2)], [a()], True),
        ([a(1, 2)], [a(), B], True),
        ([a(1, 2), B], [a(), B], False),
        ([B, a(1, 2)], [B, a(1, 4)], True),
        ([B, a()], [B], False),
    ],
)
def test_strict_prefixes_of_lists(first: list[AxisRef], second: list[AxisRef], expected: bool) -> None:
    assert is_strict_list_prefix(first, second) is expected


@pytest.mark.parametrize(
    ("axes", "more", "expected"),
    [
        ([], B, [B]),
        ([a(1, 2)], a(2, 4), [a()]),
        ([a(1, 2)], a(4, 2), [a(1, 2), a(4, 2)]),
        ([a(2, 2)], a(1, 2), [a(2, 2), a(1, 2)]),
        ([a(1, 2), B], a(2, 2), [a(1, 2), B, a(2, 2)]),
    ],
)
def test_neighbouring_parts_are_merged_on_append(axes: list[AxisRef], more: AxisRef, expected: list[AxisRef]) -> None:
    append_merged(axes, more)
    assert axes == expected
