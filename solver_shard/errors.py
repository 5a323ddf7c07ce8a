"""What can go wrong, as one small tree.

    SolverShardError          anything a caller may want to catch; exit code 1 on the command line
    ├── InputError            what the user gave is not usable: a model, config, file, pin, mesh or number
    ├── TraceError            the model could not be traced to a graph of ops
    ├── RuleError             a rule row is wrong, or an op and its rule disagree
    ├── InfeasibleError       no plan fits the memory limit or the pins; exit code 3
    └── InternalError         two parts of this library disagree: a bug, please report it

Every message says what was asked, what is legal, and what to do next.
"""

from __future__ import annotations


class SolverShardError(Exception):
    """Base of every error this library raises on purpose."""


class InputError(SolverShardError):
    """What the user gave is not usable; the message says what is legal."""


class TraceError(SolverShardError):
    """The model could not be traced; the message names the op or the module where it stopped."""


class RuleError(SolverShardError):
    """A rule row is wrong, or does not fit the op it was looked up for."""


class InfeasibleError(SolverShardError):
    """No plan exists within the memory limit and the pins.

    Attributes:
        achieved_peak: smallest peak in bytes that a found plan reaches, or None when the pins alone conflict.
        peak_bound: proven lower bound in bytes on the peak of any plan, or None.
        details: lines that say what fills the memory at the tightest time, or which pins conflict.
    """

    def __init__(
        self,
        message: str,
        *,
        achieved_peak: int | None = None,
        peak_bound: int | None = None,
        details: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.achieved_peak = achieved_peak
        self.peak_bound = peak_bound
        self.details = details


class InternalError(SolverShardError):
    """Two parts of this library disagree: a bug of ours, not of the caller."""
