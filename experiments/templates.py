"""What experts' templates cost beside the solver's plan: time, peak memory and regret, with overlap 0 and 1.

    python experiments/templates.py [MODEL ...] [--markdown experiments/templates.md]

Every template is a restriction of one choice graph, priced by the same cost model, repeated layers alike; no memory limit is
applied to them, so that the table shows what each needs. The solver's plan is found under the limit of the device (90% of it). Regret is
the template's step time over the bound that is proven for the free choice under that limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from solver_shard import InputError, Mesh, Plan, Program, Rulebook, load_cluster
from solver_shard.baselines.candidates import candidates
from solver_shard.clock import StageClock
from solver_shard.costs.model import CostModel
from solver_shard.graph.build import lower_program
from solver_shard.graph.symmetry import node_classes
from solver_shard.graph.templates import parse_template, restriction
from solver_shard.graph.transient_memory import Transients
from solver_shard.options import Options
from solver_shard.pipeline import plan_program
from solver_shard.plan.decode import PlanWriter, provenance
from solver_shard.plan.evaluate import evaluate
from solver_shard.runtime.apply import fitting
from solver_shard.tracing.load import program_of

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"batch": 256, "seq": 1024, "dtype": "f32", "meshes": ["dp=32,tp=4", "dp=8,cp=4,tp=4"]},
    "llama3-8b": {"batch": 64, "seq": 8192, "dtype": "bf16", "meshes": ["dp=32,tp=8", "dp=8,cp=4,tp=8"]},
    "llama3-70b": {"batch": 64, "seq": 8192, "dtype": "bf16", "meshes": ["dp=16,tp=16", "dp=8,cp=4,tp=8"]},
    "mixtral-8x7b": {"batch": 64, "seq": 4096, "dtype": "bf16", "meshes": ["dp=32,tp=8", "dp=8,cp=4,tp=8"]},
}
STORES = ("ddp", "zero2", "zero3")
TENSOR = ("megatron", "megatron-sp", "megatron+vocab-parallel", "megatron-sp+vocab-parallel")
TWO = ["replicate", *STORES, "hsdp", *(f"dp={store},tp={end}" for store in STORES for end in TENSOR)]
TWO += [f"dp={store},tp={store}+{end}" for store in STORES for end in ("context-parallel", "ulysses")]
THREE = ["replicate", "zero2", "zero3", "hsdp", "dp=ddp,cp=zero3,tp=megatron-sp+vocab-parallel"]
THREE += [f"dp={s},cp={s}+{middle},tp=megatron-sp+vocab-parallel" for s in ("zero2", "zero3") for middle in ("context-parallel", "ulysses")]
EXPERTS = [f"dp={store},tp={store}+expert-parallel" for store in STORES]
EXPERTS_THREE = ["dp=zero3,cp=zero3+context-parallel,tp=zero3+expert-parallel", "dp=ddp,cp=zero3,tp=zero3+expert-parallel"]


def templates(name: str, mesh: str) -> list[str]:
    """The templates of a model on a mesh; expert parallelism where there are experts."""
    two = mesh.count(",") == 1
    return (TWO if two else THREE) + ((EXPERTS if two else EXPERTS_THREE) if name.startswith("mixtral") else [])


def solved(program: Program, mesh: str, overlap: float, limit: int) -> dict[str, Any]:
    """The solver's plan."""
    options = Options(memory_limit=limit, overlap=overlap, time_limit=120)
    start = time.perf_counter()
    plan = plan_program(program, mesh=Mesh.parse(mesh), cluster=load_cluster("h100"), options=options)
    return row(program, plan, "solver", time.perf_counter() - start)


