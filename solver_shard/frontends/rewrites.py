"""Calls that torch traces wrongly, or not at all, as calls that say the same.

Recurrent layers with dropout between them: torch's decomposition of ``lstm``, ``gru`` and ``rnn_*`` (2.13, ``_rnn_helper``) leaves the
dropout out. They are called layer by layer, with a dropout of its own between two.

``Tensor.random_`` with bounds: the traced op has an argument called ``from``, which the generated code cannot name. It is
``randint_like``, copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class Rewritten(TorchFunctionMode):  # type: ignore[misc]  # torch is not checked
    """While active, such calls are made in the other way."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _RECURRENT and not kwargs and func is getattr(torch._VF, name):
            return _layer_by_layer(func, *args)
        if func is torch.Tensor.random_ and len(args) > 1:
            return args[0].copy_(torch.randint_like(args[0], *args[1:]))
        return func(*args, **kwargs)


def _layer_by_layer(func: Callable[..., Any], *args: Any) -> Any:
    """``func``, the recurrent layers of a module, with every dropout a call of its own.

    Args:
        args: input, state, weights, whether there are biases, number of layers, dropout, training, both ways, batch first; of packed
            sequences the sizes of their batches after the input, and no batch first.
    """
    lstm = func.__name__ == "lstm"
    packed = isinstance(args[2] if not lstm else args[1], torch.Tensor) and isinstance(args[3], tuple | list)
    given, rest = args[: 2 if packed else 1], args[2 if packed else 1 :]
    state, weights, biases, layers, dropout, training, both = rest[:7]
    if not (dropout and training and layers > 1):
        return func(*args)
    first = not packed and rest[7]
    x = given[0].transpose(0, 1) if first else given[0]
    count, ways = len(weights) // layers, 2 if both else 1
    ends: list[Any] = []
    for layer in range(layers):
        here = slice(layer * ways, (layer + 1) * ways)
        start = [part[here] for part in state] if lstm else state[here]
        own = weights[layer * count : (layer + 1) * count]
        x, *end = func(x, *given[1:], start, own, biases, 1, 0.0, training, both, *(() if packed else (False,)))
        ends.append(end)
        x = F.dropout(x, dropout) if layer < layers - 1 else x
    return (x.transpose(0, 1) if first else x, *(torch.cat(parts) for parts in zip(*ends, strict=True)))
