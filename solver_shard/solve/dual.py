"""The memory limit priced: multipliers per time, a bound for any multipliers, and the search for good ones.

For multipliers l >= 0 (cost per byte, one per time) and every assignment x within the limit

    objective(x) >= min over x of [cost(x) + sum_t l_t usage_t(x)]  +  min over lo <= P <= hi of (w - sum_t l_t) P

where lo and hi bound the peak and w is the peak's weight in the objective. The first minimum is bounded from below by message
passing (messages.py). Products with multipliers are rounded down, the last term is widened by 1e-12 of itself: more than the
rounding of its few hundred float64 operations. So ``Dual.evaluate`` returns a valid bound, whatever the multipliers.

The search: every assignment that is decoded on the way is a column (cost, usage per time) of a small linear program, whose duals
are the best multipliers if only these assignments existed (Dantzig-Wolfe). Multipliers are tried between those and the best
ones known (in-out smoothing), which keeps the search from oscillating.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from ortools.linear_solver import pywraplp

from solver_shard.choice.graph import Ints
from solver_shard.solve.messages import Messages, Parts, scale_of
from solver_shard.solve.problem import Floats, Problem
from solver_shard.solve.solution import MIB

MARGIN = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A decoded assignment: scaled cost, bytes per time."""

    assignment: Ints
    cost: float
    usage: Ints


class Dual:
    """Bounds and assignments from multipliers.

    Attributes:
        best: best bound so far, scaled (``bound`` is the integer it proves).
        multipliers: where it was found, float64[times], scaled cost per byte.
        columns: distinct allowed assignments decoded so far.
        work: work spent.
    """

    def __init__(self, problem: Problem, *, least_peak: int = 0) -> None:
        self.problem = problem
        self.scale = scale_of(problem)
        self.messages = Messages(problem, self.scale)
        self.low = max(problem.least(), least_peak)
        self.high = max(problem.ceiling(), self.low)
        self.weight = problem.weight / MIB * self.scale
        self.best = -np.inf
        self.multipliers = np.zeros(len(problem.base))
        self.columns: list[Column] = []
        self.work = 0.0
        self._seen: set[bytes] = set()
        self._flat = np.concatenate([np.zeros(0), *self.messages.theta])
        counts = np.array([len(c.usage) for c in problem.carriers], dtype=np.int64)
        self._usage = np.concatenate([np.zeros(0, dtype=np.int64), *[c.usage for c in problem.carriers]]).astype(np.float64)
        self._carrier = np.repeat(np.arange(len(counts)), counts)
        places = [np.arange(problem.offsets[c.node], problem.offsets[c.node + 1]) for c in problem.carriers]
        self._place = np.concatenate([np.zeros(0, dtype=np.int64), *places])

    def price(self, multipliers: Floats) -> list[Floats]:
        """Unary costs plus penalties per node."""
        flat = self._flat
        if len(self._usage) and multipliers.any():
            where = np.flatnonzero(multipliers)
            rate = (multipliers[where] @ self.problem.rows(where))[self.problem.columns]
            penalty = np.floor(rate[self._carrier] * self._usage * (1 - MARGIN))
            flat = flat + np.bincount(self._place, penalty, len(flat))
        return np.split(flat, self.problem.offsets[1:-1].tolist()) if self.problem.size else []

    def offset(self, multipliers: Floats) -> float:
        """What the bound has besides the priced problem."""
        total = float(multipliers.sum())
        fixed = float(multipliers @ self.problem.base) * (1 - MARGIN)
        slope = self.weight - total
        peak = self.low if slope >= 0 else self.high
        return float(np.floor(fixed + slope * peak - MARGIN * (self.weight + total) * peak))

    def evaluate(self, multipliers: Floats, sweeps: int, over: Callable[[], bool] | None = None) -> tuple[float, list[Floats]]:
        """The bound after some sweeps of message passing (fewer when ``over`` says so), and the priced unary costs."""
        theta = self.price(multipliers)
        offset = self.messages.constant + self.offset(multipliers)
        bound = -np.inf
        for sweep in range(sweeps):
            if sweep and over is not None and over():
                break
            bound = max(bound, self.messages.sweep(theta) + offset)
            self.work += self.messages.work
        if bound > self.best:
            self.best, self.multipliers = bound, multipliers.copy()
        return bound, theta

    def decode(self, theta: list[Floats], *, careful: bool = True) -> Column | None:
        """The assignment that the messages suggest; where it is forbidden, None or, if ``careful``, one that is not."""
        self.work += self.messages.work / 3
        column = self.column(self.messages.decode(theta))
        if column is not None or not careful:
            return column
        self.work += self.messages.work
        assignment = self.messages.decode_consistent(theta)
        return None if assignment is None else self.column(assignment)

    def column(self, assignment: Ints) -> Column | None:
        """The column of an assignment, kept among ``columns``; None where it is forbidden."""
        if not self.problem.allowed(assignment):
            return None
        column = Column(assignment, self.problem.cost(assignment) * self.scale, self.problem.profile(assignment))
        key = assignment.tobytes()
        if key not in self._seen:
            self._seen.add(key)
            self.columns.append(column)
        return column

    def parts(self) -> Parts:
        """The reparametrised problem at the best multipliers; its constant plus ``offset`` is a valid bound."""
        theta = self.price(self.multipliers)
        for _ in range(3):
            self.messages.sweep(theta)
        parts = self.messages.reparametrise(theta)
        self.best = max(self.best, parts.constant + self.offset(self.multipliers))
        return parts

    @property
    def bound(self) -> int:
        """Smallest integer objective that is not excluded."""
        value = self.best / self.scale
        if not np.isfinite(value):
            return 0
        return self.problem.whole(value)


