"""Placements and layouts: what each mesh axis does to a tensor.

A placement is ``R`` (replicated), ``S(d)`` (dim ``d`` is cut), ``_S(d)`` (strided: cut after the others) or ``P(op)``
(every device holds a part of a pending reduction). It is an ``int`` underneath, so layouts hash fast and become numpy
arrays as they are. A layout is a tuple with one placement per mesh axis.

**Order.** Where several axes cut one dim they do it one after the other, major to minor: the axes with ``S(d)`` from left to
right, then those with ``_S(d)`` from left to right. So on ``dp,tp`` the layout ``S(0)S(0)`` has dp as the major axis, and
``_S(0)S(0)`` has tp, which is what fully sharded data parallel over tensor parallel makes. ``_S(d)`` is DTensor's
``_StridedShard``, whose split factor follows from the layout and the mesh. It needs an ``S(d)`` on an axis to its right;
elsewhere it would say what ``S(d)`` says.

**What only DTensor says.** Its strided shards carry their split factor (``_S(d,4)``), whatever the other axes do, and it has pending
reductions of its own kinds (``NamedPartial``). They are placements too, of no layout that is parsed, pinned or solved for: the search of
single ops and the walk through DTensor's choices have them, as tuples of placements (``Placements``).

>>> layout = Layout.parse("S(0),R")
>>> layout, layout.shards((32, 8)), layout.local_shape((64, 8), (32, 8))
(S(0)R, 32, (2, 8))
>>> layout.format((32, 8), "f32")
'f32[32, 8]| S(0)R'
>>> Layout.parse("_S(0)S(0)").order(0), Layout.parse("S(0)_S(0)S(0)").order(0)
((1, 0), (0, 2, 1))
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from solver_shard.errors import InputError

if TYPE_CHECKING:
    from solver_shard.mesh import Mesh


REDUCTIONS = ("sum", "avg", "max", "min")
_MAX_DIM = 63
STRIDED = _MAX_DIM + 1
"""The int code of ``_S(d)`` is this much more than that of ``S(d)``; with a split factor k, k times this more again."""


class Placement(int):
    """One placement as an int code: R is -1, S(d) is d, _S(d) is 64 + d, P(sum), P(avg), P(max), P(min) are -2 to -5."""

    __slots__ = ()

    @property
    def is_shard(self) -> bool:
        """Whether a dim is cut, by ``S`` or ``_S``."""
        return self >= 0

    @property
    def is_strided(self) -> bool:
        """Whether a dim is cut after the axes that have ``S`` there."""
        return self >= STRIDED

    @property
    def is_partial(self) -> bool:
        return self <= -2

    @property
    def is_replicate(self) -> bool:
        return self == -1

    @property
    def split(self) -> int:
        """The split factor that a strided shard carries by itself; 0 where it follows from the layout and the mesh."""
        return max(int(self) // STRIDED - 1, 0)

    @property
    def dim(self) -> int:
        """The tensor dim that is cut; only for ``S`` and ``_S``."""
        if not self.is_shard:
            raise ValueError(f"{self} cuts no dim")
        return int(self) % STRIDED

    @property
    def reduction(self) -> str:
        """sum, avg, max or min; only for ``P``."""
        if not self.is_partial:
            raise ValueError(f"{self} is not partial")
        return REDUCTIONS[-2 - int(self)]

    def __repr__(self) -> str:
        if self.is_shard:
            return f"{'_' * self.is_strided}S({self.dim}{f',{self.split}' if self.split else ''})"
        return "R" if self.is_replicate else f"P({self.reduction})"

    __str__ = __repr__


class NamedPartial(Placement):
    """A pending reduction of a kind that only DTensor has (the mask of an embedding, a norm); equal only to the same one.

    It costs what its ``reduction`` costs: a sum where that is none of ours.
    """

    def __new__(cls, name: str, reduction: str = "sum") -> NamedPartial:
        made = super().__new__(cls, -2 - len(REDUCTIONS))
        made.name = name
        made._reduction = reduction if reduction in REDUCTIONS else "sum"
        return made

    name: str
    _reduction: str

    @property
    def reduction(self) -> str:
        return self._reduction

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedPartial) and (self.name, self._reduction) == (other.name, other._reduction)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.name, self._reduction))

    def __repr__(self) -> str:
        return f"P({self.name})"

    __str__ = __repr__


Placements = tuple[Placement, ...]
"""One per mesh axis; a ``Layout``, or what DTensor says."""

R = Placement(-1)
_SHARDS = tuple(Placement(d) for d in range(_MAX_DIM + 1))
_STRIDED_SHARDS = tuple(Placement(STRIDED + d) for d in range(_MAX_DIM + 1))
_PARTIALS = {op: Placement(-2 - i) for i, op in enumerate(REDUCTIONS)}


def S(dim: int) -> Placement:  # noqa: N802 - the field's own notation
    """Dim ``dim`` is cut along the mesh axis."""
    if not 0 <= dim <= _MAX_DIM:
        raise InputError(f"S({dim}) is not a placement; dims go from 0 to {_MAX_DIM}")
    return _SHARDS[dim]


def strided(dim: int, split: int = 0) -> Placement:
    """``_S(dim)``: dim ``dim`` is cut along the mesh axis after the axes that have ``S(dim)``.

    With a ``split`` it is cut into so many pieces first, and each of these along the axis: DTensor's ``_StridedShard``.

    >>> Layout((strided(0), S(0))), strided(0, 4)
    (_S(0)S(0), _S(0,4))
    """
    if not 0 <= dim <= _MAX_DIM:
        raise InputError(f"_S({dim}) is not a placement; dims go from 0 to {_MAX_DIM}")
    return Placement(STRIDED * (1 + split) + dim) if split else _STRIDED_SHARDS[dim]


def P(reduction: str = "sum") -> Placement:  # noqa: N802 - the field's own notation
    """Each device along the mesh axis holds a part; the value is their ``reduction``."""
    if reduction not in _PARTIALS:
        raise InputError(f"P({reduction}) is not a placement; legal reductions: {', '.join(REDUCTIONS)}")
    return _PARTIALS[reduction]


_TOKEN = re.compile(r"\s*(?:R|(?P<late>_?)S\(\s*(?P<dim>[0-9]{1,3})\s*\)|P(?:\(\s*(?P<op>[a-z]+)\s*\))?)\s*(?:,|(?=[RSP_]|\Z))")
_HEADER = re.compile(r"\s*[a-z]+[0-9a-z_]*\[[0-9,\s]*\]\s*\|")


class Layout(tuple[Placement, ...]):
    """A placement for every mesh axis, outermost axis first."""

    __slots__ = ()

    @classmethod
    def replicated(cls, axes: int) -> Layout:
        return cls((R,) * axes)

    @classmethod
    def parse(cls, text: str, mesh: Mesh | None = None) -> Layout:
        """Read ``S(0)R``, ``S(0),R``, ``f32[8, 32]| S(0)R`` or, given a mesh, ``dp=S(0)`` (axes not named are R).

        Given a mesh, a placement of an axis that is split is one of each of its parts.

        Raises:
            InputError: not a layout, not one of this mesh, or a strided shard without a plain one to its right.
        """
        layout = cls._read(text, mesh)
        for axis, placement in enumerate(layout):
            if placement.is_strided and S(placement.dim) not in layout[axis + 1 :]:
                raise InputError(
                    f"layout {text!r}: {placement} says that axes to the right cut dim {placement.dim} first, but none has "
                    f"S({placement.dim}); write S({placement.dim}) here too, or give an axis to the right S({placement.dim})"
                )
        return layout

    @classmethod
    def _read(cls, text: str, mesh: Mesh | None) -> Layout:
        header = _HEADER.match(text)
        body = text[header.end() :] if header else text
        if "=" in body:
            if mesh is None:
                raise InputError(f"layout {text!r} names mesh axes, but no mesh was given; write one placement per axis, as in 'S(0),R'")
            placements = [R] * len(mesh.axes)
            for name, placement in parse_named(body, text):
                for axis in mesh.positions(name):
                    placements[axis] = placement
            return cls(placements)
        layout = cls(_placements(body, text))
        if mesh is not None and len(layout) == len(mesh.whole.axes):
            layout = cls(mesh.spread(layout))
        if mesh is not None and len(layout) != len(mesh.axes):
            raise InputError(f"layout {text!r} has {len(layout)} placements, mesh {mesh} has {len(mesh.axes)} axes; give one per axis")
        return layout

    def shards(self, mesh_shape: Sequence[int]) -> int:
        """Into how many distinct pieces the mesh cuts the tensor."""
        total = 1
        for placement, size in zip(self, mesh_shape, strict=True):
            if placement >= 0:
                total *= size
        return total

    def order(self, dim: int) -> tuple[int, ...]:
        """The axes that cut a dim, major to minor."""
        plain, late = S(dim), strided(dim)
        return (*(a for a, p in enumerate(self) if p == plain), *(a for a, p in enumerate(self) if p == late))

    def local_shape(self, shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int] | None = None) -> tuple[int, ...]:
        """Shape on one device, by torch.chunk's rule axis after axis, major to minor; without a coordinate, the largest (device 0)."""
        return self._local(shape, mesh_shape, coordinate)[0]

    def local_offset(self, shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int]) -> tuple[int, ...]:
        """Where the device's shard starts in the global tensor, per dim."""
        return self._local(shape, mesh_shape, coordinate)[1]

    def _local(
        self, shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int] | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        local, offset = list(shape), [0] * len(shape)
        cuts = [(axis, placement, size) for axis, (placement, size) in enumerate(zip(self, mesh_shape, strict=True)) if placement >= 0]
        if any(placement >= STRIDED for _, placement, _ in cuts):
            cuts.sort(key=lambda cut: cut[1].is_strided)  # stable: from left to right otherwise
        for axis, placement, size in cuts:
            dim = placement % STRIDED
            rank = 0 if coordinate is None else coordinate[axis]
            chunk = -(-local[dim] // size)
            start = min(chunk * rank, local[dim])
            offset[dim] += start
            local[dim] = min(chunk, local[dim] - start)
        return tuple(local), tuple(offset)

    def format(self, shape: Sequence[int], dtype: str) -> str:
        """``f32[8, 32]| S(0)R``."""
        return f"{dtype}[{', '.join(map(str, shape))}]| {self}"

    def to_dtensor(self, mesh_shape: Sequence[int]) -> list[Any]:
        """torch.distributed.tensor placements, in axis order; the split factors of strided shards follow from the mesh.

        DTensor lays uneven strided shards out the same way, but where the last shard of a shorter piece is the longer one
        (16 rows, cut by 3 and then by 4).

        >>> Layout.parse("_S(0)S(0)").to_dtensor((2, 4))
        [_StridedShard(dim=0, sf=4), Shard(dim=0)]
        """
        from torch.distributed.tensor import Partial, Replicate, Shard
        from torch.distributed.tensor.placement_types import _StridedShard

        made: list[Any] = []
        for axis, placement in enumerate(self):
            if placement.is_strided:
                made.append(_StridedShard(placement.dim, split_factor=self._split_factor(axis, mesh_shape)))
            elif placement.is_shard:
                made.append(Shard(placement.dim))
            else:
                made.append(Replicate() if placement.is_replicate else Partial(placement.reduction))
        return made

    @classmethod
    def from_dtensor(cls, placements: Sequence[Any], mesh_shape: Sequence[int]) -> Layout:
        """The layout of DTensor placements on a mesh of this shape.

        Raises:
            InputError: a kind that a layout cannot say (masks), or a strided shard whose split factor is not the number of
                shards that the plain axes to its right make of its dim.
        """
        given = dtensor_placements(placements)
        made = cls(strided(p.dim) if p.is_strided else p for p in given)
        for axis, placement in enumerate(given):
            if isinstance(placement, NamedPartial):
                raise InputError(
                    f"DTensor placement {placements[axis]!r} cannot be said as a layout; "
                    f"legal: Replicate, Shard, _StridedShard, Partial of {', '.join(REDUCTIONS)}"
                )
            expected = made._split_factor(axis, mesh_shape) if placement.is_strided else 0
            if expected == 1 or (expected and placement.split != expected):
                raise InputError(
                    f"DTensor placement {placements[axis]!r} on axis {axis} of a mesh {tuple(mesh_shape)} cannot be said as a layout: "
                    f"the axes to its right with Shard({placement.dim}) make {expected} shards; legal: that number, more than 1, as split "
                    "factor"
                )
        return made

    def with_splits(self, mesh_shape: Sequence[int]) -> Placements:
        """The placements as DTensor says them: strided shards carry their split factors.

        >>> Layout.parse("_S(0)S(0)").with_splits((2, 4))
        (_S(0,4), S(0))
        """
        return tuple(strided(p.dim, self._split_factor(axis, mesh_shape)) if p.is_strided else p for axis, p in enumerate(self))

    def _split_factor(self, axis: int, mesh_shape: Sequence[int]) -> int:
        """Into how many shards the plain axes right of a strided one cut its dim."""
        plain = S(self[axis].dim)
        return math.prod(size for p, size in zip(self[axis + 1 :], mesh_shape[axis + 1 :], strict=True) if p == plain)

    def __repr__(self) -> str:
        return show(self)

    __str__ = __repr__


def show(placements: Sequence[Placement]) -> str:
    """``S(0)R``."""
    return "".join(map(str, placements))


def dtensor_placements(placements: Sequence[Any]) -> Placements:
    """DTensor's placements as they are, with the split factors of strided shards and partials of kinds of their own.

    Raises:
        InputError: an object that is no placement of DTensor's.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    said = []
    for placement in placements:
        if type(placement) is Replicate:
            said.append(R)
        elif type(placement) is Shard:
            said.append(S(placement.dim))
        elif type(placement) is _StridedShard:
            said.append(strided(placement.dim, placement.split_factor))
        elif type(placement) is Partial and placement.reduce_op in _PARTIALS:
            said.append(P(placement.reduce_op))
        elif isinstance(placement, Partial):
            said.append(NamedPartial(str(placement), placement.reduce_op))
        else:
            raise InputError(f"DTensor placement {placement!r} is of a kind that is not known here; legal: Replicate, Shard, Partial")
    return tuple(said)


def _placements(body: str, whole: str) -> list[Placement]:
    found, position = [], 0
    while position < len(body):
        token = _TOKEN.match(body, position)
        if token is None:
            raise InputError(
                f"cannot read layout {whole!r} at {body[position:].strip()!r}; write one of R, S(dim), _S(dim), P(sum|avg|max|min) "
                "per mesh axis, as in 'S(0),R'"
            )
        if token["dim"]:
            found.append((strided if token["late"] else S)(int(token["dim"])))
        else:
            found.append(P(token["op"] or "sum") if "P" in token[0] else R)
        position = token.end()
    return found


def parse_named(body: str, whole: str) -> list[tuple[str, Placement]]:
    """Read ``dp=S(0),tp=R`` as pairs, in the order written; a repeated axis is an error."""
    pairs: list[tuple[str, Placement]] = []
    for part in body.split(","):
        name, sign, value = part.partition("=")
        placements = _placements(value, whole) if sign else []
        if len(placements) != 1:
            raise InputError(f"cannot read layout {whole!r} at {part.strip()!r}; write AXIS=PLACEMENT pairs, as in 'dp=S(0),tp=R'")
        if name.strip() in dict(pairs):
            raise InputError(f"layout {whole!r} names axis {name.strip()!r} twice; give each axis one placement")
        pairs.append((name.strip(), placements[0]))
    return pairs
