"""The model of a plan again, with real weights, and inputs of one step: for programs that run a plan.

>>> built = rebuild(plan.provenance.source, seed=0)
>>> type(built.model).__name__, {name: tuple(value.shape) for name, value in built.inputs.items()}
('LlamaForCausalLM', {'input_ids': (8, 16), 'labels': (8, 16)})

Weights are the model's own initialisation under the seed and inputs are random, both the same in every process. A real program loads
its checkpoint and its data instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from solver_shard.errors import InputError
from solver_shard.frontends.values import Fixed
from solver_shard.source import is_entry_point

_SOURCE = re.compile(
    r"(?P<model>.+), batch (?P<batch>\d+)(, seq (?P<seq>\d+))?, (?P<dtype>f32|bf16|f16)(?P<ckpt>, checkpointed)?(, \d+ microbatches)?\Z"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model on the CPU, its inputs by argument name, and the loss of its output (None: the model returns it)."""

    model: nn.Module
    inputs: Mapping[str, Any]
    loss_fn: Callable[..., Any] | None

    def loss(self, output: Any) -> torch.Tensor:
        """The scalar that a training step goes back from."""
        made = self.loss_fn(output) if self.loss_fn is not None else output if isinstance(output, torch.Tensor) else output["loss"]
        if not isinstance(made, torch.Tensor):
            raise InputError(f"the model's loss is a {type(made).__name__}; give a loss function that returns a scalar tensor")
        return made


def rebuild(source: str, *, seed: int = 0, forward_only: bool = False) -> Built:
    """Build the model that a plan's ``provenance.source`` names.

    Raises:
        InputError: the plan was made from a module in memory; or as for the source itself (no such file, entry point, ...).
    """
    found = _SOURCE.match(source)
    torch.manual_seed(seed)
    if found is not None:
        return _configured(found, forward_only)
    entry = source.partition(",")[0]
    if is_entry_point(entry):
        return _entry(entry)
    raise InputError(
        f"the plan was made from {source!r}, which cannot be built again from its name; build the model in your own program, or "
        "plan an entry point package.module:function"
    )


def _configured(found: re.Match[str], forward_only: bool) -> Built:
    from solver_shard.frontends.huggingface import load

    seq = None if found["seq"] is None else int(found["seq"])
    meta, shapes, _ = load(
        found["model"], batch=int(found["batch"]), seq=seq, dtype=found["dtype"], labels=not forward_only, checkpoint=bool(found["ckpt"])
    )
    config: Any = meta.config
    model = type(meta)._from_config(config, dtype=next(meta.parameters()).dtype)
    model.train()
    if found["ckpt"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    words = {"input_ids": getattr(config, "vocab_size", 2), "labels": getattr(config, "vocab_size", 2)}
    if "pixel_values" in shapes:
        words["labels"] = getattr(config, "num_labels", 2)
    inputs = {name: _values(value, words.get(name, 2)) for name, value in shapes.items()}
    return Built(model=model, inputs=inputs, loss_fn=None)


def _entry(text: str) -> Built:
    from solver_shard.frontends.entry import load

    model, given, loss_fn, _ = load(text)
    if any(value.is_meta for value in (*model.parameters(), *model.buffers())):
        model.to_empty(device="cpu")
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    if not isinstance(given, Mapping):
        import inspect

        names = list(inspect.signature(model.forward).parameters)
        given = dict(zip(names, given, strict=False))
    inputs = {name: _random(value, 2) if value.is_meta else value for name, value in given.items() if isinstance(value, torch.Tensor)}
    return Built(model=model, inputs=inputs, loss_fn=loss_fn)


def _values(like: Any, words: int) -> Any:
    """An input with values, in whatever it is nested."""
    if isinstance(like, Fixed):
        return like.tensor
    return pytree.tree_map_only(torch.Tensor, lambda leaf: _random(leaf, words), like)


def _random(like: torch.Tensor, words: int) -> torch.Tensor:
    if like.is_floating_point():
        return torch.randn(like.shape, dtype=like.dtype)
    return torch.randint(0, max(words, 1), like.shape).to(like.dtype)
