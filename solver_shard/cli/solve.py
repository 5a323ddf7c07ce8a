"""``solver-shard solve``: a model in, a plan out."""

from __future__ import annotations

import enum
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from solver_shard.cli.interrupt import catch_interrupts, time_out
from solver_shard.cli.output import check_output, written_if_possible
from solver_shard.cli.progress import progress_lines


class Objective(enum.StrEnum):
    """What to minimise."""

    TIME = "time"
    MEMORY = "memory"


class ReduceDtype(enum.StrEnum):
    """In which gradients are reduced."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"


class Optimizer(enum.StrEnum):
    """Which optimizer's state to count."""

    ADAMW = "adamw"
    SGD = "sgd"
    NONE = "none"


def solve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A preset (llama3-8b, gpt2, ...) or an entry point package.module:function.", show_default=False
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="A Hugging Face config.json instead of MODEL.", show_default=False)
    ] = None,
    mesh: Annotated[
        str, typer.Option(help="Axes, outermost first, the rightmost with the fastest links: dp=32,tp=8; a bare 8 is d0=8.")
    ] = ...,  # type: ignore[assignment]  # typer's mark for a required option
    batch: Annotated[int | None, typer.Option(min=1, help="Global batch of one step (presets and configs).", show_default=False)] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence (language models).", show_default=False)] = None,
    cluster: Annotated[str, typer.Option(help="a100, h100, gb200, tpu-v5p, ethernet, or a TOML file.")] = "h100",
    memory: Annotated[
        str | None, typer.Option(help="Limit per device: 70GiB, 80GB, bytes (default: 90% of the device's).", show_default=False)
    ] = None,
    reserve: Annotated[
        str | None,
        typer.Option(
            help="Part of that limit that no tensor may have: context, collective buffers, fragmentation "
            "(default: the cluster's; none beside the default limit).",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of parameters and compute: bf16, f32, ... (default: bf16).", show_default=False)
    ] = None,
    microbatches: Annotated[
        int,
        typer.Option(
            min=1,
            help="Run the batch in this many parts, one after the other, and accumulate their gradients; the inputs of an entry "
            "point are those of one part.",
        ),
    ] = 1,
    optimizer: Annotated[Optimizer, typer.Option(help="Optimizer state to count.")] = Optimizer.ADAMW,
    master_weights: Annotated[
        bool,
        typer.Option("--master-weights/--no-master-weights", help="Whether parameters of 16 bits or less have an f32 copy to step."),
    ] = True,
    state_bytes: Annotated[
        int | None,
        typer.Option(help="Optimizer state per parameter element, where it is not the optimizer's own.", show_default=False),
    ] = None,
    reduce_dtype: Annotated[
        ReduceDtype | None,
        typer.Option(help="Reduce, accumulate and hold gradients in this dtype (default: each in its own).", show_default=False),
    ] = None,
    clip: Annotated[bool, typer.Option("--clip", help="Clip gradients to a norm before the update.")] = False,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Plan inference: no backward pass, no update.")] = False,
    checkpoint: Annotated[
        bool,
        typer.Option("--checkpoint", help="Checkpoint every layer: its activations are computed again in backward (presets and configs)."),
    ] = False,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            help="PATTERN=LAYOUT, repeatable: 'w=R,S(0)' is one placement per mesh axis, 'x=dp=S(0)' those of named axes, "
            "'w=S(*),*' any cut and any placement, 'w=_S(0),S(0)' dim 0 cut by the right axis first; w may be a glob.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=AxB",
            help="Split a mesh axis into sub-axes, outermost first, as in tp=8x2 (default: where an axis has more devices than heads).",
            show_default=False,
        ),
    ] = None,
    no_split: Annotated[bool, typer.Option("--no-split", help="Split no mesh axis.")] = False,
    template: Annotated[
        str | None,
        typer.Option(
            help="Plan what experts write instead of the best: AXIS=TEMPLATE pairs of replicate, ddp, zero1, zero2, zero3, megatron, "
            "megatron-sp, vocab-parallel, context-parallel, expert-parallel, free (no template), as in dp=zero3,tp=megatron+vocab-parallel "
            "or dp=ddp,tp=zero3+expert-parallel; or one name for all; or hsdp.",
            show_default=False,
        ),
    ] = None,
    rules: Annotated[
        list[Path] | None,
        typer.Option(
            help="A TOML file with sharding rules of your own, one row per op, repeatable; its rows replace shipped ones.",
            show_default=False,
        ),
    ] = None,
    conservative: Annotated[
        bool, typer.Option("--conservative", help="Only equal shards, and no cut inside a dim that a view merges or splits.")
    ] = False,
    free: Annotated[bool, typer.Option("--free", help="Let copies of a repeated layer differ (a larger search).")] = False,
    objective: Annotated[Objective, typer.Option(help="Minimise step time or peak memory.")] = Objective.TIME,
    memory_weight: Annotated[int, typer.Option(min=0, help="Nanoseconds per MiB of peak added to the time objective.")] = 0,
    overlap: Annotated[float, typer.Option(help="Part of parameter gathers and gradient reductions hidden behind compute, 0 to 1.")] = 0.0,
    fusion: Annotated[bool, typer.Option("--fusion", help="Price chains of pointwise ops as fused (torch.compile).")] = False,
    gap: Annotated[float, typer.Option(help="Stop when (objective - bound) / objective is at most this.")] = 1e-4,
    time_limit: Annotated[float, typer.Option(help="Seconds for the solver.")] = 60.0,
    total_time_limit: Annotated[
        float | None,
        typer.Option(
            help="Seconds for tracing, pricing and solving together; what is left of them bounds the solver, too.", show_default=False
        ),
    ] = None,
    work_limit: Annotated[
        float | None, typer.Option(help="Units of solver work; the same limit and seed give the same plan.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="For the solver's random choices.")] = 0,
    workers: Annotated[
        int, typer.Option(min=1, help="Processor cores for the solver; with a work limit the plan does not depend on it.")
    ] = 2,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the plan to this JSON file, and the best so far while the solver runs.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of the report.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    """Find the fastest sharding of a model on a mesh within a memory limit, and prove how far from optimal it can be.

    Ctrl-C while the solver runs ends with the best plan so far and what is proven of it; a second one ends at once.

    Exit codes: 0 ok, 1 error, 2 usage, 3 no plan fits the memory limit or the pins, 130 ended by Ctrl-C.
    """
    if (model is None) == (config is None):
        raise typer.BadParameter("give one of MODEL (a preset or package.module:function) and --config FILE", param_hint="MODEL")
    if split is not None and no_split:
        raise typer.BadParameter("give one of --split and --no-split", param_hint="--split")
    check_output(output)
    from solver_shard.api import optimize
    from solver_shard.plan.io import plan_to_json, save_plan

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
    sys.stdout.write(plan_to_json(plan) if as_json else f"{plan}\n")
