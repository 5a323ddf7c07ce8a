"""Mixtures of experts: random plans, with expert parallelism forced, give the unsharded step at the price of the choice graph."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from e2e.test_simulate import Case, check, near, of_model
from lowered import Lowered, agrees, lowered, random_assignment, with_relays

from solver_shard.api import optimize
from solver_shard.costs.model import CostModel
from solver_shard.graph.nodes import OpNode, ReshardNode
from solver_shard.plan.evaluate import evaluate
from solver_shard.program import Phase, Program
from solver_shard.rules.rulebook import Rulebook

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
        fixed[made.lowering.index[OpNode, i, 0]] = draw.choice(options)
    return random_assignment(made.graph, seed, fixed)


@pytest.mark.parametrize(("sizes", "mesh"), [((4, 6, 4), "2"), ((4, 6, 4), "2,2"), ((5, 7, 5), "3"), ((5, 7, 5), "2,2")])
def test_plans_that_cut_experts_give_the_unsharded_step(sizes: tuple[int, int, int], mesh: str) -> None:
    case = mixtral(*sizes)
    made = lowered(case.program, mesh, overlap=0.25)
    assert len(products(case.program)) == 6
    assert not made.rulebook.fallbacks(case.program)
    plan = agrees(made, forced(made, 0))
    assert {plan.ops[i].implementation for i in products(case.program)} == {"own-experts"}
    check(case, plan)
    check(case, agrees(made, random_assignment(made.graph, 1)))


def test_dispatch_gathers_tokens_and_combine_scatters_partial_sums_over_the_expert_axis() -> None:
    case = mixtral()
    made = lowered(case.program, "dp=2,ep=2")
    ops, tensors = case.program.ops, case.program.tensors
    maker = {t: i for i, op in enumerate(ops) for t in op.results}
    reader = {t: i for i, op in reversed(list(enumerate(ops))) for t in op.operands}
    dispatch, combine = [
        i
        for i, op in enumerate(ops)
        if op.name == "shard.take.default" and op.phase is Phase.FORWARD and len(tensors[op.results[0]].shape) == 3
    ]
    fixed: dict[int, int] = {}

    def fix(i: int, operand: str, result: str, way: str = "") -> int:
        """The op reads its first operand and leaves its result so; returns its result."""
        column = made.lowering.strategies[i]
        first, made_ = column.operands[0], column.results[0]
        fixed[made.lowering.index[OpNode, i, 0]] = next(
            k
            for k in range(len(column.axis_choice))
            if (str(first.layouts[first.chosen[k]]), str(made_.layouts[made_.chosen[k]])) == (operand, result)
            and column.implementation(k) == way
        )
        return ops[i].results[0]

    tokens = ops[dispatch].operands[0]
    column = made.lowering.strategies[maker[tokens]]
    fixed[made.lowering.index[OpNode, maker[tokens], 0]] = next(k for k in range(len(column.axis_choice)) if column.names(k) == ("a", "a"))
    fix(dispatch, "S(0)R", "S(0)S(1)")
    for i in products(case.program)[:2]:
        fix(i, "S(0)S(1)", "S(0)S(1)", "own-experts")
    apart = fix(combine, "S(0)S(1)", "S(0)P(sum)", "masked-lookup")
    summed = fix(reader[fix(reader[apart], "S(0)P(sum)", "S(0)P(sum)")], "S(0)P(sum)", "S(0)P(sum)")
    fix(reader[summed], "S(0)S(0)", "S(0)S(0)")
    for t, i, layout in ((tokens, dispatch, "S(0)R"), (summed, reader[summed], "S(0)S(0)")):
        group = next(k for k, group in enumerate(made.lowering.lives.groups[t]) if i in {r for r, _ in group.readers})
        node = made.lowering.index[ReshardNode, t, group]
        aliases, layouts = made.lowering.nodes[node].aliases, made.lowering.nodes[node].layouts
        fixed[node] = next(k for k, found in enumerate(layouts) if k >= aliases and str(found) == layout)
    plan = made.plan(random_assignment(made.graph, 0, fixed))
    check(case, plan)
    size = 2 * 6 * 32 * 8  # the tokens of half of the batch, in f64
    steps = {
        r.tensor: [(s.kind, s.axes, s.nbytes) for s in r.steps]
        for r in plan.reshards
        if {i for i, _ in r.readers} & {dispatch, reader[summed]}
    }
    assert steps[tokens] == [("all_gather", ("ep",), size)]
    assert steps[summed] == [("reduce_scatter", ("ep",), size)]


def test_the_solver_gives_every_device_its_experts_and_reduces_their_gradients_over_the_batch_alone() -> None:
    case = mixtral()
    pins = ["*.experts.*_proj=R,S(0)", "input_ids=S(0),S(0)"]
    plan = optimize(case.program, mesh="dp=2,ep=2", cluster=near(), pins=pins, gap=0.05, time_limit=15)
    check(case, plan)
    found = evaluate(plan, with_relays(case.program, plan), Rulebook(), CostModel(plan.mesh, plan.cluster, overlap=plan.options.overlap))
    assert (found.objective, found.peak) == (plan.certificate.objective, plan.memory.peak)
    gradients = {g for p, g in case.program.gradients.items() if "experts" in case.program.tensors[p].name}
    assert len(gradients) == 2
    assert not [s for r in plan.reshards if r.tensor in gradients for s in r.steps if "ep" in s.axes and s.kind == "all_reduce"]
    weights = [plan.ops[i] for i in products(with_relays(case.program, plan)) if plan.ops[i].name == PRODUCTS[1]]
    assert [op.strategy[1] for op in weights] == ["own-experts"] * 2
    assert "own-experts" in str(
        optimize(case.program, mesh="ep=4", cluster=near(), pins=["*.experts.*_proj=S(0)"], gap=0.05, time_limit=15)
    )
