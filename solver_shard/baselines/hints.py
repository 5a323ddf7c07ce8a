"""What greedy baselines make of a problem, as hints from which the solver starts.

``dtensor-greedy`` and ``dijkstra-greedy`` decide op by op (:mod:`solver_shard.baselines.carry`,
:mod:`solver_shard.baselines.dijkstra_greedy`), the four propagation passes spread what is given
(:mod:`solver_shard.baselines.propagated`). All start from the same place: pinned tensors as pinned, inputs that are not cut by batch as far
as they may be, everything else replicated. Of equal hints one is kept, under both names.

A hint restricts some nodes; the solver completes it at the least cost. Of a tied problem the copies of a repeated layer decide as the one
in their middle does, for the first and the last of them may differ from all others by what lies before and behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, get_args

from solver_shard.baselines import carry, dijkstra_greedy
from solver_shard.baselines.dijkstra_greedy import greedy_walk, walk_masks
from solver_shard.baselines.dtensor_greedy import walk
from solver_shard.baselines.masks import Masks
from solver_shard.baselines.propagated import propagated_masks
from solver_shard.choice.fold import Folded
from solver_shard.choice.nodes import Kind, Lowering, Node
from solver_shard.costs.collectives import Collectives
from solver_shard.costs.model import CostModel
from solver_shard.errors import SolverShardError
from solver_shard.layout import Layout, R, S
from solver_shard.pins import Allowed
from solver_shard.program import Role
from solver_shard.propagation.passes import PassName
from solver_shard.propagation.program import propagate_program
from solver_shard.rulebook.build import Rulebook

if TYPE_CHECKING:
    from solver_shard.frontends.clean import Traced


def hints(
    lowering: Lowering,
    costs: CostModel,
    rulebook: Rulebook,
    pinned: Mapping[int, Allowed],
    traced: Traced | None = None,
    nodes: frozenset[int] | None = None,
) -> dict[str, Masks]:
    """Name to restriction of every greedy baseline; without ``traced`` there is none of DTensor.

    ``nodes``: those that are restricted; all by default. A baseline that cannot be had of this problem (a pin that leaves several
    placements, say) is left out.
    """
    stored = starting_layouts(lowering)
    program, mesh = lowering.program, costs.mesh

    def dtensor() -> Masks:
        assert traced is not None
        names = {program.tensors[t].name: layout for t, layout in stored.items()}
        known = {node.source.name for node in traced.raw.nodes if node.source is not None}
        pins = {name: layout for name, layout in names.items() if name in known}
        found = walk(traced.raw, mesh, pins, devices_per_host=costs.cluster.levels[0].size or mesh.size)
        return carry.dtensor_masks(lowering, carry.carry(program, traced, found, pins), nodes)[0]

    def dijkstra() -> Masks:
        made = greedy_walk(program, mesh, stored, rulebook, Collectives(mesh, costs.cluster))
        return walk_masks(lowering, made, nodes)[0]

    def propagated(name: PassName) -> Masks:
        given = {t: _open(layout) for t, layout in stored.items() if any(p != R for p in layout)} | dict(pinned)
        return propagated_masks(lowering, propagate_program(program, mesh, given, name, rulebook).layouts, nodes)

    makers: dict[str, Callable[[], Masks]] = {carry.NAME: dtensor} if traced is not None else {}
    makers[dijkstra_greedy.NAME] = dijkstra
    makers |= {name: lambda name=name: propagated(name) for name in get_args(PassName)}
    found: dict[str, Masks] = {}
    named: dict[tuple[tuple[int, bytes], ...], str] = {}
    for name, make in makers.items():
        try:
            masks = make()
        except SolverShardError:
            continue
        except Exception:
            if make is not dtensor:
                raise
            continue  # DTensor's own parts raise what they like; the solver needs no hint
        key = tuple((v, mask.tobytes()) for v, mask in masks.items())
        if key in named:
            both = f"{named[key]}, {name}"
            found[both] = found.pop(named[key])
            named[key] = both
        else:
            named[key], found[name] = name, masks
    return found


def middles(folded: Folded | None) -> frozenset[int] | None:
    """Of every class of tied nodes the one in the middle; None where nothing is tied."""
    if folded is None:
        return None
    members: dict[int, list[int]] = {}
    for v, c in enumerate(folded.member.tolist()):
        members.setdefault(c, []).append(v)
    return frozenset(copies[len(copies) // 2] for copies in members.values())


def starting_layouts(lowering: Lowering) -> dict[int, Layout]:
    """Where the walks start: inputs cut by batch, the rest replicated, as far as the pins allow."""

    def stored(node: Node) -> Layout:
        if lowering.program.tensors[node.item].role is Role.INPUT:
            by_batch = [layout for layout in node.layouts if all(p in (R, S(0)) for p in layout)]
            if by_batch:
                return max(by_batch, key=lambda layout: sum(p == S(0) for p in layout))
        return node.layouts[0]

    return {node.item: stored(node) for node in lowering.nodes if node.kind is Kind.SOURCE}


def _open(layout: Layout) -> Allowed:
    """A layout as what a pass starts from: cut as it is, open on the other axes."""
    return Allowed(axes=tuple(None if p == R else frozenset({p}) for p in layout), pins=("by batch",))
