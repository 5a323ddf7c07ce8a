"""Files that are written whole or not at all, and read up to a limit.

>>> write_whole("plan.json", text)
>>> read_text("plan.json", 2**20) == text
True
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solver_shard.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesFile:
    """A rules file of the user's: its name, for messages, and its whole text, which plans keep."""

    name: str
    text: str


def read_text(path: str | os.PathLike[str], most: int) -> str:
    """The text of a file in UTF-8. No more than ``most`` bytes are read, of whatever kind it is: a device or a pipe has no size of its own.

    Raises:
        InputError: it is larger.
        OSError, ValueError: as of ``open`` and of decoding; the caller says what the file was to be.
    """
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise InputError(f"{os.fspath(path)} has more than {most:,} bytes, the most that is read of it: is this the right file?")
    return data.decode()


MAX_VALUES = 2**24
"""Values of one JSON text: what is made of them has up to a hundred bytes each, so that few characters can take much memory."""

_PART = r"""(?:[\w-]++|"[^"\n]*"|'[^'\n]*')"""
_DEEP = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*\.[ \t]*{_PART}){{32}}")
"""A key of tables in tables in tables, for which TOML readers take time and memory by the square of its length."""


def read_json(text: str) -> Any:
    """What a JSON text says; ValueError where it is none, is nested too deep, or has more than ``MAX_VALUES`` values."""
    if sum(map(text.count, ",[{")) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES:,} values, the most that are read")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def read_toml(text: str) -> dict[str, Any]:
    """What a TOML text says; ValueError where it is none, is nested too deep, or a key has more than 32 parts."""
    if (deep := _DEEP.search(text)) is not None:
        line = text.count("\n", 0, deep.start()) + 1
        raise ValueError(f"line {line} has a name of more than 32 parts, {deep[0][:40]!r}...; write a name with dots in quotes")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def write_whole(path: str | os.PathLike[str], text: str | bytes) -> None:
    """Write ``text`` to ``path``: a temporary file in the same folder, then renamed over it, so that a failure leaves what was there.

    Text is written as UTF-8.

    Raises:
        InputError: the folder does not exist or cannot be written, or ``path`` is no regular file.
    """
    temporary: Path | None = None
    try:
        target = Path(path).resolve()
        if target.exists() and not target.is_file():
            raise InputError(f"cannot write {str(path)!r}: it is not a regular file; give the path of a file, or print with --json")
        temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}")
        with temporary.open("xb") as file:
            file.write(text if isinstance(text, bytes) else text.encode())
        os.replace(temporary, target)
    except (OSError, ValueError) as error:  # ValueError: a null byte or half a character in the path
        _discard(temporary)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"cannot write {str(path)!r}: {reason}; give a file in a folder that exists and can be written") from None
    except BaseException:  # a KeyboardInterrupt in the midst of it
        _discard(temporary)
        raise


def _discard(temporary: Path | None) -> None:
    if temporary is not None:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
