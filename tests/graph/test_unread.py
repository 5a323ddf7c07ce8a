"""Operands of which an op needs only the shape: they ask for no layout, cost nothing and keep nothing alive."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from lowered import agrees, lowered, random_assignment
from programs import Builder

from solver_shard.errors import InternalError
from solver_shard.graph.nodes import ReshardNode
from solver_shard.graph.strategies import fused_tensors
from solver_shard.ops.run import run
from solver_shard.program import Phase, Program, Ref, Role
from solver_shard.rules.rulebook import Rulebook
from solver_shard.verification.simulate import simulate


def _copied(phase: Phase = Phase.FORWARD) -> tuple[Program, int]:
    """relu(x) is negated early and gives its shape to a copy of y late; the program, and the position of relu(x)."""
    b = Builder()
    x, y = b.input("x", 8, 12), b.input("y", 8, 12)
    shape = b.relu(x)
    early = b.call("aten.neg.default", (shape,), {"self": Ref(0)}, (8, 12))
    source = b.add(b.relu(early), y)
    attributes = {"self": Ref(0), "src": Ref(1), "non_blocking": False}
    made = b.call("aten.copy.default", (shape, source), attributes, (8, 12), phase=phase)
    return b.program(b.relu(made, role=Role.OUTPUT, result="output", phase=phase)), shape


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_an_operand_that_gives_only_its_shape_is_in_no_group_and_dies_with_its_last_reader(phase: Phase) -> None:
    program, shape = _copied(phase)
    made = lowered(program, "2,2")
    (group,) = made.lowering.lives.groups[shape]
    assert [program.ops[i].name for i, _ in group.readers] == ["aten.neg.default"]
    assert made.lowering.lives.base[shape] == (0, 1)  # then the group has its bytes
    assert shape not in made.lowering.lives.held
    assert [node.group for node in made.lowering.nodes if isinstance(node, ReshardNode) and node.tensor == shape] == [0]


@pytest.mark.parametrize("seed", range(6))
def test_plan_evaluator_and_simulation_agree_where_an_operand_is_not_read(seed: int) -> None:
    program, shape = _copied()
    made = lowered(program, "2,2")
    plan = agrees(made, random_assignment(made.graph, seed))
    assert len([r for r in plan.reshards if r.tensor == shape]) == 1
    values = {t: torch.randn(program.tensors[t].shape) for t in program.sources()}
    result = simulate(plan, program, values, reference=run(program, values))
    torch.testing.assert_close(result.outputs[0], (values[1] + (-values[0].relu()).relu()).relu())


def test_the_simulation_spoils_what_no_group_reads() -> None:
    program, _ = _copied()
    made = lowered(program, "2,2")
    plan = made.plan(random_assignment(made.graph, 0))
    values = {t: torch.randn(program.tensors[t].shape) for t in program.sources()}
    # the sum's first operand loses its group, as if a rule said wrongly that it is not read
    reshards = tuple(dataclasses.replace(r, readers=()) if (3, 0) in r.readers else r for r in plan.reshards)
    with pytest.raises(InternalError, match=r"op 3 .* does not make"):
        simulate(dataclasses.replace(plan, reshards=reshards), program, values, reference=run(program, values))


def test_a_use_of_the_shape_does_not_keep_a_chain_from_being_fused() -> None:
    program, shape = _copied()
    rulebook = Rulebook()
    fused = fused_tensors(program, [rulebook.rule(program, i) for i in range(len(program.ops))])
    assert shape in fused
    made = lowered(program, "2,2", fusion=True)
    agrees(made, random_assignment(made.graph, 3))
