"""The solver against full enumeration of every allowed assignment of small lowered programs, on two mesh axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from enumeration import Ints, enumerate_allowed, totals
from numpy.typing import NDArray
from programs import Builder

from solver_shard.costs.cluster import load_cluster
from solver_shard.costs.memory import optimizer_state
from solver_shard.costs.model import CostModel
from solver_shard.graph.choice_graph import MIB
from solver_shard.graph.lowering import lower
from solver_shard.graph.nodes import Lowering, StateNode, TensorNode
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.program import Phase, Program, Ref, Role
from solver_shard.rules.rulebook import Rulebook
from solver_shard.solve.engine import solve
from solver_shard.solve.solution import Status


def product() -> Program:
    b = Builder()
    x, w = b.input("x", 8, 12), b.weight("w", 4, 12)
    return b.program(b.einsum("ac,bc->ab", x, w, role=Role.OUTPUT, result="output"))


def chain() -> Program:
    b = Builder()
    x = b.input("x", 8)
    y = b.relu(b.relu(x))
    return b.program(b.add(x, y, role=Role.OUTPUT, result="output"))


def step(columns: int = 3) -> Program:
    """One trained vector: loss = sum(x w), gradient = sum over rows of x."""
    b = Builder()
    x, w = b.input("x", 64, columns), b.weight("w", columns, trainable=True)
    y = b.einsum("ac,c->a", x, w)
    attributes = {"self": Ref(0), "dim": (0,), "keepdim": False, "dtype": None}
    loss = b.call("aten.sum.dim_IntList", (y,), attributes, (), role=Role.OUTPUT, result="loss")
    sum_rows = {"self": Ref(0), "dim": (0,), "keepdim": False, "dtype": None}
    g = b.call("aten.sum.dim_IntList", (x,), sum_rows, (columns,), role=Role.GRADIENT, phase=Phase.BACKWARD, result="grad(w)")
    return b.program(loss, gradients={w: g})


CUT_BOTH_WAYS = {0: {"S(0)S(1)"}, 2: {"S(0)P(sum)"}}
"""Rows of x and its columns: the product reads a half of the vector, and the gradient of that half is a sum over the left axis."""


def pinned(program: Program, mesh: str, pins: dict[int, set[str]], microbatches: int = 1, **state: Any) -> Lowering:
    def only(texts: set[str]) -> Callable[[Layout], bool]:
        allowed = {Layout.parse(text) for text in texts}
        return lambda layout: layout in allowed

    costs = CostModel(Mesh.parse(mesh), load_cluster("h100"))
    return lower(
        program,
        Rulebook(),
        costs,
        optimizer_state=optimizer_state("adamw", **state),
        microbatches=microbatches,
        pins={t: only(texts) for t, texts in pins.items()},
    )


def in_other_order(lowering: Lowering, rows: Ints) -> NDArray[np.bool_]:
    """Which assignments have a strided layout somewhere."""
    found = np.zeros(len(rows), dtype=np.bool_)
    for v, node in enumerate(lowering.nodes):
        if isinstance(node, TensorNode):
            found |= np.array([any(p.is_strided for p in layout) for layout in node.layouts])[rows[:, v]]
    return found


@pytest.mark.parametrize(
    ("program", "mesh", "pins", "microbatches", "state"),
    [
        (product(), "2,2", {}, 1, {}),
        (product(), "2,4", {0: {"S(0)R", "S(1)S(0)"}}, 1, {}),
        (chain(), "2,2", {}, 1, {}),
        (step(), "4,2", {}, 1, {}),
        (step(8), "2,2", CUT_BOTH_WAYS, 1, {}),
        (step(8), "2,2", CUT_BOTH_WAYS | {1: {"_S(0)S(0)"}}, 1, {}),
        (step(), "4,2", {0: {"S(0)S(0)"}}, 3, {"clip": True}),
        (step(), "2", {}, 2, {"reduce_dtype": "bf16", "clip": True}),
        (step(), "4,2", {}, 1, {"reduce_dtype": "bf16"}),
    ],
    ids=[
        *("product", "product-pinned", "chain", "step", "step-orders", "step-other-order"),
        *("step-accumulated-clipped", "step-accumulated-reduced-clipped", "step-reduced"),
    ],
)
def test_solver_agrees_with_brute_force(
    program: Program, mesh: str, pins: dict[int, set[str]], microbatches: int, state: dict[str, Any]
) -> None:
    lowering = pinned(program, mesh, pins, microbatches, **state)
    rows = enumerate_allowed(lowering.graph)
    assert len(rows) > 100
    cost, peak = totals(lowering.graph, rows)
    least, most = int(peak.min()), int(peak[cost == cost.min()].min())
    for limit in (None, most, (least + most) // 2, least):
        graph = dataclasses.replace(lowering.graph, limit=limit)
        fits = peak <= (limit if limit is not None else peak.max())
        for objective, weight, best in (
            ("time", 0, int(cost[fits].min())),
            ("time", 10_000_000, int((cost + 10_000_000 * peak // MIB)[fits].min())),
            ("memory", 0, least),
        ):
            solution = solve(graph, objective=objective, memory_weight=weight, gap=0.0, time_limit=60)
            assert solution.status is Status.OPTIMAL
            assert solution.objective == best
            assert solution.bound == best
    too_small = solve(dataclasses.replace(lowering.graph, limit=least - 1), time_limit=60)
    assert too_small.status is Status.INFEASIBLE
    assert too_small.peak == too_small.peak_bound == least


def test_the_other_order_is_chosen_where_it_is_strictly_better() -> None:
    """The half of a long vector that tensor parallelism leaves on a device is reduce-scattered over the other axis, stepped in
    quarters and gathered: with the left axis as the major one that takes a detour, and without it, steps of whole halves."""
    lowering = pinned(step(1 << 22), "2,2", CUT_BOTH_WAYS | {1: {"RS(0)"}})
    rows = enumerate_allowed(lowering.graph)
    cost, _ = totals(lowering.graph, rows)
    other = in_other_order(lowering, rows)
    assert cost[other].min() < cost[~other].min()
    solution = solve(lowering.graph, gap=0.0, time_limit=60)
    assert solution.objective == cost[other].min()
    assert solution.assignment is not None
    state = lowering.index[StateNode, 1, 0]
    assert str(lowering.nodes[state].layouts[solution.assignment[state]]) == "_S(0)S(0)"
