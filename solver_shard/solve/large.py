"""Bounding of a large problem on flat arrays: see ``bounding.Bounding``. Imports the compiled loops, so it is imported where needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from solver_shard.solve.bounding import Bounding, Found
from solver_shard.solve.clock import Clock
from solver_shard.solve.flat import Flat
from solver_shard.solve.messages import Parts, scale_of
from solver_shard.solve.problem import Problem
from solver_shard.solve.prove import Margins
from solver_shard.solve.relax import SETTLED, Relaxation

FEW = 3
"""Times with multipliers up to which cutting planes find good ones by themselves, where exact bounds follow (sharpen.py)."""


class LargeBounding(Bounding):
    """See ``Bounding``; by relax.py.

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
                if self.given.best / self.scale >= self.reached - SETTLED * abs(self.reached):
                    return
        if narrow:
            yield from self._told(self.relaxation, self.relaxation.planes())
            if 0 < len(self.relaxation.prices()) <= FEW and self.value() is not None:
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

    def margins(self) -> Margins:
        relaxation = self._better()
        spent = relaxation.work
        base, extra = relaxation.margins()
        self.clock.spend(relaxation.work - spent)
        rows = np.split(extra / self.flat.scale, self.flat.graph.off[1:-1].tolist()) if self.flat.size else []
        return Margins(base / self.flat.scale, rows)

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
