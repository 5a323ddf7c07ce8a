"""Clocks: limits of time and work, and how soon a solve ends when they strike. Time is counted here, not measured."""

from __future__ import annotations

import numpy as np
import pytest
from random_graphs import hard_graph

from solver_shard.solve.engine import solve
from solver_shard.solve.limits import Clock
from solver_shard.solve.solution import Status


class Ticks:
    """A time that goes on by ``step`` seconds whenever it is looked at."""

    def __init__(self, step: float) -> None:
        self.step, self.looks = step, 0

    def __call__(self) -> float:
        self.looks += 1
        return self.looks * self.step


def test_a_clock_is_over_when_its_time_or_work_is() -> None:
    now = Ticks(0.0)
    clock = Clock(10.0, 5.0, now=now)
    assert (clock.time_left(), clock.work_left(), clock.over()) == (10.0, 5.0, False)
    clock.spend(5.0)
    assert clock.over()
    late = Clock(10.0, None, now=Ticks(6.0))
    assert not late.over()
    assert late.over()
    assert late.time_left() == 0.0


def test_a_part_obeys_its_whole_in_time_work_and_halts() -> None:
    whole = Clock(10.0, 5.0, now=Ticks(0.0))
    part = whole.part(time_share=0.5, work=100.0)
    assert part.time_left() == 5.0
    part.spend(2.0)
    assert (part.work_left(), whole.work) == (3.0, 2.0)
    asked = False
    whole.halt = lambda: asked
    assert not part.halted()
    asked = True
    assert part.halted()
    assert part.over()


@pytest.mark.parametrize("room", [None, 1.5])
def test_a_solve_ends_within_a_twentieth_of_its_time_limit(room: float | None) -> None:
    graph = hard_graph(np.random.default_rng(5), 60, room=room)
    now = Ticks(0.01)
    found = solve(graph, gap=0.0, clock=Clock(2.0, None, now=now))
    assert found.status in (Status.FEASIBLE, Status.UNKNOWN), "not done before the limit, or this says nothing"
    assert 2.0 <= now.looks * now.step <= 1.05 * 2.0


def test_a_caller_who_asks_to_stop_gets_what_there_is() -> None:
    graph = hard_graph(np.random.default_rng(5), 60)
    found: list[int] = []
    clock = Clock(None, None)
    clock.halt = lambda: bool(found)
    solution = solve(graph, gap=0.0, clock=clock, watch=lambda _assignment, cost: found.append(cost))
    assert solution.interrupted
    assert solution.status is Status.FEASIBLE
    assert solution.cost == found[-1]
    assert solution.bound is not None
    assert solution.bound < found[-1]
    assert not solve(graph, work_limit=1e-6, time_limit=None).interrupted
