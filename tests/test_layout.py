"""Placements and layouts: one printed form and one parser, torch.chunk's shapes, DTensor's placements."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from solver_shard.errors import InputError
from solver_shard.layout import REDUCTIONS, Layout, P, Placement, R, S
from solver_shard.mesh import Mesh

placements = st.one_of(st.just(R), st.integers(0, 63).map(S), st.sampled_from(REDUCTIONS).map(P))
layouts = st.lists(placements, min_size=1, max_size=6).map(Layout)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("f32[8, 32]| S(0)R", (S(0), R)),
        ("S(0)R", (S(0), R)),
        ("S(0),R", (S(0), R)),
        (" S( 1 ) , P ", (S(1), P("sum"))),
        ("P(max)R", (P("max"), R)),
        ("dp=S(0)", (S(0), R)),
        ("tp=S(1),dp=P(avg)", (P("avg"), S(1))),
        ("bf16[]| RR", (R, R)),
    ],
)
def test_all_written_forms_are_read(text: str, layout: tuple[Placement, ...]) -> None:
    assert Layout.parse(text, Mesh.parse("dp=2,tp=4")) == layout


@given(layouts)
def test_the_printed_form_is_read_back(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
    assert Layout.parse(layout.format((8, 32), "f32")) == layout
    assert Layout.parse(",".join(map(str, layout))) == layout


@pytest.mark.parametrize("text", ["Q", "S", "S()", "S(-1)", "S(64)", "S(0)x", "P(prod)", "S(0),,R", "dp=S(0)", "R R x", "S(0)|R"])
def test_other_texts_are_refused_without_a_mesh(text: str) -> None:
    with pytest.raises(InputError):
        Layout.parse(text)


@pytest.mark.parametrize("text", ["S(0)", "S(0)RR", "pp=R", "dp=S(0),dp=R", "dp=", "dp=S(0)R"])
def test_texts_that_do_not_fit_the_mesh_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        Layout.parse(text, Mesh.parse("dp=2,tp=4"))


@given(layouts)
def test_conversion_to_dtensor_placements_loses_nothing(layout: Layout) -> None:
    assert Layout.from_dtensor(layout.to_dtensor()) == layout


def test_dtensor_placements_have_the_expected_kinds() -> None:
    assert Layout((R, S(1), P("avg"))).to_dtensor() == [Replicate(), Shard(1), Partial("avg")]


def test_a_placement_that_a_layout_cannot_say_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be said as a layout"):
        Layout.from_dtensor([Partial("product")])


@given(st.integers(0, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=1, max_size=3))
def test_local_shapes_and_offsets_are_those_of_torch_chunk(size: int, axes: list[tuple[bool, int]]) -> None:
    layout = Layout(S(0) if cut else R for cut, _ in axes)
    mesh = Mesh.parse(",".join(str(n) for _, n in axes))
    whole = torch.arange(size)
    for coordinate in mesh.coordinates():
        local = whole
        for (cut, n), rank in zip(axes, coordinate, strict=True):
            if cut:
                chunks = local.chunk(n) if len(local) else (local,)
                local = chunks[rank] if rank < len(chunks) else local[:0]
        assert layout.local_shape((size,), mesh.shape, coordinate) == (len(local),)
        if len(local):
            assert layout.local_offset((size,), mesh.shape, coordinate) == (int(local[0]),)
    shards = math.prod(n for cut, n in axes if cut)
    assert layout.shards(mesh.shape) == shards
    largest = max(layout.local_shape((size,), mesh.shape, c)[0] for c in mesh.coordinates())
    assert layout.local_shape((size,), mesh.shape) == (largest,)


def test_dims_and_reductions_are_only_asked_of_the_placements_that_have_them() -> None:
    assert (S(3).dim, P("max").reduction) == (3, "max")
    with pytest.raises(ValueError, match="cuts no dim"):
        _ = R.dim
    with pytest.raises(ValueError, match="not partial"):
        _ = S(0).reduction
