"""The door of the solver: stages of a solve, and the same with lazy constraints. The page of the solver is the package's docstring.

solution = solve(graph, SolveParameters(gap=1e-3, time_limit=30.0))
solution = solve_in_rounds(transients, gap=1e-3)        # where the graph does not count all of its memory
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from solver_shard.errors import InternalError
from solver_shard.graph.choice_graph import MIB, ChoiceGraph, Ints, WarmStart
from solver_shard.solve import parameters as tuned
from solver_shard.solve.bounds.bounding import is_large
from solver_shard.solve.limits import Clock, Saver, clock_of
from solver_shard.solve.parameters import SolveParameters
from solver_shard.solve.presolve import presolve
from solver_shard.solve.presolve.postsolve import Postsolve
from solver_shard.solve.presolve.reducer import NoAssignment
from solver_shard.solve.problem import Problem, from_graph
from solver_shard.solve.search import Search
from solver_shard.solve.solution import Ended, Event, Solution, Stage, Status, objective_value, relative_gap

Progress = Callable[[Event], None]
Watch = Callable[[Ints, int], None]


def solve(
    graph: ChoiceGraph,
    parameters: SolveParameters | None = None,
    *,
    warm_starts: Sequence[WarmStart] = (),
    progress: Progress | None = None,
    clock: Clock | None = None,
    proven: int | None = None,
    watch: Watch | None = None,
    **changes: Any,
) -> Solution:
    """Choose a strategy for every node: the cheapest within the memory limit, or the one of least peak memory.

        solution = solve(graph, time_limit=30)
        solution.status, solution.cost, solution.bound, solution.gap

    Args:
        graph: the choice graph; its ``limit`` is kept for either objective.
        parameters: what is asked; the defaults where None.
        warm_starts: restrictions to start from. One that names a single strategy of every node is taken as it is if it is allowed
            and within the limit: the solution is at least as good.
        progress: called at every improvement.
        clock: what is left of time and work, where this is a part of something larger; the two limits are then those of the clock.
        proven: a lower bound that is known, because a relaxation of this graph was solved. The graph without its limit, a
            relaxation too, is then not tried.
        watch: called with every better assignment within the limit, and its cost.
        changes: fields of the parameters by name, for short calls.

    Raises:
        InputError: a parameter is not legal.
    """
    asked = SolveParameters.of(parameters, changes)
    asked.check()
    for start in warm_starts:
        for v, mask in start.allowed.items():
            if not 0 <= v < graph.size or len(mask) != len(graph.node_costs(v)):
                raise InternalError(f"warm start {start.name!r}: node {v} with {len(mask)} strategies is not one of the graph")
    run = _Run(graph, asked, clock or clock_of(asked.time_limit, asked.work_limit), tuple(warm_starts), progress, proven, watch)
    for start in warm_starts:
        run.take(start)
    run.take_lightest()
    return run.solve()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Left:
    """The problem without its limit, presolved, when it was left, and the value of its best assignment, which is above the limit."""

    problem: Problem
    postsolve: Postsolve
    order: Ints
    value: int | None


class _Run:
    """One call of ``solve``."""

    def __init__(
        self,
        graph: ChoiceGraph,
        parameters: SolveParameters,
        clock: Clock,
        warm_starts: tuple[WarmStart, ...],
        progress: Progress | None,
        proven: int | None,
        watch: Watch | None,
    ) -> None:
        self.graph, self.parameters, self.clock = graph, parameters, clock
        self.warm_starts, self.progress, self.watch = warm_starts, progress, watch
        self.assignment: Ints | None = None
        self.value: int | None = None
        self.proven = self.bound = proven
        self.least_assignment: Ints | None = None
        self.least_peak: int | None = None
        self.lightest = _lightest(graph)
        self.peak_bound = graph.peak(self.lightest)
        self.searched_peak = self.hopeless = False
        self.left: _Left | None = None
        self.weights: Ints | None = None
        self._fit: tuple[Ints, bool] | None = None
        self.history: list[Event] = []
        self.stages: list[Stage] = []

    def take(self, start: WarmStart) -> None:
        """A complete warm start is an incumbent before the search begins."""
        if _complete(start, self.graph):
            assignment = np.array([int(start.allowed[v].argmax()) for v in range(self.graph.size)], dtype=np.int64)
            if self.graph.allowed(assignment):
                self._offer(assignment, f"warm start {start.name}")

    def take_lightest(self) -> None:
        """The assignment of least usage per node, where it is allowed: with a limit, something to fall back on."""
        if self.graph.limit is not None and self.assignment is None and self.graph.allowed(self.lightest):
            self._offer(self.lightest, "least usage of every node")

    def solve(self) -> Solution:
        try:
            if not self._unlimited() and self.parameters.limited and (self.assignment is None or not self.clock.over()):
                self._limited()
        except NoAssignment:
            return self._solution(Status.INFEASIBLE)
        if self.assignment is None:
            return self._solution(Status.UNKNOWN if self.graph.limit is None or self.peak_bound <= self.graph.limit else Status.INFEASIBLE)
        assert self.value is not None
        bound = min(self.value, self.bound if self.bound is not None else 0)
        found = relative_gap(self.value, bound)
        return self._solution(Status.OPTIMAL if bound == self.value else Status.GAP if found <= self.parameters.gap else Status.FEASIBLE)

    def _unlimited(self) -> bool:
        """Solve without the memory limit; true when the result is within it, and so the solution."""
        if self.parameters.peak_price or self.proven is not None or (self.graph.limit is not None and self.peak_bound > self.graph.limit):
            return False
        started = self.clock.seconds()
        free, order = from_graph(self.graph, limit=None, memory_counts=False)
        limited = self.graph.limit is not None
        small, postsolve = presolve(free, stop=lambda: self.clock.over() or (limited and self.clock.used() > tuned.FREE_SHARE))
        self.clock.spend(1e-3 * free.size)
        search = self._search(small, postsolve, order, self.clock)
        if limited:  # with a limit to come, no more than it takes to see that the cheapest is above it
            search.stop = lambda: (
                (self.clock.used() > tuned.FREE_SHARE or search.best.gap() < tuned.FREE_GAP) and not self._fits(search, postsolve, order)
            )
        search.run()
        if search.infeasible:
            raise NoAssignment
        fits = self._fits(search, postsolve, order)
        self.weights = search.weights
        self._stage("without the limit", started, f"{small.size} nodes, {len(small.edges)} edges, fits: {fits}")
        if limited and not search.closed():
            self.left = _Left(problem=small, postsolve=postsolve, order=order, value=search.best.value)
        # Where the limit does not bind, what windows leave open is the same with it, in a problem that is larger.
        return fits and (search.closed() or self.clock.over() or self.graph.loads is not None)

    def _relaxed(self, search: Search) -> None:
        """Go on with the problem without its limit, below the incumbent: its bound may be better than that of the limited problem.

        Multipliers that are all zero would give the same bound, but the limited problem has more nodes left after presolve and many
        more ways to go wrong; where the limit hardly binds, its bound ends lower.
        """
        left, value = self.left, self.value
        if left is None or value is None or (left.value is not None and left.value <= search.best.bound):
            return  # of no use: the least cost without the limit is below what is proven with it
        started, work = self.clock.seconds(), self.clock.work_left()
        clock = self.clock.part(time_share=tuned.RELAXED_SHARE, work=None if work == float("inf") else tuned.RELAXED_SHARE * work)
        free = self._search(left.problem, left.postsolve, left.order, clock)
        free.best.value = value
        free.run()
        search.raise_bound(self.bound if self.bound is not None else 0, "without the limit")
        if self.value is not None and (search.best.value is None or self.value < search.best.value):
            search.best.value = self.value
        self._stage("without the limit, below the incumbent", started, f"objective {self.value}, bound {self.bound}")

    def _fits(self, search: Search, postsolve: Postsolve, order: Ints) -> bool:
        """Whether a search's incumbent is within the limit."""
        best = search.best.assignment
        if best is None or self.graph.limit is None:
            return best is not None
        if self._fit is None or self._fit[0] is not best:
            self._fit = best, self.graph.peak(_unordered(postsolve.restore(best), order)) <= self.graph.limit
        return self._fit[1]

    def _limited(self) -> None:
        """Solve with the limit; for the objective "memory" without it: the least peak tells whether there is anything within it."""
        started = self.clock.seconds()
        memory = self.parameters.objective == "memory"
        problem, order = from_graph(
            self.graph, limit=None if memory else self.graph.limit, weight=self.parameters.peak_price, costs_count=not memory
        )
        small, postsolve = presolve(problem, stop=self.clock.over)
        self.clock.spend(1e-3 * problem.size)
        self.peak_bound = max(self.peak_bound, problem.least())
        self._stage("presolve", started, f"{small.size} nodes, {len(small.edges)} edges, {len(small.base)} times")
        started = self.clock.seconds()
        search = self._search(small, postsolve, order, self.clock)
        large = is_large(small)
        partial = [start for start in self.warm_starts if not _complete(start, self.graph)]
        self._warm(search, postsolve, order, [start for start in self.warm_starts if _complete(start, self.graph)])
        if not large:  # a large one has better incumbents from its relaxation
            self._warm(search, postsolve, order, partial)
        if self.value is not None and self.assignment is not self.lightest:  # which is too far off to aim at
            search.best.value = self.value if search.best.value is None else min(self.value, search.best.value)
        if self.proven is not None:
            search.enough = self.proven if self.parameters.gap == 0 else int(self.proven / (1 - self.parameters.gap))

        def rescue() -> bool:
            if large:
                self._warm(search, postsolve, order, partial)
            if self.value is None:
                self._least_peak()
            if search.best.assignment is None and self.assignment is not None:
                self._warm(search, postsolve, order, [_start(self.assignment, self.graph)])
            if self.value is not None and search.best.value is None:
                search.best.value = self.value
            return self.value is None and self.hopeless

        limited = not memory and self.graph.limit is not None
        if limited:
            search.rescue = rescue
            search.relax = self._relaxed
        search.run()
        self._stage("search", started, "")
        if memory:
            self.peak_bound = max(self.peak_bound, self.bound or 0)
        if not search.infeasible or self.assignment is not None:
            return
        if not limited:
            raise NoAssignment
        self._least_peak()
        assert self.graph.limit is not None
        self.peak_bound = max(self.peak_bound, self.graph.limit + 1)

    def _least_peak(self) -> None:
        """Minimise the peak alone, until something is within the limit or it is proven that nothing is."""
        if self.searched_peak or self.parameters.objective == "memory":
            return
        assert self.graph.limit is not None
        self.searched_peak, limit = True, self.graph.limit
        started = self.clock.seconds()
        problem, order = from_graph(self.graph, limit=self.graph.limit, costs_count=False)
        small, postsolve = presolve(problem, stop=self.clock.over)
        self.clock.spend(1e-3 * problem.size)
        if is_large(small):
            from solver_shard.solve.bounds.subgradient import lightest
            from solver_shard.solve.flat import Flat

            found, least = lightest(Flat.of(small, 1.0), self.clock, np.random.default_rng(self.parameters.seed))
            self.peak_bound = max(self.peak_bound, least)
            if found is not None:
                self._offer(_unordered(postsolve.restore(found), order), "least peak")
            self._stage("least peak", started, f"within the limit: {found is not None}, bound {self.peak_bound}")
            self.hopeless = self.peak_bound > limit
            return
        problem, order = from_graph(self.graph, limit=None, weight=MIB, costs_count=False)
        small, postsolve = presolve(problem, stop=self.clock.over)
        self.clock.spend(1e-3 * problem.size)

        def report(assignment: Ints | None, bound: int | None, found_by: str) -> None:
            if assignment is not None:
                self._offer(_unordered(postsolve.restore(assignment), order), f"least peak, {found_by}")
            if bound is not None:
                self.peak_bound = max(self.peak_bound, bound)

        search = Search(small, self.clock, self.parameters, report=report, least_peak=self.peak_bound)
        search.enough = limit
        above: list[float] = []

        def stop() -> bool:
            """Whether nothing keeps the limit, and how far above it the least peak is has been seen well enough."""
            if self.peak_bound <= limit:
                return False
            above.append(self.clock.used())
            return search.best.gap() <= tuned.PEAK_GAP or above[-1] - above[0] > tuned.PEAK_SHARE

        search.stop = stop
        search.run()
        self.hopeless = self.peak_bound > limit or search.infeasible
        self._stage("least peak", started, f"peak {search.best.value} bytes, bound {self.peak_bound}")

    def _warm(self, search: Search, postsolve: Postsolve, order: Ints, starts: Sequence[WarmStart]) -> None:
        """Complete each warm start as well as a little work allows; what is found is an incumbent of the search."""
        small = search.problem
        for start in starts:
            if self.clock.over():
                return
            started = self.clock.seconds()
            rank = np.empty_like(order)
            rank[order] = np.arange(len(order))
            masks = postsolve.reduce({int(rank[v]): mask for v, mask in start.allowed.items()})
            keep = [np.ones(int(k), dtype=bool) if mask is None else mask for mask, k in zip(masks, small.sizes, strict=True)]
            self.clock.spend(1e-3 * small.size)
            try:
                restricted, inner = presolve(small, keep)
            except NoAssignment:
                self._stage(f"warm start {start.name}", started, "cannot be completed")
                continue

            def report(assignment: Ints | None, bound: int | None, found_by: str, inner: Postsolve = inner, name: str = start.name) -> None:
                if assignment is not None:
                    search.offer(inner.restore(assignment), f"warm start {name}, {found_by}")

            clock = self.clock.part(time_share=tuned.WARM_SHARE, work=tuned.WARM_WORK)
            part = Search(restricted, clock, replace(self.parameters, gap=max(self.parameters.gap, tuned.WARM_GAP)), report=report)
            part.run()
            self._stage(f"warm start {start.name}", started, f"objective {part.best.value}")

    def _search(self, small: Problem, postsolve: Postsolve, order: Ints, clock: Clock) -> Search:
        def report(assignment: Ints | None, bound: int | None, found_by: str) -> None:
            if assignment is not None:
                self._offer(_unordered(postsolve.restore(assignment), order), found_by)
            if bound is not None:
                self._raise(bound, found_by)

        search = Search(small, clock, self.parameters, report=report)
        search.fine, search.weights = True, self.weights
        return search

    def _offer(self, assignment: Ints, source: str) -> None:
        """An assignment of the graph; kept if it is allowed, within the limit and better."""
        if not self.graph.allowed(assignment):
            raise InternalError("the solver found an assignment that its graph forbids; please report this")
        peak = self.graph.peak(assignment)
        if self.least_peak is None or peak < self.least_peak:
            self.least_peak, self.least_assignment = peak, assignment
        if self.graph.limit is not None and peak > self.graph.limit:
            return
        cost = self.graph.cost(assignment)
        value = objective_value(self.parameters.objective, self.parameters.memory_weight, cost, peak)
        if self.value is None or value < self.value:
            self.value, self.assignment = value, assignment
            self._event(source)
            if self.watch is not None:
                self.watch(assignment, cost)

    def _raise(self, bound: int, source: str) -> None:
        if self.bound is None or bound > self.bound:
            self.bound = bound
            self._event(source)

    def _event(self, source: str) -> None:
        event = Event(seconds=self.clock.seconds(), work=self.clock.work, objective=self.value, bound=self.bound, source=source)
        self.history.append(event)
        if self.progress is not None:
            self.progress(event)

    def _stage(self, name: str, started: float, note: str) -> None:
        self.stages.append(Stage(name=name, seconds=self.clock.seconds() - started, note=note))

    def _solution(self, status: Status) -> Solution:
        found = self.assignment if self.assignment is not None else self.least_assignment
        if found is None:
            return Solution(
                status=status,
                peak_bound=self.peak_bound,
                history=tuple(self.history),
                stages=tuple(self.stages),
                seed=self.parameters.seed,
                work=self.clock.work,
                interrupted=self.clock.halted(),
                ended=self._ended(status),
            )
        cost, peak = self.graph.cost(found), self.graph.peak(found)
        value = objective_value(self.parameters.objective, self.parameters.memory_weight, cost, peak)
        bound = None if self.bound is None or status is Status.INFEASIBLE else min(self.bound, value)
        return Solution(
            status=status,
            assignment=tuple(found.tolist()),
            cost=cost,
            peak=peak,
            objective=value,
            bound=bound,
            peak_bound=min(self.peak_bound, peak),
            gap=None if self.assignment is None or bound is None else relative_gap(value, bound),
            history=tuple(self.history),
            stages=tuple(self.stages),
            seed=self.parameters.seed,
            work=self.clock.work,
            interrupted=self.clock.halted(),
            ended=self._ended(status),
        )

    def _ended(self, status: Status) -> Ended | None:
        """What ended the search, where it was no proof and nobody who asked."""
        if status not in (Status.FEASIBLE, Status.UNKNOWN) or self.clock.halted():
            return None
        return "limit" if self.clock.spent() else "search"


