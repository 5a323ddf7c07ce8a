"""Models of the user's own: ``package.module:function``, called without arguments.

The function returns ``(model, example_inputs)`` or ``(model, example_inputs, loss_fn)``; build the model under
``torch.device("meta")`` to spend no memory on weights.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from solver_shard.errors import InputError

_FORM = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<function>[A-Za-z_]\w*)\Z")
_RETURNS = "return (model, example_inputs) or (model, example_inputs, loss_fn)"


def load(text: str) -> tuple[nn.Module, Mapping[str, Any] | tuple[Any, ...], Callable[..., Any] | None, str]:
    """Import the module, call the function, check what it returns.

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
