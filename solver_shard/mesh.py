"""A device mesh: named axes with sizes, the rightmost axis innermost (neighbouring devices, fastest links).

>>> mesh = Mesh.parse("dp=32,tp=8")
>>> mesh.size, mesh.names, str(mesh)
(256, ('dp', 'tp'), 'dp=32,tp=8')
>>> Mesh.parse("8").names
('d0',)

An axis can be split into sub-axes, so that a tensor dim is cut by a part of it (8 key-value heads on 16 devices). They lie
side by side, outermost first, and number the devices as the whole axis does; collectives over all of them are the whole
axis's.

>>> fine = mesh.split({"tp": (4, 2)})
>>> fine.names, str(fine), fine == Mesh.parse("dp=32,tp=4x2"), fine.whole == mesh
(('dp', 'tp.0', 'tp.1'), 'dp=32,tp=4x2', True, True)
>>> fine.positions("tp"), fine.splits
((1, 2), ('tp=8 as tp.0=4,tp.1=2',))
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from solver_shard.errors import InputError

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
MAX_DEVICES = 1_000_000
MAX_AXES = 6
"""Axes that are read; how many can be searched, the dims of the model's tensors say (``costs.transitions.MAX_LAYOUTS``)."""
MAX_AXIS_NAME = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One mesh axis: ``size`` groups along ``name``; ``parent`` is the axis of which it is a part, if any."""

    name: str
    size: int
    parent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Named axes, outermost first. Device ``i`` has coordinates in row-major order over the axes."""

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        names = self.names
        if not names:
            raise InputError("a mesh needs at least one axis; write it as 'dp=32,tp=8' or '8'")
        if len(names) > MAX_AXES:
            raise InputError(f"a mesh of {len(names)} axes was asked; at most {MAX_AXES} are read; give axes that lie side by side as one")
        for axis in self.axes:
            if len(axis.name) > MAX_AXIS_NAME:
                raise InputError(f"a mesh axis name of {len(axis.name):,} characters was given; at most {MAX_AXIS_NAME} are read")
            if not _NAME.match(axis.name if axis.parent is None else axis.parent):
                raise InputError(f"mesh axis name {axis.name!r} is not legal; use letters, digits and '_', not starting with a digit")
            if isinstance(axis.size, bool) or not isinstance(axis.size, int) or axis.size < 1:
                raise InputError(f"mesh axis {axis.name!r} has size {axis.size!r}; a size is a whole number of at least 1")
        if len(set(names)) != len(names):
            raise InputError(f"mesh axis names must differ, got {', '.join(names)}; rename one of the repeated axes")
        for parent in {axis.parent for axis in self.axes} - {None}:
            parts = [(i, axis.name) for i, axis in enumerate(self.axes) if axis.parent == parent]
            if [name for _, name in parts] != [f"{parent}.{k}" for k in range(len(parts))] or parts[-1][0] - parts[0][0] != len(parts) - 1:
                raise InputError(f"parts of mesh axis {parent!r} must lie side by side and be called {parent}.0, {parent}.1, ..., in order")
            if len(parts) < 2 or parent in names:
                raise InputError(f"mesh axis {parent!r} is split, so it needs at least two parts, and no other axis may have its name")
        if self.size > MAX_DEVICES:
            raise InputError(f"mesh {self} has {self.size} devices; at most {MAX_DEVICES} are supported")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read ``dp=32,tp=8`` (outermost first); bare sizes, as in ``8`` or ``4,2``, are named d0, d1, ...; ``tp=4x2`` is split."""
        axes: list[Axis] = []
        for index, part in enumerate(text.split(",")):
            name, sign, size = (piece.strip() for piece in part.rpartition("="))
            if not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9})*" if name else r"[0-9]{1,9}", size) or (sign and not name):
                raise InputError(f"cannot read mesh {text!r} at {part.strip()!r}; write NAME=SIZE, outermost first: 'dp=32,tp=8' or '8'")
            axes.extend(_parts(name or f"d{index}", tuple(map(int, size.split("x")))))
        return cls(axes=tuple(axes))

    def split(self, sizes: Mapping[str, Sequence[int]]) -> Mesh:
        """Split axes into sub-axes of these sizes, outermost first.

        Raises:
            InputError: no such axis, an axis that is split already, or sizes that do not multiply to the axis's.
        """
        for name, parts in sizes.items():
            axis = self.axes[self.index(name)]
            if axis.parent is not None:
                raise InputError(f"mesh axis {name!r} is a part of {axis.parent!r} already; split that one into more parts")
            whole = all(isinstance(n, int) and not isinstance(n, bool) and n > 1 for n in parts)
            if not whole or len(parts) < 2 or math.prod(parts) != axis.size:
                shown = "x".join(map(str, parts))
                raise InputError(
                    f"mesh axis {name}={axis.size} cannot be split as {shown}; give two or more sizes, each at least 2, whose product "
                    f"is {axis.size}" + (f", as in {name}={axis.size // 2}x2" if axis.size % 2 == 0 and axis.size > 3 else "")
                )
        return Mesh(axes=tuple(made for a in self.axes for made in (_parts(a.name, tuple(sizes[a.name])) if a.name in sizes else (a,))))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def wholes(self) -> tuple[str, ...]:
        """Per axis, the name of the axis that it is a part of, or its own."""
        return tuple(axis.parent or axis.name for axis in self.axes)

    @property
    def whole(self) -> Mesh:
        """The mesh with every split axis as one again."""
        return Mesh(axes=tuple(Axis(name=name, size=math.prod(self.shape[i] for i in at)) for name, at in self._families()))

    @property
    def splits(self) -> tuple[str, ...]:
        """What is split, for a person to read: ``tp=16 as tp.0=8,tp.1=2``."""
        found = []
        for name, at in self._families():
            if len(at) > 1:
                parts = ",".join(f"{self.axes[i].name}={self.axes[i].size}" for i in at)
                found.append(f"{name}={math.prod(self.shape[i] for i in at)} as {parts}")
        return tuple(found)

    @property
    def inner(self) -> frozenset[int]:
        """Positions of the sub-axes that have another part of their axis to the left."""
        return frozenset(i for _, at in self._families() for i in at[1:])

    def positions(self, name: str) -> tuple[int, ...]:
        """Position of the axis called ``name``, or of all parts of the one that is split."""
        for parent, at in self._families():
            if parent == name:
                return at
        return (self.index(name),)

    def joined(self, names: Sequence[str]) -> tuple[str, ...]:
        """Axis names for a person to read: all parts of a split axis are the axis.

        >>> Mesh.parse("dp=2,tp=4x2").joined(("dp", "tp.0", "tp.1"))
        ('dp', 'tp')
        """
        found = []
        for name, at in self._families():
            parts = [self.names[a] for a in at]
            found += [name] if set(parts) <= set(names) else [part for part in parts if part in names]
        return tuple(found)

    def spread(self, per_axis: Sequence[T]) -> tuple[T, ...]:
        """One item per axis of the whole mesh as one per axis of this mesh: every part gets its axis's."""
        return tuple(item for item, (_, at) in zip(per_axis, self._families(), strict=True) for _ in at)

    def _families(self) -> list[tuple[str, tuple[int, ...]]]:
        """Every axis of the whole mesh with the positions of its parts, or its own."""
        found: dict[str, list[int]] = {}
        for i, axis in enumerate(self.axes):
            found.setdefault(axis.parent or axis.name, []).append(i)
        return [(name, tuple(at)) for name, at in found.items()]

    def joins(self, names: Sequence[str], shape: Sequence[int]) -> bool:
        """Whether the axes of another mesh, neighbours taken as one where this mesh does, are these.

        >>> Mesh.parse("a=2,b_c=4").joins(("a", "b", "c"), (2, 2, 2))
        True
        """
        at = 0
        for axis in self.axes:
            stop = at + 1
            while stop < len(names) and "_".join(names[at:stop]) != axis.name:
                stop += 1
            if "_".join(names[at:stop]) != axis.name or math.prod(shape[at:stop]) != axis.size:
                return False
            at = stop
        return at == len(names)

    def index(self, name: str) -> int:
        """Position of the axis called ``name``; InputError names the legal ones."""
        if name not in self.names:
            raise InputError(f"unknown mesh axis {name!r}; this mesh has {', '.join(self.names)}")
        return self.names.index(name)

    def stride(self, axis: int) -> int:
        """Distance in device numbers between neighbours along ``axis``."""
        return math.prod(self.shape[axis + 1 :])

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Coordinates of every device, in device order."""
        for device in range(self.size):
            yield tuple((device // self.stride(a)) % size for a, size in enumerate(self.shape))

    def __str__(self) -> str:
        return ",".join(f"{name}={'x'.join(str(self.shape[i]) for i in at)}" for name, at in self._families())


def _parts(name: str, sizes: tuple[int, ...]) -> tuple[Axis, ...]:
    if len(sizes) == 1:
        return (Axis(name=name, size=sizes[0]),)
    return tuple(Axis(name=f"{name}.{k}", size=size, parent=name) for k, size in enumerate(sizes))


def parse_split(text: str) -> dict[str, tuple[int, ...]]:
    """Read ``tp=8x2``, or several with commas, as sizes for ``Mesh.split``.

    >>> parse_split("tp=8x2")
    {'tp': (8, 2)}
    """
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split(","):
        name, sign, sizes = (piece.strip() for piece in part.partition("="))
        if not sign or not name or name in found or not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9})+", sizes):
            raise InputError(f"cannot read split {text!r} at {part.strip()!r}; write AXIS=OUTERxINNER, each axis once, as in 'tp=8x2'")
        found[name] = tuple(map(int, sizes.split("x")))
    return found
