"""Plans of a Llama of two layers whose tensors are large enough to be cut: for tests that ask what other plans cost."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import solver_shard
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.tracing.load import program_of

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 2048,
}  # fmt: skip
BATCH, SEQ = 8, 1024
MESH = "dp=2,tp=2"


@functools.cache
def config_file() -> str:
    """A config.json of the model."""
    folder = Path(tempfile.mkdtemp(prefix="wide_llama_"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder / "config.json")


@functools.cache
def traced(forward_only: bool = False) -> tuple[Program, str]:
    """The model's step and its source."""
    return program_of(config_file(), batch=BATCH, seq=SEQ, dtype="bf16", forward_only=forward_only)


@functools.cache
def planned(mesh: str = MESH, pins: tuple[str, ...] = (), forward_only: bool = False, **options: Any) -> Plan:
    """A plan of it, with the source from which it can be built again."""
    program, source = traced(forward_only)
    plan = solver_shard.optimize(program, mesh=mesh, pins=pins, forward_only=forward_only, **options)
    return dataclasses.replace(plan, provenance=dataclasses.replace(plan.provenance, source=source))
