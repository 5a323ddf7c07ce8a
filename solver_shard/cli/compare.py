"""``solver-shard compare``: one table over plans for the same model and mesh."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from solver_shard.cli.options import PlanConfig, PlanModel, check_output, plan_model, takes_options
from solver_shard.cli.terminal import progress_lines

if TYPE_CHECKING:
    from solver_shard.analysis.compare import Comparison
    from solver_shard.analysis.other_tools import ToolPlan


_SUFFIXES = (".md", ".json", ".csv", ".txt")
MAX_PINS = 1000


@takes_options("compare", time_limit=20.0)
def compare(
    plans: Annotated[list[Path], typer.Argument(metavar="PLAN [OTHER...]", help="Plan files of solve; the first one says the step.")],
    recipes: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="RECIPE",
            help="basic, aggressive, op-priority, user-priority, dtensor-greedy, dijkstra-greedy, or a template as in solve; repeatable. "
            "'none' for no such row (default: all of these and common templates).",
            show_default=False,
        ),
    ] = None,
    tp_plan: Annotated[
        list[Path] | None,
        typer.Option("--tp-plan", metavar="FILE", help="A Hugging Face tp_plan: JSON, or a config.json; repeatable.", show_default=False),
    ] = None,
    parallelize: Annotated[
        list[Path] | None,
        typer.Option(
            "--parallelize",
            metavar="FILE",
            help="A dict of parallelize_module styles: JSON, or a Python file, which is read and not run; repeatable.",
            show_default=False,
        ),
    ] = None,
    pins: Annotated[
        list[Path] | None,
        typer.Option(
            "--pins", metavar="FILE", help="A pin per line, as in solve --pin; # begins a comment; repeatable.", show_default=False
        ),
    ] = None,
    axis: Annotated[
        str | None, typer.Option("--axis", help="The mesh axis that --tp-plan and --parallelize are about (default: tp, or the rightmost).")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="TEMPLATE",
            help="What their other axes do: zero3, ddp, ... (default: as the file says, else zero3).",
            show_default=False,
        ),
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--diff",
            metavar="A B",
            help="Say what differs between two rows of the table instead of printing it: plan files, recipes, or given files.",
            show_default=False,
        ),
    ] = None,
    model: PlanModel = None,
    config: PlanConfig = None,
    *,
    wide: Annotated[bool, typer.Option("--wide", help="Show what fills the memory at the peak, too.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the table to this file: .md, .json, .csv or .txt.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
    **options: Any,
) -> None:
    """Price plans for the step of a plan beside it: greedy propagation, DTensor, experts' templates, other tools' plans, pins.

    All are priced by the same evaluator, on one trace of the model.
    Regret is how much slower a plan's step is than the bound that the first plan proves: (step - bound) / bound.
    Plans that need more memory than the first plan's limit are shown as not fitting.

    Exit codes: 0 done, 1 bad input, also where a row that was asked for cannot be had, 2 usage.
    """
    from solver_shard.analysis.compare import compare as compare_plans
    from solver_shard.analysis.difference import difference as difference_of
    from solver_shard.analysis.other_tools import read_parallelize, read_tp_plan
    from solver_shard.errors import printable
    from solver_shard.files import write_whole
    from solver_shard.plan.io import load_plan

    check_output(output, *plans, *(tp_plan or ()), *(parallelize or ()), *(pins or ()), config)
    if output is not None and output.suffix not in _SUFFIXES:
        raise typer.BadParameter(f"{output} has none of the suffixes {', '.join(_SUFFIXES)}", param_hint="--output")
    source = plan_model(model, config)
    if recipes and "none" in recipes and len(recipes) > 1:
        raise typer.BadParameter("'none' leaves no other recipe", param_hint="--with")
    given: list[ToolPlan] = [
        *(read_tp_plan(_text(path), name=path.name, data=data, axis=axis) for path in tp_plan or ()),
        *(read_parallelize(_text(path), name=path.name, data=data, axis=axis) for path in parallelize or ()),
    ]
    first, *others = [(str(path) if plans.count(path) < 2 else "", load_plan(path)) for path in plans]
    if not all(title for title, _ in (first, *others)):
        raise typer.BadParameter("a plan is given twice", param_hint="PLAN")
    titles = {title for title, _ in (first, *others)} | {item.name for item in given} | {path.name for path in pins or ()}
    if diff is not None and not recipes:
        recipes = [title for title in dict.fromkeys(diff) if title not in titles] or ["none"]
    with progress_lines(quiet) as progress:
        comparison = compare_plans(
            first[1],
            dict(others),
            name=first[0],
            recipes=None if not recipes else [text for text in recipes if text != "none"],
            given=given,
            pins={path.name: _pins(path) for path in pins or ()},
            model=source,
            **options,
            progress=progress,
        )
        difference = None if diff is None else difference_of(comparison.row(diff[0]), comparison.row(diff[1]))
        if output is not None:
            write_whole(output, _written(comparison, output.suffix))
    if as_json:
        sys.stdout.write(json.dumps(comparison.to_json() if difference is None else difference.to_json(), indent=1) + "\n")
    else:
        sys.stdout.write(f"{comparison.text(wide=wide) if difference is None else difference}\n")
    named = {*(recipes or ()), *(item.name for item in given), *(path.name for path in pins or ())}
    missing = [f"{title}: {why}" for title, why in comparison.left_out if title in named]
    for line in missing:
        print(printable(f"error: {line}"), file=sys.stderr)
    if missing:
        raise typer.Exit(1)


def _written(comparison: Comparison, suffix: str) -> str:
    if suffix == ".json":
        return json.dumps(comparison.to_json(), indent=1) + "\n"
    if suffix == ".csv":
        return comparison.csv()
    return comparison.markdown() if suffix == ".md" else comparison.text(wide=True) + "\n"


def _text(path: Path) -> str:
    """A small file's text; InputError where it is none."""
    from solver_shard.errors import InputError
    from solver_shard.exporters.literal import MAX_BYTES
    from solver_shard.files import read_text

    try:
        return read_text(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is no text'}") from None


def _pins(path: Path) -> list[str]:
    """The pins of a file, one a line."""
    from solver_shard.errors import InputError

    lines = [line.partition("#")[0].strip() for line in _text(path).splitlines()]
    pins = [line for line in lines if line]
    if not pins or len(pins) > MAX_PINS:
        raise InputError(f"{path} holds {len(pins):,} pins; write one a line, as in 'lm_head.weight=S(0),R', {MAX_PINS:,} at most")
    return pins
