"""``solver-shard show``: read a saved plan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def show(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file that solve wrote with -o.")],
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="TENSOR-PATTERN", help="A tensor name, module path or glob: '*q_proj.weight'.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    """Print the report of a plan, or the layouts of the tensors that a pattern matches and the reshards around them."""
    from solver_shard.plan.io import load_plan, plan_to_json
    from solver_shard.plan.lookup import lookup, lookup_json

    loaded = load_plan(plan)
    if pattern is None:
        sys.stdout.write(plan_to_json(loaded) if as_json else f"{loaded}\n")
    else:
        sys.stdout.write((lookup_json if as_json else lookup)(loaded, pattern) + "\n")
