"""Legal layouts and free moves, by hand-written tables and by what they mean on real shards."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_simulator import WrongStepError, local_move, rebuild, scatter

from solver_shard.costs.layouts import free_move, free_moves, is_legal, legal_layouts, local_numels
from solver_shard.layout import Layout, P, R, S, strided
from solver_shard.mesh import Mesh


@pytest.mark.parametrize(
    ("shape", "mesh", "reductions", "expected"),
    [
        ((4,), (2,), (), "R S(0)"),
        ((4,), (2,), ("sum",), "R S(0) P(sum)"),
        ((1,), (2,), (), "R"),
        ((3,), (2, 2), (), "RR RS(0) S(0)R"),
        ((), (2, 2), ("sum",), "RR RP(sum) P(sum)R P(sum)P(sum)"),
        ((4, 4), (1, 2), (), "RR RS(0) RS(1)"),
        ((0,), (2,), ("sum",), "R P(sum)"),
        ((1,), (2,), ("max", "min"), "R P(max) P(min)"),
        ((1,), (2, 2), ("sum", "max"), "RR RP(sum) RP(max) P(sum)R P(sum)P(sum) P(max)R P(max)P(max)"),
    ],
)
def test_legal_layouts(shape: tuple[int, ...], mesh: tuple[int, ...], reductions: tuple[str, ...], expected: str) -> None:
    assert " ".join(map(str, legal_layouts(shape, mesh, reductions))) == expected


@pytest.mark.parametrize(
    ("shape", "mesh", "others"),
    [
        ((8,), "2,2", "_S(0)S(0)"),
        ((3,), "2,2", ""),
        ((8,), "2,1", ""),
        ((8, 8), "2,2", "_S(0)S(0) _S(1)S(1)"),
        ((8,), "2,2,2", "R_S(0)S(0) _S(0)RS(0) _S(0)S(0)R S(0)_S(0)S(0) _S(0)S(0)S(0) _S(0)_S(0)S(0)"),
        ((8,), "a=2,b=2x2", "_S(0)RS(0) _S(0)S(0)R _S(0)S(0)S(0)"),
        ((8,), "a=2x2,b=2", "R_S(0)S(0) _S(0)RS(0) S(0)_S(0)S(0) _S(0)S(0)S(0) _S(0)_S(0)S(0)"),
        ((8,), "a=2x2", ""),
    ],
)
def test_other_orders_follow_the_plain_layouts(shape: tuple[int, ...], mesh: str, others: str) -> None:
    axes = Mesh.parse(mesh)
    plain, every = (legal_layouts(shape, axes.shape, (), wholes) for wholes in (None, axes.wholes))
    assert every[: len(plain)] == plain
    assert " ".join(map(str, every[len(plain) :])) == others


@pytest.mark.parametrize(
    ("dims", "mesh", "ordered"),
    [(2, "2,2,2,2", 197), (2, "2,2,2,2,2", None), (1, "2,2,2,2,2", 122), (3, "2,2,2", 100), (3, "2,2,2,2", None)],
)
def test_tensors_of_too_many_layouts_have_the_plain_order_alone(dims: int, mesh: str, ordered: int | None) -> None:
    axes = Mesh.parse(mesh)
    plain, every = (legal_layouts((64,) * dims, axes.shape, (), wholes) for wholes in (None, axes.wholes))
    assert len(every) == (ordered or len(plain))
    summed = legal_layouts((64,) * dims, axes.shape, ("sum",), axes.wholes)
    assert any(p.is_strided for layout in summed for p in layout) == (ordered is not None)


@pytest.mark.parametrize("mesh", ["2,2", "2,3,2", "a=2,b=2x2", "a=2x2,b=2", "2,2,2,2", "a=2,b=2x2,c=2"])
def test_no_two_layouts_are_the_same_shards(mesh: str) -> None:
    axes = Mesh.parse(mesh)
    layouts = legal_layouts((48, 24), axes.shape, (), axes.wholes)
    shards = {
        tuple((x.local_offset((48, 24), axes.shape, at), x.local_shape((48, 24), axes.shape, at)) for at in axes.coordinates())
        for x in layouts
    }
    assert len(shards) == len(layouts)


def test_sum_and_avg_may_stand_together() -> None:
    found = set(legal_layouts((1,), (2, 2), ("sum", "avg", "max")))
    assert Layout((P("sum"), P("avg"))) in found
    assert Layout((P("sum"), P("max"))) not in found
    assert Layout((P("max"), P("avg"))) not in found


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@given(shape=shapes, mesh=meshes)
def test_is_legal_says_the_same_as_legal_layouts(shape: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    placements = [R, *(S(d) for d in range(3)), P("sum"), P("max"), *(strided(d) for d in range(2))]
    everything = [Layout(x) for x in itertools.product(placements, repeat=len(mesh))]
    legal = legal_layouts(shape, mesh, ("sum", "max"))
    assert legal[0] == Layout.replicated(len(mesh))
    assert set(legal) == {layout for layout in everything if is_legal(layout, shape, mesh)}
    assert len(set(legal)) == len(legal)
    wholes = tuple(map(str, range(len(mesh))))
    ordered = legal_layouts(shape[:2], mesh, ("sum", "max"), wholes)
    assert set(ordered) == {layout for layout in everything if is_legal(layout, shape[:2], mesh, wholes)}
    assert len(set(ordered)) == len(ordered)


@given(shape=shapes, mesh=meshes)
def test_local_numels_are_those_of_device_zero(shape: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    layouts = legal_layouts(shape, mesh)
    layouts += legal_layouts(shape, mesh, (), tuple(map(str, range(len(mesh)))))
    expected = [np.prod(layout.local_shape(shape, mesh), dtype=np.int64) for layout in layouts]
    assert local_numels(shape, mesh, layouts).tolist() == expected


@given(shape=shapes, mesh=meshes, at=st.integers(0, 2))
def test_an_axis_of_size_one_adds_no_layouts(shape: tuple[int, ...], mesh: tuple[int, ...], at: int) -> None:
    at = min(at, len(mesh))
    wider = (*mesh[:at], 1, *mesh[at:])
    assert [Layout((*x[:at], *x[at + 1 :])) for x in legal_layouts(shape, wider)] == list(legal_layouts(shape, mesh))


@pytest.mark.parametrize(
    ("src", "dst", "free"),
    [
        ("S(0)R", "S(0)R", True),
        ("RR", "S(0)R", True),
        ("RR", "S(0)S(0)", True),
        ("RR", "S(0)S(1)", True),
        ("S(0)R", "S(0)S(0)", True),
        ("RS(0)", "S(0)S(0)", False),
        ("RS(1)", "S(0)S(1)", True),
        ("S(0)R", "RR", False),
        ("S(0)R", "S(1)R", False),
        ("RR", "P(sum)R", True),
        ("RR", "P(sum)S(0)", True),
        ("RS(0)", "P(sum)S(0)", True),
        ("RR", "P(max)R", True),
        ("RP(sum)", "P(max)P(sum)", False),
        ("P(sum)R", "RR", False),
        ("P(sum)R", "P(sum)S(0)", True),
        ("P(max)R", "P(max)P(sum)", False),
        ("P(avg)R", "P(avg)P(sum)", True),
        ("RRS(0)", "S(0)RS(0)", False),
        ("RRR", "S(0)RS(0)", True),
        ("RS(0)", "_S(0)S(0)", True),
        ("RR", "_S(0)S(0)", True),
        ("S(0)R", "_S(0)S(0)", False),
        ("_S(0)S(0)", "S(0)S(0)", False),
        ("S(0)RS(0)", "S(0)_S(0)S(0)", True),
        ("RS(0)S(0)", "S(0)S(0)S(0)", False),
        ("RS(0)S(0)", "_S(0)S(0)S(0)", True),
        ("R_S(0)S(0)", "_S(0)_S(0)S(0)", False),
        ("_S(0)RS(0)", "_S(0)_S(0)S(0)", True),
        ("_S(0)S(0)R", "_S(0)S(0)S(0)", False),
    ],
)
def test_free_move(src: str, dst: str, free: bool) -> None:
    assert free_move(Layout.parse(src), Layout.parse(dst)) is free


@pytest.mark.parametrize(("shape", "mesh"), [((6, 4), (2, 2)), ((12, 7), (2, 3)), ((8, 8), (2, 2, 2)), ((5,), (2, 2)), ((7, 5), (3, 2))])
def test_free_moves_are_exactly_those_that_every_device_can_make_alone(shape: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    value = rng.integers(-50, 50, shape).astype(np.float64)
    layouts = legal_layouts(shape, mesh, ("sum",), tuple(map(str, range(len(mesh)))))
    matrix = free_moves(layouts, layouts)
    for i, src in enumerate(layouts):
        shards = scatter(value, src, mesh, rng)
        assert np.array_equal(rebuild(shards, src, shape, mesh), value)
        for j, dst in enumerate(layouts):
            assert matrix[i, j] == free_move(src, dst)
            if any(a.is_partial and b != a for a, b in zip(src, dst, strict=True)):
                assert not matrix[i, j]
                continue
            try:
                moved = np.array_equal(rebuild(local_move(shards, src, dst, shape, mesh), dst, shape, mesh), value)
            except WrongStepError:
                moved = False
            # uneven shards may fit by luck; even ones are free only by rule
            even = all(n % np.prod(mesh) == 0 for n in shape)
            assert moved if matrix[i, j] else not (moved and even), (src, dst)


@given(mesh=meshes, data=st.data())
def test_free_moves_as_a_matrix_and_one_by_one(mesh: tuple[int, ...], data: st.DataObject) -> None:
    layouts = legal_layouts((64, 64), mesh, ("sum", "avg", "max"), tuple(map(str, range(len(mesh)))))
    some = st.lists(st.sampled_from(layouts), min_size=1, max_size=8)
    srcs, dsts = data.draw(some), data.draw(some)
    assert free_moves(srcs, dsts).tolist() == [[free_move(s, d) for d in dsts] for s in srcs]
