"""The search on one problem: bound, incumbent, fixing, and integer programs on what is left, until the gap is closed.

1. *price* (pricing.py): every decoded assignment within the limit is an incumbent.
2. *fix*, whenever incumbent and bound have come closer: strategies whose bound exceeds the incumbent go. If that is a good part, the
   problem is presolved again and pricing starts over on the smaller one.
3. *kernel*: the strategies whose bound exceeds the dual bound by at most some delta, as an integer program. A solution of it is an
   incumbent. Whatever it proves, every other solution costs at least bound + delta: so the bound rises to the smaller
   of both. Delta starts small and grows until the gap is closed.
4. *neighbourhoods* (neighbourhood.py) of the incumbent, when the kernel that would close the gap is too large.

All bounds compose: removed strategies only occur in solutions that cost at least the incumbent they were removed with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve.clock import Clock
from solver_shard.solve.dual import Column, Dual
from solver_shard.solve.kernel import KernelResult, cells_of, solve_kernel
from solver_shard.solve.marginals import marginals
from solver_shard.solve.neighbourhood import neighbourhoods
from solver_shard.solve.presolve import NoAssignment, presolve
from solver_shard.solve.pricing import Pricing
from solver_shard.solve.problem import Floats, Problem
from solver_shard.solve.spans import Bools

Report = Callable[[Ints | None, int | None, str], None]
"""Called with a better assignment of the search's problem, or a better bound, and what found it."""

Restore = Callable[[Ints], Ints]

FIRST_CELLS = 2500
"""Pairs in the first kernel before presolve; each next one has three times as many."""

MOST_CELLS = 60_000
"""Pairs after presolve beyond which an integer program is not tried."""

WORTH_FIXING = 600
"""Strategies below which a problem is not worth shrinking before pricing is done."""


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


@dataclass(frozen=True, slots=True, eq=False)
class _Margins:
    """Objective that any solution with a strategy exceeds ``base`` by, per node and strategy."""

    base: float
    extra: list[Floats]


