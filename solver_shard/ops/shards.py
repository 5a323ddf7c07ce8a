"""A tensor as all devices of a mesh hold it: one local part per device, in device order.

>>> mesh, full = Mesh.parse("2"), torch.arange(5)
>>> parts = split(full, Layout.parse("S(0)"), mesh)
>>> [part.tolist() for part in parts], join(parts, Layout.parse("S(0)"), full.shape, mesh).tolist()
([[0, 1, 2], [3, 4]], [0, 1, 2, 3, 4])

What a device holds of a cut tensor is a *box*: an offset and a length per dim, by torch.chunk's rule axis after axis, so
the last boxes may be shorter, or empty.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from solver_shard.costs.layouts import free_move
from solver_shard.errors import InternalError
from solver_shard.layout import Layout, P
from solver_shard.mesh import Mesh

Shape = tuple[int, ...]
Parts = tuple[torch.Tensor, ...]
"""Local tensors by device number."""


@dataclass(frozen=True, slots=True)
class Box:
    """The part [start, start + length) of a tensor, per dim."""

    start: Shape
    length: Shape

    def overlap(self, other: Box) -> Box:
        """What both hold; lengths are 0 where they do not meet."""
        start = tuple(map(max, self.start, other.start))
        stop = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.length, other.start, other.length, strict=True)]
        return Box(start, tuple(max(0, e - s) for s, e in zip(start, stop, strict=True)))

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """Where it lies in a local tensor that holds ``outer``."""
        return tuple(slice(s - o, s - o + n) for s, n, o in zip(self.start, self.length, outer.start, strict=True))

    @property
    def empty(self) -> bool:
        return 0 in self.length


@functools.lru_cache(maxsize=65536)
def boxes(layout: Layout, shape: Shape, mesh: Mesh) -> tuple[Box, ...]:
    """What every device holds of a tensor of this global shape."""
    return tuple(Box(layout.local_offset(shape, mesh.shape, at), layout.local_shape(shape, mesh.shape, at)) for at in coordinates(mesh))


@functools.lru_cache(maxsize=64)
def coordinates(mesh: Mesh) -> tuple[Shape, ...]:
    """Coordinates of every device."""
    return tuple(mesh.coordinates())


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as its elements are read, where it was only noted that they are to be conjugated or negated."""
    return tensor.detach().resolve_conj().resolve_neg()


def split(full: torch.Tensor, layout: Layout, mesh: Mesh) -> Parts:
    """Distribute a whole tensor; nothing may be partial."""
    return tuple(shard(full, layout, mesh, device) for device in range(mesh.size))


def shard(full: torch.Tensor, layout: Layout, mesh: Mesh, device: int) -> torch.Tensor:
    """What one device has of a whole tensor; nothing may be partial."""
    if any(placement.is_partial for placement in layout):
        raise InternalError(f"a whole tensor cannot be distributed as {layout}")
    box = boxes(layout, tuple(full.shape), mesh)[device]
    return full[box.inside(Box((0,) * full.ndim, tuple(full.shape)))].contiguous()


def join(parts: Parts, layout: Layout, shape: Sequence[int], mesh: Mesh, *, exact: bool = True) -> torch.Tensor:
    """The whole tensor, pending reductions done.

    Args:
        exact: devices that should hold the same must hold exactly the same, else InternalError.
    """
    held = boxes(layout, tuple(shape), mesh)
    pending = [axis for axis, placement in enumerate(layout) if placement.is_partial]
    terms: dict[Shape, torch.Tensor] = {}
    first: dict[tuple[Shape, Box], int] = {}
    for device, at in enumerate(coordinates(mesh)):
        term, part, box = tuple(at[axis] for axis in pending), parts[device], held[device]
        if tuple(part.shape) != box.length:
            raise InternalError(
                f"device {device} holds {tuple(part.shape)} of a tensor {tuple(shape)} in layout {layout}, it should be {box.length}"
            )
        twin = first.setdefault((term, box), device)
        if twin == device:
            whole = terms.setdefault(term, part.new_empty(tuple(shape)))
            whole[box.inside(Box((0,) * len(box.start), tuple(shape)))] = part
        elif exact and not _same(part, parts[twin]):
            raise InternalError(f"devices {twin} and {device} should hold the same of a tensor in layout {layout}, but differ")
    for axis in reversed(pending):  # the last axis of the remaining key is reduced first
        groups: dict[Shape, list[torch.Tensor]] = {}
        for term, value in terms.items():
            groups.setdefault(term[:-1], []).append(value)
        terms = {term: reduce(values, layout[axis].reduction) for term, values in groups.items()}
    return terms[()]


def reduce(values: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """The sum, average, maximum or minimum of tensors of one shape."""
    stacked = torch.stack(list(values))
    if reduction in ("sum", "avg"):
        total = stacked.sum(0, dtype=stacked.dtype)
        return total if reduction == "sum" else total / len(values)
    return stacked.amax(0) if reduction == "max" else stacked.amin(0)


@functools.lru_cache(maxsize=65536)
def local_move(
    before: Layout, after: Layout, shape: Shape, mesh: Mesh, device: int, *, own: bool = True
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What changes the layout on one device without communication; None where it keeps its local tensor as it is.

    R → S(d) takes a slice, in a storage of its ``own`` or as a view; R → P(sum) keeps the value at coordinate 0, R → P(avg | max | min)
    everywhere.

    Raises:
        InternalError: some device would need what another holds.
    """
    if before == after:
        return None
    if not free_move(before, after):
        raise InternalError(f"{before} cannot become {after} without communication")
    at, held, wanted = coordinates(mesh)[device], boxes(before, shape, mesh)[device], boxes(after, shape, mesh)[device]
    place = wanted.inside(held)
    if held.overlap(wanted) != wanted and not wanted.empty:
        raise InternalError(f"device {device} would have to take {wanted} from {held}: {before} → {after} is not local")
    if any(at[axis] for axis, (a, b) in enumerate(zip(before, after, strict=True)) if a != b and b == P("sum")):
        return lambda part: torch.zeros_like(part[place])
    if wanted == held:
        return None
    return (lambda part: part[place].clone()) if own else (lambda part: part[place])


def groups(axes: Sequence[int], mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Devices that talk to each other in a collective over these axes, flattened from left (major) to right."""
    return tuple(_groups(tuple(axes), mesh).values())


def group_of(axes: Sequence[int], mesh: Mesh, device: int) -> tuple[int, ...]:
    """The group of one device among ``groups``, itself included."""
    at = coordinates(mesh)[device]
    return _groups(tuple(axes), mesh)[tuple(at[axis] for axis in range(len(mesh.axes)) if axis not in axes)]


@functools.lru_cache(maxsize=1024)
def _groups(axes: tuple[int, ...], mesh: Mesh) -> dict[Shape, tuple[int, ...]]:
    """Groups by their coordinates on the other axes."""
    others = [axis for axis in range(len(mesh.axes)) if axis not in axes]
    found: dict[Shape, list[int]] = {}
    for device, at in enumerate(coordinates(mesh)):
        found.setdefault(tuple(at[axis] for axis in others), []).append(device)
    return {at: tuple(members) for at, members in found.items()}


def covers(target: Box, found: Sequence[Box]) -> bool:
    """Whether disjoint pieces make up the whole box."""
    count = sum(_volume(piece) for piece in found)
    apart = all(a.overlap(b).empty for a, b in itertools.combinations([p for p in found if not p.empty], 2))
    return count == _volume(target) and apart


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
    return bool(same)


def _volume(box: Box) -> int:
    total = 1
    for length in box.length:
        total *= length
    return total
