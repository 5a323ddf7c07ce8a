"""DTensor's formulas against DTensor itself, on random layouts."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._collective_utils import MeshTopoInfo, _compute_placement_transition_cost, redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from solver_shard.costs.dtensor import GIB, DTensorCosts, greedy_path
from solver_shard.layout import Layout, P, Placement, R, S

KINDS: tuple[Placement, ...] = (R, S(0), S(1), P("sum"), P("avg"), P("max"))


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(shape))


def legal(layout: Layout) -> bool:
    """No two reductions pending at once, but for sum beside avg."""
    kinds = {p for p in layout if p.is_partial}
    return len(kinds) < 2 or kinds == {P("sum"), P("avg")}


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 100])
@pytest.mark.parametrize("shape", [(4,), (2, 2), (2, 3), (2, 2, 2)])
def test_every_step_costs_what_dtensor_says(shape: tuple[int, ...], devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.device_mesh import _mesh_resources

    monkeypatch.setattr(_mesh_resources, "num_devices_per_host", lambda kind: devices)
    topology = MeshTopoInfo.build_from_mesh.__wrapped__(mesh_of(shape))
    costs = DTensorCosts(mesh_shape=shape, devices_per_host=devices)
    assert list(costs.bandwidth) == topology.mesh_dim_bandwidth
    assert list(costs.latency) == topology.mesh_dim_latency
    rng = random.Random(devices)
    for axis, before, after in itertools.product(range(len(shape)), KINDS, KINDS):
        gib = rng.random() * 4
        theirs = [Layout([p]).to_dtensor((1,))[0] for p in (before, after)]
        assert costs.transition(before, after, axis, gib) == _compute_placement_transition_cost(*theirs, topology, axis, gib)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (2, 3), (2, 2, 2)])
def test_a_redistribution_costs_what_dtensor_says(shape: tuple[int, ...]) -> None:
    mesh, costs, rng = mesh_of(shape), DTensorCosts(mesh_shape=shape, devices_per_host=1), random.Random(0)
    tested = impossible = 0
    while tested < 400:
        src, dst = (Layout(rng.choice(KINDS) for _ in shape) for _ in range(2))
        if not legal(src) or not legal(dst):
            continue
        sizes = torch.Size((rng.choice([8, 24, 1000]), rng.choice([16, 4096])))
        meta = TensorMeta(sizes, (sizes[1], 1), rng.choice([torch.float32, torch.bfloat16]))
        specs = [DTensorSpec(mesh, tuple(layout.to_dtensor(shape)), tensor_meta=meta) for layout in (src, dst)]
        assert costs.redistribute(tuple(sizes), meta.dtype.itemsize, src, dst) == redistribute_cost(*specs), (src, dst, sizes)
        tested += 1
        impossible += math.isinf(redistribute_cost(*specs))
    assert 0 < impossible < tested


def test_a_nested_shard_is_gathered_from_the_right_before_it_is_cut_again() -> None:
    path = greedy_path(Layout.parse("S(0)S(0)"), Layout.parse("RS(0)"))
    assert [(m.axis, m.before, m.after) for m in path] == [(1, S(0), R), (0, S(0), R), (1, R, S(0))]


def test_strided_shards_that_change_are_gathered_minor_axis_first() -> None:
    path = greedy_path(Layout.parse("_S(0)S(0)"), Layout.parse("S(0)S(0)"))
    assert [(m.axis, m.after) for m in path] == [(0, R), (1, R), (0, S(0)), (1, S(0))]
    assert greedy_path(Layout.parse("_S(0)S(0)"), Layout.parse("_S(0)S(0)")) == ()


def test_gigabytes_are_gibibytes() -> None:
    costs = DTensorCosts(mesh_shape=(8,), devices_per_host=1)
    assert costs.local_gib((GIB,), 1, (R,)) == 1.0
    assert costs.all_gather(1 / 16, 0) == pytest.approx(2860, rel=1e-3)  # 64 MiB over eight devices of different hosts
