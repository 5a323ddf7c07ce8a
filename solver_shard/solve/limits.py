"""How long a solve may still run (wall time and counted work), and what obeys that: calls that wait, savers and forked tasks.

Work is counted, not timed: one unit is about one second of one idle core where it was calibrated. Decisions depend on work only, so
the same input, seed and work limit give the same result; the time limit, and a caller who asks to stop, are all that can change it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from solver_shard.solve import parameters as tuned


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


def clock_of(time_limit: float | None, work_limit: float | None) -> Clock:
    """A clock for these limits, of which a little time is kept back."""
    return Clock(None if time_limit is None else time_limit * (1 - tuned.TIME_RESERVE), work_limit)


T = TypeVar("T")


LEFT_BEHIND = "solver-shard: a solver that was left behind"
"""Name of the threads of such calls, which :func:`left_behind` looks for."""


def call_watched(call: Callable[[], T], clock: Clock, *, seconds: float, stop: Callable[[], None] | None = None) -> T | None:
    """The result of a blocking call of a solver that can be stopped; None where it was left behind, because it would not end.

        status = call_watched(lambda: solver.solve(model), clock, seconds=5.0, stop=solver.stop_search)

    While C++ code runs, Python handles no signals: a Ctrl-C would wait until the call returns. So the call runs in a thread of its own and
    the calling one waits for it in Python, looking at the clock. A solver that can be told to stop is told so. One that cannot (HiGHS
    through MathOpt has no interrupter) is left behind: its thread ends when the solver's own time limit strikes, and what it finds is
    dropped. Nothing else may be shared with such a call.

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
            thread.join(tuned.POLL_SECONDS)
            if thread.is_alive() and (clock.now() - started > seconds + tuned.CALL_GRACE or clock.halted()):
                if stop is not None:
                    stop()
                    thread.join(tuned.CALL_GRACE)
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


class Saver(Generic[T]):
    """Hands on what is better now and then while the search goes on, so that who waits or kills the process has it.

        saver = Saver(write, every=10.0)
        saver.offer(lambda: describe(best))     # whenever something better is found: costs nothing
        saver.poll()                            # often: writes what was last offered, when it is time

    Writes the newest of what is offered: first after ``first`` seconds, then every ``every``, or less often where that is costly.

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
        self.next = self.now() + max(self.every, (self.now() - started) / tuned.WRITING_SHARE)


def run(tasks: Sequence[Callable[[], T]], *, workers: int, over: Callable[[], bool]) -> list[T]:
    """The results of the tasks in their order, the same for any number of workers; fewer where ``over`` says stop.

        first, second = run([task_a, task_b], workers=2, over=clock.over)

    A task is a function without arguments; its result is pickled, its error is raised here. The last task runs in this process, the others
    in forked copies of it, so everything that a task reads is there already. Where forking is not possible, or with one worker, tasks run
    one after the other. A task must not depend on the others' results, nor leave anything behind in this process that another one reads.
    """
    if workers < 2 or len(tasks) < 2 or not hasattr(os, "fork"):
        return [task() for task in tasks]
    results: list[T] = []
    for start in range(0, len(tasks), workers):
        *others, own = tasks[start : start + workers]
        running = [_start(task) for task in others]
        try:
            mine = own()
            for _, here in running:
                results += _wait(here, over)
            results.append(mine)
        finally:
            for process, here in running:
                here.close()
                process.terminate()
                process.join(tuned.TASK_GRACE)
                process.kill()  # one that does not end when asked
                process.join()
    return results


def _start(task: Callable[[], T]) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(task, there), daemon=True)
    process.start()
    there.close()
    return process, here


def _wait(here: Connection, over: Callable[[], bool]) -> list[Any]:
    """The answer of a process; none if it comes too late or the process was killed."""
    late: float | None = None
    while not here.poll(0.05):
        if over():
            late = late or time.monotonic()
            if time.monotonic() - late > tuned.TASK_GRACE:
                return []
    try:
        answer = here.recv()
    except EOFError:
        return []
    if isinstance(answer, BaseException):
        raise answer
    return [answer]


def _child(task: Callable[[], T], there: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    try:
        there.send(task())
    except BaseException as error:  # whatever it is: the parent raises it
        there.send(error)
    finally:
        there.close()
