"""Bounding of a large problem on flat arrays: see ``bounding.Bounding``. Imports the compiled loops, so it is imported where needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from solver_shard.solve.bounding import Found
from solver_shard.solve.clock import Clock
from solver_shard.solve.flat import Flat
from solver_shard.solve.messages import scale_of
from solver_shard.solve.problem import Problem
from solver_shard.solve.prove import Margins
from solver_shard.solve.relax import Relaxation


class LargeBounding:
    """See ``Bounding``; by relax.py."""

    def __init__(
        self,
        problem: Problem,
        clock: Clock,
        *,
        found: Found,
        value: Callable[[], int | None],
        prices: Mapping[int, float],
        known: int | None,
        rng: np.random.Generator,
    ) -> None:
        self.problem, self.clock, self.found, self.value = problem, clock, found, value
        self.flat = Flat.of(problem, scale_of(problem))
        self.relaxation = Relaxation(self.flat, prices, rng)
        if known is not None:
            self.relaxation.known = known * self.flat.scale

    def steps(self) -> Iterator[None]:
        relaxation, scale = self.relaxation, self.flat.scale
        spent = 0.0
        for _ in relaxation.steps():
            self.clock.spend(relaxation.work - spent)
            spent = relaxation.work
            bound = self.problem.whole(self.level()) if np.isfinite(relaxation.best) else 0
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
        return self.relaxation.best / self.flat.scale

    def margins(self) -> Margins:
        spent = self.relaxation.work
        base, extra = self.relaxation.margins()
        self.clock.spend(self.relaxation.work - spent)
        rows = np.split(extra / self.flat.scale, self.flat.graph.off[1:-1].tolist()) if self.flat.size else []
        return Margins(base / self.flat.scale, rows)

    def prices(self) -> dict[int, float]:
        return self.relaxation.prices()
