"""What a model may know of values while it is traced on tensors that have none.

Most models look at no value. Some read the sizes of what they are given from small tensors of whole numbers (patches per picture,
lengths of clips), check that two counts agree, or write to the places where a mask is true. With ``Values`` active

- what is computed from nothing but such inputs (``Fixed``) and constants has its value beside it, and is read from there: of
  ``torch.ones(b, n).sum(-1).tolist()`` the trace has the ops, and the model a list of numbers;
- checks of values pass, as they do for the data that a model is trained on, and all numbers are finite;
- a model of a library may ask whether a condition holds everywhere (it does) or anywhere (it does not): that is how libraries ask for
  padding and for numbers out of range, of which a step of whole sequences has none; in a user's own code such a question is an error;
- in a library's model no real number is exactly 0, so that no picture is one that only fills up a batch;
- ``x[mask] = y`` is a ``masked_fill`` or a ``masked_scatter``, which need not know how often the mask is true;
- alignment losses (CTC) whose lengths are not known are over whole clips and transcripts.

Losses that pair predictions with targets ask the host which go together (``scipy.optimize.linear_sum_assignment``). What is computed
does not depend on the answer; with ``paired``, the first prediction gets the first target, and so on.

>>> model_inputs = {"pixel_values": patches, "image_grid_thw": Fixed(torch.tensor([[1, 16, 16]]))}
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

MOST = 1 << 20
"""Elements of a tensor whose value is kept: as many as a mask of the pixels of some pictures has; what is larger is data."""

_T = torch.Tensor
_MADE = frozenset({torch.tensor, torch.as_tensor})
_FACTORIES = frozenset({torch.arange, torch.ones, torch.zeros, torch.full, torch.linspace, torch.eye, torch.empty})
_LIKE = frozenset(
    {torch.ones_like, torch.zeros_like, torch.full_like, torch.empty_like}
    | {_T.new_ones, _T.new_zeros, _T.new_full, _T.new_tensor, _T.new_empty}
)  # of values that do not depend on those of the argument
_SIZED_BY_VALUE = frozenset(
    {torch.nonzero, _T.nonzero, torch.argwhere, torch.unique, _T.unique, torch.unique_consecutive, torch.masked_select, _T.masked_select}
    | {torch.bincount, _T.bincount, torch.repeat_interleave, _T.repeat_interleave}
)
_VIEWS = frozenset(
    {_T.view, _T.reshape, torch.reshape, _T.flatten, torch.flatten, _T.unflatten, _T.unsqueeze, torch.unsqueeze, _T.squeeze, torch.squeeze}
    | {_T.transpose, torch.transpose, _T.permute, torch.permute, _T.expand, _T.movedim, torch.movedim}
)
"""Even of constants these stay ops: that rows were batch and sequence is how a loss over flattened rows can be cut by either."""
_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform")
_CHECKS = frozenset({_T._is_all_true, torch._is_all_true})


@dataclass(frozen=True, slots=True)
class Fixed:
    """An input whose values the model reads: it is part of the program, not one of its inputs."""

    tensor: torch.Tensor


class Values(TorchFunctionMode):  # type: ignore[misc]  # torch is not checked
    """While active, values that are known stay known, and nothing asks for others without need.

    Args:
        whole: answer what a library asks of padding and ranges.

    Attributes:
        calls: of torch that were seen.
    """

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__()
        self._whole = whole
        self.calls = 0

    def __enter__(self) -> Any:
        self._tolist = FunctionalTensor.tolist  # does not ask modes
        FunctionalTensor.tolist = lambda tensor: self._tolist(tensor) if (value := _value(tensor)) is None else value.tolist()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        FunctionalTensor.tolist = self._tolist
        return super().__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.calls += 1
        tensors: list[torch.Tensor] = []
        _collect((args, tuple(kwargs.values())), tensors)
        values = [_value(tensor) for tensor in tensors]
        known = all(value is not None for value in values)
        if tensors and known and (func in _SIZED_BY_VALUE or (func not in _VIEWS and all(map(_plain, tensors)))):
            return _evaluate(func, args, kwargs)
        if func in _MADE and not tensors and _whole(args[0]):
            return _evaluate(func, args, kwargs)
        if func in _CHECKS:
            return _evaluate(torch.tensor, (True,), {})
        if func is torch.nn.functional.ctc_loss:
            return _align(*args, **kwargs)
        truth = _truth(func, args)
        if self._whole and func in _EQUAL and _against_zero(args):
            truth = func in _UNEQUAL
        if self._whole and func in (_T.__lt__, _T.lt) and getattr(args[0], "_drawn", False) and args[1] in (0, 0.0):
            truth = False  # a layer that is left out with a chance of 0
        if func in _READS and truth is not None and values[0] is None:
            return truth
        if any(value is not None for value in values):
            if known and func not in _LIKE and not _writes(func, kwargs):
                found = _attempt(func, args, kwargs)
                if found is not None and not isinstance(found, torch.Tensor | tuple | list):
                    return found
                if isinstance(found, list) and not any(isinstance(item, torch.Tensor) for item in found):
                    return found
            if func in (torch.repeat_interleave, _T.repeat_interleave, torch.masked_select, _T.masked_select):
                return _chosen(*args, **kwargs)
            args = _by_place(func, args)
            args = tuple(_in_numbers(arg, func in _SIZED and i > 0) for i, arg in enumerate(args))
            kwargs = {name: _in_numbers(arg, False) for name, arg in kwargs.items()}
        if func is _T.__setitem__ and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool:
            _forget(args[0])
            return _write(*args)
        try:
            result = func(*args, **kwargs)
        except DynamicOutputShapeException as error:
            if self._whole and func is _T.__getitem__:
                return _Selected(error)
            raise
        if func is torch.rand:
            result._drawn = True
        if truth is not None:
            result._truth = truth
        elif self._whole and func in _QUESTIONS and isinstance(result, torch.Tensor) and result.dtype == torch.bool:
            result._truth = func in (torch.all, _T.all)
        _remember(func, args, kwargs, result, known=known and bool(tensors))
        if func in (torch.sum, _T.sum) and _kept(result) and (truth := getattr(args[0], "_truth", None)) is not None:
            count = args[0].numel() // max(1, result.numel()) if truth else 0
            result._value = _evaluate(torch.full, (tuple(result.shape), count), {"dtype": result.dtype})
        return result


class Constants(TorchFunctionMode):  # type: ignore[misc]  # torch is not checked
    """While active, whole numbers that a model writes down as tensors (strides, sizes) have their values on the meta device, too."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MADE and kwargs.get("device") is None and _whole(args[0] if args else kwargs.get("data")):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def hold(model: torch.nn.Module, device: str) -> None:
    """Make such constants, which a model has as buffers that are not saved, plain attributes, whose values a trace reads.

    Args:
        device: where all other buffers are.
    """
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is None or not _plain(buffer) or buffer.is_floating_point():
                continue
            if buffer.ndim == 0 and name in module._non_persistent_buffers_set:
                del module._buffers[name]
                module._non_persistent_buffers_set.discard(name)
                vars(module)[name] = buffer
            else:
                module._buffers[name] = buffer.to(device)


