"""Trace an ``nn.Module`` to a Program: forward, or forward and backward of its loss, without weights or a GPU.

>>> import torch
>>> program = trace(torch.nn.Linear(4, 2, device="meta"), (torch.empty(8, 4, device="meta"),), name="one", forward_only=True)
>>> [op.name for op in program.ops], program.tensors[program.outputs[0]].name
(['aten.einsum.default', 'aten.add.Tensor'], 'output')
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode

from solver_shard.arguments import checked
from solver_shard.errors import InputError, SolverShardError, TraceError
from solver_shard.program import Program
from solver_shard.tracing.attention import fused_attention, unfused_flex
from solver_shard.tracing.clean import clean
from solver_shard.tracing.joint_graph import DTYPES, RawGraph, Rewritten, export, regions
from solver_shard.tracing.values import Fixed, Values, paired

Inputs = Mapping[str, Any] | tuple[Any, ...]


@checked
def trace(
    model: nn.Module,
    inputs: Inputs,
    *,
    name: str,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    forward_only: bool = False,
) -> Program:
    """The cleaned program of one step of ``model``.

    Regions under ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`` are not kept for the backward pass but computed
    again in it, as they are when the model runs; selective policies are followed (see :mod:`solver_shard.tracing.clean.finish`).

    >>> program = trace(model, {"x": torch.empty(8, 16)}, name="mlp", loss_fn=torch.sum)  # doctest: +SKIP

    Args:
        model: any module, on any device, meta included; it is left as it was. Training mode (dropout) is the model's own.
        inputs: keyword arguments by name, or positional arguments; tensors may be real, meta or fake, only their sizes are used.
        name: what the program is called.
        loss_fn: called as ``loss_fn(outputs)`` or ``loss_fn(outputs, inputs)``; returns a scalar. Without it the loss is the
            output's ``loss`` (Hugging Face models given labels) or the output itself if it is a scalar.
        forward_only: no loss and no backward; everything the model returns is an output.

    Returns:
        Ops and tensors in order, with global shapes; ``optimize`` takes it in place of a model.

    Raises:
        InputError: the inputs do not fit, or there is no scalar loss.
        TraceError: the model could not be traced, or its backward is not there.
    """
    return clean(trace_raw(model, inputs, name=name, loss_fn=loss_fn, forward_only=forward_only))


def trace_raw(
    model: nn.Module,
    inputs: Inputs,
    *,
    name: str,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    forward_only: bool = False,
) -> RawGraph:
    """The raw trace that ``trace`` cleans: the ops that run, which are those that DTensor sees. Arguments and errors are ``trace``'s."""
    if not isinstance(model, nn.Module):
        raise InputError(f"a model of type {type(model).__name__} was given; give a torch.nn.Module")
    trainable = any(p.requires_grad for p in model.parameters())
    if not forward_only and not trainable:
        raise InputError(f"model {name!r} has no trainable parameter, so it has no backward; set requires_grad, or use --forward-only")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    flat = _Flat(model, inputs, mode, forward_only=forward_only)
    with borrowed(model, mode, trainable=not forward_only) as names:
        step = _TracedStep(model, flat, loss_fn, name, forward_only)
        with (
            _failure(name, step),
            _compiling(whole=flat.whole),
            paths(model),
            regions(),
            alignments(),
            Values(whole=_of_library(model)),
            fused_attention(),
            Rewritten(),
        ):
            return export(step, flat.tensors, flat.names, name=name, names=names, forward_only=forward_only)


