"""Placements and layouts: one printed form and one parser, torch.chunk's shapes, DTensor's placements and its shards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from solver_shard.errors import InputError
from solver_shard.layout import REDUCTIONS, Layout, P, Placement, R, S, strided
from solver_shard.mesh import Mesh

placements = st.one_of(st.just(R), st.integers(0, 63).map(S), st.sampled_from(REDUCTIONS).map(P))
layouts = st.lists(placements, min_size=1, max_size=6).map(Layout)


@st.composite
def ordered(draw: st.DrawFn) -> Layout:
    """Layouts in which axes that have another one with the same dim to their right may be strided."""
    plain = draw(st.lists(st.one_of(st.just(R), st.integers(0, 2).map(S), st.just(P("sum"))), min_size=1, max_size=6))
    late = draw(st.lists(st.booleans(), min_size=len(plain), max_size=len(plain)))
    last = {p.dim: a for a, p in enumerate(plain) if p.is_shard}
    return Layout(
        strided(p.dim) if p.is_shard and wanted and a < last[p.dim] else p for a, (p, wanted) in enumerate(zip(plain, late, strict=True))
    )


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
        ("_S(0)S(0)", (strided(0), S(0))),
        ("_S( 1 ), S(1)", (strided(1), S(1))),
        ("tp=S(0),dp=_S(0)", (strided(0), S(0))),
    ],
)
def test_all_written_forms_are_read(text: str, layout: tuple[Placement, ...]) -> None:
    assert Layout.parse(text, Mesh.parse("dp=2,tp=4")) == layout


@given(st.one_of(layouts, ordered()))
def test_the_printed_form_is_read_back(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
    assert Layout.parse(layout.format((8, 32), "f32")) == layout
    assert Layout.parse(",".join(map(str, layout))) == layout


@pytest.mark.parametrize(
    "text", ["Q", "S", "S()", "S(-1)", "S(64)", "S(0)x", "P(prod)", "S(0),,R", "dp=S(0)", "R R x", "S(0)|R", "_R", "__S(0)S(0)"]
)
def test_other_texts_are_refused_without_a_mesh(text: str) -> None:
    with pytest.raises(InputError):
        Layout.parse(text)


@pytest.mark.parametrize("text", ["S(0)", "S(0)RR", "pp=R", "dp=S(0),dp=R", "dp=", "dp=S(0)R"])
def test_texts_that_do_not_fit_the_mesh_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        Layout.parse(text, Mesh.parse("dp=2,tp=4"))


@pytest.mark.parametrize("text", ["_S(0)R", "S(0)_S(0)", "_S(0)S(1)", "tp=_S(0),dp=S(0)", "_S(0)_S(0)"])
def test_a_strided_shard_needs_a_plain_one_to_its_right(text: str) -> None:
    with pytest.raises(
        InputError, match=r"_S\(0\) says that axes to the right cut dim 0 first, but none has S\(0\); write S\(0\) here too"
    ):
        Layout.parse(text, Mesh.parse("dp=2,tp=4"))


def test_placements_of_a_split_axis_keep_their_order() -> None:
    assert str(Layout.parse("_S(0)S(0)", Mesh.parse("dp=2,tp=4x2"))) == "_S(0)S(0)S(0)"
    assert str(Layout.parse("_S(0)S(0)", Mesh.parse("dp=4x2,tp=2"))) == "_S(0)_S(0)S(0)"


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("S(0)S(0)S(0)", (0, 1, 2)),
        ("_S(0)S(0)S(0)", (1, 2, 0)),
        ("S(0)_S(0)S(0)", (0, 2, 1)),
        ("_S(0)_S(0)S(0)", (2, 0, 1)),
        ("S(1)RS(0)", (2,)),
    ],
)
def test_axes_cut_from_major_to_minor(text: str, order: tuple[int, ...]) -> None:
    assert Layout.parse(text).order(0) == order


@given(st.one_of(layouts, ordered()), st.data())
def test_conversion_to_dtensor_placements_loses_nothing(layout: Layout, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(2, 4), min_size=len(layout), max_size=len(layout)))
    assert Layout.from_dtensor(layout.to_dtensor(sizes), sizes) == layout


def test_dtensor_placements_have_the_expected_kinds() -> None:
    assert Layout((R, S(1), P("avg"))).to_dtensor((2, 2, 2)) == [Replicate(), Shard(1), Partial("avg")]


def test_the_split_factor_is_how_often_the_plain_axes_to_the_right_cut() -> None:
    assert Layout.parse("_S(0)_S(0)S(1)S(0)S(0)").to_dtensor((2, 3, 5, 2, 4)) == [
        _StridedShard(0, split_factor=8),
        _StridedShard(0, split_factor=8),
        Shard(1),
        Shard(0),
        Shard(0),
    ]


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([Partial("product"), Replicate()], "cannot be said as a layout; legal: Replicate, Shard, _StridedShard, Partial"),
        ([_StridedShard(0, split_factor=2), Shard(0)], r"to its right with Shard\(0\) make 4 shards; legal: that number"),
        ([_StridedShard(0, split_factor=4), Shard(1)], r"to its right with Shard\(0\) make 1 shards"),
        ([Shard(0), _StridedShard(0, split_factor=1)], "make 1 shards"),
    ],
)
def test_placements_that_a_layout_cannot_say_are_refused(placements: list[object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Layout.from_dtensor(placements, (2, 4))


def dtensor_shards(value: torch.Tensor, layout: Layout, sizes: Sequence[int]) -> dict[tuple[int, ...], torch.Tensor]:
    """Every device's shard by torch's own splits, axis after axis from left to right, as ``distribute_tensor`` applies them."""
    shards = {(): value}
    for placement, size in zip(layout.to_dtensor(sizes), sizes, strict=True):
        grown = {}
        for at, local in shards.items():
            pieces = [local] * size if isinstance(placement, Replicate) else placement._split_tensor(local, size, with_padding=False)[0]
            grown |= {(*at, rank): piece for rank, piece in enumerate(pieces)}
        shards = grown
    return shards


@given(ordered().filter(lambda x: len(x) <= 4 and not any(p.is_partial for p in x)), st.data())
def test_even_shards_are_those_of_dtensor(layout: Layout, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(2, 3), min_size=len(layout), max_size=len(layout)))
    shape = tuple(math.prod(sizes[a] for a in layout.order(d)) * data.draw(st.integers(1, 2)) for d in range(3))
    value = torch.arange(math.prod(shape)).reshape(shape)
    for at, shard in dtensor_shards(value, layout, sizes).items():
        start, length = layout.local_offset(shape, sizes, at), layout.local_shape(shape, sizes, at)
        assert torch.equal(shard, value[tuple(slice(s, s + n) for s, n in zip(start, length, strict=True))])


@given(st.integers(1, 120), st.integers(2, 6), st.integers(2, 6))
def test_uneven_shards_are_those_of_dtensor_where_no_shorter_piece_has_a_longer_shard(size: int, left: int, right: int) -> None:
    """DTensor cuts what a left rank has of all pieces anew, so they must lie there longest first."""
    layout, sizes, value = Layout.parse("_S(0)S(0)"), (left, right), torch.arange(size)
    pieces = [torch.arange(n) for _, n in torch_chunks(size, right)]
    shares = [[n for _, n in torch_chunks(len(piece), left)] for piece in pieces]
    sorted_well = all(a >= b for one, other in itertools.pairwise(shares) for a, b in zip(one, other, strict=True))
    same = True
    for at, shard in dtensor_shards(value, layout, sizes).items():
        (start,), (length,) = layout.local_offset((size,), sizes, at), layout.local_shape((size,), sizes, at)
        (first, _), (then, held) = torch_chunks(size, right)[at[1]], torch_chunks(len(pieces[at[1]]), left)[at[0]]
        assert (start, length) == (first + then, held)
        same &= torch.equal(shard, value[start : start + length])
    assert same == sorted_well


def torch_chunks(size: int, count: int) -> list[tuple[int, int]]:
    """Start and length of torch.chunk's pieces, the missing ones empty."""
    whole = torch.arange(size)
    pieces = [*(whole.chunk(count) if size else ()), *[whole[size:]] * count][:count]
    return [(int(piece[0]) if len(piece) else size, len(piece)) for piece in pieces]


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
