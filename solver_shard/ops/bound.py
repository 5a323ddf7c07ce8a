"""An op as a function of its tensors alone, prepared once for the shapes that they have.

>>> multiply = bind(op, ((8, 16, 32), (32, 96)), ((8, 16, 96),))   # aten.einsum.default, "abc,cd->abd"
>>> multiply.function(x, weight).shape
torch.Size([8, 16, 96])

``ops.run.call`` looks at an op's arguments each time it runs; what is bound here has looked already: overloads are found, sizes are
those of the shard, products of matrices are laid out, and what is left is one call of torch. Both give the same numbers, up to the
order of sums.
"""

from __future__ import annotations

import dataclasses
import functools
import keyword
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from solver_shard.errors import InternalError
from solver_shard.ops.run import DTYPES, INTERPRETED, any_strides, arguments_of, made, overload_of, product, results_of, size_argument
from solver_shard.program import Op, Ref

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """An op that is prepared.

    Attributes:
        function: from the operands to the result, or to all results.
        single: whether it returns the one result itself, not a tuple.
    """

    function: Callable[..., Any]
    single: bool


def bind(op: Op, operands: Sequence[Shape], results: Sequence[Shape]) -> Bound:
    """Prepare an op.

    Args:
        operands, results: their shapes, on a shard the local ones.

    Raises:
        InputError: the op cannot be executed here (see ``ops.run.call``).
    """
    maker = _MAKERS.get(op.name)
    found = maker(op, tuple(operands), tuple(results)) if maker is not None else None
    if found is None and op.name not in INTERPRETED and not op.name.startswith("shard."):
        found = _registered(op, results)
    if found is not None:
        return Bound(function=found, single=len(results) == 1)
    return Bound(function=lambda *local: results_of(op, arguments_of(op, local), results), single=False)


def bind_inside(op: Op, results: Sequence[Shape]) -> Bound:
    """Prepare an op of ``program.PARTIAL_WRITES`` that writes into its operand 0, which it returns.

    >>> write = bind_inside(op, ((8, 16),)).function            # aten.index_copy.default
    >>> write(cache, index, rows) is cache
    True
    """
    a = op.attributes
    if op.name.split(".")[1] in ("slice_scatter", "select_scatter"):
        read, at = ("slice.Tensor", ("dim", "start", "end", "step")) if "slice" in op.name else ("select.int", ("dim", "index"))
        place, source = overload_of(f"aten.{read}"), a["src"].operand

        def write(*local: torch.Tensor) -> torch.Tensor:
            place(local[0], *(a[name] for name in at)).copy_(local[source])
            return local[0]

        return Bound(function=write, single=True)
    namespace, base, overload = op.name.split(".")
    function = _registered(dataclasses.replace(op, name=f"{namespace}.{base}_.{overload}"), results)
    assert function is not None, "no argument of these is a keyword of Python's"
    return Bound(function=function, single=True)


def _registered(op: Op, results: Sequence[Shape]) -> Callable[..., Any] | None:
    """The overload itself, with the arguments that are no tensors in their places; None where it is no such simple call."""
    target = overload_of(op.name)
    sized = size_argument(op.name)
    attributes: Mapping[str, Any] = {**op.attributes, sized: tuple(results[0])} if sized else op.attributes
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
        text = _text(value, names, "" if any_strides(op.name) else ".contiguous()")
        if not argument.kwarg_only and len(positional) == place:
            positional.append(text)
        elif keyword.iskeyword(argument.name):
            return None
        else:
            keywords.append(f"{argument.name}={text}")
    operands = ", ".join(f"t{k}" for k in range(len(op.operands)))
    call = f"target({', '.join([*positional, *keywords])})"
    if len(results) > 1 or "output_mask" in attributes:
        mask = attributes.get("output_mask")
        names["kept"] = _kept if mask is None else lambda found: _kept(made(found, mask))
        call = f"kept({call})" if len(results) > 1 else f"kept({call})[0]"
    elif isinstance(target._schema.returns[0].type, torch.ListType) or len(target._schema.returns) > 1:
        names["kept"] = _kept
        call = f"kept({call})[0]"
    function: Callable[..., Any] = eval(_code(f"lambda {operands}: {call}"), names)  # of names given here and torch's argument names
    return function


@functools.cache
def _code(text: str) -> CodeType:
    """Few texts stand for all the ops of a program, on every device."""
    return compile(text, "<bound>", "eval")


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


def _kept(found: Any) -> tuple[torch.Tensor, ...]:
    """The results that are tensors."""
    if isinstance(found, torch.Tensor):
        return (found,)
    return tuple(item for item in found if item is not None)


