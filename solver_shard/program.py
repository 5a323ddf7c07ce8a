"""The frontend-neutral graph of a model: tensors and ops, forward or joint forward and backward.

A Program knows no mesh, no cost and no PyTorch. Ops are in an order in which they can be executed. An op is called by
the arguments in ``attributes``; where an argument is a tensor, a ``Ref`` stands for the operand with that position:

>>> op = Op(name="aten.add.Tensor", operands=(0, 1), results=(2,), attributes={"self": Ref(0), "other": Ref(1), "alpha": 1})
>>> op.attributes["other"].operand
1
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

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
        """The parameter, buffer or input that an output is the new value of; none for any other output."""
        name = self.tensors[t].name
        if not name.startswith("updated("):
            return ()
        wanted = name.removeprefix("updated(").removesuffix(")")
        return tuple(s for s in self.sources() if self.tensors[s].name == wanted)

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


class ModuleOp(Protocol):
    """An op as far as its place in the module tree goes."""

    @property
    def module(self) -> str: ...
    @property
    def operands(self) -> tuple[int, ...]: ...
    @property
    def results(self) -> tuple[int, ...]: ...


def module_outputs(forward: Sequence[ModuleOp], returned: Iterable[int]) -> dict[str, list[int]]:
    """Module path to the positions of its outputs, modules in the order of their first output.

    >>> module_outputs([op for op in program.ops if op.phase is Phase.FORWARD], program.outputs)["model.layers.0.mlp"]
    [58]

    Args:
        forward: the forward ops, in order.
        returned: tensors that the step returns; they count as read outside every module.
    """
    kept = set(returned)
    readers: dict[int, set[str]] = {}
    for op in forward:
        for t in op.operands:
            readers.setdefault(t, set()).add(op.module)
    outputs: dict[str, list[int]] = {}
    for op in forward:
        parts = op.module.split(".") if op.module else []
        for result in op.results:
            outside = readers.get(result, set())
            for depth in range(len(parts), 0, -1):
                path = ".".join(parts[:depth])
                if result in kept or any(other != path and not other.startswith(path + ".") for other in outside):
                    outputs.setdefault(path, []).append(result)
    return outputs


Relays = Literal["none", "shared", "everywhere"]
"""Where a graph has relays: nowhere; behind what several groups read, all that can matter for time; behind all that could be pinned."""

Pin = TypeVar("Pin")

BEFORE, AS_MADE = " (before its pin)", " (as made)"
"""What the names of tensors before the places of pins and before relays end with."""

IDENTITY = "aten.alias.default"
"""The op of a place; a traced one that is all that reads a tensor is one, too."""


def constrain(program: Program, pins: Mapping[int, Pin], relays: Collection[int] = ()) -> tuple[Program, dict[int, Pin]]:
    """Insert an identity for every pinned activation and for every relay; returns the program and the pins by its tensor positions.

    These are the places where an activation may be brought to another layout, once for all of its readers.

    A pin says what readers see, not how the value is computed: a matrix product pinned ``R`` is still best computed partial
    and reduced once. So the op's own result stays free, and an identity (a view, without time) hands on the pinned
    tensor, under the name that the user knows. Stored tensors, outputs and gradients need none: their pins hold for what is
    stored or returned.

    A tensor that several groups of readers get by reshards of their own may as well be brought to one layout at once, where it is made, and
    read by all of them from there. One that a single group reads may be brought there early, so that what was made goes before the reader
    runs: that saves bytes, never time. It is what a pin gives them, so they have such a place without one: a **relay**, wherever it may
    matter (:func:`solver_shard.graph.liveness.relayed_tensors`). A plan keeps those that it uses (``Plan.relays``), and in its program the
    others are not there. With the same places, pinned or not, no pin can make a plan faster or smaller: it only takes choices away.

    Positions of the program's own tensors stay as they are. ``relays``: tensors that ops make; those that are pinned have a place already.
    """
    final = {*program.outputs, *program.gradients.values()}
    made = {t for op in program.ops for t in op.results}
    pinned = [t for t in pins if t in made and t not in final]
    relayed = [t for t in relays if t in made and t not in final and t not in pins]
    if not pinned and not relayed:
        return program, dict(pins)
    tensors = list(program.tensors)
    handed = {t: len(tensors) + k for k, t in enumerate((*pinned, *relayed))}
    for t in handed:
        tensors.append(tensors[t])
        tensors[t] = dataclasses.replace(tensors[t], name=tensors[t].name + (BEFORE if t in pins else AS_MADE))
    ops: list[Op] = []
    for op in program.ops:
        ops.append(dataclasses.replace(op, operands=tuple(handed.get(t, t) for t in op.operands)))
        ops += [_identity(op, t, handed[t]) for t in op.results if t in handed]
    found = dataclasses.replace(program, tensors=tuple(tensors), ops=tuple(ops))
    return found, {handed.get(t, t): pin for t, pin in pins.items()}


def places(program: Program) -> dict[int, int]:
    """Tensor to the position of the identity that alone reads it: the place of a pin or a relay."""
    makers, final = program.producers(), {*program.outputs, *program.gradients.values()}
    found = {}
    for t, uses in program.readers().items():
        (i, _), maker = uses[0], makers.get(t)
        alone = len(uses) == 1 and t not in final and maker is not None
        if alone and program.ops[i].name == IDENTITY and program.ops[i].phase is program.ops[makers[t][0]].phase:
            found[t] = i
    return found


PARTIAL_WRITES = frozenset(
    f"aten.{name}"
    for name in (
        "slice_scatter.default", "select_scatter.default", "scatter.src", "scatter.value", "scatter_add.default", "index_put.default",
        "index_add.default", "index_copy.default",
    )
)  # fmt: skip
"""Ops whose result is operand 0 but for what they write into it."""


def in_place(program: Program) -> frozenset[int]:
    """Forward ops that write into the storage of their operand 0, as the module that was traced does.

    A trace has no writes: ``cache.index_copy_(2, at, new)`` is an op that makes ``updated(cache)``. Nothing else needs the old value where
    that op alone reads it, and every op from a buffer or input to its new value is such a one:

        cache ──index_copy──► t ──slice_scatter──► updated(cache)
    """
    makers, readers = program.producers(), program.readers()
    found: set[int] = set()
    for t in program.outputs:
        chain, (source, *_) = [], (*program.written(t), -1)
        while t in makers:
            op = program.ops[i := makers[t][0]]
            if op.name not in PARTIAL_WRITES or op.attributes["self"] != Ref(0) or readers[op.operands[0]] != [(i, 0)]:
                break
            if op.phase is not Phase.FORWARD:
                break
            chain.append(i)
            t = op.operands[0]
        if t == source:
            found.update(chain)
    return frozenset(found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A program without some of its relays.

    Attributes:
        program: what is left.
        times: position of an op of the whole program, or of the one after it where that is gone; of the update and the end, too.
        tensors: position of every tensor of the whole program; what an identity handed on is the tensor before it.
        relays: the relays that are left, by the tensor before each.
    """

    program: Program
    times: tuple[int, ...]
    tensors: tuple[int, ...]
    relays: tuple[int, ...]


