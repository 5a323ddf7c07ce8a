"""A blocking call of a solver that can be stopped: by a signal, by the caller, or when it does not keep its own time limit.

    status = call_watched(lambda: solver.solve(model), clock, seconds=5.0, stop=solver.stop_search)

While C++ code runs, Python handles no signals: a Ctrl-C would wait until the call returns. So the call runs in a thread of its own
and the calling one waits for it in Python, looking at the clock. A solver that can be told to stop is told so. One that cannot
(HiGHS through MathOpt has no interrupter) is left behind: its thread ends when the solver's own time limit strikes, and what it
finds is dropped. Nothing else may be shared with such a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from solver_shard.solve.clock import Clock

T = TypeVar("T")

POLL = 0.05
"""Seconds between two looks at the clock; a call that returns is noticed at once."""

GRACE = 0.5
"""Seconds by which a call may exceed its own time limit, and that one which is told to stop has for it."""

LEFT_BEHIND = "solver-shard: a solver that was left behind"
"""Name of the threads of such calls, which :func:`left_behind` looks for."""


def call_watched(call: Callable[[], T], clock: Clock, *, seconds: float, stop: Callable[[], None] | None = None) -> T | None:
    """The result of ``call``; None where it was left behind, because it would not end.

    Args:
        call: runs in another thread. What it raises is raised here.
        clock: the call is stopped when this is halted (see :meth:`Clock.halted`); its limits are the call's own business.
        seconds: the call's own time limit.
        stop: tells the call to end soon with what it has; may be called from another thread.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # handed to the one who waits
            errors.append(error)

    thread = threading.Thread(target=run, name="solver-shard: a solver")
    started = clock.now()
    thread.start()
    try:
        while thread.is_alive():
            thread.join(POLL)
            if thread.is_alive() and (clock.now() - started > seconds + GRACE or clock.halted()):
                if stop is not None:
                    stop()
                    thread.join(GRACE)
                break
    except BaseException:  # a KeyboardInterrupt, most often
        if stop is not None:
            stop()
        thread.name = LEFT_BEHIND
        raise
    if thread.is_alive():
        thread.name = LEFT_BEHIND
        return None
    if errors:
        raise errors[0]
    return results[0]


def left_behind() -> bool:
    """Whether a call that was left behind still runs, for which Python would wait at its end."""
    return any(thread.name == LEFT_BEHIND for thread in threading.enumerate())
