"""The memory limit priced: multipliers per time, a bound for any multipliers, and the search for good ones.

For multipliers l >= 0 (cost per byte, one per time) and every assignment x within the limit

    objective(x) >= min over x of [cost(x) + sum_t l_t usage_t(x)]  +  min over lo <= P <= hi of (w - sum_t l_t) P

where lo and hi bound the peak and w is the peak's weight in the objective. The first minimum is bounded from below by message
passing (trws.py). Products with multipliers are rounded down, the last term is widened by 1e-12 of itself: more than the
rounding of its few hundred float64 operations. So ``LagrangianDual.evaluate`` returns a valid bound, whatever the multipliers.

The search: every assignment that is decoded on the way is a column (cost, usage per time) of a small linear program, whose duals
are the best multipliers if only these assignments existed (Dantzig-Wolfe). Multipliers are tried between those and the best
ones known (in-out smoothing), which keeps the search from oscillating.

**Windows**: weights of their terms, and multipliers beside them.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from ortools.linear_solver import pywraplp

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import MIB, WEIGHT, Ints
from solver_shard.solve import parameters as tuned
from solver_shard.solve.bounds.elimination import highest
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


class WindowDual:
    """Weights of windows' terms, and multipliers of the limit beside them; see the module.

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
        prices = highest(solver, bound, dict(zip(labels, multipliers, strict=True)), limit, scale)
        if prices is None:
            return None
        return bound.solution_value() * unit, (self.loads.weights([share.solution_value() for share in shares]), prices)


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
