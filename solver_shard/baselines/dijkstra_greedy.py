"""Deciding op by op with our rules and costs: what a greedy executor would do if it knew the cluster.

The walk goes through the cleaned ops of a program, from sources as they are pinned (replicated where they are not). Every op takes the
strategy whose inputs are cheapest to bring there, found by the search of ``expand.dijkstra`` under our costs; consumers and
memory do not count. The plan then keeps every op's strategy and every source's layout; the solver completes the rest (copies that
several ops share, optimizer states, gradient reductions) at the least cost, so its price is a lower bound of what such an executor
pays. Ops whose strategy the choice graph does not have are left to the solver and listed.

    plan = dijkstra_greedy_plan(program, mesh=Mesh.parse("dp=2,tp=4"), cluster=load_cluster("h100"), options=options)
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver_shard.baselines import deciding, left_over
from solver_shard.costs.collectives import Collectives
from solver_shard.expander.call import Meta, Operand, PlacedCall
from solver_shard.expander.pricing import ClusterPricing
from solver_shard.expander.search import Expansion, expand_exhaustively, search
from solver_shard.expander.single_axis import of_rule, prepare
from solver_shard.graph.build import Lowered
from solver_shard.graph.choice_graph import Masks
from solver_shard.graph.nodes import Lowering, SourceNode
from solver_shard.layout import Layout, Placements
from solver_shard.mesh import Mesh
from solver_shard.program import Op, Program
from solver_shard.rules.rule import Rule
from solver_shard.rules.rulebook import Rulebook

NAME = "dijkstra-greedy"


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyWalk:
    """How every op of a program runs.

    Attributes:
        sources: tensor position to layout.
        ops: per op, its strategy and the moves of its inputs; costs in nanoseconds.
    """

    sources: Mapping[int, Layout]
    ops: tuple[Expansion, ...]

    @property
    def nanoseconds(self) -> int:
        """Of all moves, each op's its own."""
        return round(sum(op.cost for op in self.ops))


def greedy_walk(program: Program, mesh: Mesh, sources: Mapping[int, Layout], rulebook: Rulebook, collectives: Collectives) -> GreedyWalk:
    """Decide op by op; sources that are not given are replicated."""
    pricing = ClusterPricing(collectives)
    stored = {t: sources.get(t, Layout.replicated(len(mesh.axes))) for t in program.sources()}
    layouts: dict[int, Placements] = dict(stored)
    found = []
    known: dict[Hashable, Expansion] = {}
    for i, op in enumerate(program.ops):
        rule = rulebook.rule(program, i)
        read = tuple((program.tensors[t].shape, program.tensors[t].dtype, layouts[t]) for t in op.operands)
        key = (id(rule), read)  # the rulebook keeps its rules, one per signature
        if key not in known:
            known[key] = _decide(program, op, rule, layouts, mesh, pricing)
        made = known[key]
        layouts.update({t: kinds for t, kinds in zip(op.results, made.results, strict=True) if kinds is not None})
        found.append(made)
    return GreedyWalk(sources=stored, ops=tuple(found))


def _decide(program: Program, op: Op, rule: Rule, layouts: Mapping[int, Placements], mesh: Mesh, pricing: ClusterPricing) -> Expansion:
    """The cheapest way to run one op from the layouts that its operands have."""
    call = PlacedCall(
        op=op.name,
        mesh=mesh,
        operands=tuple(
            Operand(shape=program.tensors[t].shape, dtype=program.tensors[t].dtype, layout=tuple(layouts[t])) for t in op.operands
        ),
        results=tuple(Meta(shape=program.tensors[t].shape, dtype=program.tensors[t].dtype) for t in op.results),
        in_place=False,
    )
    prepared = prepare(call, of_rule(rule, mesh.shape))
    return (search(prepared, pricing) if call.operands else None) or expand_exhaustively(prepared, pricing)[0]


def walk_masks(lowering: Lowering, walk: GreedyWalk, nodes: Collection[int] | None = None) -> tuple[Masks, tuple[int, ...]]:
    """Per node of a source or an op, the strategies that do what the walk decides; and the ops of which the graph has no such strategy."""

    def agreeing(i: int) -> NDArray[np.bool_]:
        column, made = lowering.strategies[i], walk.ops[i]
        keep = np.ones(len(column.axis_choice), dtype=np.bool_)
        for held, wanted in zip((*column.operands, *column.results), (*made.inputs, *made.results), strict=True):
            keep &= np.array([tuple(layout) == wanted for layout in held.layouts])[held.chosen]
        return keep

    return deciding(lowering, walk.sources, agreeing, nodes)


def decide(lowered: Lowered) -> tuple[Masks, str]:
    """The baseline: the walk from the sources' first layouts, the most replicated that pins allow."""
    program, lowering, costs = lowered.program, lowered.lowering, lowered.costs
    sources = {node.tensor: node.layouts[0] for node in lowering.nodes if isinstance(node, SourceNode)}
    walk = greedy_walk(program, costs.mesh, sources, lowered.rulebook, Collectives(costs.mesh, costs.cluster))
    masks, missing = walk_masks(lowering, walk)
    return masks, NAME + left_over(program, missing)
