"""``solver-shard rules``: sharding rules, listed and checked."""

from __future__ import annotations

import typer

from solver_shard.cli import rules_list

app = typer.Typer(name="rules", help="Sharding rules of ops: list them, check them.", no_args_is_help=True)
app.command("list")(rules_list.list_rules)
