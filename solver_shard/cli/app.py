"""The application object and what is common to all commands."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from solver_shard import __version__
from solver_shard.cli import compare, explain, export, propagate, solve, sweep
from solver_shard.cli.rules import rules
from solver_shard.errors import printable


class Commands(TyperGroup):
    """Usage errors say what was given, which may be the name of a file from elsewhere: it is escaped as in all other errors."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _escaped():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _escaped():
            return super().invoke(ctx)


@contextmanager
def _escaped() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(said := getattr(error, "message", None), str):  # of click, which typer may have under a name of its own
            error.message = printable(said)  # type: ignore[attr-defined]
        raise


app = typer.Typer(
    name="solver-shard",
    cls=Commands,
    help="Find the sharding of every tensor of a PyTorch model that makes one step fastest within a memory limit, with a proof.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"solver-shard {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    pass


app.command("solve")(solve.solve)
app.command("solve-graph")(solve.solve_graph)
app.command("sweep")(sweep.sweep)
app.command("show")(explain.show)
app.command("compare")(compare.compare)
app.command("expand")(propagate.expand)
app.command("explain")(explain.explain)
app.command("export")(export.export)
app.command("propagate")(propagate.propagate)
app.command("report")(export.report)
app.command("trace")(export.trace)
app.command("verify")(explain.verify)
app.command("measure")(explain.measure)
app.add_typer(rules, name="rules")


def _flowing(text: str) -> str:
    """A docstring with one line per paragraph, as typer keeps the line breaks of all paragraphs but the first."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(text))


for _command in (*app.registered_commands, *rules.registered_commands):
    if _command.help is None and _command.callback is not None:
        _command.help = _flowing(_command.callback.__doc__ or "")
