"""Free searches start from the best tied plan, whatever the limit leaves for them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import solver_shard
import solver_shard.pipeline
from solver_shard.clock import StageClock
from solver_shard.costs.cluster import load_cluster
from solver_shard.costs.model import CostModel
from solver_shard.graph.lowering import lower
from solver_shard.graph.nodes import Lowering
from solver_shard.graph.symmetry import node_classes
from solver_shard.graph.transient_memory import Transients
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.pipeline import solve_lowered
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.solve.solution import Event, Solution, Status
from solver_shard.tracing.load import program_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256, bias=False), torch.nn.Linear(256, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@functools.cache
def program() -> Program:
    """The forward pass of three equal layers."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(Block() for _ in range(3)))
        return program_of(model, (torch.empty(128, 64),), forward_only=True)[0]


def plan_of(**options: Any) -> Plan:
    return solver_shard.optimize(program(), mesh="2,2", reserve=0, forward_only=True, time_limit=600.0, **options)


@functools.cache
def least() -> int:
    """Bytes that the tied plan of smallest peak needs."""
    return plan_of(objective="memory", gap=0.0).memory.peak


@functools.cache
def lowered() -> tuple[Lowering, CostModel, Options]:
    """With a memory limit that binds."""
    options = replace(plan_of(memory=least() + 20_000).options, tied=False, gap=0.02, time_limit=600.0)
    costs = CostModel(Mesh.parse("2,2"), load_cluster("h100"))
    state, limit = options.optimizer_state(), options.usable_memory
    return lower(program(), options.rulebook(), costs, optimizer_state=state, limit=limit), costs, options


def solved(**options: Any) -> tuple[Solution, Transients]:
    lowering, costs, asked = lowered()
    clock = StageClock(solver_seconds=600.0)
    return solve_lowered(lowering, costs, replace(asked, **options), clock)


def test_a_free_search_never_ends_above_the_tied_one() -> None:
    tied, one = solved(tied=True)
    free, other = solved()
    assert one.folded is not None
    assert other.folded is None
    assert (tied.objective or 0) >= (free.objective or 0) >= (free.bound or 0) > 0
    assert {event.source.split(",")[0] for event in free.history} == {"tied", "free"}
    assert all(event.bound is None for event in free.history if event.source.startswith("tied")), "it is no bound of the free problem"
    assert free.history[-1].work <= free.work
    assert [event.work for event in free.history] == sorted(event.work for event in free.history)


def test_work_that_only_suffices_for_the_tied_stage_gives_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    tied, _ = solved(tied=True, gap=solver_shard.pipeline.TIED_GAP)
    monkeypatch.setattr(solver_shard.pipeline, "TIED_SHARE", 1.0)
    free, problem = solved(work_limit=tied.work * (1 + 1e-9))
    assert problem.folded is None
    assert free.feasible
    assert free.objective is not None
    assert free.objective <= (tied.objective or 0)
    assert problem.peak(free.assignment or ()) == free.peak
    assert free.peak is not None
    assert free.peak <= lowered()[2].usable_memory


def test_tied_plans_that_do_not_fit_do_not_end_a_free_search(monkeypatch: pytest.MonkeyPatch) -> None:
    solve, seen = solver_shard.pipeline.solve_in_rounds, list[Transients]()

    def tied_fails(problem: Transients, **options: Any) -> Solution:
        seen.append(problem)
        return Solution(status=Status.INFEASIBLE, peak_bound=10**15) if problem.folded is not None else solve(problem, **options)

    monkeypatch.setattr(solver_shard.pipeline, "solve_in_rounds", tied_fails)
    free, problem = solved()
    assert [one.folded is None for one in seen] == [False, True]
    assert problem is seen[1]
    assert free.feasible
    assert free.peak_bound < 10**15


def test_who_stops_in_the_tied_stage_gets_its_plan_and_the_bound_of_tied_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    lowering, costs, options = lowered()
    clock = StageClock(solver_seconds=600.0)
    events: list[Event] = []
    monkeypatch.setattr(clock.__class__, "solver_event", lambda _clock, event: events.append(event))

    def stop() -> bool:
        return any(event.objective is not None for event in events)

    found, problem = solve_lowered(lowering, costs, options, clock, stop=stop)
    assert found.interrupted
    assert found.feasible
    assert problem.folded is not None
    assert all(event.source.startswith("tied, ") for event in found.history)


def test_a_plain_assignment_is_completed_to_the_same_cost_and_the_true_peak() -> None:
    lowering, costs, options = lowered()
    tied, _ = solved(tied=True)
    assert tied.assignment is not None
    for classes in (None, node_classes(lowering)):
        problem = Transients(lowering, costs, classes)
        problem.add(range(len(problem.moves)))
        assert problem.added
        start = problem.complete(tied.assignment, "all")
        assert len(start.allowed) == problem.graph.size
        chosen = [int(start.allowed[v].argmax()) for v in range(problem.graph.size)]
        assert all(mask.sum() == 1 for mask in start.allowed.values())
        assert problem.graph.allowed(chosen)
        assert problem.graph.cost(chosen) == tied.cost
        assert problem.graph.peak(chosen) == problem.peak(chosen) == tied.peak <= options.usable_memory
        assert problem.plain(chosen).tolist() == list(tied.assignment)


def test_the_plan_of_a_free_search_names_its_problem() -> None:
    plan = plan_of(memory=least() + 20_000, tied=False, gap=0.02)
    assert plan.certificate.problem == "free"
    assert any(name.startswith("solve: tied, ") for name in plan.certificate.stages)
    assert any(name.startswith("solve: free, ") for name in plan.certificate.stages)
