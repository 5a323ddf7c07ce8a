"""What is better is handed on now and then while the search goes on, so that who waits or kills the process has it.

    saver = Saver(write, every=10.0)
    saver.offer(lambda: describe(best))     # whenever something better is found: costs nothing
    saver.poll()                            # often: writes what was last offered, when it is time

Describing and writing may be costly (a plan of a large model takes seconds), so it is done at most every so often, and takes at
most a small share of the time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SHARE = 0.02
"""Of the time that may go into writing."""


class Saver(Generic[T]):
    """Writes the newest of what is offered: first after ``first`` seconds, then every ``every``, or less often where that is costly.

    Forked copies of this process, in which parts of the search may run, write nothing: what they know is older.
    """

    def __init__(self, write: Callable[[T], None], *, every: float, first: float = 0.0, now: Callable[[], float] = time.monotonic) -> None:
        self.write, self.every, self.now = write, every, now
        self.next = now() + first
        self.process = os.getpid()
        self._make: Callable[[], T | None] | None = None

    def offer(self, make: Callable[[], T | None]) -> None:
        """Something better was found; ``make`` describes it when it is to be written, or finds that it is not worth it (None)."""
        self._make = make

    def poll(self) -> None:
        """Write what was last offered, if it is time and it was not written yet."""
        if self._make is None or self.now() < self.next or os.getpid() != self.process:
            return
        make, self._make = self._make, None
        started = self.now()
        made = make()
        if made is not None:
            self.write(made)
        self.next = self.now() + max(self.every, (self.now() - started) / SHARE)
