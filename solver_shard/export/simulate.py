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

Random ops are not seeded per shard, so that a step with dropout is only reproduced at probability 0. Ops without operands
(arange, full, ...) are computed whole and then cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from solver_shard.errors import InputError, InternalError
from solver_shard.export.collectives import World
from solver_shard.export.gradients import Gradients
from solver_shard.export.implementations import FREE, Part, free, perform, way_of
from solver_shard.export.interpret import DTYPES, call
from solver_shard.export.shards import Parts, boxes, groups, join, move, split
from solver_shard.layout import Layout
from solver_shard.plan.plan import Plan
from solver_shard.program import Op, Program, Role

Values = Mapping[int, torch.Tensor]
"""Whole tensors by position in the program."""

_STORED = {Role.PARAMETER: "parameters", Role.BUFFER: "parameters", Role.INPUT: "inputs"}
_IDENTITY = {"sum": 0.0, "avg": 0.0, "max": float("-inf"), "min": float("inf")}


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
        return _Simulation(plan, program, world, tolerance, absolute, meter).run(batches, references, rate, max_norm)


class MeterLike(Protocol):
    """What wants to know when tensors come to be; see ``solver_shard.export.measure``."""

    def tick(self) -> None:
        """The next op begins, or the update."""

    def made(self, tensor: torch.Tensor, category: str) -> None:
        """A tensor is there on device 0."""


