"""Plans while the solver runs, callers who stop it, and a total time limit, on a model of two layers."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch

import solver_shard
import solver_shard.pipeline
import solver_shard.solve.engine
from solver_shard.clock import StageClock
from solver_shard.errors import InfeasibleError, SolverShardError
from solver_shard.plan.io import check_plan, plan_from_json, plan_to_json
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.solve.solution import Event, Solution, Status
from solver_shard.tracing.load import program_of


@pytest.fixture(scope="module")
def program() -> Program:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(256, 1024, bias=False), torch.nn.ReLU(), torch.nn.Linear(1024, 256, bias=False))
        inputs = (torch.empty(64, 256),)
    return program_of(model, inputs, loss_fn=lambda output: output.pow(2).mean())[0]


def plan_of(program: Program, **options: Any) -> Plan:
    return solver_shard.optimize(program, mesh="dp=2,tp=2", tied=False, gap=0.0, **options)


def test_every_better_plan_is_complete_and_within_the_limit(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver_shard.pipeline, "FIRST_INCUMBENT", 0.0)
    monkeypatch.setattr(solver_shard.pipeline, "INCUMBENTS", 0.0)
    monkeypatch.setattr("solver_shard.solve.parameters.WRITING_SHARE", float("inf"))
    found: list[Plan] = []
    least = plan_of(program, objective="memory").memory.peak
    final = plan_of(program, memory=least + 100_000, reserve=0, incumbent=found.append)
    assert found
    for plan in found:
        check_plan(plan)
        assert plan_from_json(plan_to_json(plan)) == plan
        assert plan.memory.peak <= plan.memory.limit
        assert plan.certificate.bound <= final.certificate.objective <= plan.certificate.objective == plan.costs.total_ns
    objectives = [plan.certificate.objective for plan in found]
    assert objectives == sorted(set(objectives), reverse=True)


def test_a_caller_who_stops_gets_the_plan_and_what_is_proven(program: Program) -> None:
    before = signal.getsignal(signal.SIGINT)
    handlers = []
    events: list[str] = []

    def stop() -> bool:
        handlers.append(signal.getsignal(signal.SIGINT))
        return any("objective" in line for line in events)

    plan = plan_of(program, progress=events.append, stop=stop)
    assert set(handlers) == {before}, "calls of the library leave signals alone"
    assert plan.certificate.status in ("interrupted", "optimal")
    assert plan.certificate.bound <= plan.certificate.objective
    assert plan_from_json(plan_to_json(plan)) == plan


def test_a_caller_who_stops_before_there_is_a_plan_gets_an_error(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver_shard.solve.engine, "solve", lambda _graph, **_options: Solution(status=Status.UNKNOWN))
    with pytest.raises(SolverShardError, match=r"was found within the [\d.]+ s until it was interrupted.*; give more time") as caught:
        plan_of(program, stop=lambda: True)
    assert not isinstance(caught.value, InfeasibleError)


def test_a_total_time_limit_that_tracing_uses_up_is_said(program: Program) -> None:
    with pytest.raises(
        SolverShardError, match=r"total time limit of 1e-09 s was over before any plan was found.*give more --total-time-limit"
    ):
        plan_of(program, total_time_limit=1e-9)


def test_a_total_time_limit_is_kept_in_the_plan_and_does_not_change_one_that_is_done_sooner(program: Program) -> None:
    limited, free = plan_of(program, total_time_limit=600.0), plan_of(program)
    assert limited.options.total_time_limit == 600.0
    assert limited.certificate.objective == free.certificate.objective


def test_the_solver_has_what_the_stages_before_it_leave_of_the_total() -> None:
    clock = StageClock(total=100.0, seconds={"trace": 60.0, "lower": 20.0}, started=time.perf_counter() - 80.0)
    clock.bound_solver(300.0)
    assert 0.0 < clock.solver_seconds <= 20.0 - 0.4 * 20.0, "the rest is for writing down the plan"
    clock.bound_solver(5.0)
    assert clock.solver_seconds == 5.0
    late = StageClock(total=100.0, seconds={"trace": 90.0, "lower": 8.0}, started=time.perf_counter() - 98.0)
    with pytest.raises(SolverShardError, match=r"limit of 100 s was over before any plan was found \(trace 90\.0 s, lower 8\.0 s\)"):
        late.bound_solver(300.0)


def test_lines_that_come_too_soon_are_said_later() -> None:
    said: list[str] = []
    clock = StageClock(progress=said.append)
    for objective in (9, 8, 7):
        clock.solver_event(Event(seconds=0.0, work=0.0, objective=objective, bound=6, source="messages"))
    assert said == ["solving: objective 9, bound 6, gap 33.33% (messages)"]
    clock.last_event -= 1.0
    clock.flush()
    clock.flush()
    assert said[1:] == ["solving: objective 7, bound 6, gap 14.29% (messages)"]
