"""A planned step on one device, compiled once into a list of small functions over local tensors.

>>> step = compile_step(plan, program, device=1, communicator=Processes(...))
>>> state = step.forward(sources)           # local tensors by position in the program
>>> state.outputs[program.outputs[0]]
tensor(4.1589)
>>> gradients = step.backward(state)        # by position of the parameter

Everything that can be known when a plan is loaded is decided then: which slots an op reads and writes, what is forgotten after it, the
sizes of shards, what a collective sends and where it puts what it receives. What is left for a step is a loop over functions.

The first step checks the shape of everything that is made; the later ones trust it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from solver_shard.errors import InternalError
from solver_shard.export.exchange import Exchange, Move, in_turn, prepare
from solver_shard.export.interpret import DTYPES
from solver_shard.export.local import LocalOp, localise, where
from solver_shard.export.random import key_of, numbers
from solver_shard.export.schedule import Bring, Run, Schedule, Take, schedule
from solver_shard.export.shards import boxes
from solver_shard.plan.plan import Inside, Plan, Reshard
from solver_shard.program import Op, Phase, Program

Values = Any
"""Local tensors by slot; None where nothing is (any more)."""

Instruction = Callable[[Values], None]


class Communicator(Protocol):
    """What talks to the other devices."""

    def stages(self, exchange: Exchange) -> tuple[Move, ...]:
        """One step, prepared: from the local tensor before to the one after, in one or more moves."""

    def inside(self, axes: Sequence[int], planned: Sequence[Inside]) -> Callable[[], Callable[[str, torch.Tensor], torch.Tensor]]:
        """For each run of an implementation: its reductions, in the order in which the plan lists them; ``FREE`` ones among ``axes``."""


@dataclass(slots=True, weakref_slot=True)
class State:
    """A step between its forward and its backward pass."""

    values: Values
    outputs: dict[int, torch.Tensor]
    spent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A step on one device; see ``compile_step``.

    Attributes:
        sources: positions of the tensors that it is given.
        gradients: parameter position to the slot of its gradient.
    """

    plan: Plan
    program: Program
    order: Schedule
    sources: tuple[int, ...]
    gradients: Mapping[int, int]
    tangent: int | None
    size: int
    ahead: tuple[Instruction, ...]
    back: tuple[Instruction, ...]
    checks: tuple[tuple[tuple[int, tuple[int, ...], str], ...], ...]
    checked: set[bool] = field(default_factory=set)

    def forward(self, sources: Mapping[int, torch.Tensor], *, seed: int = 0, step: int = 0) -> State:
        """Run the forward pass.

        Args:
            sources: local tensors by position in the program, one for each of ``sources``.
            seed, step: of random ops.
        """
        values: Values = [None] * self.size
        values[-2] = seed, step
        for t in self.sources:
            values[t] = sources[t]
        self._run(self.ahead, values, 0)
        return State(values, {t: values[slot] for t, (slot, _) in self.order.outputs.items() if values[slot] is not None})

    def backward(self, state: State, tangent: torch.Tensor | None = None) -> dict[int, torch.Tensor]:
        """Run the backward pass; the local gradients by position of their parameter, as their reshards leave them.

        Args:
            tangent: the gradient of the loss, a scalar; 1 where it is left out.
        """
        if state.spent:
            raise RuntimeError(
                "this step has run its backward pass already, and what it had kept for it is gone; run the forward pass again"
            )
        state.spent = True
        values = state.values
        values[-1] = tangent
        self._run(self.back, values, len(self.ahead))
        found = {p: values[slot] for p, slot in self.gradients.items()}
        values.clear()
        if self.tangent is None and tangent is not None:
            found = {p: value * tangent for p, value in found.items()}
        return found

    def _run(self, instructions: tuple[Instruction, ...], values: Values, first: int) -> None:
        with torch.no_grad():
            if bool(first) in self.checked:
                for instruction in instructions:
                    instruction(values)
                return
            for k, instruction in enumerate(instructions, start=first):
                keeping = _Keeping(values)
                instruction(keeping)
                for slot, shape, said in self.checks[k]:
                    made = keeping.made.get(slot)
                    if made is not None and tuple(made.shape) != shape:
                        raise InternalError(f"{said} made {tuple(made.shape)} where its device holds {shape}; please report this")
            self.checked.add(bool(first))


