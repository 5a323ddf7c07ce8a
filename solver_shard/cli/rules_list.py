"""``solver-shard rules list``: the rules that there are, or those that a model uses and how much of its work each has."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from solver_shard.rulebook.table import RuleTable
    from solver_shard.rulebook.usage import OpUsage

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
    from solver_shard.rulebook.build import Rulebook
    from solver_shard.rulebook.table import check_ops, load_table

    table = load_table(tuple(rules or ()))
    wanted = model if model is not None else config
    if wanted is None:
        check_ops(table)
        found = _rows(table)
        text = _row_text(found)
    else:
        from solver_shard.rulebook.usage import usage
        from solver_shard.source import is_entry_point, program_of

        sizes: dict[str, Any] = {}
        if not is_entry_point(wanted):
            sizes = {"batch": batch or 8, "seq": seq or _sequence(wanted), "dtype": dtype}
        program, _ = program_of(wanted, forward_only=forward_only, **sizes)
        check_ops(table, known=frozenset(op.name for op in program.ops))
        used = usage(program, Rulebook(table, conservative=conservative))
        replaced = {row.op: row.file for row in table.replaced}
        found = [{**dataclasses.asdict(row), "source": SOURCES[row.source].lower(), "replaces": replaced.get(row.op)} for row in used]
        text = _usage_text(used, replaced)
    sys.stdout.write(json.dumps(found, indent=1) + "\n" if as_json else text + "\n")


def _sequence(wanted: str) -> int | None:
    """Tokens per sequence where the model reads text."""
    from solver_shard.frontends.huggingface import reads_text

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
    from solver_shard.names import text_of
    from solver_shard.plan.table import table

    lines = [("op", "rule", "source")]
    for row in rows:
        settings = ", ".join(f"{key} {value}" for key, value in row["settings"].items() if key != "dims")
        rule = row["settings"].get("dims", row["family"]) + (f"; {settings}" if settings else "")
        source = row["file"] if row["source"] == "user" else "table"
        lines.append((row["op"], _cut(rule), source + (f" (replaces {row['replaces']})" if row["replaces"] else "")))
    return text_of([f"{len(rows)} rows", *table(lines, header=True)])


def _usage_text(rows: tuple[OpUsage, ...], replaced: Mapping[str, str]) -> str:
    from solver_shard.names import text_of
    from solver_shard.plan.table import table

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
