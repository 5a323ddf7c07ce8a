"""Exact bounds by elimination, and the multipliers that are best for them.

    sharp = sharpen(problem, bounding, margins, value=incumbent, gap=1e-4, clock=clock)

For multipliers of the memory rows, elimination finds the least priced cost exactly, and an assignment that has it: a cutting plane
(planes.py). Message passing needs more steps for good multipliers, and its bound may end far below.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve.bounding import Bounding
from solver_shard.solve.clock import Clock
from solver_shard.solve.elimination import MOST_ROWS, Exact, TooWide, eliminate
from solver_shard.solve.messages import Parts
from solver_shard.solve.planes import Planes, between
from solver_shard.solve.problem import Problem
from solver_shard.solve.prove import Margins

STEPS = 12
"""Multipliers that are tried at most."""

WHOLE_STEPS = 3
"""Of those, the first ones that go all the way to what the planes say is best."""

FIRST, LARGER = 1 / 16, 2.0
"""Part of the distance to the incumbent below which the least priced cost is looked for first, and by what that grows."""

WORTH, SMALL = 0.6, 0.05
"""Part of the strategies that may be left for a problem to be shrunk at once, and of the distance to the incumbent that a step must promise."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sharp:
    """What was found.

    Attributes:
        margins: the largest bounds that any multipliers gave.
        prices: the best multipliers, cost per byte by time label.
        assignments: those of least priced cost, which may be above the limit.
    """

    margins: Margins
    prices: dict[int, float]
    assignments: list[Ints]


def sharpen(problem: Problem, bounding: Bounding, margins: Margins, *, value: int, gap: float, clock: Clock) -> Sharp | None:
    """Better margins, exact ones where the problem is narrow enough; None where it is too wide for any.

    Args:
        problem: that of ``bounding``.
        bounding: with good multipliers.
        margins: what is known; nothing of it is lost.
        value: objective of an incumbent; only what costs less is looked for.
        gap: relative gap to the incumbent that is enough.
        clock: limits.
    """
    return _Sharpening(problem, bounding, margins, value, clock).run(gap * abs(value))


class _Sharpening:
    """One run.

    Attributes:
        base, lows: the bound, and that of each strategy, in units of the objective.
        prices: the best multipliers.
        found: assignments of least priced cost.
    """

    def __init__(self, problem: Problem, bounding: Bounding, margins: Margins, value: int, clock: Clock) -> None:
        self.problem, self.bounding, self.value, self.clock = problem, bounding, value, clock
        self.base, self.lows = margins.base, [margins.base + row for row in margins.extra]
        self.prices = bounding.prices()
        self.found: list[Ints] = []
        self.planes = Planes(problem)
        self.window = FIRST
        self.tried: list[tuple[float, int]] = []

    def run(self, small: float) -> Sharp | None:
        """Try multipliers until the problem can be shrunk, nothing more is promised, or the bound is so near the incumbent."""
        prices, best, whole = self.prices, -np.inf, self.problem.weight or self.problem.limit is None
        for step in range(STEPS):
            parts = self.bounding.split(prices)
            exact = self._least(parts)
            if exact is None and step == 0:
                return None if not self.tried else self._sharp()
            if exact is None:
                prices = between(self.prices, prices)
                continue
            if exact.assignment is None:
                break
            bound = (parts.constant + exact.least) / self.bounding.scale
            if bound > best:
                best, self.prices = bound, prices
            if whole or self._room() <= small or self.clock.over():
                break
            self.planes.add(exact.assignment, prices)
            answer = self.planes.best(self.value)
            if answer is None or answer[0] - best <= SMALL * self._room():
                break
            prices = answer[1] if step < WHOLE_STEPS else between(self.prices, answer[1])
        if self._room() > small and not self.clock.over() and best > -np.inf:
            self._eliminate(self.bounding.split(self.prices), 1.0)
        return self._sharp()

    def _sharp(self) -> Sharp:
        margins = Margins(self.base, [np.maximum(row - self.base, 0.0) for row in self.lows])
        return Sharp(margins=margins, prices=self.prices, assignments=self.found)

    def _room(self) -> float:
        return self.value - self.base

    def _least(self, parts: Parts) -> Exact | None:
        """The least priced cost, looked for below ever larger parts of the distance to the incumbent; None where that is too wide."""
        while True:
            exact = self._eliminate(parts, min(1.0, self.window))
            if exact is None or exact.assignment is not None or self.window >= 1.0:
                return exact
            self.window *= LARGER

    def _expected(self, share: float) -> float:
        """Rows that this part of the distance would take, if they went on growing as between the last two parts that were tried."""
        if len(self.tried) < 2 or self.tried[-1][0] <= self.tried[-2][0] or share <= self.tried[-1][0]:
            return 0.0
        (less, few), (more, many) = self.tried[-2:]
        return many * (share / more) ** (np.log(many / few) / np.log(more / less))

    def _eliminate(self, parts: Parts, share: float) -> Exact | None:
        """Use what elimination below this part of the distance to the incumbent says; None where that is too wide."""
        scale = self.bounding.scale
        room = self.value * scale - parts.constant
        if room <= 0:
            self.base = float(self.value)
            return None
        if self._expected(share) > MOST_ROWS:
            return None
        try:
            exact = eliminate(self.problem, parts, max(1.0, np.ceil(share * room)))
        except TooWide as wide:
            self.clock.spend(wide.work)
            return None
        self.clock.spend(exact.work)
        self.tried.append((share, exact.rows))
        self.base = max(self.base, (parts.constant + exact.least) / scale)
        for low, row in zip(self.lows, exact.extra, strict=True):
            np.maximum(low, (parts.constant + row) / scale, out=low)
        if exact.assignment is not None:
            self.found.append(exact.assignment)
        return exact
