"""Places in a program where an activation may be brought to another layout, once for all of its readers: of pins, and relays.

A pin says what readers see, not how the value is computed: a matrix product pinned ``R`` is still best computed partial
and reduced once. So the op's own result stays free, and an identity (a view, without time) hands on the pinned
tensor, under the name that the user knows. Stored tensors, outputs and gradients need none: their pins hold for what is
stored or returned.

A tensor that several groups of readers get by reshards of their own may as well be brought to one layout at once, where it is made, and
read by all of them from there. One that a single group reads may be brought there early, so that what was made goes before the reader
runs: that saves bytes, never time. It is what a pin gives them, so they have such a place without one: a **relay**, wherever it may matter
(:func:`solver_shard.choice.groups.relayed_tensors`). A plan keeps those that it uses (``Plan.relays``), and in its program the others
are not there. With the same places, pinned or not, no pin can make a plan faster or smaller: it only takes choices away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Literal, TypeVar

from solver_shard.program import Op, Program, Ref

Relays = Literal["none", "shared", "everywhere"]
"""Where a graph has relays: nowhere; behind what several groups read, all that can matter for time; behind all that could be pinned."""

Pin = TypeVar("Pin")

BEFORE, AS_MADE = " (before its pin)", " (as made)"
"""What the names of tensors before the places of pins and before relays end with."""

IDENTITY = "aten.alias.default"
"""The op of a place; a traced one that is all that reads a tensor is one, too."""


def constrain(program: Program, pins: Mapping[int, Pin], relays: Collection[int] = ()) -> tuple[Program, dict[int, Pin]]:
    """Insert an identity for every pinned activation and for every relay; returns the program and the pins by its tensor positions.

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
