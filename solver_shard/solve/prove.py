"""One integer program on the strategies that may still matter: a better assignment, or a better bound.

The kernel of a problem holds the strategies whose bound exceeds the relaxation's by less than some delta. A solution of it is an
incumbent. Whatever it proves, every other solution costs at least base + delta: so the bound rises to the smaller of both. Delta starts
small and grows until the gap is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve.clock import Clock
from solver_shard.solve.dual import Dual
from solver_shard.solve.kernel import cells_of, solve_kernel
from solver_shard.solve.presolve import NoAssignment, presolve
from solver_shard.solve.problem import Floats, Problem

LARGER, QUICK = 3, 0.5
"""How many times as many pairs the next kernel has; work of an integer program after which that one follows at once."""

AT_ONCE = 12.0
"""Work after which no larger kernel follows at once."""

MOST_CELLS = 60_000
"""Pairs after presolve beyond which an integer program is not tried."""


@dataclass(frozen=True, slots=True, eq=False)
class Margins:
    """Objective that any solution with a strategy exceeds ``base`` by, per node and strategy."""

    base: float
    extra: list[Floats]

    def room(self, value: int) -> float:
        """What no strategy of a solution below ``value`` exceeds ``base`` by, or reaches; rounded up, which counts beyond 2**53."""
        room = float(value - self.base)
        return room if Fraction(room) >= value - Fraction(self.base) else float(np.nextafter(room, np.inf))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proof:
    """What a kernel gave.

    Attributes:
        assignment: of the problem, within the limit and below the value that was known; or None.
        bound: every solution with an objective below the known value costs at least this; None where nothing better exists.
        whole: the kernel holds every strategy that may be part of a better solution.
        proven: it was solved to the end.
        large: it was too large to try.
        work: work spent.
        cells: pairs that were wanted.
        effort: of that work, the integer program's.
    """

    assignment: Ints | None = None
    bound: int | None = 0
    whole: bool = False
    proven: bool = True
    large: bool = False
    work: float = 0.0
    cells: int = 0
    effort: float = 0.0

    @property
    def quick(self) -> bool:
        """Whether the next larger one may be tried at once."""
        return self.proven and not self.whole and not self.large and self.assignment is None and self.effort <= QUICK


def prove_quickly(prove_one: Callable[[int], Proof], cells: int) -> Proof:
    """The kernel of so many pairs, and larger ones while they are solved at once and find nothing; the last one, with the best bound."""
    last = prove_one(cells)
    work, bound = last.work, last.bound
    while last.quick and bound is not None and work < AT_ONCE:
        last = prove_one(LARGER * last.cells)
        work += last.work
        bound = bound if last.large else None if last.bound is None else max(bound, last.bound)
    return replace(last, work=work, bound=bound)


def prove(
    problem: Problem,
    margins: Margins,
    *,
    value: int | None,
    multipliers: Mapping[int, float],
    least_peak: int,
    cells: int,
    patience: float,
    gap: float,
    seed: int,
    clock: Clock,
) -> Proof:
    """Solve the kernel of about so many pairs (before presolve).

    Args:
        problem: presolved.
        margins: of its strategies.
        value: only solutions with an objective below this are of interest.
        multipliers: cost per byte by time label.
        least_peak: a bound on the peak.
        cells: pairs wanted.
        patience: times the work units that such a size usually takes are spent at most.
        gap: relative gap at which to stop.
        seed: random seed.
        clock: limits.
    """
    room = margins.room(value) if value is not None else np.inf
    delta = min(_delta(problem, margins.extra, cells), room)
    keep = [(row < delta) | (row <= row.min()) for row in margins.extra] if np.isfinite(delta) else [row >= 0 for row in margins.extra]
    whole = delta >= room or all(mask.all() for mask in keep)
    outside = None if whole else problem.whole(margins.base + delta)  # every solution with another strategy costs at least that
    spent = clock.work
    clock.spend(1e-3 * problem.size)
    try:
        kernel, undo = presolve(problem, keep)
    except NoAssignment:
        return Proof(bound=outside, whole=whole, work=clock.work - spent, cells=cells)
    size = cells_of(kernel)
    if size > MOST_CELLS:
        return Proof(whole=whole, large=True, work=clock.work - spent, cells=cells)
    inner = Dual(kernel, least_peak=least_peak)
    start = np.array([multipliers.get(t, 0.0) for t in kernel.times.tolist()]) * inner.scale
    for _ in range(4):
        inner.evaluate(start, 5)
    inner.multipliers = start
    clock.spend(inner.work)
    before = clock.work
    result = solve_kernel(kernel, inner, clock, cutoff=value, gap=gap, seed=seed, effort=patience * usual_effort(size))
    inside = max(inner.bound, result.bound if result.bound is not None else inner.bound)
    bound = outside if result.empty else inside if outside is None else min(inside, outside)
    assignment = None if result.assignment is None else undo.restore(result.assignment)
    return Proof(
        assignment=assignment,
        bound=bound,
        whole=whole,
        proven=result.proven,
        work=clock.work - spent,
        cells=cells,
        effort=clock.work - before,
    )


def usual_effort(cells: int) -> float:
    """Work units that an integer program with so many pairs after presolve usually takes, and some more."""
    return min(60.0, 2.0 + cells / 1000)


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
