"""Every transition, run step by step on real data, keeps the tensor; bytes are those that the cost model counted."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from worlds import after_step, moved

from solver_shard.costs.cluster import load_cluster
from solver_shard.costs.layouts import free_move, legal_layouts
from solver_shard.costs.model import CostModel
from solver_shard.errors import InternalError
from solver_shard.layout import Layout, R
from solver_shard.mesh import Mesh
from solver_shard.ops.shards import Parts, boxes, coordinates, groups, join, split
from solver_shard.plan.plan import ReshardStep
from solver_shard.runtime.collectives import all_reduce_over
from solver_shard.verification.simulate import World

SHAPES = {
    "2": [(4,), (5, 3)],
    "3": [(4, 6), (7, 3)],
    "2,2": [(4, 4), (7, 5)],
    "3,2": [(6, 12), (7, 8)],
    "2,1,2": [(5, 4)],
    "2,2,2": [(9, 8)],
}


def spread(full: torch.Tensor, layout: Layout, mesh: Mesh, draw: random.Random) -> Parts:
    """Distribute a tensor; where reductions are pending, devices differ, and replicas agree."""
    parts = split(full, Layout(R if p.is_partial else p for p in layout), mesh)
    pending = [axis for axis, placement in enumerate(layout) if placement.is_partial]
    terms = list(itertools.product(*(range(mesh.shape[axis]) for axis in pending)))
    owner, noise = draw.choice(terms), {term: float(draw.randint(1, 9)) for term in terms}
    noise[owner] -= sum(noise.values())
    averaged = math.prod(mesh.shape[axis] for axis in pending if layout[axis].reduction == "avg")
    extreme = {"max": -1, "min": 1}.get(layout[pending[0]].reduction if pending else "sum")
    made = []
    for part, at in zip(parts, coordinates(mesh), strict=True):
        term = tuple(at[axis] for axis in pending)
        if extreme is not None:
            made.append(part if term == owner else part + extreme * noise[term])
        else:
            made.append(part * (averaged if term == owner else 0) + noise[term])
    return tuple(made)


@pytest.mark.parametrize("reductions", [("sum",), ("avg", "sum"), ("max",), ("min",)], ids="+".join)
@pytest.mark.parametrize(("text", "shape"), [(m, s) for m, shapes in SHAPES.items() for s in shapes], ids=str)
def test_transitions_keep_the_tensor(text: str, shape: tuple[int, ...], reductions: tuple[str, ...]) -> None:
    mesh, draw = Mesh.parse(text), random.Random(0)
    torch.manual_seed(0)
    table = CostModel(mesh, load_cluster("h100")).transitions(shape, "f64", reductions)
    full = torch.randn(shape, dtype=torch.float64)
    pairs = [(a, b) for a, b in itertools.product(table.layouts, repeat=2) if table.costs[table.index[a], table.index[b]] < 10**18]
    world = World(mesh)
    for before, after in draw.sample(pairs, min(60, len(pairs))):
        parts = spread(full, before, mesh, draw)
        torch.testing.assert_close(join(parts, before, shape, mesh, exact=False), full)
        for step in table.path(before, after):
            named = ReshardStep(
                kind=step.kind, axes=tuple(mesh.names[a] for a in step.axes), nbytes=step.nbytes,
                nanoseconds=0, before=step.before, after=step.after,
            )  # fmt: skip
            parts = after_step(world, parts, named, shape)
            assert [tuple(part.shape) for part in parts] == [box.length for box in boxes(step.after, shape, mesh)]
        torch.testing.assert_close(join(parts, after, shape, mesh), full)
    assert sum(world.counts.values()) > 0


@pytest.mark.parametrize(
    ("text", "shape"),
    [("2,2", (4, 4)), ("2,2", (7, 5)), ("3,2", (7, 8)), ("2,2,2", (9, 8)), ("2,2,2", (17,)), ("a=2,b=2x2", (9,)), ("a=2x2,b=2", (10, 8))],
)
def test_every_transition_from_or_to_another_order_keeps_the_tensor(text: str, shape: tuple[int, ...]) -> None:
    mesh, draw = Mesh.parse(text), random.Random(0)
    table = CostModel(mesh, load_cluster("h100")).transitions(shape, "f64", ("sum",), orders=True)
    full = torch.randn(shape, dtype=torch.float64)
    pairs = [(a, b) for a, b in itertools.product(table.layouts, repeat=2) if table.costs[table.index[a], table.index[b]] < 10**18]
    strided = [(a, b) for a, b in pairs if any(p.is_strided for p in (*a, *b))]
    assert strided
    world = World(mesh)
    for before, after in draw.sample(strided, min(80, len(strided))):
        parts = spread(full, before, mesh, draw)
        for step in table.path(before, after):
            axes = tuple(mesh.names[a] for a in step.axes)
            named = ReshardStep(kind=step.kind, axes=axes, nbytes=step.nbytes, nanoseconds=0, before=step.before, after=step.after)
            parts = after_step(world, parts, named, shape)
        torch.testing.assert_close(join(parts, after, shape, mesh), full)


@contextlib.contextmanager
def torchs_own(mesh: Mesh) -> Iterator[None]:
    """Torch's own simulation of a mesh: LocalTensors in a fake process group."""
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # init_process_group puts one of its own in front, and leaves it there
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.size)
    try:
        with LocalTensorMode(mesh.size):
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@pytest.mark.parametrize("text", ["2,3", "2,2,2"])
def test_parts_are_what_distribute_tensor_gives_every_rank(text: str) -> None:
    from torch.distributed._local_tensor import LocalTensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh, full = Mesh.parse(text), torch.randn(24, 24)
    layouts = [x for x in legal_layouts(tuple(full.shape), mesh.shape, (), mesh.wholes) if any(p.is_strided for p in x)]
    assert layouts
    with torchs_own(mesh):
        devices = init_device_mesh("cpu", mesh.shape)
        for layout in layouts:
            made = distribute_tensor(LocalTensor(dict.fromkeys(range(mesh.size), full)), devices, layout.to_dtensor(mesh.shape))
            assert Layout.from_dtensor(made.placements, mesh.shape) == layout
            local = made.to_local()._local_tensors  # type: ignore[attr-defined]
            for device, part in enumerate(split(full, layout, mesh)):
                torch.testing.assert_close(part, local[device])


