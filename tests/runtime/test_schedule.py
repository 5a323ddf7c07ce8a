"""The order of a step: what is read is there, what nothing needs any more is dropped, once, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
from lowered import lowered, random_assignment
from programs import trained_mlp

from solver_shard.errors import InternalError
from solver_shard.plan.plan import Plan
from solver_shard.program import Phase, Program
from solver_shard.runtime.schedule import Bring, Run, Take, schedule

PROGRAM = trained_mlp(12, 8, 20, 2)


def plan_of(seed: int, **options: int) -> Plan:
    made = lowered(PROGRAM, "2,2", **options)
    return made.plan(random_assignment(made.graph, seed))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_read_is_there_and_goes_after_its_last_reader(seed: int, early: bool) -> None:
    plan = plan_of(seed)
    made = schedule(plan, PROGRAM, early=early)
    present = set(PROGRAM.sources())
    ran, taken, brought = [], [], []
    for instruction in made.instructions:
        if isinstance(instruction, Bring):
            assert instruction.source in present
            present.add(instruction.result)
            brought.append(instruction.reshard)
        elif isinstance(instruction, Run):
            assert {slot for slot in instruction.operands if slot is not None} <= present
            present.update(slot for slot in instruction.results if slot is not None)
            ran.append(instruction.op)
        else:
            assert isinstance(instruction, Take)
            assert instruction.source in present
            taken.append(plan.reshards[instruction.reshard].tensor)
        assert set(instruction.drops) <= present
        present -= set(instruction.drops)
    assert ran == list(range(len(PROGRAM.ops)))
    assert sorted(taken) == sorted(PROGRAM.gradients.values())
    assert sorted(brought) == [k for k, reshard in enumerate(plan.reshards) if reshard.purpose != "update"]
    unread = set(PROGRAM.sources()) - {reshard.tensor for reshard in plan.reshards}
    assert present - unread == {slot for slot, _ in made.outputs.values()}
    forward = made.instructions[: made.forward]
    assert [i.op for i in forward if isinstance(i, Run)] == [k for k, op in enumerate(PROGRAM.ops) if op.phase is Phase.FORWARD]
    bring_outputs = {position for _, position in made.outputs.values()}
    assert early == (bring_outputs <= {i.reshard for i in forward if isinstance(i, Bring)})


def test_gradients_of_microbatches_go_to_their_accumulators() -> None:
    plan = plan_of(0, microbatches=2)
    made = schedule(plan, PROGRAM)
    assert {plan.reshards[i.reshard].purpose for i in made.instructions if isinstance(i, Take)} == {"accumulate"}


def test_an_output_must_be_brought_somewhere() -> None:
    plan = plan_of(0)
    reshards = tuple(r for r in plan.reshards if r.purpose != "output")
    with pytest.raises(InternalError, match="brings 'loss' nowhere at the end of the step"):
        schedule(dataclasses.replace(plan, reshards=reshards), named_loss(PROGRAM))


def named_loss(program: Program) -> Program:
    tensors = list(program.tensors)
    for t in program.outputs:
        tensors[t] = dataclasses.replace(tensors[t], name="loss")
    return dataclasses.replace(program, tensors=tuple(tensors))
