"""Numbers with units, as people write and read them: bytes and nanoseconds.

>>> parse_bytes("70GiB"), format_bytes(70 * 2**30), format_ns(1_234_567)
(75161927680, '70.0 GiB', '1.23 ms')
"""

from __future__ import annotations

import re

from solver_shard.errors import InputError

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS = {**_DECIMAL, **_BINARY}
MAX_BYTES = 2**60
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*\Z")


def parse_bytes(text: str | int, *, least: int = 1) -> int:
    """Read ``70GiB``, ``70GB``, ``1.5 TiB`` or a plain number of bytes; rounded down to a whole byte.

    Raises:
        InputError: the text is not a number with one of the units, or not between ``least`` and 2^60 bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text)
    found = _SIZE.match(text) if isinstance(text, str) else None
    if found is None or found[2].upper() not in _UNITS:
        raise InputError(
            f"cannot read memory size {text!r}; write a number and one unit, without blanks inside the unit: "
            "'70GiB' (2^30 bytes), '70GB' (10^9 bytes), KiB, MiB, TiB, KB, MB, TB, or a plain number of bytes"
        )
    scale = _UNITS[found[2].upper()]
    whole, _, fraction = found[1].partition(".")
    nbytes: int = (int(whole + fraction) * scale) // 10 ** len(fraction)
    if nbytes < least:
        raise InputError(f"memory size {text!r} is less than one byte; write a positive size, as in '70GiB'")
    if nbytes > MAX_BYTES:
        raise InputError(f"memory size {text!r} is more than 2^60 bytes; write the memory of one device, as in '70GiB'")
    return nbytes


def format_bytes(nbytes: int) -> str:
    """Three or so significant digits with a binary unit: ``1.50 MiB``."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 999.5:
            return f"{_digits(value)} {unit}"
    return f"{_digits(value / 1024)} TiB"


def format_ns(nanoseconds: int) -> str:
    """Three or so significant digits with a unit from ns to s: ``1.23 ms``."""
    if abs(nanoseconds) < 1000:
        return f"{nanoseconds} ns"
    value = float(nanoseconds)
    for unit in ("us", "ms"):
        value /= 1000
        if abs(value) < 999.5:
            return f"{_digits(value)} {unit}"
    return f"{_digits(value / 1000)} s"


def _digits(value: float) -> str:
    return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}"
