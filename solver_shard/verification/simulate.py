"""Run a plan on all devices of its mesh, simulated in one process, and collect what the step returns.

Every op runs on local shards, once per device, or as the implementation that the plan names, with the collectives inside;
every reshard runs the collectives that the plan lists. What comes out must be what the unsharded model computes, whatever the plan:

>>> values = {t: torch.randn(program.tensors[t].shape) for t in program.sources()}
>>> result = simulate(plan, program, values)
>>> torch.testing.assert_close(result.outputs[0], run(program, values)[program.outputs[0]])
>>> result.collectives
{('all_reduce', ('tp',)): 4, ('all_gather', ('dp',)): 18, ...}

What is kept of a tensor between its forward and its later readers is what the plan's holds say; nothing else of it is there
any more. A plain gradient step stands for the optimizer: each device steps its shard of the state, p - rate * g, and the new
values then go to the parameter's layout.

An operand that is in no group of readers is one of which the op needs only the shape: it gets a local tensor of that shape without
its values.

A step of several microbatches takes one mapping of values for each. Losses are taken as means, so every microbatch's gradients
count 1/N, and what the step compares with is the mean of the unsharded gradients.

Random ops draw their part of what the unsharded op draws (:mod:`solver_shard.ops.random`). Other ops without operands (arange,
full, ...) are computed whole and then cut.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from solver_shard.costs.memory import WAYS
from solver_shard.errors import InputError, InternalError
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.ops.implementations import FREE, free, lockstep
from solver_shard.ops.random import Key, key_of, numbers
from solver_shard.ops.run import DTYPES
from solver_shard.ops.shards import Parts, boxes, coordinates, groups, join, move, split
from solver_shard.options import Options
from solver_shard.plan.plan import CATEGORIES, Plan, Reshard
from solver_shard.program import Program, Role
from solver_shard.runtime.collectives import Exchange, StepLike, all_reduce_over, prepare
from solver_shard.runtime.optimizer import squares
from solver_shard.runtime.schedule import Bring, Run, schedule
from solver_shard.runtime.step import LocalOp, localise, where

Values = Mapping[int, torch.Tensor]
"""Whole tensors by position in the program."""

_STORED = {Role.PARAMETER: "parameters", Role.BUFFER: "parameters", Role.INPUT: "inputs"}


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
        InputError: a source has no value or one of another shape, there are not as many mappings as the plan has microbatches, or this
            process has a process group.
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
    with World(plan.mesh) as world, torch.no_grad():
        return _Simulation(plan, program, world, tolerance, absolute, meter, seed).run(batches, references, rate, max_norm)


class MeterLike(Protocol):
    """What wants to know when tensors come to be; see ``solver_shard.verification.simulate``."""

    def tick(self) -> None:
        """The next op begins, or the update."""

    def made(self, tensor: torch.Tensor, category: str) -> None:
        """A tensor is there on device 0."""

    def step(self, options: Options, shards: Sequence[tuple[tuple[int, ...], str]]) -> None:
        """The optimizer steps the shards of device 0, of these shapes and dtypes."""


class _Simulation:
    def __init__(
        self, plan: Plan, program: Program, world: World, tolerance: float, absolute: float, meter: MeterLike | None, seed: int
    ) -> None:
        self.plan, self.program, self.world, self.meter = plan, program, world, meter
        self.tolerance, self.absolute = tolerance, absolute
        self.mesh = plan.mesh
        self.sums = Gradients(plan, program, world, self._tell)
        self.order = schedule(plan, program)
        self.numbers, self.seed = numbers(program), seed
        self.local: dict[int, list[LocalOp]] = {}

    def run(self, batches: Sequence[Values], references: Sequence[Values], rate: float, max_norm: float) -> SimulationResult:
        outputs: list[torch.Tensor] = []
        for self.step, (values, reference) in enumerate(zip(batches, references, strict=True)):
            outputs += self._microbatch(values, reference)
        gradients = self.sums.handed_over()
        parameters, norm = {}, None
        if self.sums.stepped:
            slices = self.sums.slices()
            if self.meter is not None:
                tensors = self.program.tensors
                kept = [(boxes(r.source, tensors[p].shape, self.mesh)[0].length, tensors[p].dtype) for p, r in self.sums.stepped.items()]
                self.meter.step(self.plan.options, kept)
            norm = self.sums.clip(slices, max_norm) if self.plan.options.clip else None
            if norm is not None:
                gradients |= self.sums.whole(slices)
            parameters = {self.program.tensors[p].name: self.sums.updated(p, batches[0][p], slices[p], rate) for p in slices}
        return SimulationResult(
            outputs=tuple(outputs),
            gradients=gradients,
            parameters=parameters,
            collectives=dict(self.world.counts),
            nbytes=dict(self.world.sent),
            norm=norm,
        )

    def _microbatch(self, values: Values, reference: Values) -> list[torch.Tensor]:
        """Run forward and backward once; what the step returns."""
        self.reference, self.time = reference, 0
        self.values: list[Parts | None] = [None] * self.order.slots
        self.layouts: dict[int, Layout] = {}
        self._tick()
        self.stay = [self._source(t, values[t]) for t in self.program.sources()]
        for instruction in self.order.instructions:
            if instruction.time > self.time:
                self.time = instruction.time
                self._tick()
            if isinstance(instruction, Bring):
                self._bring(instruction)
            elif isinstance(instruction, Run):
                self._op(instruction)
            else:
                self.sums.add(self.plan.reshards[instruction.reshard], self._held(instruction.source))
            for slot in instruction.drops:
                self.values[slot] = None
        made = {
            t: join(self._held(slot), self.layouts[slot], self.program.tensors[t].shape, self.mesh)
            for t, (slot, _) in self.order.outputs.items()
        }
        return [made[t] for t in self.program.outputs]

    def _key(self, number: int) -> Key:
        return key_of(self.seed, self.step, number)

    def _held(self, slot: int) -> Parts:
        parts = self.values[slot]
        assert parts is not None, "the schedule reads what is there"
        return parts

    def _tick(self) -> None:
        if self.meter is not None:
            self.meter.tick()

    def _tell(self, parts: Parts, category: str) -> Parts:
        if self.meter is not None:
            self.meter.made(parts[0], category)
        return parts

    def _source(self, t: int, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Distribute a source; what stays on device 0 for the whole step, the optimizer's state included."""
        tensor, planned = self.program.tensors[t], self.plan.tensors[t]
        parts = self._tell(self._cut(whole, planned.layout), _STORED[tensor.role])
        self.values[t], self.layouts[t] = parts, planned.layout
        if self.meter is None or planned.state is None:
            return parts[:1]
        elements = math.prod(planned.state.local_shape(tensor.shape, self.mesh.shape))
        state = torch.empty(elements * self.plan.options.optimizer_state().resident_bytes(tensor.dtype), dtype=torch.uint8)
        self.meter.made(state, "optimizer")
        return parts[0], state

    def _cut(self, whole: torch.Tensor, layout: Layout) -> Parts:
        """A whole tensor on all devices; with a meter, device 0 has its part in a storage of its own."""
        parts = split(whole, layout, self.mesh)
        return parts if self.meter is None else (parts[0].clone(), *parts[1:])

    def _bring(self, bring: Bring) -> None:
        reshard = self.plan.reshards[bring.reshard]
        self.values[bring.result] = self.sums.reshard(reshard, self._held(bring.source), self.layouts[bring.source])
        self.layouts[bring.result] = reshard.layout

    def _op(self, run: Run) -> None:
        op = self.program.ops[run.op]
        made = self._call(run)
        for j, (t, slot) in enumerate(zip(op.results, run.results, strict=True)):
            layout = self.plan.ops[run.op].result_layouts[j]
            parts = self._tell(
                tuple(results[j] for results in made), "gradients" if self.program.tensors[t].role is Role.GRADIENT else "activations"
            )
            if slot is not None:
                if t in self.reference:
                    self._compare(run.op, t, parts, layout)
                self.values[slot], self.layouts[slot] = parts, layout

    def _call(self, run: Run) -> list[tuple[torch.Tensor, ...]]:
        """Results of an op, by device."""
        if run.op not in self.local:
            self.local[run.op] = [
                localise(self.plan, self.program, run, device, self.numbers.get(run.op)) for device in range(self.mesh.size)
            ]
        local = self.local[run.op]
        made = []
        for device, one in enumerate(local):
            read = [self._held(slot)[device] for j in one.reads if (slot := run.operands[j]) is not None]
            try:
                made.append((one.results if one.finish is None else one.started)(self._key, *read))
            except InternalError as error:
                raise InternalError(f"{where(self.plan, self.program, run.op)}, on device {device}: {error}") from None
        if local[0].finish is not None:
            return self._implementation(run, local, made)
        self._check_shapes(run, made)
        return made

    def _check_shapes(self, run: Run, made: list[tuple[torch.Tensor, ...]]) -> None:
        """Every device holds the shard that the plan says."""
        op, layouts = self.program.ops[run.op], self.plan.ops[run.op].result_layouts
        held = [boxes(layout, self.program.tensors[t].shape, self.mesh) for t, layout in zip(op.results, layouts, strict=True)]
        for device, results in enumerate(made):
            found, wanted = tuple(tuple(result.shape) for result in results), tuple(box[device].length for box in held)
            if found != wanted:
                raise InternalError(
                    f"{where(self.plan, self.program, run.op)}, on device {device}: {op.name} gave results of shapes {found}, "
                    f"expected {wanted}; please report this"
                )

    def _implementation(self, run: Run, local: list[LocalOp], running: list[Any]) -> list[tuple[torch.Tensor, ...]]:
        """Results of an op that runs a named implementation, by device."""
        planned, said = self.plan.ops[run.op], where(self.plan, self.program, run.op)
        pending = list(planned.collectives)

        def all_reduce(reduction: str, buffers: Sequence[torch.Tensor]) -> Parts:
            if reduction in FREE:
                return tuple(free(reduction, buffers, groups(local[0].axes, self.mesh)))
            if not pending or pending[0].kind != "all_reduce" or pending[0].nbytes != max(buffer.nbytes for buffer in buffers):
                raise InternalError(f"{said}: an all-reduce of {buffers[0].nbytes} bytes is not what the plan lists, {pending[:1]}")
            return self.world.all_reduce(buffers, reduction, pending.pop(0).axes)

        made = lockstep(planned.implementation, running, all_reduce)
        if pending:
            raise InternalError(f"{said}: the plan lists collectives that do not run, {pending}")
        return [one.finish(results) for one, results in zip(local, made, strict=True) if one.finish is not None]

    def _compare(self, i: int, t: int, parts: Parts, layout: Layout) -> None:
        expected, tensor = self.reference[t], self.program.tensors[t]
        found = join(parts, layout, tensor.shape, self.mesh)
        if torch.equal(found, expected):
            return
        problem = "other numbers"
        if expected.is_floating_point() or expected.is_complex():
            finite = expected[expected.isfinite()]
            scale = finite.abs().max().item() if finite.numel() else 0.0
            if torch.allclose(found, expected, rtol=0, atol=max(self.absolute, self.tolerance * scale), equal_nan=True):
                return
            problem = f"difference {(found - expected).abs().nan_to_num().max().item():g}, largest value {scale:g}"
        raise InternalError(
            f"{where(self.plan, self.program, i)}, does not make {tensor.name!r}, {layout.format(tensor.shape, tensor.dtype)}, "
            f"as the unsharded step does: {problem}"
        )


