"""Solve a problem whose graph does not count all of its memory: what a solution shows to be missing is added, and it is solved again.

Every round's graph is a relaxation: it allows all that is allowed, at the same cost and with no larger peak. So what a round proves
(a bound, or that nothing keeps the limit) is true of the problem itself, and the first solution whose true peak the graph has counted
is as good as the proof says. Rounds share one clock. What earlier rounds found is kept: when time is up, the best plan that truly
keeps the limit is returned with the best bound, and it is handed on now and then while the search goes on. A round whose best plan
needs more than its graph has counted ends as soon as it is nearly proven, for the proof would not be of use: the next one starts from
there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from solver_shard.choice.graph import ChoiceGraph, Ints
from solver_shard.solve.anytime import Saver
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

    def complete(self, assignment: Sequence[int] | Ints, name: str) -> WarmStart:
        """A plain assignment as a start that decides every node of this graph."""


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
    workers: int = 2,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    saver: Saver[Solution] | None = None,
    limited: bool = True,
) -> Solution:
    """``engine.solve`` with the true peak; the solution's assignment is a plain one. Arguments and errors are those of ``solve``, and:

    Args:
        stop: asked often; True ends the search with what it has.
        saver: is offered every better plan that keeps the limit, as a solution with the bound of that moment.
    """
    clock = clock_of(time_limit, work_limit)
    clock.halt = stop
    rounds = _Rounds(relaxed, objective, memory_weight, gap, clock, seed, workers, progress, saver, limited)
    return rounds.run(tuple(warm_starts))


class _Rounds:
    def __init__(
        self,
        relaxed: Relaxed,
        objective: str,
        memory_weight: int,
        gap: float,
        clock: Clock,
        seed: int,
        workers: int,
        progress: Progress | None,
        saver: Saver[Solution] | None,
        limited: bool,
    ) -> None:
        self.relaxed, self.objective, self.memory_weight = relaxed, objective, memory_weight
        self.gap, self.clock, self.seed, self.workers, self.progress, self.saver = gap, clock, seed, workers, progress, saver
        self.priced = objective == "memory" or memory_weight > 0
        self.limit = relaxed.graph.limit
        self.limited = limited
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
            if not missed or closed or self.clock.over() or not self.limited:
                return self._final(found)
            assert above is not None
            self.relaxed.add(self.relaxed.missed(found.assignment, int(above * (1 - min(1.0, WIDER * 2 ** (number - 1))))))
            warm_starts = (self.relaxed.start(found.assignment, missed),)
            if self.best is not None:
                warm_starts += (self.relaxed.complete(self.best.assignment, "the best plan so far"),)
            number += 1

    def _round(self, number: int, warm_starts: tuple[WarmStart, ...]) -> Solution:
        left = self.clock.work_left()
        clock = self.clock.part(time_share=1.0, work=None if left == float("inf") else left)
        seconds, work, offered = self.clock.seconds(), self.clock.work, _Offered()
        events: list[Event] = []
        impatient = self._impatience(clock, offered, events)

        def halt() -> bool:
            if self.saver is not None:
                self.saver.poll()
            return impatient()

        def watch(assignment: Ints, cost: int) -> None:
            offered.plans.append((assignment, cost))
            if self.saver is not None:
                self.saver.offer(lambda: self._so_far(offered, events))

        clock.halt = halt

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
            workers=self.workers,
            progress=report,
            clock=clock,
            proven=self.bound,
            watch=watch,
            limited=self.limited,
        )
        prefix = "" if number == 1 else f"round {number}, "
        self.stages += [dataclasses.replace(stage, name=prefix + stage.name) for stage in found.stages]
        self.peak_bound = max(self.peak_bound, found.peak_bound)
        if not offered.plans and found.assignment is not None and found.cost is not None:
            offered.plans.append((np.array(found.assignment, dtype=np.int64), found.cost))  # the one of least peak, for the message
        self._examine(offered)
        return found

    def _examine(self, offered: _Offered) -> None:
        """Which of the plans that were not examined yet keep the limit with all that they use."""
        for assignment, cost in reversed(offered.plans[offered.examined :]):
            if self._true(assignment, cost) and not self.priced:
                break  # those before cost more
        offered.examined = len(offered.plans)

    def _so_far(self, offered: _Offered, events: list[Event]) -> Solution | None:
        """The best plan in the midst of a round; None where it is the one before, or there is none."""
        known = self.best
        self._examine(offered)
        if self.best is None or self.best is known:
            return None
        bound = max(self.bound or 0, (events[-1].bound or 0) if events else 0)
        return self._solution(self.best, Status.FEASIBLE, bound)

    def _impatience(self, clock: Clock, offered: _Offered, events: list[Event]) -> Callable[[], bool]:
        """Whether a round should stop: its best plan needs more than the graph has counted, and it is nearly proven or had its time."""
        known: list[bool] = []

        def untrue(assignment: Ints) -> bool:
            peak = self.relaxed.peak(assignment)
            return (self.limit is not None and peak > self.limit) or (self.priced and peak > self.relaxed.graph.peak(assignment))

        def nearly() -> bool:
            value, bound = events[-1].objective, events[-1].bound
            return value is not None and bound is not None and relative_gap(value, bound) <= NEARLY

        def halt() -> bool:
            if not offered.plans or (clock.used() < PATIENCE and not nearly()):
                return False
            known.extend(untrue(assignment) for assignment, _ in offered.plans[len(known) :])
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
        if self.best is not None:
            found = self._solution(self.best, last.status, self.bound or 0)
        else:
            found = self._solution(self.least, last.status if last.status is Status.INFEASIBLE else Status.UNKNOWN, None)
        if found.status not in (Status.FEASIBLE, Status.UNKNOWN) or found.interrupted:
            return found
        return dataclasses.replace(found, ended="limit" if self.clock.spent() else "search")

    def _solution(self, plan: _Plan | None, status: Status, bound: int | None) -> Solution:
        """What is known so far. ``bound`` is for a plan that keeps the limit, whose status follows from it."""
        gap = None
        if plan is not None and bound is not None:
            bound = min(plan.value, bound)
            gap = relative_gap(plan.value, bound)
            status = Status.OPTIMAL if bound == plan.value else Status.GAP if gap <= self.gap else Status.FEASIBLE
        return Solution(
            status=status,
            assignment=None if plan is None else tuple(plan.assignment.tolist()),
            cost=None if plan is None else plan.cost,
            peak=None if plan is None else plan.peak,
            objective=None if plan is None else plan.value,
            bound=bound,
            peak_bound=self.peak_bound if plan is None else min(self.peak_bound, plan.peak),
            gap=gap,
            history=tuple(self.history),
            stages=tuple(self.stages),
            seed=self.seed,
            work=self.clock.work,
            interrupted=self.clock.halted(),
        )


@dataclass(slots=True)
class _Offered:
    """Plans within the limit as a round's graph counts them, each better than the one before, and how many of them were examined."""

    plans: list[tuple[Ints, int]] = field(default_factory=list)
    examined: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """A plain assignment with its cost, its true peak and its true objective."""

    assignment: Ints
    cost: int
    peak: int
    value: int
