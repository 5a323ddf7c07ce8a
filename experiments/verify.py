"""Plans of every kind, run and held against the unsharded model: numbers of the step, and collectives against the prediction.

    python experiments/verify.py [MODEL ...] [--rows FILE] [--markdown experiments/verify.md]

Every plan of a small model runs with all devices in one process, in 64-bit floats. Plans are the solver's, those of the four propagation
passes and of DTensor's own walk (from the batch cut by the left axis and Megatron's matrices cut by the right one), and random legal
points of the choice graph. With --processes, random points of the mesh (2,2) run in four real processes that talk by gloo, in 32-bit
floats. A row is appended to the file of rows as soon as it is there; rows that are there already are not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from points import plan_of, random_point

from solver_shard import Cluster, Layout, Mesh, Plan, SolverShardError, load_cluster
from solver_shard.analysis.greedy_plans import NO_LIMIT, dtensor_greedy_plan
from solver_shard.baselines.propagated import Propagation
from solver_shard.costs.model import CostModel
from solver_shard.graph.lowering import lower
from solver_shard.graph.nodes import Lowering
from solver_shard.graph.templates import block_cut
from solver_shard.options import Options
from solver_shard.pipeline import plan_program
from solver_shard.program import Role
from solver_shard.tracing.clean import clean_with_values
from solver_shard.tracing.huggingface import load
from solver_shard.tracing.torch import trace_raw
from solver_shard.verification import check
from solver_shard.verification.subject import Subject, subject_of, widened
from solver_shard.verification.twin import transfer
from solver_shard.verification.verdict import Verdict

MESHES = ("2,2", "4", "2,4", "2,2,2")
PASSES = ("basic", "aggressive", "op-priority", "user-priority")
RANDOM = 8
"""Points for each model and mesh: 32 for each model."""

_TEXT = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
_BODY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_ONE = {**_BODY, "num_hidden_layers": 1}
_DECODER = {**_TEXT, **_BODY, "num_key_value_heads": 2, "max_position_embeddings": 32}
_CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "gpt2": {
        **_TEXT, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "llama": {**_DECODER, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "bert": {**_TEXT, **_ONE, **_CALM, "model_type": "bert", "architectures": ["BertForMaskedLM"], "max_position_embeddings": 32},
    "t5": {
        **_TEXT, "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4,
        "num_layers": 1, "dropout_rate": 0.0, "decoder_start_token_id": 0,
    },
    "vit": {
        **_ONE, **_CALM, "model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 16, "patch_size": 4,
        "num_channels": 3, "num_labels": 8,
    },
    "mixtral": {
        **_DECODER, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
    },
}  # fmt: skip
MODELS = ("mlp", *CONFIGS)
NOTES = """
All rows are of the code after the last change to the runtime and to the memory model of plans; after 923ca6f only the solver changed.

## Large plans, by their twins

Made and verified at 923ca6f, each `verify` with exit code 0. Largest relative differences from the graph (tolerance 1e-11; 2e-4 in
processes, whose floats have 32 bits) and from the model itself (in 32-bit floats, tolerance 2e-4); collectives are as planned in kind,
axes, count and bytes.

| plan | twin | decisions carried | from the graph | from the model | collectives | bytes |
|---|---|---|---|---|---|---|
| gpt2, 8 devices | d0=2, 1 layer, 60 wide | 332 of 334 | 1.1e-15 | 5.2e-7 | 11 | 178,856 |
| gpt2, 8 devices, `--processes 4` | d0=4, 1 layer, 60 wide | 332 of 334 | 2.8e-7 | 3.7e-7 | 11 | 120,532 |
| mixtral-8x7b, 32 devices | dp=2,tp=2, 2 layers, 2 experts, 64 wide | 967 of 1051 | 7.4e-16 | 4.8e-7 | 94 | 2,377,296 |
| llama3-8b, 256 devices | dp=2,tp=2, 2 layers, 60 wide | 740 of 799 | 7.1e-16 | 5.3e-7 | 67 | 1,690,736 |

