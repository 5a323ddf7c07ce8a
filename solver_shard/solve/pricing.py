"""Steps towards a good bound: message passing, then multipliers on the times that bind.

    for _ in Pricing(problem, ...).steps():
        ...     # the bound or the assignments may have become better; stop whenever that is enough

1. *sweeps* at the multipliers of the start until the bound hardly moves;
2. *weights*, where the peak is the objective or no assignment within the limit is known: multipliers of a fixed sum that follow
   the use of memory (multiplicative weights). They come close to the best multipliers of a least peak within some dozen steps, and
   what they decode uses little memory;
3. *boxes*: multipliers from the linear program over all decoded assignments (dual.Master) within a box around the best ones. The
   box grows when the program's promise is kept and shrinks when it was far off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from solver_shard.solve.clock import Clock
from solver_shard.solve.dual import Column, Dual, Master
from solver_shard.solve.problem import Floats, Problem
from solver_shard.solve.rounding import FAR, FIRST_SLOW, SLACKS, SLOWER

Found = Callable[[Dual, Column | None, str], None]
"""Called after every step with the decoded assignment, if any."""


WINDOW = 15
"""Steps within which the bound must rise by a twentieth of the distance to the incumbent."""


class Pricing:
    """The steps on one problem.

    Attributes:
        dual: bound, multipliers and columns so far.
        done: whether all steps ran.
    """

    def __init__(
        self, problem: Problem, clock: Clock, *, gap: float, found: Found, value: Callable[[], int | None], start: Floats, least_peak: int
    ) -> None:
        self.problem, self.clock, self.gap, self.found, self.value = problem, clock, gap, found, value
        self.dual = Dual(problem, least_peak=least_peak)
        self.start = start * self.dual.scale
        self.done = False

    def room(self) -> float:
        """Scaled distance of the incumbent to the bound; infinite without one."""
        value = self.value()
        return np.inf if value is None else value * self.dual.scale - self.dual.best

    def steps(self) -> Iterator[None]:
        """All steps, one at a time."""
        yield from self._sweeps()
        if len(self.problem.base):
            if self.problem.weight and not self.start.any():
                yield from self._weights(self.dual.weight, 100)
            elif self.value() is None:
                yield from self._weights(4.0 * max(abs(self.dual.best), 1.0) / max(self.dual.high, 1), 40)
            yield from self._boxes()
        self.done = True

    def _evaluate(self, multipliers: Floats, sweeps: int, source: str, *, careful: bool = True) -> tuple[float, Column | None]:
        dual = self.dual
        spent = dual.work
        bound, theta = dual.evaluate(multipliers, sweeps, self.clock.over)
        column = dual.decode(theta, careful=careful)
        self.clock.spend(dual.work - spent + 1e-3)
        self.found(dual, column, source)
        return bound, column

    def _sweeps(self) -> Iterator[None]:
        stale, slow = 0, FIRST_SLOW
        limited = bool(len(self.problem.base))
        for step in range(5 if limited else 80):
            before = self.dual.best
            self._evaluate(self.start, 5, "messages", careful=limited or step > 0)
            if not limited and self.dual.best - before <= slow * abs(self.dual.best):
                if self.room() > FAR * slow * abs(self.dual.best):
                    self.found(self.dual, self._tight(), "rounding")
                slow *= SLOWER
            yield
            room = self.room()
            # Without memory the bound is mostly tight in the end, and says more about an incumbent than that about the bound.
            small = 0.0 if not limited else 0.02 * room if np.isfinite(room) else 3e-4 * abs(self.dual.best)
            stale = stale + 1 if self.dual.best - before <= max(small, 1e-5 * abs(self.dual.best)) else 0
            if stale >= (1 if limited else 3):
                return

    def _tight(self) -> Column | None:
        """What the bound is made of, where that is tight; see rounding.py."""
        dual = self.dual
        theta = dual.price(self.start)
        for slack in SLACKS:
            self.clock.spend(2 * dual.messages.work)
            chosen = dual.messages.decode_tight(theta, slack * abs(dual.best))
            if chosen is not None:
                return dual.column(chosen)
        return None

    def _weights(self, total: float, steps: int) -> Iterator[None]:
        dual, limited = self.dual, not self.problem.weight
        multipliers = np.full(len(self.problem.base), total / len(self.problem.base))
        last = dual.best
        for step in range(1, steps + 1):
            _, column = self._evaluate(multipliers, 2, "weights")
            yield
            if limited and self.value() is not None:
                yield from self._lighter(multipliers)
                return
            if column is None:
                continue
            use = column.usage / max(float(column.usage.max()), 1.0)
            multipliers = multipliers * np.exp(2.0 * (use - 1.0)) + 1e-9 * total
            multipliers *= total * (1.0 + 0.1 * step * limited) / multipliers.sum()
            if step % 25 == 0 and not limited:
                if dual.best - last < 0.2 * self.room():
                    return
                last = dual.best

    def _lighter(self, multipliers: Floats) -> Iterator[None]:
        """Ever smaller multiples of multipliers that keep the limit, as long as that still happens now and then."""
        failed = 0
        for _ in range(10):
            multipliers = 0.5 * multipliers
            _, column = self._evaluate(multipliers, 2, "weights")
            yield
            failed = 0 if column is not None and self.problem.value(column.assignment) is not None else failed + 1
            if failed == 3:
                return

    def _boxes(self) -> Iterator[None]:
        dual = self.dual
        if not dual.columns:
            return
        if dual.multipliers.any():
            radius = 0.02 * float(dual.multipliers.max())
        elif self.problem.weight:
            radius = 0.3 * dual.weight
        else:
            radius = 0.01 * max(abs(dual.best), 1.0) / max(dual.high, 1)
        master = Master(dual)
        stale, rounds, mark = 0, 1, dual.best
        for step in range(1, 301):
            if step % WINDOW == 0:
                room = self.room()
                if dual.best - mark < (0.05 * room if np.isfinite(room) else 5e-4 * abs(dual.best)):
                    return
                mark = dual.best
            answer = master.solve(dual.multipliers, radius)
            if answer is None:
                return
            value, multipliers, edge = answer
            before = dual.best
            promised = value - before
            small = max(min(0.03 * self.room(), 2e-3 * abs(dual.best)), 0.2 * self.gap * abs(dual.best))
            if promised <= small and not edge:
                return
            reached = self._step(multipliers, before + 0.1 * promised, rounds)
            yield
            gain = dual.best - before
            if gain > 0.1 * promised:
                radius *= 4.0 if edge and gain > 0.5 * promised else 1.5
                rounds = 1
            else:
                radius *= 0.7 if reached < before - 0.5 * promised else 1.0
                rounds = min(4, rounds + 1)
            stale = stale + 1 if gain <= 0.1 * small else 0
            if stale >= 30:
                return

    def _step(self, multipliers: Floats, goal: float, rounds: int) -> float:
        """Sweeps at new multipliers until the bound reaches the goal, or a decoded assignment shows that it cannot; the bound there."""
        dual = self.dual
        ceiling, bound = np.inf, -np.inf
        for _ in range(rounds):
            last = bound
            found, column = self._evaluate(multipliers, 3, "multipliers")
            bound = max(bound, found)
            if column is not None:
                ceiling = min(ceiling, column.cost + float(multipliers @ (column.usage - self.problem.base)) + dual.offset(multipliers))
            if bound >= goal or ceiling < goal or bound - last < 0.1 * (goal - bound):
                break
        return bound
