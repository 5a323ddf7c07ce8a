"""The solver against full enumeration of every allowed assignment of small lowered programs, on two mesh axes."""

from __future__ import annotations

import dataclasses

import pytest
from enumeration import enumerate_allowed, totals
from programs import Builder

from solver_shard import Mesh
from solver_shard.choice.lower import lower
from solver_shard.costs.cluster import load_cluster
from solver_shard.costs.memory import optimizer_state
from solver_shard.costs.model import CostModel
from solver_shard.layout import Layout
from solver_shard.program import Phase, Program, Ref, Role
from solver_shard.rulebook.build import Rulebook
from solver_shard.solve.engine import solve
from solver_shard.solve.solution import MIB, Status


def product() -> Program:
    b = Builder()
    x, w = b.input("x", 8, 12), b.weight("w", 4, 12)
    return b.program(b.einsum("ac,bc->ab", x, w, role=Role.OUTPUT, result="output"))


def chain() -> Program:
    b = Builder()
    x = b.input("x", 8)
    y = b.relu(b.relu(x))
    return b.program(b.add(x, y, role=Role.OUTPUT, result="output"))


def step() -> Program:
    """One trained vector: loss = sum(x w), gradient = sum over rows of x."""
    b = Builder()
    x, w = b.input("x", 64, 3), b.weight("w", 3, trainable=True)
    y = b.einsum("ac,c->a", x, w)
    attributes = {"self": Ref(0), "dim": (0,), "keepdim": False, "dtype": None}
    loss = b.call("aten.sum.dim_IntList", (y,), attributes, (), role=Role.OUTPUT, result="loss")
    sum_rows = {"self": Ref(0), "dim": (0,), "keepdim": False, "dtype": None}
    g = b.call("aten.sum.dim_IntList", (x,), sum_rows, (3,), role=Role.GRADIENT, phase=Phase.BACKWARD, result="grad(w)")
    return b.program(loss, gradients={w: g})


@pytest.mark.parametrize(
    ("program", "mesh", "pins"),
    [(product(), "2,2", {}), (product(), "2,4", {0: {"S(0)R", "S(1)S(0)"}}), (chain(), "2,2", {}), (step(), "4,2", {})],
    ids=["product", "product-pinned", "chain", "step"],
)
def test_solver_agrees_with_brute_force(program: Program, mesh: str, pins: dict[int, set[str]]) -> None:
    def only(texts: set[str]) -> object:
        allowed = {Layout.parse(text) for text in texts}
        return lambda layout: layout in allowed

    costs = CostModel(Mesh.parse(mesh), load_cluster("h100"))
    lowering = lower(
        program,
        Rulebook(),
        costs,
        optimizer_state=optimizer_state("adamw"),
        pins={t: only(texts) for t, texts in pins.items()},  # type: ignore[misc]
    )
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
