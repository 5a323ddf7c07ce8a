"""Progress of long stages on stderr: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from solver_shard.errors import printable

OK, ERROR, USAGE, INFEASIBLE, INTERRUPTED = 0, 1, 2, 3, 130


@contextmanager
def progress_lines(quiet: bool, *, keep: bool = False) -> Iterator[Callable[[str], None] | None]:
    """Give a function that shows a line, or None when nothing is to be shown.

    On a terminal the last line stays in sight with the seconds since the start, which go on while it does not change; ``keep``
    leaves all lines there, above it.
    """
    if quiet:
        yield None
        return
    start = time.monotonic()

    def timed(line: str) -> str:
        return printable(f"{time.monotonic() - start:6.1f} s  {line}")

    if sys.stderr.isatty():
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner
        from rich.text import Text

        last = "starting"
        spinner = Spinner("dots")

        def shown() -> Spinner:
            spinner.update(text=Text(timed(last)))
            return spinner

        console = Console(stderr=True, highlight=False)
        with Live(console=console, get_renderable=shown, refresh_per_second=8, transient=True):

            def show(line: str) -> None:
                nonlocal last
                last = line
                if keep:
                    console.print(timed(line), markup=False)

            yield show
        return
    yield lambda line: print(timed(line), file=sys.stderr, flush=True)


# Ctrl-C and the total time limit of a command: before the solver runs they end it, while it runs they cut it short.
#
# with catch_interrupts(say) as interrupt, time_out(total, interrupt):
#     plan = optimize(..., stop=interrupt)

MESSAGE = "interrupted: finishing with the best so far; Ctrl-C again ends at once"


class Interrupt:
    """Whether the user asked to stop, as a function that the solver asks.

    Attributes:
        asked: Ctrl-C was pressed.
        heard: the solver runs, or ran: it asked at least once.
    """

    def __init__(self, say: Callable[[str], None] | None) -> None:
        self.asked = self.heard = False
        self._say = say

    def __call__(self) -> bool:
        self.heard = True
        if self.asked and self._say is not None:
            say, self._say = self._say, None
            say(MESSAGE)
        return self.asked


@contextmanager
def catch_interrupts(say: Callable[[str], None] | None) -> Iterator[Interrupt]:
    """While the solver runs, the first Ctrl-C only asks it to stop; the second, and any before it runs, is a KeyboardInterrupt.

    Outside of this, and in a thread that does not get signals, the handler of signals is what it was. ``say`` tells the user of the
    first one.
    """
    interrupt = Interrupt(say)
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        if interrupt.asked or not interrupt.heard:
            raise KeyboardInterrupt
        interrupt.asked = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


class _OutOfTimeError(BaseException):
    """Raised in the midst of tracing, where nobody may take it for a failure of the model."""


@contextmanager
def time_out(seconds: float | None, interrupt: Interrupt) -> Iterator[None]:
    """End what runs inside when so many seconds are over before the solver runs; the solver then keeps what is left by itself.

    Raises:
        SolverShardError: the time was over, and there is no plan.
    """
    if seconds is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    from solver_shard.clock import out_of_time

    def handle(_number: int, _frame: FrameType | None) -> None:
        if not interrupt.heard:
            raise _OutOfTimeError

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _OutOfTimeError:
        raise out_of_time(seconds, {}) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
