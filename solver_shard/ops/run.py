"""Run canonical ops on real tensors, whole or local shards: one at a time, bound to the shapes of its tensors, or a whole program.

>>> import torch
>>> from solver_shard.program import Op, Ref
>>> op = Op(name="aten.einsum.default", operands=(0, 1), results=(2,), attributes={"equation": "ab,bc->ac", "tensors": (Ref(0), Ref(1))})
>>> multiply = bind(op, ((2, 3), (3, 4)), ((2, 4),))
>>> multiply.function(torch.ones(2, 3), torch.ones(3, 4)).sum().item()
24.0

All that executes an op binds it first: a step of the runtime or of its simulation once, and calls it ever after; ``run`` and the numeric
checks of rules at each call. What is bound has looked at the op's arguments already: overloads are found, sizes are those of the shard,
products of matrices are laid out, and what is left is one call of torch.

On a shard, arguments that are sizes (of a view, an expand, a factory, a gradient to be filled in) are not the traced ones:
they are taken from the shapes that the results must have there.
"""

from __future__ import annotations

import functools
import keyword
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from solver_shard.errors import InputError, InternalError
from solver_shard.ops import kernels
from solver_shard.ops.random import draw, key_of, numbers, shape_of
from solver_shard.ops.shards import Box, Shape
from solver_shard.program import Op, Program, Ref

Shapes = Sequence[Sequence[int]]
Arguments = Mapping[str, Any]
"""Of an op, by name, with tensors in place of references."""
Run = Callable[..., Any]
"""From the operands of an op to its result, or to all its results."""

DTYPES: Mapping[str, torch.dtype] = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8,
    "u64": torch.uint64, "u32": torch.uint32, "u16": torch.uint16, "u8": torch.uint8,
    "bool": torch.bool, "c64": torch.complex64, "c128": torch.complex128,
}  # fmt: skip
"""Torch dtype of a short dtype name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """An op that is prepared.

    Attributes:
        function: from the operands to the result, or to all results.
        single: whether it returns the one result itself, not a tuple.
    """

    function: Run
    single: bool

    def results(self, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """All results, whether one or several."""
        return (self.function(*operands),) if self.single else tuple(self.function(*operands))


def bind(op: Op, operands: Shapes, results: Shapes = ()) -> Bound:
    """Prepare an op for tensors of these shapes.

    Args:
        operands, results: shapes, on a shard the local ones. Without those of results, sizes are what the op's arguments say.

    Raises:
        InputError: the op cannot be executed here (a library's op is not imported).
        InternalError: the op has not all arguments that it needs.
    """
    maker = _MAKERS.get(op.name)
    if maker is None or (not results and op.name in _TOLD):
        function = _overload(op, results)
    else:
        function = maker(op, [tuple(shape) for shape in operands], [tuple(shape) for shape in results])
    if not results:
        return Bound(function=lambda *local: _tensors(function(*local)), single=False)
    return Bound(function=function, single=len(results) == 1)


def call(op: Op, operands: Sequence[torch.Tensor], result_shapes: Shapes) -> tuple[torch.Tensor, ...]:
    """The results of one op.

    Args:
        operands: one tensor per operand.
        result_shapes: the shape each result must have: the traced one, or the local one on a shard.

    Raises:
        InputError: the op cannot be executed here (attention with dropout alone, without its draws; a library's op is not imported).
        InternalError: a result has another shape than asked.
    """
    results = bind(op, [tuple(t.shape) for t in operands], result_shapes).results(operands)
    shapes = tuple(tuple(r.shape) for r in results)
    if shapes != tuple(tuple(shape) for shape in result_shapes):
        raise InternalError(f"{op.name} gave results of shapes {shapes}, expected {tuple(tuple(s) for s in result_shapes)}")
    return results


def call_with(name: str, arguments: Arguments, result_shapes: Shapes) -> tuple[torch.Tensor, ...]:
    """``call`` of an op that no program has, from its arguments by name."""
    operands: list[torch.Tensor] = []

    def referenced(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            operands.append(value)
            return Ref(len(operands) - 1)
        return tuple(map(referenced, value)) if isinstance(value, tuple | list) else value

    attributes = {argument: referenced(value) for argument, value in arguments.items()}
    return call(Op(name=name, operands=tuple(range(len(operands))), results=(), attributes=attributes), operands, result_shapes)


def arguments_of(op: Op, operands: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The arguments of an op by name, with tensors in place of references."""
    return {name: _resolve(value, operands) for name, value in op.attributes.items()}


def _resolve(value: Any, operands: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, Ref):
        return operands[value.operand]
    if isinstance(value, tuple):
        return [_resolve(item, operands) for item in value]
    return value


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


def overload_of(name: str) -> Any:
    """The overload of this name; InputError where no library has registered it."""
    namespace, base, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), base), overload)
    except AttributeError:
        raise InputError(f"op {name} is not registered here; import the library that defines it before running the program") from None


