"""The stages of planning: how long each takes, what is said of it, and what a total time limit leaves for the solver.

>>> clock = StageClock(progress=print, total=120.0)
>>> with clock.stage("trace", "tracing the model"):
...     ...
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from solver_shard.errors import SolverShardError

Progress = Callable[[str], None]
"""Called with a short line whenever a stage starts or the solver gets further."""

WRITING = 0.4
"""Seconds that writing down a plan takes, by the second that pricing its model took: what a total time limit keeps back for it."""


@dataclass(slots=True, kw_only=True)
class StageClock:
    """Wall seconds by stage, what a total time limit leaves of them, and the progress lines."""

    progress: Progress | None = None
    total: float | None = None
    solver_seconds: float = math.inf
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    last_event: float = -math.inf
    unsaid: object | None = None
    process: int = field(default_factory=os.getpid)

    @contextmanager
    def stage(self, name: str, line: str) -> Iterator[None]:
        self.check_total()
        self.say(line)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 3)  # some run twice

    def check_total(self) -> None:
        """Raise where the total time limit is over before anything could be solved."""
        if self.total is not None and "solve" not in self.seconds and time.perf_counter() - self.started >= self.total:
            raise out_of_time(self.total, self.seconds)

    def bound_solver(self, time_limit: float) -> None:
        """What the solver may take: its own limit, and what the stages so far leave of the total and writing does not need."""
        self.solver_seconds = time_limit
        if self.total is not None:
            left = self.left() - WRITING * self.seconds.get("lower", 0.0)
            if left <= 0:
                raise out_of_time(self.total, self.seconds)
            self.solver_seconds = min(time_limit, left)

    def left(self) -> float:
        """Seconds of the total time limit; infinite without one."""
        return math.inf if self.total is None else max(0.0, self.total - (time.perf_counter() - self.started))

    def say(self, line: str) -> None:
        if self.progress is not None:
            self.progress(line)

    def solver_event(self, event: object) -> None:
        """Say the text of a better plan or bound, at most one per second; ``flush`` says later what came too soon."""
        self.unsaid = event
        self.flush()

    def flush(self) -> None:
        """Say the newest of what was not said yet, if it is time; forked copies of this process leave that to it."""
        now = time.perf_counter()
        if self.unsaid is not None and now - self.last_event >= 1.0 and os.getpid() == self.process:
            self.say(f"solving: {self.unsaid}")
            self.last_event, self.unsaid = now, None


def out_of_time(total: float, seconds: Mapping[str, float]) -> SolverShardError:
    """The error of a total time limit that strikes before the solver found a plan; ``seconds``: by stage."""
    spent = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    return SolverShardError(
        f"the total time limit of {total:g} s was over before any plan was found{f' ({spent})' if spent else ''}; give more "
        "--total-time-limit, or a smaller model: tracing and pricing cannot be cut short, only solving can"
    )
