"""The memory limit priced: multipliers per time, a bound for any multipliers, and the search for good ones.

For multipliers l >= 0 (cost per byte, one per time) and every assignment x within the limit

    objective(x) >= min over x of [cost(x) + sum_t l_t usage_t(x)]  +  min over lo <= P <= hi of (w - sum_t l_t) P

where lo and hi bound the peak and w is the peak's weight in the objective. The first minimum is bounded from below by message
passing (trws.py). Products with multipliers are rounded down, the last term is widened by 1e-12 of itself: more than the
rounding of its few hundred float64 operations. So ``LagrangianDual.evaluate`` returns a valid bound, whatever the multipliers.

The search: every assignment that is decoded on the way is a column (cost, usage per time) of a small linear program, whose duals
are the best multipliers if only these assignments existed (Dantzig-Wolfe). Multipliers are tried between those and the best
ones known (in-out smoothing), which keeps the search from oscillating.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from ortools.linear_solver import pywraplp

from solver_shard.graph.choice_graph import MIB, Ints
from solver_shard.solve import parameters as tuned
from solver_shard.solve.bounds.trws import Messages, Parts, scale_of
from solver_shard.solve.limits import Clock
from solver_shard.solve.problem import Floats, Problem

MARGIN = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A decoded assignment: scaled cost, bytes per time."""

    assignment: Ints
    cost: float
    usage: Ints


class LagrangianDual:
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


class RestrictedMaster:
    """The linear program over columns, with multipliers kept in a box around a centre.

    Its primal: the cheapest mixture of the columns, where bytes above the peak cost the upper corner of the box and bytes below
    it earn the lower corner.
    """

    def __init__(self, dual: LagrangianDual) -> None:
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


Found = Callable[[LagrangianDual, Column | None, str], None]
"""Called after every step with the decoded assignment, if any."""


