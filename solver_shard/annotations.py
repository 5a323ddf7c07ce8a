"""Sharding annotations: meshes, axes and their parts, dim and tensor shardings, and their text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """Named axes, outermost first, and an optional device order.

    Without axes and ids it is the empty mesh; without axes and with one id it is the maximal mesh, one device alone.
    """

    axes: tuple[tuple[str, int], ...] = ()
    device_ids: tuple[int, ...] = ()


class AxisRef(NamedTuple):
    """An axis or a part of one: axis ``name`` of size n seen as ``pre`` x ``size`` x n / (pre * size), of which the middle is meant.

    A whole axis is (name, 1, n).
    """

    name: str
    pre: int
    size: int


@dataclass(frozen=True, slots=True)
class DimSharding:
    """What cuts one dim: axes major to minor; an open dim (``?``) may be cut further; an optional priority."""

    axes: tuple[AxisRef, ...] = ()
    open: bool = False
    priority: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSharding:
    """A tensor's sharding over one mesh (a symbol's name, or a mesh written in place).

    ``replicated`` axes may not be used, ``unreduced`` ones hold partial results with the given reduction (sum, max, min).
    """

    mesh: str | MeshSpec
    dims: tuple[DimSharding, ...]
    replicated: tuple[AxisRef, ...] = ()
    unreduced: tuple[AxisRef, ...] = ()
    reduction: str = "sum"
