"""Run a plan on all devices of its mesh, simulated in one process, and collect what the step returns.

Every device runs the step that it runs on a real mesh (:mod:`solver_shard.runtime.step`), compiled for it; only what takes its buffers to
the others is of this module. What comes out must be what the unsharded model computes, whatever the plan:

>>> values = {t: torch.randn(program.tensors[t].shape) for t in program.sources()}
>>> result = simulate(plan, program, values)
>>> torch.testing.assert_close(result.outputs[0], run(program, values)[program.outputs[0]])
>>> result.collectives
{('all_reduce', ('tp',)): 4, ('all_gather', ('dp',)): 18, ...}

What the simulation checks, and no real device could: devices that should hold the same do hold exactly the same, every device calls
the same collectives in the same order, with as many bytes as the plan says, all find one norm of the gradients, and, with a reference,
every op makes what the unsharded op makes.

A plain gradient step stands for the optimizer: each device steps its shard of the state, p - rate * g, and the new values then go to the
parameter's layout. A step of several microbatches takes one mapping of values for each. Losses are taken as means, so every microbatch's
gradients count 1/N, and what the step compares with is the mean of the unsharded gradients.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from solver_shard.costs.layouts import free_move
from solver_shard.errors import InputError, InternalError
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.ops.implementations import free
from solver_shard.ops.shards import Parts, boxes, groups, join, local_move, shard
from solver_shard.options import Options
from solver_shard.plan.plan import Plan, Reshard
from solver_shard.program import Program, Role, in_place
from solver_shard.runtime.collectives import Exchange, Move, all_reduce_over, in_turn
from solver_shard.runtime.optimizer import clipping_scale, norm_of
from solver_shard.runtime.schedule import Run, Schedule, schedule
from solver_shard.runtime.step import GradientSum, compile_step, moves_of, where
from solver_shard.verification.measurement import told_of_move

T = TypeVar("T")

Values = Mapping[int, torch.Tensor]
"""Whole tensors by position in the program."""

_STORED = {Role.PARAMETER: "parameters", Role.BUFFER: "parameters", Role.INPUT: "inputs"}

_AGREE = 1e-5
"""Largest relative difference between the gradient norms that two devices find."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """What a simulated step returned.

    Attributes:
        outputs: whole tensors, in the order of the program's outputs, microbatch after microbatch.
        gradients: whole gradient by parameter name, as the update reads it: the mean over microbatches, clipped where the plan clips.
        parameters: whole updated parameter by name, of those that have an optimizer.
        collectives: how many ran, by kind and names of the mesh axes.
        nbytes: bytes that one device called them with, by the same.
        norm: of all gradients together before clipping; None where the plan does not clip.
    """

    outputs: tuple[torch.Tensor, ...]
    gradients: Mapping[str, torch.Tensor]
    parameters: Mapping[str, torch.Tensor]
    collectives: Mapping[tuple[str, tuple[str, ...]], int]
    nbytes: Mapping[tuple[str, tuple[str, ...]], int]
    norm: float | None = None


def simulate(
    plan: Plan,
    program: Program,
    values: Values | Sequence[Values],
    *,
    reference: Values | Sequence[Values] | None = None,
    tolerance: float = 1e-4,
    absolute: float = 1e-6,
    rate: float = 0.25,
    max_norm: float = 1.0,
    meter: MeterLike | None = None,
    seed: int = 0,
) -> SimulationResult:
    """Run one step of a plan with all ranks in this process.

    Args:
        program: the one that the plan was made for.
        values: whole tensors of the program's sources by position; shapes are the program's. A list has one mapping for each
            microbatch of the plan; parameters are those of the first.
        reference: whole values of other tensors, as ``run`` returns them; the first op whose result departs is an error. A list where
            ``values`` is one.
        tolerance: largest difference from the reference, relative to the reference's largest value.
        absolute: differences up to this never count: sums that cancel (the bias of a key projection has no gradient) are noise.
        rate: of the gradient step.
        max_norm: to which gradients are clipped, where the plan clips them.
        meter: is told of every tensor that comes to be on device 0.
        seed: of random ops; ``run`` with the same seed (and, of a later microbatch, its number as the step) draws the same.

    Raises:
        InputError: a source has no value or one of another shape, or there are not as many mappings as the plan has microbatches.
        InternalError: the plan is not executable, or a result departs from the reference.
    """
    batches = [values] if isinstance(values, Mapping) else list(values)
    references = [reference or {}] * len(batches) if reference is None or isinstance(reference, Mapping) else list(reference)
    if not len(batches) == len(references) == plan.options.microbatches:
        raise InputError(
            f"values of {len(batches)} microbatches and references of {len(references)} were given; "
            f"give a list of {plan.options.microbatches} of each, as many as the plan's step has"
        )
    for t, batch in itertools.product(program.sources(), batches):
        tensor = program.tensors[t]
        if t not in batch or tuple(batch[t].shape) != tensor.shape:
            got = "none" if t not in batch else list(batch[t].shape)
            raise InputError(
                f"{tensor.name!r} needs a value of shape {list(tensor.shape)}, got {got}; give one for every source of the program"
            )
    order = schedule(plan, program)  # all is handed over at the end of the step, as plans count memory
    step = _SimulatedStep(plan, program, order, batches, references, tolerance, absolute, rate, max_norm, meter, seed)
    world = World(plan.mesh)
    results = world.each(lambda device: step.on_device(world.member(device)))
    return SimulationResult(**results[0], collectives=dict(world.counts), nbytes=dict(world.sent))


class MeterLike(Protocol):
    """What wants to know when tensors come to be on device 0."""

    def tick(self) -> None:
        """The next op begins, or the update."""

    def made(self, tensor: torch.Tensor, category: str) -> None:
        """A tensor is there."""

    def step(self, options: Options, shards: Sequence[tuple[tuple[int, ...], str]]) -> None:
        """The optimizer steps the shards of device 0, of these shapes and dtypes."""


@dataclass(frozen=True, slots=True)
class _SimulatedStep:
    """What ``simulate`` was asked, as every device runs it."""

    plan: Plan
    program: Program
    order: Schedule
    batches: Sequence[Values]
    references: Sequence[Values]
    tolerance: float
    absolute: float
    rate: float
    max_norm: float
    meter: MeterLike | None
    seed: int

    def on_device(self, member: SimulatedDevice) -> dict[str, Any]:
        """Run the step on one device; what it returns, put together of all devices."""
        plan, program, device = self.plan, self.program, member.device
        watch = _Watch(self, member)
        with torch.no_grad():
            compiled = compile_step(plan, program, device=device, communicator=member, order=self.order, watch=watch)
            total = GradientSum(plan, program, device, member)
            outputs: list[torch.Tensor] = []
            gradients: dict[int, torch.Tensor] | None = None
            for k, batch in enumerate(self.batches):
                watch.microbatch(self.references[k])
                sources = {t: self._source(t, batch[t], watch) for t in program.sources()}
                state = compiled.forward(sources, seed=self.seed, step=k)
                gradients = total.take(compiled.backward(state, sums=total.sums), state)
                for t in program.outputs:
                    layout = plan.reshards[compiled.order.outputs[t][1]].layout
                    outputs.append(member.whole(state.outputs[t], layout, program.tensors[t].shape))
            assert gradients is not None, "the step ends with its last microbatch"
            if len(self.batches) > 1:
                gradients = {p: gradient / len(self.batches) for p, gradient in gradients.items()}
            norm, gradients = self._clipped(gradients, member)
            reduced = {r.tensor: r.layout for r in plan.reshards if r.purpose == "optimizer"}
            whole = {
                program.tensors[p].name: member.whole(gradient, reduced[program.gradients[p]], program.tensors[p].shape)
                for p, gradient in gradients.items()
            }
            parameters = self._updated(gradients, reduced, member, watch)
        return {"outputs": tuple(outputs), "gradients": whole, "parameters": parameters, "norm": norm}

    def _source(self, t: int, whole: torch.Tensor, watch: _Watch) -> torch.Tensor:
        """A device's part of a source, and on device 0 the optimizer's state of it, which is there for the whole step."""
        tensor, planned = self.program.tensors[t], self.plan.tensors[t]
        part = shard(whole, planned.layout, self.plan.mesh, watch.member.device)
        if t in watch.written:
            part = part.clone()  # the step writes into it, and its values are those of other devices too
        if watch.meter is None:
            return part
        part = part.clone()  # in a storage of its own
        watch.meter.made(part, _STORED[tensor.role])
        if planned.state is not None:
            elements = math.prod(planned.state.local_shape(tensor.shape, self.plan.mesh.shape))
            kept = self.plan.options.optimizer_state()
            apart = 0 if free_move(planned.layout, planned.state) else kept.apart_bytes(tensor.dtype)
            state = torch.empty(elements * (kept.resident_bytes(tensor.dtype) + apart), dtype=torch.uint8)
            watch.meter.made(state, "optimizer")
            watch.stay.append(state)
        return part

    @property
    def _updates(self) -> dict[int, Reshard]:
        """The reshards of the new values of parameters that have an optimizer, by position."""
        return {reshard.tensor: reshard for reshard in self.plan.reshards if reshard.purpose == "update"}

    def _clipped(self, gradients: dict[int, torch.Tensor], member: SimulatedDevice) -> tuple[float | None, dict[int, torch.Tensor]]:
        """The norm of all gradients, on which all devices must agree, and the gradients clipped; None where the plan does not clip."""
        if not self.plan.options.clip or not self._updates:
            return None, gradients
        trained = {p: gradient for p, gradient in gradients.items() if p in self._updates}
        norm = norm_of(trained, self.plan, self.program, member.device, member)
        member.world.meet(member.device, "the norm of all gradients", norm, _agreed)
        scale = clipping_scale(norm, self.max_norm)
        return float(norm), gradients | {p: gradient * scale for p, gradient in trained.items()}

    def _updated(
        self, gradients: Mapping[int, torch.Tensor], reduced: Mapping[int, Layout], member: SimulatedDevice, watch: _Watch
    ) -> dict[str, torch.Tensor]:
        """The whole parameters after a gradient step on the shards of their states."""
        plan, program, mesh, updates = self.plan, self.program, self.plan.mesh, self._updates
        tensors, device = program.tensors, member.device
        if updates and watch.meter is not None:
            shards = [(boxes(r.source, tensors[p].shape, mesh)[device].length, tensors[p].dtype) for p, r in updates.items()]
            watch.meter.step(plan.options, shards)
        parameters: dict[str, torch.Tensor] = {}
        for p, update in updates.items():
            tensor, whole = tensors[p], self.batches[0][p]
            move = local_move(reduced[program.gradients[p]], update.source, tensor.shape, mesh, device)
            slope = gradients[p] if move is None else move(gradients[p])
            part = shard(whole, update.source, mesh, device) - self.rate * slope
            if watch.meter is not None and plan.options.optimizer_state().master_bytes(tensor.dtype):
                watch.meter.made(part, "intermediates")
            bring = moves_of(plan, program, update, device, member, watch)
            part = part if bring is None else bring(part)
            parameters[tensor.name] = member.whole(part, plan.tensors[p].layout, tensor.shape)
        return parameters


def _agreed(norms: Parts) -> Sequence[None]:
    every = torch.stack(norms)
    if every.max() - every.min() > _AGREE * every.max():
        raise InternalError(f"devices find different gradient norms, {every.min():g} to {every.max():g}")
    return [None] * len(norms)


class _Watch:
    """What a device makes, held against the unsharded step, and told to the meter of device 0.

    Attributes:
        stay: optimizer states, which are on the device for the whole step.
        written: what ops write into.
    """

    def __init__(self, step: _SimulatedStep, member: SimulatedDevice) -> None:
        self.step, self.member = step, member
        self.meter = step.meter if member.device == 0 else None
        self.reference: Values = {}
        self.time, self.stay = 0, list[torch.Tensor]()
        self.written = {step.program.ops[i].operands[0] for i in in_place(step.program)}

    def microbatch(self, reference: Values) -> None:
        """The next microbatch begins, of which this is known."""
        self.reference, self.time = reference, -1
        self.stay.clear()
        self.begin(0)

    def begin(self, time: int) -> None:
        if time > self.time:
            self.time = time
            if self.meter is not None:
                self.meter.tick()

    def results(self, run: Run, results: Sequence[torch.Tensor]) -> None:
        program, planned = self.step.program, self.step.plan.ops[run.op]
        for t, slot, layout, part in zip(program.ops[run.op].results, run.results, planned.result_layouts, results, strict=True):
            if self.meter is not None:
                self.meter.made(part, "gradients" if program.tensors[t].role is Role.GRADIENT else "activations")
            if slot is not None and t in self.reference:
                whole = self.member.whole(part, layout, program.tensors[t].shape)
                if self.member.device == 0:
                    self._compare(run.op, t, whole, layout)

    def moved(self, reshard: Reshard, before: torch.Tensor, after: torch.Tensor, *, last: bool) -> None:
        if self.meter is not None:
            told_of_move(self.meter, reshard, before, after, last=last)

    def _compare(self, i: int, t: int, whole: torch.Tensor, layout: Layout) -> None:
        expected, tensor = self.reference[t], self.step.program.tensors[t]
        if torch.equal(whole, expected):
            return
        problem = "other numbers"
        if expected.is_floating_point() or expected.is_complex():
            finite = expected[expected.isfinite()]
            scale = finite.abs().max().item() if finite.numel() else 0.0
            largest = max(self.step.absolute, self.step.tolerance * scale)
            if torch.allclose(whole, expected, rtol=0, atol=largest, equal_nan=True):
                return
            problem = f"difference {(whole - expected).abs().nan_to_num().max().item():g}, largest value {scale:g}"
        raise InternalError(
            f"{where(self.step.plan, self.step.program, i)}, does not make {tensor.name!r}, {layout.format(tensor.shape, tensor.dtype)}, "
            f"as the unsharded step does: {problem}"
        )


class World:
    """All devices of a mesh in this process.

    >>> world = World(Mesh.parse("2"))
    >>> world.each(lambda device: world.member(device).all_reduce(("d0",), "sum")(torch.ones(3)))
    [tensor([2., 2., 2.]), tensor([2., 2., 2.])]

    Each device is a thread, and one of them runs at a time: from one meeting with the others to the next, in the order of the devices. So
    what happens is always the same. Collectives give what torch's functional ones give (a test holds them against those), without a
    process group: a tiny step has hundreds of them, and torch's own simulation of one takes longer than all the rest.

    Attributes:
        counts: collectives run so far, by kind and axis names.
        sent: bytes that one device called them with, by the same.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self._size = mesh, mesh.size
        self.counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.sent: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._turns: list[threading.Lock] = []
        self._waiting: dict[int, tuple[Hashable, torch.Tensor]] = {}
        self._answers: dict[int, Any] = {}
        self._failure: BaseException | None = None

    def member(self, device: int) -> SimulatedDevice:
        """What a device talks to the others by."""
        return SimulatedDevice(self, device)

    def each(self, work: Callable[[int], T]) -> list[T]:
        """What a function returns on every device; the first error of a device is raised."""
        results: dict[int, T] = {}
        self._turns = [threading.Lock() for _ in range(self._size)]
        for turn in self._turns:
            turn.acquire()  # its holder's turn comes when another releases it
        self._waiting.clear()
        self._failure = None
        cores = torch.get_num_threads()

        def run(device: int) -> None:
            torch.set_num_threads(cores)  # a thread's own: without it devices add up the same product in different orders
            self._turns[device].acquire()
            try:
                if self._failure is None:
                    results[device] = work(device)
                    if device == self._size - 1 and self._waiting:
                        raise InternalError(f"device {device} is done where the others wait for it; please report this")
            except BaseException as error:
                self._failure = self._failure or error
            finally:
                self._turns[(device + 1) % self._size].release()

        threads = [threading.Thread(target=run, args=(device,), daemon=True) for device in range(self._size)]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # an interrupt: the devices stop where they meet next
            self._failure = error
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure
        return [results[device] for device in range(self._size)]

    def meet(self, device: int, topic: Hashable, value: torch.Tensor, together: Callable[[Parts], Sequence[T]]) -> T:
        """Wait for the other devices, and take this one's share of what ``together`` makes of all their values; the topic says what for.

        Raises:
            InternalError: devices meet for different things.
        """
        last = self._size - 1
        self._waiting[device] = topic, value
        del value  # what was handed over is gone when all have met
        if device == last:
            topics = {known for known, _ in self._waiting.values()}
            if len(self._waiting) < self._size or len(topics) > 1:
                raise InternalError(f"devices differ in what they do together: {', '.join(sorted(map(str, topics)))}; please report this")
            self._answers = dict(enumerate(together(tuple(self._waiting[k][1] for k in range(self._size)))))
            self._waiting.clear()
        self._turns[(device + 1) % self._size].release()
        self._turns[device].acquire()
        if self._failure is not None:
            raise _Stopped
        answer: T = self._answers.pop(device)
        return answer

    def collective(self, exchange: Exchange, buffers: Parts) -> Parts:
        """One collective on every device's buffer, counted."""
        nbytes = max(exchange.called_with(buffer) for buffer in buffers)
        if exchange.nbytes not in (None, nbytes):
            raise InternalError(
                f"{exchange.title}: a device calls it with {nbytes} bytes, the plan says {exchange.nbytes}; please report this"
            )
        self.counts[exchange.kind, exchange.axes] += 1
        self.sent[exchange.kind, exchange.axes] += nbytes
        received: dict[int, torch.Tensor] = {}
        for team in groups(exchange.group, self.mesh):
            received |= zip(team, _received(exchange, [buffers[device] for device in team]), strict=True)
        return tuple(received[device] for device in range(self._size))


