"""Random StableHLO ops as text, all valid: what the rule tests and the random modules are made of.

A generator takes a ``Body`` and adds one op to it, sometimes with a few more that feed it.
"""

from __future__ import annotations

from collections.abc import Callable

from stablehlo_products import (
    convolution,
    custom_call,
    dot,
    dot_general,
    gather,
    reshape,
    scatter,
    triangular_solve,
    windows,
)
from stablehlo_text import Body, Val, array, fold, pairs

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


def reduce_window(g: Body) -> None:
    x = g.pick(1)
    count = g.rng.choice([1, 1, 2])
    window, stride, padding, base, dilation, out = windows(g, x.shape, dilate=g.rng.random() < 0.3)
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
    window, stride, padding, _, _, out = windows(g, x.shape, dilate=False)
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
