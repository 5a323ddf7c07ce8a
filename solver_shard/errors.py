"""What can go wrong, as one small tree.

    SolverShardError          anything a caller may want to catch; exit code 1 on the command line
    ├── InputError            what the user gave is not usable: a model, config, file, pin, mesh or number
    ├── TraceError            the model could not be traced to a graph of ops
    ├── RuleError             a rule row is wrong, or an op and its rule disagree
    ├── InfeasibleError       no plan fits the memory limit or the pins; exit code 3
    └── InternalError         two parts of this library disagree: a bug, please report it

Every message says what was asked, what is legal, and what to do next. A message may hold names from a file or a model, so an error escapes
what it is given: nothing in it steers a terminal or looks like a line of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


def printable(text: str) -> str:
    r"""One line of text with every character escaped that would end it, or steer what shows it: controls, marks of direction.

    >>> printable("up\x1b[31m\n weight\u202e")
    'up\\x1b[31m\\n weight\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedPin:
    """What there would be without one pin of a conflict, all others kept; or without all pins.

    Attributes:
        pin: as the user wrote it; None for all pins.
        nanoseconds: of the step of the best plan found within the limit, or None where none was found.
        bound: proven lower bound on the nanoseconds of every such plan, or None.
        peak: of that plan; without one the smallest that was found, or None.
        peak_bound: proven lower bound in bytes on the peak of every plan without the pin, or None.
        proven: without a plan within the limit: proven that there is none, rather than none found in the time given.
    """

    pin: str | None
    nanoseconds: int | None = None
    bound: int | None = None
    peak: int | None = None
    peak_bound: int | None = None
    proven: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """What cannot be had together: of the pins, the memory limit and the template.

    Attributes:
        pins: as the user wrote them; none where there is no plan even without pins.
        times: where the memory limit takes part: the op that runs, and the fewest bytes in use then, as (found, proven), with
            these pins and the limit kept at the other times; none where memory does not matter.
        ops: where it does not matter: ops at which pins or template meet, which cannot be run together.
        minimal: proven that without any one of the pins, of the times or of the ops, what remains is possible.
        dropped: the price of dropping each pin; where none is blamed though there are some, of dropping all.
    """

    pins: tuple[str, ...] = ()
    times: tuple[tuple[str, int | None, int], ...] = ()
    ops: tuple[str, ...] = ()
    minimal: bool = True
    dropped: tuple[DroppedPin, ...] = ()


class SolverShardError(Exception):
    """Base of every error this library raises on purpose.

    Args:
        lines: of the message, mostly one. Breaks inside one, as messages of other libraries have them, become blanks.
    """

    def __str__(self) -> str:
        return "\n".join(printable(" ".join(str(line).splitlines())) for line in self.args)


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
        details: lines that say what fills the memory at the tightest time, and what conflicts.
        conflict: which pins and times conflict, and the price of dropping each; None where that was not found out.
    """

    def __init__(
        self,
        message: str,
        *,
        achieved_peak: int | None = None,
        peak_bound: int | None = None,
        details: tuple[str, ...] = (),
        conflict: Conflict | None = None,
    ) -> None:
        super().__init__(message)
        self.achieved_peak = achieved_peak
        self.peak_bound = peak_bound
        self.details = details
        self.conflict = conflict


class InternalError(SolverShardError):
    """Two parts of this library disagree: a bug of ours, not of the caller."""
