"""The two ways to settle what the factors of one op are cut by.

``basic``: factor after factor, all tensors of a factor get the same axes, and any objection stops everybody. ``aggressive``: every
tensor gets as much of the candidates as it can take; where factors compete for an axis, the one whose source is the largest wins.

Both change the projected tensors in place and return the positions of those that changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from solver_shard.annotations import AxisRef, MeshSpec
from solver_shard.propagation.axes import is_strict_list_prefix
from solver_shard.propagation.candidates import Axes, across, cut, major_axes, within
from solver_shard.propagation.graph import Direction
from solver_shard.propagation.projection import TensorFactors


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a strategy needs to know beside the tensors.

    Attributes:
        sizes: of the factors.
        operands: how many of the tensors are operands; the rest are results.
        directions: per factor, where its axes may flow.
        mesh: the mesh of all tensors.
        elementwise: whether the op is element-wise.
        conservative: never propagate a part of an axis.
    """

    sizes: tuple[int, ...]
    operands: int
    directions: tuple[Direction, ...]
    mesh: MeshSpec
    elementwise: bool = False
    conservative: bool = False

    def is_whole(self, axis: AxisRef) -> bool:
        """Whether this is an axis of the mesh, not a part of one."""
        return axis[1] == 1 and (axis[0], axis[2]) in self.mesh.axes


Strategy = Callable[[Sequence[TensorFactors], Setting], set[int]]


def basic(tensors: Sequence[TensorFactors], setting: Setting) -> set[int]:
    """All tensors of a factor get the same axes; any objection stops everybody."""
    changed: set[int] = set()
    order = _hash_order(len(setting.sizes))
    for factor, size in enumerate(setting.sizes):
        axes = major_axes(tensors, setting.operands, factor, setting.directions[factor])
        if not axes:
            continue

        def test(axis: AxisRef, before: int, factor: int = factor, size: int = size) -> AxisRef | None:
            left: AxisRef | None = axis
            for tensor in tensors:
                left = across(axis, tensor, factor, order)
                if left is not None and factor in tensor.factors:
                    left = within(left, tensor, factor, before, size)
                if left is None:
                    return None
                axis = left
            return axis

        axes = cut(axes, setting.conservative, setting.is_whole, test)
        for position, tensor in enumerate(tensors):
            if factor in tensor.factors and is_strict_list_prefix(tensor.factors[factor].axes, axes):
                tensor.factors[factor].axes = axes
                changed.add(position)
    return changed


def aggressive(tensors: Sequence[TensorFactors], setting: Setting) -> set[int]:
    """Every tensor gets as much as it can take; competing factors are ranked by their sources."""
    count = len(setting.sizes)
    candidates = [major_axes(tensors, setting.operands, f, setting.directions[f]) for f in range(count)]
    if not any(candidates):
        return set()
    changed: set[int] = set()
    order = _hash_order(count)
    ranked = _ranked(tensors, candidates, setting)
    results = range(setting.operands, len(tensors))
    for position in (*results, *range(setting.operands)):
        tensor = tensors[position]
        for factor in ranked:
            held = tensor.factors.get(factor)
            if held is None or not candidates[factor]:
                continue

            def inside(axis: AxisRef, before: int, tensor: TensorFactors = tensor, factor: int = factor) -> AxisRef | None:
                return within(axis, tensor, factor, before, setting.sizes[factor])

            def beside(axis: AxisRef, before: int, tensor: TensorFactors = tensor, factor: int = factor) -> AxisRef | None:
                return across(axis, tensor, factor, order)

            axes = cut(candidates[factor], setting.conservative, setting.is_whole, inside)
            if not is_strict_list_prefix(held.axes, axes):
                continue
            axes = cut(axes, setting.conservative, setting.is_whole, beside)
            if position < setting.operands and setting.elementwise:
                for result in results:
                    theirs = tensors[result].factors.get(factor)
                    if theirs is not None and is_strict_list_prefix(theirs.axes, axes):
                        axes = theirs.axes
            if is_strict_list_prefix(held.axes, axes):
                held.axes = axes
                changed.add(position)
    return changed


def _ranked(tensors: Sequence[TensorFactors], candidates: Sequence[Axes], setting: Setting) -> list[int]:
    """The factors in the order in which they may claim axes."""
    sizes = [math.prod(setting.sizes[f] for f in tensor.factors) for tensor in tensors]

    def key(factor: int) -> tuple[int, int, int, int]:
        source, largest = len(tensors), -1
        for position, tensor in enumerate(tensors):
            held = tensor.factors.get(factor)
            if held is not None and sizes[position] > largest and _begins_with(held.axes, candidates[factor]):
                source, largest = position, sizes[position]
        shards = math.prod(axis[2] for axis in candidates[factor]) if setting.elementwise else 0
        return (-largest, -shards, source, factor)

    return sorted(range(len(candidates)), key=key)


def _begins_with(axes: Axes, start: Axes) -> bool:
    return axes == start or is_strict_list_prefix(start, axes)


@lru_cache
def _hash_order(count: int) -> tuple[int, ...]:
    """The order in which the reference visits the factors of a tensor: that of its hash table.

    Where one axis has to make room for several others, the order can matter (sizes such as 12 or 24).
    """
    buckets = 64
    while buckets * 3 < count * 4:
        buckets *= 2
    return tuple(sorted(range(count), key=lambda factor: factor * 37 % buckets))
