"""Meshes: what is read, what is refused, where devices sit."""

from __future__ import annotations

import numpy as np
import pytest

from solver_shard.errors import InputError
from solver_shard.mesh import Axis, Mesh


@pytest.mark.parametrize(
    ("text", "names", "shape"),
    [
        ("dp=32,tp=8", ("dp", "tp"), (32, 8)),
        ("8", ("d0",), (8,)),
        ("4,2", ("d0", "d1"), (4, 2)),
        (" dp = 2 , tp=1 ", ("dp", "tp"), (2, 1)),
    ],
)
def test_meshes_are_read_outermost_axis_first(text: str, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    mesh = Mesh.parse(text)
    assert (mesh.names, mesh.shape) == (names, shape)
    assert Mesh.parse(str(mesh)) == mesh


@pytest.mark.parametrize(
    "text", ["", "0", "dp=0", "dp=-1", "dp=", "=4", "dp=4,", "dp=4,dp=2", "dp=4;tp=2", "1e3", "a b=2", "9999999", "²", "2x4"]
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