The plans, all of full size and proven optimal among tied ones, are by (with `--workers 1`)

    solver-shard solve gpt2 --mesh 8 --batch 8 --seq 128 -o gpt2.json
    solver-shard solve mixtral-8x7b --batch 16 --seq 2048 --mesh dp=4,tp=8 -o mixtral.json
    solver-shard solve llama3-8b --batch 64 --seq 8192 --mesh dp=32,tp=8 --cluster h100 --memory 70GiB -o llama3-8b.json

and each is verified as `solver-shard verify mixtral.json mixtral-8x7b` says. Decisions that are not carried are left to the solver.
"""
BATCH, SEQ = 8, 16


class MLP(nn.Module):
    """Three layers and a mean of squares; sizes of which some do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(12, 24), nn.Linear(24, 20), nn.Linear(20, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.tanh(self.middle(torch.relu(self.up(x))))) ** 2).mean()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A model with numbers, in its own precision and in 64 bits."""

    name: str
    own: Subject
    wide: Subject


def build(name: str) -> Model:
    """A model with random weights, and one batch."""
    torch.manual_seed(0)
    if name == "mlp":
        own = subject_of(MLP(), {"x": torch.zeros(16, 12)}, name=name)
    else:
        config = CONFIGS[name]
        picture = "image_size" in config
        model, inputs, _ = load(config, batch=BATCH, seq=None if picture else SEQ, weights=True)
        own = subject_of(model, inputs, name=name, labels=8 if picture else 96, words=96)
    return Model(name=name, own=own, wide=widened(own))


def near() -> Cluster:
    """An H100 whose links answer at once, so that sharding a tiny model pays."""
    cluster = load_cluster("h100")
    levels = tuple(dataclasses.replace(level, latency_ns=5) for level in cluster.levels)
    return dataclasses.replace(cluster, launch_ns=10, levels=levels)


def pins(model: Model, mesh: Mesh, *, sequence: bool = True) -> dict[str, Layout]:
    """Inputs cut along the batch by the left axis, and along the sequence by the middle one of three (or the batch by both); the rows of
    the matrices that feed the residual stream by the right one. The rest is for propagation to find."""
    program, axes = model.wide.program, len(mesh.axes)
    found = {}
    cut = block_cut(program) if axes > 1 else {}
    for t in program.sources():
        tensor = program.tensors[t]
        if tensor.role is Role.INPUT:
            middle = ("S(1)" if sequence and len(tensor.shape) == 2 else "R" if sequence else "S(0)") * (axes == 3)
            found[tensor.name] = Layout.parse("S(0)" + middle + "R" * (axes > 1))
        elif cut.get(t) == len(tensor.shape) - 1 > 0 and tensor.shape[cut[t]] >= mesh.shape[-1]:
            found[tensor.name] = Layout.parse("R" * (axes - 1) + f"S({cut[t]})")
    return found


def options(**more: Any) -> Options:
    return Options(memory_limit=NO_LIMIT, gap=0.05, time_limit=120, **more)


def solved(model: Model, mesh: Mesh) -> Plan:
    """The solver's plan, of copies of layers that may differ."""
    return plan_program(model.wide.program, mesh=mesh, cluster=near(), options=options(tied=False))


def propagated(model: Model, mesh: Mesh, name: str) -> Plan:
    asked = tuple(f"{tensor}={','.join(map(str, layout))}" for tensor, layout in pins(model, mesh).items())
    passed = Propagation(name=name)  # type: ignore[arg-type]  # one of the names
    return plan_program(
        model.wide.program, mesh=mesh, cluster=near(), options=options(pins=asked, tied=False, split="off"), baseline=passed
    )


