"""A small model in odd sizes with what is hard for a plan, and what four processes do with its plans."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn

SIZES = {"vocab": 11, "width": 6, "hidden": 9, "batch": 5, "seq": 3}
STEPS, RATE, MAX_NORM = 20, 0.01, 0.5


class Odd(nn.Module):
    """An embedding tied to the head, dropout, a batch norm, a constant and in-place ops, in sizes that no mesh divides."""

    def __init__(self, *, dropout: float = 0.2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(SIZES["vocab"], SIZES["width"])
        self.up, self.down = nn.Linear(SIZES["width"], SIZES["hidden"], bias=False), nn.Linear(SIZES["hidden"], SIZES["width"])
        self.norm = nn.BatchNorm1d(SIZES["hidden"])
        self.head = nn.Linear(SIZES["width"], SIZES["vocab"], bias=False)
        self.head.weight = self.tokens.weight
        self.dropout = dropout
        self.shift = torch.linspace(-0.1, 0.1, SIZES["width"])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        h = self.norm(self.up(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.down(F.dropout(h.relu_(), self.dropout, self.training)) + self.shift
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def built(**options: Any) -> tuple[Odd, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Odd(**options)
    ids = torch.randint(0, SIZES["vocab"], (SIZES["batch"], SIZES["seq"]))
    return model, {"ids": ids, "labels": torch.randint(0, SIZES["vocab"], (SIZES["batch"], SIZES["seq"]))}


def on_meta(shift: torch.Tensor) -> Odd:
    """The model without values, but for its constant, which no checkpoint has."""
    with torch.device("meta"):
        model = Odd()
    model.shift = shift
    return model


def run_process(rank: int, size: int, folder: str) -> None:
    """One of the processes; what goes wrong is written to a file of its own."""
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
        train(Path(folder))
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"failed{rank}").write_text(traceback.format_exc())
        os._exit(1)


def train(folder: Path) -> None:
    """Half of the steps under one plan, a checkpoint, the other half under another plan; beside the unsharded model."""
    from solver_shard.ops.random import Unsharded
    from solver_shard.plan.io import load_plan
    from solver_shard.runtime.apply import apply, recorded_collectives, reseed
    from solver_shard.runtime.optimizer import ShardedOptimizer, clip_grad_norm_

    model, inputs = built()
    reference = torch.optim.AdamW(model.parameters(), lr=RATE)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state: dict[str, Any] = {}
    for half, name in enumerate(("one", "two")):
        plan = load_plan(folder / f"{name}.json")
        source = built()[0] if half == 0 else on_meta(model.shift)
        sharded = apply(source, plan, mesh)
        optimizer = ShardedOptimizer(sharded, torch.optim.AdamW, lr=RATE)
        if half:
            state = {"model": sharded.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.load(state, checkpoint_id=folder / "checkpoint")
            sharded.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        reseed(sharded, half)
        recorded_collectives(sharded, reset=True)
        for step in range(STEPS // 2):
            with Unsharded(half, step):
                expected = model(**inputs)
            reference.zero_grad()
            expected.backward()
            optimizer.zero_grad()
            loss = sharded(**inputs)
            loss.backward()
            torch.testing.assert_close(loss.detach(), expected.detach(), rtol=2e-5, atol=2e-5)
            check_gradients(sharded, model, plan)
            norm = clip_grad_norm_(sharded, MAX_NORM)
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM), rtol=1e-4, atol=0)
            optimizer.step()
            reference.step()
        check_collectives(recorded_collectives(sharded), plan, STEPS // 2)
        check_memory(sharded, optimizer, plan)
        for name, tensor in model.state_dict().items():
            found = sharded.state_dict()[name]
            torch.testing.assert_close(found.full_tensor(), tensor, rtol=1e-3, atol=1e-4)
        if not half:
            dcp.save({"model": sharded.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder / "checkpoint")


def check_gradients(sharded: nn.Module, model: nn.Module, plan: Any) -> None:
    """In the planned layouts, with the unsharded values."""
    for name, parameter in sharded.named_parameters():
        planned = plan.tensors[plan.gradients[name]]
        assert list(parameter.grad.placements) == planned.layout.to_dtensor(plan.mesh.shape), name
        expected = model.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad.full_tensor(), expected, rtol=1e-3, atol=1e-4)


def check_collectives(found: list[Any], plan: Any, steps: int) -> None:
    """On the device with the fullest shards: kinds, axes, bytes and numbers are those of the plan."""
    if dist.get_rank():
        return
    planned: Counter[Any] = Counter()
    for reshard in plan.reshards:
        planned.update((s.kind, s.axes, s.nbytes) for s in reshard.steps if s.kind != "slice")
    for op in plan.ops:
        planned.update((inside.kind, inside.axes, inside.nbytes) for inside in op.collectives)
    if plan.clip is not None:
        planned[plan.clip.kind, plan.clip.axes, plan.clip.nbytes] += 1
    assert {(r.kind, r.axes, r.nbytes): r.count for r in found} == {key: n * steps for key, n in planned.items()}


def check_memory(sharded: nn.Module, optimizer: Any, plan: Any) -> None:
    """On the device with the fullest shards: what is stored has the planned bytes."""
    from solver_shard.runtime.apply import runtime_of

    if dist.get_rank():
        return
    stored = [t.to_local() for t in runtime_of(sharded).stored.values()]  # constants included
    assert sum(t.nbytes for t in stored) == sum(t.untyped_storage().nbytes() for t in stored) == plan.memory.series["parameters"][0]
    states = [t for found in optimizer.state.values() for t in found.values() if isinstance(t, torch.Tensor) and t.ndim]
    apart = [master.shard for master in optimizer._masters.values() if master.apart and master.copy is not None]
    assert sum(t.to_local().nbytes for t in (*states, *apart)) == plan.memory.series["optimizer"][0]
