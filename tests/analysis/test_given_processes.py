"""Plans for other tools, priced here, have the collectives that these tools run: two real processes count them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import tutorial_llama
from tiny_llama import BATCH, SEQ, config_file

import solver_shard
from solver_shard.analysis.compare import compare
from solver_shard.analysis.other_tools import read_parallelize, read_tp_plan
from solver_shard.analysis.reopen import Retraced
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.tracing.load import traced_of

PARALLELIZE = """{
    "model.layers.*.self_attn.q_proj": ColwiseParallel(), "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(), "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(), "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}"""


def tp_plan(**more: str) -> str:
    """The plan that transformers has for a Llama, with rules over it."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_json_file(config_file()))
    return json.dumps({**model.tp_plan, **more})


ONCE = PARALLELIZE.replace(
    "{",
    """{
    "model.layers.*.self_attn": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Replicate()}, desired_input_kwarg_layouts={"hidden_states": Replicate()}),
    "model.layers.*.mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),""",
    1,
)
"""The same with one gradient for all projections of a module."""

JOBS = {
    "hf": ("transformers", "llama", tp_plan()),
    "hf-other": ("transformers", "llama", tp_plan(**{"model.embed_tokens": "replicate", "model.layers.*.mlp.down_proj": "rowwise"})),
    "hf-checkpointed": ("transformers", "checkpointed", tp_plan()),
    "parallelize": ("parallelize_module", "llama", PARALLELIZE),
    "parallelize-once": ("parallelize_module", "llama", ONCE),
    "tutorial": ("parallelize_module", "tutorial", tutorial_llama.TENSOR),
    "tutorial-sequence": ("parallelize_module", "tutorial", tutorial_llama.SEQUENCE),
    "apart": ("parallelize_module", "tutorial", tutorial_llama.APART),
}
LLAMA = f"{config_file()}, batch {BATCH}, seq {SEQ}, f32"
SOURCES = {"llama": LLAMA, "checkpointed": f"{LLAMA}, checkpointed", "tutorial": "tutorial_llama:build"}


def traced(model: str) -> Program:
    if model != "tutorial":
        return traced_of(config_file(), batch=BATCH, seq=SEQ, dtype="f32", checkpoint=model == "checkpointed")[0]
    return traced_of("tutorial_llama:build")[0]


@pytest.fixture(scope="module")
def priced() -> dict[str, Plan]:
    """The plan of every job, as compare prices it."""
    found: dict[str, Plan] = {}
    for model in SOURCES:
        program = traced(model)
        ours = solver_shard.optimize(program, mesh="tp=2", optimizer="sgd")
        readers = {"transformers": read_tp_plan, "parallelize_module": read_parallelize}
        given = [readers[tool](text, name=name) for name, (tool, which, text) in JOBS.items() if which == model]
        made = compare(ours, recipes=(), given=given, retraced=Retraced(program=program, traced=None, source=""))
        assert not made.left_out
        found |= {row.name: row.plan for row in made.rows if row.kind == "given"}
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two real processes found of every job."""
    folder = tmp_path_factory.mktemp("given")
    jobs = {name: {"tool": tool, "source": SOURCES[model], "text": text} for name, (tool, model, text) in JOBS.items()}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    tests = Path(__file__).parents[1]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join([str(Path(solver_shard.__file__).parents[1]), str(tests), os.environ.get("PYTHONPATH", "")])
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    job = subprocess.run(
        [*start, str(tests / "given_worker.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert job.returncode == 0, job.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def collectives(plan: Plan) -> Counter[tuple[str, str, int]]:
    """Between ops and inside them, by phase, kind and bytes; without the way of gradients to the update."""
    found: Counter[tuple[str, str, int]] = Counter()
    for reshard in plan.reshards:
        if reshard.purpose not in ("optimizer", "update"):
            phase = "backward" if reshard.purpose == "backward" else "forward"
            found.update((phase, step.kind, step.nbytes) for step in reshard.steps if step.kind != "slice")
    for op in plan.ops:
        found.update((op.phase, inside.kind, inside.nbytes) for inside in op.collectives)
    return found


@pytest.mark.parametrize("name", JOBS)
def test_a_given_plan_has_the_collectives_that_its_tool_runs(name: str, priced: dict[str, Plan], ran: dict[str, Any]) -> None:
    counted = {(phase, kind, nbytes): count for phase, kind, nbytes, count in ran[name]["counts"]}
    assert counted
    assert collectives(priced[name]) == counted


@pytest.mark.parametrize("name", JOBS)
def test_the_tool_computes_what_the_model_computes(name: str, ran: dict[str, Any]) -> None:
    assert ran[name]["loss"] == pytest.approx(ran[name]["expected"], rel=1e-5)
    assert ran[name]["gradient"] < 1e-4