# Collectives among all devices of a mesh, simulated in one process by torch's LocalTensorMode.
#
# Each step of a transition is one functional collective on flat buffers, padded to equal sizes as a real run pads uneven
# shards. Which elements a device sends and where it puts what it receives follows from the layouts before and after the
# step alone, so a step that is not what it says (rows that would come from a device outside the group, say) is an error:
#
# >>> with World(Mesh.parse("2,2")) as world:
# ...     parts = world.run(parts, Step(kind="all_gather", axes=("d1",), before=S(0)S(0), after=S(0)R, ...), shape)


class World:
    """All devices of a mesh in this process; a context manager that holds a fake process group of the mesh's size.

    Attributes:
        counts: collectives run so far, by kind and axis names.
        sent: bytes that one device called them with, by the same.

    Raises:
        InputError: on entry, when the process already has a process group.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.sent: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._groups: dict[tuple[int, ...], str] = {}

    def __enter__(self) -> World:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if dist.is_initialized():
            raise InputError(
                "a plan is simulated in a process without a process group; call torch.distributed.destroy_process_group() first"
            )
        self._excepthook = sys.excepthook  # init_process_group puts one of its own in front, and leaves it there
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self.mesh.size)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._groups.clear()
        dist.destroy_process_group()
        sys.excepthook = self._excepthook

    def run(self, parts: Parts, step: StepLike, shape: Sequence[int]) -> Parts:
        """Take a tensor of this global shape through one step.

        Raises:
            InternalError: the step is not the collective that it says it is, or its buffer has another size.
        """
        for stage in self.stages(step, shape):
            parts = stage(parts)
        return parts

    def stages(self, step: StepLike, shape: Sequence[int]) -> tuple[Callable[[Parts], Parts], ...]:
        """``run`` as what is done in turn: pack, call, and unpack where device 0 makes a copy. Calling them raises what ``run`` raises."""
        made = [prepare(step, tuple(shape), self.mesh, device) for device in range(self.mesh.size)]

        def pack(parts: Parts) -> Parts:
            return tuple(exchange.pack(part) for exchange, part in zip(made, parts, strict=True))

        def unpack(received: Parts) -> Parts:
            return tuple(exchange.unpack(buffer) for exchange, buffer in zip(made, received, strict=True))

        if made[0].is_local:
            return (pack,)
        if made[0].placed:
            return pack, lambda sent: self._counted(step, made, sent), unpack
        return pack, lambda sent: unpack(self._counted(step, made, sent))

    def _counted(self, step: StepLike, made: Sequence[Exchange], sent: Parts) -> Parts:
        self.counts[step.kind, step.axes] += 1
        nbytes = max(exchange.nbytes(buffer) for exchange, buffer in zip(made, sent, strict=True))
        if nbytes != step.nbytes:
            raise InternalError(
                f"step {step.kind} on {', '.join(step.axes)}, {step.before} → {step.after}: a device calls it with {nbytes} bytes, "
                f"the plan says {step.nbytes}; please report this"
            )
        self.sent[step.kind, step.axes] += nbytes
        return self._call(made[0], sent)

    def all_reduce(self, buffers: Sequence[torch.Tensor], reduction: str, axes: Sequence[str]) -> Parts:
        """Reduce one buffer per device within the groups of these axes: a collective inside an op."""
        self.counts["all_reduce", tuple(axes)] += 1
        self.sent["all_reduce", tuple(axes)] += max(buffer.nbytes for buffer in buffers)
        return self._call(all_reduce_over(axes, reduction, self.mesh, 0), buffers)

    def _call(self, exchange: Exchange, buffers: Sequence[torch.Tensor]) -> Parts:
        """One functional collective on every device's buffer."""
        from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

        axes = exchange.group
        if axes not in self._groups:
            members = list(groups(axes, self.mesh)[0])
            self._groups[axes] = dist.new_group(members).group_name
        with LocalTensorMode(self.mesh.size):
            result: Any = exchange.call(LocalTensor(dict(enumerate(buffers))), self._groups[axes])
        return tuple(result._local_tensors[device] for device in range(self.mesh.size))


