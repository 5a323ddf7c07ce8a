"""Progress of long stages on stderr: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_lines(quiet: bool) -> Iterator[Callable[[str], None] | None]:
    """Give a function that shows a line, or None when nothing is to be shown."""
    if quiet:
        yield None
        return
    start = time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("starting") as status:
            yield lambda line: status.update(f"{time.monotonic() - start:6.1f} s  {line}")
        return
    yield lambda line: print(f"{time.monotonic() - start:6.1f} s  {line}", file=sys.stderr, flush=True)
