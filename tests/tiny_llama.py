"""Plans of a tiny Llama, and the same traced once: for the tests of every form that plans are exported to."""

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
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4, "max_position_embeddings": 32,
}  # fmt: skip
BATCH, SEQ = 8, 8


@functools.cache
def config_file() -> str:
    """A config.json of the model."""
    folder = Path(tempfile.mkdtemp(prefix="tiny_llama_"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder / "config.json")


@functools.cache
def traced(forward_only: bool = False) -> tuple[Program, str]:
    """The model's step and its source."""
    return program_of(config_file(), batch=BATCH, seq=SEQ, dtype="f32", forward_only=forward_only)


@functools.cache
def planned(mesh: str, template: str | None = None, forward_only: bool = False, pins: tuple[str, ...] = (), **options: Any) -> Plan:
    """A plan of it, with the source from which it can be built again."""
    program, source = traced(forward_only)
    plan = solver_shard.optimize(program, mesh=mesh, template=template, forward_only=forward_only, pins=pins, **options)
    return dataclasses.replace(plan, provenance=dataclasses.replace(plan.provenance, source=source))
