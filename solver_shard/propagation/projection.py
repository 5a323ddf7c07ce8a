"""Shardings of tensors as shardings of a rule's factors, and back.

The axes that cut a dim are handed to the dim's factors, major to minor, each factor taking what fits its size; an axis that
reaches over two factors is split. What a factor that is not the last cannot take (sizes without a common divisor) is kept as its
overflow, so that the dim can be put together again.

>>> rule = ShardingRule(sizes=(2, 4), operands=(((0, 1),),), results=(((0,), (1,)),))
>>> x = AxisRef("x", 1, 4)
>>> sharding = TensorSharding(mesh="mesh", dims=(DimSharding((x, AxisRef("y", 1, 2))),))
>>> found = project(sharding, rule.operands[0], rule.sizes)
>>> [found.factors[f].axes for f in (0, 1)]
[(AxisRef(name='x', pre=1, size=2),), (AxisRef(name='x', pre=2, size=2), AxisRef(name='y', pre=1, size=2))]
>>> unproject(found, rule.operands[0], rule.sizes, "mesh") == sharding
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from solver_shard.annotations import AxisRef, DimSharding, MeshSpec, TensorSharding
from solver_shard.propagation.axes import append_merged
from solver_shard.propagation.rule import FactorDims, ShardingRule  # noqa: F401 - the rule is for the example above


@dataclass(slots=True)
class FactorSharding:
    """How one tensor cuts one factor.

    Attributes:
        axes: major to minor.
        closed: no axes may be added.
        minor_most: the factor is the last of its dim, so that padding is allowed.
        overflow: axes of the dim that this factor could not take; the factors after it are then not to be cut.
    """

    axes: tuple[AxisRef, ...] = ()
    closed: bool = False
    minor_most: bool = False
    overflow: tuple[AxisRef, ...] = ()


@dataclass(slots=True)
class TensorFactors:
    """How one tensor cuts its factors; factors that a dim's overflow leaves unreachable are absent."""

    factors: dict[int, FactorSharding]
    replicated: tuple[AxisRef, ...] = ()
    unreduced: tuple[AxisRef, ...] = ()
    reduction: str = "sum"

    def shards(self) -> int:
        """Into how many parts the tensor is cut."""
        return math.prod(axis[2] for factor in self.factors.values() for axis in (*factor.axes, *factor.overflow))


def project(sharding: TensorSharding | None, dims: FactorDims, sizes: Sequence[int]) -> TensorFactors:
    """The factors of a tensor with these dims; a missing sharding is open and empty."""
    factors: dict[int, FactorSharding] = {}
    for position, held in enumerate(dims):
        dim = sharding.dims[position] if sharding else None
        _project_dim(factors, dim.axes if dim else (), not dim.open if dim else False, held, sizes)
    if sharding is None:
        return TensorFactors(factors)
    return TensorFactors(factors, sharding.replicated, sharding.unreduced, sharding.reduction)


def _project_dim(
    factors: dict[int, FactorSharding], axes: Sequence[AxisRef], closed: bool, held: Sequence[int], sizes: Sequence[int]
) -> None:
    queue = list(reversed(axes))
    for index, factor in enumerate(held):
        if index == len(held) - 1:
            rest: list[AxisRef] = []
            while queue:
                append_merged(rest, queue.pop())
            factors[factor] = FactorSharding(tuple(rest), closed, True)
            return
        left, taken = sizes[factor], list[AxisRef]()
        while queue:
            name, pre, size = queue[-1]
            piece = math.gcd(left, size)
            if size > 1 and piece == 1:
                break
            queue.pop()
            if piece < size:
                queue.append(AxisRef(name, pre * piece, size // piece))
            taken.append(AxisRef(name, pre, piece))
            left //= piece
        factors[factor] = FactorSharding(tuple(taken), closed, False)
        if left > 1 and queue:
            overflow: list[AxisRef] = []
            while queue:
                append_merged(overflow, queue.pop())
            factors[factor].overflow = tuple(overflow)
            factors[held[index + 1]] = FactorSharding((), True, index + 2 == len(held))
            return


def unproject(tensor: TensorFactors, dims: FactorDims, sizes: Sequence[int], mesh: str | MeshSpec) -> TensorSharding:
    """The sharding of a tensor whose factors are cut so; axes that would need a strided dim are left out."""
    made = []
    for held in dims:
        closed, axes = False, list[AxisRef]()
        for factor in held:
            sharding = tensor.factors[factor]
            closed = closed or sharding.closed
            _add(axes, sharding.axes)
            if sharding.overflow:
                _add(axes, sharding.overflow)
                break
            if math.prod(axis[2] for axis in sharding.axes) < sizes[factor]:
                break
        made.append(DimSharding(tuple(axes), not closed))
    return TensorSharding(mesh=mesh, dims=tuple(made), replicated=tensor.replicated, unreduced=tensor.unreduced, reduction=tensor.reduction)


def _add(axes: list[AxisRef], more: Sequence[AxisRef]) -> None:
    """Concatenate, merging at the seam only."""
    for index, axis in enumerate(more):
        if index == 0:
            append_merged(axes, axis)
        else:
            axes.append(axis)
