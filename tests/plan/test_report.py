"""The report: every number in it is the plan's, repeated layers are one line, and it fits a screen or two."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from plan_examples import example, stepped

from solver_shard.errors import InputError
from solver_shard.layout import Layout
from solver_shard.plan.index import output_names
from solver_shard.plan.plan import MemoryEntry, MemoryTimeline, OpCollective, Plan
from solver_shard.plan.summary import find, largest_holders, lookup, lookup_json
from solver_shard.text import table


@pytest.mark.parametrize(
    "line",
    [
        "deep mlp: 24,576 parameters, 6 ops on dp=4,tp=2 (8 devices), DGX H100",
        "step time    78.0 us   820,513 tokens/s, 102,564 per device",
        "peak memory  9.06 KiB of 19.5 KiB per device (46%)",
        "limit        23.4 KiB per device, less a reserve of 3.91 KiB (context, collective buffers, fragmentation): 19.5 KiB for tensors",
        "proof        optimal: no tied plan (repeated layers alike) has less time than 78.0 us",
        "asked        batch 64, seq 1, bf16, forward only, time objective",
        "pins         x=S(0),R",
        "layers.{0..2}.up.weight    bf16[128, 32]| S(1)S(0)  1.00 KiB  x3",
        "input   x       bf16[64, 32]| S(0)R  1.00 KiB",
        "output  output  bf16[64, 32]| S(0)R  1.00 KiB",
        "layers.{0..2}.down  bf16[64, 32]| S(0)P(sum) -> S(0)R  1.00 KiB  x3",
        "parameter gathers     all_gather  dp        6         3  24.0 KiB  42.0 us  layers.{0..2}.up.weight, layers.{0..2}.down.weight",
        "activations, forward  all_reduce  tp        2         2  2.00 KiB  18.0 us  layers.{0,1}.down",
        "outputs               all_reduce  tp        1         1  1.00 KiB  9.00 us  output",
        "communication  48.0 us  61.5%   overlap 0.5: 21.0 us of gathers and reductions hidden",
        "By windows: 80.1 us (50.1 us of collectives exposed, 18.9 us hidden), peak 21.0 KiB beyond the limit, where gathers",
        "4 windows bound by compute, 80.1 us: layers.{0..2} forward, head",
        "Memory at the peak: time 3 of 6, layers.1.down: aten.einsum.default (forward)",
        "activations  2.06 KiB  10.6%",
        "trace 0.1 s, solve 0.3 s (presolve 0.2 s); seed 0; torch 2.13.0",
    ],
)
def test_the_report_has_this_line(line: str) -> None:
    assert line in str(example())


def test_layouts_in_another_order_are_explained_where_there_are_any() -> None:
    plan = example()
    legend = "_S(d): cuts dim d after the axes with S(d) (DTensor's strided shard)"
    assert legend not in str(plan)
    for change in ({"layout": Layout.parse("_S(0)S(0)")}, {"state": Layout.parse("_S(0)S(0)")}):
        up = dataclasses.replace(plan.tensors[1], **change)
        text = str(dataclasses.replace(plan, tensors=(plan.tensors[0], up, *plan.tensors[2:])))
        assert legend in text
        assert "_S(0)S(0)" in text.replace(legend, "")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "bf16, adamw with f32 master weights, time"),
        ({"master_weights": False}, "bf16, adamw without master weights, time"),
        ({"state_bytes": 2}, "bf16, adamw with f32 master weights, 2 bytes of state per element, time"),
        ({"optimizer": "none"}, "bf16, no optimizer, time"),
        ({"microbatches": 4}, "batch 64, seq 1, 4 microbatches, bf16, adamw"),
        ({"reduce_dtype": "f32", "clip": True}, "f32 master weights, gradients reduced in f32, gradients clipped, time"),
        ({"checkpoint": True}, "f32 master weights, every layer checkpointed, time"),
    ],
)
def test_the_report_says_what_the_optimizer_keeps(options: dict[str, Any], text: str) -> None:
    plan = example()
    asked = dataclasses.replace(plan.options, forward_only=False, **options)
    assert text in str(dataclasses.replace(plan, options=asked, gradients={"layers.0.up.weight": 1}))


def test_what_every_microbatch_runs_counts_that_often() -> None:
    plan = dataclasses.replace(example(), clip=OpCollective(kind="all_reduce", axes=("dp", "tp"), nbytes=4, nanoseconds=7000))
    plan = dataclasses.replace(plan, options=dataclasses.replace(plan.options, microbatches=5))
    lines = [line.split() for line in str(plan).splitlines()]
    for line in (
        "parameter gathers all_gather dp 30 15 120 KiB 210 us layers.{0..2}.up.weight, layers.{0..2}.down.weight",
        "gradient clipping all_reduce dp,tp 1 1 4 B 7.00 us the norm of all gradients",
        "outputs all_reduce tp 5 5 5.00 KiB 45.0 us output",
        "all 46 352 us",
    ):
        assert line.split() in lines
    assert "all_gather dp 4.00 KiB, 7.00 us (4.00 KiB copy), in each of 5 microbatches" in lookup(plan, "layers.0.up.weight")


def test_a_deeper_plan_has_no_longer_report() -> None:
    assert len(str(example(layers=100)).splitlines()) == len(str(example(layers=3)).splitlines()) <= 90
    assert "layers.{0..99}.up.weight" in str(example(layers=100))


def test_a_layer_that_differs_has_a_line_of_its_own() -> None:
    plan = example(layers=4)
    tensors = tuple(
        dataclasses.replace(tensor, layout=plan.layouts["layers.0.down.weight"]) if tensor.name == "layers.2.up.weight" else tensor
        for tensor in plan.tensors
    )
    text = str(dataclasses.replace(plan, tensors=tensors))
    assert "layers.{0,1,3}.up.weight   bf16[128, 32]| S(1)S(0)" in text
    assert "layers.2.up.weight         bf16[128, 32]| S(0)S(1)" in text


def test_ops_without_a_rule_are_listed_with_their_price() -> None:
    text = str(example(source="fallback"))
    assert "Ops without a rule, replicated on every axis" in text
    assert "aten.einsum.default      6  30.0 us      39.0 us  layers.{0..2}.up, layers.{0..2}.down" in text
    assert "Ops without a rule" not in str(example())


@pytest.mark.parametrize(
    ("status", "problem", "gap", "objective", "text"),
    [
        ("optimal", "free", 0.0, "time", "optimal: no plan has less time than 78.0 us"),
        (
            "gap",
            "tied",
            0.00005,
            "time",
            "optimal within the gap asked for: no tied plan (repeated layers alike) has less time than 78.0 us, gap 0.005%",
        ),
        ("feasible", "free", 0.1, "memory", "feasible: no plan has less peak than 76.2 KiB, gap 10%"),
        ("interrupted", "free", 0.1, "time", "interrupted: no plan has less time than 78.0 us, gap 10%"),
    ],
)
def test_the_proof_is_said_in_a_sentence(status: str, problem: str, gap: float, objective: str, text: str) -> None:
    plan = example()
    certificate = dataclasses.replace(plan.certificate, status=status, problem=problem, gap=gap)
    options = dataclasses.replace(plan.options, objective=objective)
    assert text in str(dataclasses.replace(plan, certificate=certificate, options=options))


@pytest.mark.parametrize(
    ("baseline", "text"),
    [
        ("megatron", "this is the plan of the baseline megatron: the solver stopped"),
        ("basic, op-priority", "this is the plan of the baselines basic and op-priority, which agree: the solver stopped"),
        ("basic, aggressive, op-priority", "the plan of the baselines basic, aggressive and op-priority, which agree: the solver stopped"),
    ],
)
def test_a_plan_of_baselines_names_them(baseline: str, text: str) -> None:
    plan = example()
    certificate = dataclasses.replace(plan.certificate, status="feasible", gap=0.1, baseline=baseline)
    assert text in str(dataclasses.replace(plan, certificate=certificate))


def test_what_ended_a_search_without_a_proof_stands_in_the_report() -> None:
    plan = example()
    certificate = dataclasses.replace(plan.certificate, status="feasible", gap=0.1, ended="limit")
    assert "feasible, when time or work ran out: no tied plan" in str(dataclasses.replace(plan, certificate=certificate))
    certificate = dataclasses.replace(certificate, ended="search")
    assert "feasible, with nothing left that the solver would try: no tied" in str(dataclasses.replace(plan, certificate=certificate))


def test_a_template_stands_in_the_report_and_in_what_is_proven() -> None:
    plan = example()
    text = str(dataclasses.replace(plan, options=dataclasses.replace(plan.options, template="dp=zero3,tp=megatron", pins=())))
    assert "no tied plan (repeated layers alike) of this template has less time than" in text
    assert "pins         none: the solver chose what the template leaves open" in text
    assert "layouts      by template: dp=zero3,tp=megatron" in text


def test_the_timeline_keeps_only_changes_and_finds_the_peak() -> None:
    ops = example().ops
    timeline = MemoryTimeline.build({"inputs": [5, 5, 5, 5, 5, 5, 5], "activations": [0, 0, 7, 7, 9, 9, 0]}, limit=20, ops=ops)
    assert (timeline.peak, timeline.peak_time, timeline.at_peak) == (14, 4, {"inputs": 5, "activations": 9})
    assert timeline.times == (0, 2, 4, 6)
    assert timeline.series == {"inputs": (5, 5, 5, 5), "activations": (0, 7, 9, 0)}
    assert MemoryTimeline.build({"optimizer": [0] * 6 + [1]}, limit=20, ops=ops).peak_op == "optimizer"


def test_intermediates_at_the_peak_are_told() -> None:
    plan = example()
    assert "peak with intermediates" not in str(plan)
    memory = dataclasses.replace(plan.memory, at_peak={**plan.memory.at_peak, "intermediates": 1024})
    text = str(dataclasses.replace(plan, memory=memory))
    assert re.search(r"\n  intermediates +1.00 KiB +[\d.]+%\n  peak with intermediates", text)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("layers.0.up.weight", ["layers.0.up.weight"]),
        ("*.up.weight", [f"layers.{i}.up.weight" for i in range(3)]),
        ("layers.1.up", ["layers.1.up.weight", "mid_1"]),
        ("layers.1", ["layers.1.up.weight", "layers.1.down.weight", "out_1"]),
        ("layers.*.down:out", ["out_0", "out_1", "output"]),
    ],
)
def test_patterns_find_tensors_by_name_and_by_module(pattern: str, names: list[str]) -> None:
    plan = example()
    assert [plan.tensors[t].name for t in find(plan, pattern)] == names


def test_a_pattern_that_finds_nothing_is_told_the_closest_names() -> None:
    with pytest.raises(InputError, match=r"no tensor or module of this plan is called 'up.weight'; '\*up.weight' matches 3"):
        find(example(), "up.weight")


def test_lookup_shows_layout_producer_and_reshards_folded() -> None:
    plan = example()
    assert lookup(plan, "*.up.weight").splitlines() == [
        "layers.{0..2}.up.weight  bf16[128, 32]| S(1)S(0)  (parameter, 1.00 KiB per device) x3",
        "  forward   matmul: S(1)S(0) -> RS(0)  all_gather dp 4.00 KiB, 7.00 us (4.00 KiB copy); for aten.einsum.default in layers.#.up",
    ]
    assert lookup(plan, "out_0").splitlines() == [
        "out_0  bf16[64, 32]| S(0)P(sum)  (activation, 1.00 KiB per device)",
        "  made by aten.einsum.default in layers.0.down (forward), strategy dp: a, tp: b, 5.00 us",
        "  forward   matmul: S(0)P(sum) -> S(0)R  all_reduce tp 1.00 KiB, 9.00 us (1.00 KiB copy); for aten.einsum.default in layers.1.up",
    ]


def test_lookup_names_an_update_once() -> None:
    assert "  update    S(0)S(0) -> S(1)S(0)  all_to_all dp 512 B, 2.00 us" in lookup(stepped(example()), "layers.0.up.weight")


def test_lookup_as_json_names_every_tensor() -> None:
    found = json.loads(lookup_json(example(), "*.up.weight"))
    assert [entry["name"] for entry in found] == [f"layers.{i}.up.weight" for i in range(3)]
    assert found[0]["layout"] == "S(1)S(0)"
    assert found[0]["local_shape"] == [64, 8]
    assert found[0]["reshards"][0]["steps"][0]["kind"] == "all_gather"


def test_a_plan_without_collectives_or_modules_still_reads() -> None:
    plan: Plan = example()
    bare = dataclasses.replace(plan, reshards=(), ops=tuple(dataclasses.replace(op, module="") for op in plan.ops))
    assert "Collectives: none" in str(bare)


def test_control_characters_in_names_do_not_reach_the_terminal() -> None:
    text = str(dataclasses.replace(example(), name="evil\x1b[2Jname"))
    assert text.startswith("evil\\x1b[2Jname: ")


def test_an_output_is_named_by_its_innermost_module() -> None:
    outputs = {"l.0": [3, 4, 9], "l.0.attn": [3, 4, 7], "l.0.attn.o": [7], "l.0.mlp": [8]}
    assert output_names(outputs) == {3: "l.0.attn:out.0", 4: "l.0.attn:out.1", 7: "l.0.attn.o", 8: "l.0.mlp", 9: "l.0"}


def test_what_fills_the_memory_counts_all_copies_of_a_layer() -> None:
    holders = tuple(MemoryEntry(name=f"h.{i}.w", category="optimizer", nbytes=2048) for i in range(4))
    memory = dataclasses.replace(example().memory, holders=(MemoryEntry(name="head", category="parameters", nbytes=4096), *holders))
    assert largest_holders(memory, 5) == ["h.{0..3}.w (optimizer) 8.00 KiB", "head (parameters) 4.00 KiB"]


def test_tables_align() -> None:
    assert table([("a", "1"), ("bbb", "22")], right=(1,), header=True) == ["  a     1", "  ---  --", "  bbb  22"]
    assert table([]) == []