def _complete(start: WarmStart, graph: ChoiceGraph) -> bool:
    """Whether it names one strategy of every node."""
    return len(start.allowed) == graph.size and all(mask.sum() == 1 for mask in start.allowed.values())


def _start(assignment: Ints, graph: ChoiceGraph) -> WarmStart:
    sizes = graph.sizes().tolist()
    return WarmStart(name="the least peak", allowed={v: np.arange(sizes[v]) == x for v, x in enumerate(assignment.tolist())})


def _lightest(graph: ChoiceGraph) -> Ints:
    """The strategy of least usage of every node, of these the cheapest."""
    owner = np.repeat(np.arange(graph.size), graph.sizes())
    order = np.lexsort((graph.costs, graph.usages, owner))
    result: Ints = order[graph.offsets[:-1]] - graph.offsets[:-1]
    return result


def _unordered(assignment: Ints, order: Ints) -> Ints:
    result = np.empty_like(assignment)
    result[order] = assignment
    return result


# Lazy constraints: a problem whose graph does not count all of its memory. What a solution shows to be missing is added, and it is solved
# again.
#
# Every round's graph is a relaxation: it allows all that is allowed, at the same cost and with no larger peak. So what a round proves
# (a bound, or that nothing keeps the limit) is true of the problem itself, and the first solution whose true peak the graph has counted
# is as good as the proof says. Rounds share one clock. What earlier rounds found is kept: when time is up, the best plan that truly
# keeps the limit is returned with the best bound, and it is handed on now and then while the search goes on. A round whose best plan
# needs more than its graph has counted ends as soon as it is nearly proven, for the proof would not be of use: the next one starts from
# there.