COLLECTIVES = [("all_gather", ""), ("all_to_all", ""), *itertools.product(("reduce_scatter", "all_reduce"), ("sum", "avg", "max", "min"))]


@pytest.mark.parametrize(("axes", "text"), [((0,), "4"), ((1,), "2,3"), ((0, 2), "2,3,2")])
def test_devices_get_what_torchs_functional_collectives_give(axes: tuple[int, ...], text: str) -> None:
    """To the last bit (but the average of complex numbers, which torch divides as pairs), in a storage of its own."""
    from torch.distributed._local_tensor import LocalTensor

    mesh = Mesh.parse(text)
    world, teams = World(mesh), groups(axes, mesh)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-9, 9, (mesh.size, 12), generator=generator)
    values = [numbers, numbers > 0, numbers / 7, (numbers / 7).bfloat16(), torch.complex(numbers / 7, numbers / 3)]
    with torchs_own(mesh):
        group = dist.new_group(list(teams[0])).group_name
        for (kind, reduction), value in itertools.product(COLLECTIVES, values):
            if reduction and (value.dtype is torch.bool or (value.is_complex() and reduction in ("max", "min"))):
                continue
            if reduction == "avg" and not value.is_floating_point() and not value.is_complex():
                continue
            exchange = dataclasses.replace(
                all_reduce_over([mesh.names[axis] for axis in axes], reduction, mesh, 0), kind=kind, title=f"{kind} {reduction}"
            )
            sent = tuple(row.clone() for row in value)
            expected = exchange.collective(group)(LocalTensor(dict(enumerate(sent))))._local_tensors  # type: ignore[attr-defined]
            for device, received in enumerate(world.collective(exchange, sent)):
                exact = reduction != "avg" or not value.is_complex()
                close = {"rtol": 0 if exact else 1e-6, "atol": 0, "msg": f"{exchange.title} of {value.dtype}"}
                torch.testing.assert_close(received, expected[device], **close)
                assert received.untyped_storage().nbytes() == received.nbytes
                assert received.is_contiguous()
    assert set(world.counts) == {(kind, tuple(mesh.names[axis] for axis in axes)) for kind, _ in COLLECTIVES}


