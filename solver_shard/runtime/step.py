"""A planned step on one device, compiled once into a list of small functions over local tensors.

>>> step = compile_step(plan, program, device=1, communicator=Processes(...))
>>> state = step.forward(sources)           # local tensors by position in the program
>>> state.outputs[program.outputs[0]]
tensor(4.1589)
>>> gradients = step.backward(state)        # by position of the parameter

Everything that can be known when a plan is loaded is decided then: which slots an op reads and writes, what is forgotten after it, the
sizes of shards, what a collective sends and where it puts what it receives. What is left for a step is a loop over functions. Each op is
a function of local tensors too (``localise``): free moves into the layouts that it reads, sizes of its shard in place of traced ones, the
part of what an implementation cuts, the values of a factory that lie in the shard.

The first step checks the shape of everything that is made; the later ones trust it. What a plan's microbatches leave is summed and reduced
by ``GradientSum``. A real mesh (:mod:`solver_shard.runtime.apply`) and the simulation of one (:mod:`solver_shard.verification.simulate`)
run the same steps; they differ in the ``Communicator``, and in that the simulation watches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from solver_shard.errors import InternalError
from solver_shard.layout import Layout
from solver_shard.ops.bound import bind, bind_inside
from solver_shard.ops.implementations import FREE, Part, Running, way_of
from solver_shard.ops.random import Key, draw, drawn_box, drawn_whole, kept, key_of, numbers, refuse_cut, shape_of
from solver_shard.ops.run import DTYPES, arguments_of, call
from solver_shard.ops.shards import Box, Shape, boxes, local_move
from solver_shard.plan.plan import Plan, Reshard
from solver_shard.program import Op, Phase, Program, Role, in_place
from solver_shard.runtime.collectives import Communicator, Move, in_turn, prepare
from solver_shard.runtime.schedule import Bring, Run, Schedule, Take, schedule

Values = Any
"""Local tensors by slot; None where nothing is (any more)."""

Instruction = Callable[[Values], None]


class Watch(Protocol):
    """Who is told what a device makes, as it is made; see ``solver_shard.verification.simulate``."""

    def begin(self, time: int) -> None:
        """The op at this position begins, or what is brought to it."""

    def results(self, run: Run, results: Sequence[torch.Tensor]) -> None:
        """An op has made these."""

    def moved(self, reshard: Reshard, before: torch.Tensor, after: torch.Tensor, *, last: bool) -> None:
        """A reshard has made one tensor of another; ``last``: the one that its readers get."""


@dataclass(slots=True, weakref_slot=True)
class StepState:
    """A step between its forward and its backward pass.

    Attributes:
        given: the storages of what it was given.
    """

    values: Values
    outputs: dict[int, torch.Tensor]
    given: frozenset[int]
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
    checks: tuple[tuple[tuple[int, Shape, str], ...], ...]
    checked: set[bool] = field(default_factory=set)

    def forward(self, sources: Mapping[int, torch.Tensor], *, seed: int = 0, step: int = 0) -> StepState:
        """Run the forward pass.

        Args:
            sources: local tensors by position in the program, one for each of ``sources``.
            seed, step: of random ops.
        """
        values: Values = [None] * self.size
        values[-2] = seed, step
        for t in self.sources:
            values[t] = sources[t]
        given = frozenset(values[t].untyped_storage().data_ptr() for t in self.sources)
        self._run(self.ahead, values, 0)
        outputs = {t: values[slot] for t, (slot, _) in self.order.outputs.items() if values[slot] is not None}
        return StepState(values, outputs, given)

    def backward(
        self, state: StepState, tangent: torch.Tensor | None = None, sums: Mapping[int, torch.Tensor] | None = None
    ) -> dict[int, torch.Tensor]:
        """Run the backward pass; the local gradients by position of their parameter, as their reshards leave them.

        Args:
            tangent: the gradient of the loss, a scalar; 1 where it is left out.
            sums: of earlier microbatches, by position of the gradient; each gradient is added to its sum, in place, as soon as it is made.
        """
        if state.spent:
            raise RuntimeError(
                "this step has run its backward pass already, and what it had kept for it is gone; run the forward pass again"
            )
        state.spent = True
        values = state.values
        values[-1] = tangent
        late = self.tangent is None and tangent is not None
        if sums and not late:
            for g, slot in {self.program.gradients[p]: slot for p, slot in self.gradients.items()}.items():
                made = values[slot]  # by the forward pass
                values[slot] = sums[g] if made is None else sums[g].add_(made)
        self._run(self.back, values, len(self.ahead))
        state.outputs |= {t: values[slot] for t, (slot, _) in self.order.outputs.items() if t not in state.outputs}
        gradients = {p: values[slot] for p, slot in self.gradients.items()}
        values.clear()
        if late:
            gradients = {p: gradient * tangent for p, gradient in gradients.items()}
            if sums:
                gradients = {p: sums[self.program.gradients[p]] + gradient for p, gradient in gradients.items()}
        return gradients

    def _run(self, instructions: tuple[Instruction, ...], values: Values, first: int) -> None:
        with torch.no_grad():
            if bool(first) in self.checked:
                for instruction in instructions:
                    instruction(values)
                return
            for k, instruction in enumerate(instructions, start=first):
                keeping = _Keeping(values)
                instruction(keeping)
                keeping.check(self.checks[k])
            self.checked.add(bool(first))


class _Keeping:
    """Slots that remember what was put into them."""

    def __init__(self, values: Values) -> None:
        self.values, self.written = values, dict[int, torch.Tensor]()

    def __getitem__(self, slot: int) -> Any:
        return self.values[slot]

    def __setitem__(self, slot: int, value: Any) -> None:
        self.values[slot] = value
        if value is not None:
            self.written[slot] = value

    def check(self, expected: Sequence[tuple[int, Shape, str]]) -> None:
        for slot, shape, title in expected:
            if slot in self.written:
                _check_shard(self.written[slot], shape, title)


def _check_shard(shard: torch.Tensor, shape: Shape, title: str) -> None:
    """InternalError where a tensor has not the shape of the device's shard."""
    if tuple(shard.shape) != shape:
        raise InternalError(f"{title} made {tuple(shard.shape)} where its device holds {shape}; please report this")