class ColumnGeneration:
    """Steps towards a good bound: message passing, then multipliers on the times that bind, by column generation.

        for _ in ColumnGeneration(problem, ...).steps():
            ...     # the bound or the assignments may have become better; stop whenever that is enough

    1. *sweeps* at the multipliers of the start until the bound hardly moves;
    2. *weights*, where the peak is the objective or no assignment within the limit is known: multipliers of a fixed sum that follow the use
       of memory (multiplicative weights). They come close to the best multipliers of a least peak within some dozen steps, and what they
       decode uses little memory;
    3. *boxes*: multipliers from the linear program over all decoded assignments (``RestrictedMaster``) within a box around the best ones.
       The box grows when the program's promise is kept and shrinks when it was far off.

    Attributes:
        dual: bound, multipliers and columns so far.
        done: whether all steps ran.
    """

    def __init__(
        self, problem: Problem, clock: Clock, *, gap: float, found: Found, value: Callable[[], int | None], start: Floats, least_peak: int
    ) -> None:
        self.problem, self.clock, self.gap, self.found, self.value = problem, clock, gap, found, value
        self.dual = LagrangianDual(problem, least_peak=least_peak)
        self.start = start * self.dual.scale
        self.done = False

    def room(self) -> float:
        """Scaled distance of the incumbent to the bound; infinite without one."""
        value = self.value()
        return np.inf if value is None else value * self.dual.scale - self.dual.best

    def steps(self) -> Iterator[None]:
        """All steps, one at a time."""
        yield from self._sweeps()
        if len(self.problem.base):
            if self.problem.weight and not self.start.any():
                yield from self._weights(self.dual.weight, 100)
            elif self.value() is None:
                yield from self._weights(4.0 * max(abs(self.dual.best), 1.0) / max(self.dual.high, 1), 40)
            yield from self._boxes()
        self.done = True

    def _evaluate(self, multipliers: Floats, sweeps: int, source: str, *, careful: bool = True) -> tuple[float, Column | None]:
        dual = self.dual
        spent = dual.work
        bound, theta = dual.evaluate(multipliers, sweeps, self.clock.over)
        column = dual.decode(theta, careful=careful)
        self.clock.spend(dual.work - spent + 1e-3)
        self.found(dual, column, source)
        return bound, column

    def _sweeps(self) -> Iterator[None]:
        stale, slow = 0, tuned.FIRST_ROUNDING
        limited = bool(len(self.problem.base))
        for step in range(5 if limited else 80):
            before = self.dual.best
            self._evaluate(self.start, 5, "messages", careful=limited or step > 0)
            if not limited and self.dual.best - before <= slow * abs(self.dual.best):
                if self.room() > tuned.ROUNDING_FAR * slow * abs(self.dual.best):
                    self.found(self.dual, self._tight(), "rounding")
                slow *= tuned.NEXT_ROUNDING
            yield
            room = self.room()
            # Without memory the bound is mostly tight in the end, and says more about an incumbent than that about the bound.
            small = 0.0 if not limited else 0.02 * room if np.isfinite(room) else 3e-4 * abs(self.dual.best)
            stale = stale + 1 if self.dual.best - before <= max(small, 1e-5 * abs(self.dual.best)) else 0
            if stale >= (1 if limited else 3):
                return

    def _tight(self) -> Column | None:
        """What the bound is made of, where that is tight; see trws.py."""
        dual = self.dual
        theta = dual.price(self.start)
        for slack in tuned.ROUNDING_SLACKS:
            self.clock.spend(2 * dual.messages.work)
            chosen = dual.messages.decode_tight(theta, slack * abs(dual.best))
            if chosen is not None:
                return dual.column(chosen)
        return None

    def _weights(self, total: float, steps: int) -> Iterator[None]:
        dual, limited = self.dual, not self.problem.weight
        multipliers = np.full(len(self.problem.base), total / len(self.problem.base))
        last = dual.best
        for step in range(1, steps + 1):
            _, column = self._evaluate(multipliers, 2, "weights")
            yield
            if limited and self.value() is not None:
                yield from self._lighter(multipliers)
                return
            if column is None:
                continue
            use = column.usage / max(float(column.usage.max()), 1.0)
            multipliers = multipliers * np.exp(2.0 * (use - 1.0)) + 1e-9 * total
            multipliers *= total * (1.0 + 0.1 * step * limited) / multipliers.sum()
            if step % 25 == 0 and not limited:
                if dual.best - last < 0.2 * self.room():
                    return
                last = dual.best

    def _lighter(self, multipliers: Floats) -> Iterator[None]:
        """Ever smaller multiples of multipliers that keep the limit, as long as that still happens now and then."""
        failed = 0
        for _ in range(10):
            multipliers = 0.5 * multipliers
            _, column = self._evaluate(multipliers, 2, "weights")
            yield
            failed = 0 if column is not None and self.problem.value(column.assignment) is not None else failed + 1
            if failed == 3:
                return

    def _boxes(self) -> Iterator[None]:
        dual = self.dual
        if not dual.columns:
            return
        if dual.multipliers.any():
            radius = 0.02 * float(dual.multipliers.max())
        elif self.problem.weight:
            radius = 0.3 * dual.weight
        else:
            radius = 0.01 * max(abs(dual.best), 1.0) / max(dual.high, 1)
        master = RestrictedMaster(dual)
        stale, rounds, mark = 0, 1, dual.best
        for step in range(1, 301):
            if step % tuned.BOX_WINDOW == 0:
                room = self.room()
                if dual.best - mark < (0.05 * room if np.isfinite(room) else 5e-4 * abs(dual.best)):
                    return
                mark = dual.best
            answer = master.solve(dual.multipliers, radius)
            if answer is None:
                return
            value, multipliers, edge = answer
            before = dual.best
            promised = value - before
            small = max(min(0.03 * self.room(), 2e-3 * abs(dual.best)), 0.2 * self.gap * abs(dual.best))
            if promised <= small and not edge:
                return
            reached = self._step(multipliers, before + 0.1 * promised, rounds)
            yield
            gain = dual.best - before
            if gain > 0.1 * promised:
                radius *= 4.0 if edge and gain > 0.5 * promised else 1.5
                rounds = 1
            else:
                radius *= 0.7 if reached < before - 0.5 * promised else 1.0
                rounds = min(4, rounds + 1)
            stale = stale + 1 if gain <= 0.1 * small else 0
            if stale >= 30:
                return

    def _step(self, multipliers: Floats, goal: float, rounds: int) -> float:
        """Sweeps at new multipliers until the bound reaches the goal, or a decoded assignment shows that it cannot; the bound there."""
        dual = self.dual
        ceiling, bound = np.inf, -np.inf
        for _ in range(rounds):
            last = bound
            found, column = self._evaluate(multipliers, 3, "multipliers")
            bound = max(bound, found)
            if column is not None:
                ceiling = min(ceiling, column.cost + float(multipliers @ (column.usage - self.problem.base)) + dual.offset(multipliers))
            if bound >= goal or ceiling < goal or bound - last < 0.1 * (goal - bound):
                break
        return bound