def tried(program: Program, mesh: str, overlap: float, texts: list[str]) -> Iterator[dict[str, Any]]:
    """Plans of templates without a memory limit, on one choice graph."""
    cluster, options = load_cluster("h100"), Options(memory_limit=1 << 50, overlap=overlap)
    lowered = lower_program(program, mesh=Mesh.parse(mesh), cluster=cluster, options=options, relays="none")
    made = {}
    for text in texts:
        try:
            made[text] = restriction(lowered.program, lowered.mesh, parse_template(text, lowered.mesh))
        except InputError as error:
            yield {"template": text, "overlap": overlap, "status": str(error)[:120]}
    problem = Transients(lowered.lowering, lowered.costs, node_classes(lowered.lowering))
    start = time.perf_counter()
    for text, plan in candidates(problem, made, objective="time", memory_weight=0, gap=options.gap, seed=0):
        if plan is None:
            yield {"template": text, "overlap": overlap, "status": "no plan carries it through the model"}
            continue
        writer = PlanWriter(
            lowering=lowered.lowering,
            costs=lowered.costs,
            cluster=cluster,
            options=dataclasses.replace(options, template=text),
            origin=provenance("", "python experiments/templates.py"),
            relayed="none",
        )
        yield row(program, writer.plan(plan.solution, problem, StageClock()), text, time.perf_counter() - start)
        start = time.perf_counter()


def row(program: Program, plan: Plan, name: str, seconds: float) -> dict[str, Any]:
    """One plan, and whether the independent evaluator agrees with it to the integer."""
    overlap = plan.options.overlap
    evaluation = evaluate(plan, fitting(plan, program), Rulebook(), CostModel(plan.mesh, plan.cluster, overlap=overlap))
    return {
        "template": name,
        "overlap": overlap,
        "time_ms": round(plan.certificate.objective / 1e6, 3),
        "bound_ms": round(plan.certificate.bound / 1e6, 3),
        "peak_gib": round(plan.memory.peak / 2**30, 2),
        "status": plan.certificate.status,
        "agrees": (evaluation.objective, evaluation.peak) == (plan.certificate.objective, plan.memory.peak),
        "seconds": round(seconds, 1),
    }


def study(name: str) -> list[dict[str, Any]]:
    """All templates of one model on its meshes."""
    what = MODELS[name]
    program, _ = program_of(name, batch=what["batch"], seq=what["seq"], dtype=what["dtype"])
    limit = int(load_cluster("h100").device.memory * 0.9)
    rows = []
    for mesh in what["meshes"]:
        for overlap in (0.0, 1.0):
            best = solved(program, mesh, overlap, limit)
            for found in itertools.chain([best], tried(program, mesh, overlap, templates(name, mesh))):
                if "time_ms" in found:
                    found |= {"fits": found["peak_gib"] * 2**30 <= limit, "regret": found["time_ms"] / best["bound_ms"] - 1}
                rows.append({"model": name, "mesh": mesh, **found})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table."""
    lines = [
        "# Templates beside the solver's plan",
        "",
        "By `python experiments/templates.py` (h100; GPT-2 f32, batch 256 x 1024; Llama-3 bf16, batch 64 x 8192; Mixtral bf16, batch",
        "64 x 4096; the solver's limit is 90% of the device, templates have none). A batch of 64 cannot be cut by 256 devices, so",
        "pure data-parallel rows leave the second axis (and with three axes the third) without work of its own. Regret is over the",
        "bound that is proven for the solver's problem; the solver's own row shows its gap.",
        "",
    ]
    lines += [
        "| model | mesh | plan | overlap | step time | regret | peak | fits | evaluator agrees |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if "time_ms" not in r:
            lines.append(f"| {r['model']} | {r['mesh']} | {r['template']} | {r['overlap']:g} | {r['status']} | | | | |")
            continue
        cells = [f"{r['overlap']:g}", f"{r['time_ms']:.3f} ms", f"{r['regret']:.2%}", f"{r['peak_gib']} GiB"]
        cells += ["yes" if r["fits"] else "no", "yes" if r["agrees"] else "NO"]
        lines.append("| " + " | ".join([r["model"], r["mesh"], r["template"], *cells]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args()
    unknown = set(options.models) - set(MODELS)
    if unknown:
        parser.error(f"no sizes for {', '.join(sorted(unknown))}; models: {', '.join(MODELS)}")
    rows = [r for name in options.models or MODELS for r in study(name)]
    if options.markdown:
        options.markdown.write_text(markdown(rows))


if __name__ == "__main__":
    main()