def compile_step(
    plan: Plan,
    program: Program,
    *,
    device: int,
    communicator: Communicator,
    place: torch.device | None = None,
    order: Schedule | None = None,
    watch: Watch | None = None,
) -> Compiled:
    """Prepare everything that a device does in one microbatch.

    Args:
        place: where tensors are made; default the CPU.
        order: of the microbatch, the same on all devices; default: one that hands over at the end of the forward pass what that has made.
        watch: is told of everything that is made.

    Raises:
        InternalError: the plan is not executable.
    """
    order = order or schedule(plan, program, early=True)
    slot_of = {g: order.slots + k for k, g in enumerate(dict.fromkeys(program.gradients.values()))}
    tangent, random = _tangent(program), numbers(program)
    compiled: list[Instruction] = []
    checks: list[tuple[tuple[int, Shape, str], ...]] = []
    taken: set[int] = set()
    layouts = {t: plan.tensors[t].layout for t in program.sources()}
    inside = in_place(program)
    for instruction in order.instructions:
        if isinstance(instruction, Bring):
            reshard = plan.reshards[instruction.reshard]
            move = moves_of(plan, program, reshard, device, communicator, watch)
            run = _unary(move, instruction.source, instruction.result, instruction.drops)
            if layouts[instruction.source] != reshard.source:
                run = _checking(reshard, layouts[instruction.source], program)
            layouts[instruction.result] = reshard.layout
            shape = boxes(reshard.layout, program.tensors[reshard.tensor].shape, plan.mesh)[device].length
            checks.append(((instruction.result, shape, f"the reshard of {program.tensors[reshard.tensor].name!r}"),))
        elif isinstance(instruction, Take):
            gradient = plan.reshards[instruction.reshard].tensor
            taken.add(gradient)
            run = _taken(instruction.source, slot_of[gradient], instruction.drops)
            checks.append(())
        elif instruction.op == tangent:
            dtype = DTYPES[program.tensors[program.ops[tangent].results[0]].dtype]
            run = _seed(instruction.results[0], dtype, instruction.drops)
            checks.append(())
        else:
            number, inner = random.get(instruction.op), instruction.op in inside
            local = localise(plan, program, instruction, device, number, place or torch.device("cpu"), inside=inner)
            expected = _expected(plan, program, instruction, device)
            run = _op(local, plan, program, instruction, communicator, watch, expected)
            checks.append(expected)
        if isinstance(instruction, Run):
            written = zip(instruction.results, plan.ops[instruction.op].result_layouts, strict=True)
            layouts |= {slot: layout for slot, layout in written if slot is not None}
        compiled.append(run if watch is None else _begun(watch, instruction.time, run))
    for g in slot_of:
        if g not in taken:
            raise InternalError(f"the plan brings {program.tensors[g].name!r} nowhere at the end of the step")
    return Compiled(
        plan=plan,
        program=program,
        order=order,
        sources=tuple(program.sources()),
        gradients={p: slot_of[g] for p, g in program.gradients.items()},
        tangent=tangent,
        size=order.slots + len(slot_of) + 2,
        ahead=tuple(compiled[: order.forward]),
        back=tuple(compiled[order.forward :]),
        checks=tuple(checks),
    )


