"""``solver-shard rules``: the sharding rules of ops, and the proof of them."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from solver_shard.rules.check import CheckReport, OpReport
    from solver_shard.rules.check.dtensor import StrategyComparison
    from solver_shard.rules.rulebook import OpUsage
    from solver_shard.rules.table import RuleTable


# ``solver-shard rules list``: the rules that there are, or those that a model uses and how much of its work each has.

_WIDTH = 72
SOURCES = {
    "table": "table",
    "user": "user",
    "family": "family",
    "dtensor": "DTensor",
    "unproven": "DTensor, unproven",
    "fallback": "replicate",
}


def list_rules(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A preset or an entry point package.module:function: list the ops of its step (default: all rows).",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="A Hugging Face config.json instead of MODEL.", show_default=False)
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Global batch of one step (presets and configs; default 8).")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence (language models; default 128).")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of parameters and compute (default: bf16).", show_default=False)] = None,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="No backward pass.")] = False,
    rules: Annotated[
        list[Path] | None, typer.Option(help="A TOML file with sharding rules of your own, repeatable.", show_default=False)
    ] = None,
    conservative: Annotated[bool, typer.Option("--conservative", help="Rules without uneven cuts and cuts inside a dim.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    """List every op with its rule, where the rule comes from, and, of a model, how often it is used and its share of the work.

    Sources: table (a shipped row), the name of a rules file of yours, family (an in-place, out or list op, by the row of the op it
    follows), DTensor (strategies registered there: proven ones of torch's own, or unproven ones of yours), replicate (no rule).
    Factors marked * are never cut.
    """
    if model is not None and config is not None:
        raise typer.BadParameter("give MODEL or --config FILE, not both", param_hint="MODEL")
    from solver_shard.rules.rulebook import Rulebook
    from solver_shard.rules.table import check_ops, load_table

    table = load_table(tuple(rules or ()))
    wanted = model if model is not None else config
    if wanted is None:
        check_ops(table)
        rows = _rows(table)
        text = _row_text(rows)
    else:
        from solver_shard.rules.rulebook import usage
        from solver_shard.tracing.load import is_entry_point, program_of

        sizes: dict[str, Any] = {}
        if not is_entry_point(wanted):
            sizes = {"batch": batch or 8, "seq": seq or _sequence(wanted), "dtype": dtype}
        program, _ = program_of(wanted, forward_only=forward_only, **sizes)
        check_ops(table, known=frozenset(op.name for op in program.ops))
        used = usage(program, Rulebook(table, conservative=conservative))
        replaced = {row.op: row.file for row in table.replaced}
        rows = [{**dataclasses.asdict(row), "source": SOURCES[row.source].lower(), "replaces": replaced.get(row.op)} for row in used]
        text = _usage_text(used, replaced)
    sys.stdout.write(json.dumps(rows, indent=1) + "\n" if as_json else text + "\n")


def _sequence(wanted: str) -> int | None:
    """Tokens per sequence where the model reads text."""
    from solver_shard.tracing.huggingface import reads_text

    return 128 if reads_text(wanted) else None


def _rows(table: RuleTable) -> list[dict[str, Any]]:
    replaced = {row.op: row.file for row in table.replaced}
    return [
        {
            "op": op,
            "family": row.family,
            "settings": dict(row.settings),
            "source": "user" if row.user else "table",
            "file": row.file,
            "replaces": replaced.get(op),
        }
        for op, row in sorted(table.items())
    ]


def _row_text(rows: list[dict[str, Any]]) -> str:
    from solver_shard.text import table, text_of

    lines = [("op", "rule", "source")]
    for row in rows:
        settings = ", ".join(f"{key} {value}" for key, value in row["settings"].items() if key != "dims")
        rule = row["settings"].get("dims", row["family"]) + (f"; {settings}" if settings else "")
        source = row["file"] if row["source"] == "user" else "table"
        lines.append((row["op"], _cut(rule), source + (f" (replaces {row['replaces']})" if row["replaces"] else "")))
    return text_of([f"{len(rows)} rows", *table(lines, header=True)])


def _usage_text(rows: tuple[OpUsage, ...], replaced: Mapping[str, str]) -> str:
    from solver_shard.text import table, text_of

    lines = [("op", "calls", "flops", "bytes", "strategies", "source", "rule")]
    for row in rows:
        source = row.file if row.source == "user" else SOURCES[row.source]
        source += f" (replaces {replaced[row.op]})" if row.op in replaced else ""
        ways = f"; {', '.join(row.implementations)}" if row.implementations else ""
        shares = (f"{row.flops:.1%}", f"{row.nbytes:.1%}")
        lines.append((row.op, str(row.count), *shares, str(row.strategies), source, _cut(row.rule) + ways))
    calls = sum(row.count for row in rows)
    whole = [row.op for row in rows if row.source == "fallback"]
    title = f"{calls} calls of {len(rows)} ops; {f'{len(whole)} without a rule: ' + ', '.join(whole) if whole else 'all have rules'}"
    return text_of([title, *table(lines, right=(1, 2, 3, 4), header=True)])


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


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
    from solver_shard.cli.terminal import progress_lines
    from solver_shard.errors import InputError
    from solver_shard.rules.check import check_rules
    from solver_shard.rules.table import check_ops, load_table

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
            from solver_shard.rules.check.dtensor import compare

            for op in report.ops:
                show(f"DTensor: {op.op}")
                compared[op.op] = compare(table[op.op], table)
    if as_json:
        print(json.dumps(_plain(report, compared), indent=1))
    else:
        _print(report, compared, verbose)
    if not report.passed:
        raise typer.Exit(1)


def _plain(report: CheckReport, compared: dict[str, StrategyComparison]) -> dict[str, object]:
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


def _print(report: CheckReport, compared: dict[str, StrategyComparison], verbose: bool) -> None:
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
