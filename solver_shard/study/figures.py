"""What a table of plans has of each: the JSON of a row of :mod:`solver_shard.study.compare`, which reports read too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from solver_shard.plan.plan import MAY_LACK

RowKind = Literal["plan", "template", "propagation", "greedy", "given", "pins"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The price of one plan; times in nanoseconds of a step, bytes per device.

    Attributes:
        name: what the table calls it.
        kind: plan (given as a plan), template, propagation, greedy, given (a plan for another tool) or pins.
        step_ns: compute + update + the collectives of ``by_kind_ns``.
        compute_ns, update_ns: ops without collectives; the optimizer.
        by_kind_ns: collective kind to its time, after the overlap discount; every key of ``compare.KINDS``.
        unshared_ns: launches that are not in ``step_ns``, see ``plan.Costs``.
        peak: the largest total of bytes at one time; ``at_peak`` has its categories, every key of ``plan.CATEGORIES``.
        fits: whether the peak is within what the first plan's limit leaves for tensors.
        least_peak: of a recipe of which no plan fits, the smallest peak that one was found to have; ``least_proven``: that none has less.
        regret: (step_ns - bound) / bound; None where there is no bound on the time.
        status: of the certificate: optimal, gap, feasible or interrupted; ``gap`` is relative to this row's own problem.
        notes: what a reader must know of the row, a sentence each.
    """

    name: str
    kind: RowKind
    step_ns: int
    compute_ns: int
    update_ns: int
    by_kind_ns: Mapping[str, int]
    unshared_ns: int
    peak: int
    at_peak: Mapping[str, int]
    fits: bool
    least_peak: int | None = field(default=None, metadata=MAY_LACK)
    least_proven: bool = field(default=False, metadata=MAY_LACK)
    regret: float | None
    status: str
    gap: float
    notes: tuple[str, ...] = ()

    @property
    def communication_ns(self) -> int:
        """All collectives."""
        return sum(self.by_kind_ns.values())

    @property
    def proven(self) -> bool:
        """Whether nothing that its recipe leaves open could be better by more than the gap asked for."""
        return self.status in ("optimal", "gap")
