"""The course of a solve as a plan keeps it: only what became better, thinned by number, and the certificate at its end."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import solver_shard
from solver_shard.plan.decode import MAX_MOMENTS, history
from solver_shard.plan.plan import Certificate, Plan, SearchEvent
from solver_shard.solve.solution import Event, Solution, Status

pytestmark = pytest.mark.usefixtures("one_thread")


def course(*steps: tuple[int | None, int | None], seconds: float = 1.0) -> tuple[Event, ...]:
    """Events with these objectives and bounds, a number of seconds apart."""
    return tuple(
        Event(seconds=seconds * (k + 1), work=0.1 * k, objective=objective, bound=bound, source=f"stage {k}")
        for k, (objective, bound) in enumerate(steps)
    )


def solution(events: tuple[Event, ...], objective: int, bound: int) -> Solution:
    return Solution(status=Status.FEASIBLE, objective=objective, bound=bound, history=events)


def pairs(moments: tuple[SearchEvent, ...]) -> list[tuple[int | None, int | None]]:
    return [(moment.objective, moment.bound) for moment in moments]


@pytest.mark.parametrize(
    ("events", "final", "kept"),
    [
        ([(None, 5), (20, 5), (20, 5), (12, 9)], (12, 9), [(None, 5), (20, 5), (12, 9)]),  # only what became better
        ([(20, 5), (10, 6), (20, 5), (12, 9)], (12, 9), [(20, 5), (20, 6), (12, 9)]),  # a price below the plan's kept no limit
        ([(20, None), (None, 3), (18, 7)], (18, 7), [(20, None), (20, 3), (18, 7)]),  # a stage that starts anew takes nothing back
        ([(20, 25)], (20, 20), [(20, 20)]),  # a bound above the plan's price, by rounding
        ([(20, 5)], (15, 5), [(20, 5), (15, 5)]),  # a baseline's plan, of which the search knew nothing
        ([], (15, 5), [(15, 5)]),
    ],
)
def test_a_history_only_gets_better_and_ends_in_the_certificate(
    events: list[tuple[int | None, int | None]], final: tuple[int, int], kept: list[tuple[int | None, int | None]]
) -> None:
    assert pairs(history(solution(course(*events), *final), 30.0, "megatron")) == kept


def test_what_a_baseline_gave_comes_when_the_search_was_over() -> None:
    found = history(solution(course((20, 5)), 15, 5), 30.0, "megatron")
    assert (found[-1].seconds, found[-1].source) == (30.0, "baseline megatron")
    assert history(solution(course((20, 5)), 15, 5), 30.0)[-1].source == "the end of the search"


def test_long_histories_are_thinned_evenly_and_whatever_the_seconds() -> None:
    steps = [(10_000 - k, k) for k in range(5_000)]
    fast, slow = (history(solution(course(*steps, seconds=s), 5_001, 4_999), 9.0) for s in (0.001, 0.5))
    assert len(fast) == MAX_MOMENTS
    assert pairs(fast) == pairs(slow)
    assert (fast[0].bound, fast[-1].bound) == (0, 4_999)
    bounds = [moment.bound or 0 for moment in fast]
    assert {b - a for a, b in itertools.pairwise(bounds)} == {25, 26}
    assert len(history(solution(course(*steps[: MAX_MOMENTS - 1]), 5_001, 4_999), 9.0)) == MAX_MOMENTS


def planned() -> Plan:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(256, 1024, bias=False), torch.nn.ReLU(), torch.nn.Linear(1024, 256, bias=False))
        inputs = (torch.empty(64, 256),)
    return solver_shard.optimize(model, inputs, loss_fn=lambda output: output.pow(2).mean(), mesh="dp=2,tp=2", gap=0.0, work_limit=5.0)


def timeless(certificate: Certificate) -> Certificate:
    """The certificate without what differs between two runs of one search."""
    moments = tuple(dataclasses.replace(moment, seconds=0.0) for moment in certificate.history)
    return dataclasses.replace(certificate, stages=dict.fromkeys(certificate.stages, 0.0), history=moments)


def test_a_plan_keeps_the_course_of_its_solve_the_same_in_every_run() -> None:
    plan, again = planned(), planned()
    first, last = plan.certificate.history[0], plan.certificate.history[-1]
    assert (last.objective, last.bound) == (plan.certificate.objective, plan.certificate.bound)
    assert 0 <= first.seconds <= last.seconds <= plan.certificate.stages["solve"] + 0.01
    assert timeless(plan.certificate) == timeless(again.certificate)