def walked(model: Model, mesh: Mesh) -> Plan:
    """What DTensor does, op by op, carried to 64 bits. Three axes that cut batch and sequence would keep it busy for minutes (torch 2.13
    searches a graph of layouts for every strategy that reads a strided shard), so the batch is cut by two."""
    assert model.own.model is not None
    assert model.own.inputs is not None
    traced = clean_with_values(trace_raw(model.own.model, model.own.inputs, name=model.name))
    plan, _ = dtensor_greedy_plan(traced, mesh=mesh, cluster=near(), options=options(), pins=pins(model, mesh, sequence=False))
    moved = transfer(plan, model.wide.program, mesh)
    if moved.left:
        raise SolverShardError(f"{len(moved.left)} decisions are not carried: {moved.left[0]}")
    return moved.plan


class Draws:
    """Random legal points of a model's choice graph on a mesh."""

    def __init__(self, model: Model, mesh: Mesh) -> None:
        self.options = options(tied=False)
        self.costs = CostModel(mesh, near())
        state = self.options.optimizer_state()
        self.lowering: Lowering = lower(model.wide.program, self.options.rulebook(), self.costs, optimizer_state=state)

    def plan(self, seed: int) -> Plan:
        return plan_of(self.lowering, random_point(self.lowering.graph, seed), self.costs, self.options)


def plans(model: Model, mesh: Mesh) -> Iterator[tuple[str, Any]]:
    """Names of plans and how each is made."""
    yield "solver", lambda: solved(model, mesh)
    for name in PASSES:
        yield name, lambda name=name: propagated(model, mesh, name)
    yield "dtensor-greedy", lambda: walked(model, mesh)
    made: list[Draws] = []
    for seed in range(RANDOM):

        def draw(seed: int = seed) -> Plan:
            if not made:
                made.append(Draws(model, mesh))
            return made[0].plan(seed)

        yield f"random {seed}", draw


def row(verdict: Verdict) -> dict[str, Any]:
    """What is recorded of a run."""
    worst = {
        reference: max((d.value for d in verdict.differences if d.reference == reference), default=None) for reference in ("graph", "model")
    }
    return {
        "holds": verdict.holds,
        "from_graph": worst["graph"],
        "from_model": worst["model"],
        "tensors": sum(d.reference == "graph" for d in verdict.differences),
        "collectives": sum(c.run for c in verdict.collectives),
        "nbytes": sum(c.run_nbytes for c in verdict.collectives),
        "kinds": sorted({c.kind for c in verdict.collectives}),
        "problem": verdict.problem or "; ".join(f"{d.kind} {d.name}" for d in verdict.differences if not d.holds)[:200],
    }


def apart(model: Model, file: Path, known: set[tuple[str, str, str]]) -> None:
    """A random plan in four real processes."""
    mesh, said = Mesh.parse("2,2"), "random 0 in processes"
    if (model.name, "2,2", said) not in known:
        draws = Draws(dataclasses.replace(model, wide=model.own), mesh)
        record(model, "2,2", said, file, lambda: check(draws.plan(0), model.own, processes=True, timeout=900))


def study(model: Model, text: str, file: Path, known: set[tuple[str, str, str]]) -> None:
    """All plans of one model on one mesh that are not there yet."""
    mesh = Mesh.parse(text)
    for said, make in plans(model, mesh):
        if (model.name, text, said) in known:
            continue
        record(model, text, said, file, lambda make=make: check(make(), model.wide))


