"""The frontend-neutral graph of a model: tensors and ops, forward or joint forward and backward.

A Program knows no mesh, no cost and no PyTorch. Ops are in an order in which they can be executed. An op is called by
the arguments in ``attributes``; where an argument is a tensor, a ``Ref`` stands for the operand with that position:

>>> op = Op(name="aten.add.Tensor", operands=(0, 1), results=(2,), attributes={"self": Ref(0), "other": Ref(1), "alpha": 1})
>>> op.attributes["other"].operand
1
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from solver_shard.errors import InternalError

DTYPE_BYTES: Mapping[str, int] = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2, "f8e4m3": 1, "f8e5m2": 1,
    "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u64": 8, "u32": 4, "u16": 2, "u8": 1, "bool": 1, "c64": 8, "c128": 16,
}  # fmt: skip
"""Bytes of one element, by the short dtype name that text forms use."""


class Role(enum.Enum):
    """What a tensor is to the person who wrote the model."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    OUTPUT = "output"


class Phase(enum.Enum):
    """The part of a training step in which an op runs."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Ref:
    """In an op's attributes: the operand at this position of ``Op.operands``."""

    operand: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One value of the program.

    Attributes:
        name: for parameters and buffers as in ``state_dict``; for inputs the argument's name; for a parameter's
            gradient ``grad(NAME)``; for outputs ``loss`` or ``output`` (``output.0``, ``output.name``, ...); unique.
        shape: global sizes.
        dtype: short name, a key of ``DTYPE_BYTES``.
        trainable: a parameter that the optimizer steps.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role = Role.ACTIVATION
    trainable: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One call.

    Attributes:
        name: ``aten.mm.default`` style overload name, or ``shard.*`` for the few that cleaning introduces.
        operands, results: positions in ``Program.tensors``; a tensor read twice may be one operand or two.
        attributes: every argument of the op's schema by name, defaults filled in; tensors as ``Ref``, lists as tuples.
        phase: forward or backward.
        module: path of the module that computed it (``model.layers.0.mlp``); backward ops carry their forward op's.
        raw: names of the nodes of the raw trace that this op stands for.
        recompute: a backward op that executes a forward op again (activation checkpointing), with its random draws; it stands
            for the same raw nodes.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    phase: Phase = Phase.FORWARD
    module: str = ""
    raw: tuple[str, ...] = ()
    recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Tensors and ops of one step.

    Attributes:
        name: what the user calls the model.
        tensors: all values; ops refer to them by position.
        ops: in executable order, forward before backward.
        outputs: positions of the tensors that the program returns (loss first where there is one), without gradients.
        gradients: parameter position to the position of its gradient tensor, for every trained parameter.
        ties: other names of tied parameters and buffers, to the name of the tensor that they are.
    """

    name: str
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    outputs: tuple[int, ...]
    gradients: Mapping[int, int] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict, compare=False)

    def producers(self) -> dict[int, tuple[int, int]]:
        """Tensor position to (op position, result index); sources are absent."""
        return {t: (i, j) for i, op in enumerate(self.ops) for j, t in enumerate(op.results)}

    def readers(self) -> dict[int, list[tuple[int, int]]]:
        """Tensor position to its (op position, operand index) uses, in program order."""
        uses: dict[int, list[tuple[int, int]]] = {}
        for i, op in enumerate(self.ops):
            for j, t in enumerate(op.operands):
                uses.setdefault(t, []).append((i, j))
        return uses

    def sources(self) -> Iterator[int]:
        """Positions of tensors that no op produces: parameters, buffers, inputs."""
        made = {t for op in self.ops for t in op.results}
        return (t for t in range(len(self.tensors)) if t not in made)

    def written(self, t: int) -> tuple[int, ...]:
        """The parameter or buffer that an output is the new value of; none for any other output."""
        name = self.tensors[t].name
        if not name.startswith("updated("):
            return ()
        wanted = name.removeprefix("updated(").removesuffix(")")
        return tuple(s for s in self.sources() if self.tensors[s].name == wanted and self.tensors[s].role is not Role.INPUT)

    def validate(self) -> None:
        """Check the graph's own laws; InternalError says which op or tensor breaks one."""
        names: set[str] = set()
        for tensor in self.tensors:
            if tensor.name in names:
                raise InternalError(f"program {self.name!r}: two tensors are named {tensor.name!r}")
            names.add(tensor.name)
            if tensor.dtype not in DTYPE_BYTES:
                raise InternalError(f"program {self.name!r}: tensor {tensor.name!r} has unknown dtype {tensor.dtype!r}")
            if any(size < 0 for size in tensor.shape):
                raise InternalError(f"program {self.name!r}: tensor {tensor.name!r} has a negative size in {tensor.shape}")
        made_by_op = {t for op in self.ops for t in op.results}
        ready = set(range(len(self.tensors))) - made_by_op
        for t in ready:
            if self.tensors[t].role not in (Role.PARAMETER, Role.BUFFER, Role.INPUT):
                raise InternalError(f"program {self.name!r}: {self.tensors[t].role.value} {self.tensors[t].name!r} is produced by no op")
        backward = False
        for i, op in enumerate(self.ops):
            where = f"program {self.name!r}, op {i} ({op.name})"
            backward = backward or op.phase is Phase.BACKWARD
            if backward and op.phase is Phase.FORWARD:
                raise InternalError(f"{where}: a forward op comes after a backward op")
            for t in op.operands:
                if t not in ready:
                    raise InternalError(f"{where}: operand {t} is not computed yet")
            for t in op.results:
                if t in ready or not 0 <= t < len(self.tensors):
                    raise InternalError(f"{where}: result {t} is computed twice or does not exist")
                ready.add(t)
            used = {ref.operand for ref in refs(op.attributes)}
            if used != set(range(len(op.operands))):
                raise InternalError(f"{where}: attributes refer to operands {sorted(used)}, the op has {len(op.operands)}")
        for t in self.outputs:
            if t not in ready:
                raise InternalError(f"program {self.name!r}: output {t} is never computed")
        for parameter, gradient in self.gradients.items():
            p, g = self.tensors[parameter], self.tensors[gradient]
            if p.role is not Role.PARAMETER or p.shape != g.shape or gradient not in ready:
                raise InternalError(f"program {self.name!r}: {g.name!r} {g.shape} cannot be the gradient of {p.name!r} {p.shape}")


def refs(value: Any) -> Iterator[Ref]:
    """Every Ref inside an attribute value, in order."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from refs(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from refs(item)
