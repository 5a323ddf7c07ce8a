"""Solve a problem whose graph does not count all of its memory: what a solution shows to be missing is added, and it is solved again.

Every round's graph is a relaxation: it allows all that is allowed, at the same cost and with no larger peak. So what a round proves
(a bound, or that nothing keeps the limit) is true of the problem itself, and the first solution whose true peak the graph has counted
is as good as the proof says. Rounds share one clock. What earlier rounds found is kept: when time is up, the best plan that truly
keeps the limit is returned with the best bound. A round whose best plan needs more than its graph has counted ends as soon as it is
nearly proven, for the proof would not be of use: the next one starts from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from solver_shard.choice.graph import ChoiceGraph, Ints
from solver_shard.solve.clock import Clock
from solver_shard.solve.engine import Progress, clock_of, solve
from solver_shard.solve.solution import Event, Solution, Stage, Status, WarmStart, objective_value, relative_gap

PATIENCE = 0.5
"""Share of what a round has of time or work after which it stops if its best plan needs more than the graph has counted."""

NEARLY = 0.01
"""Gap at which it stops earlier."""

WIDER = 0.01
"""Part of the limit by which more than what is missed is added after the first round; twice as much after each further one."""


class Relaxed(Protocol):
    """A graph to which what it misses can be added; assignments are those of any of its graphs so far."""

    graph: ChoiceGraph

    def plain(self, assignment: Sequence[int] | Ints) -> Ints:
        """The assignment without what was added, which stays the same from round to round."""

    def peak(self, assignment: Sequence[int] | Ints) -> int:
        """The true peak, in bytes; never less than the graph's."""

    def missed(self, assignment: Sequence[int] | Ints, above: int) -> Collection[int]:
        """What is to be added so that the graph sees all uses above so many bytes; nothing if it does."""

    def add(self, missed: Collection[int]) -> None:
        """Make the graph see these, at least."""

    def start(self, assignment: Sequence[int] | Ints, missed: Collection[int]) -> WarmStart:
        """A solution of an earlier graph as a start for this one."""


def solve_in_rounds(
    relaxed: Relaxed,
    *,
    objective: str = "time",
    memory_weight: int = 0,
    gap: float = 1e-4,
    time_limit: float | None = 60.0,
    work_limit: float | None = None,
    seed: int = 0,
    warm_starts: Sequence[WarmStart] = (),
    progress: Progress | None = None,
) -> Solution:
    """``engine.solve`` with the true peak; the solution's assignment is a plain one. Arguments and errors are those of ``solve``."""
    return _Rounds(relaxed, objective, memory_weight, gap, clock_of(time_limit, work_limit), seed, progress).run(tuple(warm_starts))


