"""A plan whose mesh has neighbouring axes as one is for a device mesh of all of them, in the same order of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from plan_examples import example
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from solver_shard.errors import InputError
from solver_shard.mesh import Mesh
from solver_shard.plan.plan import Plan
from solver_shard.runtime.apply import check_mesh


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=32)
    yield
    dist.destroy_process_group()


def planned(mesh: str) -> Plan:
    return dataclasses.replace(example(), mesh=Mesh.parse(mesh))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("mesh", ["a=2,b=2,c=2,d_e=4", "a_b_c_d_e=32", "a_b=4,c_d_e=8"])
def test_devices_keep_their_order_where_axes_are_joined(mesh: str) -> None:
    finer = init_device_mesh("cpu", (2,) * 5, mesh_dim_names=tuple("abcde"))
    made = check_mesh(planned(mesh), finer)
    assert made.mesh_dim_names == Mesh.parse(mesh).names
    assert tuple(made.mesh.shape) == Mesh.parse(mesh).shape
    assert made.mesh.flatten().tolist() == finer.mesh.flatten().tolist()


@pytest.mark.usefixtures("group")
def test_other_axes_are_refused() -> None:
    finer = init_device_mesh("cpu", (2,) * 5, mesh_dim_names=tuple("abcde"))
    with pytest.raises(InputError, match="the device mesh is a=2,b=2,c=2,d=2,e=2, the plan is for a=4,b=8"):
        check_mesh(planned("a=4,b=8"), finer)
