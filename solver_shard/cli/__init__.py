"""The command line. ``main`` is the console script; everything else is imported when a command needs it."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence

from solver_shard.cli.terminal import ERROR, INFEASIBLE, INTERRUPTED, OK

MOST_SAID = 4000
"""Characters of an error: a name in a file can have millions."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 ok, 1 error, 2 usage, 3 no plan fits (130 interrupted)."""
    from solver_shard.cli.app import app
    from solver_shard.errors import InfeasibleError, InternalError, SolverShardError

    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        app(given, prog_name="solver-shard", obj=tuple(given))
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # typer's way to hand on a KeyboardInterrupt
            print("interrupted", file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else OK if stop.code is None else ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone (| head); say nothing more
        return OK
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, InternalError):
            print(
                f"error: {_shown(error)}\nThis is a bug in solver-shard; please report it with the output of the same command and --debug.",
                file=sys.stderr,
            )
        elif isinstance(error, SolverShardError):
            print(f"error: {_shown(error)}", file=sys.stderr)
            for line in error.details if isinstance(error, InfeasibleError) else ():
                print(f"  {_shown(line)}", file=sys.stderr)
        else:
            what = _shown(f"{type(error).__name__}: {error}")
            print(f"error: {what}\nThis was not expected; run the same command with --debug for a traceback.", file=sys.stderr)
        return INFEASIBLE if isinstance(error, InfeasibleError) else ERROR
    return OK


def _shown(what: object) -> str:
    """A message that may hold names from a file: nothing in it steers the terminal, and it ends."""
    from solver_shard.errors import SolverShardError, printable

    text = str(what)
    text = text if len(text) <= MOST_SAID else f"{text[:MOST_SAID]}... ({len(text):,} characters)"
    return text if isinstance(what, SolverShardError) else printable(text)


def run() -> None:
    """The console script: run the command line and exit, without waiting for a solver that would not stop."""
    code = main()
    waiting = sys.modules.get("solver_shard.solve.limits")  # not loaded, so nothing waits, where nothing was solved
    if waiting is not None and waiting.left_behind():
        with contextlib.suppress(OSError, ValueError):  # closed, by us or by their reader
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