class _Keeping:
    """Slots that remember what was put into them."""

    def __init__(self, values: Values) -> None:
        self.values, self.made = values, dict[int, torch.Tensor]()

    def __getitem__(self, slot: int) -> Any:
        return self.values[slot]

    def __setitem__(self, slot: int, value: Any) -> None:
        self.values[slot] = value
        if value is not None:
            self.made[slot] = value


def compile_step(plan: Plan, program: Program, *, device: int, communicator: Communicator, place: torch.device | None = None) -> Compiled:
    """Prepare everything that a device does in one microbatch.

    Args:
        place: where tensors are made; default the CPU.

    Raises:
        InternalError: the plan is not executable.
    """
    order = schedule(plan, program, early=True)
    parameter_of = {g: p for p, g in program.gradients.items()}
    slot_of = {g: order.slots + k for k, g in enumerate(parameter_of)}
    size = order.slots + len(slot_of) + 2
    tangent, random = _tangent(program), numbers(program)
    made: list[Instruction] = []
    checks: list[tuple[tuple[int, tuple[int, ...], str], ...]] = []
    for instruction in order.instructions:
        if isinstance(instruction, Bring):
            reshard = plan.reshards[instruction.reshard]
            made.append(
                _unary(moves_of(plan, program, reshard, device, communicator), instruction.source, instruction.result, instruction.drops)
            )
            shape = boxes(reshard.layout, program.tensors[reshard.tensor].shape, plan.mesh)[device].length
            checks.append(((instruction.result, shape, f"the reshard of {program.tensors[reshard.tensor].name!r}"),))
        elif isinstance(instruction, Take):
            made.append(_unary(None, instruction.source, slot_of[plan.reshards[instruction.reshard].tensor], instruction.drops))
            checks.append(())
        elif instruction.op == tangent:
            dtype = DTYPES[program.tensors[program.ops[tangent].results[0]].dtype]
            made.append(_seed(instruction.results[0], dtype, instruction.drops))
            checks.append(())
        else:
            local = localise(plan, program, instruction, device, random.get(instruction.op), place or torch.device("cpu"))
            made.append(_op(local, plan, instruction, communicator))
            checks.append(_expected(plan, program, instruction, device))
    return Compiled(
        plan=plan,
        program=program,
        order=order,
        sources=tuple(program.sources()),
        gradients={parameter_of[g]: slot for g, slot in slot_of.items()},
        tangent=tangent,
        size=size,
        ahead=tuple(made[: order.forward]),
        back=tuple(made[order.forward :]),
        checks=tuple(checks),
    )


def moves_of(plan: Plan, program: Program, reshard: Reshard, device: int, communicator: Communicator) -> Move | None:
    """What brings a tensor to a group of readers; None where it is read as it is."""
    tensor = program.tensors[reshard.tensor]
    steps: list[Move] = []
    if reshard.purpose in ("accumulate", "optimizer"):
        dtype = DTYPES[plan.options.reduce_dtype or tensor.dtype]
        if dtype != DTYPES[tensor.dtype]:
            steps.append(lambda part: part.to(dtype))
    layout = reshard.source
    for step in reshard.steps:
        if step.before != layout:
            raise InternalError(f"a reshard of {tensor.name!r} is {layout} where its next step starts from {step.before}")
        exchange = prepare(step, tensor.shape, plan.mesh, device)
        steps.extend((exchange.pack,) if exchange.is_local else communicator.stages(exchange))
        layout = step.after
    if layout != reshard.layout:
        raise InternalError(f"the reshard of {tensor.name!r} ends in {layout}, its readers get {reshard.layout}")
    return in_turn(steps) if steps else None


def _tangent(program: Program) -> int | None:
    """The op that stands for the gradient of the loss."""
    found = [i for i, op in enumerate(program.ops) if _is_tangent(op)]
    return found[0] if len(found) == 1 else None


def _is_tangent(op: Op) -> bool:
    return op.name == "aten.full.default" and op.phase is Phase.BACKWARD and len(op.raw) == 1 and op.raw[0].startswith("tangents_")