def moves_of(
    plan: Plan, program: Program, reshard: Reshard, device: int, communicator: Communicator, watch: Watch | None = None
) -> Move | None:
    """What brings a tensor to a group of readers, gradients in the dtype that they are reduced in; None where it is read as it is."""
    tensor = program.tensors[reshard.tensor]
    moves: list[Move] = []
    converts = False
    if reshard.purpose in ("accumulate", "optimizer"):
        dtype = DTYPES[plan.options.reduce_dtype or tensor.dtype]
        converts = dtype != DTYPES[tensor.dtype] or watch is not None  # from here on it is a gradient to who watches
        if converts:
            moves.append(lambda part: part.to(dtype))
    layout = reshard.source
    for step in reshard.steps:
        if step.before != layout:
            raise InternalError(f"a reshard of {tensor.name!r} is {layout} where its next step starts from {step.before}")
        exchange = prepare(step, tensor.shape, plan.mesh, device)
        moves.extend((exchange.pack,) if exchange.is_local else communicator.stages(exchange))
        layout = step.after
    if layout != reshard.layout:
        raise InternalError(f"the reshard of {tensor.name!r} ends in {layout}, its readers get {reshard.layout}")
    if watch is not None:
        moves = [_moved(watch, reshard, move, last=k == len(moves) - 1 or (converts and not k)) for k, move in enumerate(moves)]
    return in_turn(moves) if moves else None


def _check_source(reshard: Reshard, layout: Layout, program: Program) -> None:
    """InternalError where a reshard does not start from the layout that its tensor has."""
    if layout != reshard.source:
        raise InternalError(f"{program.tensors[reshard.tensor].name!r} is {layout} where its reshard starts from {reshard.source}")


def _checking(reshard: Reshard, layout: Layout, program: Program) -> Instruction:
    """``_check_source`` when the step gets there: what is wrong with the op before it is said first."""
    return lambda _: _check_source(reshard, layout, program)


def _moved(watch: Watch, reshard: Reshard, move: Move, *, last: bool) -> Move:
    def run(before: torch.Tensor) -> torch.Tensor:
        after = move(before)
        watch.moved(reshard, before, after, last=last)
        return after

    return run


def _begun(watch: Watch, time: int, instruction: Instruction) -> Instruction:
    def run(values: Values) -> None:
        watch.begin(time)
        instruction(values)

    return run


