"""``solver-shard solve``: a model in, a plan out."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from solver_shard.cli import options
from solver_shard.cli.options import check_output, written_if_possible
from solver_shard.cli.terminal import catch_interrupts, progress_lines, time_out


def solve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A preset (llama3-8b, gpt2, ...) or an entry point package.module:function.", show_default=False
        ),
    ] = None,
    config: options.Config = None,
    mesh: Annotated[
        str,
        typer.Option(
            help="Axes, outermost first, the rightmost with the fastest links: dp=32,tp=8; a bare 8 is d0=8.",
            metavar="AXES",
            rich_help_panel=options.MESH,
        ),
    ] = ...,  # type: ignore[assignment]  # typer's mark for a required option
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Global batch of one step (presets and configs).", show_default=False, metavar="N", rich_help_panel=options.MODEL
        ),
    ] = None,
    seq: options.Seq = None,
    cluster: Annotated[
        str,
        typer.Option(help="a100, h100, gb200, tpu-v5p, ethernet, or a TOML file.", metavar="NAME|FILE", rich_help_panel=options.MESH),
    ] = "h100",
    memory: Annotated[
        str | None,
        typer.Option(
            help="Limit per device: 70GiB, 80GB, bytes (default: 90% of the device's).",
            show_default=False,
            metavar="SIZE",
            rich_help_panel=options.MEMORY,
        ),
    ] = None,
    reserve: options.Reserve = None,
    dtype: options.Dtype = None,
    microbatches: options.Microbatches = 1,
    optimizer: options.OptimizerName = options.Optimizer.ADAMW,
    master_weights: options.MasterWeights = True,
    state_bytes: options.StateBytes = None,
    reduce_dtype: options.ReduceDtypeName = None,
    clip: options.Clip = False,
    forward_only: options.ForwardOnly = False,
    checkpoint: options.Checkpoint = False,
    pin: options.Pins = None,
    split: options.Split = None,
    no_split: options.NoSplit = False,
    template: options.Template = None,
    rules: options.Rules = None,
    conservative: options.Conservative = False,
    trust_dtensor: options.TrustDTensor = False,
    free: options.Free = False,
    objective: options.ObjectiveName = options.Objective.TIME,
    memory_weight: options.MemoryWeight = 0,
    overlap: options.Overlap = 0.0,
    fusion: options.Fusion = False,
    gap: options.Gap = 1e-4,
    time_limit: options.TimeLimit = 60.0,
    total_time_limit: Annotated[
        float | None,
        typer.Option(
            help="Seconds for tracing, pricing and solving together; what is left of them bounds the solver, too.",
            show_default=False,
            metavar="SECONDS",
            rich_help_panel=options.SEARCH,
        ),
    ] = None,
    work_limit: options.WorkLimit = None,
    seed: options.Seed = 0,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            help="Processor cores for the solver; with a work limit the plan does not depend on it.",
            metavar="N",
            rich_help_panel=options.SEARCH,
        ),
    ] = 2,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the plan to this JSON file, and the best so far while the solver runs.",
            show_default=False,
            metavar="FILE",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON instead of the report.", rich_help_panel=options.OUTPUT)
    ] = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Find the fastest sharding of a model on a mesh within a memory limit, and prove how far from optimal it can be.

    Ctrl-C while the solver runs ends with the best plan so far and what is proven of it; a second one ends at once.

    Exit codes: 0 ok, 1 error, 2 usage, 3 no plan fits the memory limit or the pins, 130 ended by Ctrl-C.
    """
    shared = options.shared(locals())
    if (model is None) == (config is None):
        raise typer.BadParameter("give one of MODEL (a preset or package.module:function) and --config FILE", param_hint="MODEL")
    check_output(output, config, *(rules or ()))
    from solver_shard.api import optimize
    from solver_shard.errors import printable
    from solver_shard.plan.io import plan_to_json, save_plan
    from solver_shard.plan.summary import baked_in

    with progress_lines(quiet) as progress, catch_interrupts(progress) as interrupt, time_out(total_time_limit, interrupt):
        plan = optimize(
            config if config is not None else str(model),
            mesh=mesh,
            cluster=cluster,
            memory=memory,
            batch=batch,
            **shared,
            workers=workers,
            total_time_limit=total_time_limit,
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
