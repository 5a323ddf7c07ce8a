"""Intermediates of transitions of several steps: counted to the byte, against brute force and against the graph that has them all."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import pytest
from enumeration import Ints, enumerate_allowed, totals
from lowered import Lowered, agrees, lowered, random_assignment, with_relays
from programs import Builder, trained_mlp

from solver_shard.graph.choice_graph import MIB, ChoiceGraph
from solver_shard.graph.pins import parse_pin, resolve_pins
from solver_shard.graph.symmetry import node_classes
from solver_shard.graph.transient_memory import Transients, cells_of
from solver_shard.layout import Layout
from solver_shard.options import Options
from solver_shard.pipeline import plan_program
from solver_shard.plan.evaluate import evaluate
from solver_shard.program import Program, Role, constrain
from solver_shard.solve.engine import solve, solve_in_rounds
from solver_shard.solve.solution import Status


def limited(case: Lowered, limit: int | None, *, tied: bool = False) -> Transients:
    graph = dataclasses.replace(case.graph, limit=limit)
    return Transients(dataclasses.replace(case.lowering, graph=graph), case.costs, node_classes(case.lowering) if tied else None)


def everything(problem: Transients) -> ChoiceGraph:
    """The graph with every transient node that any choice could need."""
    problem.add(range(len(problem.moves)))
    return problem.graph


def product() -> Program:
    b = Builder()
    x, w = b.input("x", 8, 12), b.weight("w", 4, 12)
    return b.program(b.einsum("ac,bc->ab", x, w, role=Role.OUTPUT, result="output"))


def chain() -> Program:
    b = Builder()
    x = b.input("x", 8)
    return b.program(b.relu(b.relu(x), role=Role.OUTPUT, result="output"))


def row_sums() -> Program:
    """Row sums of relu(x), which is cut on both dims: what is in between is larger than the result."""
    b = Builder()
    x = b.input("x", 16, 12)
    return b.program(b.einsum("ab->a", b.relu(x), role=Role.OUTPUT, result="output"))


def only(*texts: str) -> object:
    allowed = {Layout.parse(text) for text in texts}
    return lambda layout: layout in allowed


CASES = {
    "product": (product(), "2,2", {0: only("S(0)S(1)", "S(1)R")}),
    "chain": (chain(), "2,2", {}),
    "row sums": (row_sums(), "2,2", {0: only("S(0)S(1)"), 1: only("S(0)S(1)"), 2: only("RR", "S(0)R")}),
}


def every_row(case: Lowered) -> tuple[Ints, Ints, Ints, Ints]:
    """Every allowed assignment: its cost, the peak that the graph counts, and the true one."""
    rows = enumerate_allowed(case.graph)
    problem = limited(case, None)
    cost, counted = totals(case.graph, rows)
    return rows, cost, counted, np.array([problem.peak(row) for row in rows], dtype=np.int64)


@pytest.mark.parametrize("name", CASES)
def test_the_best_plan_with_all_intermediates_counted_is_found_and_proven(name: str) -> None:
    program, mesh, pins = CASES[name]
    case = lowered(program, mesh, pins=pins)  # type: ignore[arg-type]
    rows, cost, counted, true = every_row(case)
    assert len(rows) > 100
    binding = 0
    for limit in sorted({*np.unique(true)[:4].tolist(), int(true[cost == cost.min()].min())}):
        fits = true <= limit
        binding += int(cost[fits].min()) > int(cost[counted <= limit].min())
        for objective, weight, values in (("time", 0, cost), ("time", 10**7, cost + 10**7 * true // MIB), ("memory", 0, true)):
            solution = solve_in_rounds(limited(case, limit), objective=objective, memory_weight=weight, gap=0.0)
            assert solution.status is Status.OPTIMAL
            assert solution.objective == solution.bound == int(values[fits].min())
            assert solution.assignment is not None
            at = int(np.flatnonzero((rows == solution.assignment).all(axis=1))[0])
            assert (solution.cost, solution.peak) == (int(cost[at]), int(true[at]))
    if name == "row sums":
        assert binding, "no limit binds through an intermediate alone"
    too_small = solve_in_rounds(limited(case, int(true.min()) - 1))
    assert too_small.status is Status.INFEASIBLE
    assert too_small.peak is not None
    assert too_small.peak_bound <= true.min() <= too_small.peak


@pytest.mark.parametrize("seed", range(8))
def test_plan_evaluator_and_graph_agree_on_intermediates(seed: int) -> None:
    case = lowered(trained_mlp(16, 32, 64, 2), "2,2,2")
    assignment = random_assignment(case.graph, seed)
    plan = agrees(case, assignment)
    assert max(plan.memory.series["intermediates"]) > 0
    graph = everything(limited(case, None))
    graph.validate()
    chosen = random_assignment(graph, 0, dict(enumerate(assignment)))  # the rest follows
    assert graph.cost(chosen) == case.graph.cost(assignment)
    assert graph.peak(chosen) == plan.memory.peak >= case.graph.peak(assignment)


def test_every_transient_has_a_time_of_its_own() -> None:
    case = lowered(trained_mlp(16, 32, 64, 2), "2,2")
    graph = everything(limited(case, None))
    added = np.concatenate([graph.node_intervals(v) for v in range(case.graph.size, graph.size)])
    assert len(np.unique(added[:, 0])) == len(added) > 10
    assert (added[:, 1] == added[:, 0] + 1).all()


def stack(layers: int) -> tuple[Program, dict[int, object]]:
    """Blocks of relu, relu, add, relu, in which the first two results are pinned to layouts that are two steps apart; with the pins."""
    b = Builder()
    x, pins = b.input("x", 16, 12), {}
    for k in range(layers):
        first = b.relu(x)
        second = b.relu(first)
        pins[first], pins[second] = only("S(0)S(1)"), only("S(1)S(0)", "RR", "S(1)R")
        last = k == layers - 1
        role, name = (Role.OUTPUT, "output") if last else (Role.ACTIVATION, None)
        x = b.relu(b.add(second, first), role=role, result=name)
    return b.program(x), pins


def test_tied_layers_get_the_optimum_of_the_graph_with_all_intermediates() -> None:
    program, pins = stack(3)
    case = lowered(program, "2,2", pins=pins)  # type: ignore[arg-type]
    free = limited(case, None, tied=True)
    assert free.folded is not None
    least_counted = solve(free.graph, objective="memory", gap=0.0).peak
    whole = everything(free)
    least = solve(whole, objective="memory", gap=0.0)
    assert least.status is Status.OPTIMAL
    assert least.peak is not None
    assert least_counted is not None
    assert least_counted < least.peak
    needed = 0
    for limit in (least.peak, 2000, 2100, 2200, 2457):
        for objective in ("time", "memory"):
            best = solve(dataclasses.replace(whole, limit=limit), objective=objective, gap=0.0)
            problem = limited(case, limit, tied=True)
            found = solve_in_rounds(problem, objective=objective, gap=0.0)
            assert found.status is best.status is Status.OPTIMAL
            assert found.objective == best.objective == found.bound
            assert found.assignment is not None
            assert agrees(case, found.assignment).memory.peak == found.peak
            needed += bool(problem.added) and objective == "time"
    assert needed, "no round was ever needed"
    below = solve_in_rounds(limited(case, least.peak - 1, tied=True))
    assert below.status is Status.INFEASIBLE
    assert below.peak_bound <= least.peak <= (below.peak or 0)


@pytest.mark.parametrize("objective", ["time", "memory"])
def test_a_plan_states_the_true_peak_and_keeps_it_within_the_limit(objective: Literal["time", "memory"]) -> None:
    program, pins = stack(3)
    case = lowered(program, "2,2", pins=pins)  # type: ignore[arg-type]
    texts = [f"{program.tensors[t].name}={'S(0),S(1)' if pin(Layout.parse('S(0)S(1)')) else 'S(1),S(0)'}" for t, pin in pins.items()]  # type: ignore[operator]
    options = Options(memory_limit=2600, gap=0.0, objective=objective, pins=tuple(texts))
    plan = plan_program(program, mesh=case.costs.mesh, cluster=case.costs.cluster, options=options)
    assert max(plan.memory.series["intermediates"]) > 0
    constrained, _ = constrain(program, resolve_pins([parse_pin(text, plan.mesh) for text in texts], program, plan.mesh))
    found = evaluate(plan, with_relays(constrained, plan), case.rulebook, case.costs)
    assert found.peak == plan.memory.peak <= 2600
    assert found.objective == plan.costs.objective == plan.certificate.objective == plan.certificate.bound


@pytest.mark.parametrize("work", [0.001, 0.01, 0.03])
def test_little_work_ends_with_a_plan_that_keeps_the_limit_or_none_and_the_same_each_time(work: float) -> None:
    case = lowered(trained_mlp(64, 32, 64, 1), "2,2")
    limit = 33000
    found = solve_in_rounds(limited(case, limit), work_limit=work, time_limit=None)
    again = solve_in_rounds(limited(case, limit), work_limit=work, time_limit=None)
    assert (found.assignment, found.bound) == (again.assignment, again.bound)
    assert found.status is not Status.INFEASIBLE
    if found.feasible:
        assert found.assignment is not None
        assert found.peak is not None
        assert agrees(case, found.assignment).memory.peak == found.peak <= limit
        assert found.bound is not None
        assert found.objective is not None
        assert found.bound <= found.objective


def test_cells_cover_every_pair_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        numbers = rng.integers(0, 4, size=rng.integers(1, 7, size=2))
        cells = cells_of(numbers)
        inside = (cells.rows == 0)[:, None, :] & (cells.columns == 0)[None, :, :]
        assert (inside.sum(axis=2) == 1).all()
        assert (cells.values[inside.argmax(axis=2)] == numbers).all()
