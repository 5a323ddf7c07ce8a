"""One op as one device runs it: a function of local tensors, prepared once.

>>> run = localise(plan, program, instruction, device=0)
>>> run(x, weight)
(tensor(...),)

What a device does with its operands is known beforehand: free moves into the layouts that the op reads, sizes of its shard in place of
traced ones, its part of what an implementation cuts, the values of a factory that lie in its shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from solver_shard.errors import InternalError
from solver_shard.export.implementations import Part, Running, way_of
from solver_shard.export.interpret import DTYPES, arguments_of, call
from solver_shard.export.schedule import Run
from solver_shard.export.shards import Box, Shape, boxes, local_move
from solver_shard.plan.plan import Plan
from solver_shard.program import Program

Results = tuple[torch.Tensor, ...]
Local = Callable[..., Results]
Started = Callable[..., Running | Results]

_IDENTITY = {"sum": 0.0, "avg": 0.0, "max": float("-inf"), "min": float("inf")}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOp:
    """One op on one device.

    Attributes:
        reads: per operand of the call, which of the op's operands it is; those of which only the shape is needed are left out.
        run: from these operands, as their reshards leave them, to the results; or to a running implementation, which asks for
            reductions on its way (see :mod:`solver_shard.export.implementations`).
        finish: where ``run`` starts an implementation: from what it returns to the results, in the shapes and dtypes of the plan.
        axes: the mesh axes whose devices share the implementation's cut.
    """

    reads: tuple[int, ...]
    run: Started
    finish: Callable[[Results], Results] | None = None
    axes: tuple[int, ...] = ()


def localise(plan: Plan, program: Program, instruction: Run, device: int) -> LocalOp:
    """Prepare an op for a device.

    Raises:
        InternalError: the plan cannot be executed there.
    """
    return _Device(plan, program, instruction, device).op()


def where(plan: Plan, program: Program, i: int) -> str:
    """An op, for a person to find."""
    op = program.ops[i]
    return f"op {i} ({op.name}, {op.module or 'model'}), with strategies {', '.join(plan.ops[i].strategy)}"


class _Device:
    def __init__(self, plan: Plan, program: Program, instruction: Run, device: int) -> None:
        self.plan, self.program, self.instruction, self.device, self.mesh = plan, program, instruction, device, plan.mesh
        self.op_, self.planned = program.ops[instruction.op], plan.ops[instruction.op]
        self.wanted = tuple(self._box(t, layout) for t, layout in zip(self.op_.results, self.planned.result_layouts, strict=True))
        self.dtypes = tuple(DTYPES[program.tensors[t].dtype] for t in self.op_.results)

    def _box(self, t: int, layout: object) -> Box:
        return boxes(layout, self.program.tensors[t].shape, self.mesh)[self.device]  # type: ignore[arg-type]

    @property
    def lengths(self) -> tuple[Shape, ...]:
        return tuple(box.length for box in self.wanted)

    def op(self) -> LocalOp:
        op, planned = self.op_, self.planned
        if not op.operands:
            return LocalOp(reads=(), run=self._factory())
        reads = tuple(j for j, position in enumerate(self.instruction.reshards) if position is not None)
        moves = []
        idle = False
        for j in reads:
            tensor = self.program.tensors[op.operands[j]]
            position = self.instruction.reshards[j]
            assert position is not None
            moves.append(local_move(self.plan.reshards[position].layout, planned.operand_layouts[j], tensor.shape, self.mesh, self.device))
            idle = idle or (bool(tensor.numel) and self._box(op.operands[j], planned.operand_layouts[j]).empty)
        if planned.implementation:
            run: Started = self._implementation()
        elif idle:
            run = self._idle()
        else:
            run = self._plain()
        unread = [j for j in range(len(op.operands)) if j not in reads]
        if unread:
            run = _completed(run, reads, {j: self._unread(j) for j in unread})
        if any(moved is not None for moved in moves):
            run = _after_moves(run, moves)
        if not planned.implementation:
            return LocalOp(reads=reads, run=run)
        axes = tuple(axis for axis, name in enumerate(planned.strategy) if name == planned.implementation)
        return LocalOp(reads=reads, run=run, finish=self._finished, axes=axes)

    def _plain(self) -> Started:
        op, lengths = self.op_, self.lengths
        return lambda *local: call(op, local, lengths)

    def _factory(self) -> Local:
        """Made whole, then cut."""
        op, wanted = self.op_, self.wanted
        shapes = tuple(self.program.tensors[t].shape for t in op.results)
        places = [box.inside(Box((0,) * len(shape), shape)) for box, shape in zip(wanted, shapes, strict=True)]
        whole = [box.length == shape for box, shape in zip(wanted, shapes, strict=True)]

        def run() -> Results:
            made = call(op, (), shapes)
            return tuple(value if all_ else value[at].clone() for value, at, all_ in zip(made, places, whole, strict=True))

        return run

    def _unread(self, j: int) -> torch.Tensor:
        """What stands for an operand that no group of readers serves: its local shape, without bytes, and values that spoil whatever
        reads them."""
        t = self.op_.operands[j]
        dtype = DTYPES[self.program.tensors[t].dtype]
        fill = float("nan") if dtype.is_floating_point or dtype.is_complex else dtype != torch.bool and torch.iinfo(dtype).min
        return torch.full((), fill, dtype=dtype).expand(self._box(t, self.planned.operand_layouts[j]).length)

    def _idle(self) -> Local:
        """What a device without a share of the work returns: nothing, or what changes nothing in the pending reduction."""
        fills: list[float] = []
        for layout, length, slot in zip(self.planned.result_layouts, self.lengths, self.instruction.results, strict=True):
            found = {_IDENTITY[placement.reduction] for placement in layout if placement.is_partial}
            if 0 not in length and len(found) != 1 and slot is not None:
                raise InternalError(f"there is nothing to read, but {length} of a result in layout {layout} must be made")
            fills.append(found.pop() if found else 0.0)
        made = list(zip(self.lengths, fills, self.dtypes, strict=True))
        return lambda *_: tuple(torch.full(length, fill, dtype=dtype) for length, fill, dtype in made)

    def _implementation(self) -> Started:
        op, tensors = self.op_, self.program.tensors
        way = way_of(self.planned.implementation, op)
        operand, dim = way.cut(op, [len(tensors[t].shape) for t in op.operands], len(tensors[op.results[0]].shape))
        t = op.results[0] if operand is None else op.operands[operand]
        layout = self.planned.result_layouts[0] if operand is None else self.planned.operand_layouts[operand]
        box = self._box(t, layout)
        part = Part(start=box.start[dim], length=box.length[dim], size=tensors[t].shape[dim])
        return lambda *local: way.run(op, arguments_of(op, local), part)

    def _finished(self, results: Results) -> Results:
        """The results of an implementation in their dtypes (kernels differ in that of statistics), without its scratch."""
        found = [tuple(result.shape) for result in results]
        if found != list(self.lengths):
            raise InternalError(f"{self.planned.implementation!r} gave results of shapes {found}, expected {list(self.lengths)}")
        return tuple(_whole_storage(result.to(dtype)) for result, dtype in zip(results, self.dtypes, strict=True))


def _completed(run: Started, reads: tuple[int, ...], others: dict[int, torch.Tensor]) -> Started:
    """With operands in place of which others stand."""
    order: list[int | torch.Tensor] = [0] * (len(reads) + len(others))
    for k, j in enumerate(reads):
        order[j] = k
    for j, value in others.items():
        order[j] = value
    return lambda *local: run(*(local[item] if isinstance(item, int) else item for item in order))


def _after_moves(run: Started, moves: list[Callable[[torch.Tensor], torch.Tensor] | None]) -> Started:
    return lambda *local: run(*(part if moved is None else moved(part) for part, moved in zip(local, moves, strict=True)))


def _whole_storage(part: torch.Tensor) -> torch.Tensor:
    """What an implementation cuts from its scratch does not keep the scratch."""
    return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part