@contextlib.contextmanager
def paired() -> Iterator[None]:
    """While open, predictions and targets are paired in their order."""
    name = "linear_sum_assignment"
    asked = getattr(sys.modules.get("scipy.optimize"), name, None)
    holders = [vars(module) for module in list(sys.modules.values()) if asked is not None and vars(module).get(name) is asked]
    try:
        for holder in holders:
            holder[name] = _in_order
        yield
    finally:
        for holder in holders:
            holder[name] = asked


class _Selected:
    """What an unknown mask selects of a tensor, which a library may only compare the size of."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def numel(self) -> Any:
        return _AsExpected()

    def __getattr__(self, name: str) -> Any:
        raise self._error

    def _unknown(self, *_: Any) -> Any:
        raise self._error

    __getitem__ = __len__ = __iter__ = __bool__ = __neg__ = _unknown
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _unknown

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        raise next(arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, cls))._error


class _AsExpected(int):
    """A size that is what it should be."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def _in_order(costs: Any) -> tuple[Any, Any]:
    import numpy

    count = min(costs.shape)
    return numpy.arange(count), numpy.arange(count)


def _value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a tensor, where it is known."""
    if _plain(tensor):
        return tensor
    found: torch.Tensor | None = getattr(tensor, "_value", None)
    return None if found is None or getattr(found.untyped_storage(), "_stale", False) else found


def _plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor has small values of its own, which no derivative is taken of."""
    if type(tensor) is not torch.Tensor or torch._is_functional_tensor(tensor) or torch._C._functorch.is_batchedtensor(tensor):
        return False
    return tensor.device.type == "cpu" and not tensor.requires_grad and tensor.numel() <= MOST


