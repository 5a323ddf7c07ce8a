"""What a move costs: with our costs in nanoseconds, or with DTensor's own formulas in microseconds.

A move changes one input along one axis (``MovePricing.move``); a path takes an input from one layout to another as the executor of
that cost model would (``MovePricing.path``). Both refuse what cannot be done: S → P, and P to another reduction.

>>> from solver_shard.expander.call import Operand
>>> mesh = Mesh.parse("dp=2,tp=4")
>>> x = Operand.parse("f32[1024, 1024]| S(0)S(0)", mesh)
>>> dtensor = DTensorPricing(DTensorCosts(mesh_shape=mesh.shape, devices_per_host=4), mesh)
>>> for move in dtensor.path(0, x, x.layout, Operand.parse("f32[8]| RS(0)", mesh).layout):
...     print(move)
all_gather tp: S(0)S(0) -> S(0)R, 2.00 MiB, 25.1 µs
all_gather dp: S(0)R -> RR, 4.00 MiB, 110.5 µs
slice tp: RR -> RS(0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from solver_shard.costs.collectives import Collectives
from solver_shard.costs.dtensor import GIB, DTensorCosts
from solver_shard.costs.layouts import is_legal
from solver_shard.costs.transitions import FORBIDDEN, TransitionTable, build_table
from solver_shard.expander.call import Operand
from solver_shard.layout import Layout, P, Placement, Placements, R, show, strided
from solver_shard.mesh import Mesh
from solver_shard.text import format_bytes, format_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandMove:
    """One collective on one input, or a free local step.

    Attributes:
        operand: which input.
        kind: all_gather, reduce_scatter, all_reduce, all_to_all; slice (R → S) and partial (R → P) are local.
        axes: positions of the mesh axes, as one group; ``names`` what they are called.
        before, after: layouts of the input around the move.
        nbytes: what one device calls the collective with (see ``costs.collectives``); 0 for local steps.
        cost: in ``unit``.
    """

    operand: int
    kind: str
    axes: tuple[int, ...]
    names: tuple[str, ...]
    before: Placements
    after: Placements
    nbytes: int
    cost: float
    unit: str

    def __str__(self) -> str:
        text = f"{self.kind} {','.join(self.names)}: {show(self.before)} -> {show(self.after)}"
        price = format_ns(round(self.cost)) if self.unit == "ns" else f"{self.cost:.4g} {self.unit}"
        return f"{text}, {format_bytes(self.nbytes)}, {price}" if self.nbytes or self.cost else text


class MovePricing(Protocol):
    """A cost model for single moves and whole paths."""

    @property
    def unit(self) -> str:
        """``ns`` or ``µs``."""

    def cost(self, operand: Operand, layout: Placements, axis: int, after: Placement) -> float:
        """Of changing one axis; infinite when impossible."""

    def least(self, operand: Operand, axis: int, before: Placement, after: Placement) -> float:
        """What that change costs at least, whatever the other axes do."""

    def move(self, number: int, operand: Operand, layout: Placements, axis: int, after: Placement) -> OperandMove:
        """That change, in full."""

    def path(self, number: int, operand: Operand, src: Placements, dst: Placements) -> tuple[OperandMove, ...] | None:
        """How the input gets from one layout to another; None when it cannot."""


def impossible(before: Placement, after: Placement) -> bool:
    """Whether no collective takes one placement to the other: nothing but R becomes partial."""
    return after.is_partial and before != after and not before.is_replicate


def kind_of_move(before: Placement, after: Placement) -> str:
    """The collective that changes a placement."""
    if before.is_replicate:
        return "slice" if after.is_shard else "partial"
    if before.is_partial:
        return "all_reduce" if after.is_replicate else "reduce_scatter"
    return "all_gather" if after.is_replicate else "all_to_all"


def step_bytes(operand: Operand, layout: Placements, axis: int, after: Placement, mesh_shape: Sequence[int]) -> int:
    """Bytes that one device calls the collective with, padded as torch pads uneven shards; 0 for local steps."""
    before = layout[axis]
    kind = kind_of_move(before, after)
    if kind in ("slice", "partial"):
        return 0
    held = local_sizes(operand, layout, mesh_shape)
    numel = math.prod(held)
    if kind == "all_gather":
        numel *= mesh_shape[axis]
    elif after.is_shard:
        then = local_sizes(operand, (*layout[:axis], after, *layout[axis + 1 :]), mesh_shape)
        numel = mesh_shape[axis] * (numel // max(held[after.dim], 1)) * then[after.dim]
    return numel * operand.itemsize


def local_sizes(operand: Operand, layout: Placements, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Sizes of the largest shard."""
    sizes = list(operand.sizes)
    for kind, parts in zip(layout, mesh_shape, strict=True):
        if kind.is_shard:
            sizes[kind.dim] = -(-sizes[kind.dim] // parts)
    return tuple(sizes)


class DTensorPricing:
    """DTensor's formulas; paths are those of its greedy planner."""

    unit = "µs"

    def __init__(self, costs: DTensorCosts, mesh: Mesh | None = None) -> None:
        self.costs = costs
        self._names = mesh.names if mesh is not None else Mesh.parse(",".join(map(str, costs.mesh_shape))).names

    def cost(self, operand: Operand, layout: Placements, axis: int, after: Placement) -> float:
        """Microseconds of one step."""
        gib = self.costs.local_gib(operand.sizes, operand.itemsize, layout)
        return self.costs.transition(layout[axis], after, axis, gib)[0]

    def least(self, operand: Operand, axis: int, before: Placement, after: Placement) -> float:
        """Microseconds with every other axis cutting the tensor; a little less, for rounding."""
        shape = self.costs.mesh_shape
        parts = math.prod(n for a, n in enumerate(shape) if a != axis or before.is_shard)
        gib = math.prod(operand.sizes) * operand.itemsize / parts / GIB
        return self.costs.transition(before, after, axis, gib)[0] * (1 - 1e-12)

    def move(self, number: int, operand: Operand, layout: Placements, axis: int, after: Placement) -> OperandMove:
        return self._move(number, operand, layout, axis, after, self.cost(operand, layout, axis, after))

    def _move(self, number: int, operand: Operand, layout: Placements, axis: int, after: Placement, cost: float) -> OperandMove:
        return OperandMove(
            operand=number,
            kind=kind_of_move(layout[axis], after),
            axes=(axis,),
            names=(self._names[axis],),
            before=layout,
            after=(*layout[:axis], after, *layout[axis + 1 :]),
            nbytes=step_bytes(operand, layout, axis, after, self.costs.mesh_shape),
            cost=cost,
            unit=self.unit,
        )

    def path(self, number: int, operand: Operand, src: Placements, dst: Placements) -> tuple[OperandMove, ...] | None:
        now, found = src, []
        for step, cost in self.costs.priced_path(operand.sizes, operand.itemsize, src, dst):
            if math.isinf(cost) or impossible(step.before, step.after):
                return None
            found.append(self._move(number, operand, now, step.axis, step.after, cost))
            now = found[-1].after
        return tuple(found)


class ClusterPricing:
    """Our costs of collectives on a cluster; paths are the shortest ones, over collectives on any set of axes."""

    unit = "ns"

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self._tables: dict[tuple[tuple[int, ...], int, tuple[str, ...], bool], TransitionTable] = {}

    def cost(self, operand: Operand, layout: Placements, axis: int, after: Placement) -> float:
        """Whole nanoseconds of one step."""
        before = layout[axis]
        if before == after:
            return 0.0
        if impossible(before, after):
            return math.inf
        nbytes = step_bytes(operand, layout, axis, after, self.collectives.mesh.shape)
        kind = kind_of_move(before, after)
        return float(self.collectives.nanoseconds(kind, (axis,), nbytes)) if nbytes else 0.0

    def least(self, operand: Operand, axis: int, before: Placement, after: Placement) -> float:
        """Whole nanoseconds with every other axis cutting the tensor; padding can only make buffers larger."""
        if before == after or before.is_replicate:
            return 0.0
        if impossible(before, after):
            return math.inf
        shape = self.collectives.mesh.shape
        nbytes = math.prod(operand.sizes) * operand.itemsize
        parts = math.prod(n for a, n in enumerate(shape) if a != axis or (before.is_shard and not after.is_replicate))
        return float(self.collectives.nanoseconds(kind_of_move(before, after), (axis,), nbytes // parts))

    def move(self, number: int, operand: Operand, layout: Placements, axis: int, after: Placement) -> OperandMove:
        mesh = self.collectives.mesh
        return OperandMove(
            operand=number,
            kind=kind_of_move(layout[axis], after),
            axes=(axis,),
            names=(mesh.names[axis],),
            before=layout,
            after=(*layout[:axis], after, *layout[axis + 1 :]),
            nbytes=step_bytes(operand, layout, axis, after, mesh.shape),
            cost=self.cost(operand, layout, axis, after),
            unit=self.unit,
        )

    def path(self, number: int, operand: Operand, src: Placements, dst: Placements) -> tuple[OperandMove, ...] | None:
        if src == dst:
            return ()
        mesh = self.collectives.mesh
        # what becomes partial does so at the end, for free
        stop = tuple(R if b.is_partial and a != b else b for a, b in zip(src, dst, strict=True))
        if any(impossible(a, b) for a, b in zip(src, dst, strict=True)):
            return None
        ends = [_layout(kinds, mesh.shape) for kinds in (src, stop)]
        orders = any(p.is_strided for end in ends if end is not None for p in end)
        start, goal = ends
        wholes = mesh.wholes if orders else None
        if start is None or goal is None or not all(is_legal(end, operand.sizes, mesh.shape, wholes) for end in (start, goal)):
            return None
        reductions = tuple(dict.fromkeys(p.reduction for end in (start, goal) for p in end if p.is_partial)) or ("sum",)
        key = (operand.sizes, operand.itemsize, reductions, orders)
        if key not in self._tables:
            self._tables[key] = build_table(operand.sizes, operand.itemsize, reductions, self.collectives, orders=orders)
        table = self._tables[key]
        if table.costs_between([start], [goal])[0, 0] >= FORBIDDEN:
            return None
        found, now = [], src
        for step in table.path(start, goal):
            after = tuple(
                k if b == a else n for k, a, b, n in zip(now, step.before, step.after, step.after.with_splits(mesh.shape), strict=True)
            )
            found.append(
                OperandMove(
                    operand=number,
                    kind=step.kind,
                    axes=step.axes,
                    names=tuple(mesh.names[a] for a in step.axes),
                    before=now,
                    after=after,
                    nbytes=step.nbytes,
                    cost=float(step.nanoseconds),
                    unit=self.unit,
                )
            )
            now = after
        for axis, kind in enumerate(dst):
            if now[axis] != kind:
                found.append(self.move(number, operand, now, axis, kind))
                now = found[-1].after
        return tuple(found)


def _layout(kinds: Placements, mesh_shape: Sequence[int]) -> Layout | None:
    """The layout that costs what these placements cost; None where split factors follow from no order of the axes."""
    layout = Layout(strided(p.dim) if p.is_strided else P(p.reduction) if p.is_partial else p for p in kinds)
    same = all(not p.is_strided or p == said for p, said in zip(kinds, layout.with_splits(mesh_shape), strict=True))
    return layout if same else None
