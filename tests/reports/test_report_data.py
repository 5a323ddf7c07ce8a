"""What the report says of a plan: every tensor once, every nanosecond and byte in the tree, figures as in the plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from plan_examples import example, stepped
from report_plans import llama

from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.plan.plan import Plan
from solver_shard.reports.charts import history_chart, memory_chart, round_ticks
from solver_shard.reports.dataflow import layer_graphs, representative
from solver_shard.reports.html import page_data
from solver_shard.reports.modules import module_tree
from solver_shard.reports.tensors import MAX_DRAWN, picture, tensor_entries

pytestmark = pytest.mark.usefixtures("one_thread")

PLANS = [
    pytest.param(lambda: example(4), id="forward"),
    pytest.param(lambda: stepped(example()), id="stepped"),
    pytest.param(llama, id="llama"),
]


@pytest.mark.parametrize("make", PLANS)
def test_every_tensor_is_in_one_entry_and_alike_in_it(make: Any) -> None:
    plan: Plan = make()
    entries, entry_of = tensor_entries(plan)
    assert sorted(name for entry in entries for name in entry["members"]) == sorted(tensor.name for tensor in plan.tensors)
    for tensor, position in zip(plan.tensors, entry_of, strict=True):
        entry = entries[position]
        assert tensor.name in entry["members"]
        assert (entry["layout"], tuple(entry["shape"]), entry["role"]) == (str(tensor.layout), tensor.shape, tensor.role)


def test_repeated_layers_share_an_entry() -> None:
    entries, entry_of = tensor_entries(llama())
    names = {entry["name"]: entry["count"] for entry in entries}
    assert names["model.layers.{0,1}.mlp.up_proj.weight"] == 2
    assert len(entries) < len(entry_of) * 0.75


def test_a_layer_that_differs_has_an_entry_of_its_own() -> None:
    plan = example(4)
    tensors = [
        dataclasses.replace(tensor, layout=Layout.parse("RS(0)")) if tensor.name == "layers.2.up.weight" else tensor
        for tensor in plan.tensors
    ]
    names = {entry["name"] for entry in tensor_entries(dataclasses.replace(plan, tensors=tuple(tensors)))[0]}
    assert {"layers.{0,1,3}.up.weight", "layers.2.up.weight"} <= names


def test_an_entry_tells_every_move() -> None:
    plan = llama()
    entries, entry_of = tensor_entries(plan)
    told: dict[int, list[str]] = {}
    for reshard in plan.reshards:
        if reshard.copy:
            told.setdefault(entry_of[reshard.tensor], []).append(reshard.purpose)
    for position, purposes in told.items():
        assert {move["purpose"] for move in entries[position]["moves"]} >= set(purposes)
    gathered = next(entry for entry in entries if entry["name"] == "model.layers.{0,1}.mlp.up_proj.weight")
    forward = next(move for move in gathered["moves"] if move["purpose"] == "forward")
    assert [step["title"] for step in forward["steps"]] == ["all-gather"]
    assert forward["steps"][0]["text"].startswith("gathers dim ")
    assert entries[gathered["gradient"]]["parameter"] == entries.index(gathered)


def _sum(node: dict[str, Any], key: str) -> int:
    return sum(child[key] for child in node["children"]) if node["children"] else node[key]


@pytest.mark.parametrize("make", PLANS)
def test_the_tree_has_every_nanosecond_and_byte(make: Any) -> None:
    plan: Plan = make()
    root = module_tree(plan, tensor_entries(plan)[1])
    before_overlap = sum(plan.runs(r) * sum(step.nanoseconds for step in r.steps) for r in plan.reshards)
    before_overlap += plan.options.microbatches * sum(inside.nanoseconds for op in plan.ops for inside in op.collectives)
    assert root["communication_ns"] == before_overlap
    assert root["forward_ns"] + root["backward_ns"] == plan.costs.compute_ns
    assert root["peak"] == sum(holder.nbytes for holder in plan.memory.holders)
    stack = [root]
    while stack:
        node = stack.pop()
        assert all(node[key] == _sum(node, key) for key in ("forward_ns", "backward_ns", "communication_ns", "peak")), node["name"]
        stack += node["children"]


def test_layers_are_one_node_of_the_tree() -> None:
    plan = example(4)
    layers = module_tree(plan, tensor_entries(plan)[1])["children"][0]
    assert (layers["name"], layers["count"], layers["forward_ns"]) == ("layers.{0..3}", 4, plan.costs.compute_ns)
    assert [(child["name"], child["count"]) for child in layers["children"]] == [("up", 4), ("down", 4)]
    assert [parameter["name"] for parameter in layers["children"][0]["parameters"]] == ["weight"]


def test_a_layer_that_runs_otherwise_is_a_node_of_its_own() -> None:
    plan = llama()  # the first norm of the first layer reads what the embedding leaves, before the sequence is cut
    model = module_tree(plan, tensor_entries(plan)[1])["children"][0]
    layers = [child for child in model["children"] if child["name"].startswith("layers")]
    assert [layer["name"] for layer in layers] == ["layers.0", "layers.1"]
    assert [child["name"] for child in layers[1]["children"]] == [
        *("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
        "(own ops)",
    ]


def test_module_paths_of_any_depth_are_shown() -> None:
    plan = example()
    deep = dataclasses.replace(plan, ops=tuple(dataclasses.replace(op, module=".".join("ab" * 300)) for op in plan.ops))
    assert page_data(deep)["tree"]["forward_ns"] == plan.costs.compute_ns


def test_the_layer_that_is_drawn_stands_for_the_largest_kind() -> None:
    assert representative(example(5)) == ("layers.2", 5)
    assert representative(example(1)) == ("", 1)
    assert representative(llama()) == ("model.layers.1", 2)


def test_a_drawing_has_the_layers_collectives_and_no_box_on_another() -> None:
    plan = llama()
    drawn = layer_graphs(plan, tensor_entries(plan)[1])
    assert drawn is not None
    assert [graph["phase"] for graph in drawn["graphs"]] == ["forward", "backward"]
    inside = {i for i, op in enumerate(plan.ops) if op.module.startswith("model.layers.1")}
    for graph in drawn["graphs"]:
        made = {t for i in inside for t in plan.ops[i].results if plan.ops[i].phase == graph["phase"]}
        moved = [r for r in plan.reshards if r.copy and r.steps]
        read = [r for r in moved if r.purpose == graph["phase"] and any(i in inside for i, _ in r.readers)]
        reduced = [r for r in moved if r.purpose == "optimizer" and r.tensor in made]
        assert sum(node["kind"] == "collective" for node in graph["nodes"]) == len(read) + len(reduced)
        for i, a in enumerate(graph["nodes"]):
            assert 0 <= a["x"] <= graph["width"] - a["width"] + 1
            for b in graph["nodes"][:i]:
                apart = a["x"] >= b["x"] + b["width"] or b["x"] >= a["x"] + a["width"]
                assert apart or a["y"] >= b["y"] + b["height"] or b["y"] >= a["y"] + a["height"], (a["lines"], b["lines"])


def test_the_memory_chart_keeps_the_peak_however_many_ops_there_are() -> None:
    plan = example(700)
    chart = memory_chart(plan)
    columns = chart["columns"]
    assert len(columns["at"]) < 500
    assert max(sum(values) for values in columns["values"]) == plan.memory.peak
    assert columns["at"][[sum(values) for values in columns["values"]].index(plan.memory.peak)] == plan.memory.peak_time
    assert [area["category"] for area in chart["areas"]] == ["parameters", "inputs", "activations"]
    assert chart["limit"]["label"] == "limit 19.5 KiB"


def test_a_limit_far_above_the_peak_is_told_so() -> None:
    plan = example()
    far = dataclasses.replace(plan, memory=dataclasses.replace(plan.memory, limit=100 * plan.memory.peak))
    assert memory_chart(far)["limit"] == {"y": 22, "label": "limit 906 KiB, 100.0 times the peak, above this scale"}


def test_the_course_of_the_solve() -> None:
    chart = history_chart(example())
    assert chart is not None
    assert [line["kind"] for line in chart["lines"]] == ["objective", "bound"]
    assert [row["source"] for row in chart["rows"]] == ["presolve", "kernel"]
    assert chart["rows"][-1]["gap"] == "0.00%"
    plan = example()
    assert history_chart(dataclasses.replace(plan, certificate=dataclasses.replace(plan.certificate, history=()))) is None


@pytest.mark.parametrize(
    ("layout", "shape", "mesh", "caption"),
    [
        ("S(0)S(1)", (8192, 4096), "dp=32,tp=8", "cut into 32 x 8 pieces of 256 x 512, one on each device"),
        ("RS(1)", (8192, 4096), "dp=32,tp=8", "cut into 8 pieces of 8192 x 512, each on 32 devices (dp 32)"),
        ("RR", (8, 4), "dp=2,tp=2", "whole on every device"),
        ("S(0)S(0)", (10, 4), "dp=2,tp=2", "cut into 4 pieces of at most 3 x 4, one on each device"),
        ("S(0)P(sum)", (8, 4), "dp=2,tp=2", "cut into 2 pieces of 4 x 4; along tp every device holds a part, and their sum is the tensor"),
        ("P(sum)P(sum)", (8, 4), "dp=2,tp=2", "not cut; along dp, tp every device holds a part, and their sum is the tensor"),
        ("RR", (), "dp=2,tp=2", "whole on every device"),
    ],
)
def test_pictures_say_how_a_tensor_is_cut(layout: str, shape: tuple[int, ...], mesh: str, caption: str) -> None:
    assert picture(Layout.parse(layout), shape, Mesh.parse(mesh))["caption"] == caption


def test_pictures_draw_few_cuts_and_abstract_many() -> None:
    drawn = picture(Layout.parse("S(0)S(1)"), (64, 64), Mesh.parse("dp=32,tp=8"))
    assert (drawn["rows"]["label"], drawn["rows"]["by"]) == ("dim 0 = 64", "by dp 32")
    assert len(drawn["columns"]["lines"]) == 7
    assert drawn["columns"]["gap"] is None
    assert len(drawn["rows"]["lines"]) < MAX_DRAWN
    assert drawn["rows"]["gap"] is not None
    nested = picture(Layout.parse("S(0)S(0)"), (64, 64), Mesh.parse("dp=2,tp=4"))["rows"]
    assert [line["major"] for line in nested["lines"]] == [False, False, False, True, False, False, False]
    strided = picture(Layout.parse("_S(0)S(0)"), (64, 64), Mesh.parse("dp=2,tp=4"))["rows"]
    assert strided["by"] == "by tp 4 then dp 2"


def test_the_headline_is_the_plans() -> None:
    page = page_data(llama())
    assert [figure["label"] for figure in page["figures"]] == ["Step time", "Peak memory", "Communication", "Proof"]
    assert sum(part["share"] for part in page["time"]["parts"]) == pytest.approx(1)
    assert page["collectives"][0]["title"] in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
    assert page["dearest"] == sorted(page["dearest"], key=lambda move: -move["ns"])


def test_ticks_are_round() -> None:
    assert round_ticks(7.3) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert round_ticks(11.3, 10.1) == [10.2, 10.4, 10.6, 10.8, 11.0, 11.2]
    assert round_ticks(1.6e9) == pytest.approx([0, 2e8, 4e8, 6e8, 8e8, 1e9, 1.2e9, 1.4e9, 1.6e9])
