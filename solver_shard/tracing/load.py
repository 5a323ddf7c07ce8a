"""From what the user calls a model to a Program: a preset, a config file, an entry point, a module, or a Program.

>>> program, source = program_of("gpt2", batch=16, seq=1024)
>>> source
'gpt2, batch 16, seq 1024, bf16'
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from solver_shard.errors import InputError
from solver_shard.program import Program

if TYPE_CHECKING:
    from solver_shard.tracing.clean import TracedProgram


DEFAULT_DTYPE = "bf16"
"""Of presets and configs."""

_ENTRY_POINT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z")


def is_entry_point(text: str) -> bool:
    """Whether the text has the form ``package.module:function``."""
    return _ENTRY_POINT.match(text) is not None


def program_of(
    model: str | torch.nn.Module | Program, inputs: Mapping[str, Any] | tuple[Any, ...] | None = None, **options: Any
) -> tuple[Program, str]:
    """The program of ``traced_of``, whose arguments and errors it has, and where it came from."""
    program, _, source = traced_of(model, inputs, **options)
    return program, source


def traced_of(
    model: str | torch.nn.Module | Program,
    inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    *,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    loss_fn: Callable[..., Any] | None = None,
    forward_only: bool = False,
    checkpoint: bool = False,
) -> tuple[Program, TracedProgram | None, str]:
    """Trace the model, unless it is a Program already: then there is no trace. The last value says where it came from.

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
        if forward_only and model.gradients:
            raise InputError(f"program {model.name} has a backward pass; trace the model with forward_only=True to plan its forward pass")
        _refuse("a Program", inputs=inputs, batch=batch, seq=seq, dtype=dtype, loss_fn=loss_fn)
        return model, None, f"program {model.name}"
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
        from solver_shard.tracing.huggingface import load

        module, inputs, name = load(model, batch=batch, seq=seq, dtype=asked, labels=not forward_only, checkpoint=checkpoint)
        words = [model, f"batch {batch}", *([f"seq {seq}"] if seq else []), asked]
        source = ", ".join([*words, *(["checkpointed"] if checkpoint else [])])
        return *_trace(module, inputs, name=name, loss_fn=None, forward_only=forward_only), source
    if isinstance(model, str):
        _refuse("an entry point (it makes its own inputs)", inputs=inputs, batch=batch, seq=seq, dtype=dtype, loss_fn=loss_fn)

        module, inputs, loss_fn, name = load_entry(model)
        return *_trace(module, inputs, name=name, loss_fn=loss_fn, forward_only=forward_only), model
    _refuse("a module (its inputs say them)", batch=batch, seq=seq, dtype=dtype)
    if inputs is None:
        raise InputError(
            f"example inputs for {type(model).__name__} are missing; give a tuple or a mapping of tensors with the global sizes of one step"
        )
    name = type(model).__name__
    source = f"module {type(model).__module__}.{type(model).__qualname__}"
    return *_trace(model, inputs, name=name, loss_fn=loss_fn, forward_only=forward_only), source


def _trace(
    module: torch.nn.Module, inputs: Any, *, name: str, loss_fn: Callable[..., Any] | None, forward_only: bool
) -> tuple[Program, TracedProgram]:
    from solver_shard.tracing.clean import clean_with_values
    from solver_shard.tracing.torch import trace_raw

    found = clean_with_values(trace_raw(module, inputs, name=name, loss_fn=loss_fn, forward_only=forward_only))
    return found.program, found


def _refuse(what: str, **given: Any) -> None:
    extra = [name for name, value in given.items() if value is not None]
    if extra:
        raise InputError(f"{', '.join(extra)} cannot be given with {what}; leave {'it' if len(extra) == 1 else 'them'} out")


_FORM = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<function>[A-Za-z_]\w*)\Z")
_RETURNS = "return (model, example_inputs) or (model, example_inputs, loss_fn)"


def load_entry(text: str) -> tuple[nn.Module, Mapping[str, Any] | tuple[Any, ...], Callable[..., Any] | None, str]:
    """Import the module, call the function, check what it returns.

    Models of the user's own: ``package.module:function``, called without arguments.

    The function returns ``(model, example_inputs)`` or ``(model, example_inputs, loss_fn)``; build the model under
    ``torch.device("meta")`` to spend no memory on weights.

    The current directory is importable, as it is for ``python -m``.

    Returns:
        model, inputs (keyword arguments by name, or positional ones), loss function or None, and the model's name.

    Raises:
        InputError: the text has another form, the module or function does not exist or raises, or returns something else.
    """
    found = _FORM.match(text)
    if found is None:
        raise InputError(f"entry point {text!r} was given; write it as package.module:function")
    function = _function(found["module"], found["function"])
    try:
        result = function()
    except (Exception, SystemExit) as error:
        raise InputError(
            f"entry point {text!r} raised {type(error).__name__}: {error}; it is called without arguments and must {_RETURNS}"
        ) from error
    return _checked(text, result)


def _function(module_name: str, name: str) -> Callable[[], Any]:
    here = os.getcwd()
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        importlib.invalidate_caches()
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise InputError(
                f"module {module_name!r} of the entry point cannot be found (no {missing!r}); run from the directory that holds "
                "it, or put that directory on PYTHONPATH"
            ) from None
        raise InputError(f"module {module_name!r} of the entry point needs {missing!r}, which is not installed; install it") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"importing {module_name!r} raised {type(error).__name__}: {error}; correct the module") from error
    finally:
        if added:
            sys.path.remove(here)
    function = getattr(module, name, None)
    if function is None:
        legal = [key for key, value in vars(module).items() if callable(value) and getattr(value, "__module__", "") == module_name]
        raise InputError(f"module {module_name!r} has no {name!r}; functions it defines: {', '.join(sorted(legal)) or 'none'}")
    if not callable(function):
        raise InputError(f"{module_name}:{name} is a {type(function).__name__}; name a function that takes no argument and must {_RETURNS}")
    called: Callable[[], Any] = function
    return called


def _checked(text: str, result: Any) -> tuple[nn.Module, Mapping[str, Any] | tuple[Any, ...], Callable[..., Any] | None, str]:
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        what = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise InputError(f"entry point {text!r} returned {what}; {_RETURNS}")
    model, inputs, loss = (*result, None)[:3]
    if not isinstance(model, nn.Module):
        raise InputError(f"entry point {text!r} returned a {type(model).__name__} as the model, not a torch.nn.Module; {_RETURNS}")
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, list):
        inputs = tuple(inputs)
    if not isinstance(inputs, Mapping | tuple):
        raise InputError(
            f"entry point {text!r} returned a {type(inputs).__name__} as example inputs; give a tuple of positional arguments or a mapping "
            f"of keyword arguments; {_RETURNS}"
        )
    if loss is not None and not callable(loss):
        raise InputError(f"entry point {text!r} returned a {type(loss).__name__} as the loss, not a function of the outputs; {_RETURNS}")
    return model, inputs, loss, type(model).__name__
