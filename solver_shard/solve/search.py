"""The search on one problem: bound, incumbent, fixing, and integer programs on what is left, until the gap is closed.

One round:

1. *dual*: message passing and, where memory binds, multipliers; every decoded assignment within the limit is an incumbent.
2. *fix*: strategies whose bound exceeds the incumbent go; if that is a good part, the problem is presolved again and the round
   starts over on the smaller one.
3. *kernel*: the strategies whose bound exceeds the dual bound by at most some delta, as an integer program. A solution of it is an
   incumbent. Whatever it proves, every other solution costs at least bound + delta: so the bound rises to the smaller
   of both. Delta starts small and grows until the gap is closed.

All bounds compose: removed strategies only occur in solutions that cost at least the cutoff they were removed with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve.clock import Clock
from solver_shard.solve.dual import Dual, Master
from solver_shard.solve.kernel import cells_of, solve_kernel
from solver_shard.solve.marginals import marginals
from solver_shard.solve.presolve import NoAssignment, presolve
from solver_shard.solve.problem import Bools, Floats, Problem

Report = Callable[[Ints | None, int | None, str], None]
"""Called with a better assignment of the search's problem, or a better bound, and what found it."""

FIRST_CELLS = 2500
"""Pairs in the first kernel; each next one has three times as many."""

SHRINK=0.5
PATIENCE = 3
"""Batches of sweeps without progress after which message passing stops."""


@dataclass
class Best:
    """What is known about a problem: the best assignment and its value, and a lower bound on every solution."""

    assignment: Ints | None = None
    value: int | None = None
    bound: int = -1

    def gap(self) -> float:
        if self.value is None:
            return float("inf")
        return max(0, self.value - self.bound) / max(1, abs(self.value))


