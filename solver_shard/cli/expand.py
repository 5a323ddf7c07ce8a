"""``solver-shard expand``: how one op runs on a mesh, given the layouts of its inputs."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Literal

import typer

from solver_shard.files import read_json


def expand(
    op: Annotated[str, typer.Argument(metavar="OP", help="An ATen op with its overload: aten.mm.default.")],
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[INPUT]...", help="Further inputs after --inputs.", show_default=False)
    ] = None,
    inputs: Annotated[
        list[str], typer.Option(help="Tensor arguments in order, with their layouts: 'f32[512,1024]| S(0)R'; ? is an unknown size.")
    ] = ...,  # type: ignore[assignment]  # typer's mark for a required option
    mesh: Annotated[str, typer.Option(help="Axes, outermost first: dp=4,tp=2.")] = ...,  # type: ignore[assignment]
    arg: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=JSON", help="Another argument of the op, repeatable: size=[8,4], dim=1.", show_default=False),
    ] = None,
    prices: Annotated[Literal["cluster", "dtensor"], typer.Option(help="The costs of a cluster, or DTensor's own formulas.")] = "cluster",
    cluster: Annotated[str, typer.Option(help="a100, h100, gb200, tpu-v5p, ethernet, or a TOML file.")] = "h100",
    devices_per_host: Annotated[int, typer.Option(min=1, help="For DTensor's formulas.")] = 8,
    source: Annotated[
        Literal["auto", "rules", "dtensor"], typer.Option(help="Strategies of our rules, of DTensor, or the first that has some.")
    ] = "auto",
    every: Annotated[bool, typer.Option("--all", help="Also list every way to run the op, cheapest first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    """Show how one op runs on a mesh: the cheapest strategy for inputs in these layouts, and the moves that it needs."""
    from solver_shard.expander.expander import expand as expand_op

    if more and len(inputs) > 1:
        raise typer.BadParameter("give all inputs after one --inputs, or each after its own", param_hint="--inputs")
    expanded = expand_op(
        op,
        (*inputs, *(more or ())),
        mesh=mesh,
        arguments=_arguments(arg or []),
        prices=prices,
        cluster=cluster,
        devices_per_host=devices_per_host,
        source=source,
        ways=every,
    )
    sys.stdout.write(f"{json.dumps(expanded.to_json(), indent=2) if as_json else expanded}\n")


def _arguments(given: list[str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for text in given:
        name, sign, value = text.partition("=")
        try:
            arguments[name.strip()] = read_json(value)
        except ValueError:
            raise typer.BadParameter(f"cannot read {text!r}; write NAME=JSON, as in dim=1 or size=[8,4]", param_hint="--arg") from None
        if not sign or not name.strip():
            raise typer.BadParameter(f"cannot read {text!r}; write NAME=JSON, as in dim=1 or size=[8,4]", param_hint="--arg")
    return arguments
