"""Weights of windows' terms, and multipliers of the limit beside them: the Lagrangian dual of a problem with windows.

    dual = WindowDual(problem, weights, prices)
    while not dual.finished:
        relaxed, _ = dual.relaxed()                 # an ordinary problem without memory; its optimum is a bound of the problem
        dual.take(bound, assignments, incumbent)    # of the relaxed problem: what is proven, what was found
    dual.weights, dual.prices                       # the best ones
    dual.keep_whole()                               # the relaxed problem has one more window itself: further steps

A window w takes as long as its fullest term: the maximum over r of load[w, r](x). It is at least the mean of the loads with any weights
y[w, r] >= 0 that sum to one, so for weights y and multipliers l >= 0 of the times

    objective(x) >= min over x of [plain(x) + sum over w, r of y[w, r] load[w, r](x) + sum over t of l_t (use(x, t) - limit)]

for every x within the limit. The right side is concave in (y, l), and each assignment is a plane above it, whether it keeps the limit or
not. So both are found by the same cutting planes (Kelley 1960), within a box around the best ones that halves after a step that does not
help. The relaxed problem has no windows and no memory, and message passing nearly always solves such a one to the end: its planes touch.

**What weights leave open.** At the best weights the terms that share a window's weight are nearly equal, in a mixture of assignments; no
single one need be so well balanced. Most of that gap is of a few windows. So the relaxed problem may keep some *whole*: it has their
maxima, and only the others are weighted. With few windows, few labels (labels.py) tell its assignments apart, and it is enumerated in exact
integers. The window that its best assignment makes the longest beyond its weights is the next to be whole. With all of them the relaxed
problem is the problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from ortools.linear_solver import pywraplp

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import MIB, WEIGHT, Ints
from solver_shard.solve import parameters as tuned
from solver_shard.solve.bounds.lagrangian import MARGIN
from solver_shard.solve.problem import Floats, Problem


class WindowDual:
    """See the module.

    Attributes:
        problem: with windows.
        weights: the best ones so far, int64[terms].
        prices: the best multipliers so far, cost per byte by time label.
        bound: the best bound so far.
        finished: no further step is worth its work.
        asked: weights and multipliers that are tried now.
        whole: windows that are not weighted.
    """

    def __init__(self, problem: Problem, weights: Ints | None, prices: Mapping[int, float]) -> None:
        assert problem.loads is not None
        self.problem, self.loads = problem, problem.loads
        given = self.loads.weights(np.ones(len(self.loads.windows))) if weights is None else weights
        self.weights, self.prices = given, {t: price for t, price in prices.items() if price > 0 and self._memory}
        self.asked = self.weights, self.prices
        self.bound: int | None = None
        self.finished = False
        self.steps = 0
        self.reach = 1.0
        self.whole: tuple[int, ...] = ()
        self.times: list[int] = []
        """Positions of the times that have a multiplier, or may get one."""
        self._planes: list[tuple[int, Ints, Ints]] = []
        self._seen: set[bytes] = set()

    @property
    def _memory(self) -> bool:
        """Whether the limit is priced, too; where the peak is part of the objective it stays in the problem."""
        return self.problem.limit is not None and not self.problem.weight

    def relaxed(self) -> tuple[Problem, Ints]:
        """The problem at what is asked, whose least objective is a bound, and the weights of the terms that it still has."""
        weights, prices = self.asked
        partly, own = self.problem.partly(weights, self.whole)
        return unlimited(partly, prices) if self._memory else partly, own

    def keep_whole(self) -> bool:
        """Weigh one window less: the one that the last assignment makes the longest beyond its weights; false where none is."""
        if not self._planes:
            return False
        terms = self._planes[-1][1]
        beyond = self.loads.longest(terms) * WEIGHT - np.add.reduceat(terms * self.weights, self.loads.starts)
        beyond[list(self.whole)] = 0
        if beyond.max(initial=0) <= 0:
            return False
        self.whole = tuple(sorted((*self.whole, int(beyond.argmax()))))
        self.asked, self.reach, self.finished = (self.weights, self.prices), tuned.WHOLE_REACH, False
        self.steps = max(0, self.steps - tuned.WHOLE_STEPS)
        return True

    def take(self, bound: int, assignments: Sequence[Ints], value: int | None) -> None:
        """What is proven of the relaxed problem, and assignments that were found; ``value``: of the incumbent."""
        self.steps += 1
        if self.bound is None or bound > self.bound:
            self.bound, (self.weights, self.prices) = bound, self.asked
        else:
            self.reach = max(self.reach / 2, tuned.WEIGHTS_REACH)
        for assignment in assignments:
            self._plane(assignment)
        nothing = len(self.loads.windows) == self.loads.count and not self._memory
        if not self._planes or self.steps >= tuned.WEIGHTS_STEPS or nothing:
            self.finished = True
            return
        answer = self._best(value)
        if answer is None:
            self.finished = True
            return
        most, self.asked = answer
        room = most - self.bound if value is None else value - self.bound
        self.finished = most - self.bound <= tuned.WEIGHTS_SMALL * room or most - self.bound < 1

    def _plane(self, assignment: Ints) -> None:
        """What an assignment costs at any weights and multipliers; the time of a peak above the limit may get a multiplier."""
        if assignment.tobytes() in self._seen:
            return
        self._seen.add(assignment.tobytes())
        problem, profile = self.problem, self.problem.profile(assignment)
        self._planes.append((problem.plain(assignment), self.loads.terms(assignment), profile))
        if self._memory:
            assert problem.limit is not None
            wanted = [t for t in np.searchsorted(problem.times, sorted(self.prices)).tolist() if t < len(problem.times)]
            if profile.max(initial=0) > problem.limit:
                wanted.append(int(profile.argmax()))
            self.times += [t for t in dict.fromkeys(wanted) if t not in self.times]

    def _best(self, value: int | None) -> tuple[float, tuple[Ints, dict[int, float]]] | None:
        """(The bound, (weights, multipliers)) that the planes allow at best in the box."""
        solver = pywraplp.Solver.CreateSolver("GLOP")
        infinity = solver.infinity()
        level = max(abs(self.bound or 0), 1)
        unit = level / 1e4
        centre = self.weights / WEIGHT
        shares = [solver.NumVar(max(0.0, y - self.reach), min(1.0, y + self.reach), "") for y in centre.tolist()]
        for window in range(self.loads.count):
            row = solver.Constraint(1.0, 1.0)
            for term in np.flatnonzero(self.loads.windows == window).tolist():
                row.SetCoefficient(shares[term], 1.0)
        labels = self.problem.times[self.times].tolist()
        scale = MIB / unit
        known = [self.prices.get(t, 0.0) * scale for t in labels]
        factor = 1.0 + tuned.WEIGHTS_PRICE_REACH * self.reach
        first = self.reach * level / unit / max(self.problem.ceiling() / MIB, 1.0)
        multipliers = [solver.NumVar(k / factor, k * factor if k > 0 else first, "") for k in known]
        bound = solver.NumVar(-infinity, infinity if value is None else value / unit, "")
        limit, whole = self.problem.limit or 0, list(self.whole)
        free = ~np.isin(self.loads.windows, whole)
        for plain, terms, profile in self._planes:
            row = solver.Constraint(-infinity, (plain + int(self.loads.longest(terms)[whole].sum())) / unit)
            row.SetCoefficient(bound, 1.0)
            for share, load, weighted in zip(shares, terms.tolist(), free.tolist(), strict=True):
                if load and weighted:
                    row.SetCoefficient(share, -load / unit)
            for multiplier, t in zip(multipliers, self.times, strict=True):
                row.SetCoefficient(multiplier, -(int(profile[t]) - limit) / MIB)
        objective = solver.Objective()
        objective.SetMaximization()
        objective.SetCoefficient(bound, 1.0)
        for multiplier in multipliers:  # of the best ones the least: beyond them lies nothing that is known
            objective.SetCoefficient(multiplier, -tuned.PLANES_TIE * max(limit, 1) / MIB)
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            return None
        prices = {t: m.solution_value() / scale for t, m in zip(labels, multipliers, strict=True)}
        weights = self.loads.weights([share.solution_value() for share in shares])
        return bound.solution_value() * unit, (weights, {t: p for t, p in prices.items() if p > 0})


def unlimited(problem: Problem, prices: Mapping[int, float]) -> Problem:
    """The problem without memory, where bytes above the limit are paid and those below it earned: never more than the problem, within it.

    Args:
        problem: without the peak in its objective.
        prices: cost per byte by time label; times that are gone do not count.
    """
    multipliers = np.array([prices.get(t, 0.0) for t in problem.times.tolist()])
    unary: list[Ints] = list(problem.unary)
    constant = problem.constant
    where = np.flatnonzero(multipliers)
    if len(where):
        assert problem.limit is not None
        rate: Floats = np.asarray(multipliers[where] @ problem.rows(where), dtype=np.float64)[problem.columns]
        for carrier, price in zip(problem.carriers, rate.tolist(), strict=True):
            if price:
                own, paid = unary[carrier.node], np.floor(price * carrier.usage * (1 - MARGIN))
                more = np.minimum(paid, float(FORBIDDEN)).astype(np.int64)
                unary[carrier.node] = np.where(own >= FORBIDDEN, FORBIDDEN, np.minimum(own + more, FORBIDDEN - 1))
        total = float(multipliers.sum())
        fixed = float(multipliers @ problem.base) * (1 - MARGIN)
        constant += int(np.floor(fixed - total * problem.limit * (1 + 2 * MARGIN)))
    nothing = np.zeros(0, dtype=np.int64)
    return replace(
        problem,
        unary=tuple(unary),
        constant=constant,
        carriers=(),
        spans=np.zeros((0, 3), dtype=np.int64),
        base=nothing,
        times=nothing,
        limit=None,
    )
