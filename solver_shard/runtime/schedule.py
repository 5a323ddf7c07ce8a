"""In which order a step does what its plan says, and what is there for how long.

>>> made = schedule(plan, program)
>>> made.instructions[:2]
(Bring(reshard=0, source=3, result=57), Run(op=0, operands=(57, 60), results=(12,)), ...)

Values lie in slots: what a source is or an op produces in the slot of its tensor, what a group of readers gets in that of its reshard.
A reshard runs when its first reader is reached. What is kept of a tensor between its forward and its later readers is what the plan's
holds say; nothing else of it is there any more: every instruction lists the slots that nothing needs after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from solver_shard.errors import InternalError
from solver_shard.plan.plan import Plan
from solver_shard.program import Phase, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Bring:
    """Run a reshard: from one slot to another.

    Attributes:
        time: position of the op before which it runs; the number of ops at the end.
        drops: slots that nothing needs afterwards.
    """

    reshard: int
    source: int
    result: int
    time: int
    drops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run an op.

    Attributes:
        operands: per operand, its slot; None where the op needs only the shape.
        reshards: per operand, the position of the reshard that brought it; None with the slot.
        results: per result, its slot; None where nothing reads it.
    """

    op: int
    operands: tuple[int | None, ...]
    reshards: tuple[int | None, ...]
    results: tuple[int | None, ...]
    time: int
    drops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """A gradient is there, reduced or for its accumulator: the slot is that of its reshard."""

    reshard: int
    source: int
    time: int
    drops: tuple[int, ...] = ()


Instruction = Bring | Run | Take


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What one microbatch of a step does.

    Attributes:
        instructions: in order.
        forward: how many of them belong to the forward pass.
        outputs: tensor position to the slot in which it is handed over, and the reshard that brought it there.
        slots: how many there are.
    """

    instructions: tuple[Instruction, ...]
    forward: int
    outputs: dict[int, tuple[int, int]]
    slots: int


def schedule(plan: Plan, program: Program, *, early: bool = False) -> Schedule:
    """The order of one microbatch.

    Args:
        early: hand over at the end of the forward pass what it has made, not at the end of the step.

    Raises:
        InternalError: a reader comes where nothing is left of what it reads, or the plan brings an output nowhere.
    """
    return _Order(plan, program, early).made()


class _Order:
    def __init__(self, plan: Plan, program: Program, early: bool) -> None:
        self.plan, self.program, self.early = plan, program, early
        self.instructions: list[Instruction] = []
        self.base = len(program.tensors)
        self.brought: set[int] = set()
        self.kept: dict[int, int] = {}
        self.outputs: dict[int, tuple[int, int]] = {}
        leaving = "accumulate" if plan.options.microbatches > 1 else "optimizer"
        self.keeps = {hold.reshard: hold.tensor for hold in plan.holds if hold.reshard is not None}
        copied = set(self.keeps.values())
        self.of_reader: dict[tuple[int, int], int] = {}
        self.reduction: dict[int, int] = {}
        self.later: set[int] = set()
        self.read: set[int] = set()
        for position, reshard in enumerate(plan.reshards):
            if reshard.purpose == "update" or (reshard.purpose == "optimizer" and leaving != "optimizer"):
                continue
            if reshard.purpose == leaving:
                self.reduction[reshard.tensor] = position
            if reshard.purpose in ("backward", "output") and reshard.tensor in copied:
                self.later.add(position)
            else:
                self.read.add(reshard.tensor)
            self.of_reader.update(dict.fromkeys(reshard.readers, position))

    def made(self) -> Schedule:
        made_forward = set(self.program.sources())
        forward = None
        for i, op in enumerate(self.program.ops):
            if forward is None and op.phase is Phase.BACKWARD:
                forward = self._turn(i, made_forward)
            if op.phase is Phase.FORWARD:
                made_forward.update(op.results)
            self._op(i)
        end = len(self.program.ops)
        if forward is None:
            forward = self._turn(end, made_forward)
        self._outputs(end, range(self.base))
        for t in self.program.outputs:
            if t not in self.outputs:
                raise InternalError(f"the plan brings {self.program.tensors[t].name!r} nowhere at the end of the step")
        return Schedule(
            instructions=tuple(self._with_drops()), forward=forward, outputs=self.outputs, slots=self.base + len(self.plan.reshards)
        )

    def _turn(self, time: int, made: set[int]) -> int:
        """The forward pass ends."""
        if self.early:
            self._outputs(time, made)
        return len(self.instructions)

    def _outputs(self, time: int, made: Iterable[int]) -> None:
        known = set(made)
        for position, reshard in enumerate(self.plan.reshards):
            if reshard.purpose == "output" and reshard.tensor in known and reshard.tensor not in self.outputs:
                self.outputs[reshard.tensor] = self._bring(position, time), position

    def _bring(self, position: int, time: int) -> int:
        slot = self.base + position
        if position in self.brought:
            return slot
        self.brought.add(position)
        reshard = self.plan.reshards[position]
        source = self.kept.get(reshard.tensor) if position in self.later else reshard.tensor
        if source is None:
            raise InternalError(f"nothing is left of {self.program.tensors[reshard.tensor].name!r} for its {reshard.purpose} readers")
        if position in self.keeps:
            self.kept[reshard.tensor] = slot
        self.instructions.append(Bring(reshard=position, source=source, result=slot, time=time))
        return slot

    def _op(self, i: int) -> None:
        op = self.program.ops[i]
        reshards = tuple(self.of_reader.get((i, j)) for j in range(len(op.operands)))
        operands = tuple(None if position is None else self._bring(position, i) for position in reshards)
        results = tuple(t if t in self.read else None for t in op.results)
        self.instructions.append(Run(op=i, operands=operands, reshards=reshards, results=results, time=i))
        for t in op.results:
            if t in self.reduction:
                position = self.reduction[t]
                self.instructions.append(Take(reshard=position, source=self._bring(position, i), time=i))

    def _with_drops(self) -> list[Instruction]:
        """Every slot is dropped after the last instruction that reads it, or that writes it where none does."""
        needed = {slot for slot, _ in self.outputs.values()}
        made: list[Instruction] = []
        for instruction in reversed(self.instructions):
            if isinstance(instruction, Bring):
                touched: list[int | None] = [instruction.source, instruction.result]
            elif isinstance(instruction, Run):
                touched = [*instruction.operands, *instruction.results]
            else:
                touched = [instruction.source]
            drops = [slot for slot in dict.fromkeys(touched) if slot is not None and slot not in needed]
            needed.update(drops)
            made.append(replace(instruction, drops=tuple(drops)))
        made.reverse()
        for k, instruction in enumerate(made):
            last = k
            while isinstance(instruction, Run) and last + 1 < len(made) and made[last + 1].time == instruction.time:
                last += 1
            if last > k:  # what an op reads is there until its gradients are reduced, as the plan counts it
                made[last] = replace(made[last], drops=(*made[last].drops, *instruction.drops))
                made[k] = replace(instruction, drops=())
        return made
