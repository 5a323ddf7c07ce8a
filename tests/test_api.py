"""The main job in one call, on a model small enough to check by eye."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

import solver_shard
import solver_shard.infeasible
import solver_shard.solve.engine
from solver_shard.errors import InfeasibleError, InputError, SolverShardError
from solver_shard.plan.io import check_plan, plan_from_json, plan_schema, plan_to_json
from solver_shard.plan.plan import Plan
from solver_shard.solve.solution import Solution, Status
from solver_shard.tracing.load import program_of


def mlp() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(256, 1024, bias=False), torch.nn.ReLU(), torch.nn.Linear(1024, 256, bias=False))
        return model, (torch.empty(64, 256),)


def plan_of(**options: Any) -> Plan:
    model, inputs = mlp()
    options = {"mesh": "dp=2,tp=2", "loss_fn": lambda output: output.pow(2).mean(), "time_limit": 30.0, **options}
    return solver_shard.optimize(model, inputs, **options)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(progress=lambda line: None)


def test_the_plan_is_complete_and_agrees_with_itself(plan: Plan) -> None:
    check_plan(plan)
    assert plan_from_json(plan_to_json(plan)) == plan
    jsonschema.Draft202012Validator(plan_schema()).validate(json.loads(plan_to_json(plan)))
    assert set(plan.gradients) == {"0.weight", "2.weight"}
    assert plan.certificate.objective == plan.costs.objective == plan.costs.total_ns
    assert plan.certificate.bound <= plan.certificate.objective
    assert plan.costs.total_ns == plan.costs.compute_ns + plan.costs.update_ns + plan.costs.communication_ns
    assert plan.costs.compute_ns == sum(op.nanoseconds for op in plan.ops)
    assert plan.costs.communication_ns == sum(reshard.nanoseconds for reshard in plan.reshards)
    assert plan.memory.peak == sum(plan.memory.at_peak.values()) <= plan.memory.limit
    assert "Sequential" in str(plan)
    assert {"trace", "lower", "solve", "plan"} <= set(plan.certificate.stages)


def test_the_default_limit_is_nine_tenths_of_the_device(plan: Plan) -> None:
    device, options = plan.cluster.device, plan.options
    assert (options.memory_limit, options.reserve) == (int(device.memory * 0.9), 0)
    assert plan.memory.limit == options.usable_memory == options.memory_limit


def test_a_limit_that_is_given_is_less_the_reserve_of_the_cluster() -> None:
    plan = plan_of(memory="70GiB")
    assert plan.options.reserve == plan.cluster.device.reserve
    assert plan.memory.limit == (70 << 30) - plan.cluster.device.reserve
    assert "limit        70.0 GiB per device, less a reserve of 6.00 GiB" in str(plan)


def test_peak_and_reserve_together_keep_the_limit(plan: Plan) -> None:
    least = plan_of(objective="memory", gap=0.0).memory.peak
    tight = plan_of(memory=least + 3000, reserve=3000)
    assert tight.memory.peak == tight.memory.limit == least
    assert "no reserve" in str(plan_of(reserve="0"))
    with pytest.raises(InfeasibleError, match=r"less the reserve of 2\.93 KiB\): .*at least the peak found and the reserve together"):
        plan_of(memory=least + 2999, reserve=3000)


def test_pins_are_kept_and_written_down() -> None:
    pins = ["input=R,R", "*.weight=tp=S(0)", "*.weight=dp=R"]
    plan = plan_of(pins=pins)
    assert {name: str(plan.layouts[name]) for name in ("input", "0.weight", "2.weight")} == {
        "input": "RR",
        "0.weight": "RS(0)",
        "2.weight": "RS(0)",
    }
    assert plan.options.pins == tuple(pins)


def test_a_free_search_is_said_in_the_certificate() -> None:
    assert plan_of(tied=False).certificate.problem == "free"


def test_optimizer_state_and_master_weights_count_as_asked() -> None:
    def resident(dtype: torch.dtype, **options: Any) -> int:
        model, inputs = mlp()
        made = solver_shard.optimize(
            model.to(dtype), (inputs[0].to(dtype),), mesh="1", loss_fn=lambda output: output.float().pow(2).mean(), **options
        )
        assert plan_from_json(plan_to_json(made)).options == made.options
        elements = sum(p.numel() for p in model.parameters())
        assert made.memory.at_peak["optimizer"] % elements == 0
        return made.memory.at_peak["optimizer"] // elements

    converted, root = 4, 4  # gradients for the masters, and the roots of the second moments: the update is the fullest moment
    assert resident(torch.bfloat16) == 12 + converted + root
    assert resident(torch.bfloat16, optimizer="adamw-fused") == 12 + converted
    assert resident(torch.bfloat16, master_weights=False) == 4 + root // 2
    assert resident(torch.bfloat16, state_bytes=2) == 6 + converted
    assert resident(torch.float32, state_bytes=4, optimizer="sgd") == 4
    assert resident(torch.float32, optimizer="none") == 0


def test_numbers_of_other_types_are_kept_as_plain_ones() -> None:
    made = plan_of(overlap=np.float64(0.5), seed=np.int64(3), memory_weight=np.int32(2), gap=0, time_limit=30, master_weights=1)
    assert plan_from_json(plan_to_json(made)) == made
    assert (made.options.overlap, made.options.seed, made.options.master_weights) == (0.5, 3, True)


def test_where_nothing_repeats_the_proof_is_for_every_plan(plan: Plan) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False))
    made = solver_shard.optimize(model, (torch.empty(8, 8),), mesh="2", loss_fn=torch.sum)
    assert made.certificate.problem == "free"


def test_a_time_too_short_is_not_called_infeasible(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Solution(status=Status.UNKNOWN)
    monkeypatch.setattr(solver_shard.solve.engine, "solve", lambda graph, **options: nothing)
    monkeypatch.setattr("solver_shard.baselines.hints.candidates", lambda *arguments, **options: iter(()))  # nor is there a template
    monkeypatch.setattr("solver_shard.baselines.hints._completed", lambda *arguments: None)  # nor any other baseline
    with pytest.raises(SolverShardError, match=r"found within 1e-09 s, .*; give more --time-limit") as caught:
        plan_of(time_limit=1e-9)
    assert not isinstance(caught.value, InfeasibleError)


def test_an_infeasible_limit_names_the_pins_that_take_part() -> None:
    with pytest.raises(InfeasibleError, match=r"drop or loosen a pin \('0.weight=R,R', '2.weight=R,R'\)") as caught:
        plan_of(memory="3.9MiB", reserve=0, pins=["0.weight=R,R", "input=S(0),*", "2.weight=R,R"])
    assert caught.value.conflict is not None
    assert caught.value.conflict.pins == ("0.weight=R,R", "2.weight=R,R")
    with pytest.raises(InfeasibleError) as caught:
        plan_of(memory="64KiB", reserve=0, pins=["*=R,R"])
    assert "drop or loosen a pin" not in str(caught.value), "64 KiB are too small without pins too"


@pytest.mark.parametrize("pins", [(), ("2.weight=*,*",)])
def test_a_template_that_does_not_carry_through_the_model_is_named_instead_of_the_memory(pins: tuple[str, ...]) -> None:
    with pytest.raises(
        InfeasibleError, match=r"template 'context-parallel', .* do not carry through .*; use another template or none$"
    ) as caught:
        plan_of(template="context-parallel", pins=pins)
    assert any("cannot run: 0: aten.einsum.default (backward)" in line for line in caught.value.details)


def test_conflicts_that_are_not_found_in_time_are_said_to_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver_shard.infeasible, "compute_infeasible_subsystem", lambda *given, **options: None)
    with pytest.raises(InfeasibleError, match=r"drop or loosen a pin \('\*=R,R'\)") as caught:
        plan_of(memory="64KiB", reserve=0, pins=["*=R,R"])
    assert caught.value.conflict is None
    assert caught.value.details[-1] == "which times and pins conflict was not found in the time for it; give more --time-limit"
    with pytest.raises(InfeasibleError, match=r"template 'context-parallel', .* may not carry through .* or give more --memory"):
        plan_of(template="context-parallel")


def test_a_template_and_a_pin_that_leave_a_tensor_no_layout_are_both_named() -> None:
    with pytest.raises(
        InputError, match=r"template leaves '0.weight' no layout that its pins allow .*; use another one, or loosen the pin"
    ):
        plan_of(template="megatron", pins=["0.weight=S(0),R"])


def test_the_forward_pass_of_a_traced_step_cannot_be_asked_for() -> None:
    model, inputs = mlp()
    program, _ = program_of(model, inputs, loss_fn=lambda output: output.pow(2).mean())
    with pytest.raises(InputError, match="has a backward pass; trace the model with forward_only=True"):
        solver_shard.optimize(program, mesh="2", forward_only=True)


def test_a_limit_too_small_is_infeasible_and_says_which_limit_would_do() -> None:
    with pytest.raises(InfeasibleError, match=r"no plan of Sequential .*fits into 64\.0 KiB per device"):
        plan_of(memory="64KiB", reserve=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "dp=0"}, "size 0"),
        ({"cluster": "h1000"}, "unknown cluster 'h1000'"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion'"),
        ({"memory": "much"}, "cannot read memory size 'much'"),
        (
            {"memory": "5GiB"},
            "a reserve of 6.00 GiB leaves nothing of the memory limit of 5.00 GiB; .*cluster h100 is 6.00 GiB; 0 for none",
        ),
        ({"reserve": "-1"}, "cannot read memory size '-1'"),
        ({"objective": "beauty"}, "objective 'beauty' is not known; legal: time, memory"),
        ({"pins": ["0.weight=R"]}, "has 1 placement, mesh dp=2,tp=2 has 2 axes"),
        ({"pins": ["weight=R,R"]}, r"'\*weight' matches"),
        ({"memory_weight": -1}, "memory weight -1 is not legal"),
        ({"memory_weight": 0.5}, "memory weight 0.5 is not legal"),
        ({"memory_weight": 10**10}, "memory weight 10000000000 is not legal; .* 0 to 1000000000"),
        ({"memory_weight": "3"}, "memory weight '3' is not legal"),
        ({"overlap": "half"}, "overlap 'half' is not legal"),
        ({"gap": None}, "gap None is not legal"),
        ({"time_limit": None}, "time limit None is not legal"),
        ({"seed": True}, "seed True is not legal"),
        ({"pins": None}, 'pins=None is not legal; give a text or a list of texts, as in "PATTERN=S'),
        ({"template": 3}, 'template=3 is not legal; give a text or None, as in "dp=zero3,tp=megatron"'),
        ({"template": ["ddp"]}, r"template=\['ddp'\] is not legal"),
        ({"rules": 3}, "rules=3 is not legal; give a text, a path or a list of texts or paths"),
        ({"rules": None}, "rules=None is not legal"),
        ({"rules": [3]}, r"rules=\[3\] is not legal"),
        ({"split": None}, 'split=None is not legal; .* or True or False, as in "tp=8x2"'),
        ({"split": {"tp": 2}}, "split={'tp': 2} is not legal"),
        ({"pins": [3]}, r"pins=\[3\] is not legal"),
        ({"cluster": None}, "cluster=None is not legal; give a text, a path or a Cluster"),
        ({"optimizer": None}, "optimizer=None is not legal; give a text"),
        ({"loss_fn": "mse"}, "loss_fn='mse' is not legal; give a function or None"),
        ({"seed": -1}, "seed -1 is not legal; give a whole number, 0 to"),
        ({"seed": 2**31}, "seed 2147483648 is not legal"),
        ({"time_limit": float("inf")}, "time limit inf is not legal"),
        ({"work_limit": float("inf")}, "work limit inf is not legal"),
        ({"state_bytes": 4, "optimizer": "none"}, "4 bytes of optimizer state were asked with optimizer none"),
        ({"state_bytes": 2000}, "2000 bytes of optimizer state per element is not legal"),
        ({"total_time_limit": "5"}, "total time limit '5' is not legal"),
        ({"stop": True}, "stop=True is not legal; give a function or None"),
        ({"incumbent": "plan.json"}, "incumbent='plan.json' is not legal; give a function or None"),
        ({"batch": 4}, "batch cannot be given with a module"),
        ({"forward_only": "no"}, "forward_only='no' is not legal; give True or False"),
        ({"master_weights": None}, "master_weights=None is not legal; give True or False"),
        ({"tied": 2}, "tied=2 is not legal; give True or False"),
        ({"fusion": np.array([1, 2])}, r"fusion=array\(\[1, 2\]\) is not legal; give True or False"),
        ({"objective": np.array([1, 2])}, r"objective array\(\[1, 2\]\) is not known; legal: time, memory"),
        ({"command": ["solve"]}, r"command=\['solve'\] is not legal; give a text or None"),
    ],
)
def test_wrong_arguments_are_told_what_is_legal(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_of(**options)


def test_a_model_is_asked_for_what_it_needs(tmp_path: Path) -> None:
    model, inputs = mlp()
    with pytest.raises(InputError, match="example inputs for Sequential are missing"):
        program_of(model)
    with pytest.raises(InputError, match="the batch size for 'gpt2' is missing"):
        program_of("gpt2", seq=8)
    for text in ("my_pkg/models.py:build", "my_pkg.models:", "gpt2:"):
        with pytest.raises(InputError, match=r"no file and not an entry point.*my_pkg.models:build"):
            program_of(text, batch=4, seq=8)
    with pytest.raises(InputError, match="inputs cannot be given with a preset"):
        program_of("gpt2", inputs, batch=4)
    with pytest.raises(InputError, match="batch, seq cannot be given with an entry point"):
        program_of("some.package:build", batch=4, seq=8)
    with pytest.raises(InputError, match=r"neither a preset nor a config file; presets: .*gpt2"):
        program_of("gpt7", batch=4, seq=8)


def test_a_traced_program_can_be_given_again() -> None:
    model, inputs = mlp()
    program, source = program_of(model, inputs, forward_only=True)
    assert source == "module torch.nn.modules.container.Sequential"
    plan = solver_shard.optimize(program, mesh="2", forward_only=True)
    assert plan.name == "Sequential"
    assert plan.costs.update_ns == 0
    assert plan.gradients == {}


def test_a_norm_to_clip_to_is_not_asked_for() -> None:
    with pytest.raises(InputError, match=r"clip=1\.0 is not legal; give True or False"):
        solver_shard.optimize("gpt2", batch=2, seq=8, mesh="2", clip=1.0)  # type: ignore[arg-type]
