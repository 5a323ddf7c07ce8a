"""Commands that write a plan as something else: ``export`` (for a tool, or a program), ``report`` (a page), ``trace`` (a timeline)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from solver_shard.cli.options import PlanFile, check_output


def export(
    plan: PlanFile,
    to: Annotated[
        Literal["dtensor-script", "parallelize", "hf", "torchtitan", "jax", "sdy"],
        typer.Option(
            help="dtensor-script: a torchrun program that runs all of the plan; parallelize: a Python file of parallelize_module styles "
            "and FSDP2 calls; hf: a tp_plan with the other arguments of transformers' DistributedConfig; torchtitan: sharding configs; "
            "jax: PartitionSpecs and logical-axis rules; sdy: Shardy annotations on a StableHLO signature."
        ),
    ] = ...,  # type: ignore[assignment]  # typer's mark for a required option
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Write it to this file.")] = ...,  # type: ignore[assignment]
    lossy: Annotated[bool, typer.Option("--lossy", help="Leave out what the form cannot express, and list it.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    """Write a plan in another form: as a program that runs it, or for a tool that shards by declarations.

    A form that cannot express a part of the plan refuses, and names the tensors; with --lossy it lists what it leaves out.
    """
    check_output(output, plan)
    from solver_shard.exporters import export as export_plan
    from solver_shard.files import write_whole
    from solver_shard.plan.io import load_plan
    from solver_shard.text import text_of

    beside = os.path.relpath(plan.resolve(), output.resolve().parent)
    exported = export_plan(load_plan(plan), to, lossy=lossy, plan_path=beside)
    write_whole(output, exported.text)
    lines = [f"wrote {output}"]
    if exported.dropped:
        lines += ["left out:", *(f"  - {item}" for item in exported.dropped)]
    if exported.notes:
        lines += ["in another way than in the plan:", *(f"  - {note}" for note in exported.notes)]
    sys.stdout.write(text_of(lines) + "\n")


def report(
    plan: PlanFile,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Write the page to this file.")] = ...,  # type: ignore[assignment]  # typer's mark for a required option
    compared: Annotated[
        Path | None,
        typer.Option(
            "--compare", metavar="FILE", help="Show the plans that compare -o FILE.json wrote beside this one.", show_default=False
        ),
    ] = None,
    swept: Annotated[
        Path | None,
        typer.Option("--sweep", metavar="FOLDER", help="Show this sweep's plot of step time against peak memory.", show_default=False),
    ] = None,
    explained: Annotated[
        list[Path] | None,
        typer.Option("--explain", metavar="FILE", help="Show prices that explain wrote with --json; repeatable.", show_default=False),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not say what was written.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    """Write a plan as one HTML file, which opens from disk without a network and prints.

    It shows time and memory by module, the dataflow of a layer, how tensors are cut, and what moves them and why.
    """
    check_output(output, plan, compared, swept, *(explained or ()))
    from solver_shard.errors import printable
    from solver_shard.files import write_whole
    from solver_shard.plan.io import load_plan
    from solver_shard.reports.html import report as page_of
    from solver_shard.text import format_bytes

    loaded = load_plan(plan)
    page = page_of(loaded, compared=compared, swept=swept, explained=tuple(explained or ()))
    write_whole(output, page)
    if not quiet:
        size = format_bytes(len(page.encode()))
        sys.stdout.write(printable(f"wrote {output} ({size}): {loaded.name} on {loaded.mesh.whole}; open it in a browser") + "\n")


def trace(
    plan: PlanFile,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Write the trace to this file; compressed if its name ends in .gz.")
    ] = ...,  # type: ignore[assignment]  # typer's mark for a required option
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not sum up the step.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    """Write one predicted step as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

    It shows ops by module, the collectives of each group of mesh axes, and memory by category. The last event ends at the plan's step time.
    In rows of its own is the same step side by side, as a runtime with a queue for each lane of links makes it.
    """
    check_output(output, plan)
    from solver_shard.plan.io import load_plan
    from solver_shard.reports.timeline import chrome_trace, timeline, write_trace
    from solver_shard.text import format_bytes, format_ns, text_of

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
    if line.runtime_ns:
        beside = f"{format_ns(line.windows_ns)} by windows, {format_ns(line.runtime_ns)} with a queue for each lane"
        lines.append(f"  side by side: {beside}; drawn in rows of its own")
    sys.stdout.write(text_of(lines) + "\n")
