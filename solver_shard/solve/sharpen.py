"""Exact bounds by elimination, and the multipliers that are best for them.

    sharpening = Sharpening(problem, bounding, margins, clock)
    while not sharpening.finished:
        sharpening.step(incumbent, small)
    sharpening.margins, sharpening.prices, sharpening.found

For multipliers of the memory rows, elimination finds the least priced cost exactly, and an assignment that has it: a cutting plane
(planes.py). Message passing needs more steps for good multipliers, and its bound may end far below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve.bounding import Bounding
from solver_shard.solve.clock import Clock
from solver_shard.solve.elimination import EXACT, TooWide, eliminate
from solver_shard.solve.messages import Parts
from solver_shard.solve.planes import Planes, between
from solver_shard.solve.problem import Floats, Problem
from solver_shard.solve.prove import Margins

STEPS = 12
"""Multipliers that are tried at most."""

WHOLE_STEPS = 3
"""Of those, the first ones that go all the way to what the planes say is best."""

REACH = 1.5
"""Factor by which a step changes a multiplier at most."""

SMALL = 0.05
"""Part of the distance to the incumbent that a step must promise."""


class Sharpening:
    """Exact margins of one problem, step by step.

    Attributes:
        margins: the largest bounds that any multipliers gave; none of those given at the start is lost.
        prices: the best multipliers, cost per byte by time label.
        found: assignments of least priced cost, which may be above the limit, since this was last emptied.
        finished: no further step is worth its work, unless the incumbent comes much nearer.
        wide: the problem is too wide for any.
    """

    def __init__(self, problem: Problem, bounding: Bounding, margins: Margins, clock: Clock) -> None:
        """``bounding``: of the problem, with good multipliers; ``clock``: work is added to it."""
        self.problem, self.bounding, self.margins, self.clock = problem, bounding, margins, clock
        self.prices = self.next = bounding.prices()
        self.best = -np.inf
        self.found: list[Ints] = []
        self.steps = 0
        self.planes = Planes(problem)
        self.order = bounding.order
        self.finished = self.wide = self.order is None

    def again(self) -> None:
        """The incumbent came much nearer: the best multipliers are worth another look."""
        self.finished, self.next = self.wide, self.prices

    def step(self, value: int, small: float) -> None:
        """One elimination.

        Args:
            value: objective of an incumbent; only what costs less is looked for.
            small: distance of the bound to it that is near enough.
        """
        bound, assignment = self._eliminate(self.bounding.split(self.next), value)
        self.wide = self.steps == 0 and bound == -np.inf
        self.steps += 1
        if bound > self.best:
            self.best, self.prices = bound, self.next
        if assignment is not None:
            self.found.append(assignment)
            self.planes.add(assignment, self.next)
        room = value - self.margins.base
        single = self.problem.weight or self.problem.limit is None
        self.finished = bool(single) or bound == -np.inf or self.steps >= STEPS or room <= small
        if self.finished:
            return
        answer = self.planes.best(value, near=self.prices, reach=REACH)
        if answer is None or answer[0] - self.best <= SMALL * room:
            self.finished = True
            return
        self.next = answer[1] if self.steps <= WHOLE_STEPS and assignment is not None else between(self.prices, answer[1])

    def _eliminate(self, parts: Parts, value: int) -> tuple[float, Ints | None]:
        """(The bound, -inf where there is none, and an assignment of least priced cost, if there is one below the value)."""
        scale = self.bounding.scale
        most = EXACT - abs(parts.constant)
        if (
            self.order is None or most <= 0 or not all((row >= 0).all() for row in (*parts.unary, *parts.tables))
        ):  # sums were not exact: that says nothing
            return -np.inf, None
        room = min(_whole(value, scale) - parts.constant, most)
        if room <= 0:
            self._take(parts.constant / scale, None)
            return parts.constant / scale, None
        try:
            exact = eliminate(self.problem, parts, room, self.order, over=self.clock.over)
        except TooWide as wide:
            self.clock.spend(wide.work)
            self._take((parts.constant + wide.least) / scale, None)
            return -np.inf, None
        self.clock.spend(exact.work)
        bound = (parts.constant + exact.least) / scale
        self._take(bound, [(parts.constant + row) / scale for row in exact.extra])
        return bound, exact.assignment

    def _take(self, bound: float, lows: Sequence[Floats] | None) -> None:
        """Bounds, of all assignments and of those with each strategy, that are better than what is known."""
        base = max(self.margins.base, bound)
        known = [self.margins.base + row for row in self.margins.extra]
        best = known if lows is None else [np.maximum(old, new) for old, new in zip(known, lows, strict=True)]
        self.margins = Margins(base, [np.maximum(row - base, 0.0) for row in best])


def _whole(value: int, scale: float) -> int:
    """A value times a power of two, rounded up: what reaches it costs at least the value."""
    shift = -round(math.log2(scale))
    return -(-value >> shift) if shift > 0 else value << -shift
