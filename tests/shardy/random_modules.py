"""Random StableHLO modules with sdy annotations, from a seed: dense graphs of every op and region kind that propagation knows.

>>> text = random_module(7)
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

SIZES = (1, 2, 3, 4, 4, 6, 8, 8, 12, 16)
MESHES = (
    (("a", 2), ("b", 2), ("c", 2)),
    (("a", 4), ("b", 2), ("c", 3)),
    (("a", 8), ("b", 4)),
    (("a", 2), ("b", 6), ("c", 4)),
    (("a", 12), ("b", 2)),
    (("a", 24), ("b", 2), ("c", 1)),
    (("a", 16), ("b", 3), ("c", 2)),
)

Axis = tuple[str, int, int]
Shape = tuple[int, ...]


@dataclass
class Scope:
    """Values that ops of one block may read, and the mesh axes they may name."""

    values: list[tuple[str, Shape]]
    indent: str
    forbidden: frozenset[str] = frozenset()
    lines: list[str] = field(default_factory=list)


def random_module(seed: int, *, ops: int | None = None, priorities: bool = True) -> str:
    """A module's text; ``ops`` bounds the number of ops of the main body."""
    return Generator(random.Random(seed), ops, priorities).module()


class Generator:
    """One module; every draw comes from ``rng`` in a fixed order."""

    def __init__(self, rng: random.Random, ops: int | None, priorities: bool) -> None:
        self.rng = rng
        self.count = ops if ops is not None else rng.choice((3, 6, 10, 16, 24, 32))
        self.mesh = rng.choice(MESHES)
        self.density = rng.choice((0.05, 0.15, 0.3, 0.5))
        self.priorities = priorities and rng.random() < 0.5
        self.parts = rng.random() < 0.6
        self.unreduced = rng.random() < 0.2
        self.sizes = rng.choice((SIZES, (2, 4, 8), (4, 8, 16), (2, 3, 4, 6), (8,), (12, 24), (4, 8), (16,)))
        self.regions = rng.choice((0.0, 0.1, 0.25))
        self.two_meshes = rng.random() < 0.1
        self.inlined = rng.random() < 0.03
        self.next = 0
        self.arguments: list[tuple[str, Shape]] = []
        self.groups = rng.randint(1, 3) if rng.random() < 0.3 else 0
        self.grouped: dict[str, int] = {}
        self.group_shapes: dict[int, Shape] = {}
        self.depth = 0
        self.functions: list[tuple[str, Shape, str]] = []
        self.function_edges = rng.random() < 0.5

    # names and shapes

    def name(self) -> str:
        self.next += 1
        return f"%v{self.next}"

    def shape(self, rank: int | None = None) -> Shape:
        rank = self.rng.choice((1, 2, 2, 2, 2, 3, 3)) if rank is None else rank
        return tuple(self.rng.choice(self.sizes) for _ in range(rank))

    def pick(self, scope: Scope, rank: int = 0) -> tuple[str, Shape]:
        """Some value of at least this rank."""
        legal = [v for v in scope.values if len(v[1]) >= rank]
        if legal and self.rng.random() < 0.9:
            recent = legal[-4:] if self.rng.random() < 0.5 else legal
            return self.rng.choice(recent)
        return self.source(scope, self.shape(max(rank, self.rng.choice((1, 2, 3)))))

    def like(self, scope: Scope, shape: Shape) -> str:
        """Some value of exactly this shape."""
        legal = [name for name, other in scope.values if other == shape]
        if legal and self.rng.random() < 0.85:
            return self.rng.choice(legal)
        return self.source(scope, shape)[0]

    def source(self, scope: Scope, shape: Shape) -> tuple[str, Shape]:
        """A new value of this shape that comes from nowhere: an argument at the top, a constant inside."""
        if self.depth == 0 and self.rng.random() < 0.8:
            name = f"%arg{len(self.arguments)}"
            self.arguments.append((name, shape))
            scope.values.insert(0, (name, shape))
            return name, shape
        name = self.name()
        scope.lines.append(f"{scope.indent}{name} = stablehlo.constant {self.attr(scope, [shape])}dense<1.0> : {tensor(shape)}")
        scope.values.append((name, shape))
        return name, shape

    # shardings

    def axes(self, forbidden: frozenset[str]) -> list[Axis]:
        """Axes and parts of axes that do not overlap, in random order."""
        found: list[Axis] = []
        for name, size in self.mesh:
            if name in forbidden:
                continue
            if size > 3 and self.parts and self.rng.random() < 0.5:
                pre, rest = 1, size
                while rest > 1:
                    k = self.rng.choice([d for d in range(2, rest + 1) if rest % d == 0])
                    found.append((name, pre, k))
                    pre, rest = pre * k, rest // k
            else:
                found.append((name, 1, size))
        self.rng.shuffle(found)
        return found

    def sharding(self, shape: Shape, forbidden: frozenset[str], mesh: str = "@mesh", *, fresh: bool = True) -> str:
        """``<@mesh, [{"a", ?}, {}]>``: at random, of a tensor of this shape."""
        if self.rng.random() < 0.02:
            return f"<@empty, [{', '.join(self.rng.choice(('{}', '{?}')) for _ in shape)}]>"
        axes = [axis for axis in self.axes(forbidden) if self.rng.random() < 0.75]
        dims: list[list[Axis]] = [[] for _ in shape]
        replicated: list[Axis] = []
        unreduced: list[Axis] = []
        for axis in axes:
            draw = self.rng.random()
            if draw < 0.1:
                replicated.append(axis)
            elif draw < 0.15 and self.unreduced:
                unreduced.append(axis)
            elif dims and draw < 0.75:
                self.rng.choice(dims).append(axis)
        texts = []
        for dim in dims:
            open_ = self.rng.random() < 0.6
            held = [*map(self.axis, merged(dim)), *(["?"] if open_ else [])]
            priority = f"p{self.rng.randint(0, 3)}" if self.priorities and fresh and (dim or open_) and self.rng.random() < 0.4 else ""
            texts.append("{" + ", ".join(held) + "}" + priority)
        more = ""
        for name, held_axes in (("replicated", replicated), ("unreduced", unreduced)):
            if held_axes:
                order = [n for n, _ in self.mesh]
                held_axes.sort(key=lambda axis: (order.index(axis[0]), axis[1]))
                more += f", {name}={{{', '.join(map(self.axis, merged(held_axes)))}}}"
        return f"<{mesh}, [{', '.join(texts)}]{more}>"

    def axis(self, axis: Axis) -> str:
        name, pre, size = axis
        return f'"{name}"' if pre == 1 and size == dict(self.mesh)[name] else f'"{name}":({pre}){size}'

    def symbol(self) -> str:
        draw = self.rng.random()
        if self.inlined and draw < 0.2:
            axes = ", ".join(f'"{name}"={size}' for name, size in self.mesh)
            return f"mesh<[{axes}]>"
        return "@other" if self.two_meshes and draw < 0.3 else "@mesh"

    def attr(self, scope: Scope, shapes: list[Shape], *, always: bool = False, braces: bool = True) -> str:
        """A sharding attribute for an op's results, or nothing."""
        if not always and self.rng.random() >= self.density:
            return ""
        symbol = self.symbol()
        each = ", ".join(self.sharding(shape, scope.forbidden, symbol) for shape in shapes)
        text = f"sdy.sharding = #sdy.sharding_per_value<[{each}]>"
        return f"{{{text}}} " if braces else text

    # ops

    def emit(self, scope: Scope, text: str, shape: Shape) -> str:
        name = self.name()
        scope.lines.append(f"{scope.indent}{name} = {text}")
        scope.values.append((name, shape))
        return name

    def op(self, scope: Scope) -> None:
        if self.rng.random() < self.regions and self.depth < 2:
            self.rng.choice((self.loop, self.case, self.barrier_op, self.manual, self.named, self.call))(scope)
            return
        made = self.rng.choice(
            (
                self.unary, self.binary, self.binary, self.binary, self.dot, self.dot, self.reshape, self.reshape, self.transpose,
                self.broadcast, self.reduce, self.slice, self.pad, self.concatenate, self.dynamic_slice, self.dynamic_update_slice,
                self.constraint, self.propagation_barrier, self.select, self.custom_call, self.group, self.sort, self.reverse, self.iota,
                self.gather, self.scatter, self.convolution, self.reduce_window, self.two_reduce, self.custom_rule,
            )
        )  # fmt: skip
        made(scope)

    def unary(self, scope: Scope) -> None:
        x, shape = self.pick(scope)
        op = self.rng.choice(("tanh", "exponential", "negate", "sine"))
        self.emit(scope, f"stablehlo.{op} {x} {self.attr(scope, [shape])}: {tensor(shape)}", shape)

    def binary(self, scope: Scope) -> None:
        x, shape = self.pick(scope)
        y = self.like(scope, shape)
        op = self.rng.choice(("add", "multiply", "maximum", "subtract"))
        self.emit(scope, f"stablehlo.{op} {x}, {y} {self.attr(scope, [shape])}: {tensor(shape)}", shape)

    def select(self, scope: Scope) -> None:
        x, shape = self.pick(scope)
        y = self.like(scope, shape)
        p = self.name()
        boolean = tensor(shape).replace("f32", "i1")
        scope.lines.append(
            f"{scope.indent}{p} = stablehlo.compare LT, {x}, {y} {self.attr(scope, [shape])}"
            f": ({tensor(shape)}, {tensor(shape)}) -> {boolean}"
        )
        self.emit(scope, f"stablehlo.select {p}, {x}, {y} {self.attr(scope, [shape])}: {boolean}, {tensor(shape)}", shape)

    def dot(self, scope: Scope) -> None:
        x, left = self.pick(scope, 1)
        contracted = self.rng.randrange(len(left))
        batch = [d for d in range(len(left)) if d != contracted and self.rng.random() < 0.3]
        free = [self.rng.choice(self.sizes) for _ in range(self.rng.choice((0, 1, 1, 2)))]
        dims = [("b", left[d]) for d in batch] + [("k", left[contracted])] + [("f", n) for n in free]
        order = list(range(len(dims)))
        self.rng.shuffle(order)
        right = tuple(dims[i][1] for i in order)
        y = self.like(scope, right)
        right_batch = [order.index(i) for i in range(len(batch))]
        out = tuple([left[d] for d in batch] + [left[d] for d in range(len(left)) if d != contracted and d not in batch])
        out += tuple(dims[i][1] for i in order if dims[i][0] == "f")
        batching = f"batching_dims = {batch} x {right_batch}, " if batch else ""
        self.emit(
            scope,
            f"stablehlo.dot_general {x}, {y}, {batching}contracting_dims = [{contracted}] x [{order.index(len(batch))}] "
            f"{self.attr(scope, [out])}: ({tensor(left)}, {tensor(right)}) -> {tensor(out)}",
            out,
        )

    def reshape(self, scope: Scope) -> None:
        x, shape = self.pick(scope)
        left, out = math.prod(shape), []
        while left > 1 and len(out) < 3:
            d = self.rng.choice([d for d in range(1, left + 1) if left % d == 0])
            out.append(d)
            left //= d
        if left > 1 or not out:
            out.append(left)
        made = tuple(out)
        self.emit(scope, f"stablehlo.reshape {x} {self.attr(scope, [made])}: ({tensor(shape)}) -> {tensor(made)}", made)

    def transpose(self, scope: Scope) -> None:
        x, shape = self.pick(scope)
        order = list(range(len(shape)))
        self.rng.shuffle(order)
        out = tuple(shape[d] for d in order)
        self.emit(scope, f"stablehlo.transpose {x}, dims = {order} {self.attr(scope, [out])}: ({tensor(shape)}) -> {tensor(out)}", out)

    def broadcast(self, scope: Scope) -> None:
        x, shape = self.pick(scope)
        out, dims = [], []
        for size in shape:
            while self.rng.random() < 0.3 and len(out) < 4:
                out.append(self.rng.choice(self.sizes))
            dims.append(len(out))
            out.append(self.rng.choice(self.sizes) if size == 1 else size)
        made = tuple(out)
        self.emit(
            scope, f"stablehlo.broadcast_in_dim {x}, dims = {dims} {self.attr(scope, [made])}: ({tensor(shape)}) -> {tensor(made)}", made
        )

    def reduce(self, scope: Scope) -> None:
        x, shape = self.pick(scope, 1)
        dims = sorted(self.rng.sample(range(len(shape)), self.rng.randint(1, len(shape))))
        out = tuple(n for d, n in enumerate(shape) if d not in dims)
        zero = self.name()
        scope.lines.append(f"{scope.indent}{zero} = stablehlo.constant dense<0.0> : tensor<f32>")
        attr = self.attr(scope, [out])
        self.emit(
            scope,
            f"stablehlo.reduce({x} init: {zero}) applies stablehlo.add across dimensions = {dims} {attr}"
            f": ({tensor(shape)}, tensor<f32>) -> {tensor(out)}",
            out,
        )

    def two_reduce(self, scope: Scope) -> None:
        """A reduce of two operands, with two results."""
        x, shape = self.pick(scope, 1)
        y = self.like(scope, shape)
        dim = self.rng.randrange(len(shape))
        out = tuple(n for d, n in enumerate(shape) if d != dim)
        zero, name = self.name(), self.name()
        scope.lines.append(f"{scope.indent}{zero} = stablehlo.constant dense<0.0> : tensor<f32>")
        attr = self.attr(scope, [out, out])
        i = scope.indent
        scope.lines.append(
            f'{i}{name}:2 = "stablehlo.reduce"({x}, {y}, {zero}, {zero}) <{{dimensions = array<i64: {dim}>}}> ({{\n'
            f"{i}^bb0(%ra: tensor<f32>, %rb: tensor<f32>, %rc: tensor<f32>, %rd: tensor<f32>):\n"
            f"{i}  %re = stablehlo.add %ra, %rc : tensor<f32>\n{i}  %rf = stablehlo.maximum %rb, %rd : tensor<f32>\n"
            f"{i}  stablehlo.return %re, %rf : tensor<f32>, tensor<f32>\n"
            f"{i}}}) {attr}: ({tensor(shape)}, {tensor(shape)}, tensor<f32>, tensor<f32>) -> ({tensor(out)}, {tensor(out)})"
        )
        scope.values += [(f"{name}#0", out), (f"{name}#1", out)]

    def slice(self, scope: Scope) -> None:
        x, shape = self.pick(scope, 1)
        bounds = []
        for n in shape:
            length = n if self.rng.random() < 0.6 else self.rng.randint(1, n)
            start = self.rng.randint(0, n - length)
            bounds.append((start, start + length))
        out = tuple(end - start for start, end in bounds)
        text = ", ".join(f"{start}:{end}" for start, end in bounds)
        self.emit(scope, f"stablehlo.slice {x} [{text}] {self.attr(scope, [out])}: ({tensor(shape)}) -> {tensor(out)}", out)

    def pad(self, scope: Scope) -> None:
        x, shape = self.pick(scope, 1)
        high = [0 if self.rng.random() < 0.6 else self.rng.choice((1, 2, 4)) for _ in shape]
        out = tuple(n + h for n, h in zip(shape, high, strict=True))
        zero = self.name()
        scope.lines.append(f"{scope.indent}{zero} = stablehlo.constant dense<0.0> : tensor<f32>")
        low = [0] * len(shape)
        self.emit(
            scope,
            f"stablehlo.pad {x}, {zero}, low = {low}, high = {high}, interior = {low} {self.attr(scope, [out])}"
            f": ({tensor(shape)}, tensor<f32>) -> {tensor(out)}",
            out,
        )

    def concatenate(self, scope: Scope) -> None:
        x, shape = self.pick(scope, 1)
        y = self.like(scope, shape)
        dim = self.rng.randrange(len(shape))
        out = tuple(2 * n if d == dim else n for d, n in enumerate(shape))
        self.emit(
            scope,
            f"stablehlo.concatenate {x}, {y}, dim = {dim} {self.attr(scope, [out])}: ({tensor(shape)}, {tensor(shape)}) -> {tensor(out)}",
            out,
        )

    def indices(self, scope: Scope, count: int) -> list[str]:
        name = self.name()
        scope.lines.append(f"{scope.indent}{name} = stablehlo.constant dense<0> : tensor<i32>")
        return [name] * count

    def dynamic_slice(self, scope: Scope) -> None:
        x, shape = self.pick(scope, 1)
        out = tuple(n if self.rng.random() < 0.6 else self.rng.randint(1, n) for n in shape)
        starts = self.indices(scope, len(shape))
        self.emit(
            scope,
            f"stablehlo.dynamic_slice {', '.join([x, *starts])}, sizes = {list(out)} {self.attr(scope, [out])}"
            f": ({', '.join([tensor(shape), *['tensor<i32>'] * len(shape)])}) -> {tensor(out)}",
            out,
        )

    def dynamic_update_slice(self, scope: Scope) -> None:
        x, shape = self.pick(scope, 1)
        part = tuple(n if self.rng.random() < 0.6 else self.rng.randint(1, n) for n in shape)
        y = self.like(scope, part)
        starts = self.indices(scope, len(shape))
        types = ", ".join([tensor(shape), tensor(part), *["tensor<i32>"] * len(shape)])
        self.emit(
            scope,
            f"stablehlo.dynamic_update_slice {', '.join([x, y, *starts])} {self.attr(scope, [shape])}: ({types}) -> {tensor(shape)}",
            shape,
        )

    def constraint(self, scope: Scope) -> None:
        x, shape = self.pick(scope)
        if self.rng.random() < 0.3:
            self.emit(scope, f"sdy.reshard {x} {self.sharding(shape, scope.forbidden, self.symbol())} : {tensor(shape)}", shape)
            return
        self.emit(scope, f"sdy.sharding_constraint {x} {self.sharding(shape, scope.forbidden, self.symbol())} : {tensor(shape)}", shape)

    def propagation_barrier(self, scope: Scope) -> None:
        x, shape = self.pick(scope)
        way = self.rng.choice(("NONE", "FORWARD", "BACKWARD"))
        self.emit(scope, f"sdy.propagation_barrier {x} allowed_direction={way} : {tensor(shape)}", shape)

    def group(self, scope: Scope) -> None:
        if not self.groups or self.depth:
            self.binary(scope)
            return
        x, shape = self.pick(scope)
        group = self.rng.randrange(self.groups)
        if self.grouped.get(x, group) != group or self.group_shapes.get(group, shape) != shape:
            return
        self.grouped[x] = group
        self.group_shapes[group] = shape
        scope.lines.append(f"{scope.indent}sdy.sharding_group {x} group_id={group} : {tensor(shape)}")

    def custom_call(self, scope: Scope) -> None:
        x, shape = self.pick(scope)
        target = self.rng.choice(("MoveToHost", "MoveToDevice", "foo", "annotate_device_placement", "sdy_testonly"))
        self.emit(scope, f"stablehlo.custom_call @{target}({x}) {self.attr(scope, [shape])}: ({tensor(shape)}) -> {tensor(shape)}", shape)

    def custom_rule(self, scope: Scope) -> None:
        """A custom call with a rule of its own, factors of every type, some blocked."""
        x, left = self.pick(scope, 1)
        y, right = self.pick(scope, 1)
        factors: list[int] = []
        dims: list[list[list[int]]] = []
        by_size: dict[int, list[int]] = {}
        for shape in (left, right):
            held: list[list[int]] = []
            used: set[int] = set()
            for n in shape:
                parts = [n]
                if n > 3 and self.rng.random() < 0.4:
                    d = self.rng.choice([d for d in range(1, n + 1) if n % d == 0])
                    parts = [d, n // d] if 1 < d < n else [n]
                dim = []
                for part in parts:
                    known = [f for f in by_size.get(part, []) if f not in used]
                    if known and self.rng.random() < 0.6:
                        f = self.rng.choice(known)
                    else:
                        f = len(factors)
                        factors.append(part)
                        by_size.setdefault(part, []).append(f)
                    used.add(f)
                    dim.append(f)
                held.append(dim)
            dims.append(held)
        kept = [f for f in range(len(factors)) if self.rng.random() < 0.7] or [0]
        self.rng.shuffle(kept)
        kept = kept[:4]
        out = tuple(factors[f] for f in kept)
        letters = "ijklmnopqrstuvwxyz"

        def text(held: list[list[int]]) -> str:
            return "[" + ", ".join("".join(letters[f] for f in dim) for dim in held) + "]"

        sets: dict[str, list[int]] = {"reduction": [], "need_replication": [], "permutation": []}
        for f in range(len(factors)):
            draw = self.rng.random()
            if f not in kept and draw < 0.4:
                sets["reduction"].append(f)
            elif draw < 0.5:
                sets["need_replication"].append(f)
            elif draw < 0.6:
                sets["permutation"].append(f)
        blocked = [f for f in range(len(factors)) if self.rng.random() < 0.15]
        special = "".join(
            f" {name}={{{', '.join(letters[f] for f in held)}}}" for name, held in (*sets.items(), ("blocked_propagation", blocked)) if held
        )
        sizes = ", ".join(f"{letters[f]}={n}" for f, n in enumerate(factors))
        rule = f"#sdy.op_sharding_rule<({text(dims[0])}, {text(dims[1])})->({text([[f] for f in kept])}) {{{sizes}}}{special}, custom>"
        attr = self.attr(scope, [out], braces=False)
        both = f"{{{attr}{', ' if attr else ''}sdy.sharding_rule = {rule}}} "
        self.emit(scope, f"stablehlo.custom_call @bar({x}, {y}) {both}: ({tensor(left)}, {tensor(right)}) -> {tensor(out)}", out)

    def sort(self, scope: Scope) -> None:
        x, shape = self.pick(scope, 1)
        y = self.like(scope, shape)
        dim = self.rng.randrange(len(shape))
        name = self.name()
        i = scope.indent
        scope.lines.append(
            f'{i}{name}:2 = "stablehlo.sort"({x}, {y}) <{{dimension = {dim} : i64, is_stable = true}}> ({{\n'
            f"{i}^bb0(%sa: tensor<f32>, %sb: tensor<f32>, %sc: tensor<f32>, %sd: tensor<f32>):\n"
            f"{i}  %se = stablehlo.compare LT, %sa, %sb : (tensor<f32>, tensor<f32>) -> tensor<i1>\n"
            f"{i}  stablehlo.return %se : tensor<i1>\n"
            f"{i}}}) {self.attr(scope, [shape, shape])}: ({tensor(shape)}, {tensor(shape)}) -> ({tensor(shape)}, {tensor(shape)})"
        )
        scope.values += [(f"{name}#0", shape), (f"{name}#1", shape)]

    def reverse(self, scope: Scope) -> None:
        x, shape = self.pick(scope, 1)
        self.emit(
            scope, f"stablehlo.reverse {x}, dims = [{self.rng.randrange(len(shape))}] {self.attr(scope, [shape])}: {tensor(shape)}", shape
        )

    def iota(self, scope: Scope) -> None:
        shape = self.shape()
        self.emit(scope, f"stablehlo.iota dim = 0 {self.attr(scope, [shape])}: {tensor(shape)}", shape)

    def gather(self, scope: Scope) -> None:
        """Rows of a matrix by one index per element of a vector."""
        x, shape = self.pick(scope, 2)
        rows = self.rng.choice(self.sizes)
        name = self.name()
        scope.lines.append(f"{scope.indent}{name} = stablehlo.iota dim = 0 : tensor<{rows}x1xi32>")
        width = tuple(n if self.rng.random() < 0.7 else self.rng.randint(1, n) for n in shape[1:])
        out = (rows, *width)
        offsets = list(range(1, len(out)))
        slices = ", ".join(map(str, (1, *width)))
        self.emit(
            scope,
            f'"stablehlo.gather"({x}, {name}) <{{dimension_numbers = #stablehlo.gather<offset_dims = {offsets}, '
            "collapsed_slice_dims = [0], "
            f"start_index_map = [0], index_vector_dim = 1>, indices_are_sorted = false, slice_sizes = array<i64: {slices}>}}> "
            f"{self.attr(scope, [out])}: ({tensor(shape)}, tensor<{rows}x1xi32>) -> {tensor(out)}",
            out,
        )

    def scatter(self, scope: Scope) -> None:
        """Rows added to a matrix by one index per element of a vector."""
        x, shape = self.pick(scope, 2)
        rows = self.rng.choice(self.sizes)
        name = self.name()
        scope.lines.append(f"{scope.indent}{name} = stablehlo.iota dim = 0 : tensor<{rows}x1xi32>")
        update = (rows, *shape[1:])
        y = self.like(scope, update)
        body = self.rng.choice(("add", "subtract"))
        i = scope.indent
        windows = list(range(1, len(update)))
        self.emit(
            scope,
            f'"stablehlo.scatter"({x}, {name}, {y}) <{{indices_are_sorted = false, scatter_dimension_numbers = #stablehlo.scatter<'
            f"update_window_dims = {windows}, inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>, "
            f"unique_indices = false}}> ({{\n{i}^bb0(%ta: tensor<f32>, %tb: tensor<f32>):\n"
            f"{i}  %tc = stablehlo.{body} %ta, %tb : tensor<f32>\n{i}  stablehlo.return %tc : tensor<f32>\n"
            f"{i}}}) {self.attr(scope, [shape])}: ({tensor(shape)}, tensor<{rows}x1xi32>, {tensor(update)}) -> {tensor(shape)}",
            shape,
        )

    def convolution(self, scope: Scope) -> None:
        n, h, c, o = (self.rng.choice((2, 4, 8)) for _ in range(4))
        k = self.rng.choice((1, 2, 4))
        k = min(k, h)
        stride = k if self.rng.random() < 0.5 else 1
        x, w = self.like(scope, (n, h, c)), self.like(scope, (k, c, o))
        out = (n, (h - k) // stride + 1, o)
        self.emit(
            scope,
            f"stablehlo.convolution({x}, {w}) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f], window = {{stride = [{stride}]}} "
            f"{{batch_group_count = 1 : i64, feature_group_count = 1 : i64"
            + (", " + inner if (inner := self.attr(scope, [out], braces=False)) else "")
            + f"}} : ({tensor((n, h, c))}, {tensor((k, c, o))}) -> {tensor(out)}",
            out,
        )

    def reduce_window(self, scope: Scope) -> None:
        x, shape = self.pick(scope, 1)
        window = [self.rng.choice([w for w in (1, 2, 4) if w <= n]) for n in shape]
        out = tuple(n // w for n, w in zip(shape, window, strict=True))
        zero = self.name()
        i = scope.indent
        scope.lines.append(f"{i}{zero} = stablehlo.constant dense<0.0> : tensor<f32>")
        sizes = ", ".join(map(str, window))
        self.emit(
            scope,
            f'"stablehlo.reduce_window"({x}, {zero}) <{{window_dimensions = array<i64: {sizes}>, '
            f"window_strides = array<i64: {sizes}>}}> ({{\n"
            f"{i}^bb0(%wa: tensor<f32>, %wb: tensor<f32>):\n{i}  %wc = stablehlo.add %wa, %wb : tensor<f32>\n"
            f"{i}  stablehlo.return %wc : tensor<f32>\n{i}}}) {self.attr(scope, [out])}: ({tensor(shape)}, tensor<f32>) -> {tensor(out)}",
            out,
        )

    # regions

    def block(
        self, scope: Scope, values: list[tuple[str, Shape]], wanted: list[Shape], *, keep: bool, forbidden: frozenset[str]
    ) -> tuple[list[str], list[str]]:
        """Lines of a body of a few ops, and values of the wanted shapes."""
        outer = list(scope.values) if keep else []
        inner = Scope(values=[*outer, *values], indent=scope.indent + "  ", forbidden=forbidden)
        self.depth += 1
        for _ in range(self.rng.randint(0, 4)):
            self.op(inner)
        returned = [self.like(inner, shape) for shape in wanted]
        self.depth -= 1
        return inner.lines, returned

    def several(self, scope: Scope) -> tuple[list[str], list[Shape]]:
        picked = [self.pick(scope) for _ in range(self.rng.randint(1, 3))]
        return [name for name, _ in picked], [shape for _, shape in picked]

    def loop(self, scope: Scope) -> None:
        values, shapes = self.several(scope)
        name, i = self.name(), scope.indent
        condition = [self.name() for _ in shapes]
        body = [self.name() for _ in shapes]
        lines, returned = self.block(scope, list(zip(body, shapes, strict=True)), shapes, keep=True, forbidden=scope.forbidden)
        first, _ = self.block(scope, list(zip(condition, shapes, strict=True)), [], keep=True, forbidden=scope.forbidden)
        types = ", ".join(map(tensor, shapes))

        def arguments(names: list[str]) -> str:
            return ", ".join(f"{n}: {tensor(s)}" for n, s in zip(names, shapes, strict=True))

        truth = self.name()
        scope.lines.append(
            f'{i}{name}:{len(shapes)} = "stablehlo.while"({", ".join(values)}) ({{\n{i}^bb0({arguments(condition)}):\n'
            + "".join(line + "\n" for line in first)
            + f"{i}  {truth} = stablehlo.constant dense<true> : tensor<i1>\n{i}  stablehlo.return {truth} : tensor<i1>\n{i}}}, {{\n"
            + f"{i}^bb0({arguments(body)}):\n"
            + "".join(line + "\n" for line in lines)
            + f"{i}  stablehlo.return {', '.join(returned)} : {types}\n{i}}}) {self.attr(scope, shapes)}: ({types}) -> ({types})"
        )
        scope.values += [(f"{name}#{k}", shape) for k, shape in enumerate(shapes)]

    def case(self, scope: Scope) -> None:
        """A case, or an if."""
        shapes = [self.pick(scope)[1] for _ in range(self.rng.randint(1, 2))]
        index, name, i = self.name(), self.name(), scope.indent
        op, literal, kind, count = "case", "0", "i32", self.rng.randint(1, 3)
        if self.rng.random() < 0.2:
            op, literal, kind, count = "if", "true", "i1", 2
        scope.lines.append(f"{i}{index} = stablehlo.constant dense<{literal}> : tensor<{kind}>")
        types = ", ".join(map(tensor, shapes))
        branches = []
        for _ in range(count):
            lines, returned = self.block(scope, [], shapes, keep=True, forbidden=scope.forbidden)
            branches.append(
                "{\n" + "".join(line + "\n" for line in lines) + f"{i}  stablehlo.return {', '.join(returned)} : {types}\n{i}}}"
            )
        scope.lines.append(
            f'{i}{name}:{len(shapes)} = "stablehlo.{op}"({index}) ({", ".join(branches)}) '
            f"{self.attr(scope, shapes)}: (tensor<{kind}>) -> ({types})"
        )
        scope.values += [(f"{name}#{k}", shape) for k, shape in enumerate(shapes)]

    def barrier_op(self, scope: Scope) -> None:
        values, shapes = self.several(scope)
        name = self.name()
        types = ", ".join(map(tensor, shapes))
        scope.lines.append(
            f"{scope.indent}{name}:{len(shapes)} = stablehlo.optimization_barrier {self.attr(scope, shapes)}{', '.join(values)} : {types}"
        )
        scope.values += [(f"{name}#{k}", shape) for k, shape in enumerate(shapes)]

    def named(self, scope: Scope) -> None:
        values, shapes = self.several(scope)
        outs = [self.rng.choice(shapes)]
        arguments = [self.name() for _ in shapes]
        lines, returned = self.block(scope, list(zip(arguments, shapes, strict=True)), outs, keep=False, forbidden=scope.forbidden)
        name, i = self.name(), scope.indent
        ins = outs_text = ""
        if self.rng.random() < 0.4:
            ins = f" in_shardings=[{', '.join(self.sharding(s, scope.forbidden, fresh=False) for s in shapes)}]"
        if self.rng.random() < 0.4:
            outs_text = f" out_shardings=[{', '.join(self.sharding(s, scope.forbidden, fresh=False) for s in outs)}]"
        header = ", ".join(f"{n}: {tensor(s)}" for n, s in zip(arguments, shapes, strict=True))
        scope.lines.append(
            f'{i}{name} = sdy.named_computation<"f">({", ".join(values)}){ins}{outs_text} ({header}) {{\n'
            + "".join(line + "\n" for line in lines)
            + f"{i}  sdy.return {returned[0]} : {tensor(outs[0])}\n{i}}} : ({', '.join(map(tensor, shapes))}) -> {tensor(outs[0])}"
        )
        scope.values.append((name, outs[0]))

    def manual(self, scope: Scope) -> None:
        legal = [n for n, size in self.mesh if n not in scope.forbidden and size > 1]
        if not legal or self.two_meshes:
            self.barrier_op(scope)
            return
        manual = frozenset(self.rng.sample(legal, self.rng.randint(1, min(2, len(legal)))))
        values, shapes = self.several(scope)
        outer_out = [self.rng.choice(shapes)]
        in_texts, local = zip(*(self.manual_sharding(s, manual, scope.forbidden) for s in shapes), strict=True)
        out_texts, local_out = zip(*(self.manual_sharding(s, manual, scope.forbidden) for s in outer_out), strict=True)
        arguments = [self.name() for _ in shapes]
        inside = scope.forbidden | manual
        lines, returned = self.block(scope, list(zip(arguments, local, strict=True)), list(local_out), keep=False, forbidden=inside)
        name, i = self.name(), scope.indent
        header = ", ".join(f"{n}: {tensor(s)}" for n, s in zip(arguments, local, strict=True))
        order = [n for n, _ in self.mesh]
        axes = ", ".join(f'"{n}"' for n in sorted(manual, key=order.index))
        scope.lines.append(
            f"{i}{name} = sdy.manual_computation({', '.join(values)}) in_shardings=[{', '.join(in_texts)}] "
            f"out_shardings=[{', '.join(out_texts)}] manual_axes={{{axes}}} ({header}) {{\n"
            + "".join(line + "\n" for line in lines)
            + f"{i}  sdy.return {returned[0]} : {tensor(local_out[0])}\n"
            + f"{i}}} : ({', '.join(map(tensor, shapes))}) -> {tensor(outer_out[0])}"
        )
        scope.values.append((name, outer_out[0]))
        if self.groups and not self.depth:
            self.join(scope, [name, *(self.like(scope, outer_out[0]) for _ in range(self.rng.randint(0, 2)))], outer_out[0])

    def join(self, scope: Scope, members: list[str], shape: Shape) -> None:
        """Put values of one shape that are in no group into the first group that may have them."""
        group = next((g for g in range(self.groups) if self.group_shapes.get(g, shape) == shape), None)
        for x in dict.fromkeys(members):
            if group is not None and x not in self.grouped:
                self.grouped[x], self.group_shapes[group] = group, shape
                scope.lines.append(f"{scope.indent}sdy.sharding_group {x} group_id={group} : {tensor(shape)}")

    def manual_sharding(self, shape: Shape, manual: frozenset[str], forbidden: frozenset[str]) -> tuple[str, Shape]:
        """A sharding whose dims begin with manual axes that divide them, all manual axes named, and the local shape."""
        sizes = dict(self.mesh)
        dims: list[list[Axis]] = [[] for _ in shape]
        local = list(shape)
        replicated = []
        for name in sorted(manual):
            places = [d for d, n in enumerate(local) if n % sizes[name] == 0]
            if places and self.rng.random() < 0.7:
                d = self.rng.choice(places)
                dims[d].append((name, 1, sizes[name]))
                local[d] //= sizes[name]
            elif self.rng.random() < 0.8:
                replicated.append((name, 1, sizes[name]))
        for axis in self.axes(manual | forbidden):
            draw = self.rng.random()
            if draw < 0.35 and dims:
                self.rng.choice(dims).append(axis)
            elif draw < 0.45:
                replicated.append(axis)
        texts = []
        for dim in dims:
            held = [*map(self.axis, merged(dim)), *(["?"] if self.rng.random() < 0.7 else [])]
            texts.append("{" + ", ".join(held) + "}")
        order = [n for n, _ in self.mesh]
        replicated.sort(key=lambda axis: (order.index(axis[0]), axis[1]))
        more = f", replicated={{{', '.join(map(self.axis, merged(replicated)))}}}" if replicated else ""
        return f"<@mesh, [{', '.join(texts)}]{more}>", tuple(local)

    def call(self, scope: Scope) -> None:
        """A call of a private function, a new one or one that is called already; with edges of functions or without."""
        x, shape = self.pick(scope)
        known = [name for name, other, _ in self.functions if other == shape]
        if known and self.rng.random() < 0.6:
            name = self.rng.choice(known)
        else:
            name = f"f{len(self.functions)}"
            self.functions.append((name, shape, self.function(name, shape)))
        made = self.emit(scope, f"func.call @{name}({x}) : ({tensor(shape)}) -> {tensor(shape)}", shape)
        if self.function_edges:
            scope.values.remove((made, shape))  # an edge is its operand's only reader
            self.emit(scope, f"sdy.func_data_flow_edge {made} {self.attr(scope, [shape])}: {tensor(shape)}", shape)

    def function(self, name: str, shape: Shape) -> str:
        """A private function of one op."""
        argument = f" {{sdy.sharding = #sdy.sharding{self.sharding(shape, frozenset())}}}" if self.rng.random() < self.density else ""
        op, read, edge = self.rng.choice(("tanh", "negate")), "%p", ""
        if self.function_edges:
            read, edge = "%e", f"    %e = sdy.func_data_flow_edge %p : {tensor(shape)}\n"
        return (
            f"  func.func private @{name}(%p: {tensor(shape)}{argument}) -> {tensor(shape)} {{\n{edge}"
            f"    %q = stablehlo.{op} {read} : {tensor(shape)}\n    return %q : {tensor(shape)}\n  }}"
        )

    # the module

    def module(self) -> str:
        scope = Scope(values=[], indent="    ")
        for _ in range(self.rng.randint(1, 4)):
            shape = self.shape()
            self.arguments.append((f"%arg{len(self.arguments)}", shape))
            scope.values.append(self.arguments[-1])
        for _ in range(self.count):
            self.op(scope)
        share = self.rng.choice((0.1, 0.4, 0.8))  # what is not returned and not read is dead
        returned = [value for value in scope.values[-24:] if self.rng.random() < share] or scope.values[-1:]
        arguments = []
        for name, shape in self.arguments:
            attr = ""
            if self.rng.random() < max(self.density * 2, 0.5):
                attr = f" {{sdy.sharding = #sdy.sharding{self.sharding(shape, frozenset(), self.symbol())}}}"
            arguments.append(f"{name}: {tensor(shape)}{attr}")
        results = []
        for _, shape in returned:
            attr = f" {{sdy.sharding = #sdy.sharding{self.sharding(shape, frozenset(), self.symbol())}}}" if self.rng.random() < 0.3 else ""
            results.append(f"{tensor(shape)}{attr}")
        axes = ", ".join(f'"{name}"={size}' for name, size in self.mesh)
        other = f"\n  sdy.mesh @other = <[{axes}]>" if self.two_meshes and self.rng.random() < 0.5 else ""
        if self.two_meshes and not other:
            ids = list(range(math.prod(n for _, n in self.mesh)))[::-1]
            other = f"\n  sdy.mesh @other = <[{axes}], device_ids={ids}>"
        body = "\n".join(scope.lines)
        types = ", ".join(tensor(shape) for _, shape in returned)
        functions = "".join("\n" + text for _, _, text in self.functions)
        return (
            f"module {{\n  sdy.mesh @mesh = <[{axes}]>{other}\n  sdy.mesh @empty = <[]>\n"
            f"  func.func @main({', '.join(arguments)}) -> ({', '.join(results)}) {{\n{body}\n"
            f"    return {', '.join(name for name, _ in returned)} : {types}\n  }}{functions}\n}}\n"
        )


def tensor(shape: Shape) -> str:
    """The type of a tensor of floats."""
    return f"tensor<{''.join(f'{n}x' for n in shape)}f32>"


def merged(axes: list[Axis]) -> list[Axis]:
    """The axes with neighbouring parts that could be one made one."""
    found: list[Axis] = []
    for axis in axes:
        if found and found[-1][0] == axis[0] and found[-1][1] * found[-1][2] == axis[1]:
            found[-1] = (axis[0], found[-1][1], found[-1][2] * axis[2])
        else:
            found.append(axis)
    return found
