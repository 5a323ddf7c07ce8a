"""``solver-shard sweep``: one model on many meshes, batches, memory limits and clusters."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from solver_shard.cli.options import Config, Debug, Model, Quiet, given_model, takes_options
from solver_shard.cli.terminal import progress_lines

if TYPE_CHECKING:
    from solver_shard.analysis.sweep.results import Sweep


@takes_options("sweep")
def sweep(
    context: typer.Context,
    model: Model = None,
    config: Config = None,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Try a mesh for every way to write this number as a product: 64 as 2x32, 4x16, ...; axes are called d0, d1, ..., "
            "the rightmost with the fastest links.",
            show_default=False,
        ),
    ] = None,
    axes: Annotated[str, typer.Option(metavar="N,...", help="Of --devices: how many axes, each larger than 1; as in 2,3.")] = "1,2",
    mesh: Annotated[
        list[str] | None,
        typer.Option(help="A mesh to try, repeatable, instead of --devices: dp=8,tp=8.", show_default=False),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Global batch of one step, repeatable (presets and configs).", show_default=False)
    ] = None,
    memory: Annotated[
        list[str] | None,
        typer.Option(help="Limit per device, repeatable: 70GiB, 80GB (default: 90% of the device's).", show_default=False),
    ] = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option(help="a100, h100 (the default), gb200, tpu-v5p, ethernet, or a TOML file; repeatable.", show_default=False),
    ] = None,
    *,
    workers: Annotated[int, typer.Option(min=1, help="Processor cores for each point.")] = 1,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Points to run at once (default: as many as there are cores for).", show_default=False),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run the points on a Ray cluster: host:port, ray://host:port, auto, or local to start one here with --jobs.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Write every plan and sweep.json there; a sweep that stopped half-way goes on from what it holds.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print sweep.json instead of the table.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Plan a model on many mesh shapes, batch sizes, memory limits and clusters: what is fastest, what is smallest, what is proven.

    The model is traced once for each batch size; the other options are those of solve and hold for all points. Points are solved in
    processes of their own. Ctrl-C ends with the table so far; run the same command with the same -o again to go on.

    Exit codes: 0 ok, 1 error (at some point, too), 2 usage, 3 no plan fits anywhere, 130 ended by Ctrl-C.
    """
    source = given_model(model, config)
    if (devices is None) == (not mesh):
        raise typer.BadParameter("give one of --devices 64 (all shapes of that many) and --mesh dp=8,tp=8", param_hint="--devices")
    from solver_shard.analysis import sweep as study
    from solver_shard.errors import printable

    so_far: list[Sweep] = []
    try:
        with progress_lines(quiet, keep=True) as progress:
            swept = study.sweep(
                source,
                devices=devices,
                axes=_numbers(axes),
                meshes=tuple(mesh or ()),
                batches=tuple(batch or (None,)),
                memories=tuple(memory or (None,)),
                clusters=tuple(cluster or ("h100",)),
                folder=output,
                jobs=jobs,
                workers=workers,
                ray=ray,
                command=shlex.join(["solver-shard", *context.find_root().obj]),
                progress=progress,
                watch=lambda sweep: so_far.__setitem__(slice(None), [sweep]),
                **options,
            )
    except KeyboardInterrupt:
        if so_far:
            _write(so_far[0], as_json)
            print(printable(_how_to_go_on(so_far[0], output)), file=sys.stderr)
        raise
    _write(swept, as_json)
    if any(row.status == "error" for row in swept.rows):
        raise typer.Exit(1)
    if not any(row.fits for row in swept.rows):
        raise typer.Exit(3)


def _write(sweep: Sweep, as_json: bool) -> None:
    sys.stdout.write(sweep.to_json() if as_json else f"{sweep}\n")
    sys.stdout.flush()


def _how_to_go_on(sweep: Sweep, output: Path | None) -> str:
    there = len(sweep.rows) - sweep.pending
    if output is None:
        return f"{there} of {len(sweep.rows)} points were done; with -o FOLDER they are kept, and the same command goes on from them"
    return f"{there} of {len(sweep.rows)} points are in {output}; run the same command again to go on"


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 4 for part in parts):
        raise typer.BadParameter(f"{text!r} is no list of numbers; write it as 2 or 2,3", param_hint="--axes")
    return tuple(map(int, parts))
