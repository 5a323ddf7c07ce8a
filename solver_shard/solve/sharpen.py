"""Exact bounds by elimination, and the multipliers that are best for them.

    sharp = sharpen(problem, bounding, value=incumbent, gap=1e-4, clock=clock)        # None where elimination takes too many rows

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
from solver_shard.solve.elimination import eliminate
from solver_shard.solve.problem import Problem
from solver_shard.solve.prove import Margins
from solver_shard.solve.solution import MIB

STEPS = 12
"""Multipliers that are tried at most."""

WHOLE_STEPS = 3
"""Of those, the first ones that go all the way to what the planes say is best."""

WORTH, SMALL = 0.6, 0.05
"""Part of the strategies that may be left for a problem to be shrunk at once, and of the distance to the incumbent that a step must promise."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sharp:
    """What was found.

    Attributes:
        margins: at the best multipliers, exact.
        prices: these multipliers, cost per byte by time label.
        assignments: those of least priced cost, which may be above the limit.
        exhausted: there is no solution below the incumbent.
    """

    margins: Margins
    prices: dict[int, float]
    assignments: list[Ints]
    exhausted: bool = False


def sharpen(problem: Problem, bounding: Bounding, *, value: int, gap: float, clock: Clock) -> Sharp | None:
    """Exact margins at good multipliers.

    Args:
        problem: that of ``bounding``.
        bounding: with good multipliers.
        value: objective of an incumbent; only what costs less is looked for.
        gap: relative gap to the incumbent that is enough.
        clock: limits.
    """
    scale, planes, prices = bounding.scale, _Planes(problem, value), bounding.prices()
    best: Sharp | None = None
    for step in range(STEPS):
        parts = bounding.split(prices)
        room = value * scale - parts.constant
        if room <= 0:
            return Sharp(margins=_nothing(problem, value), prices=prices, assignments=[], exhausted=True)
        exact, work = eliminate(problem, parts, room)
        clock.spend(work)
        if exact is None:
            return best
        if exact.assignment is None:
            return Sharp(margins=_nothing(problem, value), prices=prices, assignments=[], exhausted=True)
        base = (parts.constant + exact.least) / scale
        assignments = [exact.assignment] if best is None else [*best.assignments, exact.assignment]
        if best is None or base > best.margins.base:
            margins = Margins(base, [(row - exact.least) / scale for row in exact.extra])
            best = Sharp(margins=margins, prices=prices, assignments=assignments)
        else:
            best = Sharp(margins=best.margins, prices=best.prices, assignments=assignments)
        room = value - best.margins.base
        left = sum(int((row < room).sum()) for row in best.margins.extra)
        if left < WORTH * problem.offsets[-1] or room <= gap * abs(value) or problem.weight or problem.limit is None or clock.over():
            return best
        planes.add(exact.assignment, prices)
        found = planes.best()
        if found is None or found[0] - best.margins.base <= SMALL * room:
            return best
        prices = found[1] if step < WHOLE_STEPS else _between(best.prices, found[1])
    return best


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
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            return None
        labels = self.problem.times
        prices = {int(labels[t]): m.solution_value() * unit / MIB for t, m in zip(self.times, multipliers, strict=True)}
        return bound.solution_value() * unit, {t: p for t, p in prices.items() if p > 0}


def _between(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    return {t: (one.get(t, 0.0) + other.get(t, 0.0)) / 2 for t in sorted({*one, *other})}


def _nothing(problem: Problem, value: int) -> Margins:
    return Margins(float(value), [np.zeros(int(k)) for k in problem.sizes])
