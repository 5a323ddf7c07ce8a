"""``solver-shard rules``: the sharding rules of ops, and the proof of them."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from solver_shard.cli.rules_list import list_rules

if TYPE_CHECKING:
    from solver_shard.rulebook.check import CheckReport, OpReport
    from solver_shard.rulebook.dtensor import Comparison

rules = typer.Typer(help="The sharding rules of ops: list them, check them on numbers.", no_args_is_help=True)
rules.command("list")(list_rules)


@rules.command()
def check(
    ops: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OP]...", help="aten.mm.default, or mm for all overloads (default: all rows).", show_default=False),
    ] = None,
    tables: Annotated[
        list[Path] | None, typer.Option("--rules", metavar="FILE", help="A rules file of your own, repeatable.", show_default=False)
    ] = None,
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="A module that registers ops of your own, repeatable.", show_default=False),
    ] = None,
    dtensor: Annotated[bool, typer.Option("--dtensor", help="Hold the rules against DTensor's own strategies.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also what is excluded, combination by combination.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of the table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    """Prove rules on numbers: every strategy is right (sound), and no true one is missing (complete).

    Each instance of an op is run on 2 and on 3 devices under all placements of its operands, and whatever reproduces the
    unsharded numbers is held against the rule. Exit code 0 only if every op is sound and complete.
    """
    from solver_shard.cli.progress import progress_lines
    from solver_shard.errors import InputError
    from solver_shard.rulebook.check import check_rules
    from solver_shard.rulebook.table import check_ops, load_table

    if modules and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for module in modules or ():
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            why = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
            raise InputError(f"cannot import {module!r}: {why}; give a module that is installed or in the current folder") from error
    table = load_table(tables or ())
    check_ops(table)
    with progress_lines(quiet) as progress:
        show = progress or (lambda _line: None)
        report = check_rules(ops or (), table=table, progress=show)
        compared = {}
        if dtensor:
            from solver_shard.rulebook.dtensor import compare

            for op in report.ops:
                show(f"DTensor: {op.op}")
                compared[op.op] = compare(table[op.op], table)
    if as_json:
        print(json.dumps(_plain(report, compared), indent=1))
    else:
        _print(report, compared, verbose)
    if not report.passed:
        raise typer.Exit(1)


def _plain(report: CheckReport, compared: dict[str, Comparison]) -> dict[str, object]:
    rows = []
    for op in report.ops:
        row: dict[str, object] = {
            "op": op.op,
            "family": op.family,
            "instances": op.instances,
            "strategies": op.strategies,
            "combinations": op.combinations,
            "sound": not op.wrong,
            "complete": False if op.missing or not op.instances else True if op.combinations else None,
            "wrong": list(op.wrong),
            "missing": list(op.missing),
            "excluded": [{"combination": text, "reason": reason} for text, reason in op.excluded],
            "notes": list(op.notes),
        }
        if op.op in compared:
            row["dtensor"] = compared[op.op].as_json()
        rows.append(row)
    return {"passed": report.passed, "ops": rows}


def _print(report: CheckReport, compared: dict[str, Comparison], verbose: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from solver_shard.errors import printable

    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    grid = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("op", "family"):
        grid.add_column(name, overflow="fold")
    for name in ("instances", "strategies", "combinations"):
        grid.add_column(name, justify="right")
    for name in ("sound", "complete", "excluded, notes"):
        grid.add_column(name, overflow="fold")
    for op in report.ops:
        numbers = (str(op.instances), str(op.strategies), str(op.combinations))
        sound = f"NO: {len(op.wrong)} wrong" if op.wrong else "yes" if op.instances else "-"
        complete = f"NO: {len(op.missing)} missing" if op.missing else "yes" if op.combinations else "-"
        grid.add_row(*map(Text, map(printable, (op.op, op.family, *numbers, sound, complete, _remarks(op)))))
    console.print(grid, markup=False)
    for op in report.ops:
        for kind, lines in (("wrong", op.wrong), ("missing", op.missing)):
            for line in lines:
                console.print(printable(f"{kind}: {op.op}: {line}"), markup=False)
        for text, reason in op.excluded if verbose else ():
            console.print(printable(f"excluded: {op.op}: {text}: {reason}"), markup=False)
        if op.op in compared:
            for line in compared[op.op].lines():
                console.print(printable(f"{op.op}: {line}"), markup=False)
    passed = sum(op.passed for op in report.ops)
    console.print(
        f"{passed} of {len(report.ops)} ops sound and complete: {sum(op.strategies for op in report.ops):,} strategies and "
        f"{sum(op.combinations for op in report.ops):,} combinations run on {sum(op.instances for op in report.ops)} instances",
        markup=False,
    )


def _remarks(op: OpReport) -> str:
    reasons: dict[str, int] = {}
    for _, reason in op.excluded:
        reasons[reason] = reasons.get(reason, 0) + 1
    return "; ".join([*op.notes, *(f"{count} excluded: {reason}" for reason, count in reasons.items())])
