"""Pins as masks: a graph lowered without pins, with all masks on, allows what the pinned graph allows, at the same prices."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from lowered import lowered
from programs import mlp, trained_mlp

from solver_shard.graph.choice_graph import ChoiceGraph
from solver_shard.graph.nodes import OpNode
from solver_shard.graph.pins import op_constraints, parse_pin, pin_constraints, pinned_classes, pins_apart, resolve_pins
from solver_shard.graph.symmetry import fold, folded_masks, node_classes
from solver_shard.mesh import Mesh
from solver_shard.program import Program, constrain
from solver_shard.solve.engine import solve
from solver_shard.solve.iis import masks

PINS = [
    (mlp(8, 4, 8, 1), ["0.up=S(1)", "x=S(0)", "output=R"]),
    (mlp(8, 4, 8, 2), ["0.up=S(*)", "1.up=R", "v5=S(1)", "output=R"]),
    (trained_mlp(8, 4, 8, 1), ["0.up=S(0)", "grad(0.up)=R", "loss=R", "x=S(*)"]),
    (trained_mlp(8, 4, 8, 2), ["*.up=S(1)", "1.down=R", "v5=S(0)"]),
]


def optima(graph: ChoiceGraph, *, memory: bool) -> tuple[int | None, ...]:
    """Least time; and, of small graphs, least peak, and least time at little more than that."""
    time = solve(graph, gap=0.0, time_limit=None)
    assert time.bound == time.cost
    if not memory:
        return (time.cost,)
    least = solve(graph, objective="memory", gap=0.0, time_limit=None).peak
    assert least is not None
    return time.cost, least, solve(dataclasses.replace(graph, limit=least * 11 // 10), gap=0.0, time_limit=None).cost


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("program", "texts"), PINS)
def test_all_masks_together_are_the_pins(program: Program, texts: list[str], tied: bool) -> None:
    mesh = Mesh.parse("2")
    pins = [parse_pin(text, mesh) for text in texts]
    given, allowed = constrain(program, resolve_pins(pins, program, mesh))
    again, apart = constrain(program, pins_apart(pins, program, mesh))
    assert again.ops == given.ops
    pinned = lowered(given, str(mesh), pins={t: left.allows for t, left in allowed.items()}).lowering
    free = lowered(given, str(mesh)).lowering
    constraints = pin_constraints(free, texts, apart)
    expected, graph = pinned.graph, free.graph
    if tied:
        expected = fold(expected, node_classes(pinned)).graph
        folded = fold(graph, pinned_classes(free, pinned, constraints))
        graph, constraints = folded.graph, [dataclasses.replace(one, allowed=folded_masks(one.allowed, folded)) for one in constraints]
    memory = not program.gradients
    found = optima(graph.narrowed(masks(constraints)), memory=memory)
    assert found == optima(expected, memory=memory)
    assert found != optima(graph, memory=memory), "the pins do nothing, so nothing was tested"


def test_ops_own_the_edges_around_them() -> None:
    lowering = lowered(trained_mlp(8, 4, 8, 1), "2").lowering
    owners, positions = op_constraints(lowering, lowering.graph.edges, np.arange(lowering.graph.size))
    assert positions == [node.op for node in lowering.nodes if isinstance(node, OpNode)]
    owned = [e for owner in owners for e in owner.edges]
    assert len(owned) == len(set(owned))
    ops = {v for v, node in enumerate(lowering.nodes) if isinstance(node, OpNode)}
    assert sorted(owned) == [e for e, pair in enumerate(lowering.graph.edges.tolist()) if ops & set(pair)]