# Gradients in a simulated step, from where they are made to the parameters they step: accumulated, reduced, clipped, applied.

_AGREE = 1e-5
"""Largest relative difference between the norms that two devices find."""


class Gradients:
    """The gradients of one step of a plan, on all devices; ``tell`` hears of every tensor that a reshard makes, and what it is.

    Attributes:
        stepped: positions of the parameters that have an optimizer, with the reshards of their new values.
    """

    def __init__(self, plan: Plan, program: Program, world: World, tell: Callable[[Parts, str], Parts]) -> None:
        self.tell = tell
        self.plan, self.program, self.world, self.mesh = plan, program, world, plan.mesh
        self.stepped = {reshard.tensor: reshard for reshard in plan.reshards if reshard.purpose == "update"}
        self.found: dict[int, tuple[Parts, Layout]] = {}

    def reshard(self, reshard: Reshard, parts: Parts, layout: Layout) -> Parts:
        """Run the collectives of a reshard; those of gradients in the dtype that they are reduced in."""
        tensor = self.program.tensors[reshard.tensor]
        what = "copies"
        if reshard.purpose in ("accumulate", "optimizer"):
            dtype = DTYPES[self.plan.options.reduce_dtype or tensor.dtype]
            parts, what = self.tell(tuple(part.to(dtype) for part in parts), "gradients"), "gradients"
        for step in reshard.steps:
            if step.before != layout:
                raise InternalError(f"a reshard of {tensor.name!r} is {layout} where its next step starts from {step.before}")
            stages = self.world.stages(step, tensor.shape)
            for k, stage in enumerate(stages):
                last = step is reshard.steps[-1] and k == len(stages) - 1
                made = stage(parts)
                if reshard.purpose != "update":
                    self.tell(made, what if last else "intermediates")
                elif made[0].untyped_storage()._cdata != parts[0].untyped_storage()._cdata:  # what is stepped is there already
                    self.tell(made, "intermediates")  # the new values, too: the old ones take them over
                parts = made  # what a stage reads is there until its result is
                del made
            layout = step.after
        if layout != reshard.layout:
            raise InternalError(f"the reshard of {tensor.name!r} ends in {layout}, its readers get {reshard.layout}")
        return parts

    def add(self, reshard: Reshard, parts: Parts) -> None:
        """Take what a microbatch has made of a gradient, 1/N of it where there are N."""
        count, t = self.plan.options.microbatches, reshard.tensor
        parts = tuple(part / count for part in parts) if count > 1 else parts
        if t in self.found:
            parts = tuple(whole + part for whole, part in zip(self.found[t][0], parts, strict=True))
        self.found[t] = parts, reshard.layout

    def handed_over(self) -> dict[str, torch.Tensor]:
        """Reduce what is accumulated; the whole gradients by parameter name."""
        last = {reshard.tensor: reshard for reshard in self.plan.reshards if reshard.purpose == "optimizer"}
        for g in self.program.gradients.values():
            if g not in self.found or g not in last:
                raise InternalError(f"the plan brings {self.program.tensors[g].name!r} nowhere at the end of the step")
        if self.plan.options.microbatches > 1:
            self.found = {g: (self.reshard(reshard, *self.found[g]), reshard.layout) for g, reshard in last.items()}
        whole = {g: join(*self.found[g], self.program.tensors[g].shape, self.mesh) for g in self.program.gradients.values()}
        return {self.program.tensors[p].name: whole[g] for p, g in self.program.gradients.items()}

    def slices(self) -> dict[int, Parts]:
        """What each optimizer state reads, by parameter."""
        return {
            p: move(*self.found[self.program.gradients[p]], reshard.source, self.program.tensors[p].shape, self.mesh)
            for p, reshard in self.stepped.items()
        }

    def clip(self, slices: dict[int, Parts], max_norm: float) -> float:
        """Scale the slices in place of the gradients that they are, so that the norm of all is at most ``max_norm``; the norm before."""
        clip = self.plan.clip
        axes = () if clip is None else clip.axes
        summed = [self.mesh.index(name) for name in axes]
        totals: list[torch.Tensor] = []
        for device, at in enumerate(coordinates(self.mesh)):
            total = torch.zeros(1, dtype=torch.float32)
            for p, parts in slices.items():
                state = self.stepped[p].source
                if not any(at[a] for a in summed if not state[a].is_shard):  # what several devices of a group hold counts once
                    total += squares(parts[device])
            totals.append(total)
        if clip is not None:
            totals = list(self.world.all_reduce(totals, "sum", axes))
        norms = torch.cat(totals).sqrt()
        if norms.max() - norms.min() > _AGREE * norms.max():
            raise InternalError(f"devices find different gradient norms, {norms.min():g} to {norms.max():g}")
        for p, parts in slices.items():
            slices[p] = tuple(part * (max_norm / (norm + 1e-6)).clamp(max=1.0) for part, norm in zip(parts, norms, strict=True))
        return float(norms[0])

    def whole(self, slices: Mapping[int, Parts]) -> dict[str, torch.Tensor]:
        """Gradients by parameter name, put together from what the states read."""
        return {
            self.program.tensors[p].name: join(parts, self.stepped[p].source, self.program.tensors[p].shape, self.mesh)
            for p, parts in slices.items()
        }

    def updated(self, p: int, parameter: torch.Tensor, slices: Parts, rate: float) -> torch.Tensor:
        """The whole parameter after a gradient step on the shards of its state."""
        reshard = self.stepped[p]
        stepped = [part - rate * slope for part, slope in zip(split(parameter, reshard.source, self.mesh), slices, strict=True)]
        if self.plan.options.optimizer_state().master_bytes(self.program.tensors[p].dtype):
            self.tell(tuple(stepped), "intermediates")
        parts = self.reshard(reshard, tuple(stepped), reshard.source)
        return join(parts, self.plan.tensors[p].layout, tuple(parameter.shape), self.mesh)


