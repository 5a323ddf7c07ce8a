"""A verdict says that a plan holds where it does, and that it does not where something is wrong: a layout, a prediction, a number."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lowered import Lowered, lowered
from points import random_point
from torch import nn
from traced_models import squares

from solver_shard import verification
from solver_shard.errors import InputError, InternalError
from solver_shard.layout import Layout
from solver_shard.plan.plan import Plan
from solver_shard.tracing.huggingface import load
from solver_shard.verification import check, verify
from solver_shard.verification.subject import Subject, of_program, subject_of, widened
from solver_shard.verification.verdict import Verdict, collectives, differences, planned_traffic

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """Sizes that do not divide, a norm, and dropout where it is asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, 22), nn.LayerNorm(22), nn.Linear(22, 9)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(torch.tanh(self.norm(self.up(x)))))


SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 32,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "mixtral": {
        **SMALL, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip


@functools.cache
def subject(name: str) -> Subject:
    """A model with numbers, in 64 bits."""
    torch.manual_seed(0)
    if name in CONFIGS:
        model, inputs, _ = load(CONFIGS[name], batch=4, seq=8, weights=True)
        return widened(subject_of(model, inputs, name=name, labels=97, words=97))
    x = {"x": torch.zeros(10, 12)}
    made = {
        "net": lambda: subject_of(Net(), x, name=name, loss_fn=squares),
        "dropout": lambda: subject_of(Net(0.4), x, name=name, loss_fn=squares),
        "microbatches": lambda: subject_of(Net(0.4), x, name=name, loss_fn=squares, microbatches=3),
        "forward": lambda: subject_of(Net(), x, name=name, forward_only=True),
    }
    return widened(made[name]())


@functools.cache
def made(name: str, mesh: str, **options: Any) -> Lowered:
    return lowered(subject(name).program, mesh, **options)


def plan_of(name: str, mesh: str, seed: int = 0, **options: Any) -> Plan:
    case = made(name, mesh, **options)
    return case.plan(random_point(case.graph, seed))


CASES = [
    *[("net", mesh, seed, {}) for mesh in ("4", "2,2", "2,2,2") for seed in range(2)],
    *[("llama", mesh, seed, {}) for mesh, seed in (("4", 0), ("2,2", 1), ("2,4", 2))],
    ("mixtral", "2,2", 0, {}),
    ("dropout", "2,2", 0, {}),
    ("microbatches", "3", 0, {"microbatches": 3, "clip": True}),
    ("net", "2,2", 0, {"clip": True, "reduce_dtype": "f32"}),
    ("net", "2", 0, {"optimizer": "none"}),
]


@pytest.mark.parametrize(("name", "mesh", "seed", "options"), CASES, ids=str)
def test_random_plans_hold(name: str, mesh: str, seed: int, options: dict[str, Any]) -> None:
    plan, case = plan_of(name, mesh, seed, **options), subject(name)
    verdict = check(plan, case)
    assert verdict.holds, str(verdict)
    gradients = {d.name for d in verdict.differences if (d.kind, d.reference) == ("gradient", "graph")}
    assert gradients == set(plan.gradients)
    stepped = {d.name for d in verdict.differences if (d.kind, d.reference) == ("parameter", "model")}
    assert stepped == (set() if plan.options.optimizer == "none" else gradients)
    assert {d.reference for d in verdict.differences if d.kind == "loss"} == {"graph", "model"}
    assert sum(c.run for c in verdict.collectives) > 0
    assert max(d.tolerance for d in verdict.differences if d.reference == "graph") == (
        2e-4 if plan.options.reduce_dtype or plan.options.clip else 1e-11
    )


def test_a_forward_plan_holds_in_all_it_returns() -> None:
    case = subject("forward")
    plan = lowered(case.program, "2,2", optimizer="none")
    verdict = check(plan.plan(random_point(plan.graph, 3)), case)
    assert verdict.holds, str(verdict)
    assert {(d.kind, d.name) for d in verdict.differences} == {("output", "output")}


def test_a_program_alone_is_held_against_its_graph() -> None:
    case = of_program(subject("net").program)
    verdict = check(plan_of("net", "2,2"), case)
    assert verdict.holds
    assert {d.reference for d in verdict.differences} == {"graph"}
    assert "the model itself is not compared" in str(verdict)


# Planted faults


def _with_op(plan: Plan, change: Callable[[Plan], tuple[int, dict[str, Any]]]) -> Plan:
    i, changes = change(plan)
    ops = list(plan.ops)
    ops[i] = dataclasses.replace(ops[i], **changes)
    return dataclasses.replace(plan, ops=tuple(ops))


def _partial_called_average(plan: Plan) -> tuple[int, dict[str, Any]]:
    """A product whose parts are to be summed up, said to be averaged: half the value on two devices."""
    i = next(i for i, op in enumerate(plan.ops) if any("P(sum)" in str(x) for x in op.result_layouts))
    averaged = tuple(Layout.parse(str(x).replace("sum", "avg")) for x in plan.ops[i].result_layouts)
    return i, {"result_layouts": averaged}


def _stored_otherwise(plan: Plan) -> Plan:
    t = next(t for t, tensor in enumerate(plan.tensors) if tensor.name == "down.weight")
    other = "RR" if plan.tensors[t].layout != Layout.parse("RR") else "S(1)R"
    tensors = list(plan.tensors)
    tensors[t] = dataclasses.replace(tensors[t], layout=Layout.parse(other))
    return dataclasses.replace(plan, tensors=tuple(tensors))


def _with_steps(plan: Plan, change: Callable[[Any], Any]) -> Plan:
    """The first reshard with a collective, its steps changed."""
    k = next(k for k, r in enumerate(plan.reshards) if r.steps and r.steps[0].kind == "all_gather")
    reshards = list(plan.reshards)
    reshards[k] = dataclasses.replace(reshards[k], steps=(change(reshards[k].steps[0]), *reshards[k].steps[1:]))
    return dataclasses.replace(plan, reshards=tuple(reshards))


FAULTS: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "a corrupted layout": (_stored_otherwise, "the plan is not legal: .*'down.weight'"),
    "a wrong rule": (lambda plan: _with_op(plan, _partial_called_average), r"the plan is not legal: op \d+ .* has layout"),
    "wrong bytes": (
        lambda plan: _with_steps(plan, lambda step: dataclasses.replace(step, nbytes=step.nbytes + 8)),
        r"a device calls it with \d+ bytes, the plan says \d+",
    ),
    "a wrong kind": (
        lambda plan: _with_steps(plan, lambda step: dataclasses.replace(step, kind="all_reduce")),
        "step all_reduce on .* would reduce nothing|devices of one group hold different parts",
    ),
}


