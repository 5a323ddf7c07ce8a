"""Give pinned activations a place in the program: an identity op after the op that computes them.

A pin says what readers see, not how the value is computed: a matrix product pinned ``R`` is still best computed partial
and reduced once. So the op's own result stays free, and an identity (a view, without time or bytes) hands on the pinned
tensor, under the name that the user knows. Stored tensors, outputs and gradients need none: their pins hold for what is
stored or returned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from solver_shard.program import Op, Program, Ref

Pin = TypeVar("Pin")


def constrain(program: Program, pins: Mapping[int, Pin]) -> tuple[Program, dict[int, Pin]]:
    """Insert an identity for every pinned activation; returns the program and the pins by its tensor positions."""
    final = {*program.outputs, *program.gradients.values()}
    made = {t for op in program.ops for t in op.results}
    pinned = [t for t in pins if t in made and t not in final]
    if not pinned:
        return program, dict(pins)
    tensors = list(program.tensors)
    handed = {t: len(tensors) + k for k, t in enumerate(pinned)}
    for t in handed:
        tensors.append(tensors[t])
        tensors[t] = dataclasses.replace(tensors[t], name=f"{tensors[t].name} (before its pin)")
    ops: list[Op] = []
    for op in program.ops:
        ops.append(dataclasses.replace(op, operands=tuple(handed.get(t, t) for t in op.operands)))
        ops += [_identity(op, t, handed[t]) for t in op.results if t in handed]
    found = dataclasses.replace(program, tensors=tuple(tensors), ops=tuple(ops))
    return found, {handed.get(t, t): pin for t, pin in pins.items()}


def _identity(producer: Op, before: int, after: int) -> Op:
    return Op(
        name="aten.alias.default",
        operands=(before,),
        results=(after,),
        attributes={"self": Ref(0)},
        phase=producer.phase,
        module=producer.module,
    )
