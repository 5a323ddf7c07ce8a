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

Random ops draw their part of what the unsharded op draws (:mod:`solver_shard.export.random`). Other ops without operands (arange,
full, ...) are computed whole and then cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from solver_shard.errors import InputError, InternalError
from solver_shard.export.collectives import World
from solver_shard.export.gradients import Gradients
from solver_shard.export.implementations import FREE, free, lockstep
from solver_shard.export.local import LocalOp, localise, where
from solver_shard.export.random import Key, key_of, numbers
from solver_shard.export.schedule import Bring, Run, schedule
from solver_shard.export.shards import Parts, boxes, groups, join, split
from solver_shard.layout import Layout
from solver_shard.plan.plan import Options, Plan
from solver_shard.program import Program, Role

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
    """What wants to know when tensors come to be; see ``solver_shard.export.measure``."""

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