# The bytes that one device really holds while a plan runs: storages, from when they are made until nothing refers to them.
#
# >>> measured = measure(plan, program, values)
# >>> measured.peak, measured.totals[measured.peak_time] == measured.peak
# (1163264, True)
#
# A meter counts the storages of device 0, which holds the fullest shard of everything. A storage is there until the last tensor
# that lies in it is gone, as a real allocator sees it: a tensor and its views count once. Nothing of the plan's own arithmetic of
# lives is used: what the simulation still refers to is there, and what it does not is gone.
#
# Counted are parameters, buffers, inputs, optimizer states and master weights, results of ops, copies, and what the steps of a transition
# make, with the buffers of their collectives; and what torch's own optimizer makes when it steps the shards of device 0. Not counted is
# what lives inside an op alone: the scratch of a kernel.

STATES = ("parameters", "optimizer", "gradients", "inputs")
"""Categories of what is there because of the model, not because of how the step runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes on device 0 over one step; time is the position of the running op, the update runs at the last time.

    Attributes:
        totals: the most bytes at any instant of each time.
        series: by category, the bytes at that instant; transitions' intermediates are a category of their own.
    """

    totals: tuple[int, ...]
    series: Mapping[str, tuple[int, ...]]

    @property
    def peak(self) -> int:
        """The most bytes at any instant."""
        return max(self.totals)

    @property
    def peak_time(self) -> int:
        """The first time at which that many are there."""
        return self.totals.index(self.peak)


