"""Two ways to bound a problem and to price its memory, behind one face: exact small tables, or flat arrays for large ones.

Small problems and those whose objective has the peak in it are priced by a linear program over decoded assignments (lagrangian.py), with
numpy alone, and so are those of medium size without memory. Large ones are relaxed on flat arrays by compiled loops
(subgradient.py), with rows for the few times that matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Protocol

import numpy as np

from solver_shard.graph.choice_graph import Ints
from solver_shard.solve import parameters as tuned
from solver_shard.solve.bounds.elimination import Order, order_of
from solver_shard.solve.bounds.lagrangian import Column, ColumnGeneration, LagrangianDual
from solver_shard.solve.bounds.trws import Parts, min_marginals
from solver_shard.solve.integer_program import MinMarginals
from solver_shard.solve.limits import Clock
from solver_shard.solve.problem import Problem

MOST = 2.0**51
"""Unary costs of a small problem together up to which its messages are exact: the prices of memory have no end."""


Found = Callable[[int, Ints | None, str], None]
"""Called after every step with the bound and a decoded assignment, if any."""


def is_large(problem: Problem) -> bool:
    """Whether a problem is bounded on flat arrays."""
    if problem.weight or not problem.size:
        return False
    return (
        problem.pairs > (tuned.LARGE_CELLS if len(problem.base) else tuned.LARGE_FREE_CELLS)
        or len(problem.base) * problem.width > tuned.LARGE_COUNTS
    )


class Bounding(Protocol):
    """Steps towards a good bound.

    Attributes:
        problem: that is bounded.
        scale: by which costs are multiplied in parts.
    """

    problem: Problem
    scale: float

    @cached_property
    def order(self) -> Order | None:
        """In which order the problem's nodes can be eliminated; None where it is too wide for that."""
        return order_of(self.problem)

    def steps(self) -> Iterator[None]:
        """All steps, one at a time; what they find goes to ``found``."""

    def level(self) -> float:
        """The best bound so far, in units of the objective."""

    def margins(self) -> MinMarginals:
        """How much every strategy costs at least."""

    def split(self, prices: Mapping[int, float]) -> Parts:
        """The problem at these multipliers (cost per byte by time label) as parts that are never negative, scaled.

        The constant is -2**60 or less where prices are so high that sums would not be exact: then it is not the constant of these parts.
        """

    def prices(self) -> dict[int, float]:
        """The best multipliers: cost per byte by time label."""


class SmallBounding(Bounding):
    """See ``Bounding``; by ``lagrangian.ColumnGeneration``."""

    def __init__(
        self,
        problem: Problem,
        clock: Clock,
        *,
        gap: float,
        found: Found,
        value: Callable[[], int | None],
        prices: Mapping[int, float],
        least_peak: int,
        rng: np.random.Generator,
    ) -> None:
        self.problem, self.clock, self.rng = problem, clock, rng

        def report(dual: LagrangianDual, column: Column | None, source: str) -> None:
            found(dual.bound, None if column is None else column.assignment, source)

        start = np.array([prices.get(t, 0.0) for t in problem.times.tolist()])
        self.generation = ColumnGeneration(problem, clock, gap=gap, found=report, value=value, start=start, least_peak=least_peak)
        self.scale = self.generation.dual.scale

    def steps(self) -> Iterator[None]:
        return self.generation.steps()

    def level(self) -> float:
        return self.generation.dual.best / self.generation.dual.scale

    def margins(self) -> MinMarginals:
        dual = self.generation.dual
        parts = dual.parts()
        least = min_marginals(dual.messages, parts, 4, self.rng)
        self.clock.spend(dual.messages.work * 10)
        return MinMarginals((parts.constant + dual.offset(dual.multipliers)) / dual.scale, [row / dual.scale for row in least])

    def split(self, prices: Mapping[int, float]) -> Parts:
        dual, messages = self.generation.dual, self.generation.dual.messages
        multipliers = np.array([prices.get(t, 0.0) for t in self.problem.times.tolist()]) * dual.scale
        theta = dual.price(multipliers)
        if sum(float(row[np.isfinite(row)].max(initial=0)) for row in theta) > MOST:
            return Parts(-np.inf, theta, messages.cores)
        for _ in range(tuned.SPLIT_SWEEPS):
            messages.sweep(theta)
            self.clock.spend(messages.work)
            if self.clock.over():
                break
        parts = messages.reparametrise(theta)
        return Parts(parts.constant + dual.offset(multipliers), parts.unary, parts.tables)

    def prices(self) -> dict[int, float]:
        dual = self.generation.dual
        return dict(zip(self.problem.times.tolist(), (dual.multipliers / dual.scale).tolist(), strict=True))
