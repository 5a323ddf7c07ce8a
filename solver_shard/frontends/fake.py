"""Borrow a module for tracing: its tensors become fake CPU tensors, its path is noted on every op; all is put back after.

Fake tensors must say they are on the CPU: on "cuda" the backward aborts the process of a build without CUDA, on "meta"
it silently vanishes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


@contextlib.contextmanager
def borrowed(module: nn.Module, mode: FakeTensorMode, *, trainable: bool) -> Iterator[dict[str, str]]:
    """Swap every tensor the module holds for a fake one; yields the map from every parameter and buffer name to its first name.

    Tied tensors stay tied. Tensors kept as plain attributes are treated as buffers meanwhile, unless they are real and
    on the CPU: those are constants whose values the model may read.
    """
    undo: list[tuple[MutableMapping[str, Any], str, Any]] = []
    made: dict[int, torch.Tensor] = {}

    def swap(store: MutableMapping[str, Any], key: str, tensor: torch.Tensor) -> None:
        fake = made.get(id(tensor))
        if fake is None:
            fake = made[id(tensor)] = fake_like(tensor, mode)
            if isinstance(tensor, nn.Parameter):
                fake = made[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad and trainable)
        undo.append((store, key, tensor))
        store[key] = fake

    try:
        for child in module.modules():
            stores: tuple[MutableMapping[str, Any], ...] = (child._parameters, child._buffers)
            for store in stores:
                for key, tensor in list(store.items()):
                    if tensor is not None:
                        swap(store, key, tensor)
            for key, tensor in list(vars(child).items()):
                if isinstance(tensor, torch.Tensor) and (tensor.device.type != "cpu" or isinstance(tensor, FakeTensor)):
                    undo.append((vars(child), key, tensor))
                    del vars(child)[key]
                    swap(child._buffers, key, tensor)
                    undo[-1] = (child._buffers, key, None)
        first: dict[int, str] = {}
        names: dict[str, str] = {}
        for name, held in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
            names[name] = first.setdefault(id(held), name)
        yield names
    finally:
        for store, key, tensor in reversed(undo):
            if tensor is None:
                store.pop(key, None)
            else:
                store[key] = tensor


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake CPU tensor of the same sizes, strides and dtype, without gradient."""
    with mode, torch.no_grad():
        if tensor.layout is not torch.strided:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


@contextlib.contextmanager
def alignments() -> Iterator[None]:
    """While open, alignment losses (CTC) run on fake tensors, for which torch (2.13) has no sizes of their results.

    Those of the saved probabilities, [batch, steps, 2 * longest target + 1], depend on numbers that are given as such here.
    """
    aten = torch.ops.aten
    made = {aten._ctc_loss.default: _aligned, aten._ctc_loss_backward.default: _aligned_backward}
    added = {op: kernel for op, kernel in made.items() if op not in fake_impls.op_implementations_dict}
    fake_impls.op_implementations_dict.update(added)
    try:
        yield
    finally:
        for op in added:
            fake_impls.op_implementations_dict.pop(op)


def _aligned(mode: Any, _op: Any, log_probs: Any, _targets: Any, _steps: Any, lengths: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    steps, batch = log_probs.shape[:2]
    with mode:
        return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * max(lengths) + 1)


def _aligned_backward(mode: Any, _op: Any, _gradient: Any, log_probs: Any, *_: Any, **__: Any) -> Any:
    with mode:
        return log_probs.new_empty(log_probs.shape)


@contextlib.contextmanager
def paths(module: nn.Module) -> Iterator[None]:
    """While open, every traced node carries the path of the module that runs, as the annotation ``module``."""
    outer: list[Any] = []
    handles = []
    meta = fx_traceback.current_meta
    before = dict(meta)

    def enter(path: str) -> Any:
        def hook(_module: nn.Module, _args: Any) -> None:
            outer.append(meta.get("custom"))
            meta["custom"] = {**(outer[-1] or {}), "module": path}

        return hook

    def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
        custom = outer.pop() if outer else None
        if custom is None:
            meta.pop("custom", None)
        else:
            meta["custom"] = custom

    try:
        for path, child in module.named_modules():
            handles.append(child.register_forward_pre_hook(enter(path)))
            handles.append(child.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        meta.clear()
        meta.update(before)