class _Rounds:
    def __init__(
        self, relaxed: Relaxed, objective: str, memory_weight: int, gap: float, clock: Clock, seed: int, progress: Progress | None
    ) -> None:
        self.relaxed, self.objective, self.memory_weight = relaxed, objective, memory_weight
        self.gap, self.clock, self.seed, self.progress = gap, clock, seed, progress
        self.priced = objective == "memory" or memory_weight > 0
        self.limit = relaxed.graph.limit
        self.bound: int | None = None
        self.peak_bound = 0
        self.best: _Plan | None = None
        self.least: _Plan | None = None
        self.history: list[Event] = []
        self.stages: list[Stage] = []

    def run(self, warm_starts: tuple[WarmStart, ...]) -> Solution:
        """Rounds until nothing is missed, the gap is closed, nothing keeps the limit, or the clock says stop."""
        number = 1
        while True:
            found = self._round(number, warm_starts)
            if not found.feasible or found.assignment is None:
                return self._final(found)
            self.bound = max(self.bound or 0, found.bound or 0)
            above = found.peak if self.priced else self.limit
            missed = () if above is None else self.relaxed.missed(found.assignment, above)
            closed = self.best is not None and relative_gap(self.best.value, self.bound) <= self.gap
            if not missed or closed or self.clock.over():
                return self._final(found)
            assert above is not None
            self.relaxed.add(self.relaxed.missed(found.assignment, int(above * (1 - min(1.0, WIDER * 2 ** (number - 1))))))
            warm_starts = (self.relaxed.start(found.assignment, missed),)
            number += 1

    def _round(self, number: int, warm_starts: tuple[WarmStart, ...]) -> Solution:
        left = self.clock.work_left()
        clock = self.clock.part(time_share=1.0, work=None if left == float("inf") else left)
        seconds, work, offered = self.clock.seconds(), self.clock.work, list[tuple[Ints, int]]()
        events: list[Event] = []
        clock.halt = self._impatience(clock, offered, events)

        def report(event: Event) -> None:
            events.append(event)
            moved = dataclasses.replace(event, seconds=event.seconds + seconds, work=event.work + work)
            self.history.append(moved)
            if self.progress is not None:
                self.progress(moved)

        found = solve(
            self.relaxed.graph,
            objective=self.objective,
            memory_weight=self.memory_weight,
            gap=self.gap,
            seed=self.seed,
            warm_starts=warm_starts,
            progress=report,
            clock=clock,
            proven=self.bound,
            watch=lambda assignment, cost: offered.append((assignment, cost)),
        )
        prefix = "" if number == 1 else f"round {number}, "
        self.stages += [dataclasses.replace(stage, name=prefix + stage.name) for stage in found.stages]
        self.peak_bound = max(self.peak_bound, found.peak_bound)
        if not offered and found.assignment is not None and found.cost is not None:
            offered.append((np.array(found.assignment, dtype=np.int64), found.cost))  # the one of least peak, for the message
        for assignment, cost in reversed(offered):
            if self._true(assignment, cost) and not self.priced:
                break  # those before cost more
        return found

    def _impatience(self, clock: Clock, offered: list[tuple[Ints, int]], events: list[Event]) -> Callable[[], bool]:
        """Whether a round should stop: its best plan needs more than the graph has counted, and it is nearly proven or had its time."""
        known: list[bool] = []

        def untrue(assignment: Ints) -> bool:
            peak = self.relaxed.peak(assignment)
            return (self.limit is not None and peak > self.limit) or (self.priced and peak > self.relaxed.graph.peak(assignment))

        def nearly() -> bool:
            value, bound = events[-1].objective, events[-1].bound
            return value is not None and bound is not None and relative_gap(value, bound) <= NEARLY

        def halt() -> bool:
            if not offered or (clock.used() < PATIENCE and not nearly()):
                return False
            known.extend(untrue(assignment) for assignment, _ in offered[len(known) :])
            return known[-1]

        return halt

    def _true(self, assignment: Ints, cost: int) -> bool:
        """Whether an assignment keeps the limit with all that it uses; it is kept if it is better than what is known."""
        peak = self.relaxed.peak(assignment)
        value = objective_value(self.objective, self.memory_weight, cost, peak)
        plan = _Plan(assignment=self.relaxed.plain(assignment), cost=cost, peak=peak, value=value)
        if self.least is None or peak < self.least.peak:
            self.least = plan
        keeps = self.limit is None or peak <= self.limit
        if keeps and (self.best is None or value < self.best.value):
            self.best = plan
        return keeps

    def _final(self, last: Solution) -> Solution:
        """The best of all rounds; without one, the plan of the smallest true peak."""
        plan, bound, status = self.best, self.bound, last.status
        if plan is not None:
            bound = min(plan.value, bound or 0)
            gap = relative_gap(plan.value, bound)
            status = Status.OPTIMAL if bound == plan.value else Status.GAP if gap <= self.gap else Status.FEASIBLE
        else:
            plan = self.least
            status = status if status is Status.INFEASIBLE else Status.UNKNOWN
        return Solution(
            status=status,
            assignment=None if plan is None else tuple(plan.assignment.tolist()),
            cost=None if plan is None else plan.cost,
            peak=None if plan is None else plan.peak,
            objective=None if plan is None else plan.value,
            bound=None if self.best is None else bound,
            peak_bound=self.peak_bound if plan is None else min(self.peak_bound, plan.peak),
            gap=None if self.best is None else relative_gap(self.best.value, bound or 0),
            history=tuple(self.history),
            stages=tuple(self.stages),
            seed=self.seed,
            work=self.clock.work,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """A plain assignment with its cost, its true peak and its true objective."""

    assignment: Ints
    cost: int
    peak: int
    value: int