def _received(exchange: Exchange, sent: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What the members of one group get for what they send, each in a storage of its own."""
    count = len(sent)
    if exchange.kind == "all_to_all":
        return [torch.cat(pieces) for pieces in zip(*(buffer.chunk(count) for buffer in sent), strict=True)]
    if exchange.kind == "all_gather":
        whole = torch.cat(tuple(sent))
        return [whole, *(whole.clone() for _ in sent[1:])]
    total = sent[0].clone(memory_format=torch.contiguous_format)
    for buffer in sent[1:]:
        total = _COMBINED[exchange.reduction](total, buffer)
    if exchange.reduction == "avg":
        total = total / count
    if exchange.kind == "reduce_scatter":
        return [piece.clone() for piece in total.chunk(count)]
    return [total, *(total.clone() for _ in sent[1:])]


_COMBINED: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class _Stopped(BaseException):
    """Another device has failed."""


class SimulatedDevice:
    """A simulated device among the others: a ``Communicator``."""

    def __init__(self, world: World, device: int) -> None:
        self.world, self.device = world, device

    def stages(self, exchange: Exchange) -> tuple[Move, ...]:
        """Pack, call, and unpack where that makes a copy."""

        def call(buffer: torch.Tensor) -> torch.Tensor:
            return self.world.meet(self.device, exchange.title, buffer, lambda buffers: self.world.collective(exchange, buffers))

        if exchange.placed:
            return exchange.pack, call, exchange.unpack
        return exchange.pack, lambda buffer: exchange.unpack(call(buffer))

    def all_reduce(self, axes: Sequence[str], reduction: str, nbytes: int | None = None) -> Move:
        """An all-reduce within the group over these axes."""
        return in_turn(self.stages(all_reduce_over(axes, reduction, self.world.mesh, self.device, nbytes)))

    def free(self, axes: Sequence[int], reduction: str) -> Move:
        """A reduction that a plan does not list, and that counts as none."""
        teams = groups(axes, self.world.mesh)
        return lambda buffer: self.world.meet(self.device, reduction, buffer, lambda buffers: free(reduction, buffers, teams))

    def whole(self, part: torch.Tensor, layout: Layout, shape: Sequence[int]) -> torch.Tensor:
        """The whole tensor of all devices' parts, pending reductions done; devices that should hold the same are compared."""
        mesh = self.world.mesh
        topic = "a whole tensor", tuple(shape), layout
        return self.world.meet(self.device, topic, part, lambda parts: [join(parts, layout, shape, mesh)] * len(parts))
