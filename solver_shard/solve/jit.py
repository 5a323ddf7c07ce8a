"""Compilation of the inner loops that numpy cannot batch: numba, cached on disk.

    @compiled
    def kernel(values): ...

Kernels are plain Python over numpy arrays and scalars: with ``NUMBA_DISABLE_JIT=1`` they run as they are, with the same results.

The first run that needs them compiles for about 15 s of one core; numba keeps the result beside the modules, or in
``NUMBA_CACHE_DIR`` where that is set or the modules' folder cannot be written. Importing numba takes longer than solving a small
problem, so only modules of the way of large problems import this one, and they are themselves imported where a problem is large
(``bounding.is_large``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba

P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compile on first use. Values are never NaN, infinities are allowed, sums keep their order."""
    result: Callable[P, T] = numba.njit(cache=True, fastmath={"nnan", "nsz"}, error_model="numpy")(function)
    return result
