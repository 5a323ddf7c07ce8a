"""``-o``: whether a file can be written is said before the work is done for it; meanwhile it holds the best so far."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import typer

from solver_shard.errors import InputError

T = TypeVar("T")


def check_output(output: Path | None, *sources: Path | str | None) -> None:
    """Refuse, as wrong usage, an output that is not a file in a folder that exists and can be written, or is one of the ``sources``."""
    if output is None:
        return
    try:
        fits = (output.is_file() or not output.exists()) and output.parent.is_dir() and os.access(output.parent, os.W_OK)
    except OSError:  # as where the name is too long
        fits = False
    if not fits:
        raise typer.BadParameter(f"cannot write {output}: give a file in a folder that exists and can be written", param_hint="--output")
    for source in sources:
        if source is not None and os.path.exists(source) and output.exists() and output.samefile(source):
            raise typer.BadParameter(f"{output} is what is read, and would be lost; give another file", param_hint="--output")


def written_if_possible(write: Callable[[T], None]) -> Callable[[T], None]:
    """A write that may fail, because the search goes on and its result will be written once more, which says what is wrong."""

    def attempt(what: T) -> None:
        try:
            write(what)
        except InputError:
            return

    return attempt