class LazyGraph(Protocol):
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
    relaxed: LazyGraph,
    parameters: SolveParameters | None = None,
    *,
    warm_starts: Sequence[WarmStart] = (),
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    saver: Saver[Solution] | None = None,
    **changes: Any,
) -> Solution:
    """``engine.solve`` with the true peak, by lazy constraints; the solution's assignment is a plain one.

    Arguments and errors are those of ``solve``, and:

    Args:
        stop: asked often; True ends the search with what it has.
        saver: is offered every better plan that keeps the limit, as a solution with the bound of that moment.
    """
    asked = SolveParameters.of(parameters, changes)
    clock = clock_of(asked.time_limit, asked.work_limit)
    clock.halt = stop
    inner = replace(asked, time_limit=None, work_limit=None)  # the rounds share the clock
    return _LazyConstraints(relaxed, inner, clock, progress, saver).run(tuple(warm_starts))


class _LazyConstraints:
    """One call of ``solve_in_rounds``."""

    def __init__(
        self, relaxed: LazyGraph, parameters: SolveParameters, clock: Clock, progress: Progress | None, saver: Saver[Solution] | None
    ) -> None:
        self.relaxed, self.parameters, self.clock, self.progress, self.saver = relaxed, parameters, clock, progress, saver
        self.priced = parameters.peak_price > 0
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
            closed = self.best is not None and relative_gap(self.best.value, self.bound) <= self.parameters.gap
            if not missed or closed or self.clock.over() or not self.parameters.limited:
                return self._final(found)
            assert above is not None
            self.relaxed.add(self.relaxed.missed(found.assignment, int(above * (1 - min(1.0, tuned.ROUND_WIDER * 2 ** (number - 1))))))
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
            moved = replace(event, seconds=event.seconds + seconds, work=event.work + work)
            self.history.append(moved)
            if self.progress is not None:
                self.progress(moved)

        found = solve(
            self.relaxed.graph,
            parameters=self.parameters,
            warm_starts=warm_starts,
            progress=report,
            clock=clock,
            proven=self.bound,
            watch=watch,
        )
        prefix = "" if number == 1 else f"round {number}, "
        self.stages += [replace(stage, name=prefix + stage.name) for stage in found.stages]
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
            return value is not None and bound is not None and relative_gap(value, bound) <= tuned.ROUND_NEARLY

        def halt() -> bool:
            if not offered.plans or (clock.used() < tuned.ROUND_PATIENCE and not nearly()):
                return False
            known.extend(untrue(assignment) for assignment, _ in offered.plans[len(known) :])
            return known[-1]

        return halt

    def _true(self, assignment: Ints, cost: int) -> bool:
        """Whether an assignment keeps the limit with all that it uses; it is kept if it is better than what is known."""
        peak = self.relaxed.peak(assignment)
        value = objective_value(self.parameters.objective, self.parameters.memory_weight, cost, peak)
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
        return replace(found, ended="limit" if self.clock.spent() else "search")

    def _solution(self, plan: _Plan | None, status: Status, bound: int | None) -> Solution:
        """What is known so far. ``bound`` is for a plan that keeps the limit, whose status follows from it."""
        gap = None
        if plan is not None and bound is not None:
            bound = min(plan.value, bound)
            gap = relative_gap(plan.value, bound)
            status = Status.OPTIMAL if bound == plan.value else Status.GAP if gap <= self.parameters.gap else Status.FEASIBLE
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
            seed=self.parameters.seed,
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
