"""Progress of long stages on stderr: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from solver_shard.errors import printable


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