def without(program: Program, relays: Collection[int], unused: Collection[int]) -> Kept:
    """Take out the relays that bring nothing elsewhere; ``relays``, ``unused``: all of them and those, by the tensor before each."""
    handing = places(program)
    gone = {handing[t] for t in unused}
    of = {program.ops[handing[t]].results[0]: t for t in unused}
    left = [t for t in range(len(program.tensors)) if t not in of]
    position = {t: k for k, t in enumerate(left)}
    named = {t: program.tensors[after] for after, t in of.items()}
    times = [0]
    for i in range(len(program.ops) + 1):
        times.append(times[-1] + (i not in gone))
    at = tuple(position[of.get(t, t)] for t in range(len(program.tensors)))
    kept = dataclasses.replace(
        program,
        tensors=tuple(named.get(t, program.tensors[t]) for t in left),
        ops=tuple(
            dataclasses.replace(op, operands=tuple(at[t] for t in op.operands), results=tuple(at[t] for t in op.results))
            for i, op in enumerate(program.ops)
            if i not in gone
        ),
    )
    used = sorted((program.ops[handing[t]].results[0], t) for t in relays if t not in unused)
    return Kept(program=kept, times=tuple(times), tensors=at, relays=tuple(at[t] for _, t in used))


def _identity(producer: Op, before: int, after: int) -> Op:
    return Op(
        name=IDENTITY,
        operands=(before,),
        results=(after,),
        attributes={"self": Ref(0)},
        phase=producer.phase,
        module=producer.module,
    )
