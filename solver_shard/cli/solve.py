"""``solver-shard solve``: a model in, a plan out."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from solver_shard.cli.options import (
    OUTPUT,
    Config,
    Debug,
    Model,
    Quiet,
    check_output,
    given_model,
    takes_options,
    written_if_possible,
)
from solver_shard.cli.terminal import catch_interrupts, progress_lines, time_out


@takes_options("solve")
def solve(
    context: typer.Context,
    model: Model = None,
    config: Config = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the plan to this JSON file, and the best so far while the solver runs.",
            show_default=False,
            metavar="FILE",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of the report.", rich_help_panel=OUTPUT)] = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Find the fastest sharding of a model on a mesh within a memory limit, and prove how far from optimal it can be.

    Ctrl-C while the solver runs ends with the best plan so far and what is proven of it; a second one ends at once.

    Exit codes: 0 ok, 1 error, 2 usage, 3 no plan fits the memory limit or the pins, 130 ended by Ctrl-C.
    """
    source = given_model(model, config)
    check_output(output, config, *options["rules"])
    from solver_shard.api import optimize
    from solver_shard.errors import printable
    from solver_shard.plan.io import plan_to_json, save_plan
    from solver_shard.plan.summary import baked_in

    with progress_lines(quiet) as progress, catch_interrupts(progress) as interrupt, time_out(options["total_time_limit"], interrupt):
        plan = optimize(
            source,
            **options,
            command=shlex.join(["solver-shard", *context.find_root().obj]),
            progress=progress,
            stop=interrupt,
            incumbent=None if output is None else written_if_possible(lambda plan: save_plan(plan, output)),
        )
        if output is not None:
            save_plan(plan, output)
    if not quiet:
        sys.stderr.writelines(f"note: {printable(line)}\n" for line in baked_in(plan))
    sys.stdout.write(plan_to_json(plan) if as_json else f"{plan}\n")