def _view(_op: Op, operands: Sequence[Shape], results: Sequence[Shape]) -> Callable[..., Any]:
    shape = tuple(results[0])
    if operands[0] == shape:
        return lambda x: x
    return lambda x: x.reshape(shape)


def _expand(_op: Op, _operands: Sequence[Shape], results: Sequence[Shape]) -> Callable[..., Any]:
    shape = tuple(results[0])
    return lambda x: x.expand(shape)


def _permute(op: Op, _operands: Sequence[Shape], _results: Sequence[Shape]) -> Callable[..., Any]:
    dims = tuple(op.attributes["dims"])
    return lambda x: x.permute(dims)


def _einsum(op: Op, operands: Sequence[Shape], _results: Sequence[Shape]) -> Callable[..., Any]:
    refs = [ref.operand for ref in op.attributes["tensors"]]
    run = product(op.attributes["equation"], [operands[k] for k in refs])
    if refs == list(range(len(operands))):
        return run
    return lambda *local: run(*(local[k] for k in refs))


def _to_copy(op: Op, _operands: Sequence[Shape], _results: Sequence[Shape]) -> Callable[..., Any] | None:
    name = op.attributes.get("dtype")
    if name is None:
        return None
    dtype = DTYPES[name]
    return lambda x: x.to(dtype)


def _split(op: Op, _operands: Sequence[Shape], results: Sequence[Shape]) -> Callable[..., Any]:
    dim = op.attributes["dim"]
    sizes = [shape[dim] for shape in results]
    split = torch.ops.aten.split_with_sizes.default
    return (lambda x: split(x, sizes, dim)) if len(results) > 1 else (lambda x: split(x, sizes, dim)[0])


def _gelu_backward(op: Op, operands: Sequence[Shape], results: Sequence[Shape]) -> Callable[..., Any] | None:
    """The CPU kernel does not broadcast; a program's pointwise ops may."""
    return _registered(op, results) if len(set(operands)) == 1 else None


def _nll_forward(op: Op, operands: Sequence[Shape], _results: Sequence[Shape]) -> Callable[..., Any] | None:
    """torch's kernel, on rows; classes that weigh differently are left to the general form."""
    a = op.attributes
    if a["weight"] is not None or not math.prod(operands[a["self"].operand]):
        return None
    kernel, classes, ignored = torch.ops.aten.nll_loss_forward.default, operands[a["self"].operand][-1], a["ignore_index"]
    order = (a["self"].operand, a["target"].operand)

    def run(*local: torch.Tensor) -> Any:
        scores, target = local[order[0]], local[order[1]]
        return kernel(scores.reshape(-1, classes), target.reshape(-1), None, 2, ignored)

    return run


def _nll_backward(op: Op, operands: Sequence[Shape], _results: Sequence[Shape]) -> Callable[..., Any] | None:
    a = op.attributes
    shape = operands[a["self"].operand]
    if a["weight"] is not None or not math.prod(shape):
        return None
    kernel, ignored, mean = torch.ops.aten.nll_loss_backward.default, a["ignore_index"], a["reduction"] == "mean"
    at_gradient, at_scores, at_target, at_total = (a[name].operand for name in ("grad_output", "self", "target", "total_weight"))

    def run(*local: torch.Tensor) -> Any:
        gradient, total = local[at_gradient], local[at_total]
        scale = (gradient / total if mean else gradient).to(local[at_scores].dtype)
        rows, target = local[at_scores].reshape(-1, shape[-1]), local[at_target].reshape(-1)
        return kernel(scale, rows, target, None, 2, ignored, total).view(shape)

    return run


_Maker = Callable[[Op, tuple[Shape, ...], tuple[Shape, ...]], Callable[..., Any] | None]
_RESHAPES: tuple[str, ...] = ("view.default", "_unsafe_view.default", "reshape.default", "unflatten.int", "flatten.using_ints")
_RESHAPES += ("unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims")
_MAKERS: Mapping[str, _Maker] = {
    **{f"aten.{name}": _view for name in _RESHAPES},
    "aten.expand.default": _expand,
    "aten.permute.default": _permute,
    "aten.einsum.default": _einsum,
    "aten._to_copy.default": _to_copy,
    "aten.clone.default": lambda *_: torch.clone,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.embedding_dense_backward.default": lambda op, _, results: _registered(
        Op(name=op.name, operands=op.operands, results=op.results, attributes={**op.attributes, "num_weights": results[0][0]}), results
    ),
    "aten.gelu_backward.default": _gelu_backward,
    "shard.nll_loss_forward": _nll_forward,
    "shard.nll_loss_backward": _nll_backward,
}
"""What is prepared in a way of its own; None from a maker leaves the op to ``ops.run``."""
