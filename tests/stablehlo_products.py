"""Random products, convolutions, solves, reshapes, gathers, scatters and custom calls; see ``stablehlo_ops``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stablehlo_text import Body, Shape, Val, array, fold, keep_second, pairs


def windows(g: Body, shape: Shape, *, dilate: bool) -> tuple[list[int], list[int], list[tuple[int, int]], list[int], list[int], list[int]]:
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
    window, stride, padding, base, dilation, made = windows(g, sizes, dilate=g.rng.random() < 0.3)
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
