"""One op as one device runs it: a function of local tensors, prepared once.

>>> run = localise(plan, program, instruction, device=0)
>>> run(x, weight)
(tensor(...),)

What a device does with its operands is known beforehand: free moves into the layouts that the op reads, sizes of its shard in place of
traced ones, its part of what an implementation cuts, the values of a factory that lie in its shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from solver_shard.errors import InternalError
from solver_shard.export.bound import bind
from solver_shard.export.implementations import Part, Running, way_of
from solver_shard.export.interpret import DTYPES, arguments_of, call
from solver_shard.export.random import Key, draw, drawn_box, drawn_whole, kept, refuse_cut, shape_of
from solver_shard.export.schedule import Run
from solver_shard.export.shards import Box, Shape, boxes, local_move
from solver_shard.layout import Layout
from solver_shard.plan.plan import Plan
from solver_shard.program import Program, Role

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
            asks for reductions on its way (see :mod:`solver_shard.export.implementations`).
        single: whether ``run`` returns the one result itself, not a tuple.
        finish: where ``run`` starts an implementation: from what it returns to the results, in the shapes and dtypes of the plan.
        axes: the mesh axes whose devices share the implementation's cut.
        number: of a random op, whose ``run`` takes the key of its draws first (see :mod:`solver_shard.export.random`).
    """

    reads: tuple[int, ...]
    run: Callable[..., Any]
    single: bool = False
    finish: Callable[[Results], Results] | None = None
    axes: tuple[int, ...] = ()
    number: int | None = None

    def started(self, key: Callable[[int], Key], *operands: torch.Tensor) -> Any:
        """``run``; ``key`` gives the key of a random op's number."""
        return self.run(*operands) if self.number is None else self.run(key(self.number), *operands)

    def results(self, key: Callable[[int], Key], *operands: torch.Tensor) -> Results:
        """``started``, with the results in a tuple."""
        made = self.started(key, *operands)
        return (made,) if self.single else tuple(made)


def localise(plan: Plan, program: Program, instruction: Run, device: int, number: int | None = None, place: torch.device = _CPU) -> LocalOp:
    """Prepare an op for a device.

    Args:
        number: of a random op, among those of the program.
        place: where tensors are made.

    Raises:
        InputError: a random op that must be drawn whole is cut, or an op cannot be executed here.
        InternalError: the plan cannot be executed there.
    """
    return _Device(plan, program, instruction, device, number, place).op()


def where(plan: Plan, program: Program, i: int) -> str:
    """An op, for a person to find."""
    op = program.ops[i]
    return f"op {i} ({op.name}, {op.module or 'model'}), with strategies {', '.join(plan.ops[i].strategy)}"


class _Device:
    def __init__(self, plan: Plan, program: Program, instruction: Run, device: int, number: int | None, place: torch.device) -> None:
        self.number, self.place = number, place
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
        bound = bind(op, shapes, self.lengths)
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
            items.append((reads.index(j), local_move(before, planned.operand_layouts[j], shape, self.mesh, self.device)))
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
            return lambda *local: start(arguments_of(op, local))
        drawn, shape = self._drawn(), shape_of(self.program, self.instruction.op)

        def keyed(key: Key, *local: torch.Tensor) -> Running | Results:
            a = arguments_of(op, local)
            return start(a | {"keep": kept(a, key=key, box=drawn, shape=shape)})

        return keyed

    def _finished(self, results: Results) -> Results:
        """The results of an implementation in their dtypes (kernels differ in that of statistics), without its scratch."""
        found = [tuple(result.shape) for result in results]
        if found != list(self.lengths):
            raise InternalError(f"{self.planned.implementation!r} gave results of shapes {found}, expected {list(self.lengths)}")
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