def _overload(op: Op, results: Shapes, **changed: Any) -> Run:
    """The overload itself, with the arguments that are no tensors in their places; those the program dropped (devices, layouts) take
    their defaults.

    Args:
        results: shapes; of them only the number counts.
        changed: arguments that are others than the program's.
    """
    target = overload_of(op.name)
    attributes: Mapping[str, Any] = {**op.attributes, **changed}
    form = "" if _any_strides(op.name) else ".contiguous()"
    names: dict[str, Any] = {"target": target}
    positional: list[str] = []
    keywords: list[str] = []
    for place, argument in enumerate(target._schema.arguments):
        if argument.name not in attributes:
            if not argument.kwarg_only and not argument.has_default_value():
                raise InternalError(f"{op.name} is called without its argument {argument.name!r}")
            continue
        value = attributes[argument.name]
        if isinstance(value, str) and value in DTYPES and "dtype" in argument.name:
            value = DTYPES[value]
        text = _text(value, names, form)
        if not argument.kwarg_only and len(positional) == place:
            positional.append(text)
        else:
            keywords.append(f"**{{{argument.name!r}: {text}}}" if keyword.iskeyword(argument.name) else f"{argument.name}={text}")
    text = f"target({', '.join([*positional, *keywords])})"
    returns, mask = target._schema.returns, attributes.get("output_mask")
    if len(returns) != 1 or isinstance(returns[0].type, torch.ListType):
        names["tensors"] = _tensors if mask is None else lambda every: _tensors(_masked(every, mask))
        text = f"tensors({text})[0]" if len(results) == 1 else f"tensors({text})"
    operands = ", ".join(f"t{k}" for k in range(len(op.operands)))
    function: Run = eval(_code(f"lambda {operands}: {text}"), names)  # of names given here and torch's argument names
    return function


@functools.lru_cache(maxsize=4096)
def _code(text: str) -> CodeType:
    """Compiled once: calls of one op differ in the values of names, which the text does not have."""
    return compile(text, "<op>", "eval")


@functools.cache
def _any_strides(name: str) -> bool:
    """Whether an op is known to read operands of any strides: a pointwise op, a reduction, a view, or one of ``_STRIDED``.

    A program's operands lie as its views leave them, which need not be as torch had them when the model was traced. Some kernels refuse
    that (``grad_input must be contiguous``), some warn, some are silently wrong; so all others get contiguous operands.
    """
    target = overload_of(name)
    views = any(argument.alias_info is not None for argument in target._schema.arguments)
    base = name.split(".")[1]
    known = torch.Tag.pointwise in target.tags or torch.Tag.reduction in target.tags or base in _STRIDED or base.startswith(_MATRICES)
    return name.startswith("aten.") and (known or views) and "as_strided" not in name


