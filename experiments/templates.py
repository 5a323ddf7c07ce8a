"""What experts' templates cost beside the solver's plan: time, peak memory and regret, with overlap 0 and 1.

    python experiments/templates.py [MODEL ...] [--markdown experiments/templates.md]

Every template is a restriction of the same choice graph, priced by the same cost model; no memory limit is applied to
them, so that the table shows what each needs. The solver's plan is found under the limit of the device (90% of it). Regret is
the template's step time over the bound that is proven for the free choice under that limit.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from solver_shard import Mesh, Program, Rulebook, SolverShardError, load_cluster
from solver_shard.costs.model import CostModel
from solver_shard.options import Options
from solver_shard.pipeline import plan_program
from solver_shard.plan.evaluate import evaluate
from solver_shard.runtime.apply import fitting
from solver_shard.tracing.load import program_of

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"batch": 256, "seq": 1024, "dtype": "f32", "meshes": ["dp=32,tp=4", "dp=8,cp=4,tp=4"]},
    "llama3-8b": {"batch": 64, "seq": 8192, "dtype": "bf16", "meshes": ["dp=32,tp=8", "dp=8,cp=4,tp=8"]},
    "llama3-70b": {"batch": 64, "seq": 8192, "dtype": "bf16", "meshes": ["dp=16,tp=16", "dp=8,cp=4,tp=8"]},
    "mixtral-8x7b": {"batch": 64, "seq": 4096, "dtype": "bf16", "meshes": ["dp=32,tp=8", "dp=8,cp=4,tp=8"]},
}
TWO = ["replicate", "ddp", "zero1", "zero2", "zero3", "hsdp", "dp=ddp,tp=megatron", "dp=ddp,tp=megatron-sp", "dp=zero3,tp=megatron"]
TWO += ["dp=zero3,tp=megatron-sp", "dp=zero3,tp=megatron-sp+vocab-parallel", "dp=zero3,tp=context-parallel"]
THREE = ["replicate", "zero3", "hsdp", "dp=zero3,cp=context-parallel,tp=megatron-sp", "dp=ddp,cp=zero3,tp=megatron"]
EXPERTS = ["dp=zero3,tp=expert-parallel", "dp=zero3,tp=zero3+expert-parallel"]
EXPERTS_THREE = ["dp=zero3,cp=context-parallel,tp=zero3+expert-parallel", "dp=ddp,cp=zero3,tp=zero3+expert-parallel"]


def templates(name: str, mesh: str) -> list[str]:
    """The templates of a model on a mesh; expert parallelism where there are experts."""
    two = mesh.count(",") == 1
    return (TWO if two else THREE) + ((EXPERTS if two else EXPERTS_THREE) if name.startswith("mixtral") else [])


def row(program: Program, mesh: str, template: str | None, overlap: float, limit: int) -> dict[str, Any]:
    """One plan, and whether the independent evaluator agrees with it to the integer."""
    cluster = load_cluster("h100")
    options = Options(memory_limit=limit, template=template, overlap=overlap, time_limit=120)
    start = time.perf_counter()
    plan = plan_program(program, mesh=Mesh.parse(mesh), cluster=cluster, options=options)
    seconds = time.perf_counter() - start
    evaluation = evaluate(plan, fitting(plan, program), Rulebook(), CostModel(plan.mesh, cluster, overlap=overlap))
    return {
        "template": template or "solver",
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
            best = row(program, mesh, None, overlap, limit)
            for template in [None, *templates(name, mesh)]:
                try:
                    found = best if template is None else row(program, mesh, template, overlap, 1 << 50)
                except SolverShardError as error:
                    found = {"template": template, "overlap": overlap, "status": f"{type(error).__name__}: {str(error)[:120]}"}
                else:
                    found = {**found, "fits": found["peak_gib"] * 2**30 <= limit, "regret": found["time_ms"] / best["bound_ms"] - 1}
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
