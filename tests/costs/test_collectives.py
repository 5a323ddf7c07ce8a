"""Collective times: closed forms by hand, published measurements, and laws."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solver_shard.costs.cluster import PRESETS, Cluster, Device, Level, load_cluster
from solver_shard.costs.collectives import KINDS, MAX_NANOSECONDS, Collectives, Span
from solver_shard.errors import InternalError
from solver_shard.mesh import Mesh

DEVICE = Device(name="test", memory=2**30, memory_bandwidth=1e9, vector_flops=1e12, matmul_flops={})


def cluster(*levels: tuple[int | None, float, float], launch: float = 0.0, topology: str = "switch") -> Cluster:
    """Levels as (size, bytes per nanosecond, latency)."""
    made = tuple(
        Level(name=f"level {i}", size=size, bandwidth=rate * 1e9, latency_ns=latency, topology=topology)
        for i, (size, rate, latency) in enumerate(levels)
    )
    return Cluster(name="test", title="test", device=DEVICE, levels=made, launch_ns=launch)


@pytest.mark.parametrize(
    ("mesh", "axes", "sizes", "spans"),
    [
        ("32,8", (1,), (8, None), [(8, 1), (1, 8)]),
        ("32,8", (0,), (8, None), [(1, 1), (32, 1)]),
        ("32,8", (0, 1), (8, None), [(8, 1), (32, 8)]),
        ("16,4", (0,), (8, None), [(2, 1), (8, 2)]),
        ("16,4", (1,), (8, None), [(4, 1), (1, 4)]),
        ("4,16", (1,), (8, None), [(8, 1), (2, 8)]),
        ("4,16", (0,), (8, None), [(1, 1), (4, 1)]),
        ("8,4,8", (0, 2), (8, None), [(8, 1), (8, 8)]),
        ("8,4,8", (0, 1), (8, None), [(1, 1), (32, 1)]),
        ("64", (0,), (4, 16, None), [(4, 1), (4, 4), (4, 16)]),
        ("4", (0,), (8, None), [(4, 1), (1, 4)]),
        ("1,8", (0,), (8, None), [(1, 1), (1, 1)]),
        # 12 devices in blocks of 8: groups of 3 neighbours; one is cut into 2 and 1
        ("4,3", (1,), (8, None), [(3, 1), (2, 1)]),
    ],
)
def test_spans(mesh: str, axes: tuple[int, ...], sizes: tuple[int | None, ...], spans: list[tuple[int, int]]) -> None:
    times = Collectives(Mesh.parse(mesh), cluster(*((size, 1.0, 0.0) for size in sizes)))
    assert times.spans(axes) == tuple(Span(*span) for span in spans)


@pytest.mark.parametrize(
    ("kind", "nbytes", "expected"),
    [
        # 8 devices, 2 bytes per nanosecond, 100 ns per hop, 10 ns launch: rings for large, trees for small messages
        ("all_gather", 16000, 10 + 7 * 100 + 7000),
        ("reduce_scatter", 16000, 10 + 7 * 100 + 7000),
        ("all_reduce", 16000, 10 + 14 * 100 + 14000),
        ("all_to_all", 16000, 10 + 7 * 100 + 7000),
        ("all_gather", 16, 10 + 3 * 100 + 8),
        ("reduce_scatter", 16, 10 + 3 * 100 + 8),
        ("all_reduce", 16, 10 + 6 * 100 + 16),
        ("all_to_all", 16, 10 + 3 * (100 + 4)),
        ("all_gather", 0, 310),
    ],
)
def test_one_level(kind: str, nbytes: int, expected: int) -> None:
    assert Collectives(Mesh.parse("8"), cluster((None, 2.0, 100.0), launch=10.0)).nanoseconds(kind, (0,), nbytes) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # 4 devices in each of 2 nodes, 10 bytes per nanosecond inside and 1 between; no latency
        ("all_gather", 80_000 * 3 / 4 / 10 + 20_000 / 2),
        ("reduce_scatter", 80_000 * 3 / 4 / 10 + 20_000 / 2),
        ("all_reduce", 2 * (80_000 * 3 / 4 / 10 + 20_000 / 2)),
        ("all_to_all", 80_000 * 3 / 4 / 10 + 80_000 / 2),
    ],
)
def test_a_group_that_spans_nodes_uses_all_their_links(kind: str, expected: float) -> None:
    times = Collectives(Mesh.parse("8"), cluster((4, 10.0, 0.0), (None, 1.0, 0.0)))
    assert times.nanoseconds(kind, (0,), 80_000) == expected


@pytest.mark.parametrize(
    ("kind", "axes", "expected"),
    [
        # a 4 x 8 torus, 1 byte per nanosecond, 10 ns per hop
        ("all_gather", (1,), 4 * 10 + 7000),
        ("all_reduce", (1,), 2 * (4 * 10 + 7000)),
        ("all_to_all", (1,), 4 * 10 + 2 * 8000),
        ("all_to_all", (0,), 2 * 10 + 8000),
        ("all_gather", (0, 1), 4 * 10 + 7000 + 2 * 10 + 750),
        ("all_to_all", (0, 1), 4 * 10 + 2 * 8000 + 2 * 10 + 8000),
    ],
)
def test_a_torus_has_rings_only(kind: str, axes: tuple[int, ...], expected: int) -> None:
    times = Collectives(Mesh.parse("4,8"), cluster((None, 1.0, 10.0), topology="torus"))
    assert times.nanoseconds(kind, axes, 8000) == expected


@pytest.mark.parametrize(
    ("name", "mesh", "kind", "nbytes", "low_us", "high_us"),
    [
        # nccl-tests on 8 GPUs of one DGX H100: bus bandwidth 370 GB/s at large sizes (NVIDIA/nccl-tests#212)
        ("h100", "8", "all_gather", 2**32, 2**32 * 7 / 8 / 370e3 * 0.97, 2**32 * 7 / 8 / 370e3 * 1.03),
        ("h100", "8", "all_reduce", 2**32, 2**32 * 7 / 4 / 370e3 * 0.97, 2**32 * 7 / 4 / 370e3 * 1.03),
        # 8 A100: 235 GB/s (NCCL's own cap, src/graph/tuning.cc)
        ("a100", "8", "all_reduce", 2**32, 2**32 * 7 / 4 / 235e3 * 0.97, 2**32 * 7 / 4 / 235e3 * 1.03),
        # small messages take 15 to 30 microseconds on 8 GPUs
        ("h100", "8", "all_reduce", 1024, 12, 30),
        ("a100", "8", "all_reduce", 1024, 12, 30),
        # 32 H100 in 4 nodes: bus bandwidth 320 GB/s (NVIDIA/nccl#1221); phases that do not overlap may take up to 1.6 times that
        ("h100", "32", "all_reduce", 2**32, 2**32 * 31 / 16 / 320e3 * 0.97, 2**32 * 31 / 16 / 320e3 * 1.6),
    ],
)
def test_presets_are_near_published_measurements(name: str, mesh: str, kind: str, nbytes: int, low_us: float, high_us: float) -> None:
    microseconds = Collectives(Mesh.parse(mesh), load_cluster(name)).nanoseconds(kind, (0,), nbytes) / 1e3
    assert low_us <= microseconds <= high_us


def test_an_unknown_kind_is_a_bug_that_is_named() -> None:
    with pytest.raises(InternalError, match="unknown collective 'broadcast'; legal: all_gather"):
        Collectives(Mesh.parse("2"), load_cluster("h100")).nanoseconds("broadcast", (0,), 1)


meshes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(lambda x: ",".join(map(str, x)))
kinds = st.sampled_from(KINDS)
sizes = st.integers(0, 2**40)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    count = draw(st.integers(1, 3))
    blocks: list[int | None] = []
    size = 1
    for _ in range(count - 1):
        size *= draw(st.integers(2, 9))
        blocks.append(size)
    rate, latency = st.floats(1e-3, 1e3), st.floats(0, 1e6)
    levels = [(block, draw(rate), draw(latency)) for block in (*blocks, None)]
    return cluster(*levels, launch=draw(latency), topology=draw(st.sampled_from(["switch", "torus"])))


@st.composite
def mesh_and_axes(draw: st.DrawFn) -> tuple[Mesh, tuple[int, ...]]:
    mesh = Mesh.parse(draw(meshes))
    axes = draw(st.sets(st.integers(0, len(mesh.axes) - 1), min_size=1))
    return mesh, tuple(sorted(axes))


@given(where=mesh_and_axes(), there=clusters(), kind=kinds, nbytes=st.lists(sizes, min_size=2, max_size=8))
def test_more_bytes_never_take_less_time(where: tuple[Mesh, tuple[int, ...]], there: Cluster, kind: str, nbytes: list[int]) -> None:
    times = Collectives(where[0], there).times(kind, where[1], np.array(sorted(nbytes), dtype=np.int64))
    assert (np.diff(times) >= 0).all()
    assert times.dtype == np.int64


@given(
    where=mesh_and_axes(),
    there=clusters(),
    kind=kinds,
    nbytes=sizes,
    level=st.integers(0, 2),
    slower=st.floats(1, 1e3),
    later=st.floats(0, 1e5),
)
def test_a_slower_link_never_takes_less_time(
    where: tuple[Mesh, tuple[int, ...]], there: Cluster, kind: str, nbytes: int, level: int, slower: float, later: float
) -> None:
    at = level % len(there.levels)
    changed = dataclasses.replace(
        there.levels[at], bandwidth=there.levels[at].bandwidth / slower, latency_ns=there.levels[at].latency_ns + later
    )
    worse = dataclasses.replace(there, levels=(*there.levels[:at], changed, *there.levels[at + 1 :]))
    before, after = (Collectives(where[0], c).nanoseconds(kind, where[1], nbytes) for c in (there, worse))
    assert after >= before


@given(where=mesh_and_axes(), there=clusters(), kind=kinds, nbytes=sizes)
def test_only_groups_of_one_device_are_free(where: tuple[Mesh, tuple[int, ...]], there: Cluster, kind: str, nbytes: int) -> None:
    mesh, axes = where
    time = Collectives(mesh, dataclasses.replace(there, launch_ns=1.0)).nanoseconds(kind, axes, nbytes)
    assert (time == 0) == all(mesh.shape[a] == 1 for a in axes)


@given(where=mesh_and_axes(), there=clusters(), kind=kinds, nbytes=sizes, at=st.integers(0, 3))
def test_an_axis_of_size_one_changes_no_time(where: tuple[Mesh, tuple[int, ...]], there: Cluster, kind: str, nbytes: int, at: int) -> None:
    mesh, axes = where
    at = min(at, len(mesh.axes))
    shape = [*mesh.shape[:at], 1, *mesh.shape[at:]]
    wider = Mesh.parse(",".join(map(str, shape)))
    moved = tuple(a + (a >= at) for a in axes)
    expected = Collectives(mesh, there).nanoseconds(kind, axes, nbytes)
    assert Collectives(wider, there).nanoseconds(kind, moved, nbytes) == expected
    assert Collectives(wider, there).nanoseconds(kind, (*moved, at), nbytes) == expected


@st.composite
def split_meshes(draw: st.DrawFn) -> tuple[Mesh, Mesh]:
    """A mesh and the same with one axis split."""
    outer, inner = draw(st.integers(2, 6)), draw(st.integers(2, 6))
    shape = draw(st.lists(st.integers(1, 5), max_size=2))
    at = draw(st.integers(0, len(shape)))
    mesh = Mesh.parse(",".join(map(str, [*shape[:at], outer * inner, *shape[at:]])))
    return mesh, mesh.split({f"d{at}": (outer, inner)})


@given(meshes=split_meshes(), there=clusters(), kind=kinds, nbytes=sizes, data=st.data())
def test_all_parts_of_an_axis_together_take_the_time_of_the_axis(
    meshes: tuple[Mesh, Mesh], there: Cluster, kind: str, nbytes: int, data: st.DataObject
) -> None:
    mesh, fine = meshes
    axes = data.draw(st.sets(st.integers(0, len(mesh.axes) - 1), min_size=1).map(sorted))
    parts = [p for a in axes for p in fine.positions(mesh.names[a])]
    assert Collectives(fine, there).nanoseconds(kind, parts, nbytes) == Collectives(mesh, there).nanoseconds(kind, axes, nbytes)


@pytest.mark.parametrize(("axes", "expected"), [((0, 1), 4 * 10 + 7000), ((1,), 2 * (1 * 10 + 4000)), ((0,), 2 * (2 * 10 + 6000))])
def test_parts_of_a_ring_share_its_links(axes: tuple[int, ...], expected: int) -> None:
    times = Collectives(Mesh.parse("a=4x2"), cluster((None, 1.0, 10.0), topology="torus"))
    assert times.nanoseconds("all_gather", axes, 8000) == expected


@pytest.mark.parametrize("name", PRESETS)
def test_the_rightmost_axis_is_never_slower(name: str) -> None:
    times = Collectives(Mesh.parse("8,8"), load_cluster(name))
    for kind in KINDS:
        for nbytes in (8, 2**20, 2**30):
            assert times.nanoseconds(kind, (1,), nbytes) <= times.nanoseconds(kind, (0,), nbytes)


def test_absurd_sizes_stay_within_integers() -> None:
    slow = cluster((None, 1e-5, 1e9), launch=1e9)
    assert Collectives(Mesh.parse("1000,1000"), slow).nanoseconds("all_to_all", (0, 1), 2**62) == MAX_NANOSECONDS
