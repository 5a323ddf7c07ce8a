"""Sharding annotations: meshes, axes and their parts, dim and tensor shardings, their laws and their text.

>>> mesh = MeshSpec(axes=(("a", 2), ("b", 8)))
>>> cut = DimSharding((AxisRef("a", 1, 2), AxisRef("b", 1, 2)))
>>> sharding = TensorSharding(mesh="mesh", dims=(cut, DimSharding(open=True)), replicated=(AxisRef("b", 2, 4),))
>>> print(format_sharding(sharding, {"mesh": mesh}))
#sdy.sharding<@mesh, [{"a", "b":(1)2}, {?}], replicated={"b":(2)4}>
>>> prefix_without_overlap(AxisRef("a", 1, 8), AxisRef("a", 4, 2))
AxisRef(name='a', pre=1, size=4)

A dim is cut by axes, major to minor. ``?`` leaves it open: propagation may cut it further. ``p1`` is a priority.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from solver_shard.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """Named axes, outermost first, and an optional device order.

    Without axes and ids it is the empty mesh; without axes and with one id it is the maximal mesh, one device alone.

    Raises:
        InputError: an axis twice or without devices, ids that are not those of the axes in some order.
    """

    axes: tuple[tuple[str, int], ...] = ()
    device_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        for name, size in self.axes:
            if size < 1:
                raise InputError(f"mesh axis {name!r} has size {size}; a size is at least 1")
            if names.count(name) > 1:
                raise InputError(f"mesh axis {name!r} is named twice; axes have different names")
        if self.device_ids:
            total = math.prod(size for _, size in self.axes)
            ids = sorted(self.device_ids)
            if ids != list(range(total)) if self.axes else len(ids) != 1 or ids[0] < 0:
                raise InputError(
                    f"device ids {list(self.device_ids)[:8]} do not fit mesh axes {dict(self.axes)}; "
                    + (f"give each of 0 to {total - 1} once" if self.axes else "a mesh without axes has at most one id, at least 0")
                )

    @property
    def is_empty(self) -> bool:
        """No axes and no ids."""
        return not self.axes and not self.device_ids

    @property
    def is_maximal(self) -> bool:
        """One device alone."""
        return not self.axes and bool(self.device_ids)

    def __str__(self) -> str:
        axes = ", ".join(f'"{name}"={size}' for name, size in self.axes)
        ids = f", device_ids={list(self.device_ids)}" if self.device_ids else ""
        return f"<[{axes}]{ids}>"


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


Meshes = Mapping[str, MeshSpec]


def mesh_of(sharding: TensorSharding, meshes: Meshes) -> MeshSpec:
    """The mesh of a sharding; InputError names those that exist."""
    if isinstance(sharding.mesh, MeshSpec):
        return sharding.mesh
    if sharding.mesh not in meshes:
        raise InputError(f"unknown mesh @{sharding.mesh}; the meshes are {', '.join('@' + name for name in meshes) or 'none'}")
    return meshes[sharding.mesh]


def check_sharding(sharding: TensorSharding, meshes: Meshes, rank: int | None, where: str) -> None:
    """Hold a sharding against its laws; ``where`` names the value in messages, ``rank`` is its number of dims (None: not a tensor).

    Raises:
        InputError: an unknown mesh or axis; a wrong number of dims; an axis used twice or two parts that overlap; a part that does not
            divide its axis; neighbouring parts that are one; replicated or unreduced axes out of mesh order; an empty closed dim with a
            priority; anything but the mesh on a maximal mesh.
    """
    try:
        mesh = mesh_of(sharding, meshes)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    aside = bool(sharding.replicated or sharding.unreduced)
    if mesh.is_maximal:
        if sharding.dims or aside:
            raise InputError(f"{where}: a sharding on a mesh of one device has no dims and no axes; write it as '<@mesh, []>'")
        return
    if rank is None:
        if sharding.dims or aside:
            raise InputError(f"{where}: only tensors can be sharded, and this value is none; drop its sharding")
        return
    if len(sharding.dims) != rank:
        raise InputError(f"{where}: the sharding has {len(sharding.dims)} dims, the tensor {rank}; give one entry per dim")
    sizes = dict(mesh.axes)
    lists = [dim.axes for dim in sharding.dims] + [sharding.replicated, sharding.unreduced]
    for axes in lists:
        for axis in axes:
            _check_axis(axis, sizes, where)
        for left, right in itertools.pairwise(axes):
            if left.name == right.name and left.pre * left.size == right.pre:
                both = f"{_axis(left, sizes)} and {_axis(right, sizes)}"
                raise InputError(f"{where}: {both} lie side by side; write them as one axis")
    _check_overlaps([axis for axes in lists for axis in axes], sizes, where)
    names = list(sizes)
    for kind, axes in (("replicated", sharding.replicated), ("unreduced", sharding.unreduced)):
        keys = [(names.index(axis.name), axis.pre) for axis in axes]
        if keys != sorted(keys):
            raise InputError(f"{where}: {kind} axes are not in the order of the mesh, which is {', '.join(names)}; sort them")
    for position, dim in enumerate(sharding.dims):
        if dim.priority is not None and not dim.axes and not dim.open:
            raise InputError(f"{where}: dim {position} is empty and closed but has a priority; drop the priority, or open the dim with '?'")


def _check_axis(axis: AxisRef, sizes: Mapping[str, int], where: str) -> None:
    if axis.name not in sizes:
        raise InputError(f"{where}: unknown axis {axis.name!r}; the mesh has {', '.join(sizes) or 'no axes'}")
    whole = sizes[axis.name]
    if (axis.pre, axis.size) != (1, whole) and (axis.pre < 1 or axis.size < 2 or whole % (axis.pre * axis.size)):
        raise InputError(
            f"{where}: {_axis(axis, sizes)} is no part of axis {axis.name!r} of size {whole}; "
            f"a part (PRE)SIZE has SIZE at least 2, and PRE x SIZE divides {whole}"
        )


def _check_overlaps(axes: Sequence[AxisRef], sizes: Mapping[str, int], where: str) -> None:
    for i, a in enumerate(axes):
        for b in axes[:i]:
            if a.name == b.name and (a == b or (a.pre < b.pre * b.size and b.pre < a.pre * a.size)):
                what = f"{_axis(a, sizes)} is used twice" if a == b else f"{_axis(b, sizes)} and {_axis(a, sizes)} overlap"
                raise InputError(f"{where}: {what}; every axis, or part of one, can be used once in a sharding")


def format_sharding(sharding: TensorSharding, meshes: Meshes, *, prefix: bool = True) -> str:
    """The text of a sharding; without ``prefix`` as it stands inside ``sharding_per_value``."""
    mesh = mesh_of(sharding, meshes)
    sizes = dict(mesh.axes)
    dims = []
    for dim in sharding.dims:
        held = [*(_axis(axis, sizes) for axis in dim.axes), *(["?"] if dim.open else [])]
        dims.append("{" + ", ".join(held) + "}" + ("" if dim.priority is None else f"p{dim.priority}"))
    text = f"<{f'@{sharding.mesh}' if isinstance(sharding.mesh, str) else f'mesh{sharding.mesh}'}, [{', '.join(dims)}]"
    if sharding.replicated:
        text += f", replicated={{{', '.join(_axis(axis, sizes) for axis in sharding.replicated)}}}"
    if sharding.unreduced:
        kind = "" if sharding.reduction == "sum" else sharding.reduction
        text += f", unreduced={kind}{{{', '.join(_axis(axis, sizes) for axis in sharding.unreduced)}}}"
    return f"{'#sdy.sharding' if prefix else ''}{text}>"


def _axis(axis: AxisRef, sizes: Mapping[str, int]) -> str:
    return f'"{axis.name}"' if axis.pre == 1 and axis.size == sizes.get(axis.name) else f'"{axis.name}":({axis.pre}){axis.size}'


# Algebra of axis references: an axis covers the half-open range from ``pre`` to ``pre * size`` on a multiplicative scale.


def contains(outer: AxisRef, inner: AxisRef) -> bool:
    """Whether ``inner`` is ``outer`` or a part of it."""
    return outer[0] == inner[0] and outer[1] <= inner[1] and outer[1] * outer[2] >= inner[1] * inner[2]


def is_prefix(a: AxisRef, b: AxisRef) -> bool:
    """Whether ``a`` is ``b`` or its major part."""
    return a[0] == b[0] and a[1] == b[1] and a[2] <= b[2]


def can_coexist(a: AxisRef, b: AxisRef) -> bool:
    """Whether some factorization of the axis has both as products of neighbouring parts."""
    if a[0] != b[0]:
        return True
    start, end, other_start, other_end = a[1], a[1] * a[2], b[1], b[1] * b[2]
    low, high = min(start, other_start), max(start, other_start)
    near, far = min(end, other_end), max(end, other_end)
    if high < near:
        return near % high == 0 and high % low == 0 and far % near == 0
    return high % near == 0


def prefix_without_overlap(axis: AxisRef, other: AxisRef) -> AxisRef | None:
    """The largest major part of ``axis`` that does not overlap with ``other``; None if there is none or they cannot coexist."""
    if axis[0] != other[0]:
        return axis
    if axis == other:  # of an axis of size 1 the range is empty, yet it overlaps itself
        return None
    if not can_coexist(axis, other):
        return None
    if not (axis[1] < other[1] * other[2] and other[1] < axis[1] * axis[2]):
        return axis
    return None if axis[1] >= other[1] else AxisRef(axis[0], axis[1], other[1] // axis[1])


def prefix_without_overlaps(axis: AxisRef, others: Iterable[AxisRef]) -> AxisRef | None:
    """``prefix_without_overlap`` with one after the other."""
    for other in others:
        if axis[0] == other[0]:
            left = prefix_without_overlap(axis, other)
            if left is None:
                return None
            axis = left
    return axis


def is_strict_list_prefix(first: Sequence[AxisRef], second: Sequence[AxisRef]) -> bool:
    """Whether ``second`` begins with ``first``, whose last axis may be a major part of its counterpart, and is longer."""
    if not first:
        return bool(second)
    if len(first) > len(second):
        return False
    last = len(first) - 1
    if any(first[i] != second[i] for i in range(last)):
        return False
    if len(first) == len(second) and first[last] == second[last]:
        return False
    return is_prefix(first[last], second[last])


def append_merged(axes: list[AxisRef], axis: AxisRef) -> None:
    """Append, or lengthen the last axis where the two are neighbouring parts of one axis."""
    if axes:
        last = axes[-1]
        if last[0] == axis[0] and last[1] * last[2] == axis[1] and last[2] > 1 and axis[2] > 1:
            axes[-1] = AxisRef(last[0], last[1], last[2] * axis[2])
            return
    axes.append(axis)
