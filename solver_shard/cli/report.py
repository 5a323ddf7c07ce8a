"""``solver-shard report``: a plan as one HTML file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from solver_shard.cli.output import check_output


def report(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file that solve wrote with -o.")],
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
    from solver_shard.report.html import html
    from solver_shard.report.prices import read_prices
    from solver_shard.report.studies import read_comparison
    from solver_shard.units import format_bytes

    loaded = load_plan(plan)
    comparison = None if compared is None else read_comparison(compared)
    sweep = None
    if swept is not None:
        from solver_shard.study.sweep_result import load_sweep

        sweep = load_sweep(swept)
    page = html(loaded, comparison=comparison, sweep=sweep, asked=[read_prices(path) for path in explained or ()])
    write_whole(output, page)
    if not quiet:
        size = format_bytes(len(page.encode()))
        sys.stdout.write(printable(f"wrote {output} ({size}): {loaded.name} on {loaded.mesh.whole}; open it in a browser") + "\n")
