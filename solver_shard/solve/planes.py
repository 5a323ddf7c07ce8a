"""Cutting planes on the bound as a function of the multipliers (Kelley 1960).

    planes.add(assignment, prices)
    bound, prices = planes.best(incumbent)      # what the planes allow at best, and where

Every allowed assignment is one: at multipliers l the bound is at most its cost plus, over all times, l_t (bytes at t - limit). The best
multipliers for all planes so far, or half way between those and the best ones known, are tried next.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from ortools.linear_solver import pywraplp

from solver_shard.choice.graph import Ints
from solver_shard.solve.problem import Problem
from solver_shard.solve.solution import MIB

TIE = 1e-7
"""Part of the price of the whole limit by which smaller multipliers are preferred."""


class Planes:
    """The bound is at most cost + sum over times of multiplier x (bytes - limit), for every assignment known."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
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

    def best(self, most: float, near: Mapping[int, float], reach: float) -> tuple[float, dict[int, float]] | None:
        """(The bound, the multipliers) that the planes allow at best.

        Args:
            most: what the bound is at most: the cost of an incumbent.
            near: multipliers to which positive ones stay near: few planes say little of what is far.
            reach: the factor within which they stay.
        """
        solver = pywraplp.Solver.CreateSolver("GLOP")
        infinity, unit = solver.infinity(), max(abs(most), 1.0) / 1e4
        scale = MIB / unit
        labels = self.problem.times[self.times].tolist()
        known = [near.get(t, 0.0) * scale for t in labels]
        multipliers = [solver.NumVar(k / reach, k * reach if k > 0 else infinity, "") for k in known]
        bound = solver.NumVar(-infinity, most / unit, "")
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
            objective.SetCoefficient(multiplier, -TIE * max(limit, 1) / MIB)
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            return None
        prices = {t: m.solution_value() / scale for t, m in zip(labels, multipliers, strict=True)}
        return bound.solution_value() * unit, {t: p for t, p in prices.items() if p > 0}


def between(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """Multipliers half way between two."""
    return {t: (one.get(t, 0.0) + other.get(t, 0.0)) / 2 for t in sorted({*one, *other})}
