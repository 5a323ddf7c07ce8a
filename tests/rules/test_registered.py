"""Strategies that torch registers with DTensor: used where they are proven on numbers, or where the caller trusts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from solver_shard.api import optimize
from solver_shard.plan.io import load_plan
from solver_shard.plan.plan import Plan
from solver_shard.rules.check.instances import parse_instance, tensor_of
from solver_shard.rules.check.shards import run_local, run_whole, verify
from solver_shard.rules.registered import _proven
from solver_shard.rules.rule import Rule
from solver_shard.rules.rulebook import build_rule
from solver_shard.rules.table import load_table
from solver_shard.verification import verify as verify_plan

pytestmark = pytest.mark.usefixtures("one_thread")
TABLE = load_table()


def rule_of(op: str, text: str, *, trust: bool = False) -> Rule:
    call = parse_instance(op, text)
    results = [tensor_of(f"y{i}", value) for i, value in enumerate(run_whole(call.op, call.draw(0)))]
    return build_rule(call.op, call.operands(), results, TABLE, trust_dtensor=trust)


def names(op: str, text: str, *, trust: bool = False) -> list[str]:
    return [s.name for s in rule_of(op, text, trust=trust).strategies()]


WRONG = {
    "a maximum of what a threshold replaces": ("aten.threshold.default", "self=f64[6, 6], threshold=0.5, value=20", "P(max)<-P(max)"),
    "a maximum of frequencies": ("aten._fft_c2r.default", "self=c128[4, 6], dim=(1,), normalization=0, last_dim_size=10", "P(max)<-P(max)"),
    "rows of a copy that are not those of the original": ("aten.view_copy.default", "self=f64[6, 4], size=(4, 6)", "S(0)<-S(0)"),
    "zeros for numbers that are none": ("aten.nansum.default", "self=f64[6], dim=None", "P(sum)<-P(sum)"),
}


@pytest.mark.parametrize(("op", "text", "strategy"), WRONG.values(), ids=WRONG.keys())
def test_what_is_registered_and_wrong_is_used_on_trust_alone(op: str, text: str, strategy: str) -> None:
    assert strategy in names(op, text, trust=True)
    assert strategy not in names(op, text)
    assert rule_of(op, text, trust=True).source == "unproven"


PROVEN = {
    "aten.logaddexp.default": ["self=f64[6, 6], other=f64[6, 6]"],
    "aten.exp2.default": ["self=f64[6, 6]", "self=f64[4, 6, 2, 3]"],
    "aten.threshold.default": ["self=f64[6, 6], threshold=0.5, value=20"],
    "aten.upsample_nearest3d.default": ["self=f64[2, 6, 2, 2, 2], output_size=(4, 4, 4)"],
    "aten._fft_c2r.default": ["self=c128[4, 6], dim=(1,), normalization=0, last_dim_size=10"],
    "aten.avg_pool3d.default": ["self=f64[2, 6, 4, 4, 4], kernel_size=(2, 2, 2)"],
    "aten.view_copy.default": ["self=f64[6, 4], size=(6, 4)"],
}


@pytest.mark.parametrize("op", PROVEN)
def test_what_is_listed_holds_on_other_numbers(op: str) -> None:
    for text in PROVEN[op]:
        call, rule = parse_instance(op, text), rule_of(op, text)
        assert rule.source == "dtensor", text
        for turn in range(3):
            operands = call.draw(turn)
            shapes = [tuple(value.shape) for value in run_whole(call.op, operands)]
            for mesh in ((2,), (3,), (2, 2)):
                checked = verify(call.op, operands, rule, run_local, result_shapes=shapes, mesh_shape=mesh, seed=turn + 7)
                assert not checked.failures, checked.failures[0]


def test_a_number_in_the_call_lets_nothing_pending_pass() -> None:
    assert "P(max)<-P(max)" in names("aten.exp2.default", "self=f64[6, 6]")
    assert not any("P(" in name for name in names("aten.celu.default", "self=f64[6, 6], alpha=-0.5"))


def test_another_torch_has_nothing_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    _proven.cache_clear()
    try:
        assert rule_of("aten.exp2.default", "self=f64[6, 6]").source == "fallback"
    finally:
        _proven.cache_clear()


def test_every_listed_op_is_registered_and_has_no_row() -> None:
    from torch.distributed.tensor import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    known = {str(op) for op in (*propagator.op_strategy_funcs, *propagator.op_single_dim_strategy_funcs)}
    assert set(_proven()) <= known - set(TABLE)


class Shifted(nn.Module):
    """Words whose numbers are doubled by a shift, which torch registers with DTensor and nobody proved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(16, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(torch.ops.aten.__lshift__.Scalar(ids, 1)).square().mean()


IDS = {"ids": torch.arange(64).view(8, 8) % 8}


def planned(**more: object) -> Plan:
    return optimize(Shifted(), IDS, mesh="2", work_limit=1, **more)  # type: ignore[arg-type]


def test_an_op_with_nothing_proven_is_replicated_and_listed_and_trusted_when_asked(tmp_path: Path) -> None:
    plan = planned()
    (shift,) = (op for op in plan.ops if "lshift" in op.name)
    assert (shift.source, set(shift.strategy)) == ("fallback", {"R"})
    assert "Ops without a rule, replicated on every axis" in str(plan)
    assert "aten.__lshift__.Scalar" in str(plan)
    assert verify_plan(plan, Shifted(), IDS).holds
    trusting = planned(trust_dtensor=True)
    (shift,) = (op for op in trusting.ops if "lshift" in op.name)
    assert shift.source == "unproven"
    assert "NOT PROVEN" in str(trusting)
    assert "DTensor trusted" in str(trusting)
    trusting.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").options.trust_dtensor
    assert json.loads((tmp_path / "plan.json").read_text())["options"]["trust_dtensor"] is True


def test_a_threshold_in_a_model_is_cut_and_holds() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.threshold(self.up(x), 0.5, 20.0).square().mean()

    inputs = {"x": torch.randn(8, 8)}
    plan = optimize(Model(), inputs, mesh="2", work_limit=1, pins=["x=S(0)"])
    assert {op.source for op in plan.ops if op.name == "aten.threshold.default"} == {"dtensor"}
    assert verify_plan(plan, Model(), inputs).holds
