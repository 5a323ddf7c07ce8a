"""``solver-shard verify``: run a plan and hold it against the unsharded model and its own prediction."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from solver_shard.cli.terminal import progress_lines


def verify(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file that solve wrote with -o.")],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="What the plan was made for: a preset or an entry point package.module:function.", show_default=False
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="A Hugging Face config.json instead of MODEL.", show_default=False)
    ] = None,
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
    if (model is None) == (config is None):
        raise typer.BadParameter("give one of MODEL (a preset or package.module:function) and --config FILE", param_hint="MODEL")
    from solver_shard.verification import verify as run

    with progress_lines(quiet) as progress:
        verdict = run(
            plan,
            config if config is not None else str(model),
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