def _expected(plan: Plan, program: Program, run: Run, device: int) -> tuple[tuple[int, tuple[int, ...], str], ...]:
    said = where(plan, program, run.op)
    layouts = plan.ops[run.op].result_layouts
    return tuple(
        (slot, boxes(layout, program.tensors[t].shape, plan.mesh)[device].length, said)
        for slot, t, layout in zip(run.results, program.ops[run.op].results, layouts, strict=True)
        if slot is not None
    )


def _op(local: LocalOp, plan: Plan, run: Run, communicator: Communicator) -> Instruction:
    function: Callable[..., Any] = local.run
    if local.finish is not None:
        function = _implementation(local, plan, run, communicator)
    reads = tuple(slot for j in local.reads if (slot := run.operands[j]) is not None)
    writes = tuple((j, slot) for j, slot in enumerate(run.results) if slot is not None)
    if local.number is not None:
        return _random(function, local.number, reads, writes, run.drops)
    return _call(function, reads, writes, run.drops, single=local.single)


def _implementation(local: LocalOp, plan: Plan, run: Run, communicator: Communicator) -> Callable[..., Sequence[torch.Tensor]]:
    """An implementation with its reductions among the devices."""
    start, finish = local.run, local.finish
    assert finish is not None
    inside = communicator.inside(local.axes, plan.ops[run.op].collectives)

    def call(*operands: torch.Tensor) -> Sequence[torch.Tensor]:
        running = start(*operands)
        if isinstance(running, tuple):
            return finish(running)
        reduce = inside()
        try:
            reduction, buffer = next(running)
            while True:
                reduction, buffer = running.send(reduce(reduction, buffer))
        except StopIteration as end:
            return finish(end.value)

    return call


def _seed(slot: int | None, dtype: torch.dtype, drops: tuple[int, ...]) -> Instruction:
    """The gradient of the loss, from the last slot."""

    def run(values: Values) -> None:
        given = values[-1]
        if slot is not None:
            values[slot] = torch.ones((), dtype=dtype) if given is None else given.to(dtype).reshape(())
        for k in drops:
            values[k] = None

    return run


def _unary(function: Move | None, source: int, result: int, drops: tuple[int, ...]) -> Instruction:
    if function is None:

        def alias(values: Values) -> None:
            values[result] = values[source]
            for k in drops:
                values[k] = None

        return alias

    def run(values: Values) -> None:
        values[result] = function(values[source])
        for k in drops:
            values[k] = None

    return run


def _call(
    function: Callable[..., Any], reads: Sequence[int], writes: Sequence[tuple[int, int]], drops: tuple[int, ...], *, single: bool
) -> Instruction:
    """A function of slots; those that one tensor comes out of, by their number of operands."""
    if not single:

        def several(values: Values) -> None:
            made = function(*[values[k] for k in reads])
            for j, slot in writes:
                values[slot] = made[j]
            for k in drops:
                values[k] = None

        return several
    result = writes[0][1] if writes else None
    if result is None or len(reads) not in (1, 2, 3):

        def any_number(values: Values) -> None:
            made = function(*[values[k] for k in reads])
            if result is not None:
                values[result] = made
            for k in drops:
                values[k] = None

        return any_number
    if len(reads) == 1:
        return _unary(function, reads[0], result, drops)
    if len(reads) == 2:
        a, b = reads

        def two(values: Values) -> None:
            values[result] = function(values[a], values[b])
            for k in drops:
                values[k] = None

        return two
    a, b, c = reads

    def three(values: Values) -> None:
        values[result] = function(values[a], values[b], values[c])
        for k in drops:
            values[k] = None

    return three


def _random(
    function: Callable[..., Any], number: int, reads: Sequence[int], writes: Sequence[tuple[int, int]], drops: tuple[int, ...]
) -> Instruction:
    """A random op; the slot before the last has the seed and the step."""

    def run(values: Values) -> None:
        seed, step = values[-2]
        made = function(key_of(seed, step, number), *[values[k] for k in reads])
        for j, slot in writes:
            values[slot] = made[j]
        for k in drops:
            values[k] = None

    return run
