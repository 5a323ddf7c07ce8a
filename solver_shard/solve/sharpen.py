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
from solver_shard.solve.elimination import TooWide, eliminate, order_of
from solver_shard.solve.messages import Parts
from solver_shard.solve.planes import Planes, between
from solver_shard.solve.problem import Problem
from solver_shard.solve.prove import Margins

STEPS = 12
"""Multipliers that are tried at most."""

WHOLE_STEPS = 3
"""Of those, the first ones that go all the way to what the planes say is best."""

SMALL, WORTH = 0.05, 0.7
"""Part of the distance to the incumbent that a step must promise; part of the strategies that may be left for a problem to be shrunk at once."""


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
        self.order = order_of(problem)

    def run(self, small: float) -> Sharp | None:
        """Try multipliers until nothing more is promised, or the bound is so near the incumbent."""
        prices, best, single = self.prices, -np.inf, self.problem.weight or self.problem.limit is None
        for step in range(STEPS):
            bound, assignment = self._eliminate(self.bounding.split(prices))
            if assignment is None and step == 0:
                return self._sharp() if bound > -np.inf else None
            if bound > best:
                best, self.prices = bound, prices
            if single or self._room() <= small or self._left() < WORTH or self.clock.over():
                break
            if assignment is not None:
                self.planes.add(assignment, prices)
            answer = self.planes.best(self.value, near=self.prices)
            if answer is None or answer[0] - best <= SMALL * self._room():
                break
            prices = answer[1] if step < WHOLE_STEPS and assignment is not None else between(self.prices, answer[1])
        return self._sharp()

    def _sharp(self) -> Sharp:
        margins = Margins(self.base, [np.maximum(row - self.base, 0.0) for row in self.lows])
        return Sharp(margins=margins, prices=self.prices, assignments=self.found)

    def _room(self) -> float:
        return self.value - self.base

    def _left(self) -> float:
        """Part of the strategies that may be part of a better solution."""
        return sum(int((low < self.value).sum()) for low in self.lows) / max(1, int(self.problem.offsets[-1]))

    def _eliminate(self, parts: Parts) -> tuple[float, Ints | None]:
        """Use what elimination says; (the bound, -inf where there is none, an assignment of least priced cost, if there is one below)."""
        scale = self.bounding.scale
        room = self.value * scale - parts.constant
        if room <= 0:
            self.base = float(self.value)
            return self.base, None
        try:
            exact = eliminate(self.problem, parts, room, self.order)
        except TooWide as wide:
            self.clock.spend(wide.work)
            self.base = max(self.base, (parts.constant + wide.least) / scale)
            return -np.inf, None
        self.clock.spend(exact.work)
        bound = (parts.constant + exact.least) / scale
        self.base = max(self.base, bound)
        for low, row in zip(self.lows, exact.extra, strict=True):
            np.maximum(low, (parts.constant + row) / scale, out=low)
        if exact.assignment is not None:
            self.found.append(exact.assignment)
        return bound, exact.assignment