def record(model: Model, mesh: str, plan: str, file: Path, run: Callable[[], Verdict]) -> None:
    """Append a row."""
    start = time.monotonic()
    try:
        found = row(run())
    except Exception as error:  # a bug is a row that does not hold, and the others are still made
        found = {"holds": False, "problem": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"}
    entry = {"model": model.name, "mesh": mesh, "plan": plan, **found, "seconds": round(time.monotonic() - start, 1), "code": code()}
    with file.open("a") as out:
        out.write(json.dumps(entry) + "\n")
    print(json.dumps(entry), flush=True)


@functools.cache
def code() -> str:
    """The commit that is checked out, which rows are of."""
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line for each model, mesh and kind of plan; random ones together."""
    kinds = ("solver", *PASSES, "dtensor-greedy", "random", "random 0 in processes")
    wrong = [r for r in rows if not r["holds"]]
    lines = [
        "# Verified plans",
        "",
        "By `python experiments/verify.py --markdown experiments/verify.md` (see the script for models and plans). One training step,",
        "all devices simulated in one process, in 64-bit floats: loss, every gradient and the parameters after a step against the",
        "unsharded graph (tolerance 1e-11) and against the model itself (in 32-bit floats, tolerance 2e-4), and the collectives that ran",
        "against the plan's by kind, axes, count and bytes. Plans in processes run in four real ones, in 32-bit floats (tolerance 2e-4).",
        "",
        f"{len(rows)} plans, {len(rows) - len(wrong)} hold. Collectives and bytes are of one device and step, of random plans the mean.",
        "",
        "| model | mesh | plan | hold | largest from the graph | from the model | collectives | bytes | rows of commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        for mesh in ("4", "2,2", "2,4", "2,2,2"):
            for kind in kinds:
                found = [r for r in rows if (r["model"], r["mesh"], _kind(r["plan"])) == (model, mesh, kind)]
                done = [r for r in found if r.get("from_graph") is not None]
                commits = Counter(r["code"] for r in found)
                made = ", ".join(c if len(commits) == 1 else f"{c} ({n})" for c, n in sorted(commits.items()))
                if found and not done:
                    lines.append(f"| {model} | {mesh} | {kind} | 0 of {len(found)} | | | | | {made} |")
                elif found:
                    cells = [f"{max(r[k] for r in done):.1e}" for k in ("from_graph", "from_model")]
                    cells += [f"{sum(r[k] for r in done) / len(done):,.0f}" for k in ("collectives", "nbytes")]
                    lines.append(
                        f"| {model} | {mesh} | {kind} | {sum(r['holds'] for r in found)} of {len(found)} | {' | '.join(cells)} | {made} |"
                    )
    kinds_of_all = len(PASSES) + 2 + RANDOM
    counted = {(m, mesh): sum((r["model"], r["mesh"]) == (m, mesh) for r in rows) for m in MODELS for mesh in MESHES}
    missing = [f"{m} on ({mesh}), {kinds_of_all - n} of {kinds_of_all}" for (m, mesh), n in counted.items() if n < kinds_of_all]
    if missing:
        lines += ["", f"Not run: {'; '.join(missing)}."]
    if wrong:
        lines += ["", "What does not hold:", "", *(f"- {r['model']}, {r['mesh']}, {r['plan']}: {r['problem']}" for r in wrong)]
    return "\n".join(lines) + "\n" + NOTES


def _kind(plan: str) -> str:
    return plan if plan.endswith("processes") else plan.split()[0]


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--rows", type=Path, default=Path("verify_rows.jsonl"), help="where rows are kept")
    parser.add_argument("--markdown", type=Path, help="write the table of all rows to this file")
    parser.add_argument("--processes", action="store_true", help="the sample in real processes alone")
    parser.add_argument("--table", action="store_true", help="make no new rows")
    given = parser.parse_args()
    unknown = set(given.models) - set(MODELS)
    if unknown:
        parser.error(f"unknown model {', '.join(sorted(unknown))}; models: {', '.join(MODELS)}")
    torch.set_num_threads(1)
    known = {(r["model"], r["mesh"], r["plan"]) for r in read(given.rows)}
    models = [] if given.table else [build(name) for name in given.models or MODELS]
    if given.processes:
        for model in models:
            apart(model, given.rows, known)
    else:
        for mesh in MESHES:
            for model in models:
                study(model, mesh, given.rows, known)
    if given.markdown:
        given.markdown.write_text(markdown(read(given.rows)))


if __name__ == "__main__":
    import verify  # by its name, under which other processes find the model's class

    verify.main()
