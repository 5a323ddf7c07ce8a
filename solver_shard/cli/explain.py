"""Commands that ask about one plan: ``explain`` (why is it so, what would cost what), ``show`` (what is in it), ``verify`` (is it so),
``measure`` (is it as fast)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from solver_shard.cli.options import PlanConfig, PlanFile, PlanModel, RunConfig, RunModel, check_output, given_model, plan_model
from solver_shard.cli.terminal import catch_interrupts, progress_lines


def explain(
    plan: PlanFile,
    subject: Annotated[
        str,
        typer.Argument(
            metavar="TENSOR-OR-OP",
            help="A tensor name, MODULE:out for what modules hand on, an op name, a module path for its ops, or a glob: '*q_proj.weight'.",
        ),
    ],
    instead: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            help="Price this layout, written as in a pin: 'S(0),R', 'dp=S(0)', 'S(*),*'; of a strategy, names like 'a,R'.",
            show_default=False,
        ),
    ] = None,
    of: Annotated[
        Literal["layout", "state", "forward", "backward", "strategy"],
        typer.Option(
            help="What to ask about: the layout (what a pin fixes), the state of the optimizer, what forward or backward readers get, or "
            "the strategy of the op that makes it.",
        ),
    ] = "layout",
    alternatives: Annotated[int, typer.Option(min=0, help="Price the best so many; 0 only explains, without tracing or solving.")] = 5,
    model: PlanModel = None,
    config: PlanConfig = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            help="Seconds of solving per alternative (default: 30; none with --work-limit).", metavar="SECONDS", show_default=False
        ),
    ] = None,
    work_limit: Annotated[
        float | None,
        typer.Option(
            help="Units of solver work per alternative; the same limit and seed give the same prices.", metavar="UNITS", show_default=False
        ),
    ] = None,
    gap: Annotated[
        float | None,
        typer.Option(help="Stop at this relative gap (default: the plan's).", show_default=False),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="For the solver's random choices (default: the plan's).", show_default=False)] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processor cores for the solver.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    """Say what a plan chose for a tensor or op and what each collective around it is for, and price alternatives.

    With --instead one layout is forced and everything else solved anew, from the present plan. Without, the best alternatives are
    priced one by one, of a pattern that matches one tensor (copies in repeated layers count as one, and change together). A price is
    proven to be in the interval that is given with it.

    Exit codes: 0 ok, 1 error, 2 usage, 3 no plan with the layout asked for fits the memory limit or runs at all.
    """
    source = plan_model(model, config)
    from solver_shard.analysis.explanation import different, explanation
    from solver_shard.plan.io import load_plan

    loaded = load_plan(plan)
    several = different(loaded, subject) if instead is None else 1
    if instead is None and (not alternatives or several > 1):
        static = explanation(loaded, subject)
        hint = f"\n\n{several} different tensors or ops; name one of them to price its alternatives" if alternatives else ""
        sys.stdout.write(f"{static.to_json() if as_json else f'{static}{hint}'}\n")
        return
    from solver_shard.analysis.explain import explain as run

    with progress_lines(quiet) as progress, catch_interrupts(progress) as interrupt:
        priced = run(
            loaded,
            subject,
            instead,
            of=of,
            alternatives=alternatives,
            model=source,
            time_limit=time_limit,
            work_limit=work_limit,
            gap=gap,
            seed=seed,
            workers=workers,
            progress=progress,
            stop=interrupt,
        )
    sys.stdout.write(f"{priced.to_json() if as_json else priced}\n")
    if priced.instead is not None and priced.instead.outcome in ("too large", "impossible"):
        raise typer.Exit(3)


def show(
    plan: PlanFile,
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="TENSOR-PATTERN", help="A tensor name, module path or glob: '*q_proj.weight'.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    """Print the report of a plan, or the layouts of the tensors that a pattern matches and the reshards around them."""
    from solver_shard.plan.io import load_plan, plan_to_json
    from solver_shard.plan.summary import lookup, lookup_json

    loaded = load_plan(plan)
    if pattern is None:
        sys.stdout.write(plan_to_json(loaded) if as_json else f"{loaded}\n")
    else:
        sys.stdout.write((lookup_json if as_json else lookup)(loaded, pattern) + "\n")


def verify(
    plan: PlanFile,
    model: RunModel = None,
    config: RunConfig = None,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Run in so many processes of this machine, by gloo (default: all devices simulated in one).", show_default=False
        ),
    ] = None,
    twin: Annotated[
        bool | None,
        typer.Option(
            "--twin/--no-twin",
            help="Carry the plan to a small twin, or run it as it is (default: a twin where model or mesh are large, or --processes "
            "differs from the plan's devices).",
            show_default=False,
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(help="Of a twin's widths and vocabulary, as 0.05 or 1/64 (default: about 64 wide).", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="For weights and inputs.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that the processes may take.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON with every tensor instead of the tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    """Run one step of a plan, and compare outputs, loss, every gradient and the updated parameters with the unsharded model, and the
    collectives with those that the plan predicts.

    Exit codes: 0 all of it holds, 1 something does not or an error, 2 usage.
    """
    source = given_model(model, config)
    from solver_shard.verification import verify as run

    with progress_lines(quiet) as progress:
        verdict = run(
            plan,
            source,
            processes=processes,
            twin=twin,
            scale=scale,
            seed=seed,
            timeout=timeout,
            progress=progress,
        )
    sys.stdout.write(f"{verdict.to_json() if as_json else verdict}\n")
    if not verdict.holds:
        raise typer.Exit(1)


def measure(
    plan: PlanFile,
    model: RunModel = None,
    config: RunConfig = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps whose time counts.")] = 20,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them.")] = 3,
    seed: Annotated[int, typer.Option(help="For weights and inputs.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write all of it as JSON to this file.", show_default=False)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    """Run steps of a plan on real devices, and hold time and memory against what the plan says.

    Start it in as many processes as the plan has devices: torchrun --nproc-per-node 4 -m solver_shard measure PLAN MODEL. The first
    one reports: the step, its compute by kind of kernel, its collectives by kind and mesh axes, the update, peak memory by category.
    """
    check_output(output, plan)
    source = given_model(model, config)
    from solver_shard.files import write_whole
    from solver_shard.verification.measurement import measure as run

    first = os.environ.get("RANK", "0") == "0"
    with progress_lines(quiet or not first) as progress:
        measurement = run(plan, source, steps=steps, warmup=warmup, seed=seed, progress=progress)
    if not first:
        return
    if output is not None:
        write_whole(output, measurement.to_json() + "\n")
    sys.stdout.write(f"{measurement}\n")
