"""What a device really holds: storages, however many tensors lie in them; plans of tensors that share storages say the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from lowered import agrees, lowered, random_assignment
from measured import counted, measure
from programs import gated
from storages import Held

from solver_shard.graph.nodes import HoldNode, KeepNode, OpNode, ReshardNode, SourceNode, StateNode
from solver_shard.layout import Layout
from solver_shard.ops.implementations import Part, perform
from solver_shard.ops.run import overload_of, run
from solver_shard.plan.plan import Plan
from solver_shard.program import Op, Program, Ref
from solver_shard.verification.measurement import Meter
from solver_shard.verification.simulate import simulate

pytestmark = pytest.mark.usefixtures("one_thread")


def values_of(program: Program) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {t: torch.randn(program.tensors[t].shape, generator=generator) for t in program.sources()}


def test_a_tensor_and_its_views_count_once_until_the_last_is_gone() -> None:
    meter = Meter()
    meter.tick()
    whole = torch.zeros(6, 4)
    meter.made(whole, "activations")
    part = whole[:2].T
    meter.made(part, "activations")
    meter.tick()
    del whole
    meter.tick()
    meter.made(torch.zeros(3), "copies")
    del part
    meter.tick()
    result = counted(meter)
    assert result.totals == (96, 96, 96 + 12, 0)
    assert result.series["copies"] == (0, 0, 12, 0)
    assert (result.peak, result.peak_time) == (108, 2)


def test_a_gradient_in_the_storage_of_an_activation_is_a_gradient() -> None:
    meter = Meter()
    meter.tick()
    product = torch.zeros(4, 2)
    meter.made(product, "activations")
    meter.made(product.T, "gradients")
    assert counted(meter).series["gradients"] == (32,)
    assert counted(meter).totals == (32,)


def kept(plan: Plan, program: Program) -> dict[str, int]:
    """Bytes that each hold owns, by tensor."""
    return {program.tensors[hold.tensor].name: hold.nbytes for hold in plan.holds}


def replicated(whole: bool) -> tuple[Plan, Program]:
    """Everything on every device, kept as produced."""
    program = gated(whole)
    made = lowered(program, "2")
    whole_everywhere = Layout.parse("R")
    first = {v: 0 for v, node in enumerate(made.lowering.nodes) if isinstance(node, OpNode)}
    for v, node in enumerate(made.lowering.nodes):
        if isinstance(node, (SourceNode, StateNode, HoldNode)):
            first[v] = node.layouts.index(whole_everywhere)
        elif isinstance(node, ReshardNode):
            first[v] = node.layouts[: node.aliases].index(whole_everywhere)
    return agrees(made, random_assignment(made.graph, 0, first)), program


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_kept_of_one_storage_is_owned_once(whole: bool) -> None:
    plan, program = replicated(whole)
    product = 8 * 16 * 4
    owned = kept(plan, program)
    of_product = {name: owned[name] for name in ("product", "gate", "turned") if name in owned} | {"value": owned["v4"]}
    assert sorted(of_product.values()) == [0] * (len(of_product) - 1) + [product]


@pytest.mark.parametrize("whole", [False, True])
def test_the_storage_is_there_until_its_last_part_is_not_needed(whole: bool) -> None:
    plan, program = replicated(whole)
    planned = lowered(program, "2").evaluate(plan).totals
    assert measure(plan, program, values_of(program)).totals == planned


@pytest.mark.parametrize("mesh", ["2", "2,2", "4,2"])
@pytest.mark.parametrize("whole", [False, True])
def test_random_plans_with_shared_storages_agree_with_the_choice_graph_and_run(whole: bool, mesh: str) -> None:
    program = gated(whole)
    made, values = lowered(program, mesh), values_of(program)
    reference = run(program, values)
    shared = alone = 0
    for seed in range(24):
        assignment = random_assignment(made.graph, seed)
        plan = agrees(made, assignment)
        simulate(plan, program, values, reference=reference, tolerance=1e-4, absolute=1e-4)
        for v, node in enumerate(made.lowering.nodes):
            if isinstance(node, KeepNode) and node.stored and assignment[v]:
                inside = assignment[v] >= len(node.layouts) - node.stored
                shared, alone = shared + inside, alone + (not inside)
    assert shared
    assert alone


def test_more_than_the_plan_says_is_found() -> None:
    """A plan that keeps a copy, run as if it said so of nothing: the measurement does not follow the plan's own lives."""
    plan, program = replicated(whole=True)
    wrong = dataclasses.replace(plan, holds=tuple(dataclasses.replace(hold, nbytes=0, start=hold.stop) for hold in plan.holds))
    values = values_of(program)
    assert measure(wrong, program, values).totals == measure(plan, program, values).totals


@pytest.mark.parametrize("name", ["_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"])
def test_statistics_of_classes_hold_little_more_than_the_result_of_the_op(name: str) -> None:
    """As much as the plan counts: the scores of a large vocabulary are what fills memory where a loss is."""
    scores = torch.randn(64, 1000)
    arguments: dict[str, Any] = {"self": Ref(0), "dim": -1, "half_to_float": False}
    if "backward" in name:
        arguments = {"grad_output": Ref(0), "output": Ref(1), "dim": -1, "input_dtype": "f32"}
    op = Op(name=f"aten.{name}.default", operands=(0, 1)[: 1 + ("backward" in name)], results=(2,), attributes=arguments)
    operands = [scores, scores.softmax(-1)][: len(op.operands)]
    whole = Part(start=0, length=1000, size=1000)
    with Held() as held:
        ((result,),) = perform("class-statistics", op, [operands], [whole], [[scores.shape]], [scores.dtype], lambda _, buffers: buffers)
    spare = 0 if "backward" in name else scores.nbytes  # exponentials, on their way to a sum
    assert held.peak <= scores.nbytes + spare + 4 * 64 * 4
    expected = overload_of(op.name)(*operands, -1, torch.float32 if "backward" in name else False)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)  # sums of a thousand numbers, in another order
