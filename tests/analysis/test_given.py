"""Plans for other tools: what we export comes back at its own price, and what a tool would compute wrongly is refused."""

from __future__ import annotations

import functools
import json

import pytest
from tiny_llama import planned, traced

from solver_shard.analysis.compare import Comparison, compare
from solver_shard.analysis.other_tools import Style, ToolPlan, follow, read_parallelize, read_tp_plan
from solver_shard.analysis.reopen import Retraced
from solver_shard.errors import InputError
from solver_shard.exporters import parallelize
from solver_shard.mesh import Mesh
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.tracing.load import traced_of

pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def tutorial() -> Program:
    return traced_of("tutorial_llama:build")[0]


def compared(plan: Plan, *given: ToolPlan) -> Comparison:
    return compare(plan, recipes=(), given=given, retraced=Retraced(program=traced()[0], traced=None, source=""))


@pytest.mark.parametrize(
    ("mesh", "template"), [("tp=4", "megatron"), ("dp=2,tp=2", "dp=zero3,tp=megatron"), ("dp=2,tp=2", "dp=ddp,tp=megatron")]
)
def test_an_exported_plan_comes_back_at_its_own_price(mesh: str, template: str) -> None:
    plan = planned(mesh, template)
    found = compared(plan, read_parallelize(parallelize.export(plan).text, name="exported.py"))
    assert not found.left_out
    assert found.row("exported.py").by_kind_ns == found.row("ours").by_kind_ns
    assert found.row("exported.py").step_ns == found.row("ours").step_ns
    assert found.row("exported.py").peak == found.row("ours").peak


def test_a_tp_plan_reduces_the_gradient_once_for_every_projection() -> None:
    plan = planned("tp=4", "megatron")
    styles = {
        t.name.removesuffix(".weight"): "colwise" if str(t.layout) == "S(0)" else "rowwise" for t in plan.tensors if t.role == "parameter"
    }
    styles = {name: style for name, style in styles.items() if "_proj" in name}
    found = compared(plan, read_tp_plan(json.dumps({"tp_size": 4, "tp_plan": styles}), name="hf.json"))
    reduces = found.row("ours").by_kind_ns["all_reduce"]
    assert found.row("hf.json").by_kind_ns["all_reduce"] == reduces * 14 // 8  # per layer 2 + 5 where Megatron has 2 + 2
    assert "no rule names model.embed_tokens.weight, lm_head.weight: whole along tp" in found.row("hf.json").notes[1]


def test_a_tp_plan_for_another_number_of_devices_is_refused() -> None:
    given = read_tp_plan('{"tp_size": 8, "tp_plan": {"layers.*.mlp.up_proj": "colwise"}}', name="hf.json")
    with pytest.raises(InputError, match=r"hf.json is for 8 tensor-parallel devices, and tp of tp=4 has 4"):
        follow(given, traced()[0], Mesh.parse("tp=4"))


def test_arguments_of_a_distributed_config_say_what_the_data_axes_do() -> None:
    plan = {"layers.*.mlp.up_proj": "colwise"}
    assert read_tp_plan(json.dumps(plan), name="x").data == "zero3"
    assert read_tp_plan(json.dumps({"tp_plan": plan, "dp_replicate_size": 4}), name="x").data == "ddp"
    assert read_tp_plan(json.dumps({"tp_plan": plan, "dp_replicate_size": 4, "fsdp_size": 2}), name="x").data == "zero3"


def test_styles_are_read_with_their_defaults() -> None:
    text = """{"a": RowwiseParallel(output_layouts=Shard(1), use_local_output=False), "b": "ColwiseParallel",
        "c": SequenceParallel(sequence_dim=0)}"""
    styles = read_parallelize(text, name="x").styles
    assert styles["a"] == Style(cut="rows", arrives=-1, given=1, local=False)
    assert styles["b"] == Style(cut="columns", arrives=None, given=-1)
    assert styles["c"] == Style(cut="sequence", arrives=0, given=0, local=False)


def test_a_python_file_is_read_and_not_run() -> None:
    text = "from torch import nn\nraise SystemExit\nPLAN = {'output': ColwiseParallel(output_layouts=Replicate())}\n"
    assert list(read_parallelize(text, name="x.py").styles) == ["output"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"layers.*.attention.wo": RowwiseParallel()}', r"takes its input for S\(2\), but .* arrives R there"),
        ('{"output": ColwiseParallel()}', r"_log_softmax.* would run on parts of plain tensors, .* from S\(2\) to R"),
        ('{"norm": SequenceParallel()}', r"takes its input for S\(1\), but .* arrives R there"),
        (
            '{"layers.*.attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())}',
            "more than linear modules",
        ),
        ('{"norm": ColwiseParallel()}', "step does not run it|neither an nn.Linear"),
        ('{"layers.*.attn": ColwiseParallel()}', "no module of .* is called 'layers.*.attn'"),
        ('{"output": ColwiseParallel(), "out*": RowwiseParallel()}', "disagree on output"),
    ],
)
def test_what_would_compute_something_else_is_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        follow(read_parallelize(text, name="tp.py"), tutorial(), Mesh.parse("tp=4"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"output": "FancyParallel"}', "which cannot be followed; known are ColwiseParallel"),
        ('{"output": ColwiseParallel(input_layouts=Partial())}', "the placement 'Partial' cannot be followed"),
        ('{"output": ColwiseParallel(fast=True)}', "no argument 'fast'"),
        ('{"output": ColwiseParallel(Replicate())}', "takes arguments by name"),
        ('{"output": PrepareModuleInput()}', "says where from and where to"),
        ('{"output": PrepareModuleInput(input_kwarg_layouts=3)}', "are dicts, as in"),
        ('{"output": PrepareModuleInput(input_kwarg_layouts={"x": Shard(1)}, desired_input_kwarg_layouts=[1])}', "are dicts, as in"),
        ('{"output": __import__("os")}', "no literal|calls"),
        ("[]", "no dict of parallel styles"),
    ],
)
def test_a_wrong_dict_gets_a_clear_error(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_parallelize(text, name="tp.py")


def test_a_tp_plan_with_a_style_that_cannot_be_followed_is_refused() -> None:
    with pytest.raises(InputError, match="styles moe_tp_experts cannot be followed"):
        read_tp_plan('{"layers.*.mlp.experts": "moe_tp_experts"}', name="hf.json")
