"""The relaxation of a large problem: multipliers on the times that matter by subgradient steps, message passing for the rest.

    relaxation = Relaxation(flat, multipliers)
    for _ in relaxation.steps(): ...            # bound and assignments may have become better

Every step sweeps a few times at the present multipliers, decodes an assignment, adds rows where that exceeds the limit, and moves the
multipliers along the smoothed excess (Polyak's step towards a target a little above the best bound). Messages stay warm from step to
step. Every few steps the decoded assignment is repaired and improved to one within the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve import rounding
from solver_shard.solve.bounds import margins, parts
from solver_shard.solve.descent import Local
from solver_shard.solve.flat import Flat
from solver_shard.solve.lagrange import Rows
from solver_shard.solve.messages import Parts, scaled_constant
from solver_shard.solve.planes import Planes, between
from solver_shard.solve.problem import Floats
from solver_shard.solve.sweeps import Passing

SWEEPS = 3
"""Sweeps per step."""

SMOOTHING = 0.7
PATIENCE = 20
"""Steps without a better bound after which the step length shrinks by SHRINK."""

SHRINK = 0.7
LAST_LENGTH, AGAIN = 1e-3, 2
"""Step length at which the search for multipliers ends, and how often it begins anew."""

LEAST_SETTLING, MOST_SETTLING, SETTLED = 3 * SWEEPS, 100, 1e-6
"""Sweeps before margins are taken: until the bound is within this part of the best one."""

STILL = 5
"""Sweeps without a better bound after which messages are taken to have settled."""

MOST_PLANES, WHOLE_PLANES, STALE_PLANES, PLANE_SWEEPS, SETTLING_WORTH = 60, 3, 6, 30, 1e-4
"""Steps by cutting planes; of those, the first ones that go all the way; steps without a better bound that end them; sweeps of one."""

REACH = 4.0
"""Factor by which such a step changes a multiplier at most."""

REPAIR_EVERY = 5
HIGHEST = 1e30
"""Largest multiplier: sums of them stay finite."""

FAR = 0.2
"""Steps whose bound is this much below the best are not worth a repair."""


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

    def margins(self, sweeps: int = MOST_SETTLING, forests: int = 4) -> tuple[float, Floats]:
        """(base, extra per flat strategy), scaled: every solution with that strategy costs at least base + extra.

        The messages are those of the last multipliers that were tried; at most so many sweeps settle them at the best ones.
        """
        theta, offset = self.theta(), self.offset()
        for swept in range(1, sweeps + 1):
            bound = self.passing.sweep(theta) + offset
            if swept >= LEAST_SETTLING and bound >= self.best - SETTLED * abs(self.best):
                break
        base, extra = margins(self.passing, theta, forests=forests, rng=self.rng)
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
        while length > LAST_LENGTH or self._again():
            if length <= LAST_LENGTH:
                length, stale, multipliers, smooth = 1.0, 0, self.multipliers.copy(), None
            theta = self.theta(multipliers)
            bound = -np.inf
            for _ in range(SWEEPS):
                bound = max(bound, self.passing.sweep(theta))
            bound += self.offset(multipliers)
            chosen = self.passing.decode(theta)
            profile = self.flat.profile(chosen)
            self.work += (SWEEPS + 0.5) * self.passing.work + 1e-4 + 1e-8 * len(self.flat.bytes.starts)
            if profile.max(initial=0) <= self.flat.limit:
                self.found.append(chosen)
            if step % REPAIR_EVERY == 0 and bound > self.best - FAR * abs(self.best):
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
            smooth = excess if smooth is None else SMOOTHING * smooth + (1 - SMOOTHING) * excess
            if stale >= PATIENCE:
                length, stale, multipliers, smooth = length * SHRINK, 0, self.multipliers.copy(), excess
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
        planes, prices, stale = Planes(self.flat.problem), self.prices(), 0
        kept = self.passing.forward.copy(), self.passing.backward.copy()
        scale = self.flat.scale
        for step in range(MOST_PLANES):
            multipliers = self._vector(prices)
            theta, offset = self.theta(multipliers), self.offset(multipliers)
            bound = -np.inf
            for swept in range(1, PLANE_SWEEPS + 1):
                before, bound = bound, max(bound, self.passing.sweep(theta) + offset)
                if swept >= SWEEPS and bound - before <= 1e-5 * abs(bound):
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
            if stale >= STALE_PLANES:
                before = self.best
                self.passing.forward[:], self.passing.backward[:] = kept
                yield from self.settled()
                kept = self.passing.forward.copy(), self.passing.backward.copy()
                if self.best - before <= SETTLING_WORTH * abs(self.best):
                    break
                stale = 0
            answer = planes.best(most, near=self.prices(), reach=REACH)
            if answer is None or answer[0] * scale - self.best <= 1e-5 * abs(self.best):
                break
            prices = answer[1] if step < WHOLE_PLANES else between(self.prices(), answer[1])
        self.passing.forward[:], self.passing.backward[:] = kept

    def settled(self) -> Iterator[None]:
        """Sweeps until messages have settled at the given multipliers: what these are worth."""
        theta, offset, stale = self.theta(), self.offset(), 0
        for _ in range(MOST_SETTLING):
            bound = self.passing.sweep(theta) + offset
            self.work += self.passing.work
            stale = 0 if bound > self.best + SETTLED * abs(self.best) else stale + 1
            self.best = max(self.best, bound)
            yield
            if stale >= STILL:
                return

    def _again(self) -> bool:
        """Whether steps that ended below a bound that is known begin anew, from no messages: theirs can be stuck; AGAIN times at most."""
        self.restarts += 1
        if self.restarts > AGAIN or self.best >= self.known - SETTLED * abs(self.known):
            return False
        self.passing.forward[:] = 0.0
        self.passing.backward[:] = 0.0
        return True

    def _sweeps(self) -> Iterator[None]:
        stale, theta, slow = 0, self.theta(), rounding.FIRST_SLOW
        for step in range(200):
            before, bound = self.best, -np.inf
            for _ in range(SWEEPS):
                bound = max(bound, self.passing.sweep(theta))
            self.best = max(self.best, bound + self.offset())
            self.work += (SWEEPS + 0.5) * self.passing.work
            if step % REPAIR_EVERY == 0:
                self._repair(self.passing.decode(theta), theta)
            if self.best - before <= slow * abs(self.best):
                if self.target - self.best > rounding.FAR * slow * abs(self.best):
                    self._round(theta)
                slow *= rounding.SLOWER
            yield
            stale = stale + 1 if self.best - before <= 1e-6 * abs(self.best) else 0
            if stale >= 10:
                return

    def _round(self, theta: Floats) -> None:
        """An assignment that the bound is made of, where that is tight; see rounding.py."""
        split = parts(self.passing, theta)
        self.work += 1e-4 * self.flat.size
        for slack in rounding.SLACKS:
            chosen = rounding.consistent(self.flat.problem.edges, split.unary, split.tables, slack * abs(self.best))
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
