"""Small programs written by hand, for tests that need no tracing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from solver_shard.program import Op, Phase, Program, Ref, Role, Tensor


class Builder:
    """Collects tensors and ops; each call returns the position of the new tensor."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []

    def source(self, name: str, shape: tuple[int, ...], role: Role, dtype: str = "f32", trainable: bool = False) -> int:
        self.tensors.append(Tensor(name=name, shape=shape, dtype=dtype, role=role, trainable=trainable))
        return len(self.tensors) - 1

    def weight(self, name: str, *shape: int, trainable: bool = False) -> int:
        return self.source(name, shape, Role.PARAMETER, trainable=trainable)

    def input(self, name: str, *shape: int) -> int:
        return self.source(name, shape, Role.INPUT)

    def call(
        self,
        name: str,
        operands: tuple[int, ...],
        attributes: Mapping[str, Any],
        *shapes: tuple[int, ...],
        role: Role = Role.ACTIVATION,
        phase: Phase = Phase.FORWARD,
        result: str | None = None,
        module: str = "",
    ) -> int:
        first = len(self.tensors)
        dtype = self.tensors[operands[0]].dtype if operands else "f32"
        for j, shape in enumerate(shapes):
            label = result if result is not None and not j else f"v{first + j}"
            self.tensors.append(Tensor(name=label, shape=shape, dtype=dtype, role=role))
        results = tuple(range(first, first + len(shapes)))
        self.ops.append(Op(name=name, operands=operands, results=results, attributes=attributes, phase=phase, module=module))
        return first

    def einsum(self, equation: str, *operands: int, **options: Any) -> int:
        left, right = equation.split("->")
        sizes: dict[str, int] = {}
        for letters, t in zip(left.split(","), operands, strict=True):
            sizes.update(zip(letters, self.tensors[t].shape, strict=True))
        attributes = {"equation": equation, "tensors": tuple(Ref(j) for j in range(len(operands)))}
        return self.call("aten.einsum.default", operands, attributes, tuple(sizes[x] for x in right), **options)

    def relu(self, x: int, **options: Any) -> int:
        return self.call("aten.relu.default", (x,), {"self": Ref(0)}, self.tensors[x].shape, **options)

    def add(self, x: int, y: int, **options: Any) -> int:
        return self.call("aten.add.Tensor", (x, y), {"self": Ref(0), "other": Ref(1), "alpha": 1}, self.tensors[x].shape, **options)

    def ref(self, operand: int) -> Ref:
        return Ref(operand)

    def rename(self, t: int, name: str) -> None:
        self.tensors[t] = dataclasses.replace(self.tensors[t], name=name)

    def program(self, *outputs: int, gradients: Mapping[int, int] | None = None, name: str = "hand") -> Program:
        program = Program(name=name, tensors=tuple(self.tensors), ops=tuple(self.ops), outputs=outputs, gradients=dict(gradients or {}))
        program.validate()
        return program


def mlp(tokens: int = 64, width: int = 1024, hidden: int = 4096, layers: int = 1) -> Program:
    """``layers`` blocks of x -> relu(x A) B, forward only; tokens x width."""
    b = Builder()
    x = b.input("x", tokens, width)
    for k in range(layers):
        w1, w2 = b.weight(f"{k}.up", hidden, width), b.weight(f"{k}.down", width, hidden)
        last = k == layers - 1
        x = b.einsum(
            "ac,bc->ab",
            b.relu(b.einsum("ac,bc->ab", x, w1)),
            w2,
            role=Role.OUTPUT if last else Role.ACTIVATION,
            result="output" if last else None,
        )
    return b.program(x, name="mlp")


