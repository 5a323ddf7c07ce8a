"""``solver-shard expand``: how one op runs on a mesh, given the layouts of its inputs."""

from __future__ import annotations

import enum
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from solver_shard.files import read_json

if TYPE_CHECKING:
    from solver_shard.expander.call import PlacedCall
    from solver_shard.expander.search import Expansion


class Prices(enum.StrEnum):
    """Whose cost model."""

    CLUSTER = "cluster"
    DTENSOR = "dtensor"


class Source(enum.StrEnum):
    """Where single-axis strategies come from."""

    AUTO = "auto"
    RULES = "rules"
    DTENSOR = "dtensor"


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
    prices: Annotated[Prices, typer.Option(help="The costs of a cluster, or DTensor's own formulas.")] = Prices.CLUSTER,
    cluster: Annotated[str, typer.Option(help="a100, h100, gb200, tpu-v5p, ethernet, or a TOML file.")] = "h100",
    devices_per_host: Annotated[int, typer.Option(min=1, help="For DTensor's formulas.")] = 8,
    source: Annotated[Source, typer.Option(help="Strategies of our rules, of DTensor, or the first that has some.")] = Source.AUTO,
    every: Annotated[bool, typer.Option("--all", help="Also list every way to run the op, cheapest first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    """Show how one op runs on a mesh: the cheapest strategy for inputs in these layouts, and the moves that it needs."""
    from solver_shard.costs.cluster import load_cluster
    from solver_shard.costs.collectives import Collectives
    from solver_shard.costs.dtensor import DTensorCosts
    from solver_shard.expander.call import Operand
    from solver_shard.expander.expander import Expander, call_of
    from solver_shard.expander.pricing import ClusterPricing, DTensorPricing, MovePricing
    from solver_shard.mesh import Mesh
    from solver_shard.text import text_of

    if more and len(inputs) > 1:
        raise typer.BadParameter("give all inputs after one --inputs, or each after its own", param_hint="--inputs")
    on = Mesh.parse(mesh)
    call = call_of(op, [Operand.parse(text, on) for text in (*inputs, *(more or ()))], on, _arguments(arg or []))
    pricing: MovePricing
    if prices is Prices.DTENSOR:
        pricing = DTensorPricing(DTensorCosts(mesh_shape=on.shape, devices_per_host=devices_per_host), on)
    else:
        pricing = ClusterPricing(Collectives(on, load_cluster(cluster)))
    expander = Expander(pricing, source=source.value)
    best = expander.expand(call)
    ranked = expander.ranked(call) if every else ()
    if as_json:
        found = {**_data(best), "visited": best.visited, "product": best.product, "how": best.how}
        sys.stdout.write(json.dumps({**found, **({"all": [_data(e) for e in ranked]} if every else {})}, indent=2) + "\n")
        return
    by = f"DTensor's formulas, {devices_per_host} devices per host" if prices is Prices.DTENSOR else f"cluster {cluster}"
    lines = [f"{op} on {on}, priced by {by}", *_report(call, best)]
    if every:
        lines += ["", f"{len(ranked)} ways, moved as {'DTensor' if prices is Prices.DTENSOR else 'an executor of our plans'} would:"]
        lines += [f"  {_cost(e.cost, e.unit):>12}  {_layouts(e.inputs)} -> {_layouts(e.results)}" for e in ranked]
    sys.stdout.write(text_of(lines) + "\n")


def _arguments(given: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in given:
        name, sign, value = text.partition("=")
        try:
            found[name.strip()] = read_json(value)
        except ValueError:
            raise typer.BadParameter(f"cannot read {text!r}; write NAME=JSON, as in dim=1 or size=[8,4]", param_hint="--arg") from None
        if not sign or not name.strip():
            raise typer.BadParameter(f"cannot read {text!r}; write NAME=JSON, as in dim=1 or size=[8,4]", param_hint="--arg")
    return found


def _report(call: PlacedCall, best: Expansion) -> list[str]:
    from solver_shard.layout import show

    lines = []
    for i, operand in enumerate(call.operands):
        moves = [move for move in best.moves if move.operand == i]
        lines.append(f"  input {i}   {operand}| {show(operand.layout)}{'' if moves else '  as it is'}")
        lines += [f"            {move}" for move in moves]
    for k, meta in enumerate(call.results):
        layout = best.results[k] if k < len(best.results) else None
        lines.append(f"  result {k}  {'masked off' if meta is None or layout is None else f'{meta}| {show(layout)}'}")
    lines.append(f"cost {_cost(best.cost, best.unit)}")
    axes = len(call.element_mesh.axes)
    strategies = round(best.product ** (1 / axes))
    visited = f"{best.visited} states visited" if best.how != "exhaustive" else "all combinations expanded"
    lines.append(f"{visited}; the full product of {strategies} strategies on {axes} axes has {best.product}")
    return lines


def _layouts(layouts: tuple[Any, ...]) -> str:
    from solver_shard.layout import show

    return ", ".join("-" if layout is None else show(layout) for layout in layouts)


def _cost(cost: float, unit: str) -> str:
    from solver_shard.text import format_ns

    return format_ns(round(cost)) if unit == "ns" else f"{cost:.2f} {unit}"


def _data(found: Expansion) -> dict[str, Any]:
    from solver_shard.layout import show

    return {
        "inputs": [show(layout) for layout in found.inputs],
        "results": [None if layout is None else show(layout) for layout in found.results],
        "cost": found.cost,
        "unit": found.unit,
        "moves": [
            {
                "input": move.operand,
                "kind": move.kind,
                "axes": list(move.names),
                "before": show(move.before),
                "after": show(move.after),
                "bytes": move.nbytes,
                "cost": move.cost,
            }
            for move in found.moves
        ],
    }
