"""One call of an op with the layouts that its tensors have now: what the expander works on.

>>> from solver_shard.mesh import Mesh
>>> mesh = Mesh.parse("dp=4,tp=2")
>>> call = PlacedCall(
...     op="aten.mm.default",
...     mesh=mesh,
...     operands=(Operand.parse("f32[512, 1024]| S(0)R", mesh), Operand.parse("f32[1024, 512]| RS(1)", mesh)),
...     results=(Meta(shape=(512, 512), dtype="f32"),),
...     attributes={"self": Ref(0), "mat2": Ref(1)},
... )
>>> call.layouts
((S(0), R), (R, S(1)))

Placements are those of :mod:`solver_shard.layout`, with those that only DTensor says.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from solver_shard.errors import InputError
from solver_shard.layout import Layout, Placements
from solver_shard.mesh import Mesh
from solver_shard.program import DTYPE_BYTES, Ref, refs


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """Global shape and dtype; a size that is not known before the step runs is None."""

    shape: tuple[int | None, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape with 1 for sizes that are not known: what it is priced with."""
        return tuple(1 if n is None else n for n in self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('?' if n is None else str(n) for n in self.shape)}]"


_TEXT = re.compile(r"\s*(?P<dtype>[a-z]+[0-9a-z_]*)\[(?P<shape>[0-9?,\s]*)\]\s*\|(?P<layout>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand(Meta):
    """A tensor that the op reads.

    Attributes:
        layout: its placement on every axis of its mesh.
        mesh: where it lives, if not on the op's mesh.
    """

    layout: Placements
    mesh: Mesh | None = None

    @classmethod
    def parse(cls, text: str, mesh: Mesh) -> Operand:
        """Read ``f32[512, 1024]| S(0)R`` (or ``| dp=S(0)``); ``?`` is a size that is not known.

        Raises:
            InputError: not of this form, or not a layout of the mesh and the shape.
        """
        found = _TEXT.match(text)
        if found is None or found["dtype"] not in DTYPE_BYTES:
            raise InputError(
                f"cannot read input {text!r}; write DTYPE[SIZES]| LAYOUT, as in 'f32[512,1024]| S(0)R'; dtypes: {', '.join(DTYPE_BYTES)}"
            )
        words = [word.strip() for word in found["shape"].split(",") if word.strip()]
        if not all(re.fullmatch(r"\?|[0-9]{1,18}", word) for word in words):
            raise InputError(f"cannot read the sizes of input {text!r}; write whole numbers, or ? for one that is not known")
        shape = tuple(None if word == "?" else int(word) for word in words)
        layout = Layout.parse(found["layout"], mesh)
        for placement in layout:
            if placement.is_shard and placement.dim >= len(shape):
                raise InputError(f"input {text!r} has {len(shape)} dims, {placement} cuts dim {placement.dim}; dims count from 0")
        return cls(shape=shape, dtype=found["dtype"], layout=layout.with_splits(mesh.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCall:
    """An op and its tensors.

    Attributes:
        op: ``aten.mm.default`` style overload name.
        operands: every tensor argument, in the order of the op's schema; those of a list one after the other.
        results: None where a result is masked off; a list op's results by return, then element.
        attributes: every argument by name in the order of the op's schema, tensors as ``Ref``, lists as tuples.
        keywords: operands that are passed by keyword.
        outs: operands that the results are written to (``out=``), in their order.
        in_place: the first operand is also the first result; by default what the op's name says (``aten.add_.Tensor``).
    """

    op: str
    mesh: Mesh
    operands: tuple[Operand, ...]
    results: tuple[Meta | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    keywords: tuple[int, ...] = ()
    outs: tuple[int, ...] = ()
    in_place: bool | None = None

    def __post_init__(self) -> None:
        if self.in_place is None:
            object.__setattr__(self, "in_place", base_name(self.op).endswith("_"))

    @property
    def layouts(self) -> tuple[Placements, ...]:
        return tuple(operand.layout for operand in self.operands)

    @property
    def lists(self) -> tuple[str, ...]:
        """Names of the arguments that are lists of tensors."""
        return tuple(name for name, value in self.attributes.items() if isinstance(value, tuple | list) and any(True for _ in refs(value)))

    @property
    def element_mesh(self) -> Mesh:
        """Where the op runs: the mesh of its first operand, which may be smaller than the step's."""
        first = self.operands[0].mesh if self.operands else None
        return first or self.mesh

    def key(self, static: Sequence[str] | None) -> Hashable:
        """What an expansion depends on, for caches; ``static`` names the plain arguments that count (None: all).

        Raises:
            TypeError: an argument that counts cannot be hashed.
        """
        held = self.attributes.items() if static is None else ((n, self.attributes.get(n)) for n in static)
        plain = tuple((name, _frozen(value)) for name, value in held)
        shape = tuple((name, _frozen(value)) for name, value in self.attributes.items() if any(True for _ in refs(value)))
        key = (self.op, self.mesh, self.operands, self.results, plain, shape, self.keywords, self.outs, self.in_place)
        hash(key)
        return key


def base_name(op: str) -> str:
    """``add_`` of ``aten.add_.Tensor``."""
    return op.split(".")[1] if "." in op else op


def _frozen(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_frozen, value))
    return (type(value).__name__, value)


_LIST_OPS = ("aten._foreach_", "aten._amp_foreach_", "aten._fused_")


def is_list_op(call: PlacedCall) -> bool:
    """Whether the call is expanded element by element: such a name, and lists of tensors (``_fused_rms_norm`` takes none)."""
    return call.op.startswith(_LIST_OPS) and bool(call.lists)


def elements(call: PlacedCall) -> tuple[PlacedCall, ...]:
    """The calls for each element of a list op: foreach ops become the op on one tensor, fused optimizers stay what they are.

    Raises:
        InputError: lists of different lengths.
    """
    counts = {name: len(call.attributes[name]) for name in call.lists if call.attributes[name]}
    first, count = next(iter(counts.items()))
    for name, given in counts.items():
        if given != count:
            raise InputError(
                f"{call.op}: argument {name!r} has {given} tensors, {first!r} has {count}; give lists with one tensor for every element"
            )
    op = element_op(call.op)
    made = []
    for k in range(count):
        used: list[int] = []
        attributes = {name: _pick(value[k] if name in counts else value, used) for name, value in call.attributes.items()}
        operands = tuple(call.operands[t] for t in used)
        results = tuple(call.results[k::count])
        if call.in_place and not results and op != call.op:
            results = (Meta(shape=operands[0].shape, dtype=operands[0].dtype),)
        made.append(
            replace(
                call,
                op=op,
                operands=operands,
                results=results,
                attributes=attributes,
                keywords=tuple(i for i, t in enumerate(used) if t in call.keywords),
            )
        )
    return tuple(made)


def _pick(value: Any, used: list[int]) -> Any:
    """The value with its operands renumbered in the order of their use."""
    if isinstance(value, Ref):
        used.append(value.operand)
        return Ref(len(used) - 1)
    if isinstance(value, tuple | list):
        return tuple(_pick(item, used) for item in value)
    return value


def element_op(op: str) -> str:
    """The op that a foreach op runs on each element: that of the same name whose schema has a tensor for every list.

    >>> element_op("aten._foreach_add_.List"), element_op("aten._foreach_mul.Scalar"), element_op("aten._fused_adam_.default")
    ('aten.add.Tensor', 'aten.mul.Scalar', 'aten._fused_adam_.default')
    """
    base = base_name(op)
    for prefix in ("_amp_foreach_", "_foreach_"):
        if base.startswith(prefix):
            import torch

            packet = getattr(torch.ops.aten, base.removeprefix(prefix).removesuffix("_"), None)
            schema = getattr(getattr(torch.ops.aten, base), op.split(".")[2])._schema
            found = (
                []
                if packet is None
                else [(rest, name) for name in packet.overloads() if (rest := _missing(packet, name, schema)) is not None]
            )
            if found:
                # the fewest defaulted arguments; among equals the first in the order of the packet
                return f"aten.{base.removeprefix(prefix).removesuffix('_')}.{min(found, key=lambda item: item[0])[1]}"
    return op


def _missing(packet: Any, name: str, foreach: Any) -> int | None:
    """How many arguments of an overload take their defaults for one element of a foreach op; None: it does not fit."""
    schema = getattr(packet, name)._schema
    ours = schema.arguments
    if "out" in name or schema.is_mutable or len(foreach.arguments) > len(ours):
        return None
    for mine, theirs in zip(ours, foreach.arguments, strict=False):
        wanted = re.sub(r"^List\[(.*)\]$", r"\1", str(theirs.type))
        if str(mine.type) != wanted or mine.kwarg_only != theirs.kwarg_only:
            return None
    rest = ours[len(foreach.arguments) :]
    return len(rest) if all(a.has_default_value() for a in rest) else None
