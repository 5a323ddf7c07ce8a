"""ZeRO's stages, reached from pins and memory limits alone; every plan is evaluated anew and run on all devices.

Rajbhandari et al., "ZeRO", SC 2020: stage 1 cuts the optimizer's state, stage 2 the gradients too, stage 3 the parameters;
a parameter gathered for the forward pass is kept for the backward pass (as stage 2 of fully sharded training does) or gathered again.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter

import pytest
import torch
from lowered import lowered
from programs import trained_mlp

from solver_shard.graph.transient_memory import Transients
from solver_shard.layout import Layout
from solver_shard.ops.run import run
from solver_shard.plan.index import purpose_of
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.solve.engine import solve_in_rounds
from solver_shard.verification.simulate import simulate

KIB = 1024
WEIGHTS = trained_mlp(64, 64, 256, 2)
"""Four weights of 64 KiB with 128 KiB of optimizer state and 64 KiB of gradient each; 16 KiB of activations per device."""
TOKENS = trained_mlp(4096, 64, 256, 3)
"""Six weights of 64 KiB; activations of 256 KiB and 1 MiB per device. All but the first weight are read in backward too."""


pytestmark = pytest.mark.usefixtures("one_thread")


def solved(program: Program, weights: str, gradients: str = "", *, limit: int = 2**40, gap: float = 0.0) -> Plan:
    """A plan on four devices that each have a part of the tokens, checked: its price by the evaluator, its numbers by execution."""
    tokens = program.tensors[0].shape[0]
    wanted = {t: "S(0)" for t, tensor in enumerate(program.tensors) if tensor.shape[:1] == (tokens,)}
    wanted |= dict.fromkeys(program.gradients, weights)
    wanted |= dict.fromkeys(program.gradients.values(), gradients) if gradients else {}
    pins = {t: functools.partial(operator.eq, Layout.parse(text)) for t, text in wanted.items()}
    case = lowered(program, "4", limit=limit, pins=pins, optimizer="adamw-fused")  # whose step has no temporaries, as in these papers
    solution = solve_in_rounds(Transients(case.lowering, case.costs), gap=gap, time_limit=30)
    assert solution.assignment is not None
    plan = case.plan(solution.assignment)
    found = case.evaluate(plan)
    assert (found.objective, found.peak) == (solution.objective, solution.peak) == (plan.costs.objective, plan.memory.peak)
    assert found.peak <= limit
    generator = torch.Generator().manual_seed(0)
    values = {t: torch.randn(program.tensors[t].shape, generator=generator) * 0.1 for t in program.sources()}
    reference = run(program, values)
    result = simulate(plan, program, values, reference=reference, rate=0.5)
    for p, g in program.gradients.items():
        scale = reference[g].abs().max().item()
        torch.testing.assert_close(result.parameters[program.tensors[p].name], values[p] - 0.5 * reference[g], rtol=1e-5, atol=1e-5 * scale)
    return plan


def collectives(plan: Plan) -> Counter[tuple[str, str]]:
    """How many collectives a plan has, by purpose and kind."""
    return Counter((purpose_of(plan, r), step.kind) for r in plan.reshards for step in r.steps if step.kind != "slice")


def cut_states(plan: Plan) -> int:
    return sum(tensor.state is not None and str(tensor.state) != "R" for tensor in plan.tensors)


def gathers(plan: Plan) -> Counter[str]:
    """How often the step gathers each parameter for its readers."""
    return Counter(plan.tensors[r.tensor].name for r in plan.reshards if purpose_of(plan, r) == "parameter gathers" and r.steps)


def kept(plan: Plan) -> set[str]:
    """The parameters whose gathered copies the backward pass reads."""
    return {plan.tensors[h.tensor].name for h in plan.holds if h.reshard is not None and plan.tensors[h.tensor].role == "parameter"}


def test_whole_weights_and_enough_memory_are_plain_data_parallel() -> None:
    plan = solved(WEIGHTS, "R", "R")
    assert cut_states(plan) == 0
    assert collectives(plan)["gradient reductions", "all_reduce"] == 4
    assert not any(purpose == "parameter updates" for purpose, _ in collectives(plan))


def test_whole_weights_and_gradients_with_little_memory_are_zero_1() -> None:
    plain = solved(WEIGHTS, "R", "R")
    plan = solved(WEIGHTS, "R", "R", limit=plain.memory.peak - 380 * KIB)
    assert cut_states(plan) == 4
    assert collectives(plan)["gradient reductions", "all_reduce"] == 4
    assert collectives(plan)["parameter updates", "all_gather"] == 4
    assert plan.memory.series["optimizer"][0] == plain.memory.series["optimizer"][0] // 4
    assert plan.costs.update_ns <= plain.costs.update_ns


def test_whole_weights_with_little_memory_are_zero_2() -> None:
    plain = solved(WEIGHTS, "R", "R")
    plan = solved(WEIGHTS, "R", limit=plain.memory.peak - 540 * KIB)
    assert cut_states(plan) == 4
    assert collectives(plan)["gradient reductions", "reduce_scatter"] == 4
    assert collectives(plan)["parameter updates", "all_gather"] == 4
    assert plan.costs.total_ns >= plain.costs.total_ns


def test_a_limit_in_between_cuts_only_as_many_states_as_it_must() -> None:
    plain = solved(WEIGHTS, "R", "R")
    plan = solved(WEIGHTS, "R", "R", limit=plain.memory.peak - 180 * KIB)
    assert cut_states(plan) == 2


def test_cut_weights_with_enough_memory_are_gathered_once_and_kept() -> None:
    plan = solved(TOKENS, "S(0)")
    assert set(gathers(plan).values()) == {1}
    assert len(gathers(plan)) == 6
    assert kept(plan) == {"0.down", "1.up", "1.down", "2.up", "2.down"}
    assert collectives(plan)["gradient reductions", "reduce_scatter"] == 6
    assert "320 KiB gathered parameters (5)" in str(plan)


def test_cut_weights_with_little_memory_are_gathered_again_for_the_backward_pass() -> None:
    loose = solved(TOKENS, "S(0)")
    tight = solved(TOKENS, "S(0)", limit=8450_000)
    assert kept(tight) < kept(loose)
    assert sum(gathers(tight).values()) > sum(gathers(loose).values())
    for name, count in gathers(tight).items():
        assert count == (2 if name in kept(loose) - kept(tight) else 1)
    assert tight.costs.total_ns > loose.costs.total_ns
    assert tight.memory.peak < loose.memory.peak