class Search:
    """A search on a presolved problem.

    Attributes:
        best: what is known; an incumbent from elsewhere may be put in before ``run``.
        infeasible: proven that no assignment keeps the limit.
        enough: a value at which to stop.
        rescue: called once when the dual finds no assignment within the limit: the value of one, or None when there is none.
        multipliers: by time label, for the next problem.
    """

    def __init__(self, problem: Problem, clock: Clock, *, gap: float, seed: int, report: Report, least_peak: int = 0) -> None:
        self.problem, self.clock, self.gap, self.seed, self.report = problem, clock, gap, seed, report
        self.least_peak = least_peak
        self.best = Best()
        self.infeasible = False
        self.multipliers: dict[int, float] = {}
        self.enough: int | None = None
        self.rescue: Callable[[], int | None] | None = None
        self.rng = np.random.default_rng(seed)

    def closed(self) -> bool:
        if self.enough is not None and self.best.value is not None and self.best.value <= self.enough:
            return True
        return self.infeasible or (self.best.value is not None and self.best.gap() <= self.gap)

    def offer(self, assignment: Ints, source: str) -> bool:
        """Take an assignment as incumbent if it is within the limit and better."""
        value = self.problem.value(assignment)
        if value is None or (self.best.value is not None and value >= self.best.value):
            return False
        self.best.assignment, self.best.value = assignment, value
        self.report(assignment, None, source)
        return True

    def raise_bound(self, bound: int, source: str) -> None:
        if self.best.value is not None:
            bound = min(bound, self.best.value)
        if bound > self.best.bound:
            self.best.bound = bound
            self.report(None, bound, source)

    def run(self) -> None:
        """Search until the gap is closed or the clock says stop."""
        self.raise_bound(self.problem.constant, "presolve")
        if self.problem.size == 0:
            nothing = np.zeros(0, dtype=np.int64)
            value = self.problem.value(nothing)
            self.infeasible = value is None and self.best.value is None
            if value is not None:
                self.offer(nothing, "presolve")
                self.raise_bound(value, "presolve")
            return
        current, restore = self.problem, _same
        target = FIRST_CELLS
        while not self.closed() and not self.clock.over():
            dual = self._dual(current, restore)
            self._rescue()
            if self.closed() or self.clock.over():
                return
            parts = dual.parts()
            least = marginals(dual.messages, parts, 4, self.rng)
            self.clock.spend(dual.messages.work * 10)
            base = (parts.constant + dual.offset(dual.multipliers)) / dual.scale
            extra = [row / dual.scale for row in least]
            tried = None
            while True:
                if self.best.value is not None and self.best.value != tried:
                    tried = self.best.value
                    keep = [row < tried - base for row in extra]
                    if not all(mask.any() for mask in keep):
                        self.raise_bound(tried, "fixing")
                        return
                    if sum(int(mask.sum()) for mask in keep) < 0.7 * current.offsets[-1]:
                        break
                target = self._kernel(current, restore, dual, extra, base, target)
                if target < 0 or self.closed() or self.clock.over():
                    return
            try:
                current, restore = self._smaller(current, restore, keep, dual)
            except NoAssignment:
                self.raise_bound(tried, "fixing")
                return

    def _rescue(self) -> None:
        if self.best.value is None and self.rescue is not None and not self.clock.over():
            self.best.value = self.rescue()
            self.infeasible = self.best.value is None and not self.clock.over()
            self.rescue = None

    def _smaller(self, current: Problem, restore: Callable[[Ints], Ints], keep: list[Bools], dual: Dual) -> tuple[Problem, Callable[[Ints], Ints]]:
        self._remember(current, dual)
        smaller, undo = presolve(current, keep)
        self.clock.spend(1e-3 * current.size)
        return smaller, lambda x: restore(undo.restore(x))

    def _remember(self, current: Problem, dual: Dual) -> None:
        for t, value in zip(current.times.tolist(), (dual.multipliers / dual.scale).tolist(), strict=True):
            self.multipliers[t] = value

    def _dual(self, current: Problem, restore: Callable[[Ints], Ints]) -> Dual:
        """Bound and assignments by messages and multipliers."""
        dual = Dual(current, least_peak=self.least_peak)
        start = np.array([self.multipliers.get(t, 0.0) for t in current.times.tolist()]) * dual.scale
        self._sweeps(current, restore, dual, start)
        if len(current.base) and not self.closed():
            self._prices(current, restore, dual)
        self._remember(current, dual)
        return dual

    def _note(self, dual: Dual, assignment: Ints | None, restore: Callable[[Ints], Ints], source: str) -> None:
        self.raise_bound(dual.bound, source)
        if assignment is not None:
            self.offer(restore(assignment), source)

    def _sweeps(self, current: Problem, restore: Callable[[Ints], Ints], dual: Dual, multipliers: Floats) -> None:
        """Message passing at fixed multipliers until it hardly gains."""
        stale = 0
        for _ in range(60):
            before, spent = dual.best, dual.work
            _, theta = dual.evaluate(multipliers, 5)
            column = dual.decode(theta)
            self.clock.spend(dual.work - spent)
            self._note(dual, None if column is None else column.assignment, restore, "messages")
            if self.closed() or self.clock.over():
                return
            room = self.best.value * dual.scale - dual.best if self.best.value is not None else np.inf
            small = 0.02 * room if np.isfinite(room) else 3e-4 * abs(dual.best)
            stale = stale + 1 if dual.best - before <= max(small, 1e-5 * abs(dual.best)) else 0
            if stale >= PATIENCE:
                return

    def _prices(self, current: Problem, restore: Callable[[Ints], Ints], dual: Dual) -> None:
        """Multipliers by column generation in a box that moves with the best ones."""
        if current.weight and not dual.multipliers.any():
            self._weights(restore, dual, dual.weight, 100)
        elif self.best.value is None:
            self._weights(restore, dual, 4.0 * max(abs(dual.best), 1.0) / max(dual.high, 1), 40)
        if not dual.columns or self.closed() or self.clock.over():
            return
        if dual.multipliers.any():
            radius = 0.02 * float(dual.multipliers.max())
        elif current.weight:
            radius = 0.3 * dual.weight
        else:
            radius = 0.01 * max(abs(dual.best), 1.0) / max(dual.high, 1)
        master = Master(dual)
        stale, rounds = 0, 1
        for _ in range(200):
            if self.clock.over() or self.closed():
                return
            answer = master.solve(dual.multipliers, radius)
            if answer is None:
                return
            value, multipliers, edge = answer
            before = dual.best
            promised = value - before
            room = self.best.value * dual.scale - dual.best if self.best.value is not None else np.inf
            small = max(min(0.03 * room, 2e-3 * abs(dual.best)), 0.2 * self.gap * abs(dual.best))
            if promised <= small and not edge:
                return
            reached = self._step(restore, dual, multipliers, before + 0.1 * promised, rounds)
            gain = dual.best - before
            rounds = 1 if gain > 0.1 * promised else min(5, rounds + 1)
            if gain > 0.1 * promised:
                radius *= 4.0 if edge and gain > 0.5 * promised else 1.5
            elif reached < before - SHRINK * promised:
                radius *= 0.7
            stale = stale + 1 if gain <= 0.1 * small else 0
            if stale >= 30:
                return

    def _weights(self, restore: Callable[[Ints], Ints], dual: Dual, total: float, steps: int) -> None:
        """Multiplicative weights: multipliers of a fixed sum that follow the use of memory.

        Where the peak is the objective they come close to the best multipliers within some dozen steps; with a limit and a large sum,
        the decoded assignments use little memory, and the first one within the limit is all that is asked.
        """
        multipliers = np.full(len(dual.problem.base), total / len(dual.problem.base))
        limited = not dual.problem.weight
        last = dual.best
        for step in range(1, steps + 1):
            spent = dual.work
            _, theta = dual.evaluate(multipliers, 2)
            column = dual.decode(theta)
            self.clock.spend(dual.work - spent)
            self._note(dual, None if column is None else column.assignment, restore, "weights")
            if self.closed() or self.clock.over() or (limited and self.best.value is not None):
                return
            if column is None:
                continue
            use = column.usage / max(float(column.usage.max()), 1.0)
            multipliers = multipliers * np.exp(2.0 * (use - 1.0)) + 1e-9 * total
            multipliers *= total * (1.0 + 0.1 * step * limited) / multipliers.sum()
            if step % 25 == 0 and not limited:
                room = np.inf if self.best.value is None else self.best.value * dual.scale - dual.best
                if dual.best - last < 0.2 * room:
                    return
                last = dual.best

    def _step(self, restore: Callable[[Ints], Ints], dual: Dual, multipliers: Floats, goal: float, rounds: int) -> float:
        """Sweeps at new multipliers until the bound reaches the goal, or a decoded assignment shows that it cannot; the bound there."""
        ceiling, bound = np.inf, -np.inf
        for _ in range(rounds):
            spent, last = dual.work, dual.best
            found, theta = dual.evaluate(multipliers, 3)
            bound = max(bound, found)
            column = dual.decode(theta)
            self.clock.spend(dual.work - spent + 0.003)
            self._note(dual, None if column is None else column.assignment, restore, "multipliers")
            if column is not None:
                ceiling = min(ceiling, column.cost + float(multipliers @ (column.usage - dual.problem.base)) + dual.offset(multipliers))
            if bound >= goal or ceiling < goal or (dual.best > last and bound < goal and ceiling == np.inf):
                break
        return bound

    def _kernel(self, current: Problem, restore: Callable[[Ints], Ints], dual: Dual, extra: list[Floats], base: float, target: int) -> int:
        """One integer program; returns the size of the next, or -1 when nothing more can be done."""
        room = self.best.value - base if self.best.value is not None else np.inf
        delta = _delta(current, extra, target)
        whole = delta >= room or not np.isfinite(delta)
        delta = min(delta, room)
        keep = [(row < delta) | (row <= row.min()) for row in extra] if np.isfinite(delta) else [row >= 0 for row in extra]
        whole = whole or all(mask.all() for mask in keep)
        self._remember(current, dual)
        outside = base + delta  # every solution that uses another strategy costs at least that
        try:
            kernel, undo = presolve(current, keep)
            self.clock.spend(1e-3 * current.size)
        except NoAssignment:
            self._outside(outside, whole)
            return 3 * target
        inner = Dual(kernel, least_peak=self.least_peak)
        start = np.array([self.multipliers.get(t, 0.0) for t in kernel.times.tolist()]) * inner.scale
        for _ in range(4):
            inner.evaluate(start, 5)
        inner.multipliers = start
        self.clock.spend(inner.work)
        result = solve_kernel(
            kernel,
            inner,
            self.clock,
            cutoff=self.best.value,
            gap=self.gap / 4,
            seed=self.seed,
            effort=min(60.0, 2.0 + cells_of(kernel) / 1000),
        )
        if result.assignment is not None:
            self.offer(restore(undo.restore(result.assignment)), "kernel")
        if result.empty:
            self._outside(outside, whole)
        else:
            inside = max(inner.bound, result.bound if result.bound is not None else inner.bound)
            self.raise_bound(min(inside, int(np.ceil(outside)) if not whole else inside), "kernel")
        if whole:
            return -1
        return 3 * target

    def _outside(self, outside: float, whole: bool) -> None:
        """The kernel holds no better solution: all others cost at least ``outside``."""
        if whole:
            if self.best.value is None:
                self.infeasible = True
            else:
                self.raise_bound(self.best.value, "kernel")
        else:
            self.raise_bound(int(np.ceil(outside)), "kernel")


def _same(assignment: Ints) -> Ints:
    return assignment


def _delta(problem: Problem, extra: list[Floats], cells: int) -> float:
    """The largest of some thresholds for which the edges between strategies below it have at most so many pairs."""
    values = np.sort(np.concatenate(extra))
    best = float(values[min(len(values) - 1, problem.size)])
    low, high = 0, len(values)
    while low < high:
        middle = (low + high + 1) // 2
        if middle == len(values):
            threshold = np.inf
        else:
            threshold = float(values[middle])
        if _cells_below(problem, extra, threshold) <= cells:
            best, low = max(best, threshold), middle
        else:
            high = middle - 1
    return best


def _cells_below(problem: Problem, extra: list[Floats], threshold: float) -> int:
    masks = [row < threshold for row in extra]
    total = 0
    for edge in problem.edges:
        rows = len(np.unique(edge.rows[masks[edge.a]]))
        cols = len(np.unique(edge.cols[masks[edge.b]]))
        total += rows * cols
    return total
