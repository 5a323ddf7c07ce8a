"""How much of a collective's time stays exposed when part of it runs beside compute."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Time = TypeVar("Time", int, NDArray[np.int64])
_PARTS = 1_000_000


def exposed(nanoseconds: Time, overlap: float) -> Time:
    """Nanoseconds that are left when ``overlap`` (0 to 1) of them is hidden; rounded up, so never less than the exact value.

    >>> exposed(1000, 0.25), exposed(7, 0.5), exposed(7, 1.0)
    (750, 4, 0)
    """
    left = _PARTS - round(overlap * _PARTS)
    return -(-nanoseconds * left // _PARTS)
