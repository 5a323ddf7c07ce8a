"""What the solver takes besides a graph (warm starts) and what it gives back (a solution with its certificate)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from solver_shard.graph.choice_graph import MIB

Ended = Literal["limit", "search"]


class Status(Enum):
    """What is proven about a solution."""

    OPTIMAL = "optimal"
    """A solution, and a proof that none is better."""
    GAP = "gap"
    """A solution, and a proof that none is better by more than the gap that was asked for."""
    FEASIBLE = "feasible"
    """A solution within the limit; the bound is valid but further away than the gap that was asked for."""
    INFEASIBLE = "infeasible"
    """No solution keeps the limit (or no combination of strategies is allowed at all). ``assignment`` is then the one of
    smallest peak that was found, ``peak_bound`` what any needs."""
    UNKNOWN = "unknown"
    """Neither a solution within the limit nor a proof that there is none. ``assignment`` is the one of smallest peak found, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A moment at which the incumbent or the bound became better.

    Attributes:
        seconds: wall time since the start of the solve.
        work: work units since the start (see ``Solution.work``).
        objective: best objective so far, or None.
        bound: best lower bound so far, or None.
        source: what found it: a stage or a warm start.

    As text: ``objective 1,034, bound 1,020, gap 1.35% (kernel)``.
    """

    seconds: float
    work: float
    objective: int | None
    bound: int | None
    source: str

    def __str__(self) -> str:
        found = "no solution yet" if self.objective is None else f"objective {self.objective:,}"
        proven = "" if self.bound is None else f", bound {self.bound:,}"
        gap = "" if self.objective is None or self.bound is None else f", gap {relative_gap(self.objective, self.bound):.2%}"
        return f"{found}{proven}{gap} ({self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step of the solve for the report: its name, wall seconds and a line of facts."""

    name: str
    seconds: float
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An assignment with its certificate.

    Attributes:
        status: what is proven.
        assignment: a strategy per node, or None when no allowed combination was found.
        cost: total cost of the assignment in nanoseconds, or None.
        peak: its largest memory use in bytes, or None.
        objective: its objective value (nanoseconds, or bytes for the objective "memory"), or None.
        bound: proven lower bound on the objective of every solution within the limit, or None.
        peak_bound: proven lower bound in bytes on the peak of every allowed assignment, whatever the limit.
        gap: (objective - bound) / objective, or None.
        history: moments of progress, oldest first.
        stages: the stages that ran.
        seed: the seed that was given.
        work: work spent: one unit is about one second of one core on the machine it was calibrated on, but counted, not timed.
        interrupted: whether the caller asked to stop before a limit or a proof did; what is said here is true all the same.
        ended: what ended a search without a proof: a "limit" on time or work, or the "search" itself, which had nothing left to try; None
            where a proof or the caller did, and while it runs.
    """

    status: Status
    assignment: tuple[int, ...] | None = None
    cost: int | None = None
    peak: int | None = None
    objective: int | None = None
    bound: int | None = None
    peak_bound: int = 0
    gap: float | None = None
    history: tuple[Event, ...] = ()
    stages: tuple[Stage, ...] = ()
    seed: int = 0
    work: float = 0.0
    interrupted: bool = False
    ended: Ended | None = None

    @property
    def feasible(self) -> bool:
        """Whether the assignment is within the limit."""
        return self.status in (Status.OPTIMAL, Status.GAP, Status.FEASIBLE)


def objective_value(objective: str, memory_weight: int, cost: int, peak: int) -> int:
    """The number that is minimised: ``cost + memory_weight * peak // 2**20`` (nanoseconds per MiB), or the peak itself.

    >>> objective_value("time", 3, 100, 2 * MIB)
    106
    """
    return peak if objective == "memory" else cost + memory_weight * peak // MIB


def relative_gap(objective: int, bound: int) -> float:
    """(objective - bound) / objective, 0 where both are 0."""
    return 0.0 if objective <= bound else (objective - bound) / abs(objective)