@pytest.mark.parametrize("text", ["2", "3", "2,2", "2,3", "2,2,2", "a=2,b=2x2"])
def test_free_moves_keep_the_tensor(text: str) -> None:
    mesh = Mesh.parse(text)
    for shape in ((8, 9), (13,), ()):
        full = torch.randn(shape)
        layouts = legal_layouts(shape, mesh.shape, ("sum", "avg", "max"), mesh.wholes)
        for before, after in itertools.product(layouts, repeat=2):
            if any(p.is_partial for p in before):
                continue
            if free_move(before, after):
                torch.testing.assert_close(join(moved(split(full, before, mesh), before, after, shape, mesh), after, shape, mesh), full)
            else:
                with pytest.raises(InternalError, match="without communication"):
                    moved(split(full, before, mesh), before, after, shape, mesh)


STEP = ReshardStep(kind="all_gather", axes=("d1",), nbytes=32, nanoseconds=0, before=Layout.parse("S(0)S(0)"), after=Layout.parse("S(0)R"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": ("d0",)}, "it changes axes d1"),
        ({"kind": "broadcast"}, "it changes axes d1"),
        ({"nbytes": 31}, "a device calls it with 32 bytes, the plan says 31"),
        ({"kind": "all_reduce", "after": Layout.parse("S(0)R")}, "devices of one group hold different parts"),
        ({"kind": "reduce_scatter", "before": Layout.parse("S(1)R"), "after": Layout.parse("S(1)S(0)")}, "it would reduce nothing"),
        ({"axes": ("d0",), "after": Layout.parse("RS(0)")}, "does not get each of its elements once"),
        ({"kind": "all_to_all", "axes": ("d0",), "after": Layout.parse("S(1)S(0)")}, "does not get each of its elements once"),
    ],
)
def test_a_step_that_is_not_what_it_says_is_refused(changes: dict[str, object], message: str) -> None:
    mesh = Mesh.parse("2,2")
    step = dataclasses.replace(STEP, **changes)  # type: ignore[arg-type]
    parts = split(torch.randn(8, 2), step.before, mesh)
    with pytest.raises(InternalError, match=message):
        after_step(World(mesh), parts, step, (8, 2))


def test_devices_that_should_hold_the_same_are_compared() -> None:
    mesh = Mesh.parse("2")
    parts = (torch.zeros(2), torch.ones(2))
    with pytest.raises(InternalError, match="devices 0 and 1 should hold the same"):
        join(parts, Layout.parse("R"), (2,), mesh)
    with pytest.raises(InternalError, match=r"device 0 holds \(2,\) of a tensor \(2,\) in layout S\(0\), it should be \(1,\)"):
        join(parts, Layout.parse("S(0)"), (2,), mesh)


@pytest.mark.parametrize("threads", [1, 2])
def test_devices_add_up_in_one_order(threads: int) -> None:
    """However many threads the process computes with: devices that should hold the same are compared to the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert World(Mesh.parse("4")).each(lambda device: torch.get_num_threads()) == [threads] * 4
    finally:
        torch.set_num_threads(before)
