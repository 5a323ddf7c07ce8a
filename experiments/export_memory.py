"""The bytes that a real process holds while an applied plan trains, beside the plan's peak.

    python experiments/export_memory.py --markdown experiments/export_memory.md

Four gloo processes run a GPT of two layers. In the process of device 0, which has the fullest shards, every storage that any op makes is
counted from when it is made until it is freed (a dispatch mode sees all ops, collectives and their padded buffers, and the scratch of our
own steps); parameters, buffers and the states of the optimizer are counted from the start. The peak is over a whole step: forward,
backward and update; the least of five after the first, for on a busy machine one step was once seen to hold a buffer longer than the
others (by one of gloo's threads, presumably). The last plans are random points of the choice graph, which move whole activations about as
no planner would.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import multiprocessing
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from export_speed import GPT
from points import plan_of, random_point

from solver_shard import Mesh, Plan, ShardedOptimizer, apply, load_plan, optimize, trace
from solver_shard.costs.model import CostModel
from solver_shard.graph.lowering import lower
from solver_shard.options import Options
from solver_shard.runtime.apply import runtime_of
from solver_shard.runtime.schedule import Run
from solver_shard.runtime.step import Compiled

SIZES = (256, 64, 4, 32, 8)
"""Vocabulary, width, heads, tokens and sequences."""
PLANS = {
    "ddp": {"mesh": "dp=4", "template": "ddp"},
    "zero1": {"mesh": "dp=4", "template": "zero1"},
    "zero3": {"mesh": "dp=4", "template": "zero3"},
    "zero1 over megatron": {"mesh": "dp=2,tp=2", "template": "dp=zero1,tp=megatron"},
    "zero3 over megatron-sp": {"mesh": "dp=2,tp=2", "template": "dp=zero3,tp=megatron-sp"},
    "solver": {"mesh": "dp=2,tp=2"},
    "solver, least memory": {"mesh": "dp=2,tp=2", "objective": "memory"},
    "context-parallel": {"mesh": "cp=4", "template": "context-parallel"},
    "megatron-sp": {"mesh": "tp=4", "template": "megatron-sp"},
    **{f"random {seed} on 4": {"mesh": "dp=4", "seed": seed} for seed in range(6)},
    **{f"random {seed} on 2,2": {"mesh": "dp=2,tp=2", "seed": seed} for seed in range(6)},
}


NOTES = """
What is stored (parameters, gradients, states of the optimizer) has the planned bytes, to the byte. All but states is what is left of a
peak without parameters and states; of every plan, the random ones too, it is within 5%.

The buffers that collectives are called with are counted on both sides. What a gather brings lies piece after piece, and where pieces are
columns (a cut in any dim but the first that is longer than 1), a copy puts them in place while the buffer is still there, so that the
gathered tensor is there twice; what a reduce-scatter or an all-to-all cuts in such a dim is packed first. Most of the random plans are
fullest at such a moment. A run holds a little that no plan counts: labels and masks of a step, scalars. A plan says
more than a run holds where the source of a transition is gone before its reader runs: it counts both until the reader is done.
"""


class Storages(TorchDispatchMode):  # type: ignore[misc]  # torch is not checked
    """Counts the bytes of storages.

    Attributes:
        running: what the step runs now, in words.
        at: what it ran at the peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.live = self.peak = 0
        self.running = self.at = "start"

    def add(self, tensor: torch.Tensor) -> None:
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage._cdata not in self.known and storage.nbytes():
            self.known.add(storage._cdata)
            self.live += storage.nbytes()
            weakref.finalize(storage, functools.partial(self._gone, storage._cdata, storage.nbytes()))
            if self.live > self.peak:
                self.peak, self.at = self.live, self.running

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


def watched(step: Compiled, plan: Plan, meter: Storages) -> Compiled:
    """A step that tells what it runs."""

    def said(k: int) -> str:
        one = step.order.instructions[k]
        if isinstance(one, Run):
            return plan.ops[one.op].name.removesuffix(".default")
        reshard = plan.reshards[one.reshard]
        moves = ", ".join(f"{move.kind} {move.before} to {move.after}" for move in reshard.steps)
        return f"{plan.tensors[reshard.tensor].name}: {moves or 'kept'}"

    def telling(k: int, run: Callable[[Any], None]) -> Callable[[Any], None]:
        def told(values: Any) -> None:
            meter.running = said(k)
            run(values)

        return told

    parts = {"ahead": step.ahead, "back": step.back}
    made = {name: tuple(telling(k + len(step.ahead) * (name == "back"), run) for k, run in enumerate(part)) for name, part in parts.items()}
    return dataclasses.replace(step, **made)


def run(rank: int, folder: str) -> None:
    """One process; that of device 0 writes what it has measured."""
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
        compiled = runtime_of(sharded).step
        meters: list[Storages] = []
        for _ in range(6):
            optimizer.zero_grad()
            meter = Storages()
            runtime_of(sharded).step = watched(compiled, plan, meter)
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
                meter.running = "update"
                optimizer.step()
            meters.append(meter)
        meter = min(meters[1:], key=lambda meter: meter.peak)
        said = {
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
        found[name] = {"planned": said, "measured": measured, "at": meter.at}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def table(found: dict[str, Any]) -> str:
    lines = [
        "| plan | parameters | optimizer | gradients | planned peak | measured peak | all but states, planned to measured | running then |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        said, measured = row["planned"], row["measured"]
        cells = [f"{said[k]:,}" + (" exact" if said[k] == measured[k] else f" ({measured[k]:,})") for k in list(said)[:3]]
        rest = [side["peak"] - side["parameters"] - side["optimizer"] for side in (said, measured)]
        lines.append(
            f"| {name} | {' | '.join(cells)} | {said['peak']:,} | {measured['peak']:,} | {rest[0] / rest[1] - 1:+.2%} | {row['at']} |"
        )
    return "\n".join(lines)


def planned(asked: Mapping[str, Any]) -> Plan:
    """One of the plans."""
    from memory import near

    model, inputs = built()
    if "seed" not in asked:
        return optimize(model, inputs, cluster=near(), gap=0.05, work_limit=5, **asked)
    program, options = trace(model, inputs, name="gpt"), Options(memory_limit=2**50, tied=False)
    costs = CostModel(Mesh.parse(asked["mesh"]), near())
    lowering = lower(program, options.rulebook(), costs, optimizer_state=options.optimizer_state())
    return plan_of(lowering, random_point(lowering.graph, asked["seed"]), costs, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, asked in PLANS.items():
            planned(asked).save(Path(folder, f"{name}.json"))
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