def _text(value: Any, names: dict[str, Any], form: str) -> str:
    """An argument in the text of a call, tensors in this form; what is no tensor goes by a name."""
    if isinstance(value, Ref):
        return f"t{value.operand}{form}"
    if isinstance(value, tuple | list) and any(_has_tensor(item) for item in value):
        return f"[{', '.join(_text(item, names, form) for item in value)}]"
    name = f"c{len(names)}"
    names[name] = list(value) if isinstance(value, tuple) else value
    return name


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Ref) or (isinstance(value, tuple | list) and any(map(_has_tensor, value)))


def _masked(results: Any, mask: Sequence[bool]) -> Any:
    """The results of an op that its mask says are made: kernels differ in whether they return others."""
    return [result for result, made in zip(results, mask, strict=True) if made] if len(results) == len(mask) else results


def _tensors(results: Any) -> tuple[torch.Tensor, ...]:
    """Results in order, those of list ops one after the other; those that are not made, and numbers, are left out."""
    if isinstance(results, torch.Tensor):
        return (results,)
    tensors: list[torch.Tensor] = []
    for item in results:
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif isinstance(item, tuple | list):
            tensors.extend(_tensors(item))
    return tuple(tensors)


def _dtype(value: str | None) -> torch.dtype | None:
    return None if value is None else DTYPES[value]


# What is prepared in a way of its own.


def _by_name(run: Callable[[dict[str, Any]], Any]) -> _Maker:
    """An op that is a function of its arguments by name."""
    return lambda op, _operands, _results: lambda *local: run(arguments_of(op, local))


def _sized(argument: str) -> _Maker:
    """An op whose result is as large as this argument says."""
    return lambda op, _, results: _overload(op, results, **{argument: results[0]})


def _view(_op: Op, operands: Sequence[Shape], results: Sequence[Shape]) -> Run:
    shape = results[0]
    return (lambda x: x) if operands[0] == shape else (lambda x: x.reshape(shape))


def _expand(_op: Op, _operands: Sequence[Shape], results: Sequence[Shape]) -> Run:
    shape = results[0]
    return lambda x: x.expand(shape)


