"""One process of a job that runs plans for other tools as these tools do, and counts their collectives; rank 0 writes what it found.

Run as ``torchrun --nproc-per-node 2 given_worker.py FOLDER``; FOLDER/jobs.json has, by name, the tool, the model's source and the
plan's text.
"""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from dtensor_models import Recorder
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module

from solver_shard.exporters.script import Built, rebuild

STYLES = (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, Replicate, Shard)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    jobs = json.loads((folder / "jobs.json").read_text())
    found = {name: run(job, mesh) for name, job in jobs.items()}
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def run(job: dict[str, str], mesh: DeviceMesh) -> dict[str, Any]:
    """Loss, the worst gradient (relative to its largest element), and the collectives of forward and backward."""
    built = rebuild(job["source"], seed=1)
    whole = copy.deepcopy(built.model)
    apply = transformers if job["tool"] == "transformers" else parallelize
    apply(built, mesh, job["text"])
    with Recorder(mesh) as forward:
        loss = built.loss(built.model(**built.inputs))
    with Recorder(mesh) as backward:
        loss.backward()
    expected = built.loss(whole(**built.inputs))
    expected.backward()
    worst = 0.0
    for one, two in zip(built.model.parameters(), whole.parameters(), strict=True):
        gradient = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
        worst = max(worst, float((gradient - two.grad).abs().max() / two.grad.abs().max()))
    counts = Counter((phase, c.kind, c.nbytes) for phase, r in (("forward", forward), ("backward", backward)) for c in r.found)
    return {
        "loss": loss.detach().item(),
        "expected": expected.item(),
        "gradient": worst,
        "counts": sorted([*move, count] for move, count in counts.items()),
    }


def transformers(built: Built, mesh: DeviceMesh, text: str) -> None:
    """As ``from_pretrained(..., distributed_config=...)`` lays a model out: its class's own plan, and the given one over it."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    config = DistributedConfig.from_dict({"tp_size": mesh.size(), "tp_plan": json.loads(text)})
    plan, _, _ = built.model._resolve_parallel_plans(config)
    apply_tensor_parallelism(built.model, mesh, plan)


def parallelize(built: Built, mesh: DeviceMesh, text: str) -> None:
    parallelize_module(built.model, mesh, eval(text, {style.__name__: style for style in STYLES}))  # the test's own text


if __name__ == "__main__":
    main(Path(sys.argv[1]))
