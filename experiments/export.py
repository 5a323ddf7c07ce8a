"""Which forms can say which plans of a small Llama, and what they leave out: the table of export.md.

    python experiments/export.py [--torchtitan]

``--torchtitan`` also loads the sharding configs in the installed torchtitan (0.3) and holds the placements that it resolves
against the plan.
"""

from __future__ import annotations

import importlib
import json
import runpy
import sys
import tempfile
from pathlib import Path

from solver_shard import InputError, Plan, optimize
from solver_shard.tracing.load import program_of

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
PLANS = (
    ("Megatron, inference", "tp=4", "megatron", True),
    ("Megatron", "tp=4", "megatron", False),
    ("Megatron + data parallel", "dp=2,tp=2", "dp=ddp,tp=megatron", False),
    ("Megatron + fully sharded", "dp=2,tp=2", "dp=zero3,tp=megatron", False),
    ("Megatron, vocabulary parallel", "tp=4", "tp=megatron+vocab-parallel", False),
    ("Megatron, sequence parallel", "tp=4", "megatron-sp", False),
    ("fully sharded", "dp=4", "zero3", False),
    ("ZeRO-1", "dp=4", "zero1", False),
    ("the solver's", "dp=2,tp=2", None, False),
)
FORMS = {"parallelize": "parallelize", "hf": "huggingface", "torchtitan": "torchtitan", "jax": "jax", "sdy": "shardy"}


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(CONFIG))
    programs = {f: program_of(str(folder / "config.json"), batch=8, seq=16, dtype="f32", forward_only=f)[0] for f in (False, True)}
    print(f"| plan | mesh | {' | '.join(FORMS)} |\n|---|---|{'---|' * len(FORMS)}")
    for name, mesh, template, forward_only in PLANS:
        plan = optimize(programs[forward_only], mesh=mesh, template=template, forward_only=forward_only)
        print(f"| {name} | {mesh} | {' | '.join(said(plan, form) for form in FORMS.values())} |")
        if "--torchtitan" in sys.argv and template is not None:
            check_torchtitan(plan, folder)


def said(plan: Plan, form: str) -> str:
    """Exact, or how many tensors and modules the form leaves something of out."""
    exporter = importlib.import_module(f"solver_shard.exporters.{form}")
    try:
        exporter.export(plan)
    except InputError:
        made = exporter.export(plan, lossy=True)
        return f"refused: {len({name for item in made.dropped for name in item.tensors})} names"
    return "exact"


def check_torchtitan(plan: Plan, folder: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.protocols.sharding import resolve_placements

    from solver_shard.exporters import torchtitan

    (folder / "sharding.py").write_text(torchtitan.export(plan, lossy=True).text)
    made = runpy.run_path(str(folder / "sharding.py"))
    size = made["PARALLELISM"]["tensor_parallel_degree"]
    if size == 1:
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    held = 0
    for tensor in plan.tensors:
        if tensor.role == "parameter":
            path, _, state = tensor.name.rpartition(".")
            config = made["SHARDING"].get(path) or made["SHARDING"][".".join("*" if part.isdigit() else part for part in path.split("."))]
            (placement,) = resolve_placements(config.state_shardings[state], mesh)
            planned = tensor.layout[-1]
            assert placement.is_shard() == planned.is_shard, tensor.name
            assert not planned.is_shard or placement.dim == planned.dim, tensor.name
            held += 1
    dist.destroy_process_group()
    print(f"torchtitan: {held} placements as planned")


if __name__ == "__main__":
    main()
