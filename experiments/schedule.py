"""Steps by windows of templates and of solved plans, and what an event-by-event replay says of them, effect by effect.

    python experiments/schedule.py [MODEL ...] [--markdown experiments/schedule.md]

Every plan is made for the time that takes one thing after the other. The replay as the schedule prices must come to the time by windows, to
the nanosecond. Then one effect after the other is added that a runtime has and the price has not, until it is a runtime's step.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from solver_shard import Mesh, Program, SolverShardError, load_cluster
from solver_shard.options import Options
from solver_shard.pipeline import plan_program
from solver_shard.plan.windows import by_windows
from solver_shard.reports.timeline import EFFECTS, replay
from solver_shard.tracing.load import program_of

TWO = ["zero1", "zero2", "zero3", "hsdp", "ddp", "dp=ddp,tp=megatron", "dp=zero1,tp=megatron-sp", "dp=zero3,tp=megatron-sp"]
TWO += ["dp=zero3,tp=megatron-sp+vocab-parallel", "dp=zero3,tp=context-parallel"]
ONE = ["ddp", "zero1", "zero2", "zero3"]
EXPERTS = ["dp=zero3,tp=expert-parallel", "dp=zero3,tp=zero3+expert-parallel"]
FEW = ["zero1", "zero3", "dp=zero3,tp=megatron-sp"]

Study = tuple[str, int, list[str]]
"""A mesh, a number of microbatches, and the templates beside the solver's plan."""

MODELS: dict[str, tuple[dict[str, Any], list[Study]]] = {
    "gpt2": (
        {"batch": 256, "seq": 1024, "dtype": "f32"},
        [("dp=32,tp=4", 1, TWO), ("dp=32,tp=4", 4, TWO), ("dp=64", 1, ONE), ("dp=64", 4, ONE), ("dp=8", 2, ONE)],
    ),
    "llama3-8b": ({"batch": 64, "seq": 8192, "dtype": "bf16"}, [("dp=32,tp=8", 1, TWO), ("dp=8,tp=8", 4, FEW), ("dp=64", 1, ["zero3"])]),
    "mixtral-8x7b": ({"batch": 64, "seq": 4096, "dtype": "bf16"}, [("dp=32,tp=8", 1, [*FEW, *EXPERTS]), ("dp=8,tp=8", 2, EXPERTS)]),
}


def row(program: Program, mesh: str, microbatches: int, template: str | None) -> dict[str, Any]:
    """One plan: a limit for the solver's only, so that the table shows what each template needs."""
    cluster = load_cluster("h100")
    limit = int(cluster.device.memory * 0.9) if template is None else 1 << 50
    options = Options(memory_limit=limit, template=template, microbatches=microbatches, time_limit=60)
    plan = plan_program(program, mesh=Mesh.parse(mesh), cluster=cluster, options=options)
    step = by_windows(plan)
    times = {name: replay(plan, manner) for name, manner in EFFECTS.items()}
    lanes = sorted({step.bound_by(time) for time in step.windows} - {"compute"})
    return {
        "one after the other": plan.costs.total_ns,
        "by windows": step.total_ns,
        "exposed": sum(step.exposed.values()),
        "hidden": sum(step.hidden.values()),
        "bound by": ", ".join(lanes) or "compute alone",
        "peak": plan.memory.peak,
        "peak by windows": step.peak,
        "agrees": times["as priced"] == step.total_ns,
        "effects": {name: times[name] - times[before] for before, name in itertools.pairwise(EFFECTS)},
        "runtime": times[list(EFFECTS)[-1]],
    }


def study(name: str) -> list[dict[str, Any]]:
    """All plans of one model."""
    traced, studies = MODELS[name]
    program, _ = program_of(name, **traced)
    rows = []
    for mesh, microbatches, templates in studies:
        for template in (None, *templates):
            try:
                found = row(program, mesh, microbatches, template)
            except SolverShardError as error:
                found = {"error": f"{type(error).__name__}: {str(error)[:120]}"}
            rows.append({"model": name, "mesh": mesh, "microbatches": microbatches, "plan": template or "solver", **found})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table."""
    priced = [r for r in rows if "error" not in r]
    agree = sum(r["agrees"] for r in priced)
    far = sorted(r["runtime"] / r["by windows"] - 1 for r in priced)
    lines = [
        "# Steps by windows, and their replay",
        "",
        "By `python experiments/schedule.py` (h100; GPT-2 f32, batch 256 x 1024; Llama-3-8B bf16, batch 64 x 8192; Mixtral-8x7B bf16,",
        "batch 64 x 4096; the solver's limit is 90% of the device, templates have none). Plans are those of least time one after another.",
        "",
        f"The replay as priced equals the time by windows to the nanosecond for {agree} of {len(priced)} plans. A runtime's step, with all",
        f"effects, is {far[0]:+.1%} to {far[-1]:+.1%} away from it, in the median {far[len(far) // 2]:+.1%}.",
        "",
        "The effects in milliseconds, each on top of those to its left:",
        "",
        "- whole launches: tensors that move together are one collective with its whole launch; alone, they no longer pay a part of it;",
        "- no barriers: ops wait for what they read, and not for all that runs beside their block;",
        "- queues: a lane serves in order of issue, so that a long gather delays a collective that stops the compute;",
        "- chains: levels of one collective, steps of one transition and launches follow each other, and a lane that waits for one of them",
        "  serves nothing else: the strictest kind of queue. Where it takes long (large gathers over both levels beside tensor or expert",
        "  parallelism), a runtime with several streams on a level is between the two.",
        "",
        "| model | mesh | microbatches | plan | one after the other | by windows | exposed | hidden | lanes that bind | peak, by windows | "
        "as priced | " + " | ".join(list(EFFECTS)[1:]) + " | runtime |",
        "|---" * (12 + len(EFFECTS) - 1) + "|",
    ]
    for r in rows:
        cells = [r["model"], r["mesh"], str(r["microbatches"]), r["plan"]]
        if "error" in r:
            cells += [r["error"], *[""] * (7 + len(EFFECTS))]
        else:
            times = [f"{r[key] / 1e6:.2f} ms" for key in ("one after the other", "by windows", "exposed", "hidden")]
            memory = f"{r['peak'] / 2**30:.1f}, {r['peak by windows'] / 2**30:.1f} GiB"
            effects = [f"{nanoseconds / 1e6:+.2f}" for nanoseconds in r["effects"].values()]
            cells += [*times, r["bound by"], memory, "equal" if r["agrees"] else "NOT EQUAL", *effects, f"{r['runtime'] / 1e6:.2f} ms"]
        lines.append("| " + " | ".join(cells) + " |")
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