class _Simulation:
    def __init__(
        self, plan: Plan, program: Program, world: World, tolerance: float, absolute: float, meter: MeterLike | None = None
    ) -> None:
        self.plan, self.program, self.world, self.meter = plan, program, world, meter
        self.tolerance, self.absolute = tolerance, absolute
        self.mesh = plan.mesh
        self.of_reader: dict[tuple[int, int], int] = {}
        self.starting: dict[int, int] = {}  # tensor: how many reshards start from its producer's bytes
        self.starting_kept: dict[int, int] = {}  # the same for kept copies
        self.last: dict[int, int] = {}
        self.reduction: dict[int, int] = {}
        leaving = "accumulate" if plan.options.microbatches > 1 else "optimizer"
        self.sums = Gradients(plan, program, world, self._tell)
        self.keeps = {hold.reshard: hold.tensor for hold in plan.holds if hold.reshard is not None}
        copied = set(self.keeps.values())
        for position, reshard in enumerate(plan.reshards):
            if reshard.purpose == "update" or (reshard.purpose == "optimizer" and leaving != "optimizer"):
                continue
            if reshard.purpose == leaving:
                self.reduction[reshard.tensor] = position
            later = reshard.purpose in ("backward", "output") and reshard.tensor in copied
            starting = self.starting_kept if later else self.starting
            starting[reshard.tensor] = starting.get(reshard.tensor, 0) + 1
            for reader in reshard.readers:
                self.of_reader[reader] = position
                self.last[position] = max(self.last.get(position, 0), reader[0])

    def run(self, batches: Sequence[Values], references: Sequence[Values], rate: float, max_norm: float) -> SimulationResult:
        outputs: list[torch.Tensor] = []
        for values, reference in zip(batches, references, strict=True):
            outputs += self._microbatch(values, reference)
        gradients = self.sums.handed_over()
        parameters, norm = {}, None
        if self.sums.stepped:
            slices = self.sums.slices()
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
        self.reference = reference
        self.waiting, self.waiting_kept = dict(self.starting), dict(self.starting_kept)  # how many are left
        self.produced: dict[int, tuple[Parts, Layout]] = {}
        self.kept: dict[int, tuple[Parts, Layout]] = {}
        self.held: dict[int, Parts] = {}
        self._tick()
        self.stay = [self._source(t, values[t]) for t in self.program.sources()]
        for i in range(len(self.program.ops)):
            if i:
                self._tick()
            self._op(i)
        self._tick()
        made: dict[int, torch.Tensor] = {}
        for position, reshard in enumerate(self.plan.reshards):
            if reshard.purpose == "output":
                t = reshard.tensor
                made[t] = join(self._read(position), reshard.layout, self.program.tensors[t].shape, self.mesh)
        for t in self.program.outputs:
            if t not in made:
                raise InternalError(f"the plan brings {self.program.tensors[t].name!r} nowhere at the end of the step")
        return [made[t] for t in self.program.outputs]

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
        self.produced[t] = parts, planned.layout
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

    def _read(self, position: int) -> Parts:
        """The buffer of a group of readers; the first of them brings it about."""
        if position not in self.held:
            reshard = self.plan.reshards[position]
            t = reshard.tensor
            later = reshard.purpose in ("backward", "output") and t in self.waiting_kept
            origin, waiting = (self.kept, self.waiting_kept) if later else (self.produced, self.waiting)
            if t not in origin:
                raise InternalError(f"nothing is left of {self.program.tensors[t].name!r} for its {reshard.purpose} readers")
            self.held[position] = self.sums.reshard(reshard, *origin[t])
            if position in self.keeps:
                self.kept[t] = self.held[position], reshard.layout
            waiting[t] -= 1
            if not waiting[t]:
                del origin[t]
        return self.held[position]

    def _op(self, i: int) -> None:
        op, planned = self.program.ops[i], self.plan.ops[i]
        operands = []
        for j, t in enumerate(op.operands):
            position = self.of_reader.get((i, j))
            if position is None:
                operands.append(self._unread(t, planned.operand_layouts[j]))
                continue
            parts = self._read(position)
            operands.append(
                move(parts, self.plan.reshards[position].layout, planned.operand_layouts[j], self.program.tensors[t].shape, self.mesh)
            )
        results = self._call(i, op, operands)
        for j, t in enumerate(op.results):
            layout = planned.result_layouts[j]
            self._tell(results[j], "gradients" if self.program.tensors[t].role is Role.GRADIENT else "activations")
            if t in self.reference and self.waiting.get(t):
                self._compare(i, t, results[j], layout)
            if self.waiting.get(t):
                self.produced[t] = results[j], layout
            if t in self.reduction:  # a gradient is reduced, or added up, as soon as it is made
                self._read(self.reduction[t])
                self.sums.add(self.plan.reshards[self.reduction[t]], self.held.pop(self.reduction[t]))
        for position in {self.of_reader.get((i, j)) for j in range(len(op.operands))}:
            if position is not None and self.last[position] == i:
                del self.held[position]

    def _unread(self, t: int, layout: Layout) -> Parts:
        """What stands for an operand that no group of readers serves: its local shapes, filled with what spoils whatever reads it."""
        tensor, dtype = self.program.tensors[t], DTYPES[self.program.tensors[t].dtype]
        fill = float("nan") if dtype.is_floating_point or dtype.is_complex else dtype != torch.bool and torch.iinfo(dtype).min
        return tuple(torch.full(box.length, fill, dtype=dtype) for box in boxes(layout, tensor.shape, self.mesh))

    def _call(self, i: int, op: Op, operands: list[Parts]) -> list[Parts]:
        """Results of an op, by result and device."""
        layouts = self.plan.ops[i].result_layouts
        shapes = [self.program.tensors[t].shape for t in op.results]
        if not operands:
            whole = call(op, [], tuple(shapes))
            return [self._cut(value, layout) for value, layout in zip(whole, layouts, strict=True)]
        if self.plan.ops[i].implementation:
            return self._implementation(i, op, operands)
        wanted = [boxes(layout, shape, self.mesh) for layout, shape in zip(layouts, shapes, strict=True)]
        by_device: list[tuple[torch.Tensor, ...]] = []
        for device in range(self.mesh.size):
            local = [parts[device] for parts in operands]
            lengths = tuple(box[device].length for box in wanted)
            read = [j for j in range(len(local)) if (i, j) in self.of_reader]
            idle = any(local[j].numel() == 0 and self.program.tensors[op.operands[j]].numel for j in read)
            try:
                by_device.append(self._idle(i, lengths) if idle else call(op, local, lengths))
            except InternalError as error:
                raise InternalError(f"{self._where(i)}, on device {device}: {error}") from None
        return [tuple(made[j] for made in by_device) for j in range(len(op.results))]

    def _implementation(self, i: int, op: Op, operands: list[Parts]) -> list[Parts]:
        """Results of an op that runs a named implementation, by result and device."""
        planned, tensors = self.plan.ops[i], self.program.tensors
        way = way_of(planned.implementation, op)
        operand, dim = way.cut(op, [len(tensors[t].shape) for t in op.operands], len(tensors[op.results[0]].shape))
        t = op.results[0] if operand is None else op.operands[operand]
        layout = planned.result_layouts[0] if operand is None else planned.operand_layouts[operand]
        held, size = boxes(layout, tensors[t].shape, self.mesh), tensors[t].shape[dim]
        wanted = [boxes(layout, tensors[t].shape, self.mesh) for t, layout in zip(op.results, planned.result_layouts, strict=True)]
        pending = list(planned.collectives)

        axes = [axis for axis, name in enumerate(planned.strategy) if name == planned.implementation]

        def all_reduce(reduction: str, buffers: Sequence[torch.Tensor]) -> Parts:
            if reduction in FREE:
                return tuple(free(reduction, buffers, groups(axes, self.mesh)))
            if not pending or pending[0].kind != "all_reduce" or pending[0].nbytes != max(buffer.nbytes for buffer in buffers):
                raise InternalError(
                    f"{self._where(i)}: an all-reduce of {buffers[0].nbytes} bytes is not what the plan lists, {pending[:1]}"
                )
            return self.world.all_reduce(buffers, reduction, pending.pop(0).axes)

        made = perform(
            planned.implementation,
            op,
            [[parts[device] for parts in operands] for device in range(self.mesh.size)],
            [Part(start=box.start[dim], length=box.length[dim], size=size) for box in held],
            [[box[device].length for box in wanted] for device in range(self.mesh.size)],
            [DTYPES[tensors[t].dtype] for t in op.results],
            all_reduce,
        )
        if pending:
            raise InternalError(f"{self._where(i)}: the plan lists collectives that do not run, {pending}")
        return [tuple(_whole_storage(results[j]) for results in made) for j in range(len(op.results))]

    def _idle(self, i: int, lengths: tuple[tuple[int, ...], ...]) -> tuple[torch.Tensor, ...]:
        """What a device without a share of the work returns: nothing, or what changes nothing in the pending reduction."""
        op, made = self.program.ops[i], []
        for t, layout, length in zip(op.results, self.plan.ops[i].result_layouts, lengths, strict=True):
            fills = {_IDENTITY[placement.reduction] for placement in layout if placement.is_partial}
            if 0 not in length and len(fills) != 1 and self.waiting.get(t):
                raise InternalError(f"there is nothing to read, but {length} of a result in layout {layout} must be made")
            fill = fills.pop() if fills else 0.0
            made.append(torch.full(length, fill, dtype=DTYPES[self.program.tensors[t].dtype]))
        return tuple(made)

    def _compare(self, i: int, t: int, parts: Parts, layout: Layout) -> None:
        expected, tensor = self.reference[t], self.program.tensors[t]
        found = join(parts, layout, tensor.shape, self.mesh)
        if torch.equal(found, expected):
            return
        problem = "other numbers"
        if expected.is_floating_point():
            finite = expected[expected.isfinite()]
            scale = finite.abs().max().item() if finite.numel() else 0.0
            if torch.allclose(found, expected, rtol=0, atol=max(self.absolute, self.tolerance * scale), equal_nan=True):
                return
            problem = f"difference {(found - expected).abs().nan_to_num().max().item():g}, largest value {scale:g}"
        raise InternalError(
            f"{self._where(i)}, does not make {tensor.name!r}, {layout.format(tensor.shape, tensor.dtype)}, "
            f"as the unsharded step does: {problem}"
        )

    def _where(self, i: int) -> str:
        op = self.program.ops[i]
        return f"op {i} ({op.name}, {op.module or 'model'}), with strategies {', '.join(self.plan.ops[i].strategy)}"


def _whole_storage(part: torch.Tensor) -> torch.Tensor:
    """What an implementation cuts from its scratch does not keep the scratch."""
    return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part
