"""Exact bounds by elimination, and the multipliers that are best for them.

    sharp = sharpen(problem, bounding, margins, value=incumbent, gap=1e-4, clock=clock)

For multipliers of the memory rows, elimination finds the least priced cost exactly, and an assignment that has it. Each of those is a
cutting plane on the bound as a function of the multipliers (Kelley 1960), and the best multipliers for all planes so far, or half way
between those and the best ones known, are tried next. Message passing needs many more steps for that, and may end far below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from ortools.linear_solver import pywraplp

from solver_shard.choice.graph import Ints
from solver_shard.solve.bounding import Bounding
from solver_shard.solve.clock import Clock
from solver_shard.solve.elimination import Exact, TooWide, eliminate
from solver_shard.solve.messages import Parts
from solver_shard.solve.problem import Problem
from solver_shard.solve.prove import Margins
from solver_shard.solve.solution import MIB

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


def sharpen(problem: Problem, bounding: Bounding, margins: Margins, *, value: int, gap: float, clock: Clock) -> Sharp:
    """Better margins, exact ones where the problem is narrow enough.

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
        self.planes = _Planes(problem, value)
        self.window = FIRST

    def run(self, small: float) -> Sharp:
        """Try multipliers until the problem can be shrunk, nothing more is promised, or the bound is so near the incumbent."""
        prices, best, whole = self.prices, -np.inf, self.problem.weight or self.problem.limit is None
        for step in range(STEPS):
            parts = self.bounding.split(prices)
            exact = self._least(parts)
            if exact is None and step == 0:
                break
            if exact is None:
                prices = _between(self.prices, prices)
                continue
            if exact.assignment is None:
                break
            bound = (parts.constant + exact.least) / self.bounding.scale
            if bound > best:
                best, self.prices = bound, prices
            if whole or self._room() <= small or self.clock.over():
                break
            self.planes.add(exact.assignment, prices)
            answer = self.planes.best()
            if answer is None or answer[0] - best <= SMALL * self._room():
                break
            prices = answer[1] if step < WHOLE_STEPS else _between(self.prices, answer[1])
        if self._room() > small and not self.clock.over() and best > -np.inf:
            self._eliminate(self.bounding.split(self.prices), 1.0)
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

    def _eliminate(self, parts: Parts, share: float) -> Exact | None:
        """Use what elimination below this part of the distance to the incumbent says; None where that is too wide."""
        scale = self.bounding.scale
        room = self.value * scale - parts.constant
        if room <= 0:
            self.base = float(self.value)
            return None
        try:
            exact = eliminate(self.problem, parts, max(1.0, np.ceil(share * room)))
        except TooWide as wide:
            self.clock.spend(wide.work)
            return None
        self.clock.spend(exact.work)
        self.base = max(self.base, (parts.constant + exact.least) / scale)
        for low, row in zip(self.lows, exact.extra, strict=True):
            np.maximum(low, (parts.constant + row) / scale, out=low)
        if exact.assignment is not None:
            self.found.append(exact.assignment)
        return exact


class _Planes:
    """The bound is at most cost + sum over times of multiplier x (bytes - limit), for every assignment known."""

    def __init__(self, problem: Problem, value: int) -> None:
        self.problem, self.value = problem, value
        self.times: list[int] = []
        self.planes: list[tuple[int, Ints]] = []

    def add(self, assignment: Ints, prices: Mapping[int, float]) -> None:
        """The plane of an assignment; its fullest time may get a multiplier, as may those that have one."""
        profile = self.problem.profile(assignment)
        self.planes.append((self.problem.cost(assignment), profile))
        labels = self.problem.times
        wanted = [t for t in np.searchsorted(labels, sorted(prices)).tolist() if t < len(labels)]
        if self.problem.limit is not None and profile.max(initial=0) > self.problem.limit:
            wanted.append(int(profile.argmax()))
        self.times += [t for t in dict.fromkeys(wanted) if t not in self.times]

    def best(self) -> tuple[float, dict[int, float]] | None:
        """(The bound, the multipliers) that the planes allow at best; a bound above the incumbent is of no use."""
        solver = pywraplp.Solver.CreateSolver("GLOP")
        infinity, unit = solver.infinity(), max(abs(self.value), 1) / 1e4
        multipliers = [solver.NumVar(0.0, infinity, "") for _ in self.times]
        bound = solver.NumVar(-infinity, self.value / unit, "")
        limit = self.problem.limit or 0
        for cost, profile in self.planes:
            row = solver.Constraint(-infinity, cost / unit)
            row.SetCoefficient(bound, 1.0)
            for multiplier, t in zip(multipliers, self.times, strict=True):
                row.SetCoefficient(multiplier, -(int(profile[t]) - limit) / MIB)
        objective = solver.Objective()
        objective.SetMaximization()
        objective.SetCoefficient(bound, 1.0)
        for multiplier in multipliers:  # of the best ones the least: beyond them lies nothing that is known
            objective.SetCoefficient(multiplier, -1e-6)
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            return None
        labels = self.problem.times
        prices = {int(labels[t]): m.solution_value() * unit / MIB for t, m in zip(self.times, multipliers, strict=True)}
        return bound.solution_value() * unit, {t: p for t, p in prices.items() if p > 0}


def _between(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    return {t: (one.get(t, 0.0) + other.get(t, 0.0)) / 2 for t in sorted({*one, *other})}
