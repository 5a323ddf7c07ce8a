"""From what the user calls a model to a Program: a preset, a config file, an entry point, a module, or a Program.

>>> program, source = program_of("gpt2", batch=16, seq=1024)
>>> source
'gpt2, batch 16, seq 1024, bf16'
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from solver_shard.errors import InputError
from solver_shard.program import Program

if TYPE_CHECKING:
    import torch

DEFAULT_DTYPE = "bf16"
"""Of presets and configs."""

_ENTRY_POINT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z")


def is_entry_point(text: str) -> bool:
    """Whether the text has the form ``package.module:function``."""
    return _ENTRY_POINT.match(text) is not None


def program_of(
    model: str | torch.nn.Module | Program,
    inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    *,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    loss_fn: Callable[..., Any] | None = None,
    forward_only: bool = False,
    checkpoint: bool = False,
) -> tuple[Program, str]:
    """Trace the model, unless it is a Program already; the second value says where it came from.

    Raises:
        InputError: the arguments do not fit together, or the model, file or entry point does not exist.
        TraceError: the model cannot be traced.
    """
    if checkpoint and forward_only:
        raise InputError("a forward-only step keeps nothing for a backward pass, so there is nothing to checkpoint; leave --checkpoint out")
    if checkpoint and not (isinstance(model, str) and not is_entry_point(model)):
        raise InputError(
            "checkpoint=True is for presets and configs; in a module of your own, wrap the parts to compute again in "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or enable checkpointing on a Hugging Face model"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(f"a loss function of type {type(loss_fn).__name__} was given; give a function of the model's outputs")
    if isinstance(model, Program):
        _refuse("a Program", inputs=inputs, batch=batch, seq=seq, dtype=dtype, loss_fn=loss_fn)
        return model, f"program {model.name}"
    if isinstance(model, str) and not is_entry_point(model):
        _refuse("a preset or config", inputs=inputs, loss_fn=loss_fn)
        if ":" in model and not os.path.exists(model):
            raise InputError(
                f"{model!r} is no file and not an entry point; an entry point is package.module:function, dots between names and no '.py', "
                "as in my_pkg.models:build"
            )
        if batch is None:
            raise InputError(f"the batch size for {model!r} is missing; give the global batch of one step, as in --batch 64 (batch=64)")
        asked = DEFAULT_DTYPE if dtype is None else dtype
        from solver_shard.frontends.huggingface import load

        module, inputs, name = load(model, batch=batch, seq=seq, dtype=asked, labels=not forward_only, checkpoint=checkpoint)
        words = [model, f"batch {batch}", *([f"seq {seq}"] if seq else []), asked]
        source = ", ".join([*words, *(["checkpointed"] if checkpoint else [])])
        return _trace(module, inputs, name=name, loss_fn=None, forward_only=forward_only), source
    if isinstance(model, str):
        _refuse("an entry point (it makes its own inputs)", inputs=inputs, batch=batch, seq=seq, dtype=dtype, loss_fn=loss_fn)
        from solver_shard.frontends.entry import load as load_entry

        module, inputs, loss_fn, name = load_entry(model)
        return _trace(module, inputs, name=name, loss_fn=loss_fn, forward_only=forward_only), model
    _refuse("a module (its inputs say them)", batch=batch, seq=seq, dtype=dtype)
    if inputs is None:
        raise InputError(
            f"example inputs for {type(model).__name__} are missing; give a tuple or a mapping of tensors with the global sizes of one step"
        )
    name = type(model).__name__
    return _trace(
        model, inputs, name=name, loss_fn=loss_fn, forward_only=forward_only
    ), f"module {type(model).__module__}.{type(model).__qualname__}"


def _trace(module: torch.nn.Module, inputs: Any, *, name: str, loss_fn: Callable[..., Any] | None, forward_only: bool) -> Program:
    from solver_shard.frontends.torch import trace

    program: Program = trace(module, inputs, name=name, loss_fn=loss_fn, forward_only=forward_only)
    return program


def _refuse(what: str, **given: Any) -> None:
    extra = [name for name, value in given.items() if value is not None]
    if extra:
        raise InputError(f"{', '.join(extra)} cannot be given with {what}; leave {'it' if len(extra) == 1 else 'them'} out")
