"""A plan as a ``torchrun`` program of its own, which runs all of it: it builds the model, applies the plan and takes steps.

>>> write_whole("run.py", export(plan, plan_path="plan.json").text)      # torchrun --nproc-per-node 8 run.py --steps 10

The program needs this library and the plan's file beside it. It is a starting point: weights and inputs are random, the same in every
process; put your checkpoint and data where it says so.
"""

from __future__ import annotations

from solver_shard.costs.memory import WAYS
from solver_shard.export.exported import Exported
from solver_shard.plan.plan import Plan

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
{imports}from solver_shard.export.rebuild import rebuild

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
        imports = f"from solver_shard.export.optimizer import {', '.join(names)}\n"
        way = ", ".join(f"{name}={value}" for name, value in WAYS.get(plan.options.optimizer, {}).items())
        body = _TRAIN.format(optimizer=_ADAMW.format(way=way) if way else _SGD, clip=_CLIP if plan.options.clip else "")
    name = "".join(c if c.isprintable() and c not in '\\"' else "?" for c in plan.name)
    text = _TEXT.format(name=name, mesh=plan.mesh, processes=plan.mesh.size, plan_path=plan_path, imports=imports, body=body)
    return Exported(text=text)
