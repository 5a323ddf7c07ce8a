"""A device mesh: named axes with sizes, the rightmost axis innermost (neighbouring devices, fastest links).

>>> mesh = Mesh.parse("dp=32,tp=8")
>>> mesh.size, mesh.names, str(mesh)
(256, ('dp', 'tp'), 'dp=32,tp=8')
>>> Mesh.parse("8").names
('d0',)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from solver_shard.errors import InputError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
MAX_DEVICES = 1_000_000
MAX_AXES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One mesh axis: ``size`` groups along ``name``."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Named axes, outermost first. Device ``i`` has coordinates in row-major order over the axes."""

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        names = self.names
        if not names:
            raise InputError("a mesh needs at least one axis; write it as 'dp=32,tp=8' or '8'")
        if len(names) > MAX_AXES:
            raise InputError(f"a mesh of {len(names)} axes was asked; at most {MAX_AXES} are supported")
        for axis in self.axes:
            if not _NAME.match(axis.name):
                raise InputError(f"mesh axis name {axis.name!r} is not legal; use letters, digits and '_', not starting with a digit")
            if isinstance(axis.size, bool) or not isinstance(axis.size, int) or axis.size < 1:
                raise InputError(f"mesh axis {axis.name!r} has size {axis.size!r}; a size is a whole number of at least 1")
        if len(set(names)) != len(names):
            raise InputError(f"mesh axis names must differ, got {', '.join(names)}; rename one of the repeated axes")
        if self.size > MAX_DEVICES:
            raise InputError(f"mesh {self} has {self.size} devices; at most {MAX_DEVICES} are supported")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read ``dp=32,tp=8`` (outermost first); bare sizes, as in ``8`` or ``4,2``, are named d0, d1, ..."""
        axes = []
        for index, part in enumerate(text.split(",")):
            name, sign, size = part.strip().rpartition("=")
            if not re.fullmatch(r"[0-9]{1,9}", size.strip()) or (sign and not name.strip()):
                raise InputError(f"cannot read mesh {text!r} at {part.strip()!r}; write NAME=SIZE, outermost first: 'dp=32,tp=8' or '8'")
            axes.append(Axis(name=name.strip() or f"d{index}", size=int(size)))
        return cls(axes=tuple(axes))

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
        return ",".join(f"{axis.name}={axis.size}" for axis in self.axes)