class Master:
    """The linear program over columns, with multipliers kept in a box around a centre.

    Its primal: the cheapest mixture of the columns, where bytes above the peak cost the upper corner of the box and bytes below
    it earn the lower corner.
    """

    def __init__(self, dual: Dual) -> None:
        self.dual = dual
        solver = pywraplp.Solver.CreateSolver("GLOP")
        self.solver, infinity = solver, solver.infinity()
        self.unit = 1.0 / max(dual.high, 1)  # usages in fractions of the limit
        self.money = 1e4 / max(abs(dual.best), 1.0)  # costs in 1/10,000 of the bound
        self.convex = solver.Constraint(1.0, 1.0)
        self.rows = [solver.Constraint(-infinity, 0.0) for _ in dual.problem.base]
        self.objective = solver.Objective()
        self.objective.SetMinimization()
        peak = solver.NumVar(dual.low * self.unit, dual.high * self.unit, "")
        self.objective.SetCoefficient(peak, dual.weight / self.unit * self.money)
        self.above = [solver.NumVar(0.0, infinity, "") for _ in self.rows]
        self.below = [solver.NumVar(0.0, infinity, "") for _ in self.rows]
        for row, above, below in zip(self.rows, self.above, self.below, strict=True):
            row.SetCoefficient(peak, -1.0)
            row.SetCoefficient(above, -1.0)
            row.SetCoefficient(below, 1.0)
        self.count = 0

    def solve(self, centre: Floats, radius: float) -> tuple[float, Floats, bool] | None:
        """(value, multipliers, whether they are on the edge of the box); the value is at least any bound within the box."""
        dual = self.dual
        for column in dual.columns[self.count :]:
            variable = self.solver.NumVar(0.0, self.solver.infinity(), "")
            self.objective.SetCoefficient(variable, column.cost * self.money)
            self.convex.SetCoefficient(variable, 1.0)
            for row, usage in zip(self.rows, (column.usage * self.unit).tolist(), strict=True):
                row.SetCoefficient(variable, usage)
        self.count = len(dual.columns)
        for above, below, high, low in zip(
            self.above, self.below, (centre + radius).tolist(), np.maximum(0.0, centre - radius).tolist(), strict=True
        ):
            self.objective.SetCoefficient(above, high / self.unit * self.money)
            self.objective.SetCoefficient(below, -low / self.unit * self.money)
        if self.solver.Solve() != pywraplp.Solver.OPTIMAL:
            return None
        multipliers = np.maximum(0.0, -np.array([row.dual_value() for row in self.rows])) * self.unit / self.money
        return self.objective.Value() / self.money, multipliers, bool((multipliers > centre + 0.999 * radius).any())
