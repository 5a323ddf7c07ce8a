"""``-o``: whether a file can be written is said before the work is done for it."""

from __future__ import annotations

import os
from pathlib import Path

import typer


def check_output(output: Path | None) -> None:
    """Refuse, as wrong usage, an output that is not a file in a folder that exists and can be written."""
    if output is None:
        return
    try:
        fits = (output.is_file() or not output.exists()) and output.parent.is_dir() and os.access(output.parent, os.W_OK)
    except OSError:  # as where the name is too long
        fits = False
    if not fits:
        raise typer.BadParameter(f"cannot write {output}: give a file in a folder that exists and can be written", param_hint="--output")