def named_tensors(model: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The tensors among the inputs by the names that a program has for them.

    >>> list(named_tensors(nn.Linear(4, 2), (torch.ones(3, 4),)))
    ['input']
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        flat = _Flat(model, inputs, mode, forward_only=True)
    given = [leaf for leaf in pytree.tree_leaves((flat.args, flat.kwargs)) if isinstance(leaf, torch.Tensor)]
    return dict(zip(flat.names, given, strict=True))


def run_eagerly(
    model: nn.Module,
    inputs: Inputs,
    tensors: Mapping[str, torch.Tensor],
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    forward_only: bool = False,
) -> dict[str, torch.Tensor]:
    """What a step of the model itself returns, by the names that a program has for it; the loss has a graph to go backward.

    Args:
        tensors: what stands in place of each tensor of the inputs, by name.

    Raises:
        InputError: as ``trace``.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        flat = _Flat(model, inputs, mode, forward_only=forward_only)
    step = _TracedStep(model, flat, loss_fn, type(model).__name__, forward_only)
    with unfused_flex():
        found = step(*(tensors[name] for name in flat.names))
    return dict(zip(step.outputs, found, strict=True))


def progress(model: nn.Module, inputs: Inputs, *, name: str, forward_only: bool = False) -> tuple[SolverShardError | None, int]:
    """What stops a step of the model on these inputs, if anything does, and after how many calls of torch; nothing is traced."""
    values = Values(whole=_of_library(model))
    try:
        _run(model, inputs, values, name=name, forward_only=forward_only)
    except SolverShardError as error:
        return error, values.calls
    return None, values.calls


def check(model: nn.Module, inputs: Inputs, *, name: str, forward_only: bool = False) -> None:
    """Run a step on fake tensors.

    Raises:
        InputError, TraceError: as ``trace``.
    """
    _run(model, inputs, Values(whole=_of_library(model)), name=name, forward_only=forward_only)


def _run(model: nn.Module, inputs: Inputs, values: Values, *, name: str, forward_only: bool) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    flat = _Flat(model, inputs, mode, forward_only=forward_only)
    step = _TracedStep(model, flat, None, name, forward_only)
    with (
        borrowed(model, mode, trainable=False),
        _failure(name, step),
        _compiling(whole=flat.whole),
        torch.no_grad(),
        mode,
        alignments(),
        values,
        fused_attention(),
        Rewritten(),
    ):
        step(*flat.tensors)


class _Flat:
    """The tensors among nested inputs, with a name for each."""

    def __init__(self, model: nn.Module, inputs: Inputs, mode: FakeTensorMode, *, forward_only: bool) -> None:
        if isinstance(inputs, torch.Tensor):
            inputs = (inputs,)
        if isinstance(inputs, Mapping):
            self.args: tuple[Any, ...] = ()
            self.kwargs: dict[str, Any] = dict(inputs)
        elif isinstance(inputs, tuple | list):
            self.args, self.kwargs = tuple(inputs), {}
        else:
            raise InputError(
                f"inputs of type {type(inputs).__name__} were given; give a dict of keyword arguments or a tuple of positional ones"
            )
        positional = argument_names(model, len(self.args))
        leaves, self.spec = pytree.tree_flatten_with_path((self.args, self.kwargs))
        self.leaves: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        for path, leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                self.leaves.append(leaf.tensor if isinstance(leaf, Fixed) else leaf)
                continue
            keys = [str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", key)))) for key in path[1:]]
            if getattr(path[0], "idx", 1) == 0:
                keys[0] = positional[int(keys[0])]
            if leaf.dtype not in DTYPES:
                raise InputError(f"input {'.'.join(keys)!r} has dtype {leaf.dtype}; legal: {', '.join(map(str, DTYPES))}")
            if not forward_only and 0 in leaf.shape:
                raise InputError(
                    f"input {'.'.join(keys)!r} of shape {list(leaf.shape)} has no elements; give tensors with the global sizes of one step"
                )
            self.leaves.append(_Slot(len(self.tensors)))
            self.tensors.append(fake_like(leaf, mode))
            self.names.append(".".join(keys))
        self.whole = not any(name == "position_ids" and tensor.ndim < 3 for name, tensor in zip(self.names, self.tensors, strict=True))
        """Whether sequences have their usual positions; where they are given, several may be packed into one."""

    def rebuild(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keyword arguments with these tensors in place."""
        leaves = [tensors[leaf.index] if isinstance(leaf, _Slot) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


class _Slot:
    def __init__(self, index: int) -> None:
        self.index = index


class _TracedStep(nn.Module):  # type: ignore[misc]  # torch is not checked
    """What is traced: flat tensors in; the loss, or the flat outputs, out."""

    def __init__(self, model: nn.Module, flat: _Flat, loss_fn: Callable[..., Any] | None, name: str, forward_only: bool) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self.flat, self._loss_fn, self._name, self._forward_only = flat, loss_fn, name, forward_only
        self.outputs: list[str] = []

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.flat.rebuild(tensors)
        with paired(), _forgetting(self.model):
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        result = self.model(*args, **kwargs)
        if self._forward_only:
            leaves, _ = pytree.tree_flatten_with_path(result)
            found = [(path, leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
            self.outputs = [".".join(["output", *(_key(key) for key in path)]) for path, _ in found]
            if not found:
                raise InputError(f"model {self._name!r} returns no tensor; return the tensors that the step computes")
            return tuple(leaf for _, leaf in found)
        loss = self._loss(result, kwargs or args)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise InputError(
                f"the loss of {self._name!r} must be one floating-point number, got {what}; give the labels with the inputs, give a "
                "loss function of the outputs, return a scalar loss from the model, or use --forward-only"
            )
        self.outputs = ["loss"]
        return (loss.reshape(()),)

    def _loss(self, result: Any, inputs: Any) -> Any:
        if self._loss_fn is not None:
            return self._loss_fn(result, inputs) if _takes_two(self._loss_fn) else self._loss_fn(result)
        loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
        if loss is not None:
            return loss
        if isinstance(result, torch.Tensor):
            return result
        raise InputError(
            f"model {self._name!r} returns {type(result).__name__} without a loss; give the labels with the inputs, give a loss function "
            "of the outputs, return a scalar loss from the model, or use --forward-only"
        )


@contextlib.contextmanager
def _forgetting(model: nn.Module) -> Iterator[None]:
    """Tensors that a model keeps for its next step (``cached_property``) are of this run alone."""
    held = [owner for module in model.modules() for owner in (module, *vars(module).values()) if hasattr(owner, "__dict__")]
    before = [set(vars(owner)) for owner in held]
    try:
        yield
    finally:
        for owner, keys in zip(held, before, strict=True):
            for key in set(vars(owner)) - keys:
                if isinstance(vars(owner)[key], torch.Tensor):
                    delattr(owner, key)


def _key(key: Any) -> str:
    return str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", key))))


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


def argument_names(model: nn.Module, count: int) -> list[str]:
    """Names of the positional arguments of forward; ``arg3`` where it takes any number."""
    found = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [*found[:count], *(f"arg{i}" for i in range(len(found), count))]


def _of_library(model: nn.Module) -> bool:
    """Whether the model's class is one of transformers, whose questions about values are known to be about padding and ranges."""
    return type(model).__module__.startswith("transformers.")


_MASK_QUESTIONS = ("is_torchdynamo_exporting", "find_packed_sequence_indices")
"""What transformers asks before it leaves a mask out."""


@contextlib.contextmanager
def _compiling(*, whole: bool) -> Iterator[None]:
    """Tell the model that it is being compiled: libraries then do not look into mask values.

    While exporting, transformers builds a mask of [batch, 1, query, key] elements for each step, as what it exports may be called
    with others, and one of packed sequences, as it may not look at positions. A step of whole sequences needs neither: causal
    attention is the fused op's own flag, as it is when training runs.
    """
    before = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    masks = vars(sys.modules.get("transformers.masking_utils") or object) if whole else {}
    asked = {name: masks[name] for name in _MASK_QUESTIONS if name in masks}
    try:
        if asked:
            masks.update(dict.fromkeys(asked, lambda *_: None))
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = before
        if asked:
            masks.update(asked)


@contextlib.contextmanager
def _failure(name: str, step: _TracedStep) -> Iterator[None]:
    """Whatever the model raises becomes a TraceError that says where and what to do."""
    try:
        yield
    except SolverShardError:
        raise
    except Exception as error:
        cause = " ".join(str(error).split())[:500] or type(error).__name__
        where = _where(error, step.model)
        if isinstance(error, BY_VALUE) or _UNMADE in cause:
            what = getattr(error, "func", "a write")
            raise TraceError(
                f"tracing {name!r} failed{where}: it decides by the values of a tensor (an .item(), a branch, or how often a mask "
                f"is true: {what}), which are not known before the step runs. Give a model of your own without that as "
                "package.module:function, or the value as a constant"
            ) from error
        if isinstance(error, RuntimeError) and any(words in cause for words in _MIXED):
            raise TraceError(
                f"tracing {name!r} failed{where}: {type(error).__name__}: {cause}; the model mixes dtypes; ask for f32, as in --dtype f32"
            ) from error
        if _of_library(step.model):
            raise TraceError(_refused(error, cause, where, step)) from error
        raise TraceError(
            f"tracing {name!r} failed{where}: {type(error).__name__}: {cause}. Supported are modules whose forward (and loss) runs on "
            "fake CPU tensors: sizes, dtypes and control flow known without looking at values, no .item(), no boolean-mask indexing, no "
            "device= set to an accelerator. Check that the inputs fit forward, and replace what depends on values"
        ) from error


def _refused(error: Exception, cause: str, where: str, step: _TracedStep) -> str:
    """What a class of transformers does not do, in its own words where it has some, and what to give instead."""
    kind = type(step.model).__name__
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None  # of the library, or of Python or torch
    said = last is not None and f"{os.sep}transformers{os.sep}" in last.filename and (last.line or "").startswith("raise ")
    if isinstance(error, ImportError) and "library" in cause:
        missing = cause.split(" library")[0].split()[-1]
        return f"{kind} needs the library {missing!r}{where}, which is not installed; run: pip install {missing}; or use --forward-only"
    if said and _UNTRAINED.search(cause):
        return (
            f"{kind} has no training step{where}: {cause.rstrip('.')}; use --forward-only, or give a model of your own with a loss: {_OWN}"
        )
    reads = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in zip(step.flat.names, step.flat.tensors, strict=True))
    how = "refuses" if said else "does not run on"
    return (
        f"{kind} {how} inputs made from its config ({reads}){where}: {cause.rstrip('.')}; correct the config, or give it with its inputs "
        f"as {_OWN}"
    )


_UNTRAINED = re.compile(r"(?i)\b(not|n't|no)\b.*\btrain(ing|able|ed)?\b|\btraining\b.*\b(not|n't)\b")
_UNMADE = "its data is not allocated yet"
"""What torch says where a constant is written to at places that are not known."""

_OWN = "package.module:function, which returns (model, inputs)"
"""What a user writes where a config is not enough."""


BY_VALUE = (DataDependentOutputException, DynamicOutputShapeException)
"""What is raised where a model decides by values that are not known."""

_MIXED = ("expected scalar type", "to have the same dtype", "must have the same dtype", "expected m1 and m2 to have the same dtype")
"""What torch says of operands in several dtypes."""


def _where(error: BaseException, model: nn.Module) -> str:
    """The innermost module whose forward was running, and the line of the model's source."""
    paths_of = {id(child): path for path, child in model.named_modules()}
    found, line, step = "", "", error.__traceback__
    while step is not None:
        owner, file = step.tb_frame.f_locals.get("self"), step.tb_frame.f_code.co_filename
        if id(owner) in paths_of:
            found = paths_of[id(owner)] or type(owner).__name__
        if found and not file.startswith(_OURS):
            line = f" at {os.path.basename(file)}:{step.tb_lineno}"
        step = step.tb_next
    return f" in module {found!r}{line}" if found else ""


_OURS = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)), "<")
"""Where no line of a model's source is."""


@contextlib.contextmanager
def borrowed(module: nn.Module, mode: FakeTensorMode, *, trainable: bool) -> Iterator[dict[str, str]]:
    """Swap every tensor the module holds for a fake one; yields the map from every parameter and buffer name to its first name.

    Borrow a module for tracing: its tensors become fake CPU tensors, its path is noted on every op; all is put back after.

    Fake tensors must say they are on the CPU: on "cuda" the backward aborts the process of a build without CUDA, on "meta"
    it silently vanishes.

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
