"""A plan as a ``torchrun`` program of its own, which runs all of it: it builds the model, applies the plan and takes steps.

>>> write_whole("run.py", export(plan, plan_path="plan.json").text)      # torchrun --nproc-per-node 8 run.py --steps 10

The program needs this library and the plan's file beside it. It is a starting point: weights and inputs are random, the same in every
process; put your checkpoint and data where it says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from solver_shard.costs.memory import WAYS
from solver_shard.errors import InputError
from solver_shard.exporters import Exported
from solver_shard.plan.plan import Plan
from solver_shard.tracing.load import is_entry_point
from solver_shard.tracing.values import Fixed

TARGET = "dtensor-script"

_TEXT = '''"""Runs the plan of {name} on {mesh}; written by solver-shard.

    torchrun --nproc-per-node {processes} FILE --steps 2
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import solver_shard
{imports}from solver_shard.exporters.script import rebuild

PLAN = Path(__file__).resolve().parent / {plan_path!r}
LEARNING_RATE = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, default=PLAN)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given = parser.parse_args()
    plan = solver_shard.load_plan(given.plan)
    if given.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    try:
        mesh = init_device_mesh(given.device, plan.mesh.whole.shape, mesh_dim_names=plan.mesh.whole.names)
        built = rebuild(plan.provenance.source, seed=0, forward_only=plan.options.forward_only)  # your model and its checkpoint
        sharded = solver_shard.apply(built.model.to(given.device), plan, mesh, loss_fn=built.loss_fn)
        inputs = {{name: value.to(given.device) for name, value in built.inputs.items()}}  # your data: whole batches
{body}    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

_TRAIN = """        optimizer = {optimizer}
        for step in range(given.steps):
            total = 0.0
            for _ in range(plan.options.microbatches):
                loss = sharded(**inputs) / plan.options.microbatches
                loss.backward()
                total += loss.item()
{clip}            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"step {{step}}: loss {{total:.6f}}", flush=True)
"""

_CLIP = "            clip_grad_norm_(sharded, 1.0)\n"

_FORWARD = """        for step in range(given.steps):
            sharded(**inputs)
            if dist.get_rank() == 0:
                print(f"step {step}: forward pass done", flush=True)
"""

_ADAMW = "ShardedOptimizer(sharded, torch.optim.AdamW, lr=LEARNING_RATE, {way})"
_SGD = "ShardedOptimizer(sharded, torch.optim.SGD, lr=LEARNING_RATE)"


def export(plan: Plan, *, plan_path: str = "plan.json", lossy: bool = False) -> Exported:
    """The program's text.

    Args:
        plan_path: of the plan's file, from the folder of the program.
        lossy: has no effect: the program expresses all of the plan.
    """
    imports = ""
    if plan.options.forward_only:
        body = _FORWARD
    else:
        names = ["ShardedOptimizer", "clip_grad_norm_"] if plan.options.clip else ["ShardedOptimizer"]
        imports = f"from solver_shard.runtime.optimizer import {', '.join(names)}\n"
        way = ", ".join(f"{name}={value}" for name, value in WAYS.get(plan.options.optimizer, {}).items())
        body = _TRAIN.format(optimizer=_ADAMW.format(way=way) if way else _SGD, clip=_CLIP if plan.options.clip else "")
    name = "".join(c if c.isprintable() and c not in '\\"' else "?" for c in plan.name)
    text = _TEXT.format(name=name, mesh=plan.mesh, processes=plan.mesh.size, plan_path=plan_path, imports=imports, body=body)
    return Exported(text=text)


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

    >>> built = rebuild(plan.provenance.source, seed=0)
    >>> type(built.model).__name__, {name: tuple(value.shape) for name, value in built.inputs.items()}
    ('LlamaForCausalLM', {'input_ids': (8, 16), 'labels': (8, 16)})

    Weights are the model's own initialisation under the seed and inputs are random, both the same in every process. A real program loads
    its checkpoint and its data instead.

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
    from solver_shard.tracing.huggingface import load

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
    from solver_shard.tracing.load import load_entry

    model, given, loss_fn, _ = load_entry(text)
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