class Search:
    """A search on a presolved problem.

    Attributes:
        best: what is known; the value of an incumbent from elsewhere may be put in before ``run``.
        infeasible: proven that no assignment keeps the limit.
        enough: a value at which to stop.
        stop: a further reason to stop.
        rescue: called once when pricing finds no assignment within the limit: the value of one, or None when there is none.
        multipliers: cost per byte by time label, for the next problem.
    """

    def __init__(self, problem: Problem, clock: Clock, *, gap: float, seed: int, report: Report, least_peak: int = 0) -> None:
        self.problem, self.clock, self.gap, self.seed, self.report = problem, clock, gap, seed, report
        self.least_peak = least_peak
        self.best = Best()
        self.infeasible = False
        self.enough: int | None = None
        self.stop: Callable[[], bool] | None = None
        self.rescue: Callable[[], int | None] | None = None
        self.multipliers: dict[int, float] = {}
        self.rng = np.random.default_rng(seed)

    def closed(self) -> bool:
        if self.enough is not None and self.best.value is not None and self.best.value <= self.enough:
            return True
        return self.infeasible or (self.best.value is not None and self.best.gap() <= self.gap)

    def stopped(self) -> bool:
        return self.closed() or self.clock.over() or (self.stop is not None and self.stop())

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
        """Search until the gap is closed, nothing more can be done, or the clock says stop."""
        self.raise_bound(self.problem.constant, "presolve")
        current: Problem = self.problem
        restore: Restore = _same
        while True:
            if current.limit is not None and current.least() > current.limit:
                self._exhausted("presolve")
                return
            if current.size == 0:
                self._nothing_left(current, restore)
                return
            smaller = self._round(current, restore)
            if smaller is None:
                return
            current, restore = smaller

    def _nothing_left(self, current: Problem, restore: Restore) -> None:
        nothing = np.zeros(0, dtype=np.int64)
        value = current.value(nothing)
        if value is not None:
            self.offer(restore(nothing), "presolve")
            self.raise_bound(value, "presolve")
        self._exhausted("presolve")

    def _exhausted(self, source: str) -> None:
        """No better solution exists than the incumbent."""
        if self.best.value is None:
            self.infeasible = True
        else:
            self.raise_bound(self.best.value, source)

    def _round(self, current: Problem, restore: Restore) -> tuple[Problem, Restore] | None:
        """Price, fix, and solve kernels; a smaller problem to go on with, or None at the end."""
        most = current.most()

        def found(dual: Dual, column: Column | None, source: str) -> None:
            if dual.bound > most:
                self._exhausted(source)
            self.raise_bound(dual.bound, source)
            if column is not None:
                self.offer(restore(column.assignment), source)

        pricing = Pricing(
            current,
            self.clock,
            gap=self.gap,
            found=found,
            value=lambda: self.best.value,
            start=np.array([self.multipliers.get(t, 0.0) for t in current.times.tolist()]),
            least_peak=self.least_peak,
        )
        fixed_at = np.inf
        for _ in pricing.steps():
            if self.stopped():
                return None
            room = pricing.room()
            if room < min(0.5 * fixed_at, 0.05 * abs(pricing.dual.best)) and current.offsets[-1] > WORTH_FIXING:
                fixed_at = room
                keep = self._fixing(self._margins(pricing.dual))
                if keep is not None:
                    return self._smaller(current, restore, keep, pricing.dual)
        if self.best.value is None and self.rescue is not None:
            self.best.value = self.rescue()
            self.infeasible = self.best.value is None and not self.clock.over()
            self.rescue = None
        if self.stopped():
            return None
        return self._kernels(current, restore, pricing.dual)

    def _kernels(self, current: Problem, restore: Restore, dual: Dual) -> tuple[Problem, Restore] | None:
        margins = self._margins(dual)
        target, tried = FIRST_CELLS, None
        while not self.stopped():
            if self.best.value is not None and self.best.value != tried:
                tried = self.best.value
                keep = self._fixing(margins)
                if keep is not None:
                    return self._smaller(current, restore, keep, dual)
            if self.stopped() or self._kernel(current, restore, dual, margins, target):
                break
            target *= 3
        if not self.stopped() and self.best.assignment is not None:
            neighbourhoods(self.problem, self.best.assignment, self.clock, seed=self.seed, gap=self.gap, offer=self.offer)
        return None

    def _margins(self, dual: Dual) -> _Margins:
        parts = dual.parts()
        least = marginals(dual.messages, parts, 4, self.rng)
        self.clock.spend(dual.messages.work * 10)
        return _Margins((parts.constant + dual.offset(dual.multipliers)) / dual.scale, [row / dual.scale for row in least])

    def _fixing(self, margins: _Margins) -> list[Bools] | None:
        """Which strategies may still occur in a better solution; None where that removes little."""
        if self.best.value is None:
            return None
        keep = [row < self.best.value - margins.base for row in margins.extra]
        if not all(mask.any() for mask in keep):
            self._exhausted("fixing")
            return None
        left = sum(int(mask.sum()) for mask in keep)
        return keep if left < 0.7 * sum(map(len, keep)) else None

    def _smaller(self, current: Problem, restore: Restore, keep: list[Bools], dual: Dual) -> tuple[Problem, Restore] | None:
        self._remember(current, dual)
        try:
            smaller, undo = presolve(current, keep)
        except NoAssignment:
            self._exhausted("fixing")
            return None
        self.clock.spend(1e-3 * current.size)
        return smaller, lambda x: restore(undo.restore(x))

    def _remember(self, current: Problem, dual: Dual) -> None:
        self.multipliers.update(zip(current.times.tolist(), (dual.multipliers / dual.scale).tolist(), strict=True))

    def _kernel(self, current: Problem, restore: Restore, dual: Dual, margins: _Margins, target: int) -> bool:
        """One integer program; true when nothing larger needs to be tried."""
        room = self.best.value - margins.base if self.best.value is not None else np.inf
        delta = min(_delta(current, margins.extra, target), room)
        keep = [(row < delta) | (row <= row.min()) for row in margins.extra] if np.isfinite(delta) else [row >= 0 for row in margins.extra]
        whole = delta >= room or all(mask.all() for mask in keep)
        self._remember(current, dual)
        outside = None if whole else current.whole(margins.base + delta)  # every solution with another strategy costs at least that
        try:
            kernel, undo = presolve(current, keep)
        except NoAssignment:
            self._emptied(outside)
            return whole
        self.clock.spend(1e-3 * current.size)
        if cells_of(kernel) > MOST_CELLS:
            return True
        result, inside = self._solve_kernel(kernel)
        if result.assignment is not None:
            self.offer(restore(undo.restore(result.assignment)), "kernel")
        if result.empty:
            self._emptied(outside)
        else:
            self.raise_bound(inside if outside is None else min(inside, outside), "kernel")
        return whole or not result.proven

    def _solve_kernel(self, kernel: Problem) -> tuple[KernelResult, int]:
        inner = Dual(kernel, least_peak=self.least_peak)
        start = np.array([self.multipliers.get(t, 0.0) for t in kernel.times.tolist()]) * inner.scale
        for _ in range(4):
            inner.evaluate(start, 5)
        inner.multipliers = start
        self.clock.spend(inner.work)
        effort = min(60.0, 2.0 + cells_of(kernel) / 1000)
        result = solve_kernel(kernel, inner, self.clock, cutoff=self.best.value, gap=self.gap / 4, seed=self.seed, effort=effort)
        return result, max(inner.bound, result.bound if result.bound is not None else inner.bound)

    def _emptied(self, outside: int | None) -> None:
        """The kernel holds no better solution: all others cost at least ``outside``, or there are none."""
        if outside is None:
            self._exhausted("kernel")
        else:
            self.raise_bound(outside, "kernel")


def _same(assignment: Ints) -> Ints:
    return assignment


def _delta(problem: Problem, extra: list[Floats], cells: int) -> float:
    """The largest threshold for which the edges between strategies below it have at most so many pairs."""
    values = np.unique(np.concatenate(extra))
    low, high = 0, len(values)
    while low < high:
        middle = (low + high + 1) // 2
        if middle == len(values) or _cells_below(problem, extra, float(values[middle])) <= cells:
            low = middle
            if middle == len(values):
                break
        else:
            high = middle - 1
    if low == len(values):
        return np.inf if _cells_below(problem, extra, np.inf) <= cells else float(values[-1])
    return float(values[low])


def _cells_below(problem: Problem, extra: list[Floats], threshold: float) -> int:
    masks = [row < threshold for row in extra]
    total = 0
    for edge in problem.edges:
        rows = np.zeros(edge.core.shape[0], dtype=bool)
        cols = np.zeros(edge.core.shape[1], dtype=bool)
        rows[edge.rows[masks[edge.a]]] = True
        cols[edge.cols[masks[edge.b]]] = True
        total += int(rows.sum()) * int(cols.sum())
    return total
