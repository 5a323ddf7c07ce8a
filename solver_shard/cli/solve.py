"""``solver-shard solve``: a model in, a plan out."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from solver_shard.cli.interrupt import catch_interrupts, time_out
from solver_shard.cli.options import (
    MEMORY,
    MESH,
    MODEL,
    OUTPUT,
    SEARCH,
    Checkpoint,
    Clip,
    Config,
    Conservative,
    Debug,
    Dtype,
    ForwardOnly,
    Free,
    Fusion,
    Gap,
    MasterWeights,
    MemoryWeight,
    Microbatches,
    NoSplit,
    Objective,
    ObjectiveName,
    Optimizer,
    OptimizerName,
    Overlap,
    Pins,
    Quiet,
    ReduceDtypeName,
    Reserve,
    Rules,
    Seed,
    Seq,
    Split,
    StateBytes,
    Template,
    TimeLimit,
    WorkLimit,
)
from solver_shard.cli.output import check_output, written_if_possible
from solver_shard.cli.progress import progress_lines


def solve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A preset (llama3-8b, gpt2, ...) or an entry point package.module:function.", show_default=False
        ),
    ] = None,
    config: Config = None,
    mesh: Annotated[
        str,
        typer.Option(
            help="Axes, outermost first, the rightmost with the fastest links: dp=32,tp=8; a bare 8 is d0=8.",
            metavar="AXES",
            rich_help_panel=MESH,
        ),
    ] = ...,  # type: ignore[assignment]  # typer's mark for a required option
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Global batch of one step (presets and configs).", show_default=False, metavar="N", rich_help_panel=MODEL),
    ] = None,
    seq: Seq = None,
    cluster: Annotated[
        str, typer.Option(help="a100, h100, gb200, tpu-v5p, ethernet, or a TOML file.", metavar="NAME|FILE", rich_help_panel=MESH)
    ] = "h100",
    memory: Annotated[
        str | None,
        typer.Option(
            help="Limit per device: 70GiB, 80GB, bytes (default: 90% of the device's).",
            show_default=False,
            metavar="SIZE",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    reserve: Reserve = None,
    dtype: Dtype = None,
    microbatches: Microbatches = 1,
    optimizer: OptimizerName = Optimizer.ADAMW,
    master_weights: MasterWeights = True,
    state_bytes: StateBytes = None,
    reduce_dtype: ReduceDtypeName = None,
    clip: Clip = False,
    forward_only: ForwardOnly = False,
    checkpoint: Checkpoint = False,
    pin: Pins = None,
    split: Split = None,
    no_split: NoSplit = False,
    template: Template = None,
    rules: Rules = None,
    conservative: Conservative = False,
    free: Free = False,
    objective: ObjectiveName = Objective.TIME,
    memory_weight: MemoryWeight = 0,
    overlap: Overlap = 0.0,
    fusion: Fusion = False,
    gap: Gap = 1e-4,
    time_limit: TimeLimit = 60.0,
    total_time_limit: Annotated[
        float | None,
        typer.Option(
            help="Seconds for tracing, pricing and solving together; what is left of them bounds the solver, too.",
            show_default=False,
            metavar="SECONDS",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    work_limit: WorkLimit = None,
    seed: Seed = 0,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            help="Processor cores for the solver; with a work limit the plan does not depend on it.",
            metavar="N",
            rich_help_panel=SEARCH,
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
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of the report.", rich_help_panel=OUTPUT)] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Find the fastest sharding of a model on a mesh within a memory limit, and prove how far from optimal it can be.

    Ctrl-C while the solver runs ends with the best plan so far and what is proven of it; a second one ends at once.

    Exit codes: 0 ok, 1 error, 2 usage, 3 no plan fits the memory limit or the pins, 130 ended by Ctrl-C.
    """
    if (model is None) == (config is None):
        raise typer.BadParameter("give one of MODEL (a preset or package.module:function) and --config FILE", param_hint="MODEL")
    if split is not None and no_split:
        raise typer.BadParameter("give one of --split and --no-split", param_hint="--split")
    check_output(output, config, *(rules or ()))
    from solver_shard.api import optimize
    from solver_shard.names import printable
    from solver_shard.plan.io import plan_to_json, save_plan
    from solver_shard.plan.report import baked_in

    with progress_lines(quiet) as progress, catch_interrupts(progress) as interrupt, time_out(total_time_limit, interrupt):
        plan = optimize(
            config if config is not None else str(model),
            mesh=mesh,
            cluster=cluster,
            memory=memory,
            reserve=reserve,
            batch=batch,
            seq=seq,
            dtype=dtype,
            forward_only=forward_only,
            checkpoint=checkpoint,
            microbatches=microbatches,
            optimizer=optimizer.value,
            master_weights=master_weights,
            state_bytes=state_bytes,
            reduce_dtype=None if reduce_dtype is None else reduce_dtype.value,
            clip=clip,
            pins=tuple(pin or ()),
            split=split if split is not None else not no_split,
            template=template,
            rules=tuple(rules or ()),
            conservative=conservative,
            overlap=overlap,
            fusion=fusion,
            objective="memory" if objective is Objective.MEMORY else "time",
            memory_weight=memory_weight,
            tied=not free,
            gap=gap,
            time_limit=time_limit,
            work_limit=work_limit,
            seed=seed,
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
