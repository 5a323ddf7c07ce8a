"""The bytes that a real process holds while an applied plan trains, beside the plan's peak.

    python experiments/export_memory.py --markdown experiments/export_memory.md

Four gloo processes run a GPT of two layers. In the process of device 0, which has the fullest shards, every storage that any op makes is
counted from when it is made until it is freed (a dispatch mode sees all ops, collectives and their padded buffers, and the scratch of our
own steps); parameters, buffers and the states of the optimizer are counted from the start. The peak is over the second step: forward,
backward and update.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))

from export_speed import GPT

SIZES = (256, 64, 4, 32, 8)
"""Vocabulary, width, heads, tokens and sequences."""
PLANS = {
    "ddp": {"mesh": "dp=4", "template": "ddp"},
    "zero1": {"mesh": "dp=4", "template": "zero1"},
    "zero3": {"mesh": "dp=4", "template": "zero3"},
    "zero1 over megatron": {"mesh": "dp=2,tp=2", "template": "dp=zero1,tp=megatron"},
    "solver, least memory": {"mesh": "dp=2,tp=2", "objective": "memory"},
}


NOTES = """
What is stored (parameters, gradients, states of the optimizer) has the planned bytes, to the byte. Of the rest, a run holds what a plan
does not count: the buffers that collectives are called with, and the copy that puts gathered columns in place. Where least is kept that is
more than 5% (the last row).
"""


class Storages(TorchDispatchMode):  # type: ignore[misc]  # torch is not checked
    """Counts the bytes of storages."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.live = self.peak = 0

    def add(self, tensor: torch.Tensor) -> None:
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage._cdata not in self.known and storage.nbytes():
            self.known.add(storage._cdata)
            self.live += storage.nbytes()
            weakref.finalize(storage, functools.partial(self._gone, storage._cdata, storage.nbytes()))
            self.peak = max(self.peak, self.live)

    def _gone(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.live -= nbytes

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for item in made if isinstance(made, tuple | list) else (made,):
            if isinstance(item, torch.Tensor) and not isinstance(item, DTensor):
                self.add(item)
        return made


def built() -> tuple[GPT, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    vocab, width, heads, seq, batch = SIZES
    ids = torch.randint(0, vocab, (batch, seq))
    return GPT(vocab, width, heads, seq), {"ids": ids, "labels": ids.clone()}


def run(rank: int, folder: str) -> None:
    """One process; that of device 0 writes what it has measured."""
    from solver_shard import apply, load_plan
    from solver_shard.export.dtensor import runtime_of
    from solver_shard.export.optimizer import ShardedOptimizer

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 4), rank=rank, world_size=4)
    found = {}
    for name in PLANS:
        path = Path(folder, f"{name}.json")
        if not path.exists():
            continue
        plan = load_plan(path)
        model, inputs = built()
        sharded = apply(model, plan, dist.device_mesh.init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.names))
        optimizer = ShardedOptimizer(sharded, torch.optim.AdamW, lr=1e-3)
        for step in range(2):
            optimizer.zero_grad()
            meter = Storages()
            stored = [t.to_local() for t in runtime_of(sharded).stored.values()]
            states = [s.to_local() for group in optimizer.state.values() for s in group.values() if isinstance(s, DTensor) and s.ndim]
            for tensor in (*stored, *states):
                meter.add(tensor)
            for key, value in inputs.items():
                if all(p.is_replicate for p in plan.layouts[key]):
                    meter.add(value)
            with meter:
                sharded(**inputs).backward()
                gradients = sum(p.grad.to_local().nbytes for p in sharded.parameters())
                optimizer.step()
            del step
        planned = {
            "parameters": plan.memory.series["parameters"][0],
            "optimizer": plan.memory.series["optimizer"][0],
            "gradients": sum(
                math.prod(t.layout.local_shape(t.shape, plan.mesh.shape)) * 4 for t in (plan.tensors[g] for g in plan.gradients.values())
            ),
            "peak": plan.memory.peak,
        }
        measured = {
            "parameters": sum(t.nbytes for t in stored),
            "optimizer": sum(t.nbytes for t in states),
            "gradients": gradients,
            "peak": meter.peak,
        }
        found[name] = {"planned": planned, "measured": measured}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def table(found: dict[str, Any]) -> str:
    lines = [
        "| plan | parameters | optimizer | gradients | planned peak | measured peak | all but states, planned to measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        planned, measured = row["planned"], row["measured"]
        cells = [f"{planned[k]:,}" + (" exact" if planned[k] == measured[k] else f" ({measured[k]:,})") for k in list(planned)[:3]]
        rest = [side["peak"] - side["parameters"] - side["optimizer"] for side in (planned, measured)]
        lines.append(f"| {name} | {' | '.join(cells)} | {planned['peak']:,} | {measured['peak']:,} | {rest[0] / rest[1] - 1:+.2%} |")
    return "\n".join(lines)


def main() -> None:
    from memory import near

    from solver_shard import optimize

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, inputs = built()
        for name, asked in PLANS.items():
            optimize(model, inputs, cluster=near(), gap=0.05, time_limit=20, **asked).save(Path(folder, f"{name}.json"))
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=run, args=(rank, folder)) for rank in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        text = table(json.loads(Path(folder, "found.json").read_text()))
    print(text)
    if options.markdown:
        options.markdown.write_text(
            "# What a real process holds, beside the plan\n\nBy `python experiments/export_memory.py --markdown "
            "experiments/export_memory.md`: four gloo processes, a GPT of two layers, bytes on device 0 (see the script).\n\n"
            + text
            + "\n"
            + NOTES
        )


if __name__ == "__main__":
    main()