def _kept(value: Any) -> bool:
    """Whether a value is worth keeping."""
    return isinstance(value, torch.Tensor) and value.numel() <= MOST


def _evaluate(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The function of values."""
    with _disable_current_modes(), torch.no_grad():
        return func(*_replaced(args), **{name: _replaced(value) for name, value in kwargs.items() if name != "device"})


def _attempt(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The function of values; None where it does not take them."""
    try:
        return _evaluate(func, args, kwargs)
    except Exception:
        return None


def _replaced(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _value(value)
    if isinstance(value, slice):
        return slice(_replaced(value.start), _replaced(value.stop), _replaced(value.step))
    if isinstance(value, tuple | list):
        found = [_replaced(item) for item in value]
        return type(value)(found) if type(value) in (tuple, list) else value
    return value


def _remember(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any, *, known: bool) -> None:
    """Keep the value beside a result that has one; a tensor that is written to from what is not known has none any more."""
    if _writes(func, kwargs):
        target = kwargs.get("out", args[0] if args else None)
        if not isinstance(target, torch.Tensor) or _plain(target) or not hasattr(target, "_value"):
            return
        if not known or (_attempt(func, args, kwargs) is None and func is not _T.__setitem__):
            _forget(target)
        return
    if not isinstance(result, torch.Tensor | tuple | list) or any(word in getattr(func, "__name__", "") for word in _RANDOM):
        return
    made = func in _FACTORIES or func in _LIKE
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    if not (known or made) or not all(_kept(item) for item in results):
        return
    if func in _LIKE:
        args = (_blank(args[0], result), *args[1:])
    found = _attempt(func, args, kwargs)
    values = [found] if isinstance(found, torch.Tensor) else list(found or ())
    if len(values) != len(results):
        return
    for one, value in zip(results, values, strict=True):
        if isinstance(value, torch.Tensor) and value.shape == one.shape and value.dtype == one.dtype and not _plain(one):
            one._value = value


def _blank(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """A plain tensor of these sizes."""
    with _disable_current_modes():
        return torch.empty((), dtype=tensor.dtype).expand(tensor.shape)


def _forget(tensor: torch.Tensor) -> None:
    """Of a tensor and its views, the value is not known any more."""
    found = getattr(tensor, "_value", None)
    if found is not None:
        found.untyped_storage()._stale = True
        del tensor._value


def _writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    return (
        func is _T.__setitem__
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))
        or kwargs.get("out") is not None
    )


_SIZED = frozenset(
    {_T.view, _T.reshape, _T.expand, _T.repeat, _T.narrow, _T.unflatten, torch.narrow, _T.new_zeros, _T.new_ones, _T.new_full}
)


def _in_numbers(value: Any, tensors: bool) -> Any:
    """Known whole numbers among sizes and in slices as numbers; ``tensors``: the value itself, too."""
    if isinstance(value, torch.Tensor):
        known = _value(value) if tensors and value.ndim == 0 and not value.is_floating_point() else None
        return value if known is None else _evaluate(_T.item, (known,), {})
    if isinstance(value, slice):
        return slice(*(_in_numbers(part, True) for part in (value.start, value.stop, value.step)))
    if type(value) in (tuple, list):
        alone = all(isinstance(item, int | slice | None) or item is Ellipsis or _small(item) for item in value)
        return type(value)(_in_numbers(item, alone) for item in value)
    return value


def _small(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.ndim == 0


def _by_place(func: Callable[..., Any], args: Any) -> Any:
    """The arguments, with the places where a known mask is true instead of it."""
    if func in (_T.__getitem__, _T.__setitem__):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(item, torch.Tensor) and item.dtype == torch.bool and item.ndim and _value(item) is not None for item in index):
            return (args[0], tuple(place for item in index for place in _places(item)), *args[2:])
    return args


def _places(item: Any) -> tuple[Any, ...]:
    value = _value(item) if isinstance(item, torch.Tensor) and item.dtype == torch.bool and item.ndim else None
    if value is None:
        return (item,)
    with _disable_current_modes():
        return tuple(value.nonzero(as_tuple=True))


def _chosen(tensor: torch.Tensor, which: Any, dim: int | None = None, *, output_size: int | None = None) -> torch.Tensor:
    """``repeat_interleave`` by known numbers, and ``masked_select`` by a known mask."""
    value = _value(which) if isinstance(which, torch.Tensor) else None
    if value is None:
        return tensor.repeat_interleave(which, dim, output_size=output_size) if not isinstance(which, torch.Tensor) else tensor[which]
    if value.dtype == torch.bool:
        shape = torch.broadcast_shapes(tensor.shape, value.shape)
        return tensor.expand(shape)[_places(_T.expand(value, shape))]
    tensor, dim = (tensor.flatten(), 0) if dim is None else (tensor, dim)
    with _disable_current_modes():
        index = torch.arange(tensor.shape[dim]).repeat_interleave(value.to(torch.int64))
    return tensor.index_select(dim, index)


def _align(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """The loss of whole clips where their lengths are not known; their mean is over tokens, as torch takes it."""
    steps, batch = log_probs.shape[:2]
    steps_of = [min(n, steps) for n in _lengths(input_lengths, steps, batch)]
    tokens_of = _lengths(target_lengths, targets.shape[-1], batch)
    losses = torch.nn.functional.ctc_loss(log_probs, targets, steps_of, tokens_of, blank, "none", zero_infinity)
    if reduction == "mean":
        return (losses / log_probs.new_tensor([max(1, n) for n in tokens_of])).mean()
    return losses.sum() if reduction == "sum" else losses


def _lengths(given: Any, whole: int, batch: int) -> list[int]:
    if not isinstance(given, torch.Tensor):
        return list(given)
    value = _value(given)
    return [whole] * batch if value is None else [int(n) for n in value.tolist()]


_ASKS = {torch.isfinite: True, _T.isfinite: True, **dict.fromkeys((torch.isnan, torch.isinf, _T.isnan, _T.isinf), False)}
_QUESTIONS = frozenset({torch.all, torch.any, _T.all, _T.any})
_CARRY = frozenset({torch.all, torch.any, _T.all, _T.any, _T.bool})
_NOT = frozenset({_T.__invert__, torch.logical_not, _T.logical_not})
_BOTH: dict[Any, Callable[[list[Any]], bool]] = {_T.__or__: any, torch.logical_or: any, _T.__and__: all, torch.logical_and: all}
_READS = frozenset({_T.__bool__, _T.item})


def _truth(func: Callable[..., Any], args: Sequence[Any]) -> bool | None:
    """What the result is, element by element, where all numbers are finite; None where that does not say it."""
    if func in _ASKS:
        return _ASKS[func]
    if not (func in _CARRY or func in _NOT or func in _READS or func in _BOTH):
        return None
    found = [getattr(value, "_truth", None) for value in args[: 2 if func in _BOTH else 1]]
    if None in found or not found:
        return None
    if func in _BOTH:
        return _BOTH[func](found)
    return not found[0] if func in _NOT else found[0]


_UNEQUAL = frozenset({_T.__ne__, _T.ne, torch.ne})
_EQUAL = frozenset({_T.__eq__, _T.eq, torch.eq}) | _UNEQUAL


def _against_zero(args: Sequence[Any]) -> bool:
    """Whether real numbers are compared with 0, which is how libraries ask for pictures that only fill up: of a step's none do."""
    tensor, other = args[:2]
    return isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and isinstance(other, int | float) and other == 0


def _collect(values: Sequence[Any], found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            _collect(value, found)
        elif isinstance(value, slice):
            _collect((value.start, value.stop, value.step), found)


def _whole(data: Any) -> bool:
    """Whether this is a whole number, or a list of some."""
    if isinstance(data, list | tuple):
        return 0 < len(data) <= MOST and all(map(_whole, data))
    return isinstance(data, int)


def _write(target: torch.Tensor, mask: torch.Tensor, value: Any) -> None:
    """``target[mask] = value``."""
    whole = mask.reshape(*mask.shape, *(1 for _ in range(target.ndim - mask.ndim)))
    if not isinstance(value, torch.Tensor):
        target.masked_fill_(whole, value)
    elif value.ndim <= target.ndim - mask.ndim or value.shape[0] == 1:
        target.copy_(torch.where(whole, value.to(target.dtype), target))
    else:
        rows = value.expand(value.shape[0], *target.shape[mask.ndim :])
        target.masked_scatter_(whole.expand_as(target), rows.to(target.dtype))
