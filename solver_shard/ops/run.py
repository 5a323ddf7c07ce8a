"""Run canonical ops on real tensors, whole or local shards.

>>> import torch
>>> from solver_shard.program import Op, Ref
>>> op = Op(name="aten.einsum.default", operands=(0, 1), results=(2,), attributes={"equation": "ab,bc->ac", "tensors": (Ref(0), Ref(1))})
>>> call(op, [torch.ones(2, 3), torch.ones(3, 4)], ((2, 4),))[0].sum().item()
24.0

On a shard, arguments that are sizes (of a view, an expand, a factory, a gradient to be filled in) are not the traced ones:
they are taken from the shapes that the results must have there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from solver_shard.errors import InputError, InternalError
from solver_shard.ops import kernels
from solver_shard.ops.random import draw, key_of, numbers, shape_of
from solver_shard.ops.shards import Box
from solver_shard.program import Op, Program, Ref

Shapes = Sequence[Sequence[int]]

DTYPES: Mapping[str, torch.dtype] = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8,
    "u64": torch.uint64, "u32": torch.uint32, "u16": torch.uint16, "u8": torch.uint8,
    "bool": torch.bool, "c64": torch.complex64, "c128": torch.complex128,
}  # fmt: skip
"""Torch dtype of a short dtype name."""


def call(op: Op, args: Sequence[torch.Tensor], result_shapes: Shapes) -> tuple[torch.Tensor, ...]:
    """The results of one op.

    Args:
        args: one tensor per operand.
        result_shapes: the shape each result must have: the traced one, or the local one on a shard.

    Raises:
        InputError: the op cannot be executed here (attention with dropout alone, without its draws; a library's op is not imported).
        InternalError: a result has another shape than asked.
    """
    return call_with(op, arguments_of(op, args), result_shapes)


def arguments_of(op: Op, args: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The arguments of an op by name, with tensors in place of references."""
    return {name: _resolve(value, args) for name, value in op.attributes.items()}


def call_with(op: Op, arguments: dict[str, Any], result_shapes: Shapes) -> tuple[torch.Tensor, ...]:
    """``call`` with arguments by name, which need not be those of the program."""
    results = results_of(op, arguments, result_shapes)
    shapes = tuple(tuple(r.shape) for r in results)
    if shapes != tuple(tuple(shape) for shape in result_shapes):
        raise InternalError(f"{op.name} gave results of shapes {shapes}, expected {tuple(tuple(s) for s in result_shapes)}")
    return results


def results_of(op: Op, arguments: dict[str, Any], result_shapes: Shapes) -> tuple[torch.Tensor, ...]:
    """``call_with``, whatever shapes the results turn out to have."""
    special = _SPECIAL.get(op.name)
    found = special(arguments, result_shapes) if special is not None else registered(op.name, arguments)
    return tuple(_tensors(made(found, arguments.get("output_mask"))))


def made(found: Any, mask: Sequence[bool] | None) -> Any:
    """The results of an op that its mask says are made: kernels differ in whether they return others."""
    if mask is None or len(found) != len(mask):
        return found
    return tuple(result for result, wanted in zip(found, mask, strict=True) if wanted)


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    """Results in order, those of list ops one after the other."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, tuple | list):
        for item in found:
            yield from _tensors(item)


def run(program: Program, values: Mapping[int, torch.Tensor], *, seed: int | None = None, step: int = 0) -> dict[int, torch.Tensor]:
    """Every tensor of the program by position, from the values of its parameters, buffers and inputs.

    Where checkpointing executes a random op again, it draws what it drew before.

    Args:
        seed: of random ops, which draw what an applied or simulated plan with this seed draws in this step; None to take one from torch's
            generator.
    """
    known = dict(values)
    for t in program.sources():
        tensor = program.tensors[t]
        if t not in known:
            raise InputError(f"program {program.name!r} needs a value for {tensor.role.value} {tensor.name!r} {tensor.shape}")
        if tuple(known[t].shape) != tensor.shape:
            raise InputError(f"{tensor.role.value} {tensor.name!r} has shape {tensor.shape}, got {tuple(known[t].shape)}")
    random = numbers(program)
    seed = int(torch.randint(2**62, ())) if seed is None and random else seed or 0
    with torch.no_grad():
        for i, op in enumerate(program.ops):
            number = random.get(i)
            args, shapes = [known[t] for t in op.operands], [program.tensors[t].shape for t in op.results]
            if number is None:
                results = call(op, args, shapes)
            else:
                shape, dtype = shape_of(program, i), DTYPES[program.tensors[op.results[0]].dtype]
                a, whole = arguments_of(op, args), Box((0,) * len(shape), shape)
                results = draw(op.name, a, key=key_of(seed, step, number), box=whole, shape=shape, dtype=dtype)
            known.update(zip(op.results, results, strict=True))
    return known


def _resolve(value: Any, args: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, Ref):
        return args[value.operand]
    if isinstance(value, tuple):
        return [_resolve(item, args) for item in value]
    return value


def _dtype(value: str | None) -> torch.dtype | None:
    return None if value is None else DTYPES[value]


def overload_of(name: str) -> Any:
    """The overload of this name; InputError where no library has registered it."""
    namespace, base, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), base), overload)
    except AttributeError:
        raise InputError(f"op {name} is not registered here; import the library that defines it before running the program") from None


def size_argument(name: str) -> str | None:
    """The argument of an op that says how large its result is, if it has one."""
    return _SIZE_ARGUMENTS.get(name)


@functools.cache
def any_strides(name: str) -> bool:
    """Whether an op is known to read operands of any strides: a pointwise op, a reduction, a view, or one of ``_STRIDED``.

    A program's operands lie as its views leave them, which need not be as torch had them when the model was traced. Some kernels refuse
    that (``grad_input must be contiguous``), some warn, some are silently wrong; so all others get contiguous operands.
    """
    target = overload_of(name)
    views = any(argument.alias_info is not None for argument in target._schema.arguments)
    base = name.split(".")[1]
    known = torch.Tag.pointwise in target.tags or torch.Tag.reduction in target.tags or base in _STRIDED or base.startswith(_MATRICES)
    return name.startswith("aten.") and (known or views) and "as_strided" not in name


def registered(name: str, arguments: dict[str, Any]) -> Any:
    """Call the overload with arguments by name; those the program dropped (devices, layouts) take their defaults."""
    target = overload_of(name)
    if not any_strides(name):
        arguments = {argument: _contiguous(value) for argument, value in arguments.items()}
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for argument in target._schema.arguments:
        if argument.name not in arguments:
            if not argument.kwarg_only and not argument.has_default_value():
                raise InternalError(f"{name} is called without its argument {argument.name!r}")
            continue
        value = arguments[argument.name]
        if isinstance(value, str) and value in DTYPES and "dtype" in argument.name:
            value = DTYPES[value]
        if argument.kwarg_only or len(positional) != target._schema.arguments.index(argument):
            keywords[argument.name] = value
        else:
            positional.append(value)
    return target(*positional, **keywords)


def _contiguous(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.contiguous()
    return [_contiguous(item) for item in value] if isinstance(value, list) else value


def _view(a: dict[str, Any], shapes: Shapes) -> Any:
    return a["self"].reshape(tuple(shapes[0]))


def _expand(a: dict[str, Any], shapes: Shapes) -> Any:
    return a["self"].expand(tuple(shapes[0]))


def _permute(a: dict[str, Any], _shapes: Shapes) -> Any:
    return a["self"].permute(a["dims"])


def _einsum(a: dict[str, Any], _shapes: Shapes) -> Any:
    return torch.einsum(a["equation"], *a["tensors"])


def _full(a: dict[str, Any], shapes: Shapes) -> Any:
    return torch.full(tuple(shapes[0]), a["fill_value"], dtype=_dtype(a["dtype"]))


def _arange(a: dict[str, Any], _shapes: Shapes) -> Any:
    return torch.arange(a["start"], a["end"], a["step"], dtype=_dtype(a["dtype"]))


def _to_copy(a: dict[str, Any], _shapes: Shapes) -> Any:
    return a["self"].to(_dtype(a["dtype"]))


def _clone(a: dict[str, Any], _shapes: Shapes) -> Any:
    return a["self"].clone()


def _split(a: dict[str, Any], shapes: Shapes) -> Any:
    return torch.split(a["self"], [shape[a["dim"]] for shape in shapes], a["dim"])


def _sized(name: str, argument: str) -> Callable[[dict[str, Any], Shapes], Any]:
    """An op whose result is as large as this argument says."""
    return lambda a, shapes: registered(name, a | {argument: list(shapes[0])})


def _empty(a: dict[str, Any], shapes: Shapes) -> Any:
    """Without strides of its own: what is cut is contiguous."""
    return torch.empty(tuple(shapes[0]), dtype=_dtype(a.get("dtype")) or (a["self"].dtype if "self" in a else None))


def _repeat(a: dict[str, Any], shapes: Shapes) -> Any:
    own = (1,) * (len(shapes[0]) - a["self"].ndim) + tuple(a["self"].shape)
    return a["self"].repeat([full // size if size else 1 for size, full in zip(own, shapes[0], strict=True)])


def _embedding_backward(a: dict[str, Any], shapes: Shapes) -> Any:
    return registered("aten.embedding_dense_backward.default", a | {"num_weights": shapes[0][0]})


def _nll_forward(a: dict[str, Any], _shapes: Shapes) -> Any:
    """Sum of the weighted losses and sum of the weights, over all rows whose target is not ignored."""
    scores, target = a["self"], a["target"]
    weight = _row_weight(a, scores, target)
    picked = scores.gather(-1, target.clamp(0, scores.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    return -torch.where(weight != 0, picked * weight, 0).sum(), weight.sum()


def _nll_backward(a: dict[str, Any], _shapes: Shapes) -> Any:
    scores, target = a["self"], a["target"]
    weight = _row_weight(a, scores, target)
    scale = a["grad_output"] / a["total_weight"] if a["reduction"] == "mean" else a["grad_output"]
    index = target.clamp(0, scores.shape[-1] - 1).unsqueeze(-1)
    return torch.zeros_like(scores).scatter_(-1, index, (-weight * scale).to(scores.dtype).unsqueeze(-1))


def _row_weight(a: dict[str, Any], scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    counted = target != a["ignore_index"]
    if a["weight"] is None:
        return counted.to(scores.dtype)
    return torch.where(counted, a["weight"][target.clamp(0, scores.shape[-1] - 1)], 0)


def _attention(name: str) -> Callable[[dict[str, Any], Shapes], Any]:
    def run_attention(a: dict[str, Any], _shapes: Shapes) -> Any:
        if "keep" not in a and a.get("dropout_p", 0.0):
            raise InputError(
                f"{name} with dropout {a['dropout_p']} is called without what its dropout leaves; run the whole program, which draws it"
            )
        if "keep" in a or not a["query"].is_cpu or not name.startswith("aten."):
            return kernels.run(a, a.get("keep"))
        target = overload_of(name)
        return target(**{arg.name: _rows(a[arg.name]) for arg in target._schema.arguments if arg.name in a})

    return run_attention


def _rows(value: Any) -> Any:
    """The kernels of attention take the last dim for contiguous, whatever its stride."""
    return value.contiguous() if isinstance(value, torch.Tensor) and value.ndim and value.stride(-1) != 1 else value


def groups_of(a: Mapping[str, Any]) -> int:
    """Groups of a convolution on local channels, of which a shard may hold some: a kernel reads the inputs of one group."""
    return int(a["groups"]) if a["transposed"] else int(a["input"].shape[1]) // int(a["weight"].shape[1])


def _convolution(name: str) -> Callable[[dict[str, Any], Shapes], Any]:
    """Groups are those of the shard."""
    return lambda a, _: registered(name, a | {"groups": groups_of(a)})


def _group_norm(name: str) -> Callable[[dict[str, Any], Shapes], Any]:
    """Sizes and groups are those of the shard."""

    def run_group_norm(a: dict[str, Any], _shapes: Shapes) -> Any:
        image = a["input"].shape
        sizes = {"N": image[0], "C": image[1], "HxW": math.prod(image[2:]), "group": a["group"] * image[1] // a["C"]}
        return registered(name, a | sizes)

    return run_group_norm


def _resized_backward(name: str) -> Callable[[dict[str, Any], Shapes], Any]:
    """Batch and channels are those of the shard."""
    return lambda a, _: registered(name, a | {"input_size": [*a["grad_output"].shape[:2], *a["input_size"][2:]]})


def _as_complex(a: dict[str, Any], _shapes: Shapes) -> Any:
    return torch.view_as_complex(a["self"].contiguous())


def _gelu_backward(a: dict[str, Any], _shapes: Shapes) -> Any:
    """The CPU kernel does not broadcast; a program's pointwise ops may."""
    gradient, x = torch.broadcast_tensors(a["grad_output"], a["self"])
    return registered("aten.gelu_backward.default", a | {"grad_output": gradient, "self": x})


_STRIDED = frozenset(
    {
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "cat",
        "stack",
        "where",
        "clone",
        "copy",
        "index",
        "index_select",
        "gather",
        "embedding",
        "flip",
        "roll",
    }
    | {"index_put", "index_add", "scatter", "scatter_add", "slice_scatter", "select_scatter", "slice_backward", "select_backward"}
    | {"constant_pad_nd", "tril", "triu", "cumsum", "sort", "topk", "masked_fill", "masked_scatter"}
)
"""Ops that read any strides, by their own tests in torch or because they copy element by element."""
_MATRICES = ("linalg_", "_linalg_", "cholesky", "lu_", "triangular_solve")
"""How the names of ops begin that copy their matrices column by column, whatever their strides."""

_RESIZED = tuple(
    f"aten.{name}_backward.default"
    for name in (
        *(f"upsample_{kind}" for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d")),
        *(f"_upsample_nearest_exact{d}d" for d in (1, 2, 3)),
        *(f"_upsample_{kind}2d_aa" for kind in ("bilinear", "bicubic")),
    )
)
_SIZE_ARGUMENTS = {
    **{f"aten.{name}": "size" for name in ("zeros.default", "ones.default", "empty.memory_format", "rand.default", "randn.default")},
    **{f"aten.{name}.default": "size" for name in ("new_zeros", "new_ones", "new_full", "new_empty")},
    **{f"aten.{name}.default": "input_sizes" for name in ("slice_backward", "select_backward", "unfold_backward")},
    "aten.masked_scatter_backward.default": "sizes",
}
_RESHAPES: tuple[str, ...] = (
    "view.default",
    "_unsafe_view.default",
    "reshape.default",
    "unflatten.int",
    "flatten.using_ints",
    "unsqueeze.default",
)
_RESHAPES += ("squeeze.default", "squeeze.dim", "squeeze.dims")  # a dim that is 1 long on a shard only is kept
SIZED = frozenset(
    {f"aten.{name}" for name in _RESHAPES}
    | {
        "aten.expand.default",
        "aten.repeat.default",
        "aten.full.default",
        "aten.split.Tensor",
        "aten.split_with_sizes.default",
        *_SIZE_ARGUMENTS,
    }
    | {"aten.empty_strided.default", "aten.new_empty_strided.default", "aten._embedding_bag.default"}
)
"""Ops that are told the sizes of their results: on a shard, the local ones."""


def _embedding_bag(a: dict[str, Any], shapes: Shapes) -> Any:
    """In any mode; the bags of indices and the sizes of bags in the shapes that the trace has for them."""
    count = shapes[0][0]
    if a["mode"] == kernels.MAX:
        found = registered("aten._embedding_bag.default", a)
        return (found[0], *(kernels.fitted(x, shape) for x, shape in zip(found[1:], shapes[1:], strict=True)))
    return (kernels.embedding_bag(a, count), *kernels.bag_results(a, count, shapes))


def _embedding_bag_backward(a: dict[str, Any], _shapes: Shapes) -> Any:
    if a["mode"] == kernels.MAX:
        return registered("aten._embedding_bag_backward.default", a)
    return kernels.embedding_bag_backward(a, a["bag_size"].shape[0])


_SPECIAL: Mapping[str, Callable[[dict[str, Any], Shapes], Any]] = {
    **{name: _sized(name, argument) for name, argument in _SIZE_ARGUMENTS.items()},
    **{f"aten.{name}": _view for name in _RESHAPES},
    "aten.expand.default": _expand,
    "aten.repeat.default": _repeat,
    "aten.empty_strided.default": _empty,
    "aten.new_empty_strided.default": _empty,
    "aten.permute.default": _permute,
    "aten.einsum.default": _einsum,
    "aten.full.default": _full,
    "aten.arange.start_step": _arange,
    "aten._to_copy.default": _to_copy,
    "aten.clone.default": _clone,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.convolution.default": _convolution("aten.convolution.default"),
    "aten.convolution_backward.default": _convolution("aten.convolution_backward.default"),
    "aten.native_group_norm.default": _group_norm("aten.native_group_norm.default"),
    "aten.native_group_norm_backward.default": _group_norm("aten.native_group_norm_backward.default"),
    **{name: _resized_backward(name) for name in _RESIZED},
    "aten.view_as_complex.default": _as_complex,
    "aten.gelu_backward.default": _gelu_backward,
    "aten._embedding_bag.default": _embedding_bag,
    "aten._embedding_bag_backward.default": _embedding_bag_backward,
    "shard.take.default": lambda a, _: kernels.take(a["self"], a["index"]),
    "shard.count.default": lambda a, _: kernels.count(a["self"], a["bins"]),
    "shard.grouped_mm.default": lambda a, _: kernels.row_products(a["self"], a["mat2"], a["offs"]),
    "shard.grouped_mm_weights.default": lambda a, _: kernels.weight_products(a["self"], a["mat2"], a["offs"]),
    "shard.nll_loss_forward": _nll_forward,
    "shard.nll_loss_backward": _nll_backward,
    **{name: _attention(name) for name in (*kernels.FORWARD, *kernels.BACKWARD)},
}

INTERPRETED = frozenset(_SPECIAL) - frozenset(_SIZE_ARGUMENTS)
"""Ops for which more is done than to call the overload with the sizes of the shard."""


Shape = tuple[int, ...]
Run = Callable[..., torch.Tensor]


def product(equation: str, shapes: Sequence[Shape]) -> Run:
    """The einsum as a function of its operands, which have these shapes; any equation that ``torch.einsum`` takes.

    >>> run = product("abc,cd->abd", [(8, 16, 32), (32, 96)])
    >>> run(x, weight).shape        # one mm of (128, 32) by (32, 96)
    torch.Size([8, 16, 96])

    Products of two tensors are one matrix product, laid out once for their shapes. Letters that both operands and the result have are
    batch dims, letters of both that the result lacks are summed, the others are rows of the left or columns of the right matrix. A block
    that lies transposed is read as such, and a result that wants its columns first is computed with the sides exchanged, so that neither
    is copied. ``torch.einsum`` does the same work, and finds out how at each call.
    """
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2 or not arrow or "." in equation or any(len(set(term)) != len(term) for term in (*terms, out)):
        return lambda *tensors: torch.einsum(equation, *tensors)
    left, right = terms
    size = dict(zip(left + right, (*shapes[0], *shapes[1]), strict=True))
    if any((letter in left) + (letter in right) + (letter in out) == 1 for letter in size) or _broadcasts(left, right, shapes):
        return lambda *tensors: torch.einsum(equation, *tensors)
    batch = [letter for letter in out if letter in left and letter in right]
    rows = [letter for letter in out if letter not in right]
    columns = [letter for letter in out if letter not in left]
    summed = [letter for letter in left if letter in right and letter not in out]
    one = _matrix(left, batch, rows, summed, size)
    two = _matrix(right, batch, summed, columns, size)
    swapped = list(out) == [*batch, *columns, *rows] and bool(rows) and bool(columns)
    made = [*batch, *(columns if swapped else rows), *(rows if swapped else columns)]
    multiply = torch.bmm if batch else torch.mm
    shape = tuple(size[letter] for letter in made)
    order = tuple(made.index(letter) for letter in out)
    plain = order == tuple(range(len(order)))

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = one(x), two(y)
        found = multiply(b.mT, a.mT) if swapped else multiply(a, b)
        return found.view(shape) if plain else found.view(shape).permute(order)

    return run


def _broadcasts(left: str, right: str, shapes: Sequence[Shape]) -> bool:
    """Whether one operand has a letter at size 1 and the other does not."""
    sizes = dict(zip(left, shapes[0], strict=True))
    return any(sizes.get(letter, n) != n for letter, n in zip(right, shapes[1], strict=True))


def _matrix(term: str, batch: Sequence[str], first: Sequence[str], second: Sequence[str], size: dict[str, int]) -> Run:
    """An operand as a matrix with ``first`` as its rows and ``second`` as its columns, or as a batch of them."""
    lead = [math.prod(size[letter] for letter in batch)] if batch else []
    rows, columns = (math.prod(size[letter] for letter in group) for group in (first, second))
    if list(term) == [*batch, *first, *second]:
        shape = (*lead, rows, columns)
        return lambda x: x.reshape(shape)
    if list(term) == [*batch, *second, *first]:
        turned = (*lead, columns, rows)
        return lambda x: x.reshape(turned).mT
    order = tuple(term.index(letter) for letter in (*batch, *first, *second))
    target = (*lead, rows, columns)
    return lambda x: x.permute(order).reshape(target)
