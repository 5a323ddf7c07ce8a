"""Meshes: what is read, what is refused, where devices sit."""

from __future__ import annotations

import numpy as np
import pytest

from solver_shard.errors import InputError
from solver_shard.mesh import Axis, Mesh, parse_split


@pytest.mark.parametrize(
    ("text", "names", "shape"),
    [
        ("dp=32,tp=8", ("dp", "tp"), (32, 8)),
        ("8", ("d0",), (8,)),
        ("4,2", ("d0", "d1"), (4, 2)),
        (" dp = 2 , tp=1 ", ("dp", "tp"), (2, 1)),
        ("dp=2,tp=4x2", ("dp", "tp.0", "tp.1"), (2, 4, 2)),
    ],
)
def test_meshes_are_read_outermost_axis_first(text: str, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    mesh = Mesh.parse(text)
    assert (mesh.names, mesh.shape) == (names, shape)
    assert Mesh.parse(str(mesh)) == mesh


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "dp=0",
        "dp=-1",
        "dp=",
        "=4",
        "dp=4,",
        "dp=4,dp=2",
        "dp=4;tp=2",
        "1e3",
        "a b=2",
        "9999999",
        "²",
        "2x4",
        "tp=2x",
        "tp=x2",
        "tp.0=2",
        "dp=2x2,dp=4",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        Mesh.parse(text)


def test_sizes_are_whole_numbers() -> None:
    for size in (0, -1, True, 2.0):
        with pytest.raises(InputError, match="whole number of at least 1"):
            Mesh(axes=(Axis(name="dp", size=size),))  # type: ignore[arg-type]


def test_devices_are_numbered_in_row_major_order() -> None:
    mesh = Mesh.parse("a=2,b=3,c=4")
    assert [mesh.stride(a) for a in range(3)] == [12, 4, 1]
    assert list(mesh.coordinates()) == [tuple(map(int, c)) for c in np.ndindex(2, 3, 4)]


def test_an_unknown_axis_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="unknown mesh axis 'pp'; this mesh has dp, tp"):
        Mesh.parse("dp=2,tp=4").index("pp")


@pytest.mark.parametrize(
    ("text", "sizes"), [("dp=3,tp=8", {"tp": (4, 2)}), ("dp=4,tp=6", {"dp": (2, 2), "tp": (3, 2)}), ("16", {"d0": (2, 4, 2)})]
)
def test_sub_axes_number_the_devices_as_the_axis_did(text: str, sizes: dict[str, tuple[int, ...]]) -> None:
    mesh = Mesh.parse(text)
    fine = mesh.split(sizes)
    assert fine.whole == mesh
    assert Mesh.parse(str(fine)) == fine
    assert fine.size == mesh.size
    for a, axis in enumerate(mesh.axes):
        parts = fine.positions(axis.name)
        assert fine.stride(parts[-1]) == mesh.stride(a)
        for coarse, part in zip(mesh.coordinates(), fine.coordinates(), strict=True):
            assert coarse[a] == np.ravel_multi_index([part[p] for p in parts], [fine.shape[p] for p in parts])
    assert fine.spread(mesh.names) == tuple(axis.parent or axis.name for axis in fine.axes)
    assert fine.joined(fine.names) == mesh.names


def test_splits_are_shown_as_a_person_reads_them() -> None:
    mesh = Mesh.parse("dp=16,tp=16").split(parse_split("tp=8x2"))
    assert str(mesh) == "dp=16,tp=8x2"
    assert mesh.splits == ("tp=16 as tp.0=8,tp.1=2",)
    assert mesh.inner == {2}
    assert mesh.joined(("tp.1", "dp")) == ("dp", "tp.1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=3x2", "cannot be split as 3x2; .* whose product is 8, as in tp=4x2"),
        ("tp=8x1", "each at least 2"),
        ("pp=2x2", "unknown mesh axis 'pp'"),
        ("tp=8", "write AXIS=OUTERxINNER"),
        ("tp=4x2,tp=2x4", "each axis once"),
        ("8x2", "write AXIS=OUTERxINNER"),
    ],
)
def test_wrong_splits_say_what_is_legal(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Mesh.parse("dp=2,tp=8").split(parse_split(text))


def test_parts_cannot_be_split_or_stray() -> None:
    mesh = Mesh.parse("dp=2,tp=4x2")
    with pytest.raises(InputError, match="is a part of 'tp' already"):
        mesh.split({"tp.0": (2, 2)})
    for axes in (
        [Axis(name="tp.0", size=2, parent="tp")],
        [Axis(name="tp.1", size=2, parent="tp"), Axis(name="tp.0", size=2, parent="tp")],
        [Axis(name="tp.0", size=2, parent="tp"), Axis(name="dp", size=2), Axis(name="tp.1", size=2, parent="tp")],
        [Axis(name="tp", size=2), Axis(name="tp.0", size=2, parent="tp"), Axis(name="tp.1", size=2, parent="tp")],
    ):
        with pytest.raises(InputError):
            Mesh(axes=tuple(axes))


@pytest.mark.parametrize(
    ("mesh", "finer", "fits"),
    [
        ("a=2,b_c=4", "a=2,b=2,c=2", True),
        ("a_b_c=8", "a=2,b=2,c=2", True),
        ("a=2,b=2", "a=2,b=2", True),
        ("a_b=4,c_d=4", "a=2,b=2,c=2,d=2", True),
        ("a=2,b_c=8", "a=2,b=2,c=2", False),
        ("a=2,c_b=4", "a=2,b=2,c=2", False),
        ("a=2,b=2", "a=2,b=2,c=2", False),
        ("a=2,b_c=4", "a=2,b=2", False),
    ],
)
def test_neighbouring_axes_as_one_are_those_of_a_finer_mesh(mesh: str, finer: str, fits: bool) -> None:
    other = Mesh.parse(finer)
    assert Mesh.parse(mesh).joins(other.names, other.shape) is fits
