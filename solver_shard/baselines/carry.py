"""From DTensor's walk over the raw ops to a plan: every op of the cleaned program runs as DTensor would run the raw op it stands for.

A cleaned op names its raw nodes. One of them, that of the same operation, tells how the op's results are laid out and whether its
operands are read partial; the op keeps the strategies of the choice graph that agree. Raw results whose dims are merged (DTensor
sees ``[batch * sequence, width]`` around a matrix product) are told apart again: S of a merged dim cuts its first part, a strided
shard with the first part's size as split factor cuts the second. What cannot be said so is left to the solver and listed: views (the
cleaned program has none where they only feed matrix products), results that are permuted on the way, and strategies that the choice
graph does not have. Sources are stored as pinned, all others replicated. The solver completes the plan at the least cost: copies that
several ops read are made once, where DTensor makes them for each op, so the plan's price is a lower bound of DTensor's, and
``Walk.nanoseconds`` has the collectives of each op.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from solver_shard.baselines.dtensor_greedy import Walk, WalkedOp, walk
from solver_shard.choice.graph import FORBIDDEN
from solver_shard.choice.nodes import Kind, Lowering
from solver_shard.costs.model import CostModel
from solver_shard.expand.call import Kinds, Strided
from solver_shard.frontends.clean import clean
from solver_shard.frontends.raw import RawGraph
from solver_shard.layout import Layout, S
from solver_shard.mesh import Mesh
from solver_shard.names import fold_names
from solver_shard.rulebook.build import Rulebook

if TYPE_CHECKING:
    from solver_shard.costs.cluster import Cluster
    from solver_shard.plan.plan import Options, Plan

NAME = "dtensor-greedy"
_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")

Shape = tuple[int, ...]


def dtensor_greedy_plan(
    raw: RawGraph, *, mesh: Mesh, cluster: Cluster, options: Options, pins: Mapping[str, Layout], devices_per_host: int = 8
) -> tuple[Plan, Walk]:
    """The plan that keeps what DTensor decides from these pins, and the walk that says so.

    ``Plan.options.propagation`` names the ops that are left to the solver. Pins of the options are replaced.

    Raises:
        InputError: a pin that cannot be.
        InfeasibleError: the plan does not fit the memory limit of the options.
    """
    from solver_shard.api import plan_program

    found = walk(raw, mesh, pins, devices_per_host=devices_per_host)
    shapes = {node.name: tuple(None if result is None else result[0] for result in node.results) for node in raw.nodes}

    def decide(lowering: Lowering, costs: CostModel, rulebook: Rulebook) -> tuple[Lowering, str]:
        narrowed, missing = narrow_to_dtensor(lowering, found, shapes, pins)
        names = fold_names(f"{lowering.program.ops[i].module}: {lowering.program.ops[i].name}" for i in missing)
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return narrowed, NAME + (f"; left to the solver: {shown}" if names else "")

    # axes are not split: DTensor knows no parts of an axis
    asked = dataclasses.replace(options, tied=False, pins=(), split="off")
    return plan_program(clean(raw), mesh=mesh, cluster=cluster, options=asked, narrow=decide), found


def narrow_to_dtensor(
    lowering: Lowering, found: Walk, shapes: Mapping[str, tuple[Shape | None, ...]], pins: Mapping[str, Layout]
) -> tuple[Lowering, tuple[int, ...]]:
    """The lowering with only what the walk decides, and the positions of the ops that it says nothing of.

    ``shapes`` has the shapes of every raw node's results.
    """
    program, graph = lowering.program, lowering.graph
    costs = graph.costs.copy()
    walked = {op.node: op for op in found.ops}
    missing = []
    for v, node in enumerate(lowering.nodes):
        if node.kind is Kind.SOURCE:
            stored = pins.get(program.tensors[node.item].name, Layout.replicated(len(found.mesh.axes)))
            keep = np.array([layout == stored for layout in node.layouts])
        elif node.kind is Kind.OP:
            keep = _agreeing(lowering, node.item, walked, shapes)
            if not keep.any():
                missing.append(node.item)
        else:
            continue
        if keep.any():
            costs[graph.offsets[v] : graph.offsets[v + 1]][~keep] = FORBIDDEN
    return dataclasses.replace(lowering, graph=dataclasses.replace(graph, costs=costs)), tuple(missing)


def _agreeing(
    lowering: Lowering, position: int, walked: Mapping[str, WalkedOp], shapes: Mapping[str, tuple[Shape | None, ...]]
) -> NDArray[np.bool_]:
    """The strategies of an op that do what DTensor does; none where that cannot be said."""
    op, column = lowering.program.ops[position], lowering.strategies[position]
    none = np.zeros(len(column.axis_choice), dtype=np.bool_)
    made = next((walked[name] for name in op.raw if name in walked and _same(walked[name].op, op.name)), None)
    if made is None:
        return none
    keep = ~none
    theirs = [
        (kinds, shape) for kinds, shape in zip(made.results, shapes[made.node], strict=True) if kinds is not None and shape is not None
    ]
    if len(theirs) < len(op.results):
        return none
    for held, t, (kinds, shape) in zip(column.results, op.results, theirs, strict=False):
        wanted = told_apart(kinds, shape, lowering.program.tensors[t].shape)
        if wanted is None:
            return none
        keep &= np.array([layout == wanted for layout in held.layouts])[held.chosen]
    partial = [any(kinds[a].is_partial for kinds in made.used) for a in range(len(made.used[0]))] if made.used else []
    for axis, expected in enumerate(partial):
        ours = none.copy()
        for held in column.operands:
            ours |= np.array([layout[axis].is_partial for layout in held.layouts])[held.chosen]
        keep &= ours == expected
    return keep


def _same(raw: str, cleaned: str) -> bool:
    """Whether a raw op is what a cleaned one stands for; matrix products are written as one op."""
    return raw == cleaned or (cleaned == "aten.einsum.default" and raw in _PRODUCTS)


def told_apart(kinds: Kinds, raw: Sequence[int], shape: Sequence[int]) -> Layout | None:
    """The layout of a tensor whose dims are the raw one's, some of these taken apart; None where there is none.

    >>> from solver_shard.layout import R
    >>> told_apart((S(0), R), (32, 8), (4, 8, 8)), told_apart((Strided(0, 4), S(1)), (32, 8), (4, 8, 8))
    (S(0)R, S(1)S(2))
    """
    groups: list[list[int]] = []
    at = 0
    for size in raw:
        group: list[int] = []
        while at < len(shape) and (not group or math.prod(shape[d] for d in group) < size):
            group.append(at)
            at += 1
        if math.prod(shape[d] for d in group) != size:
            return None
        groups.append(group)
    if at < len(shape):
        return None
    placements = []
    for kind in kinds:
        if isinstance(kind, Strided):
            fitting = [d for k, d in enumerate(groups[kind.dim]) if k and math.prod(shape[e] for e in groups[kind.dim][:k]) == kind.split]
            if not fitting:
                return None
            placements.append(S(fitting[0]))
        elif kind.is_shard:
            if not groups[kind.dim]:
                return None
            placements.append(S(groups[kind.dim][0]))
        elif isinstance(kind, int):
            placements.append(kind)
        else:
            return None  # a reduction of DTensor's own kind
    return Layout(placements)