class GradientSum:
    """The gradients of a step's microbatches on one device: summed as they come, reduced after the last.

    >>> total = GradientSum(plan, program, device, communicator)       # of a plan with two microbatches
    >>> for state in (one, other):
    ...     gradients = total.take(step.backward(state, sums=total.sums), state)
    >>> gradients                                                       # after the last; None before
    {0: tensor(...), ...}

    Attributes:
        sums: by position of the gradient, of the microbatches of the step so far.
        count: how many those are.
    """

    def __init__(self, plan: Plan, program: Program, device: int, communicator: Communicator) -> None:
        self.microbatches, self.count = plan.options.microbatches, 0
        self._gradients = program.gradients  # several parameters may have one
        self.sums: dict[int, torch.Tensor] = {}
        self._reductions: dict[int, Move | None] = {}
        if self.microbatches > 1:
            summed = {reshard.tensor: reshard.layout for reshard in plan.reshards if reshard.purpose == "accumulate"}
            for reshard in plan.reshards:
                if reshard.purpose == "optimizer":
                    _check_source(reshard, summed[reshard.tensor], program)
                    self._reductions[reshard.tensor] = moves_of(plan, program, reshard, device, communicator)

    def take(self, gradients: dict[int, torch.Tensor], state: StepState) -> dict[int, torch.Tensor] | None:
        """What the backward pass of a microbatch returned that began with ``sums``; the reduced sums after the last, None before."""
        if self.microbatches == 1:
            return gradients
        sums = {self._gradients[p]: part for p, part in gradients.items()}
        gradients.clear()  # the caller's hold no sum for longer than this does
        if not self.count:  # what is added to must be bytes of its own
            sums = {g: part.clone() if _is_of_others(part, state) else part for g, part in sums.items()}
        self.sums, self.count = sums, self.count + 1
        if self.count < self.microbatches:
            return None
        reduced = {}
        for g, move in self._reductions.items():  # each sum goes before the next is reduced
            part = self.sums.pop(g)
            reduced[g] = part if move is None else move(part)
            del part
        self.count = 0
        return {p: reduced[g] for p, g in self._gradients.items()}


def _is_of_others(part: torch.Tensor, state: StepState) -> bool:
    return bool(part._is_view()) or part.untyped_storage().data_ptr() in state.given


def _tangent(program: Program) -> int | None:
    """The op that stands for the gradient of the loss."""
    found = [i for i, op in enumerate(program.ops) if _is_tangent(op)]
    return found[0] if len(found) == 1 else None


def _is_tangent(op: Op) -> bool:
    return op.name == "aten.full.default" and op.phase is Phase.BACKWARD and len(op.raw) == 1 and op.raw[0].startswith("tangents_")


def _expected(plan: Plan, program: Program, run: Run, device: int) -> tuple[tuple[int, Shape, str], ...]:
    """The shapes of an op's results on a device, by slot, and what they are of."""
    title = f"{where(plan, program, run.op)}, on device {device},"
    layouts = plan.ops[run.op].result_layouts
    return tuple(
        (slot, boxes(layout, program.tensors[t].shape, plan.mesh)[device].length, title)
        for slot, t, layout in zip(run.results, program.ops[run.op].results, layouts, strict=True)
        if slot is not None
    )


def _op(
    local: LocalOp,
    plan: Plan,
    program: Program,
    run: Run,
    communicator: Communicator,
    watch: Watch | None,
    expected: Sequence[tuple[int, Shape, str]],
) -> Instruction:
    function: Callable[..., Any] = local.run
    if local.finish is not None:
        function = _implementation(local, plan, program, run, communicator)
    if watch is not None:
        function = _told(function, run, watch, expected, single=local.single)
    reads = tuple(slot for j in local.reads if (slot := run.operands[j]) is not None)
    writes = tuple((j, slot) for j, slot in enumerate(run.results) if slot is not None)
    if local.number is not None:
        return _random(function, local.number, reads, writes, run.drops)
    return _call(function, reads, writes, run.drops, single=local.single)


def _told(
    function: Callable[..., Any], run: Run, watch: Watch, expected: Sequence[tuple[int, Shape, str]], *, single: bool
) -> Callable[..., Any]:
    """An op that tells what it makes, once that is what its device holds."""

    def call(*operands: Any) -> Any:
        results = function(*operands)
        every = (results,) if single else results
        written = (result for slot, result in zip(run.results, every, strict=True) if slot is not None)
        for (_, shape, title), result in zip(expected, written, strict=True):
            _check_shard(result, shape, title)
        watch.results(run, every)
        return results

    return call


