"""How long a solve may still run: wall time and counted work.

Work is counted, not timed: one unit is about one second of one idle core where it was calibrated. Decisions depend on work only, so
the same input, seed and work limit give the same result; the time limit is the one thing that can change it.
"""

from __future__ import annotations

import time


class Clock:
    """Wall time since construction and work since then, each with an optional limit."""

    def __init__(self, time_limit: float | None, work_limit: float | None) -> None:
        self.started = time.monotonic()
        self.time_limit, self.work_limit = time_limit, work_limit
        self.work = 0.0

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def time_left(self) -> float:
        """Seconds, infinite without a limit."""
        return float("inf") if self.time_limit is None else max(0.0, self.time_limit - self.seconds())

    def work_left(self) -> float:
        return float("inf") if self.work_limit is None else max(0.0, self.work_limit - self.work)

    def spend(self, work: float) -> None:
        self.work += work

    def over(self) -> bool:
        return self.time_left() <= 0.0 or self.work_left() <= 0.0