@pytest.mark.parametrize(("corrupt", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_fault_is_found(corrupt: Callable[[Plan], Plan], message: str) -> None:
    verdict = check(corrupt(plan_of("net", "2,2", 1)), subject("net"))
    assert not verdict.holds
    assert re.search(message, verdict.problem), verdict.problem
    assert verdict.problem in str(verdict)
    assert json.loads(verdict.to_json())["holds"] is False


def test_wrong_numbers_are_found_where_nothing_else_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the evaluator, which knows what a strategy leaves, only the numbers can tell."""
    monkeypatch.setattr(verification, "evaluate", lambda *_: None)
    plan = _with_op(plan_of("net", "2,2", 1), _partial_called_average)
    verdict = check(plan, subject("net"))
    assert not verdict.holds
    assert verdict.problem


def test_a_number_that_is_wrong_at_the_end_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, case = plan_of("net", "2,2", 1), subject("net")
    simulated = verification.simulate

    def off(*args: Any, **options: Any) -> Any:
        result = simulated(*args, **options)
        wrong = result.gradients["up.bias"] * (1 + 1e-9)
        return dataclasses.replace(result, gradients={**result.gradients, "up.bias": wrong})

    monkeypatch.setattr(verification, "simulate", off)
    verdict = check(plan, case)
    assert not verdict.holds
    assert [(d.kind, d.name) for d in verdict.differences if not d.holds] == [("gradient", "up.bias")]
    assert re.search(r"wrong: gradient up.bias \(\d\.\de-10 against the graph unsharded, f64\)", str(verdict))


def test_a_collective_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, case = plan_of("net", "2,2", 1), subject("net")
    simulated = verification.simulate

    def more(*args: Any, **options: Any) -> Any:
        result = simulated(*args, **options)
        key = next(iter(result.collectives))
        counts = {**result.collectives, key: result.collectives[key] + 1}
        return dataclasses.replace(result, collectives=counts)

    monkeypatch.setattr(verification, "simulate", more)
    verdict = check(plan, case)
    assert not verdict.holds
    assert sum(not c.holds for c in verdict.collectives) == 1
    assert "WRONG" in str(verdict)


def test_a_trace_that_departs_from_its_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = subject("net")
    assert case.model is not None
    other = Net()
    other.load_state_dict(case.model.state_dict())
    monkeypatch.setattr(other, "dropout", nn.Softplus())
    verdict = check(plan_of("net", "2,2"), dataclasses.replace(case, model=other))
    assert {d.reference for d in verdict.differences if not d.holds} == {"model"}


# The parts


Tensors = Sequence[float]


@pytest.mark.parametrize(
    ("found", "expected", "value"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.5 / (2 + 0.05)),  # the other tensor of the kind is 5 large
        ([math.nan, 2.0], [math.nan, 2.0], 0.0),
        ([math.nan, 2.0], [1.0, 2.0], math.inf),
        ([1.0, 2.0], [1.0, math.inf], math.inf),
        ([1.0, math.inf], [1.0, math.inf], 0.0),
        ([1.0], [1.0, 2.0], math.inf),
        ([1e-17, 0.0], [0.0, 0.0], 1e-17 / 0.05),  # a sum that cancels
    ],
)
def test_differences(found: Tensors, expected: Tensors, value: float) -> None:
    large = torch.tensor([5.0], dtype=torch.float64)
    made = {"a": torch.tensor(found, dtype=torch.float64), "b": large}
    (a, b) = differences("gradient", "graph", made, {"a": torch.tensor(expected, dtype=torch.float64), "b": large}, 1e-11)
    assert a.value == pytest.approx(value)
    assert a.holds == (a.value <= 1e-11)
    assert b.holds


def test_floats_of_eight_bits_are_compared() -> None:
    one, two = (torch.tensor([value, 4.0]).to(torch.float8_e4m3fn) for value in (1.0, 2.0))
    (same,), (other,) = (differences("output", "graph", {"y": found}, {"y": two}, 0.1) for found in (two, one))
    assert same.holds
    assert other.value == pytest.approx(1 / (4 + 0.04))


def test_whole_numbers_are_equal_or_wrong_and_what_is_missing_is_wrong() -> None:
    whole = {"a": torch.tensor([1, 2])}
    assert differences("output", "graph", {"a": torch.tensor([1, 2])}, whole, 1.0)[0].holds
    assert not differences("output", "graph", {"a": torch.tensor([1, 3])}, whole, 1.0)[0].holds
    assert not differences("output", "graph", {}, whole, 1.0)[0].holds


def test_collectives_are_held_against_each_other_by_kind_and_axes() -> None:
    planned = {("all_gather", ("a",)): (2, 64), ("all_reduce", ("a", "b")): (1, 8)}
    assert all(c.holds for c in collectives(planned, planned))
    run = {("all_gather", ("a",)): (2, 60), ("all_reduce", ("a",)): (1, 8)}
    assert [(c.kind, c.axes, c.holds) for c in collectives(planned, run)] == [
        ("all_gather", ("a",), False), ("all_reduce", ("a",), False), ("all_reduce", ("a", "b"), False),
    ]  # fmt: skip


def test_a_verdict_without_numbers_does_not_hold() -> None:
    assert not Verdict(plan="p", run="r").holds


def test_the_planned_traffic_counts_every_microbatch() -> None:
    plan = plan_of("microbatches", "3", 0, microbatches=3, clip=True)
    once = planned_traffic(dataclasses.replace(plan, options=dataclasses.replace(plan.options, microbatches=1), clip=None))
    total = planned_traffic(plan)
    assert sum(n for n, _ in total.values()) > sum(n for n, _ in once.values())


def test_numbers_can_show_a_mistake() -> None:
    case = subject("net")
    for t, value in case.values[0].items():
        assert value.std() > 0, case.program.tensors[t].name
    labels = next(v for t, v in subject("llama").values[0].items() if subject("llama").program.tensors[t].name == "labels")
    assert (labels == -100).any()


def test_the_program_of_another_model_is_refused() -> None:
    plan = plan_of("net", "2,2")
    with pytest.raises(InputError, match=r"the model is not the one that the plan of 'net' was made for: .* give the same model"):
        verify(plan, subject("llama").program)


def test_an_illegal_plan_is_no_error_but_a_verdict() -> None:
    plan = plan_of("net", "2,2")
    op = dataclasses.replace(plan.ops[0], strategy=("nothing", "R"))
    verdict = check(dataclasses.replace(plan, ops=(op, *plan.ops[1:])), subject("net"))
    assert "has strategy 'nothing'" in verdict.problem
    with pytest.raises(InternalError, match="has strategy 'nothing'"):
        made("net", "2,2").evaluate(dataclasses.replace(plan, ops=(op, *plan.ops[1:])))
