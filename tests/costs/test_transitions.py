"""Transition tables against two oracles: steps run on real shards, and Dijkstra over every step that runs."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_simulator import WrongStepError, collective, rebuild, scatter

from solver_shard.costs.cluster import PRESETS, load_cluster
from solver_shard.costs.collectives import Collectives
from solver_shard.costs.layouts import legal_layouts
from solver_shard.costs.model import CostModel
from solver_shard.costs.transitions import FORBIDDEN, MAX_LAYOUTS, TransitionTable, build_table
from solver_shard.errors import InputError, InternalError
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh


def table_for(
    shape: tuple[int, ...], mesh: str, reductions: tuple[str, ...] = ("sum",), cluster: str = "h100", *, orders: bool = False
) -> TransitionTable:
    return build_table(shape, 4, reductions, Collectives(Mesh.parse(mesh), load_cluster(cluster)), orders=orders)


@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        ("S(0)R", "RR", "all_gather[0]"),
        ("RS(1)", "RR", "all_gather[1]"),
        ("S(0)S(0)", "RR", "all_gather[0, 1]"),
        ("S(0)S(0)", "S(0)R", "all_gather[1]"),
        ("P(sum)R", "RR", "all_reduce[0]"),
        ("P(sum)P(sum)", "RR", "all_reduce[0, 1]"),
        ("P(sum)R", "S(0)R", "reduce_scatter[0]"),
        ("P(sum)P(sum)", "S(1)S(1)", "reduce_scatter[0, 1]"),
        ("RS(0)", "RS(1)", "all_to_all[1]"),
        ("S(0)S(0)", "S(1)S(1)", "all_to_all[0, 1]"),
        ("RR", "S(1)S(1)", "slice[0, 1]"),
        ("RR", "S(1)S(0)", "slice[1] slice[0]"),
        ("S(0)R", "S(0)R", ""),
    ],
)
def test_a_collective_that_does_the_whole_transition_is_found(src: str, dst: str, steps: str) -> None:
    table = table_for((64, 64), "dp=4,tp=8", cluster="gb200")
    path = table.path(Layout.parse(src), Layout.parse(dst))
    assert " ".join(f"{step.kind}{list(step.axes)}" for step in path) == steps


@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        ("_S(0)S(0)", "RS(0)", "all_gather[0]"),
        ("RS(0)", "_S(0)S(0)", "slice[0]"),
        ("P(sum)S(0)", "_S(0)S(0)", "reduce_scatter[0]"),
        ("_S(0)S(0)", "S(1)S(0)", "all_to_all[0]"),
        ("S(1)S(0)", "_S(0)S(0)", "all_to_all[0]"),
        ("_S(0)S(0)", "RR", "all_gather[0] all_gather[1]"),
        ("P(sum)P(sum)", "_S(0)S(0)", "reduce_scatter[1] reduce_scatter[0]"),
        ("_S(0)S(0)", "S(0)R", "all_gather[0] all_gather[1] slice[0]"),
    ],
)
def test_another_order_is_cut_and_joined_from_its_minor_end(src: str, dst: str, steps: str) -> None:
    path = table_for((64, 64), "dp=4,tp=8", cluster="gb200", orders=True).path(Layout.parse(src), Layout.parse(dst))
    assert " ".join(f"{step.kind}{list(step.axes)}" for step in path) == steps


@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        ("_S(0)_S(0)S(0)", "RRS(0)", "all_gather[0, 1]"),
        ("_S(0)_S(0)S(0)", "_S(0)RS(0)", "all_gather[1]"),
        ("S(0)_S(0)S(0)", "S(0)RS(0)", "all_gather[1]"),
        ("_S(0)S(0)S(0)", "RS(0)S(0)", "all_gather[0]"),
        ("P(sum)P(sum)S(0)", "_S(0)_S(0)S(0)", "reduce_scatter[0, 1]"),
    ],
)
def test_several_axes_of_another_order_move_as_one_group(src: str, dst: str, steps: str) -> None:
    path = table_for((64, 64), "2,2,2", cluster="gb200", orders=True).path(Layout.parse(src), Layout.parse(dst))
    assert " ".join(f"{step.kind}{list(step.axes)}" for step in path) == steps


def test_other_orders_are_within_reach() -> None:
    table = table_for((64, 64), "2,2,2", orders=True)
    stored = [i for i, layout in enumerate(table.layouts) if not any(p.is_partial for p in layout)]
    assert (table.costs[:, stored] < FORBIDDEN).all()


def test_replicas_share_the_slow_links() -> None:
    # 8 devices of each node hold the same shard: each sends an eighth of it to the other nodes, then they gather inside
    table = table_for((4096, 4096), "dp=4,tp=8", cluster="ethernet")
    path = table.path(Layout.parse("S(0)R"), Layout.parse("RR"))
    assert [(step.kind, step.axes) for step in path] == [("slice", (1,)), ("all_gather", (0, 1))]
    direct = Collectives(Mesh.parse("dp=4,tp=8"), load_cluster("ethernet")).nanoseconds("all_gather", (0,), 4096 * 4096 * 4)
    assert sum(step.nanoseconds for step in path) < direct / 4


@pytest.mark.parametrize("pair", [("RR", "P(sum)R"), ("S(0)R", "P(sum)R"), ("P(sum)R", "RP(sum)"), ("RR", "RP(sum)")])
def test_nothing_becomes_partial(pair: tuple[str, str]) -> None:
    table = table_for((64, 64), "2,2")
    src, dst = map(Layout.parse, pair)
    assert table.costs[table.index[src], table.index[dst]] == FORBIDDEN
    with pytest.raises(InternalError, match="no transition from"):
        table.path(src, dst)


def test_a_partial_never_changes_its_reduction() -> None:
    table = table_for((64,), "2", ("sum", "max"))
    assert table.costs_between([Layout.parse("P(sum)")], [Layout.parse("P(max)")]).tolist() == [[FORBIDDEN]]


def test_bytes_are_those_that_the_padded_collective_is_called_with() -> None:
    table = table_for((10, 6), "4", ("sum",))
    sizes = {
        f"{s}>{d}": table.path(Layout.parse(s), Layout.parse(d))[0].nbytes
        for s, d in [("S(0)", "R"), ("P", "R"), ("P", "S(0)"), ("S(0)", "S(1)")]
    }
    # shards of 10 rows are 3, 3, 3 and 1 long; of 6 columns 2, 2, 2 and 0
    assert sizes == {"S(0)>R": 4 * 3 * 6 * 4, "P>R": 10 * 6 * 4, "P>S(0)": 4 * 3 * 6 * 4, "S(0)>S(1)": 4 * 3 * 2 * 4}


def test_an_illegal_layout_is_a_bug_that_is_named() -> None:
    with pytest.raises(InternalError, match=r"S\(0\)S\(0\) is not among the 3 legal ones"):
        table_for((3,), "2,2", ()).costs_between([Layout.parse("S(0)S(0)")], [Layout.parse("RR")])


@pytest.mark.parametrize(
    ("shape", "mesh", "joined"),
    [
        ((64, 64, 64), "a=2,b=2,c=2,d=2,e=2", "a=2,b=2,c=2,d_e=4"),
        ((64, 64), "a=2,b=2,c=2,d=2,e=2,f=2", "a=2,b=2,c=2,d=2,e_f=4"),
        ((64, 64, 64, 64), "a=2,b=2,c=2,d=2,e=2,f=2", "a=2,b=2,c=2,d_e_f=8"),
        ((64, 64, 64, 64), "dp=8,cp=2,ep=2,tp=4,sp=2", "dp=8,cp=2,ep=2,tp_sp=8"),
        ((64, 64, 64, 64), "nodes=4,rail=2,dp=2,a=2,b=2", "nodes=4,rail=2,dp=2,a_b=4"),
    ],
)
def test_more_layouts_than_are_searched_are_refused_with_a_mesh_that_has_few_enough(shape: tuple[int, ...], mesh: str, joined: str) -> None:
    with pytest.raises(InputError, match=rf"3,000 are the most that are searched.* side by side as one, as in {joined}:"):
        table_for(shape, mesh)
    assert len(legal_layouts(shape, Mesh.parse(joined).shape, ("sum",))) <= MAX_LAYOUTS


CASES = [
    ((4, 4), "2,2", ("sum",)),
    ((5, 3), "2,2", ("sum",)),
    ((7, 6), "2,3", ("sum", "avg")),
    ((12, 6), "3,2", ("max",)),
    ((8, 8), "2,2,2", ("sum",)),
    ((9,), "2,2,2", ("sum",)),
    ((6, 5), "2,1,3", ("sum",)),
    ((3, 4, 2), "2,2", ("min", "max")),
    ((), "2,2", ("sum", "max")),
    ((8, 6), "a=2,b=2x2", ("sum",)),
]


ORDERED = [
    ((4, 4), "2,2", ("sum",)),
    ((7, 5), "2,3", ("sum",)),
    ((13,), "3,2", ("max",)),
    ((11,), "2,2,2", ("sum",)),
    ((9, 4), "2,2,2", ()),
    ((13,), "3,2,2", ("sum",)),
    ((6, 9), "a=2,b=2x2", ()),
    ((10, 3), "a=2x2,b=2", ()),
]


@pytest.mark.parametrize(
    ("shape", "mesh", "reductions", "orders"), [*((*case, False) for case in CASES), *((*case, True) for case in ORDERED)], ids=str
)
def test_every_path_gives_the_same_tensor_and_costs_what_the_table_says(
    shape: tuple[int, ...], mesh: str, reductions: tuple[str, ...], orders: bool
) -> None:
    rng = np.random.default_rng(0)
    sizes = Mesh.parse(mesh).shape
    value = rng.integers(-50, 50, shape).astype(np.float64)
    table = table_for(shape, mesh, reductions, orders=orders)
    assert any(p.is_strided for layout in table.layouts for p in layout) == orders
    for src, dst in itertools.product(table.layouts, repeat=2):
        if table.costs[table.index[src], table.index[dst]] == FORBIDDEN:
            continue
        shards, at, total = scatter(value, src, sizes, rng), src, 0
        for step in table.path(src, dst):
            assert step.before == at
            sent = max(x.size for x in shards.values()) * 4
            shards = collective(step.kind, step.axes, shards, step.before, step.after, shape, sizes)
            held = max(x.size for x in shards.values()) * 4
            group = int(np.prod([sizes[a] for a in step.axes]))
            expected = {"slice": 0, "all_gather": group * sent, "reduce_scatter": group * held, "all_reduce": sent}
            assert step.nbytes == expected.get(step.kind, step.nbytes)
            if step.kind == "all_to_all":
                assert step.nbytes >= max(sent, held)
            at, total = step.after, total + step.nanoseconds
        assert at == dst
        assert np.allclose(rebuild(shards, dst, shape, sizes), value)
        assert total == table.costs[table.index[src], table.index[dst]]


def steps_that_run(
    table: TransitionTable, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> list[tuple[Layout, Layout, str, tuple[int, ...]]]:
    """Try every collective between every two layouts on shards of random numbers and keep what gives the right tensor."""
    rng = np.random.default_rng(1)
    value = rng.integers(-50, 50, shape).astype(np.float64)
    found = []
    for before, after in itertools.product(table.layouts, repeat=2):
        axes = tuple(a for a in range(len(sizes)) if before[a] != after[a])
        if not axes or len({(before[a], after[a]) for a in axes}) > 1:
            continue
        a, b = before[axes[0]], after[axes[0]]
        if b.is_partial or (a.is_replicate and not b.is_shard):
            continue
        kind = (
            "slice" if a.is_replicate
            else ("all_gather" if b.is_replicate else "all_to_all") if a.is_shard
            else "all_reduce" if b.is_replicate else "reduce_scatter"
        )  # fmt: skip
        try:
            shards = collective(kind, axes, scatter(value, before, sizes, rng), before, after, shape, sizes)
            right = np.allclose(rebuild(shards, after, shape, sizes), value)
        except (WrongStepError, AssertionError):
            right = False
        if right:
            found.append((before, after, kind, axes))
    return found


@pytest.mark.parametrize("orders", [False, True])
@pytest.mark.parametrize(
    ("shape", "mesh", "cluster"),
    [
        ((8, 8), "2,2", "h100"),
        ((12, 6), "2,3", "ethernet"),
        ((8, 8), "2,2,2", "a100"),
        ((16,), "2,1,2,2", "gb200"),
        ((8, 16), "4,4", "tpu-v5p"),
        ((8, 16), "a=2,b=2x2", "tpu-v5p"),
        ((8, 16), "b=4x2,a=2", "h100"),
    ],
)
def test_costs_equal_dijkstra_over_every_collective_that_runs(shape: tuple[int, ...], mesh: str, cluster: str, orders: bool) -> None:
    model = CostModel(Mesh.parse(mesh), load_cluster(cluster))
    table = model.transitions(shape, "f32", ("sum",), orders=orders)
    sizes = model.mesh.shape
    graph = nx.DiGraph()
    graph.add_nodes_from(table.layouts)
    for before, after, kind, axes in steps_that_run(table, shape, sizes):
        large = max(np.prod(x.local_shape(shape, sizes)) for x in (before, after))
        if kind == "all_to_all":
            large = np.prod(before.local_shape(shape, sizes))
        weight = 0 if kind == "slice" else model.collective_ns(kind, axes, int(large) * 4)
        graph.add_edge(before, after, weight=weight)
    for src in table.layouts:
        expected = nx.single_source_dijkstra_path_length(graph, src)
        row = table.costs_between([src], table.layouts)[0].tolist()
        assert row == [expected.get(dst, FORBIDDEN) for dst in table.layouts]


sizes_of_mesh = st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3).map(lambda x: ",".join(map(str, x)))
parts_of_mesh = st.sampled_from(["a=4,b=2x3", "a=2x2,b=3", "a=2x4,b=2", "a=3,b=8x2"])


@given(
    shape=st.lists(st.integers(0, 4096), max_size=3).map(tuple),
    mesh=st.one_of(sizes_of_mesh, parts_of_mesh),
    cluster=st.sampled_from(PRESETS),
    reductions=st.sampled_from([(), ("sum",), ("max", "sum")]),
    orders=st.booleans(),
)
@settings(max_examples=60)
def test_costs_are_a_metric(shape: tuple[int, ...], mesh: str, cluster: str, reductions: tuple[str, ...], orders: bool) -> None:
    costs = table_for(shape, mesh, reductions, cluster, orders=orders).costs
    assert (np.diag(costs) == 0).all()
    assert (costs >= 0).all()
    for middle in range(len(costs)):
        assert (costs <= np.minimum(costs[:, middle, None] + costs[middle, None, :], FORBIDDEN)).all()


@given(shape=st.lists(st.integers(1, 4096), max_size=3).map(tuple), mesh=sizes_of_mesh, at=st.integers(0, 3))
@settings(max_examples=30)
def test_an_axis_of_size_one_changes_no_cost(shape: tuple[int, ...], mesh: str, at: int) -> None:
    parts = mesh.split(",")
    wider = ",".join([*parts[:at], "1", *parts[at:]])
    assert table_for(shape, mesh).costs.tolist() == table_for(shape, wider).costs.tolist()


@given(shape=st.lists(st.integers(1, 4096), max_size=3).map(tuple), mesh=sizes_of_mesh, cluster=st.sampled_from(PRESETS))
@settings(max_examples=30)
def test_wider_elements_never_cost_less(shape: tuple[int, ...], mesh: str, cluster: str) -> None:
    model = CostModel(Mesh.parse(mesh), load_cluster(cluster))
    assert (model.transitions(shape, "f32").costs >= model.transitions(shape, "bf16").costs).all()


@given(shape=st.lists(st.integers(1, 4096), max_size=2).map(tuple), mesh=st.one_of(sizes_of_mesh, parts_of_mesh))
@settings(max_examples=20)
def test_other_orders_as_stations_never_make_a_transition_dearer(shape: tuple[int, ...], mesh: str) -> None:
    plain, ordered = table_for(shape, mesh), table_for(shape, mesh, orders=True)
    assert (ordered.costs_between(plain.layouts, plain.layouts) <= plain.costs).all()


def test_equal_requests_share_one_table() -> None:
    model = CostModel(Mesh.parse("2,2"), load_cluster("h100"))
    assert model.transitions((4, 4), "bf16", ("sum",)) is model.transitions([4, 4], "f16", ["sum"])
    assert model.transitions((4, 4), "bf16", ("sum",)) is not model.transitions((4, 4), "f32", ("sum",))
    assert model.layouts((4, 4)) is model.layouts((4, 4))


def test_a_path_is_the_same_every_time() -> None:
    first, second = (table_for((64, 64, 64), "2,2,2") for _ in range(2))
    for src, dst in itertools.product(first.layouts[::7], first.layouts[::5]):
        if first.costs[first.index[src], first.index[dst]] < FORBIDDEN:
            assert first.path(src, dst) == second.path(src, dst)