def trained_mlp(tokens: int = 64, width: int = 32, hidden: int = 128, layers: int = 1) -> Program:
    """The blocks of ``mlp``, then the sum of squares / 2 as loss, and the backward pass with weight gradients."""
    b = Builder()
    back: dict[str, Any] = {"phase": Phase.BACKWARD}
    x = b.input("x", tokens, width)
    weights = [
        (b.weight(f"{k}.up", hidden, width, trainable=True), b.weight(f"{k}.down", width, hidden, trainable=True)) for k in range(layers)
    ]
    saved = []
    for up, down in weights:
        h = b.einsum("ac,bc->ab", x, up)
        r = b.relu(h)
        saved.append((x, h, r))
        x = b.einsum("ac,bc->ab", r, down)
    half = b.call("aten.mul.Tensor", (x,), {"self": Ref(0), "other": 0.5}, (tokens, width))
    square = b.call("aten.mul.Tensor", (half, x), {"self": Ref(0), "other": Ref(1)}, (tokens, width))
    attributes = {"self": Ref(0), "dim": (0, 1), "keepdim": False, "dtype": None}
    loss = b.call("aten.sum.dim_IntList", (square,), attributes, (), role=Role.OUTPUT, result="loss")
    one = b.call("aten.full.default", (), {"size": (), "fill_value": 1.0, "dtype": "f32"}, (), **back)
    wide = b.call("aten.expand.default", (one,), {"self": Ref(0), "size": (tokens, width), "implicit": False}, (tokens, width), **back)
    grad = b.call("aten.mul.Tensor", (wide, x), {"self": Ref(0), "other": Ref(1)}, (tokens, width), **back)
    gradients = {}
    for k, ((up, down), (entry, h, r)) in reversed(list(enumerate(zip(weights, saved, strict=True)))):
        gradients[down] = b.einsum("ab,ac->bc", grad, r, role=Role.GRADIENT, result=f"grad({k}.down)", **back)
        inner = b.einsum("ab,bc->ac", grad, down, **back)
        attributes = {"grad_output": Ref(0), "self": Ref(1), "threshold": 0}
        inner = b.call("aten.threshold_backward.default", (inner, h), attributes, (tokens, hidden), **back)
        gradients[up] = b.einsum("ab,ac->bc", inner, entry, role=Role.GRADIENT, result=f"grad({k}.up)", **back)
        if k:
            grad = b.einsum("ab,bc->ac", inner, up, **back)
    return b.program(loss, gradients=gradients, name="trained mlp")


def gated(whole: bool) -> Program:
    """A product is split into gate and value, the gate turned too: they, and where asked the whole product, are read in backward."""
    b = Builder()
    back: dict[str, Any] = {"phase": Phase.BACKWARD}
    x, w = b.input("x", 8, 12), b.weight("w", 16, 12, trainable=True)
    h = b.einsum("ac,bc->ab", x, w, result="product")
    gate = b.call("aten.split.Tensor", (h,), {"self": Ref(0), "split_size": 8, "dim": 1}, (8, 8), (8, 8), result="gate")
    turned = b.call("aten.permute.default", (gate,), {"self": Ref(0), "dims": (1, 0)}, (8, 8), result="turned")
    y = b.add(b.relu(gate), gate + 1)
    y = b.add(y, b.relu(turned))
    y = b.relu(y) if not whole else b.einsum("ab,ac->bc", b.relu(h), y)
    attributes = {"self": Ref(0), "dim": (0, 1), "keepdim": False, "dtype": None}
    loss = b.call("aten.sum.dim_IntList", (y,), attributes, (), role=Role.OUTPUT, result="loss")
    slope = b.add(b.relu(turned, **back), gate, **back)
    slope = b.add(slope, b.relu(gate + 1, **back), **back)
    wide = b.call("aten.cat.default", (slope, gate + 1), {"tensors": (Ref(0), Ref(1)), "dim": 1}, (8, 16), **back)
    wide = b.add(wide, h, **back) if whole else wide
    return b.program(loss, gradients={w: b.einsum("ab,ac->bc", wide, x, role=Role.GRADIENT, result="grad(w)", **back)}, name="gated")
