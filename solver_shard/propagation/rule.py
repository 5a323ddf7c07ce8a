"""An op's sharding rule in the reference's form."""

from __future__ import annotations

from dataclasses import dataclass

FactorDims = tuple[tuple[int, ...], ...]
"""Per tensor dim, its factors, major to minor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRule:
    """How the dims of an op's operands and results correspond.

    Attributes:
        sizes: of the factors.
        operands, results: per tensor and dim, the positions of its factors, major to minor; never empty for a dim.
        reduction, need_replication, permutation: types of factors, ascending; a factor is in one of them at most, the others pass
            through.
        blocked: factors along which nothing propagates, ascending.
        custom: given by the user; never dropped.
    """

    sizes: tuple[int, ...]
    operands: tuple[FactorDims, ...]
    results: tuple[FactorDims, ...]
    reduction: tuple[int, ...] = ()
    need_replication: tuple[int, ...] = ()
    permutation: tuple[int, ...] = ()
    blocked: tuple[int, ...] = ()
    custom: bool = False
