"""What torch's optimizers hold while they step is what a plan counts for the update: all parameters at once, one by one, fused."""

from __future__ import annotations

import pytest
import torch
from lowered import agrees, lowered, random_assignment
from measured import measure
from programs import trained_mlp
from storages import Held
from torch import nn

from solver_shard.costs.memory import OPTIMIZERS, WAYS, optimizer_state
from solver_shard.graph.nodes import OpNode, SourceNode, StateNode
from solver_shard.graph.transient_memory import Transients
from solver_shard.layout import Layout
from solver_shard.plan.evaluate import Evaluation
from solver_shard.program import Program

pytestmark = pytest.mark.usefixtures("one_thread")

ADAMW = ("adamw", "adamw-fused", "adamw-forloop")
NUMBERS = 64
"""Bytes of single numbers that a step makes."""


def held_by_torch(name: str, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...]) -> int:
    """The most bytes that a step of torch's own optimizer makes at once, beside parameters, gradients and states."""
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    optimizer = torch.optim.AdamW(parameters, **WAYS[name]) if name in WAYS else torch.optim.SGD(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    given = [*parameters, *(p.grad for p in parameters), *(x for state in optimizer.state.values() for x in state.values())]
    with Held(*given) as held:
        optimizer.step()
    return held.peak


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", [*ADAMW, "sgd"])
def test_a_step_of_torch_holds_what_its_optimizer_is_said_to(name: str, dtype: str) -> None:
    shapes = ((64, 32), (64, 32), (64, 32), (100,), (3, 3))
    state = optimizer_state(name, master_weights=False)
    elements, largest = sum(torch.Size(shape).numel() for shape in shapes), 64 * 32
    said = elements * state.step_bytes(dtype) + largest * state.turn_bytes(dtype)
    found = held_by_torch(name, {"f32": torch.float32, "bf16": torch.bfloat16}[dtype], shapes)
    assert 0 <= found - said <= NUMBERS


def test_a_step_of_master_copies_converts_gradients_that_come_in_another_dtype() -> None:
    assert [optimizer_state("adamw").step_bytes(dtype) for dtype in ("bf16", "f16", "f32")] == [8, 8, 4]
    assert optimizer_state("adamw", reduce_dtype="f32").step_bytes("bf16") == 4
    assert optimizer_state("adamw-fused").step_bytes("bf16") == 4
    assert optimizer_state("sgd").step_bytes("bf16") == 4
    assert optimizer_state("sgd", master_weights=False).step_bytes("bf16") == 0
    assert optimizer_state("adamw", state_bytes=2).step_bytes("f32") == 0


def whole(program: Program, name: str) -> Evaluation:
    """Everything on every device."""
    made, layout = lowered(program, "2", optimizer=name), Layout.parse("R")
    stored = {v: node.layouts.index(layout) for v, node in enumerate(made.lowering.nodes) if isinstance(node, (SourceNode, StateNode))}
    ops = {v: 0 for v, node in enumerate(made.lowering.nodes) if isinstance(node, OpNode)}
    return made.evaluate(made.plan(random_assignment(made.graph, 0, {**ops, **stored})))


def test_an_update_has_the_roots_of_all_parameters_at_once_or_of_one() -> None:
    program = trained_mlp(12, 8, 20, 2)
    parameters = [program.tensors[p].numel * 4 for p in program.gradients]
    last = {name: whole(program, name).totals[-1] for name in ADAMW}
    assert last["adamw"] - last["adamw-fused"] == sum(parameters)
    assert last["adamw-forloop"] - last["adamw-fused"] == 3 * max(parameters)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mesh", ["2", "2,2"])
def test_random_plans_agree_with_the_choice_graph_and_hold_what_they_say_at_the_update(name: str, mesh: str) -> None:
    program = trained_mlp(12, 8, 20, 2)
    made = lowered(program, mesh, optimizer=name)
    values = {t: torch.zeros(program.tensors[t].shape) for t in program.sources()}
    for seed in range(6):
        plan = agrees(made, random_assignment(made.graph, seed))
        said, found = made.evaluate(plan).totals[-1], measure(plan, program, values).totals[-1]
        spare = max(program.tensors[p].numel for p in program.gradients) * 4 if name == "adamw-forloop" else 0  # of the one before
        assert -spare - NUMBERS <= found - said <= NUMBERS


@pytest.mark.parametrize("name", ADAMW)
def test_counted_transitions_and_steps_are_the_true_peak(name: str) -> None:
    made = lowered(trained_mlp(12, 8, 20, 2), "2,2", optimizer=name)
    problem = Transients(made.lowering, made.costs)
    problem.add(range(len(problem.moves)))
    for seed in range(6):
        assignment = random_assignment(problem.graph, seed)
        assert problem.graph.peak(assignment) == problem.peak(assignment) == made.peak(assignment[: made.graph.size])
