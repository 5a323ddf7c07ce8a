"""One process of a job that runs exported eager programs and holds them against the unsharded model; rank 0 writes what it found.

Run as ``torchrun --nproc-per-node 4 eager_worker.py FOLDER``; FOLDER holds ``*.py`` from the parallelize exporter and ``hf.json``.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from solver_shard.exporters.script import Built, rebuild


def main(folder: Path) -> None:
    found: dict[str, Any] = {}
    names = sorted(path.stem for path in folder.glob("*.py"))
    modules = {name: load(folder / f"{name}.py") for name in names}
    dist.init_process_group("gloo")
    sys.argv = ["program", "--steps", "1"]
    with mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT):  # one group for all that follows
        modules[names[0]].main()
    for name, module in modules.items():
        mesh = module.device_mesh("cpu")
        built = rebuild(module.SOURCE, seed=1)
        whole = copy.deepcopy(built.model)
        model = module.parallelize(built.model, mesh)
        inputs = module.local_inputs(dict(built.inputs), mesh)
        found[name] = compare(model, whole, inputs, built, [mesh[axis] for axis in module.INPUT_AXES])
        if name == "fsdp":
            found["placements"] = {n: str(p.placements) for n, p in model.named_parameters() if isinstance(p, DTensor)}
    found["hf"] = hugging_face(json.loads((folder / "hf.json").read_text()), modules[names[0]].SOURCE)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"exported_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compare(model: nn.Module, whole: nn.Module, inputs: dict[str, torch.Tensor], built: Built, data: list[DeviceMesh]) -> dict[str, Any]:
    """Loss, the worst gradient (relative to its largest element), and the collectives that ran."""
    with CommDebugMode() as watched:
        loss = built.loss(model(**inputs))
        loss.backward()
    expected = built.loss(whole(**built.inputs))
    expected.backward()
    value = loss.detach().clone()
    for axis in data:
        dist.all_reduce(value, group=axis.get_group())
        value /= axis.size()
    worst = 0.0
    for (name, one), (other, two) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert name == other
        gradient = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
        worst = max(worst, float((gradient - two.grad).abs().max() / two.grad.abs().max()))
    counts = {str(op).rpartition(".")[2]: count for op, count in watched.get_comm_counts().items()}
    return {"loss": value.item(), "expected": expected.item(), "gradient": worst, "counts": counts}


def hugging_face(arguments: dict[str, Any], source: str) -> dict[str, Any]:
    """transformers' own tensor parallelism with an exported tp_plan."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    built = rebuild(source, seed=1)
    whole = copy.deepcopy(built.model)
    config = DistributedConfig.from_dict(arguments)
    plan, _, _ = built.model._resolve_parallel_plans(config)
    mesh = init_device_mesh("cpu", (config.tp_size,), mesh_dim_names=("tp",))
    return compare(apply_tensor_parallelism(built.model, mesh, plan), whole, dict(built.inputs), built, [])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
