"""What a device holds while it runs a transition: to the byte what the table of transitions says."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from storages import Held
from worlds import after_step

from solver_shard.costs.cluster import load_cluster
from solver_shard.costs.model import CostModel
from solver_shard.costs.transitions import TransitionStep, TransitionTable, intermediates
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.ops.shards import boxes
from solver_shard.plan.plan import ReshardStep as PlannedStep
from solver_shard.runtime.collectives import Exchange, Move, in_turn, prepare
from solver_shard.verification.simulate import World

CASES = [
    ((4, 4), "2", False),
    ((5, 3), "2", False),
    ((7, 3), "3", False),
    ((4, 6, 8), "2,2", False),
    ((1, 4, 8), "2,2", False),
    ((7, 5, 4), "2,2", False),
    ((6, 12), "3,2", False),
    ((9, 8), "2,2,2", False),
    ((9, 8), "2,2,2", True),
    ((17,), "2,2,2", True),
    ((10, 8), "a=2x2,b=2", True),
]


def called(exchange: Exchange) -> tuple[Move, ...]:
    """The stages of a step on one device, with what would come from the others left out."""
    size = len(exchange.members)
    factor = {"all_gather": size, "reduce_scatter": 1 / size}.get(exchange.kind, 1)

    def call(buffer: torch.Tensor) -> torch.Tensor:
        return buffer.new_empty(buffer.shape if exchange.kind == "all_reduce" else round(buffer.numel() * factor))

    return (exchange.pack,) if exchange.is_local else (exchange.pack, call, exchange.unpack)


def held_beside(path: tuple[TransitionStep, ...], shape: tuple[int, ...], mesh: Mesh) -> int:
    """Bytes at the fullest moment of a transition on device 0, without its source, less those of what it ends with."""
    stages: list[Move] = []
    for step in path:
        axes = tuple(mesh.names[a] for a in step.axes)
        named = PlannedStep(kind=step.kind, axes=axes, nbytes=step.nbytes, nanoseconds=0, before=step.before, after=step.after)
        stages += called(prepare(named, shape, mesh, 0))
    source = torch.zeros(boxes(path[0].before, shape, mesh)[0].length)
    with Held(source) as held:
        made = in_turn(stages)(source)
    assert tuple(made.shape) == boxes(path[-1].after, shape, mesh)[0].length
    return held.peak - made.nbytes


def pairs_of(table: TransitionTable) -> list[tuple[Layout, Layout]]:
    return [(a, b) for a, b in itertools.permutations(table.layouts, 2) if table.costs[table.index[a], table.index[b]] < 10**18]


@pytest.mark.parametrize(("shape", "text", "orders"), CASES, ids=str)
def test_a_transition_holds_what_its_table_says(shape: tuple[int, ...], text: str, orders: bool) -> None:
    mesh = Mesh.parse(text)
    table = CostModel(mesh, load_cluster("h100")).transitions(shape, "f32", ("sum",), orders=orders)
    said = table.intermediates()
    pairs = pairs_of(table)
    for before, after in random.Random(0).sample(pairs, min(300, len(pairs))):
        path = table.path(before, after)
        found = held_beside(path, shape, mesh)
        assert found == said[table.index[before], table.index[after]] == intermediates(path), (before, after, path)


@pytest.mark.parametrize(("shape", "text", "orders"), CASES, ids=str)
def test_paths_and_tables_agree_where_the_source_is_converted(shape: tuple[int, ...], text: str, orders: bool) -> None:
    table = CostModel(Mesh.parse(text), load_cluster("h100")).transitions(shape, "f32", ("sum",), orders=orders)
    said = table.intermediates(converted=True)
    for before, after in random.Random(0).choices(pairs_of(table), k=20):
        at, to = table.index[before], table.index[after]
        assert said[at, to] == intermediates(table.path(before, after), int(table.nbytes[at]))


@pytest.mark.parametrize(
    ("before", "after", "beside"),
    [
        ("S(0)", "R", 0),  # rows arrive where they are
        ("S(1)", "R", 512),  # columns arrive one after the other, as large as the result
        ("P", "R", 0),
        ("P", "S(0)", 0),
        ("P", "S(1)", 512),  # and are sent so
        ("S(0)", "S(1)", 128),
        ("S(1)", "S(0)", 128),
        ("R", "S(1)", 0),
    ],
)
def test_buffers_are_there_where_pieces_are_columns(before: str, after: str, beside: int) -> None:
    table = CostModel(Mesh.parse("4"), load_cluster("h100")).transitions((8, 16), "f32", ("sum",))
    src, dst = Layout.parse(before), Layout.parse(after)
    assert table.intermediates()[table.index[src], table.index[dst]] == beside
    assert held_beside(table.path(src, dst), (8, 16), Mesh.parse("4")) == beside


def test_a_tensor_of_any_strides_is_packed_by_one_copy() -> None:
    mesh, columns = Mesh.parse("4"), Layout.parse("S(1)")
    step = PlannedStep(kind="reduce_scatter", axes=("d0",), nbytes=512, nanoseconds=0, before=Layout.parse("P"), after=columns)
    turned = torch.arange(128.0).reshape(16, 8).T
    with Held(turned) as held:
        sent = prepare(step, (8, 16), mesh, 0).pack(turned)
    assert held.peak == sent.nbytes == 512
    assert torch.equal(sent.view(4, 8, 4).movedim(0, 1).reshape(8, 16), turned)


def test_a_tensor_of_any_strides_is_all_reduced_without_packing() -> None:
    step = PlannedStep(kind="all_reduce", axes=("d0",), nbytes=512, nanoseconds=0, before=Layout.parse("P"), after=Layout.parse("R"))
    turned = torch.arange(128.0).reshape(16, 8).T
    mesh = Mesh.parse("4")
    with Held(turned) as held:
        prepare(step, (8, 16), mesh, 0).pack(turned)
        assert held.peak == 0
        parts = after_step(World(mesh), (turned,) * 4, step, (8, 16))
    assert all(part.is_contiguous() and torch.equal(part, 4 * turned) for part in parts)