def _implementation(
    local: LocalOp, plan: Plan, program: Program, run: Run, communicator: Communicator
) -> Callable[..., Sequence[torch.Tensor]]:
    """An implementation with its reductions among the devices, in the order in which the plan lists them."""
    start, finish = local.run, local.finish
    assert finish is not None
    title = where(plan, program, run.op)
    planned = plan.ops[run.op].collectives
    listed = [{kind: communicator.all_reduce(one.axes, kind, one.nbytes) for kind in ("sum", "max", "min")} for one in planned]
    free = {kind: communicator.free(local.axes, kind) for kind in FREE}

    def call(*operands: torch.Tensor) -> Sequence[torch.Tensor]:
        running = start(*operands)
        if isinstance(running, tuple):
            return finish(running)
        left = iter(listed)
        try:
            reduction, buffer = next(running)
            while True:
                if reduction in FREE:
                    reduce = free[reduction]
                elif (following := next(left, None)) is not None:
                    reduce = following[reduction]
                else:
                    raise InternalError(f"{title}: a {reduction} of {buffer.nbytes} bytes among the devices is not what the plan lists")
                reduction, buffer = running.send(reduce(buffer))
        except StopIteration as end:
            if next(left, None) is not None:
                raise InternalError(f"{title}: the plan lists collectives that do not run, {list(planned)}") from None
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


def _taken(source: int, result: int, drops: tuple[int, ...]) -> Instruction:
    """A gradient is there: it is added to the sum of earlier microbatches, if there is one."""

    def run(values: Values) -> None:
        part, total = values[source], values[result]
        values[result] = part if total is None else total.add_(part)
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


Results = tuple[torch.Tensor, ...]
Local = Callable[..., Results]

