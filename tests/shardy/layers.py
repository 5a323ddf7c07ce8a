"""A transformer of any number of layers as a StableHLO module: what propagation is timed on.

>>> text, ops = layers_module(64)          # 2,305 ops
"""

from __future__ import annotations

BATCH, SEQUENCE, WIDTH, HEADS, HIDDEN = 8, 256, 512, 8, 2048


def layers_module(layers: int) -> tuple[str, int]:
    """The text and the number of ops of the main body: batch on ``data``, weights on ``model`` (priority 1) and ``data`` (priority 2)."""
    writer = _Writer()
    out = "%x"
    for layer in range(layers):
        out = writer.layer(layer, out)
    sharding = '{sdy.sharding = #sdy.sharding<@mesh, [{"data"}p0, {?}, {?}]>}'
    arguments = ", ".join([f"%x: {_type(BATCH, SEQUENCE, WIDTH)} {sharding}", *writer.arguments])
    state = _type(BATCH, SEQUENCE, WIDTH)
    body = "\n".join(writer.lines)
    text = f'sdy.mesh @mesh = <["data"=4, "model"=8]>\nfunc.func @main({arguments}) -> {state} {{\n{body}\nreturn {out} : {state}\n}}\n'
    return text, len(writer.lines)


def _type(*shape: int) -> str:
    return f"tensor<{'x'.join(map(str, shape))}xf32>"


class _Writer:
    """Lines of the body, and the weights as arguments."""

    def __init__(self) -> None:
        self.lines = ["%zero = stablehlo.constant dense<0.0> : tensor<f32>"]
        self.arguments: list[str] = []

    def layer(self, n: int, x: str) -> str:
        state, attended = (BATCH, SEQUENCE, WIDTH), (BATCH, HEADS, SEQUENCE, WIDTH // HEADS)
        for name in "qkv":
            self.weight(f"%{name}{n}", (WIDTH, WIDTH), '[{?}, {"model"}p1]')
        self.weight(f"%o{n}", (WIDTH, WIDTH), '[{"model"}p1, {?}]')
        self.weight(f"%up{n}", (WIDTH, HIDDEN), '[{"data", ?}p2, {"model"}p1]')
        self.weight(f"%down{n}", (HIDDEN, WIDTH), '[{"model"}p1, {"data", ?}p2]')
        normed = self.norm(f"%a{n}", x)
        for name in "qkv":
            self.matmul(f"%{name}p{n}", normed, f"%{name}{n}", state, (WIDTH, WIDTH))
            split = (BATCH, SEQUENCE, HEADS, WIDTH // HEADS)
            self.add(f"%{name}r{n}", f"stablehlo.reshape %{name}p{n} : ({_type(*state)}) -> {_type(*split)}")
            self.add(f"%{name}t{n}", f"stablehlo.transpose %{name}r{n}, dims = [0, 2, 1, 3] : ({_type(*split)}) -> {_type(*attended)}")
        scores = (BATCH, HEADS, SEQUENCE, SEQUENCE)
        batch = "batching_dims = [0, 1] x [0, 1], contracting_dims"
        pair = f"({_type(*attended)}, {_type(*attended)})"
        self.add(f"%s{n}", f"stablehlo.dot_general %qt{n}, %kt{n}, {batch} = [3] x [3] : {pair} -> {_type(*scores)}")
        most = self.over_rows(f"%m{n}", f"%s{n}", "maximum", scores)
        self.add(f"%c{n}", f"stablehlo.subtract %s{n}, {most} : {_type(*scores)}")
        self.add(f"%e{n}", f"stablehlo.exponential %c{n} : {_type(*scores)}")
        total = self.over_rows(f"%t{n}", f"%e{n}", "add", scores)
        self.add(f"%w{n}", f"stablehlo.divide %e{n}, {total} : {_type(*scores)}")
        pair = f"({_type(*scores)}, {_type(*attended)})"
        self.add(f"%h{n}", f"stablehlo.dot_general %w{n}, %vt{n}, {batch} = [3] x [2] : {pair} -> {_type(*attended)}")
        joined = (BATCH, SEQUENCE, HEADS, WIDTH // HEADS)
        self.add(f"%ht{n}", f"stablehlo.transpose %h{n}, dims = [0, 2, 1, 3] : ({_type(*attended)}) -> {_type(*joined)}")
        self.add(f"%hr{n}", f"stablehlo.reshape %ht{n} : ({_type(*joined)}) -> {_type(*state)}")
        self.matmul(f"%ho{n}", f"%hr{n}", f"%o{n}", state, (WIDTH, WIDTH))
        self.add(f"%y{n}", f"stablehlo.add {x}, %ho{n} : {_type(*state)}")
        normed = self.norm(f"%b{n}", f"%y{n}")
        self.matmul(f"%u{n}", normed, f"%up{n}", state, (WIDTH, HIDDEN))
        self.add(f"%g{n}", f"stablehlo.tanh %u{n} : {_type(BATCH, SEQUENCE, HIDDEN)}")
        self.matmul(f"%d{n}", f"%g{n}", f"%down{n}", (BATCH, SEQUENCE, HIDDEN), (HIDDEN, WIDTH))
        return self.add(f"%z{n}", f"stablehlo.add %y{n}, %d{n} : {_type(*state)}")

    def add(self, name: str, text: str) -> str:
        self.lines.append(f"{name} = {text}")
        return name

    def weight(self, name: str, shape: tuple[int, ...], sharding: str) -> None:
        self.arguments.append(f"{name}: {_type(*shape)} {{sdy.sharding = #sdy.sharding<@mesh, {sharding}>}}")

    def matmul(self, name: str, x: str, w: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
        types = f"({_type(*left)}, {_type(*right)}) -> {_type(*left[:-1], right[1])}"
        self.add(name, f"stablehlo.dot_general {x}, {w}, contracting_dims = [2] x [0] : {types}")

    def norm(self, name: str, x: str) -> str:
        state, rows = _type(BATCH, SEQUENCE, WIDTH), _type(BATCH, SEQUENCE)
        self.add(f"{name}q", f"stablehlo.multiply {x}, {x} : {state}")
        self.add(
            f"{name}s",
            f"stablehlo.reduce({name}q init: %zero) applies stablehlo.add across dimensions = [2] : ({state}, tensor<f32>) -> {rows}",
        )
        self.add(f"{name}r", f"stablehlo.rsqrt {name}s : {rows}")
        self.add(f"{name}b", f"stablehlo.broadcast_in_dim {name}r, dims = [0, 1] : ({rows}) -> {state}")
        return self.add(name, f"stablehlo.multiply {x}, {name}b : {state}")

    def over_rows(self, name: str, x: str, kind: str, shape: tuple[int, ...]) -> str:
        """The sum or the largest of every row, as wide as the row again."""
        whole, rows = _type(*shape), _type(*shape[:-1])
        self.add(
            f"{name}r",
            f"stablehlo.reduce({x} init: %zero) applies stablehlo.{kind} across dimensions = [3] : ({whole}, tensor<f32>) -> {rows}",
        )
        return self.add(name, f"stablehlo.broadcast_in_dim {name}r, dims = [0, 1, 2] : ({rows}) -> {whole}")
