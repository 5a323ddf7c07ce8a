"""The Lagrangian dual of a large problem: multipliers on the times that matter by subgradient steps (Polyak 1969), messages for the rest.

    relaxation = Relaxation(flat, multipliers)
    for _ in relaxation.steps(): ...            # bound and assignments may have become better

Every step sweeps a few times at the present multipliers, decodes an assignment, adds rows where that exceeds the limit, and moves the
multipliers along the smoothed excess (Polyak's step towards a target a little above the best bound). Messages stay warm from step to
step. Every few steps the decoded assignment is repaired and improved to one within the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from solver_shard.graph.choice_graph import Ints
from solver_shard.solve import parameters as tuned
from solver_shard.solve.bounds.bounding import Bounding, Found
from solver_shard.solve.bounds.elimination import CuttingPlanes, between
from solver_shard.solve.bounds.trws import Parts, consistent, scale_of, scaled_constant
from solver_shard.solve.bounds.trws_compiled import MOST, Passing, min_marginals, parts
from solver_shard.solve.flat import Flat
from solver_shard.solve.integer_program import MinMarginals
from solver_shard.solve.limits import Clock
from solver_shard.solve.primal.local_search import Local
from solver_shard.solve.problem import Floats, Problem

HIGHEST = 1e30
"""Largest multiplier: sums of them stay finite."""


class Relaxation:
    """Bound and multipliers of one flat problem.

    Attributes:
        rows: the memory rows.
        multipliers: per row, scaled cost per byte times the row's slack, of the best bound.
        best: that bound, scaled, with the problem's constant; -inf at first.
        found: assignments within the limit since this was last emptied.
        work: work spent.
        target: scaled value of an incumbent, for the step length; infinite without one.
        known: scaled bound that is known already: steps that end below it begin anew.
    """

    def __init__(self, flat: Flat, multipliers: Mapping[int, float], rng: np.random.Generator) -> None:
        """``multipliers``: unscaled cost per byte by time label, to start from."""
        self.flat, self.rng = flat, rng
        self.constant = scaled_constant(flat.problem.constant, flat.scale)
        self.passing, self.local = Passing(flat), Local(flat)
        self.rows = Rows(flat)
        self.best = -np.inf
        self.found: list[Ints] = []
        self.work = 0.0
        self.target, self.known = np.inf, -np.inf
        self.restarts = 0
        self.multipliers: Floats = np.zeros(0)
        self.reprice(multipliers)

    def reprice(self, prices: Mapping[int, float]) -> None:
        """Go on from these multipliers: unscaled cost per byte by time label. Times that are gone hand theirs to the nearest one."""
        times = self.flat.problem.times
        if self.flat.limit is None or not len(times):
            return
        given: dict[int, float] = {}
        for t in sorted(prices):
            if prices[t] > 0:
                right = min(int(np.searchsorted(times, t)), len(times) - 1)
                place = right if right == 0 or times[right] - t <= t - times[right - 1] else right - 1
                given[place] = given.get(place, 0.0) + prices[t]
        self.multipliers = self._vector({int(times[place]): price for place, price in given.items()})

    def _vector(self, prices: Mapping[int, float]) -> Floats:
        """Multipliers as this keeps them, of times that the problem has; their rows are added."""
        times = self.flat.problem.times
        places = {int(np.searchsorted(times, t)): price for t, price in prices.items()}
        for place in places:
            if self.rows.add(place):
                self.multipliers = np.append(self.multipliers, 0.0)
        start = [places.get(place, 0.0) * self.flat.scale for place in self.rows.times]
        return np.array(start) * self.rows.slack if start else np.zeros(0)

    def prices(self) -> dict[int, float]:
        """The multipliers by time label, unscaled cost per byte, for a further relaxation."""
        per_byte = self.multipliers / self.rows.slack / self.flat.scale if len(self.rows) else self.multipliers
        labels = self.flat.problem.times[self.rows.times].tolist() if len(self.rows) else []
        return {int(t): float(p) for t, p in zip(labels, per_byte, strict=True) if p > 0}

    def theta(self, multipliers: Floats | None = None) -> Floats:
        """Unary costs with penalties, at the best multipliers if none are given."""
        own = self.multipliers if multipliers is None else multipliers
        return self.rows.price(own / self.rows.slack) if len(self.rows) else self.flat.theta

    def offset(self, multipliers: Floats | None = None) -> float:
        """What the bound has besides the priced problem."""
        own = self.multipliers if multipliers is None else multipliers
        return self.constant + (self.rows.offset(own / self.rows.slack) if len(self.rows) else 0.0)

    def split(self, prices: Mapping[int, float], over: Callable[[], bool]) -> Parts:
        """The problem at these multipliers as parts that are never negative, once messages have settled or ``over`` says so."""
        self.reprice(prices)
        self.best = -np.inf
        for _ in self.settled():
            if over():
                break
        return parts(self.passing, self.theta(), self.offset())

    def margins(self, sweeps: int = tuned.MOST_SETTLING, forests: int = 4) -> tuple[float, Floats]:
        """(base, extra per flat strategy), scaled: every solution with that strategy costs at least base + extra.

        The messages are those of the last multipliers that were tried; at most so many sweeps settle them at the best ones.
        """
        theta, offset = self.theta(), self.offset()
        for swept in range(1, sweeps + 1):
            bound = self.passing.sweep(theta) + offset
            if swept >= tuned.LEAST_SETTLING and bound >= self.best - tuned.SETTLED * abs(self.best):
                break
        base, extra = min_marginals(self.passing, theta, forests=forests, rng=self.rng)
        self.work += self.passing.work * (swept + 2 + 2 * forests)
        base += offset
        self.best = max(self.best, base)
        return base, extra

    def steps(self) -> Iterator[None]:
        """Steps until their length is used up; without a limit, sweeps until the bound hardly moves."""
        if self.flat.limit is None:
            yield from self._sweeps()
            return
        multipliers, smooth, stale, length, step = self.multipliers.copy(), None, 0, 1.0, 0
        while length > tuned.LAST_LENGTH or self._again():
            if length <= tuned.LAST_LENGTH:
                length, stale, multipliers, smooth = 1.0, 0, self.multipliers.copy(), None
            theta = self.theta(multipliers)
            bound = -np.inf
            for _ in range(tuned.SUBGRADIENT_SWEEPS):
                bound = max(bound, self.passing.sweep(theta))
            bound += self.offset(multipliers)
            chosen = self.passing.decode(theta)
            profile = self.flat.profile(chosen)
            self.work += (tuned.SUBGRADIENT_SWEEPS + 0.5) * self.passing.work + 1e-4 + 1e-8 * len(self.flat.bytes.starts)
            if profile.max(initial=0) <= self.flat.limit:
                self.found.append(chosen)
            if step % tuned.REPAIR_EVERY == 0 and bound > self.best - tuned.REPAIR_WITHIN * abs(self.best):
                self._repair(chosen, theta)
            step += 1
            stale = 0 if bound > self.best + 1e-4 * abs(self.best) else stale + (bound <= self.best)
            if bound > self.best:
                self.best, self.multipliers = bound, multipliers.copy()
            yield
            new = sum(self.rows.add(t) for t in self.rows.exceeded(profile, 4)) if len(self.rows) < self.rows.most else 0
            if new:
                multipliers, self.multipliers = np.append(multipliers, np.zeros(new)), np.append(self.multipliers, np.zeros(new))
                smooth = None if smooth is None else np.append(smooth, np.zeros(new))
            if not len(self.rows):
                if profile.max(initial=0) <= self.flat.limit:
                    yield from self._sweeps()
                return
            excess = (profile[self.rows.times] - self.flat.limit) / self.rows.slack
            smooth = excess if smooth is None else tuned.SUBGRADIENT_SMOOTHING * smooth + (1 - tuned.SUBGRADIENT_SMOOTHING) * excess
            if stale >= tuned.SUBGRADIENT_PATIENCE:
                length, stale, multipliers, smooth = length * tuned.LENGTH_SHRINK, 0, self.multipliers.copy(), excess
            aim = min(self.target, max(self.best + 0.1 * abs(self.best), self.best + 1.0))
            direction = np.where((multipliers <= 0) & (smooth < 0), 0.0, smooth)
            norm = float(direction @ direction)
            if norm > 0:
                multipliers = multipliers + length * max(aim - bound, 1e-4 * abs(aim)) / norm * direction
                multipliers = np.clip(multipliers, 0.0, HIGHEST)
            elif not self.multipliers.any() and profile.max(initial=0) <= self.flat.limit:
                yield from self._sweeps()
                return

    def planes(self) -> Iterator[None]:
        """Multipliers by cutting planes: a few steps where few times bind. Messages begin from those of the best multipliers."""
        if self.flat.limit is None:
            return
        planes, prices, stale = CuttingPlanes(self.flat.problem), self.prices(), 0
        kept = self.passing.forward.copy(), self.passing.backward.copy()
        scale = self.flat.scale
        for step in range(tuned.MOST_PLANES):
            multipliers = self._vector(prices)
            theta, offset = self.theta(multipliers), self.offset(multipliers)
            bound = -np.inf
            for swept in range(1, tuned.PLANE_SWEEPS + 1):
                before, bound = bound, max(bound, self.passing.sweep(theta) + offset)
                if swept >= tuned.SUBGRADIENT_SWEEPS and bound - before <= 1e-5 * abs(bound):
                    break
            chosen = self.local.settle(self.passing.decode(theta), theta, 3)
            self.work += (swept + 0.5) * self.passing.work + 1e-4 + 1e-6 * self.flat.size
            stale = 0 if bound > self.best + 1e-5 * abs(self.best) else stale + 1
            if bound > self.best:
                self.best, self.multipliers = bound, multipliers
                kept = self.passing.forward.copy(), self.passing.backward.copy()
            for assignment in (chosen, self._repair(chosen, theta)):
                if assignment is not None and self.flat.problem.allowed(assignment):
                    planes.add(assignment, prices)
            yield
            most = min(self.target, self.best + abs(self.best)) / scale
            if stale >= tuned.STALE_PLANES:
                before = self.best
                self.passing.forward[:], self.passing.backward[:] = kept
                yield from self.settled()
                kept = self.passing.forward.copy(), self.passing.backward.copy()
                if self.best - before <= tuned.SETTLING_WORTH * abs(self.best):
                    break
                stale = 0
            answer = planes.best(most, near=self.prices(), reach=tuned.PLANES_REACH)
            if answer is None or answer[0] * scale - self.best <= 1e-5 * abs(self.best):
                break
            prices = answer[1] if step < tuned.WHOLE_PLANES else between(self.prices(), answer[1])
        self.passing.forward[:], self.passing.backward[:] = kept

    def settled(self) -> Iterator[None]:
        """Sweeps until messages have settled at the given multipliers: what these are worth."""
        theta, offset, stale = self.theta(), self.offset(), 0
        for _ in range(tuned.MOST_SETTLING):
            bound = self.passing.sweep(theta) + offset
            self.work += self.passing.work
            stale = 0 if bound > self.best + tuned.SETTLED * abs(self.best) else stale + 1
            self.best = max(self.best, bound)
            yield
            if stale >= tuned.STILL_SWEEPS:
                return

    def _again(self) -> bool:
        """Whether steps that ended below a bound that is known begin anew, from no messages: theirs can be stuck (RESTARTS)."""
        self.restarts += 1
        if self.restarts > tuned.RESTARTS or self.best >= self.known - tuned.SETTLED * abs(self.known):
            return False
        self.passing.forward[:] = 0.0
        self.passing.backward[:] = 0.0
        return True

    def _sweeps(self) -> Iterator[None]:
        stale, theta, slow = 0, self.theta(), tuned.FIRST_ROUNDING
        for step in range(200):
            before, bound = self.best, -np.inf
            for _ in range(tuned.SUBGRADIENT_SWEEPS):
                bound = max(bound, self.passing.sweep(theta))
            self.best = max(self.best, bound + self.offset())
            self.work += (tuned.SUBGRADIENT_SWEEPS + 0.5) * self.passing.work
            if step % tuned.REPAIR_EVERY == 0:
                self._repair(self.passing.decode(theta), theta)
            if self.best - before <= slow * abs(self.best):
                if self.target - self.best > tuned.ROUNDING_FAR * slow * abs(self.best):
                    self._round(theta)
                slow *= tuned.NEXT_ROUNDING
            yield
            stale = stale + 1 if self.best - before <= 1e-6 * abs(self.best) else 0
            if stale >= 10:
                return

    def _round(self, theta: Floats) -> None:
        """An assignment that the bound is made of, where that is tight; see trws.py."""
        split = parts(self.passing, theta)
        self.work += 1e-4 * self.flat.size
        for slack in tuned.ROUNDING_SLACKS:
            chosen = consistent(self.flat.problem.edges, split.unary, split.tables, slack * abs(self.best))
            if chosen is not None:
                better = self.local.settle(chosen, theta, 3)
                self.found.extend(x for x in (chosen, better) if self.flat.profile(x).max(initial=0) <= self.local.limit)
                return

    def _repair(self, chosen: Ints, theta: Floats) -> Ints | None:
        """An assignment within the limit near this one; it is among those found, too."""
        better = self.local.repair(self.local.settle(chosen, theta, 3), theta)
        self.work += 3e-4 + 1e-6 * self.flat.size
        if better is None:
            return None
        self.found.append(self.local.descend(better, self.flat.theta, self.rng, 20))
        self.work += 2e-6 * self.flat.size
        return self.found[-1]


MARGIN = 1e-12


class Rows:
    """Multipliers on the memory limit at the few times that matter; rows are added where decoded assignments exceed it.

    For multipliers l >= 0 (scaled cost per byte, one per row) every assignment x within the limit costs at least

        min over x of [cost(x) + sum_t l_t (usage_t(x) - least_t)]  -  sum_t l_t (limit - least_t)

    where least_t is in use whatever is chosen. Message passing bounds the minimum from below; products are rounded down and the last sum is
    rounded up by more than the rounding of its few hundred operations (MARGIN): the bound is valid as computed.

    Attributes:
        times: in the order in which they were added.
        slack: per row, bytes above ``least`` that the limit leaves (at least 1).
    """

    def __init__(self, flat: Flat, most: int = 400) -> None:
        self.flat, self.most = flat, most
        self.limit = flat.limit if flat.limit is not None else 2**62
        self.times: list[int] = []
        self.known: set[int] = set()
        self.index: list[Ints] = []
        self.bytes: list[Ints] = []
        self.least: list[int] = []

    def __len__(self) -> int:
        return len(self.times)

    def copy(self) -> Rows:
        """The same rows, to add others to."""
        other = Rows(self.flat, self.most)
        other.times, other.known = list(self.times), set(self.known)
        other.index, other.bytes, other.least = list(self.index), list(self.bytes), list(self.least)
        return other

    def add(self, time: int) -> bool:
        """Add the row of a time; false if it is there."""
        if time in self.known:
            return False
        where, above, least = self.flat.row(time)
        self.known.add(time)
        self.times.append(time)
        self.index.append(where)
        self.bytes.append(above)
        self.least.append(least)
        return True

    @property
    def slack(self) -> Floats:
        return np.maximum(1.0, self.limit - np.array(self.least, dtype=np.float64))

    def price(self, multipliers: Floats) -> Floats:
        """theta plus penalties, rounded down; less where they are beyond any use (see trws_compiled.py)."""
        total = np.zeros(len(self.flat.theta))
        for i in np.flatnonzero(multipliers):
            total[self.index[i]] += multipliers[i] * self.bytes[i]
        result: Floats = np.minimum(self.flat.theta + np.floor(total * (1 - MARGIN)), MOST)
        return result

    def offset(self, multipliers: Floats) -> float:
        """What the bound loses for the bytes that the limit allows; not positive where a plan exists."""
        room = self.limit - np.array(self.least, dtype=np.float64)
        total = float(multipliers @ room)
        return float(np.floor(-total - MARGIN * float(multipliers @ np.abs(room))))

    def exceeded(self, profile: Ints, count: int) -> list[int]:
        """Times of the largest excess, some distance apart from each other and from known ones."""
        found: list[int] = []
        left = profile.copy()
        apart, near = max(1, len(profile) // 150), max(0, len(profile) // 1500)
        for time in self.times:
            left[max(0, time - near) : time + near + 1] = 0
        while len(found) < count and len(left):
            time = int(left.argmax())
            if left[time] <= self.limit:
                break
            found.append(time)
            left[max(0, time - apart) : time + apart + 1] = 0
        return found


def lightest(flat: Flat, clock: Clock, rng: np.random.Generator) -> tuple[Ints | None, int]:
    """(an assignment within the limit or None, bytes that every assignment needs at least), by multiplicative weights.

    For weights w >= 0 that sum to one, every assignment has peak >= sum_t w_t usage_t: message passing bounds that from below. The weights
    follow the use of memory, so the bound rises towards the least peak, and what is decoded uses little; it is repaired towards the limit.
    The search ends when an assignment keeps the limit, when the bound exceeds it, or after ``PEAK_STEPS`` steps.

    ``flat`` has a limit and no costs but forbidden pairs.
    """
    assert flat.limit is not None
    rows, passing, local = Rows(flat), Passing(flat), Local(flat)
    unit = tuned.PEAK_UNITS / max(1, flat.limit)
    weights, best = np.zeros(0), 0
    theta = flat.theta
    for _ in range(tuned.PEAK_STEPS):
        value = max(passing.sweep(theta) for _ in range(tuned.PEAK_SWEEPS))
        clock.spend((tuned.PEAK_SWEEPS + 1) * passing.work + 1e-3)
        if len(rows):
            fixed = float(weights @ np.array(rows.least, dtype=np.float64))
            best = max(best, int(np.ceil((value / unit + fixed) * (1 - MARGIN))))
        chosen = local.settle(passing.decode(theta), theta, 3)
        profile = flat.profile(chosen)
        repaired = local.repair(chosen, theta)
        if repaired is not None and flat.problem.value(repaired) is not None:
            return repaired, best
        if best > flat.limit or clock.over():
            break
        new = sum(rows.add(t) for t in rows.exceeded(profile, 4))
        weights = np.append(weights, np.full(new, float(weights.max(initial=1.0))))
        use = profile[rows.times] / max(1.0, float(profile.max(initial=0)))
        weights = weights * np.exp(tuned.WEIGHTS_RATE * (use - 1.0))
        weights /= weights.sum()
        theta = rows.price(weights * unit)
    return None, best


class LargeBounding(Bounding):
    """Bounding of a large problem on flat arrays; see ``Bounding``. Imports the compiled loops, so it is imported where needed.

    The multipliers of a larger problem are looked at first. Messages passed at them from nothing often stay far below the bound
    ``reached`` that they had there, and no step leads out of that: then the search for multipliers begins from none as well, and what is
    better counts. Where exact bounds follow, cutting planes come first, and for few times no other steps are needed.
    """

    def __init__(
        self,
        problem: Problem,
        clock: Clock,
        *,
        found: Found,
        value: Callable[[], int | None],
        prices: Mapping[int, float],
        known: int | None,
        reached: float = -np.inf,
        rng: np.random.Generator,
    ) -> None:
        self.problem, self.clock, self.found, self.value = problem, clock, found, value
        self.flat = Flat.of(problem, scale_of(problem))
        self.relaxation = Relaxation(self.flat, {}, rng)
        self.given = Relaxation(self.flat, prices, rng) if prices else None
        self.reached = reached
        self.probe: Relaxation | None = None
        self.scale = self.flat.scale
        if known is not None:
            self.relaxation.known = known * self.flat.scale

    def steps(self) -> Iterator[None]:
        narrow = self.order is not None
        if self.given is not None:
            yield from self._told(self.given, self.given.settled())
            if narrow:
                yield from self._told(self.given, self.given.planes())
                if self.given.best / self.scale >= self.reached - tuned.SETTLED * abs(self.reached):
                    return
        if narrow:
            yield from self._told(self.relaxation, self.relaxation.planes())
            if 0 < len(self.relaxation.prices()) <= tuned.FEW_PRICES and self.value() is not None:
                return
        yield from self._told(self.relaxation, self.relaxation.steps())

    def _told(self, relaxation: Relaxation, steps: Iterator[None]) -> Iterator[None]:
        """Steps of a relaxation, after each of which work is counted and what was found is handed on."""
        scale, spent = self.flat.scale, relaxation.work
        for _ in steps:
            self.clock.spend(relaxation.work - spent)
            spent = relaxation.work
            bound = self.problem.whole(self.level()) if np.isfinite(self.level()) else 0
            self.found(bound, None, "multipliers")
            for assignment in relaxation.found:
                value = self.value()
                if value is None or self.flat.cost(assignment) / scale + self.problem.constant < value:
                    self.found(bound, assignment, "multipliers")
            relaxation.found.clear()
            value = self.value()
            relaxation.target = np.inf if value is None else value * scale
            yield

    def level(self) -> float:
        return self._better().best / self.flat.scale

    def margins(self) -> MinMarginals:
        relaxation = self._better()
        spent = relaxation.work
        base, extra = relaxation.margins()
        self.clock.spend(relaxation.work - spent)
        rows = np.split(extra / self.flat.scale, self.flat.graph.off[1:-1].tolist()) if self.flat.size else []
        return MinMarginals(base / self.flat.scale, rows)

    def split(self, prices: Mapping[int, float]) -> Parts:
        if self.probe is None:
            self.probe = Relaxation(self.flat, {}, self.relaxation.rng)
        spent = self.probe.work
        parts = self.probe.split(prices, self.clock.over)
        self.clock.spend(self.probe.work - spent)
        return parts

    def prices(self) -> dict[int, float]:
        return self._better().prices()

    def _better(self) -> Relaxation:
        return self.relaxation if self.given is None or self.relaxation.best >= self.given.best else self.given
