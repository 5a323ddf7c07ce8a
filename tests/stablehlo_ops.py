"""Random StableHLO ops as text, all valid: what the rule tests and the random modules are made of.

A ``Body`` is a function body or a region being written. An op's generator takes operands from the values that are in sight, or
asks for new function arguments, and adds lines of text.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Val:
    """A value in the text."""

    name: str
    shape: Shape
    dtype: str

    @property
    def type(self) -> str:
        return tensor(self.shape, self.dtype)


def tensor(shape: Sequence[int], dtype: str = "f32") -> str:
    return f"tensor<{'x'.join([*map(str, shape), dtype])}>"


@dataclass
class Names:
    """Fresh names and the arguments of the function that all bodies inside it share."""

    prefix: str = "%v"
    count: int = 0
    arguments: list[Val] = field(default_factory=list)

    def fresh(self) -> str:
        self.count += 1
        return f"{self.prefix}{self.count}"


class Body:
    """A function body or region.

    Attributes:
        values: what ops may read.
        source: makes a value of a type that is not in sight, or None; without it, values come as new function arguments.
        annotate: attribute text (``sdy.sharding = ...``) for an op's results, or nothing.
        reuse: how likely a value in sight is read rather than a new one.
    """

    def __init__(
        self,
        rng: random.Random,
        names: Names | None = None,
        *,
        values: Sequence[Val] = (),
        source: Callable[[Shape, str], Val | None] | None = None,
        annotate: Callable[[Sequence[Val]], str] | None = None,
        reuse: float = 0.75,
        sizes: Sequence[int] = (1, 2, 3, 4, 6, 8, 12, 16),
    ) -> None:
        self.rng = rng
        self.names = names or Names()
        self.values: list[Val] = list(values)
        self.lines: list[str] = []
        self.source = source
        self.annotate = annotate
        self.reuse = reuse
        self.sizes = sizes

    def size(self) -> int:
        return self.rng.choice(self.sizes)

    def shape(self, low: int = 0, high: int = 4) -> Shape:
        return tuple(self.size() for _ in range(self.rng.randint(low, high)))

    def need(self, shape: Sequence[int], dtype: str = "f32", *, fresh: bool = False) -> Val:
        """A value of this type: one in sight, or a new argument (a constant where the region sees no arguments)."""
        shape = tuple(shape)
        known = [v for v in self.values if v.shape == shape and v.dtype == dtype]
        if known and not fresh and self.rng.random() < self.reuse:
            return self.rng.choice(known)
        if self.source is not None:
            found = self.source(shape, dtype)
            if found is None:
                return self.constant(shape, dtype)
            self.values.append(found)
            return found
        made = Val(f"%arg{len(self.names.arguments)}", shape, dtype)
        self.names.arguments.append(made)
        self.values.append(made)
        return made

    def pick(self, low: int = 0, high: int = 4, dtypes: Sequence[str] = ("f32",)) -> Val:
        """A value of any shape with so many dims."""
        known = [v for v in self.values if low <= len(v.shape) <= high and v.dtype in dtypes]
        if known and self.rng.random() < self.reuse:
            recent = known[-8:]
            return self.rng.choice(recent if self.rng.random() < 0.7 else known)
        return self.need(self.shape(low, high), self.rng.choice(list(dtypes)), fresh=True)

    def constant(self, shape: Sequence[int], dtype: str = "f32", value: str | None = None) -> Val:
        literal = value or {"f32": "1.0", "i1": "true", "complex<f32>": "(1.0, 0.0)"}.get(dtype, "1")
        made = Val(self.names.fresh(), tuple(shape), dtype)
        self.lines.append(f"{made.name} = stablehlo.constant dense<{literal}> : {made.type}")
        self.values.append(made)
        return made

    def op(
        self,
        name: str,
        operands: Sequence[Val],
        results: Sequence[tuple[Sequence[int], str]],
        properties: str = "",
        *,
        region: str = "",
    ) -> list[Val]:
        """Add an op in the generic form; region text includes its parentheses."""
        base = self.names.fresh()
        made = [Val(base if len(results) == 1 else f"{base}#{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(results)]
        extra = self.annotate(made) if self.annotate else ""
        left = "" if not results else f"{base}{f':{len(results)}' if len(results) > 1 else ''} = "
        self.lines.append(
            f'{left}"{name}"({", ".join(v.name for v in operands)})'
            f"{f' <{{{properties}}}>' if properties else ''}{f' {region}' if region else ''}{f' {{{extra}}}' if extra else ''}"
            f" : ({', '.join(v.type for v in operands)}) -> ({', '.join(v.type for v in made)})"
        )
        self.values.extend(made)
        return made


def array(values: Sequence[int]) -> str:
    return "array<i64" + (": " if values else "") + ", ".join(map(str, values)) + ">"


def flags(values: Sequence[bool]) -> str:
    return "array<i1: " + ", ".join("true" if v else "false" for v in values) + ">"


def pairs(values: Sequence[tuple[int, int]]) -> str:
    return f"dense<[{', '.join(f'[{a}, {b}]' for a, b in values)}]> : tensor<{len(values)}x2xi64>"


def fold(kind: str, dtype: str, names: Names, count: int = 1) -> str:
    """A region that reduces ``count`` pairs of scalars with one op each."""
    scalar = tensor((), dtype)
    left = [names.fresh() for _ in range(count)]
    right = [names.fresh() for _ in range(count)]
    done = [names.fresh() for _ in range(count)]
    arguments = ", ".join(f"{v}: {scalar}" for v in (*left, *right))
    body = "\n".join(f"{r} = stablehlo.{kind} {a}, {b} : {scalar}" for a, b, r in zip(left, right, done, strict=True))
    return f"({{\n^bb0({arguments}):\n{body}\nstablehlo.return {', '.join(done)} : {', '.join([scalar] * count)}\n}})"


def keep_second(dtype: str, names: Names) -> str:
    """A region that is no reduction: it returns its second argument."""
    scalar = tensor((), dtype)
    a, b = names.fresh(), names.fresh()
    return f"({{\n^bb0({a}: {scalar}, {b}: {scalar}):\nstablehlo.return {b} : {scalar}\n}})"


FLOAT_UNARY = [
    "abs", "cbrt", "ceil", "cosine", "exponential", "exponential_minus_one", "floor", "log", "log_plus_one", "logistic", "negate",
    "round_nearest_afz", "round_nearest_even", "rsqrt", "sign", "sine", "sqrt", "tan", "tanh",
]  # fmt: skip
FLOAT_BINARY = ["add", "atan2", "divide", "maximum", "minimum", "multiply", "power", "remainder", "subtract"]
INT_UNARY = ["count_leading_zeros", "not", "popcnt"]
INT_BINARY = ["and", "or", "shift_left", "shift_right_arithmetic", "shift_right_logical", "xor"]


def unary(g: Body) -> None:
    x = g.pick()
    g.op(f"stablehlo.{g.rng.choice(FLOAT_UNARY)}", [x], [(x.shape, x.dtype)])


def binary(g: Body) -> None:
    x = g.pick()
    y = x if g.rng.random() < 0.1 else g.need(x.shape)
    g.op(f"stablehlo.{g.rng.choice(FLOAT_BINARY)}", g.rng.sample([x, y], 2), [(x.shape, "f32")])


def integer(g: Body) -> None:
    x = g.pick(dtypes=("i32",))
    if g.rng.random() < 0.3:
        g.op(f"stablehlo.{g.rng.choice(INT_UNARY)}", [x], [(x.shape, "i32")])
    else:
        g.op(f"stablehlo.{g.rng.choice(INT_BINARY)}", [x, g.need(x.shape, "i32")], [(x.shape, "i32")])


def compare(g: Body) -> None:
    x = g.pick()
    g.op("stablehlo.compare", [x, g.need(x.shape)], [(x.shape, "i1")], "comparison_direction = #stablehlo<comparison_direction LT>")


def is_finite(g: Body) -> None:
    x = g.pick()
    g.op("stablehlo.is_finite", [x], [(x.shape, "i1")])


def complex_(g: Body) -> None:
    x = g.pick()
    made = g.op("stablehlo.complex", [x, g.need(x.shape)], [(x.shape, "complex<f32>")])
    g.op(f"stablehlo.{g.rng.choice(['real', 'imag'])}", made, [(x.shape, "f32")])


def convert(g: Body) -> None:
    x = g.pick(dtypes=("f32", "i32", "i1"))
    g.op("stablehlo.convert", [x], [(x.shape, g.rng.choice(["f32", "i32"]))])


def reduce_precision(g: Body) -> None:
    x = g.pick()
    g.op("stablehlo.reduce_precision", [x], [(x.shape, "f32")], "exponent_bits = 5 : i32, mantissa_bits = 2 : i32")


def select(g: Body) -> None:
    x = g.pick()
    shape = () if g.rng.random() < 0.3 else x.shape
    g.op("stablehlo.select", [g.need(shape, "i1"), x, g.need(x.shape)], [(x.shape, "f32")])


def clamp(g: Body) -> None:
    x = g.pick()
    scalar = g.rng.random() < 0.4
    low, high = (g.need(() if scalar else x.shape) for _ in range(2))
    g.op("stablehlo.clamp", [low, x, high], [(x.shape, "f32")])


def map_(g: Body) -> None:
    x = g.pick(1, 3)
    a = g.names.fresh()
    region = f"({{\n^bb0({a}: tensor<f32>):\nstablehlo.return {a} : tensor<f32>\n}})"
    g.op("stablehlo.map", [x], [(x.shape, "f32")], f"dimensions = {array(range(len(x.shape)))}", region=region)


def reverse(g: Body) -> None:
    x = g.pick(1)
    dims = sorted(g.rng.sample(range(len(x.shape)), g.rng.randint(0, len(x.shape))))
    g.op("stablehlo.reverse", [x], [(x.shape, "f32")], f"dimensions = {array(dims)}")


def sort(g: Body) -> None:
    x = g.pick(1)
    count = g.rng.randint(1, 2)
    operands = [x, *(g.need(x.shape) for _ in range(count - 1))]
    scalars = [g.names.fresh() for _ in range(2 * count)]
    done = g.names.fresh()
    region = (
        f"({{\n^bb0({', '.join(f'{s}: tensor<f32>' for s in scalars)}):\n{done} = stablehlo.compare LT, {scalars[0]}, {scalars[1]} : "
        f"(tensor<f32>, tensor<f32>) -> tensor<i1>\nstablehlo.return {done} : tensor<i1>\n}})"
    )
    dim = g.rng.randrange(len(x.shape))
    g.op("stablehlo.sort", operands, [(x.shape, "f32")] * count, f"dimension = {dim} : i64, is_stable = false", region=region)


def cholesky(g: Body) -> None:
    n = g.size()
    x = g.need((*g.shape(0, 2), n, n))
    g.op("stablehlo.cholesky", [x], [(x.shape, "f32")], "lower = true")


def fft(g: Body) -> None:
    kind = g.rng.choice(["FFT", "IFFT", "RFFT", "IRFFT"])
    count = g.rng.randint(1, 3)
    shape = (*g.shape(0, 2), *(g.size() for _ in range(count)))
    length = list(shape[-count:])
    source = shape
    result = shape
    if kind == "RFFT":
        result = (*shape[:-1], shape[-1] // 2 + 1)
    if kind == "IRFFT":
        source = (*shape[:-1], shape[-1] // 2 + 1)
    x = g.need(source, "f32" if kind == "RFFT" else "complex<f32>")
    made = "f32" if kind == "IRFFT" else "complex<f32>"
    g.op("stablehlo.fft", [x], [(result, made)], f"fft_length = {array(length)}, fft_type = #stablehlo<fft_type {kind}>")


def transpose(g: Body) -> None:
    x = g.pick(1)
    order = g.rng.sample(range(len(x.shape)), len(x.shape))
    g.op("stablehlo.transpose", [x], [(tuple(x.shape[d] for d in order), x.dtype)], f"permutation = {array(order)}")


def bitcast_convert(g: Body) -> None:
    way = g.rng.randrange(3)
    if way == 0:
        x = g.pick()
        g.op("stablehlo.bitcast_convert", [x], [(x.shape, "i32")])
    elif way == 1:
        x = g.pick(0, 3)
        g.op("stablehlo.bitcast_convert", [x], [((*x.shape, 4), "ui8")])
    else:
        x = g.need((*g.shape(0, 3), 4), "ui8")
        g.op("stablehlo.bitcast_convert", [x], [(x.shape[:-1], "f32")])


def broadcast_in_dim(g: Body) -> None:
    x = g.pick(0, 3)
    rank = g.rng.randint(len(x.shape), 4)
    dims = g.rng.sample(range(rank), len(x.shape))
    if g.rng.random() < 0.7:
        dims = sorted(dims)
    shape = [g.size() for _ in range(rank)]
    for d, out in enumerate(dims):
        shape[out] = x.shape[d] if x.shape[d] != 1 or g.rng.random() < 0.5 else g.size()
    g.op("stablehlo.broadcast_in_dim", [x], [(shape, x.dtype)], f"broadcast_dimensions = {array(dims)}")


def _slice(g: Body, x: Val) -> Val:
    start, limit, stride = [], [], []
    for n in x.shape:
        if g.rng.random() < 0.5:
            start.append(0), limit.append(n), stride.append(1)
        else:
            a = g.rng.randrange(n)
            start.append(a), limit.append(g.rng.randint(a + 1, n)), stride.append(g.rng.choice([1, 1, 2]))
    shape = [-(-(b - a) // s) for a, b, s in zip(start, limit, stride, strict=True)]
    text = f"start_indices = {array(start)}, limit_indices = {array(limit)}, strides = {array(stride)}"
    return g.op("stablehlo.slice", [x], [(shape, x.dtype)], text)[0]


def slice_(g: Body) -> None:
    _slice(g, g.pick(1))


def pad(g: Body) -> None:
    x = g.pick(1)
    low, high, interior, shape = [], [], [], []
    for n in x.shape:
        if g.rng.random() < 0.5:
            a, b, c = 0, 0, 0
        else:
            a, b, c = g.rng.randint(-1, 2), g.rng.randint(0, 2), g.rng.randint(0, 1)
        size = n + a + b + max(n - 1, 0) * c
        if size < 1:
            a, b, c, size = 0, 0, 0, n
        low.append(a), high.append(b), interior.append(c), shape.append(size)
    text = f"edge_padding_low = {array(low)}, edge_padding_high = {array(high)}, interior_padding = {array(interior)}"
    g.op("stablehlo.pad", [x, g.need(())], [(shape, "f32")], text)


def dynamic_slice(g: Body) -> None:
    x = g.pick(1)
    sizes = [n if g.rng.random() < 0.5 else g.rng.randint(1, n) for n in x.shape]
    starts = [g.need((), "i32") for _ in x.shape]
    g.op("stablehlo.dynamic_slice", [x, *starts], [(sizes, x.dtype)], f"slice_sizes = {array(sizes)}")


def dynamic_update_slice(g: Body) -> None:
    x = g.pick(1)
    update = g.need([n if g.rng.random() < 0.5 else g.rng.randint(1, n) for n in x.shape], x.dtype)
    known = g.rng.random() < 0.4
    starts = [g.constant((), "i32") if known else g.need((), "i32") for _ in x.shape]
    g.op("stablehlo.dynamic_update_slice", [x, update, *starts], [(x.shape, x.dtype)])


def concatenate(g: Body) -> None:
    x = g.pick(1)
    way = g.rng.randrange(4)
    count = g.rng.randint(1, 3)
    if way == 0:  # parts of one tensor
        parts = [_slice_along(g, x) if g.rng.random() < 0.7 else x for _ in range(count)]
        dims = [d for d in range(len(x.shape)) if all(p.shape[:d] + p.shape[d + 1 :] == x.shape[:d] + x.shape[d + 1 :] for p in parts)]
        if not dims:
            return
        dim = g.rng.choice(dims)
    else:
        dim = g.rng.randrange(len(x.shape))
        parts = [x, *(g.need((*x.shape[:dim], g.size(), *x.shape[dim + 1 :])) for _ in range(count - 1))]
        if way == 1:
            parts = [_slice_along(g, p, dim) for p in parts]
    shape = list(parts[0].shape)
    shape[dim] = sum(p.shape[dim] for p in parts)
    g.op("stablehlo.concatenate", parts, [(shape, x.dtype)], f"dimension = {dim} : i64")


def _slice_along(g: Body, x: Val, dim: int | None = None) -> Val:
    dim = g.rng.randrange(len(x.shape)) if dim is None else dim
    start, limit = [0] * len(x.shape), list(x.shape)
    start[dim] = g.rng.randrange(x.shape[dim])
    limit[dim] = g.rng.randint(start[dim] + 1, x.shape[dim])
    shape = [b - a for a, b in zip(start, limit, strict=True)]
    text = f"start_indices = {array(start)}, limit_indices = {array(limit)}, strides = {array([1] * len(shape))}"
    return g.op("stablehlo.slice", [x], [(shape, x.dtype)], text)[0]


def reduce(g: Body) -> None:
    x = g.pick(0)
    count = g.rng.choice([1, 1, 1, 2])
    inputs = [x, *(g.need(x.shape) for _ in range(count - 1))]
    dims = sorted(g.rng.sample(range(len(x.shape)), g.rng.randint(0, len(x.shape))))
    kept = [n for d, n in enumerate(x.shape) if d not in dims]
    kind = g.rng.choice(["add", "maximum", "minimum", "multiply"])
    inits = [g.need(()) for _ in range(count)]
    region = fold(kind, "f32", g.names, count)
    g.op("stablehlo.reduce", [*inputs, *inits], [(kept, "f32")] * count, f"dimensions = {array(dims)}", region=region)


def _windows(g: Body, shape: Shape, *, dilate: bool) -> tuple[list[int], list[int], list[tuple[int, int]], list[int], list[int], list[int]]:
    window, stride, padding, base, dilation, out = [], [], [], [], [], []
    for n in shape:
        trivial = g.rng.random() < 0.4
        for _ in range(20):
            w = 1 if trivial else g.rng.randint(1, min(n, 4))
            s = 1 if trivial else g.rng.randint(1, 3)
            p = (0, 0) if trivial or g.rng.random() < 0.5 else (g.rng.randint(0, 2), g.rng.randint(0, 2))
            b = g.rng.choice([1, 1, 2]) if dilate and not trivial else 1
            d = g.rng.choice([1, 1, 2]) if dilate and not trivial else 1
            size = ((n - 1) * b + 1 + sum(p) - ((w - 1) * d + 1)) // s + 1
            if size >= 1:
                break
        else:
            w, s, p, b, d, size = 1, 1, (0, 0), 1, 1, n
        window.append(w), stride.append(s), padding.append(p), base.append(b), dilation.append(d), out.append(size)
    return window, stride, padding, base, dilation, out


def reduce_window(g: Body) -> None:
    x = g.pick(1)
    count = g.rng.choice([1, 1, 2])
    window, stride, padding, base, dilation, out = _windows(g, x.shape, dilate=g.rng.random() < 0.3)
    text = [f"window_dimensions = {array(window)}"]
    if any(s != 1 for s in stride) or g.rng.random() < 0.5:
        text.append(f"window_strides = {array(stride)}")
    if any(b != 1 for b in base):
        text.append(f"base_dilations = {array(base)}")
    if any(d != 1 for d in dilation):
        text.append(f"window_dilations = {array(dilation)}")
    if any(p != (0, 0) for p in padding) or g.rng.random() < 0.5:
        text.append(f"padding = {pairs(padding)}")
    inputs = [x, *(g.need(x.shape) for _ in range(count - 1))]
    region = fold("add", "f32", g.names, count)
    g.op("stablehlo.reduce_window", [*inputs, *(g.need(()) for _ in inputs)], [(out, "f32")] * count, ", ".join(text), region=region)


def select_and_scatter(g: Body) -> None:
    x = g.pick(1)
    window, stride, padding, _, _, out = _windows(g, x.shape, dilate=False)
    a, b, done = (g.names.fresh() for _ in range(3))
    first = (
        f"({{\n^bb0({a}: tensor<f32>, {b}: tensor<f32>):\n{done} = stablehlo.compare GE, {a}, {b} : (tensor<f32>, tensor<f32>) -> "
        f"tensor<i1>\nstablehlo.return {done} : tensor<i1>\n}}"
    )
    text = f"window_dimensions = {array(window)}, window_strides = {array(stride)}, padding = {pairs(padding)}"
    region = first + ", " + fold("add", "f32", g.names)[1:]
    g.op("stablehlo.select_and_scatter", [x, g.need(out), g.need(())], [(x.shape, "f32")], text, region=region)


GROUPS = "replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>"


def all_gather(g: Body) -> None:
    x = g.pick(1)
    count = g.rng.choice([1, 1, 2])
    dim = g.rng.randrange(len(x.shape))
    shape = [2 * n if d == dim else n for d, n in enumerate(x.shape)]
    operands = [x, *(g.need(x.shape) for _ in range(count - 1))]
    g.op("stablehlo.all_gather", operands, [(shape, "f32")] * count, f"all_gather_dim = {dim} : i64, {GROUPS}")


def reduce_scatter(g: Body) -> None:
    shape = list(g.shape(1))
    dim = g.rng.randrange(len(shape))
    x = g.need([2 * n if d == dim else n for d, n in enumerate(shape)])
    g.op(
        "stablehlo.reduce_scatter", [x], [(shape, "f32")], f"scatter_dimension = {dim} : i64, {GROUPS}", region=fold("add", "f32", g.names)
    )


def all_to_all(g: Body) -> None:
    shape = list(g.shape(1))
    split, concat = (g.rng.randrange(len(shape)) for _ in range(2))
    source = [2 * n if d == split else n for d, n in enumerate(shape)]
    x = g.need(source)
    made = list(source)
    made[split] //= 2
    made[concat] *= 2
    text = f"split_dimension = {split} : i64, concat_dimension = {concat} : i64, split_count = 2 : i64, {GROUPS}"
    g.op("stablehlo.all_to_all", [x], [(made, "f32")], text)


def all_reduce(g: Body) -> None:
    x = g.pick()
    g.op("stablehlo.all_reduce", [x], [(x.shape, "f32")], GROUPS, region=fold("add", "f32", g.names))


def collective(g: Body) -> None:
    x = g.pick()
    name, text = g.rng.choice(
        [
            ("collective_permute", "source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>"),
            ("collective_broadcast", GROUPS),
            ("cross-replica-sum", GROUPS),
        ]
    )
    g.op(f"stablehlo.{name}", [x], [(x.shape, "f32")], text)


def batch_norm(g: Body) -> None:
    x = g.pick(1)
    feature = g.rng.randrange(len(x.shape))
    channel = (x.shape[feature],)
    text = f"epsilon = 0.1 : f32, feature_index = {feature} : i64"
    way = g.rng.randrange(4)
    if way == 0:
        results = [(x.shape, "f32"), (channel, "f32"), (channel, "f32")]
        g.op("stablehlo.batch_norm_training", [x, g.need(channel), g.need(channel)], results, text)
    elif way == 1:
        results = [(x.shape, "f32"), (channel, "f32"), (channel, "f32")]
        operands = [x, g.need(channel), g.need(channel), g.need(channel), g.need(x.shape)]
        g.op("stablehlo.batch_norm_grad", operands, results, text)
    else:
        g.op("stablehlo.batch_norm_inference", [x, *(g.need(channel) for _ in range(4))], [(x.shape, "f32")], text)


def rng_bit_generator(g: Body) -> None:
    state = g.need((2,), "ui64")
    if g.rng.random() < 0.4:
        half = (2,)
        combine = g.op(
            "stablehlo.custom_call", [g.need(half, "ui32"), g.need(half, "ui32")], [((2,), "ui64")], 'call_target_name = "X64Combine"'
        )
        state = combine[0]
    shape = g.shape()
    text = "rng_algorithm = #stablehlo<rng_algorithm DEFAULT>"
    g.op("stablehlo.rng_bit_generator", [state], [((2,), "ui64"), (shape, "ui32")], text)


def rng(g: Body) -> None:
    shape = g.shape(1)
    size = g.constant((len(shape),), "i64", str(list(shape)))
    g.op("stablehlo.rng", [g.need(()), g.need(()), size], [(shape, "f32")], "rng_distribution = #stablehlo<rng_distribution UNIFORM>")


def iota(g: Body) -> None:
    shape = g.shape(1)
    g.op("stablehlo.iota", [], [(shape, g.rng.choice(["f32", "i32"]))], f"iota_dimension = {g.rng.randrange(len(shape))} : i64")


def constant(g: Body) -> None:
    g.constant(g.shape())


def dot_general(g: Body) -> None:
    x = g.pick(1)
    rank = len(x.shape)
    order = g.rng.sample(range(rank), rank)
    batches = g.rng.randint(0, min(2, rank))
    summed = g.rng.randint(0, rank - batches)
    batch, contract = order[:batches], order[batches : batches + summed]
    free = g.rng.randint(0, 2)
    slots = [("b", d) for d in batch] + [("c", d) for d in contract] + [("f", g.size()) for _ in range(free)]
    g.rng.shuffle(slots)
    shape = [x.shape[d] if kind != "f" else d for kind, d in slots]
    y = g.need(shape)
    rb = [slots.index(("b", d)) for d in batch]
    rc = [slots.index(("c", d)) for d in contract]
    bound = {*batch, *contract}
    result = [x.shape[d] for d in batch] + [n for d, n in enumerate(x.shape) if d not in bound]
    result += [n for d, n in enumerate(shape) if d not in {*rb, *rc}]
    text = (
        f"dot_dimension_numbers = #stablehlo.dot<lhs_batching_dimensions = {batch}, rhs_batching_dimensions = {rb}, "
        f"lhs_contracting_dimensions = {contract}, rhs_contracting_dimensions = {rc}>"
    )
    g.op("stablehlo.dot_general", [x, y], [(result, "f32")], text)


def dot(g: Body) -> None:
    x = g.pick(1, 2)
    y = g.need((x.shape[-1], g.size()) if g.rng.random() < 0.6 else (x.shape[-1],))
    g.op("stablehlo.dot", [x, y], [((*x.shape[:-1], *y.shape[1:]), "f32")])


def convolution(g: Body) -> None:
    spatial = g.rng.randint(0, 2)
    feature_groups = batch_groups = 1
    if g.rng.random() < 0.3:
        feature_groups = g.rng.choice([2, 3, 4])
    elif g.rng.random() < 0.4:
        batch_groups = g.rng.choice([2, 3, 4])
    per_in, per_out, batch = (g.rng.choice([1, 2, 3, 4, 8]) for _ in range(3))
    lhs = {"b": batch * batch_groups, "f": per_in * feature_groups}
    kernel = {"i": per_in, "o": per_out * feature_groups * batch_groups}
    out = {"b": batch, "f": per_out * feature_groups * batch_groups}
    sizes = tuple(g.rng.choice([1, 2, 4, 6, 8, 12, 16]) for _ in range(spatial))
    window, stride, padding, base, dilation, made = _windows(g, sizes, dilate=g.rng.random() < 0.3)
    if g.rng.random() < 0.3:  # a kernel as large as the image
        window, stride, padding, base, dilation = list(sizes), [1] * spatial, [(0, 0)] * spatial, [1] * spatial, [1] * spatial
        made = [1] * spatial
    for d in range(spatial):
        lhs[str(d)], kernel[str(d)], out[str(d)] = sizes[d], window[d], made[d]
    orders = [g.rng.sample(list(sizes_), len(sizes_)) for sizes_ in (lhs, kernel, out)]
    x = g.need([lhs[k] for k in orders[0]])
    w = g.need([kernel[k] for k in orders[1]])
    numbers = f"[{', '.join(orders[0])}]x[{', '.join(orders[1])}]->[{', '.join(orders[2])}]"
    text = (
        f"dimension_numbers = #stablehlo.conv<{numbers}>, feature_group_count = {feature_groups} : i64, "
        f"batch_group_count = {batch_groups} : i64"
    )
    if spatial:
        text += f", window_strides = {array(stride)}, padding = {pairs(padding)}"
        text += f", lhs_dilation = {array(base)}, rhs_dilation = {array(dilation)}"
    g.op("stablehlo.convolution", [x, w], [([out[k] for k in orders[2]], "f32")], text)


def triangular_solve(g: Body) -> None:
    n, m = g.size(), g.size()
    batch = g.shape(0, 2)
    left = g.rng.random() < 0.5
    a, b = g.need((*batch, n, n)), g.need((*batch, *((n, m) if left else (m, n))))
    transpose_a = g.rng.choice(["NO_TRANSPOSE", "TRANSPOSE", "ADJOINT"])
    text = f"left_side = {str(left).lower()}, lower = true, transpose_a = #stablehlo<transpose {transpose_a}>, unit_diagonal = false"
    g.op("stablehlo.triangular_solve", [a, b], [(b.shape, "f32")], text)


def reshape(g: Body) -> None:
    x = g.pick(0, 4, ("f32", "i32"))
    total = math.prod(x.shape)
    g.op("stablehlo.reshape", [x], [(_factored(g, total), x.dtype)])


def _factored(g: Body, total: int) -> list[int]:
    """A random shape with so many elements."""
    shape = []
    while total > 1 and len(shape) < 4:
        size = g.rng.choice([d for d in range(1, total + 1) if total % d == 0 and (d < 65 or d == total)])
        shape.append(size)
        total //= size
    if total > 1:
        shape.append(total)
    while g.rng.random() < 0.2:
        shape.insert(g.rng.randint(0, len(shape)), 1)
    return shape


def _gather_parts(g: Body) -> dict[str, list[int]]:
    """Shapes and dimension numbers that gather and scatter share."""
    source = list(g.shape(1, 4))
    rank = len(source)
    order = g.rng.sample(range(rank), rank)
    batches = g.rng.randint(0, min(2, rank - 1)) if g.rng.random() < 0.4 else 0
    batching = sorted(order[:batches])
    rest = order[batches:]
    collapsed = sorted(g.rng.sample(rest, g.rng.randint(0, len(rest))))
    windows = [d for d in range(rank) if d not in collapsed and d not in batching]
    index_map = g.rng.sample(rest, g.rng.randint(1, len(rest)))
    implicit = g.rng.randint(0, 2)
    slots: list[tuple[str, int]] = [("batch", d) for d in batching] + [("free", g.size()) for _ in range(implicit)]
    g.rng.shuffle(slots)
    vector = g.rng.randint(0, len(slots))
    if len(index_map) == 1 and g.rng.random() < 0.4:
        vector = len(slots)  # no dim of its own
        indices = [source[d] if kind == "batch" else d for kind, d in slots]
        places = list(range(len(slots)))
    else:
        sizes = [source[d] if kind == "batch" else d for kind, d in slots]
        indices = [*sizes[:vector], len(index_map), *sizes[vector:]]
        places = [i if i < vector else i + 1 for i in range(len(slots))]
    indices_batching = [places[slots.index(("batch", d))] for d in batching]
    sizes = [1 if d in collapsed or d in batching else (n if g.rng.random() < 0.5 else g.rng.randint(1, n)) for d, n in enumerate(source)]
    count = len(slots) + len(windows)
    offset = sorted(g.rng.sample(range(count), len(windows)))
    batch_sizes = iter(source[d] if kind == "batch" else d for kind, d in slots)
    window_sizes = iter(sizes[d] for d in windows)
    slices = [next(window_sizes) if d in offset else next(batch_sizes) for d in range(count)]
    return {
        "source": source, "indices": indices, "slices": slices, "sizes": sizes, "offset": offset, "collapsed": collapsed,
        "batching": batching, "indices_batching": indices_batching, "map": index_map, "vector": [vector],
    }  # fmt: skip


def gather(g: Body) -> None:
    p = _gather_parts(g)
    numbers = (
        f"#stablehlo.gather<offset_dims = {p['offset']}, collapsed_slice_dims = {p['collapsed']}, operand_batching_dims = {p['batching']}, "
        f"start_indices_batching_dims = {p['indices_batching']}, start_index_map = {p['map']}, index_vector_dim = {p['vector'][0]}>"
    )
    text = f"dimension_numbers = {numbers}, slice_sizes = {array(p['sizes'])}, indices_are_sorted = false"
    g.op("stablehlo.gather", [g.need(p["source"]), g.need(p["indices"], "i32")], [(p["slices"], "f32")], text)


def scatter(g: Body) -> None:
    p = _gather_parts(g)
    numbers = (
        f"#stablehlo.scatter<update_window_dims = {p['offset']}, inserted_window_dims = {p['collapsed']}, "
        f"input_batching_dims = {p['batching']}, scatter_indices_batching_dims = {p['indices_batching']}, "
        f"scatter_dims_to_operand_dims = {p['map']}, index_vector_dim = {p['vector'][0]}>"
    )
    count = g.rng.choice([1, 1, 1, 2])
    dtype = g.rng.choice(["f32", "f32", "i32", "i1"])
    more = ["divide"] if dtype == "f32" else ["and", "or", "xor"]
    kind = g.rng.choice(["add", "maximum", "minimum", "multiply", *([] if dtype == "i1" else ["subtract"]), *more])
    region = keep_second(dtype, g.names) if count == 1 and g.rng.random() < 0.3 else fold(kind, dtype, g.names, count)
    inputs = [g.need(p["source"], dtype) for _ in range(count)]
    updates = [g.need(p["slices"], dtype) for _ in range(count)]
    text = f"scatter_dimension_numbers = {numbers}, indices_are_sorted = false, unique_indices = false"
    g.op("stablehlo.scatter", [*inputs, g.need(p["indices"], "i32"), *updates], [(p["source"], dtype)] * count, text, region=region)


POINTWISE_CALLS = [
    "annotate_device_placement", "Cholesky", "CompactWyHelper", "InspectSharding", "InvertDiagBlocksLowerTriangular",
    "InvertDiagBlocksUpperTriangular", "LayoutConstraint", "mhlo.erf", "MoveToDevice", "MoveToHost", "X64SplitHigh", "X64SplitLow",
    "xla.megascale.provide_metadata", "X64Combine", "_SPMDInternalOp_MultiPad", "_SPMDInternalOp_MultiRotate",
    "_SPMDInternalOp_MultiSlice", "_SPMDInternalOp_RotateRight", "_SPMDInternalOp_Wrap",
]  # fmt: skip
SILENT_CALLS = ["sdy_testonly", "tpu_custom_call", "xla_python_cpu_callback", "xla_ffi_python_gpu_callback", "xla.debug.Log", "Foo"]


def custom_call(g: Body) -> None:
    def call(target: str, operands: Sequence[Val], results: Sequence[tuple[Sequence[int], str]]) -> None:
        g.op("stablehlo.custom_call", operands, results, f'call_target_name = "{target}"')

    way = g.rng.randrange(7)
    if way < 2:
        x = g.pick()
        targets = POINTWISE_CALLS if way == 0 else SILENT_CALLS
        operands = [x] if g.rng.random() < 0.7 else [x, g.need(x.shape)]
        call(g.rng.choice(targets), operands, [(x.shape, "f32")])
    elif way == 2:
        n = g.size()
        batch = g.shape(0, 2)
        call("Eigh", [g.need((*batch, n, n))], [((*batch, n, n), "f32"), ((*batch, n), "f32")])
    elif way == 3:
        batch, m, n = g.shape(0, 2), g.size(), g.size()
        target = g.rng.choice(["Qr", "QrDecompositionBlock"])
        call(target, [g.need((*batch, m, n))], [((*batch, m, n), "f32"), ((*batch, min(m, n)), "f32")])
    elif way == 4:
        batch, m, n = g.shape(0, 2), g.size(), g.size()
        call("ProductOfElementaryHouseholderReflectors", [g.need((*batch, m, n)), g.need((*batch, n))], [((*batch, m, n), "f32")])
    elif way == 5:
        x = g.pick(1)
        dim = g.rng.randrange(len(x.shape))
        shape = [g.rng.randint(1, n) if d == dim else n for d, n in enumerate(x.shape)]
        call("mhlo.topk", [x], [(shape, "f32"), (shape, "i32")])
    else:
        x = g.pick(1)
        dim = g.rng.randrange(len(x.shape))
        shape = [g.rng.randint(1, n) if d == dim else n for d, n in enumerate(x.shape)]
        operands = [x, g.need(x.shape, "i32"), g.need(()), g.need((), "i32")]
        call(g.rng.choice(["ApproxTopK", "PartialReduce"]), operands, [(shape, "f32"), (shape, "i32")])


OPS: dict[str, Callable[[Body], None]] = {
    f.__name__.rstrip("_"): f
    for f in (
        unary, binary, integer, compare, is_finite, complex_, convert, reduce_precision, select, clamp, map_, reverse, sort, cholesky, fft,
        transpose, bitcast_convert, broadcast_in_dim, slice_, pad, dynamic_slice, dynamic_update_slice, concatenate, reduce, reduce_window,
        select_and_scatter, all_gather, reduce_scatter, all_to_all, all_reduce, collective, batch_norm, rng_bit_generator, rng, iota,
        constant, dot_general, dot, convolution, triangular_solve, reshape, gather, scatter, custom_call,
    )
}  # fmt: skip
"""Generators by name; each adds one op, sometimes with a few more that feed it."""


def module_of(body: Body) -> str:
    """A module whose one function has this body and returns nothing."""
    arguments = ", ".join(f"{v.name}: {v.type}" for v in body.names.arguments)
    return f"func.func @main({arguments}) {{\n" + "\n".join(body.lines) + "\nreturn\n}\n"
