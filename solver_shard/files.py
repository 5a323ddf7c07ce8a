"""Files that are written whole or not at all.

>>> write_whole("plan.json", text)
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from solver_shard.errors import InputError


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
