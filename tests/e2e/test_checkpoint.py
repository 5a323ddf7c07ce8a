"""Plans of checkpointed models: less memory for more time, priced by the evaluator as by the solver, and right when run."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from e2e.test_simulate import Case, check, near, of_model
from lowered import agrees, lowered, random_assignment, with_relays

from solver_shard.api import optimize
from solver_shard.costs.model import CostModel
from solver_shard.graph.symmetry import node_classes
from solver_shard.plan.evaluate import evaluate
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.rules.rulebook import Rulebook
from solver_shard.tracing.torch import trace


def llama(layers: int, checkpointed: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False, pad_token_id=None, bos_token_id=1, eos_token_id=2))
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def batch(size: int, tokens: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (size, tokens))
    return {"input_ids": ids, "labels": ids.clone()}


@functools.cache
def case() -> Case:
    return of_model(llama(2, True), batch(4, 8))


@functools.cache
def traced(layers: int, checkpointed: bool) -> Program:
    with torch.device("meta"):
        model = llama(layers, checkpointed)
    return trace(model, batch(32, 64), name="llama")


def test_random_plans_give_the_unsharded_step() -> None:
    made = lowered(case().program, "2,2", overlap=0.25)
    check(case(), agrees(made, random_assignment(made.graph, 0)))


@pytest.mark.parametrize("options", [{}, {"template": "dp=zero3,tp=megatron-sp"}])
def test_solved_plans_give_the_unsharded_step(options: dict[str, Any]) -> None:
    plan = optimize(case().program, mesh="dp=2,tp=2", cluster=near(), gap=0.05, time_limit=15, **options)
    check(case(), plan)
    found = evaluate(plan, with_relays(case().program, plan), Rulebook(), CostModel(plan.mesh, plan.cluster, overlap=plan.options.overlap))
    assert (found.objective, found.peak) == (plan.certificate.objective, plan.memory.peak)


def solved(program: Program, **options: Any) -> Plan:
    return optimize(program, mesh="dp=2,tp=2", cluster=near(), time_limit=20, gap=0.01, **options)


def test_checkpoints_trade_time_for_memory() -> None:
    pins = ["input_ids=S(0),R", "*proj.weight=R,R"]
    kept, again = (solved(traced(4, checkpointed), pins=pins) for checkpointed in (False, True))
    assert again.memory.at_peak["activations"] < kept.memory.at_peak["activations"] / 2
    assert again.memory.peak < kept.memory.peak
    forward = sum(op.nanoseconds for op in kept.ops if op.phase == "forward" and ".layers." in op.module)
    assert "of it again in backward" in str(again)
    assert "of it again in backward" not in str(kept)
    assert sum(op.nanoseconds for op in again.ops if op.recompute) < forward
    assert 0.5 * forward < again.costs.compute_ns - kept.costs.compute_ns < 1.1 * forward


def test_checkpointed_layers_are_found_to_repeat() -> None:
    sizes = []
    for layers in (4, 6):
        made = lowered(traced(layers, True), "2,2")
        sizes.append((len(set(node_classes(made.lowering).tolist())), made.graph.size))
    assert sizes[0][0] == sizes[1][0] < sizes[0][1] / 2
    assert sizes[0][1] < sizes[1][1]
