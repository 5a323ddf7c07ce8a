"""Eager forms: parallelize_module files and Hugging Face tp_plans run and compute what the model computes, or refuse."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import config_file, planned, traced

import solver_shard
from solver_shard.errors import InputError
from solver_shard.exporters import huggingface, parallelize
from solver_shard.exporters.eager import implied, read_eager
from solver_shard.graph.pins import parse_pin, resolve_pins
from solver_shard.layout import Layout
from solver_shard.plan.plan import Plan

WEIGHTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def counted(plan: Plan, *, shared: bool) -> int:
    """How many all-reduces the form issues along the tensor axis."""
    return sum(len(found) for move, found in implied(plan, read_eager(plan), shared=shared).items() if move.kind == "all_reduce")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What four real processes found of every exported program."""
    folder = tmp_path_factory.mktemp("exported")
    plans = {
        "megatron": planned("tp=4", "megatron"),
        "fsdp": planned("dp=2,tp=2", "dp=zero3,tp=megatron"),
        "replicated": planned("dp=2,tp=2", "dp=ddp,tp=megatron"),
        "vocabulary": planned("tp=4", "tp=megatron+vocab-parallel"),
        "sequence": planned("tp=4", "megatron-sp"),
    }
    for name, plan in plans.items():
        made = parallelize.export(plan, lossy=name in ("vocabulary", "sequence"))
        (folder / f"{name}.py").write_text(made.text)
    (folder / "hf.json").write_text(huggingface.export(plans["megatron"], lossy=True).text)
    worker = Path(__file__).parents[1] / "eager_worker.py"
    path = os.pathsep.join([str(Path(solver_shard.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    job = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "4",
            "--master-port",
            str(free_port()),
            str(worker),
            str(folder),
        ],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert job.returncode == 0, job.stderr[-4000:]
    assert "step 0: loss" in job.stdout  # the first file, as a program
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.parametrize("name", ["megatron", "fsdp", "replicated", "vocabulary", "sequence", "hf"])
def test_loss_and_gradients_are_those_of_the_unsharded_model(ran: dict[str, Any], name: str) -> None:
    assert ran[name]["loss"] == pytest.approx(ran[name]["expected"], rel=1e-5)
    assert ran[name]["gradient"] < 1e-5


def test_all_reduces_are_as_many_as_predicted(ran: dict[str, Any]) -> None:
    megatron = planned("tp=4", "megatron")
    assert ran["megatron"]["counts"] == {"all_reduce": counted(megatron, shared=True)} == {"all_reduce": 8}
    assert ran["hf"]["counts"] == {"all_reduce": counted(megatron, shared=False)} == {"all_reduce": 14}
    assert ran["fsdp"]["counts"]["all_reduce"] == 8


def test_parameters_lie_as_the_plan_says(ran: dict[str, Any]) -> None:
    plan = planned("dp=2,tp=2", "dp=zero3,tp=megatron")
    assert ran["placements"]["model.layers.0.self_attn.q_proj.weight"] == "(Shard(dim=1), Shard(dim=0))"
    assert str(plan.layouts["model.layers.0.self_attn.q_proj.weight"]) == "S(1)S(0)"
    assert ran["placements"]["model.layers.1.mlp.down_proj.weight"] == "(Shard(dim=0), Shard(dim=1))"


def test_megatron_is_said_without_loss() -> None:
    made = parallelize.export(planned("tp=4", "megatron"))
    assert not made.dropped
    assert '"model.layers.*.self_attn.o_proj": RowwiseParallel(),' in made.text
    compile(made.text, "made", "exec")


@pytest.mark.parametrize(
    ("plan", "tensor", "why"),
    [
        (("tp=4", "megatron-sp"), "layernorm.weight", "its gradient is summed over it"),
        (("tp=4", "tp=megatron+vocab-parallel"), "_log_softmax", "'class-statistics'"),
        (("dp=4", "zero1"), "model.layers.{0,1}.self_attn.q_proj.weight", "optimizer state S(0)"),
    ],
)
def test_a_plan_that_cannot_be_said_is_refused_by_tensor(plan: tuple[str, str], tensor: str, why: str) -> None:
    with pytest.raises(InputError, match="cannot express this plan") as refused:
        parallelize.export(planned(*plan))
    assert tensor in str(refused.value)
    assert why in str(refused.value)
    lossy = parallelize.export(planned(*plan), lossy=True)
    assert lossy.dropped
    assert all(f"#   {item}" in lossy.text for item in lossy.dropped)


def test_an_order_that_fully_shard_does_not_have_is_refused() -> None:
    """dp cuts dim 0 first, and fully_shard would cut it after tp."""
    plan = planned("dp=2,tp=2", "dp=zero3,tp=megatron")
    name = "model.layers.0.self_attn.q_proj.weight"

    def changed(text: str) -> Plan:
        layout = Layout.parse(text)
        tensors = tuple(dataclasses.replace(t, layout=layout, state=layout) if t.name == name else t for t in plan.tensors)
        return dataclasses.replace(plan, tensors=tensors)

    with pytest.raises(InputError, match=r"dim 0 cut by dp then tp"):
        parallelize.export(changed("S(0)S(0)"))
    assert not parallelize.export(changed("_S(0)S(0)")).dropped


def test_gradients_of_norms_of_cut_heads_are_not_forgotten() -> None:
    """A norm between a module cut by columns and attention acts on this process's heads alone."""
    plan = planned("tp=4", "megatron")
    norm = next(t for t, tensor in enumerate(plan.tensors) if tensor.name == "model.layers.0.input_layernorm.weight")
    at = next(i for i, op in enumerate(plan.ops) if op.module == "model.layers.0.mlp.act_fn" and op.phase == "forward")
    op = plan.ops[at]
    fake = dataclasses.replace(op, operands=(*op.operands, norm), operand_layouts=(*op.operand_layouts, Layout.parse("R")))
    changed = dataclasses.replace(plan, ops=(*plan.ops[:at], fake, *plan.ops[at + 1 :]))
    with pytest.raises(InputError, match="its gradient is summed over it"):
        parallelize.export(changed)
    assert '"model.layers.*.input_layernorm": "replicate"' not in huggingface.export(changed, lossy=True).text
    assert "replicated_with_grad_allreduce" in huggingface.export(changed, lossy=True).text


def test_sums_that_a_plan_reduces_after_the_residual_are_reduced_before_it() -> None:
    """Adding the product to a part of the residual and reducing the sum is as good: the solver may choose either."""
    plan = planned("tp=4", "megatron")
    partial = Layout.parse("P(sum)")
    late = [i for i, op in enumerate(plan.ops) if op.phase == "forward" and op.name == "aten.add.Tensor" and op.module == "model.layers.0"]
    assert len(late) == 2
    ops = list(plan.ops)
    for i in late:
        ops[i] = dataclasses.replace(ops[i], operand_layouts=(partial, partial), result_layouts=(partial,))
    changed = dataclasses.replace(plan, ops=tuple(ops))
    assert read_eager(changed).modules == read_eager(plan).modules
    made = parallelize.export(changed)
    assert not made.dropped
    assert any("before they are added to a residual" in note for note in made.notes)
    outputs = dataclasses.replace(changed, outputs=(ops[late[0]].results[0],))
    with pytest.raises(InputError, match="read as P"):  # nobody reduces a sum that is handed over
        parallelize.export(outputs)


def test_names_of_a_plan_stay_names_in_the_program() -> None:
    plan = planned("tp=4", "megatron")
    evil = 'x"\n"""+__import__("os").abort()+"""\\'
    tensors = tuple(dataclasses.replace(t, name=t.name.replace("o_proj", evil)) for t in plan.tensors)
    tree = ast.parse(parallelize.export(dataclasses.replace(plan, tensors=tensors), lossy=True).text)
    assert any(isinstance(node, ast.Constant) and evil in str(node.value) for node in ast.walk(tree))
    assert not any(isinstance(node, ast.Attribute) and node.attr == "abort" for node in ast.walk(tree))


def test_tp_plan_of_an_inference_plan_is_the_models_plan() -> None:
    """transformers resolves every rule, and shards exactly the weights that the plan cuts."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    plan = planned("tp=2", "megatron", forward_only=True, pins=("lm_head:out=R",))  # each device has all logits, to sample from
    made = huggingface.export(plan)
    assert not made.dropped
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in json.loads(Path(config_file()).read_text()).items() if k != "architectures"}))
    model.tp_plan = json.loads(made.text)["tp_plan"]
    resolved, _, _ = model._resolve_parallel_plans(DistributedConfig.from_dict(json.loads(made.text)))
    styles = {"S(0)": ("colwise", "colwise_gather_output"), "S(1)": ("rowwise",), "R": ("replicate",)}
    for tensor in plan.tensors:
        if tensor.role == "parameter":
            assert resolved[tensor.name] in styles[str(tensor.layout)]


def test_training_in_transformers_is_refused_for_its_extra_collectives() -> None:
    with pytest.raises(InputError, match=r"q_proj, .*4 all_reduce .* the form issues 10"):
        huggingface.export(planned("tp=4", "megatron"))


def test_tp_plan_comes_back_as_pins() -> None:
    program, _ = traced()
    plan = planned("tp=4", "megatron")
    pins = huggingface.read(huggingface.export(plan, lossy=True).text, program)
    assert pins == tuple(f"{t.name}=tp={t.layout}" for t in plan.tensors if t.role == "parameter")
    assert parallelize.read(parallelize.export(plan).text, program) == tuple(pin for pin in pins if not pin.endswith("R"))
    resolve_pins([parse_pin(text, plan.mesh) for text in pins], program, plan.mesh)
    again = solver_shard.optimize(program, mesh="tp=4", pins=pins)
    assert {name: again.layouts[name] for name in plan.gradients} == {name: plan.layouts[name] for name in plan.gradients}


def test_the_plan_of_a_llama_config_is_read_without_its_prefix() -> None:
    from transformers import LlamaConfig

    program, _ = traced()
    pins = huggingface.read(json.dumps({"base_model_tp_plan": LlamaConfig.base_model_tp_plan}), program)
    assert len(pins) == 14
    assert pins[0] == "model.layers.0.self_attn.q_proj.weight=tp=S(0)"
    dictionary = json.dumps({f"layers.*.mlp.{name}": "ColwiseParallel" for name in ("gate_proj", "up_proj")})
    with pytest.raises(InputError, match=r"'\*layers.*' matches"):
        parallelize.read(dictionary, program)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"model.norm": "packed_colwise"}', "cannot be said as pins"),
        ('{"model.nrom": "replicate"}', "closest names"),
        ('["colwise"]', "no tp_plan"),
        ("__import__('os').getcwd()", "is no literal|calls"),
        ("{'a': " * 60 + "1" + "}" * 60, "nested deeper"),
        ('{"model.norm": "colwise", "model.*": "replicate"}', "disagree on model.norm.weight"),
    ],
)
def test_a_wrong_tp_plan_gets_a_clear_error(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        huggingface.read(text, traced()[0])
