"""Options that several commands share: those of the table (:mod:`solver_shard.options`) as typer's parameters, and a few of the commands.

@takes_options("solve")
def solve(model: Model = None, *, output: Path | None = None, **options: Any) -> None:
    solver_shard.optimize(model, **options)
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import typer

from solver_shard.errors import InputError
from solver_shard.options import LAYOUTS, MEMORY, MESH, MODEL, OPTIMIZER, OPTIONS, SEARCH, Option, shown

PANELS = (MODEL, MEMORY, OPTIMIZER, LAYOUTS, MESH, SEARCH)
OUTPUT = "Output"
"""Under which headings --help lists the options; ``OUTPUT`` is for those that the commands add."""

Config = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="FILE", help="A Hugging Face config.json instead of MODEL.", show_default=False, rich_help_panel=MODEL
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.", rich_help_panel=OUTPUT)]
Debug = Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.", rich_help_panel=OUTPUT)]
Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A preset (llama3-8b, gpt2, ...) or an entry point package.module:function.", show_default=False),
]

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file that solve wrote with -o.")]
PlanModel = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODEL", help="What the plan was made for, where it is no preset: package.module:function.", show_default=False
    ),
]
PlanConfig = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="The Hugging Face config.json that it was made for.", show_default=False)
]

RunModel = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="What the plan was made for: a preset or an entry point package.module:function.", show_default=False
    ),
]
RunConfig = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="A Hugging Face config.json instead of MODEL.", show_default=False)
]


def plan_model(model: str | None, config: str | None) -> str | None:
    """The model of a plan by one of these options; None for the preset that the plan names."""
    if model is not None and config is not None:
        raise typer.BadParameter("give one of --model and --config", param_hint="--model")
    return config if config is not None else model


Command = TypeVar("Command", bound=Callable[..., None])


def takes_options(name: str, *first: str, panel: str | None = None, **defaults: Any) -> Callable[[Command], Command]:
    """Give a command the options that the table shows there, in place of its ``**options``, before its keyword-only parameters; ``first``
    before the others.

    The command is called with the keywords of ``solver_shard.optimize``. ``panel``: the heading of those with a help text of their own;
    without it they are listed as the command's own are, with their types as placeholders. ``defaults``: where they differ there.
    """
    entries = sorted(shown(name), key=lambda entry: (entry.name not in first, _place(entry)))

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        first = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.kind is not p.KEYWORD_ONLY]
        last = [p for p in own if p.kind is p.KEYWORD_ONLY]
        options = [p for entry in entries for p in _parameters(entry, entry.shows[name], panel, defaults.get(entry.name, entry.default))]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            command(**{p.name: given[p.name] for p in own}, **{entry.name: _keyword(entry, given) for entry in entries})

        run.__signature__ = signature.replace(parameters=[*first, *options, *last])  # type: ignore[attr-defined]  # of every function
        return cast(Command, run)

    return decorate


def _place(entry: Option) -> tuple[bool, int, int, bool]:
    """What is needed first; then headings in their order, and below each the table's order but for what follows another option."""
    return entry.default is not ..., PANELS.index(entry.panel), list(OPTIONS).index(entry.follows or entry.name), bool(entry.follows)


def _parameters(entry: Option, own_help: str, panel: str | None, default: Any) -> list[inspect.Parameter]:
    """An option as parameters of a command: one, or two where another flag turns it off."""
    heading = panel if own_help else entry.panel
    flag = entry.flag or f"--{entry.name.replace('_', '-')}"
    kind: Any = Literal[entry.choices] if entry.choices else list[entry.kind] if entry.each else entry.kind  # type: ignore[name-defined]
    open_ = entry.each or entry.off is not None or default is None
    shown_as = typer.Option(
        flag,
        help=own_help or entry.help,
        metavar=entry.metavar if heading else None,
        min=entry.least,
        show_default=not open_,
        rich_help_panel=heading,
    )
    start = inspect.Parameter.empty if default is ... else None if open_ else not default if entry.negated else default
    parameters = [_parameter(_flag_name(flag), Annotated[kind | None if open_ else kind, shown_as], start)]
    if entry.off is not None:
        turns_off = typer.Option(entry.off[0], help=entry.off[1], rich_help_panel=heading)
        parameters.append(_parameter(_flag_name(entry.off[0]), Annotated[bool, turns_off], False))
    return parameters


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag_name(flag: str) -> str:
    """What typer calls the parameter of a flag."""
    return flag.partition("/")[0].removeprefix("--").replace("-", "_")


def _keyword(entry: Option, given: Mapping[str, Any]) -> Any:
    """What was given on the command line, as ``solver_shard.optimize`` takes it."""
    value = given[_flag_name(entry.flag or f"--{entry.name}")]
    if entry.each:
        return tuple(value or ())
    if entry.off is not None:
        off = given[_flag_name(entry.off[0])]
        if value is not None and off:
            raise typer.BadParameter(f"give one of --{entry.name} and {entry.off[0]}", param_hint=f"--{entry.name}")
        return value if value is not None else not off
    return not value if entry.negated else value


def given_model(model: str | None, config: str | None) -> str:
    """The one of MODEL and --config that was given."""
    if (model is None) == (config is None):
        raise typer.BadParameter("give one of MODEL (a preset or package.module:function) and --config FILE", param_hint="MODEL")
    return config if config is not None else str(model)


# ``-o``: whether a file can be written is said before the work is done for it; meanwhile it holds the best so far.

T = TypeVar("T")


def check_output(output: Path | None, *sources: Path | str | None) -> None:
    """Refuse, as wrong usage, an output that is not a file in a folder that exists and can be written, or is one of the ``sources``."""
    if output is None:
        return
    try:
        fits = (output.is_file() or not output.exists()) and output.parent.is_dir() and os.access(output.parent, os.W_OK)
    except OSError:  # as where the name is too long
        fits = False
    if not fits:
        raise typer.BadParameter(f"cannot write {output}: give a file in a folder that exists and can be written", param_hint="--output")
    for source in sources:
        if source is not None and os.path.exists(source) and output.exists() and output.samefile(source):
            raise typer.BadParameter(f"{output} is what is read, and would be lost; give another file", param_hint="--output")


def written_if_possible(write: Callable[[T], None]) -> Callable[[T], None]:
    """A write that may fail, because the search goes on and its result will be written once more, which says what is wrong."""

    def attempt(what: T) -> None:
        try:
            write(what)
        except InputError:
            return

    return attempt
