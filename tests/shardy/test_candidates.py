"""Factors of one tensor, what tensors agree on, and what is cut: specification sections 4, 6 and 7, without modules."""

from __future__ import annotations

import random

import pytest
from shardy.graphs import MESHES

from solver_shard.shardy.graph import Direction
from solver_shard.shardy.projection import FactorSharding, TensorFactors, across, cut, major_axes, project, unproject, within
from solver_shard.shardy.sharding import AxisRef, DimSharding, TensorSharding, check_sharding

A, B, C, D = (AxisRef(name, 1, 2) for name in "abcd")
BOTH, FORWARD, BACKWARD = Direction.BOTH, Direction.FORWARD, Direction.BACKWARD


def part(pre: int, size: int) -> AxisRef:
    """A part of axis w of size 8."""
    return AxisRef("w", pre, size)


def tensor(*axes: AxisRef, **more: object) -> TensorFactors:
    """A tensor whose only factor, 0, is cut by these axes."""
    return TensorFactors({0: FactorSharding(axes, minor_most=True, **more)})  # type: ignore[arg-type]  # fields of FactorSharding


@pytest.mark.parametrize(
    ("operands", "results", "direction", "expected"),
    [
        ([[A, B]], [[A, C]], BOTH, [A]),
        ([[A], [], [A, B, C]], [[A, B, D]], BOTH, [A, B]),
        ([[part(1, 2), B]], [[part(1, 4)]], BOTH, [part(1, 2)]),
        ([[part(1, 2)]], [[part(1, 4)]], BOTH, [part(1, 4)]),
        ([[part(1, 2)]], [[part(2, 2)]], BOTH, []),
        ([[A]], [[A, B]], FORWARD, [A]),
        ([[A]], [[A, B]], BACKWARD, [A, B]),
        ([[A, B]], [[A]], BACKWARD, [A]),
        ([[A, B]], [[]], FORWARD, [A, B]),
        ([[A, B]], [[C]], FORWARD, []),
        ([[A]], [[A]], Direction.NONE, []),
    ],
)
def test_what_tensors_agree_on(
    operands: list[list[AxisRef]], results: list[list[AxisRef]], direction: Direction, expected: list[AxisRef]
) -> None:
    tensors = [tensor(*axes) for axes in (*operands, *results)]
    assert major_axes(tensors, len(operands), 0, direction) == tuple(expected)


@pytest.mark.parametrize(
    ("held", "axis", "before", "size", "expected"),
    [
        (FactorSharding((), False, True), A, 1, 3, A),  # the last factor may be padded
        (FactorSharding((), True, True), A, 1, 4, None),
        (FactorSharding((A,), True, True), A, 1, 4, A),
        (FactorSharding((), False, False), part(1, 8), 1, 4, part(1, 4)),
        (FactorSharding((), False, False), part(1, 8), 4, 4, None),
        (FactorSharding((), False, False), AxisRef("one", 1, 1), 4, 4, AxisRef("one", 1, 1)),
        (FactorSharding((), False, False, (B,)), A, 1, 4, None),
        (FactorSharding((part(1, 2),), True, True), part(1, 8), 1, 8, part(1, 2)),
    ],
)
def test_what_a_tensor_lets_its_factor_be_cut_by(
    held: FactorSharding, axis: AxisRef, before: int, size: int, expected: AxisRef | None
) -> None:
    assert within(axis, TensorFactors({0: held}), 0, before, size) == expected


def test_replicated_and_unreduced_axes_are_kept() -> None:
    assert within(part(1, 8), TensorFactors({0: FactorSharding((), False, True)}, (part(4, 2),)), 0, 1, 8) == part(1, 4)
    assert within(A, TensorFactors({0: FactorSharding((), False, True)}, (), (A,)), 0, 1, 8) is None


def test_axes_of_other_factors_and_their_overflow_are_left_out() -> None:
    held = TensorFactors({0: FactorSharding(), 1: FactorSharding((part(4, 2),)), 2: FactorSharding((), overflow=(part(2, 2),))})
    assert across(part(1, 8), held, 0, (0, 1, 2)) == part(1, 2)
    assert across(part(4, 2), held, 1, (0, 1, 2)) == part(4, 2)


def test_a_list_is_cut_before_what_is_refused_and_after_what_is_shortened() -> None:
    def shorten(axis: AxisRef, before: int) -> AxisRef | None:
        return {"a": axis, "w": part(1, 2), "b": None}[axis.name]

    def whole(axis: AxisRef) -> bool:
        return axis.name != "w" or axis.size == 8

    assert cut((A, B), False, whole, shorten) == (A,)
    assert cut((A, part(1, 8), A), False, whole, shorten) == (A, part(1, 2))
    assert cut((A, part(1, 8), A), True, whole, shorten) == (A,)


def test_products_are_those_of_the_axes_before() -> None:
    seen = []

    def note(axis: AxisRef, before: int) -> AxisRef:
        seen.append(before)
        return axis

    cut((A, part(1, 8), B), False, lambda axis: True, note)
    assert seen == [1, 2, 16]


def test_what_is_projected_comes_back_where_every_factor_above_is_cut_in_full() -> None:
    rng = random.Random(0)
    mesh = MESHES["mesh"]  # a=2, b=4
    back = 0
    for _ in range(300):
        sizes = tuple(rng.choice((2, 3, 4, 8)) for _ in range(3))
        dims = rng.choice((((0, 1, 2),), ((0, 1), (2,)), ((0,), (1, 2))))
        axes = [AxisRef(name, 1, size) for name, size in mesh.axes]
        rng.shuffle(axes)
        held: list[list[AxisRef]] = [[] for _ in dims]
        for axis in axes[: rng.randint(0, 2)]:
            rng.choice(held).append(axis)
        sharding = TensorSharding(mesh="mesh", dims=tuple(DimSharding(tuple(found), rng.random() < 0.5) for found in held))
        tensors = project(sharding, dims, sizes)
        made = unproject(tensors, dims, sizes, "mesh")
        check_sharding(made, MESHES, len(dims), "made")
        if made.dims == sharding.dims:
            back += 1
        for old, new in zip(sharding.dims, made.dims, strict=True):
            assert old.axes[: len(new.axes)] == new.axes or new.axes[-1].name == old.axes[len(new.axes) - 1].name
        again = unproject(project(made, dims, sizes), dims, sizes, "mesh")
        assert [dim.axes for dim in again.dims] == [dim.axes for dim in made.dims]
    assert back > 200