_CPU = torch.device("cpu")
_LEAVING = frozenset(f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"))
"""Ops of one result, which torch leaves in the storage of the losses of all elements that it was summed up from."""
_IDENTITY = {"sum": 0.0, "avg": 0.0, "max": float("-inf"), "min": float("inf")}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOp:
    """One op on one device.

    Attributes:
        reads: per operand of the call, which of the op's operands it is; those of which only the shape is needed are left out.
        run: from these operands, as their reshards leave them, to the result or the results; or to a running implementation, which
            asks for reductions on its way (see :mod:`solver_shard.ops.implementations`).
        single: whether ``run`` returns the one result itself, not a tuple.
        finish: where ``run`` starts an implementation: from what it returns to the results, in the shapes and dtypes of the plan.
        axes: the mesh axes whose devices share the implementation's cut.
        number: of a random op, whose ``run`` takes the key of its draws first (see :mod:`solver_shard.ops.random`).
    """

    reads: tuple[int, ...]
    run: Callable[..., Any]
    single: bool = False
    finish: Callable[[Results], Results] | None = None
    axes: tuple[int, ...] = ()
    number: int | None = None


def localise(
    plan: Plan,
    program: Program,
    instruction: Run,
    device: int,
    number: int | None = None,
    place: torch.device = _CPU,
    *,
    inside: bool = False,
) -> LocalOp:
    """One op as one device runs it: a function of local tensors, prepared once.

    >>> local = localise(plan, program, instruction, device=0)
    >>> local.run(x, weight)
    tensor(...)

    Args:
        number: of a random op, among those of the program.
        place: where tensors are made.
        inside: the op writes into its operand 0 (``program.in_place``).

    Raises:
        InputError: a random op that must be drawn whole is cut, or an op cannot be executed here.
        InternalError: the plan cannot be executed there.
    """
    return _Device(plan, program, instruction, device, number, place, inside).op()


def _as_stored(plan: Plan, program: Program, i: int) -> bool:
    """Whether what an op writes into is a source as it is stored, through all such ops before it; no copy that a reshard has made."""
    t, makers = program.ops[i].operands[0], program.producers()
    given = next(reshard for reshard in plan.reshards if (i, 0) in reshard.readers)
    return not given.copy and (t not in makers or _as_stored(plan, program, makers[t][0]))


def where(plan: Plan, program: Program, i: int) -> str:
    """An op, for a person to find."""
    op = program.ops[i]
    return f"op {i} ({op.name}, {op.module or 'model'}), with strategies {', '.join(plan.ops[i].strategy)}"


class _Device:
    def __init__(
        self, plan: Plan, program: Program, instruction: Run, device: int, number: int | None, place: torch.device, inside: bool
    ) -> None:
        self.number, self.place, self.inside = number, place, inside
        self.plan, self.program, self.instruction, self.device, self.mesh = plan, program, instruction, device, plan.mesh
        self.op_, self.planned = program.ops[instruction.op], plan.ops[instruction.op]
        self.wanted = tuple(self._box(t, layout) for t, layout in zip(self.op_.results, self.planned.result_layouts, strict=True))
        self.dtypes = tuple(DTYPES[program.tensors[t].dtype] for t in self.op_.results)

    def _box(self, t: int, layout: Layout) -> Box:
        return boxes(layout, self.program.tensors[t].shape, self.mesh)[self.device]

    @property
    def lengths(self) -> tuple[Shape, ...]:
        return tuple(box.length for box in self.wanted)

    def op(self) -> LocalOp:
        op, planned = self.op_, self.planned
        number = self.number
        if not op.operands:
            return LocalOp(reads=(), run=self._factory() if number is None else self._random(), number=number)
        reads = tuple(j for j, position in enumerate(self.instruction.reshards) if position is not None)
        arrange = self._arrangement(reads)
        read = [self._box(op.operands[j], planned.operand_layouts[j]) for j in reads]
        idle = any(box.empty and self.program.tensors[op.operands[j]].numel for j, box in zip(reads, read, strict=True))
        if planned.implementation:
            axes = tuple(axis for axis, name in enumerate(planned.strategy) if name == planned.implementation)
            run = _arranged(self._implementation(), arrange, keyed=number is not None)
            return LocalOp(reads=reads, run=run, finish=self._finished, axes=axes, number=number)
        if idle:
            return LocalOp(reads=reads, run=self._idle())
        if number is not None:
            return LocalOp(reads=reads, run=_arranged(self._random(), arrange, keyed=True), number=number)
        shapes = [self._box(t, layout).length for t, layout in zip(op.operands, planned.operand_layouts, strict=True)]
        bound = bind_inside(op, self.lengths) if self.inside else bind(op, shapes, self.lengths)
        run = bound.function if op.name not in _LEAVING else lambda *local: _whole_storage(bound.function(*local))
        return LocalOp(reads=reads, run=_arranged(run, arrange), single=bound.single)

    def _arrangement(self, reads: tuple[int, ...]) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None:
        """From what the reshards leave to all the operands of the call: free moves, and what stands for operands that are not read."""
        op, planned = self.op_, self.planned
        items: list[tuple[int, Callable[[torch.Tensor], torch.Tensor] | None] | torch.Tensor] = []
        for j, t in enumerate(op.operands):
            position = self.instruction.reshards[j]
            if position is None:
                items.append(self._unread(j))
                continue
            before, shape = self.plan.reshards[position].layout, self.program.tensors[t].shape
            own = j > 0 or not self.inside or not _as_stored(self.plan, self.program, self.instruction.op)
            items.append((reads.index(j), local_move(before, planned.operand_layouts[j], shape, self.mesh, self.device, own=own)))
        if all(isinstance(item, tuple) and item[1] is None for item in items):
            return None

        def arrange(local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            made = []
            for item in items:
                if isinstance(item, tuple):
                    k, move = item
                    made.append(local[k] if move is None else move(local[k]))
                else:
                    made.append(item)
            return made

        return arrange

    def _random(self) -> Callable[..., Results]:
        """This device's part of a random op's draws, from their key."""
        op, box, shape, dtype = self.op_, self._drawn(), shape_of(self.program, self.instruction.op), self.dtypes[0]
        if drawn_whole(op) and any(not p.is_replicate for x in (*self.planned.operand_layouts, *self.planned.result_layouts) for p in x):
            refuse_cut(op)
        return lambda key, *local: draw(op.name, arguments_of(op, local), key=key, box=box, shape=shape, dtype=dtype, device=self.place)

    def _drawn(self) -> Box:
        operands, layouts = self.op_.operands, self.planned.operand_layouts
        return drawn_box(self.op_, lambda j: self._box(operands[j], layouts[j]), self.wanted[0])

    def _factory(self) -> Local:
        """Made whole, then cut; a single number once, for it stays."""
        op, wanted = self.op_, self.wanted
        shapes = tuple(self.program.tensors[t].shape for t in op.results)
        places = [box.inside(Box((0,) * len(shape), shape)) for box, shape in zip(wanted, shapes, strict=True)]
        whole = [box.length == shape for box, shape in zip(wanted, shapes, strict=True)]

        def run() -> Results:
            with self.place:
                made = tuple(value.to(self.place) for value in call(op, (), shapes))
            return tuple(value if all_ else value[at].clone() for value, at, all_ in zip(made, places, whole, strict=True))

        handed = any(self.program.tensors[t].role is Role.OUTPUT for t in op.results)
        if handed or sum(math.prod(shape) for shape in shapes) > 1:
            return run
        once = run()
        return lambda: once

    def _unread(self, j: int) -> torch.Tensor:
        """What stands for an operand that no group of readers serves: its local shape, without bytes, and values that spoil whatever
        reads them."""
        t = self.op_.operands[j]
        dtype = DTYPES[self.program.tensors[t].dtype]
        fill = float("nan") if dtype.is_floating_point or dtype.is_complex else dtype != torch.bool and torch.iinfo(dtype).min
        return torch.full((), fill, dtype=dtype, device=self.place).expand(self._box(t, self.planned.operand_layouts[j]).length)

    def _idle(self) -> Local:
        """What a device without a share of the work returns: nothing, or what changes nothing in the pending reduction."""
        fills: list[float] = []
        for layout, length, slot in zip(self.planned.result_layouts, self.lengths, self.instruction.results, strict=True):
            found = {_IDENTITY[placement.reduction] for placement in layout if placement.is_partial}
            if 0 not in length and len(found) != 1 and slot is not None:
                raise InternalError(f"there is nothing to read, but {length} of a result in layout {layout} must be made")
            fills.append(found.pop() if found else 0.0)
        made = list(zip(self.lengths, fills, self.dtypes, strict=True))
        return lambda *_: tuple(torch.full(length, fill, dtype=dtype, device=self.place) for length, fill, dtype in made)

    def _implementation(self) -> Callable[..., Running | Results]:
        """The start of an implementation, from its operands; of a random one, attention with dropout, from the key of its draws first."""
        op, tensors = self.op_, self.program.tensors
        way = way_of(self.planned.implementation, op)
        operand, dim = way.cut(op, [len(tensors[t].shape) for t in op.operands], len(tensors[op.results[0]].shape))
        t = op.results[0] if operand is None else op.operands[operand]
        layout = self.planned.result_layouts[0] if operand is None else self.planned.operand_layouts[operand]
        box = self._box(t, layout)
        part = Part(start=box.start[dim], length=box.length[dim], size=tensors[t].shape[dim])

        def start(a: dict[str, Any]) -> Running | Results:
            if self.place == _CPU:
                return way.run(op, a, part)
            with self.place:
                started = way.run(op, a, part)
            return started if isinstance(started, tuple) else _there(self.place, started)

        if self.number is None:
            known = {"shapes": self.lengths, "inside": self.inside}
            return lambda *local: start(arguments_of(op, local) | known)
        drawn, shape = self._drawn(), shape_of(self.program, self.instruction.op)

        def keyed(key: Key, *local: torch.Tensor) -> Running | Results:
            a = arguments_of(op, local)
            return start(a | {"keep": kept(a, key=key, box=drawn, shape=shape)})

        return keyed

    def _finished(self, results: Results) -> Results:
        """The results of an implementation in their dtypes (kernels differ in that of statistics), without its scratch."""
        found = [tuple(result.shape) for result in results]
        if found != list(self.lengths):
            raise InternalError(
                f"{where(self.plan, self.program, self.instruction.op)}, on device {self.device}: {self.planned.implementation!r} gave "
                f"results of shapes {found}, expected {list(self.lengths)}"
            )
        return tuple(_whole_storage(result.to(dtype)) for result, dtype in zip(results, self.dtypes, strict=True))


def _arranged(
    run: Callable[..., Any], arrange: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None, *, keyed: bool = False
) -> Callable[..., Any]:
    if arrange is None:
        return run
    return (lambda key, *local: run(key, *arrange(local))) if keyed else (lambda *local: run(*arrange(local)))


def _there(place: torch.device, running: Running) -> Running:
    """An implementation makes its tensors where its operands are."""
    reduced: torch.Tensor | None = None
    while True:
        with place:
            try:
                asked = next(running) if reduced is None else running.send(reduced)
            except StopIteration as end:
                made: Results = end.value
                return made
        reduced = yield asked


def _whole_storage(part: torch.Tensor) -> torch.Tensor:
    """What an implementation cuts from its scratch does not keep the scratch."""
    return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part
