"""``solver-shard trace``: the predicted timeline of a plan's step, for a trace viewer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from solver_shard.cli.output import check_output


def trace(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file that solve wrote with -o.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Write the trace to this file; compressed if its name ends in .gz.")
    ] = ...,  # type: ignore[assignment]  # typer's mark for a required option
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not sum up the step.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    """Write one predicted step as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

    It shows ops by module, the collectives of each group of mesh axes, and memory by category. The last event ends at the plan's step time.
    """
    check_output(output, plan)
    from solver_shard.names import text_of
    from solver_shard.plan.io import load_plan
    from solver_shard.report.timeline import timeline
    from solver_shard.report.trace import chrome_trace, write_trace
    from solver_shard.units import format_bytes, format_ns

    loaded = load_plan(plan)
    line = timeline(loaded)
    size = write_trace(chrome_trace(line, loaded), output)
    if quiet:
        return
    costs, axes = loaded.costs, ", ".join(f"{name} {format_ns(ns)}" for name, ns in line.exposed.items())
    step = f"one step of {loaded.name} on {loaded.mesh.whole}, {format_ns(line.stop)}"
    lines = [
        f"wrote {output} ({format_bytes(size)}): {step}; open it in ui.perfetto.dev",
        f"  compute {format_ns(costs.compute_ns)}, update {format_ns(costs.update_ns)}, exposed collectives "
        f"{format_ns(costs.communication_ns)}{f' ({axes})' if axes else ''}; peak memory {format_bytes(loaded.memory.peak)}",
    ]
    if costs.hidden_ns:
        without = f", {format_ns(line.unplaced_ns)} of them without any compute to lie under" if line.unplaced_ns else ""
        lines.append(f"  {format_ns(costs.hidden_ns)} of collectives are hidden behind compute by the overlap asked for{without}")
    sys.stdout.write(text_of(lines) + "\n")
