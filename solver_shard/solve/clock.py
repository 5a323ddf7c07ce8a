"""How long a solve may still run: wall time and counted work.

Work is counted, not timed: one unit is about one second of one idle core where it was calibrated. Decisions depend on work only, so
the same input, seed and work limit give the same result; the time limit, and a caller who asks to stop, are all that can change it.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Wall time since construction and work since then, each with an optional limit; a part also obeys its whole.

    ``now``: the time in seconds from some fixed moment; tests count with one of their own.
    """

    def __init__(
        self, time_limit: float | None, work_limit: float | None, whole: Clock | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.now = now
        self.started = now()
        self.time_limit, self.work_limit, self.whole = time_limit, work_limit, whole
        self.paced: bool = whole.paced if whole is not None else time_limit is not None and work_limit is None
        """Whether wall time alone limits the work: then single steps may be cut by wall time too."""
        self.work = 0.0
        self.halt: Callable[[], bool] | None = None
        """A further reason to be over, asked again and again; as where the user asks to stop."""

    def part(self, *, time_share: float, work: float | None) -> Clock:
        """A clock for a stage: a share of the time that is left, and some work."""
        left = self.time_left()
        return Clock(None if left == float("inf") else left * time_share, work, self, now=self.now)

    def task(self, *, work: float, seconds: float) -> Clock:
        """A clock for a task that may run elsewhere: its work is not counted here. ``seconds`` only count where time alone limits."""
        own = Clock(min(self.time_left(), seconds if self.paced else float("inf")), work, now=self.now)
        own.paced, own.halt = self.paced, self.halted
        return own

    def seconds(self) -> float:
        return self.now() - self.started

    def time_left(self) -> float:
        """Seconds, infinite without a limit."""
        own = float("inf") if self.time_limit is None else max(0.0, self.time_limit - self.seconds())
        return own if self.whole is None else min(own, self.whole.time_left())

    def work_left(self) -> float:
        own = float("inf") if self.work_limit is None else max(0.0, self.work_limit - self.work)
        return own if self.whole is None else min(own, self.whole.work_left())

    def used(self) -> float:
        """Share of the limits that is used, 0 without limits."""
        time_share = 0.0 if not self.time_limit else self.seconds() / self.time_limit
        work_share = 0.0 if not self.work_limit else self.work / self.work_limit
        return max(time_share, work_share)

    def spend(self, work: float) -> None:
        self.work += work
        if self.whole is not None:
            self.whole.spend(work)

    def halted(self) -> bool:
        """Whether something else than a limit asks to stop, here or in the whole."""
        return (self.halt is not None and self.halt()) or (self.whole is not None and self.whole.halted())

    def spent(self) -> bool:
        """Whether a limit on time or work is reached."""
        return self.time_left() <= 0.0 or self.work_left() <= 0.0

    def over(self) -> bool:
        return self.spent() or self.halted()