def measure(plan: Plan, program: Program, values: Mapping[int, torch.Tensor]) -> Measured:
    """Run one step of a plan with all devices in this process and count the bytes of device 0.

    Args:
        program: the one that the plan was made for.
        values: whole tensors of the program's sources by position.

    Raises:
        InputError: the plan has several microbatches, or as ``simulate``.
        InternalError: as ``simulate``.
    """
    if plan.options.microbatches > 1:
        raise InputError(f"a step of {plan.options.microbatches} microbatches is not measured; plan one with a single microbatch")
    meter = Meter()
    simulate(plan, program, values, meter=meter)
    return meter.result()


class Meter:
    """Counts storages by category; ``simulate`` tells it of every tensor that it makes on device 0."""

    def __init__(self) -> None:
        self.live: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self.category: dict[int, str] = {}
        self.times: list[dict[str, int]] = []

    def tick(self) -> None:
        """The next time begins."""
        self.times.append(dict(self.live))

    def made(self, tensor: torch.Tensor, category: str) -> None:
        """A tensor is there; one in a storage that is known already adds nothing, but a gradient or copy gives it its category."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.category:
            self.live[category] += storage.nbytes()
            weakref.finalize(storage, functools.partial(self._gone, key, storage.nbytes()))
            self.category[key] = category
        elif self.category[key] in ("activations", "copies", "intermediates") and category in ("gradients", "copies"):
            self.live[self.category[key]] -= storage.nbytes()
            self.live[category] += storage.nbytes()
            self.category[key] = category
        if sum(self.live.values()) >= sum(self.times[-1].values()):
            self.times[-1] = dict(self.live)

    def step(self, options: Options, shards: Sequence[tuple[tuple[int, ...], str]]) -> None:
        """The optimizer steps: shape and dtype of each parameter's shard in its state's layout. Parameters and states are there already."""
        state = options.optimizer_state()
        dtypes = [DTYPES["f32" if state.master_bytes(dtype) else dtype] for _, dtype in shards]
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for (shape, _), dtype in zip(shards, dtypes, strict=True)]
        ways = WAYS.get(options.optimizer)
        with torch.enable_grad():
            optimizer = torch.optim.SGD(parameters) if ways is None else torch.optim.AdamW(parameters, **ways)
        gradients = [torch.zeros(shape, dtype=DTYPES[state.gradient_dtype(dtype)]) for shape, dtype in shards]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()  # its states come to be
        for parameter in parameters:
            parameter.grad = None
        with _Made(self, [*parameters, *gradients, *(x for kept in optimizer.state.values() for x in kept.values())]):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()

    def _gone(self, key: int, nbytes: int) -> None:
        self.live[self.category.pop(key)] -= nbytes

    def result(self) -> Measured:
        return Measured(
            totals=tuple(sum(row.values()) for row in self.times),
            series={category: tuple(row[category] for row in self.times) for category in self.live},
        )


class _Made(TorchDispatchMode):  # type: ignore[misc]  # torch is not checked
    """Tells a meter of every tensor that is made, in a storage that is not among those of the known ones."""

    def __init__(self, meter: Meter, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.meter, self.known = meter, {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for item in made if isinstance(made, tuple | list) else (made,):
            if isinstance(item, torch.Tensor) and item.untyped_storage()._cdata not in self.known:
                self.meter.made(item, "optimizer")
        return made
