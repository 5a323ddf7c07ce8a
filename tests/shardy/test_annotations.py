"""Sharding annotations: specification section 1."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shardy.annotation_text import open_sharding, parse_mesh, parse_sharding

from solver_shard.errors import InputError
from solver_shard.shardy.sharding import (
    AxisRef,
    DimSharding,
    MeshSpec,
    TensorSharding,
    check_sharding,
    format_sharding,
    mesh_of,
)

MESHES = {
    "mesh": MeshSpec(axes=(("a", 2), ("b", 8), ("c", 3))),
    "empty": MeshSpec(),
    "one": MeshSpec(device_ids=(5,)),
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('#sdy.sharding<@mesh, [{"a"}, {}]>', ((AxisRef("a", 1, 2),), ())),
        ('#sdy.sharding<@mesh, [{"a", "b":(1)2, ?}p1, {?}p0]>', ((AxisRef("a", 1, 2), AxisRef("b", 1, 2)), ())),
        ('#sdy.sharding<@mesh, [{"b":(4)2, "a", "b":(1)4}]>', ((AxisRef("b", 4, 2), AxisRef("a", 1, 2), AxisRef("b", 1, 4)),)),
        ('#sdy.sharding<@mesh, [], replicated={"a", "b":(2)2}, unreduced={"c"}>', ()),
        ('#sdy.sharding<@mesh, [{}], unreduced=max{"c"}>', ((),)),
        ('#sdy.sharding<mesh<["x"=2], device_ids=[1, 0]>, [{"x"}]>', ((AxisRef("x", 1, 2),),)),
        ("#sdy.sharding<@empty, [{?}, {}]>", ((), ())),
        ("#sdy.sharding<@one, []>", ()),
    ],
)
def test_text_of_shardings_goes_in_and_out(text: str, expected: tuple[tuple[AxisRef, ...], ...]) -> None:
    sharding = parse_sharding(text, MESHES)
    assert tuple(dim.axes for dim in sharding.dims) == expected
    assert format_sharding(sharding, MESHES) == text
    assert format_sharding(sharding, MESHES, prefix=False) == text.removeprefix("#sdy.sharding")
    assert parse_sharding(text.removeprefix("#sdy.sharding"), MESHES) == sharding
    check_sharding(sharding, MESHES, len(expected), "value")


@pytest.mark.parametrize("text", ['<["a"=2, "b"=8]>', "<[]>", "<[], device_ids=[3]>", '<["a"=4], device_ids=[3, 2, 1, 0]>'])
def test_text_of_meshes_goes_in_and_out(text: str) -> None:
    assert str(parse_mesh(text)) == text
    assert parse_mesh(f"#sdy.mesh{text}") == parse_mesh(text)


def test_empty_and_maximal_meshes() -> None:
    assert MESHES["empty"].is_empty
    assert not MESHES["empty"].is_maximal
    assert MESHES["one"].is_maximal
    assert not MESHES["one"].is_empty
    assert not MESHES["mesh"].is_empty


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        ('<@mesh, [{"a"}, {}, {}]>', "has 3 dims, the tensor 2"),
        ('<@mesh, [{"a"}, {"a"}]>', '"a" is used twice'),
        ('<@mesh, [{"b":(1)4}, {"b":(2)4}]>', '"b":(1)4 and "b":(2)4 overlap'),
        ('<@mesh, [{"a"}, {}], replicated={"a"}>', '"a" is used twice'),
        ('<@mesh, [{"b"}, {}], unreduced={"b":(2)2}>', '"b" and "b":(2)2 overlap'),
        ('<@mesh, [{"b":(1)2, "b":(2)2}, {}]>', "lie side by side; write them as one axis"),
        ('<@mesh, [{"b":(1)8}, {"b":(3)2}]>', '"b":(3)2 is no part of axis'),
        ('<@mesh, [{"b":(4)1}, {}]>', "SIZE at least 2"),
        ('<@mesh, [{}, {}], replicated={"b", "a"}>', "replicated axes are not in the order of the mesh, which is a, b, c"),
        ('<@mesh, [{}, {}], unreduced={"b":(4)2, "b":(1)2}>', "unreduced axes are not in the order of the mesh"),
        ("<@mesh, [{}p1, {}]>", "dim 0 is empty and closed but has a priority"),
        ("<@one, [{}, {}]>", "a mesh of one device has no dims and no axes"),
    ],
)
def test_shardings_that_break_a_law_are_refused(sharding: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_sharding(parse_sharding(sharding, MESHES), MESHES, 2, "argument %x of @main")
    assert str(caught.value).startswith("argument %x of @main: ")
    assert message in str(caught.value)


def test_only_tensors_are_sharded() -> None:
    check_sharding(open_sharding("mesh", 0), MESHES, None, "token")
    with pytest.raises(InputError, match="only tensors can be sharded"):
        check_sharding(open_sharding("mesh", 1), MESHES, None, "token")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<@other, [{}]>", "unknown mesh @other; the meshes are @mesh, @empty, @one"),
        ('<@mesh, [{"z"}]>', "unknown axis 'z'; the mesh has a, b, c"),
        ('<@mesh, [{"a"]>', "cannot read annotation"),
        ("<@mesh [{}]>", ", was expected"),
        ('<@mesh, [{"a":2}]>', "( was expected"),
        ("<@mesh, [{}]> more", "the end was expected"),
        ("<@mesh, [{}], replicated={?}>", "a name in quotes was expected"),
        ("<@mesh, [{%}]>", "cannot read annotation"),
        ('<@mesh, [{"a"}px]>', "was expected"),
        ("", "< was expected"),
        ("x" * 2_000_000, "at most 1,000,000 are read"),
    ],
)
def test_text_that_is_no_sharding_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_sharding(text, MESHES)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('<["a"=2, "a"=4]>', "named twice"),
        ('<["a"=0]>', "a size is at least 1"),
        ('<["a"=2], device_ids=[0]>', "give each of 0 to 1 once"),
        ('<["a"=2], device_ids=[2, 1]>', "give each of 0 to 1 once"),
        ("<[], device_ids=[0, 1]>", "at most one id"),
    ],
)
def test_meshes_that_break_a_law_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_mesh(text)


def test_a_mesh_written_in_place_needs_no_symbol() -> None:
    mesh = MeshSpec(axes=(("x", 2),))
    assert mesh_of(TensorSharding(mesh=mesh, dims=()), {}) == mesh


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is slow
@given(
    st.lists(st.tuples(st.lists(st.sampled_from(["a", "b", "c"]), unique=True), st.booleans(), st.none() | st.integers(0, 9)), max_size=4)
)
def test_what_is_printed_is_read_again(dims: list[tuple[list[str], bool, int | None]]) -> None:
    sizes = dict(MESHES["mesh"].axes)
    made = tuple(DimSharding(tuple(AxisRef(n, 1, sizes[n]) for n in names), opens, priority) for names, opens, priority in dims)
    sharding = TensorSharding(mesh="mesh", dims=made)
    assert parse_sharding(format_sharding(sharding, MESHES), MESHES) == sharding