def _repeat(_op: Op, operands: Sequence[Shape], results: Sequence[Shape]) -> Run:
    own = (1,) * (len(results[0]) - len(operands[0])) + operands[0]
    times = [full // size if size else 1 for size, full in zip(own, results[0], strict=True)]
    return lambda x: x.repeat(times)


def _permute(op: Op, _operands: Sequence[Shape], _results: Sequence[Shape]) -> Run:
    dims = tuple(op.attributes["dims"])
    return lambda x: x.permute(dims)


def _split(op: Op, _operands: Sequence[Shape], results: Sequence[Shape]) -> Run:
    dim = op.attributes["dim"]
    sizes = [shape[dim] for shape in results]
    split = torch.ops.aten.split_with_sizes.default
    return (lambda x: split(x, sizes, dim)) if len(results) > 1 else (lambda x: split(x, sizes, dim)[0])


def _full(op: Op, _operands: Sequence[Shape], results: Sequence[Shape]) -> Run:
    shape, value, dtype = results[0], op.attributes["fill_value"], _dtype(op.attributes["dtype"])
    return lambda: torch.full(shape, value, dtype=dtype)


def _empty(op: Op, _operands: Sequence[Shape], results: Sequence[Shape]) -> Run:
    """Without strides of its own: what is cut is contiguous."""
    shape, dtype = results[0], _dtype(op.attributes.get("dtype"))
    return lambda *local: torch.empty(shape, dtype=local[0].dtype if dtype is None and local else dtype)


def _arange(op: Op, _operands: Sequence[Shape], _results: Sequence[Shape]) -> Run:
    start, end, step = (op.attributes[name] for name in ("start", "end", "step"))
    dtype = _dtype(op.attributes["dtype"])
    return lambda: torch.arange(start, end, step, dtype=dtype)


def _to_copy(op: Op, _operands: Sequence[Shape], _results: Sequence[Shape]) -> Run:
    dtype = _dtype(op.attributes["dtype"])
    return lambda x: x.to(dtype)


def _einsum(op: Op, operands: Sequence[Shape], _results: Sequence[Shape]) -> Run:
    refs = [ref.operand for ref in op.attributes["tensors"]]
    multiply = product(op.attributes["equation"], [operands[k] for k in refs])
    if refs == list(range(len(operands))):
        return multiply
    return lambda *local: multiply(*(local[k] for k in refs))


def _embedding_backward(op: Op, _operands: Sequence[Shape], results: Sequence[Shape]) -> Run:
    return _overload(op, results, num_weights=results[0][0])


def _convolution(op: Op, operands: Sequence[Shape], results: Sequence[Shape]) -> Run:
    """Groups are those of the shard."""
    a = op.attributes
    return _overload(op, results, groups=groups_of(a, operands[a["input"].operand], operands[a["weight"].operand]))


def groups_of(a: Arguments, image: Shape, weight: Shape) -> int:
    """Groups of a convolution on local channels, of which a shard may hold some: a kernel reads the inputs of one group."""
    return int(a["groups"]) if a["transposed"] else image[1] // weight[1]


def _group_norm(op: Op, operands: Sequence[Shape], results: Sequence[Shape]) -> Run:
    """Sizes and groups are those of the shard."""
    a = op.attributes
    image = operands[a["input"].operand]
    return _overload(op, results, N=image[0], C=image[1], HxW=math.prod(image[2:]), group=a["group"] * image[1] // a["C"])


def _resized_backward(op: Op, operands: Sequence[Shape], results: Sequence[Shape]) -> Run:
    """Batch and channels are those of the shard."""
    a = op.attributes
    return _overload(op, results, input_size=(*operands[a["grad_output"].operand][:2], *a["input_size"][2:]))


def _gelu_backward(op: Op, operands: Sequence[Shape], results: Sequence[Shape]) -> Run:
    """The CPU kernel does not broadcast; a program's pointwise ops may."""
    kernel = _overload(op, results)
    return kernel if len(set(operands)) == 1 else lambda *local: kernel(*torch.broadcast_tensors(*local))


def _nll_forward(op: Op, operands: Sequence[Shape], _results: Sequence[Shape]) -> Run:
    """Sum of the weighted losses and sum of the weights, over all rows whose target is not ignored: torch's kernel, on rows, where classes
    weigh the same."""
    a = op.attributes
    if a["weight"] is not None or not math.prod(operands[a["self"].operand]):
        return lambda *local: _weighted_losses(arguments_of(op, local))
    kernel, classes, ignored = torch.ops.aten.nll_loss_forward.default, operands[a["self"].operand][-1], a["ignore_index"]
    at_scores, at_target = a["self"].operand, a["target"].operand
    return lambda *local: kernel(local[at_scores].reshape(-1, classes), local[at_target].reshape(-1), None, 2, ignored)


def _nll_backward(op: Op, operands: Sequence[Shape], _results: Sequence[Shape]) -> Run:
    a = op.attributes
    shape = operands[a["self"].operand]
    if a["weight"] is not None or not math.prod(shape):
        return lambda *local: _weighted_loss_gradients(arguments_of(op, local))
    kernel, ignored, mean = torch.ops.aten.nll_loss_backward.default, a["ignore_index"], a["reduction"] == "mean"
    at_gradient, at_scores, at_target, at_total = (a[name].operand for name in ("grad_output", "self", "target", "total_weight"))

    def gradients(*local: torch.Tensor) -> Any:
        gradient, total = local[at_gradient], local[at_total]
        scale = (gradient / total if mean else gradient).to(local[at_scores].dtype)
        rows, target = local[at_scores].reshape(-1, shape[-1]), local[at_target].reshape(-1)
        return kernel(scale, rows, target, None, 2, ignored, total).view(shape)

    return gradients


def _weighted_losses(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    scores, target = a["self"], a["target"]
    weight = _row_weight(a, scores, target)
    picked = scores.gather(-1, target.clamp(0, scores.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    return -torch.where(weight != 0, picked * weight, 0).sum(), weight.sum()


def _weighted_loss_gradients(a: Arguments) -> torch.Tensor:
    scores, target = a["self"], a["target"]
    weight = _row_weight(a, scores, target)
    scale = a["grad_output"] / a["total_weight"] if a["reduction"] == "mean" else a["grad_output"]
    index = target.clamp(0, scores.shape[-1] - 1).unsqueeze(-1)
    return torch.zeros_like(scores).scatter_(-1, index, (-weight * scale).to(scores.dtype).unsqueeze(-1))


def _row_weight(a: Arguments, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    counted = target != a["ignore_index"]
    if a["weight"] is None:
        return counted.to(scores.dtype)
    return torch.where(counted, a["weight"][target.clamp(0, scores.shape[-1] - 1)], 0)


def _attention(op: Op, _operands: Sequence[Shape], _results: Sequence[Shape]) -> Run:
    """The kernel where its tensors lie on the CPU and nothing is dropped; else it is written out."""
    kernel, dropout = overload_of(op.name), op.attributes.get("dropout_p", 0.0)

    def attend(*local: torch.Tensor) -> Any:
        a = arguments_of(op, local)
        if "keep" in a or not a["query"].is_cpu:
            return kernels.run(a, a.get("keep"))
        if dropout:
            raise InputError(
                f"{op.name} with dropout {dropout} is called without what its dropout leaves; run the whole program, which draws it"
            )
        return kernel(**{name: _rows(value) for name, value in a.items()})

    return attend


def _rows(value: Any) -> Any:
    """The kernels of attention take the last dim for contiguous, whatever its stride."""
    return value.contiguous() if isinstance(value, torch.Tensor) and value.ndim and value.stride(-1) != 1 else value


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
    **{f"aten.{name}.default": "input_sizes" for name in ("slice_backward", "select_backward")},
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
    | {"aten.empty_strided.default", "aten.new_empty_strided.default"}
)
"""Ops that are told the sizes of their results: on a shard, the local ones."""

_TOLD = SIZED | {"aten.embedding_dense_backward.default"}
"""Ops that are prepared for the sizes of their results."""

_Maker = Callable[[Op, Sequence[Shape], Sequence[Shape]], Run]
_MAKERS: Mapping[str, _Maker] = {
    **{name: _sized(argument) for name, argument in _SIZE_ARGUMENTS.items()},
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
    "aten.clone.default": lambda *_: torch.clone,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm,
    **dict.fromkeys(_RESIZED, _resized_backward),
    "aten.view_as_complex.default": lambda *_: lambda x: torch.view_as_complex(x.contiguous()),
    "aten.gelu_backward.default": _gelu_backward,
    "shard.take.default": _by_name(lambda a: kernels.take(a["self"], a["index"])),
    "shard.count.default": _by_name(lambda a: kernels.count(a["self"], a["bins"])),
    "shard.grouped_mm.default": _by_name(lambda a: kernels.row_products(a["self"], a["mat2"], a["offs"])),
    "shard.grouped_mm_weights.default": _by_name(lambda a: kernels.weight_products(a["self"], a["mat2"], a["offs"])),
    "shard.nll_loss_forward": _nll_forward,
    "shard.nll_loss_backward": _nll_backward,
    **dict.fromkeys((*kernels.FORWARD, *kernels.BACKWARD), _attention),
}
"""What is prepared in a way of its own; of all others the overload is called."""


Product = Callable[..., torch.Tensor]


def product(equation: str, shapes: Sequence[Shape]) -> Product:
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


def _matrix(term: str, batch: Sequence[str], first: Sequence[str], second: Sequence[str], size: dict[str, int]) -> Product:
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
