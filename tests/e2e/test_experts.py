"""Mixtures of experts: random plans, with expert parallelism forced, give the unsharded step at the price of the choice graph."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from e2e.test_simulate import Case, check, of_model
from lowered import Lowered, agrees, lowered, random_assignment

from solver_shard.choice.nodes import Kind
from solver_shard.program import Program

PRODUCTS = ("shard.grouped_mm.default", "shard.grouped_mm_weights.default")


@functools.cache
def mixtral(batch: int = 4, seq: int = 6, experts: int = 4, **changes: int) -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    config = MixtralConfig(**(sizes | changes), num_local_experts=experts, num_experts_per_tok=2, use_cache=False)
    ids = torch.randint(0, config.vocab_size, (batch, seq))
    return of_model(MixtralForCausalLM(config), {"input_ids": ids, "labels": ids.clone()})


def products(program: Program) -> list[int]:
    return [i for i, op in enumerate(program.ops) if op.name in PRODUCTS]


def forced(made: Lowered, seed: int) -> tuple[int, ...]:
    """A random assignment in which every product per expert cuts the experts, on some axes at least."""
    draw, fixed = random.Random(seed), {}
    for i in products(made.program):
        column = made.lowering.strategies[i]
        options = [k for k in range(len(column.axis_choice)) if column.implementation(k)]
        fixed[made.lowering.index[Kind.OP, i, 0]] = draw.choice(options)
    return random_assignment(made.graph, seed, fixed)


@pytest.mark.parametrize("mesh", ["2", "3", "2,2"])
@pytest.mark.parametrize("sizes", [(4, 6, 4), (5, 7, 5)])
def test_plans_that_cut_experts_give_the_unsharded_step(sizes: tuple[int, int, int], mesh: str) -> None:
    case = mixtral(*sizes)
    made = lowered(case.program, mesh, overlap=0.25)
    assert len(products(case.program)) == 6
    assert not made.rulebook.fallbacks(case.program)
    for seed in range(2):
        plan = agrees(made, forced(made, seed))
        assert {plan.ops[i].implementation for i in products(case.program)} == {"own-experts"}
        check(case, plan)
        check(case, agrees(made, random_assignment(made.graph, seed)))
