"""What is known of the cores of edges: found out once for each core, however many edges share it.

    cores = Cores()
    core = cores.of(edge.core)          # as seen from the edge's first node
    core.turned                         # the same from its second
    core.normal, core.alive, core.sole

A model repeats its layers, so thousands of edges share some dozens of cores; and what is done to one of them, by slicing, adding or
eliminating, is done to its copies with the same result. ``Cores.made`` keeps such results, so that copies share what comes out as well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import TypeVar

import numpy as np

from solver_shard.choice.graph import FORBIDDEN, Ints
from solver_shard.solve.spans import Bools

T = TypeVar("T")


class Core:
    """A core seen from the node of its rows.

    Attributes:
        cells: int64[rows, columns].
        turned: the same core seen from the node of its columns.
    """

    def __init__(self, cells: Ints, turned: Core | None = None) -> None:
        self.cells = cells
        self.turned = Core(cells.T, self) if turned is None else turned

    @cached_property
    def low(self) -> Ints:
        """The least entry of every row."""
        return self.cells.min(axis=1)

    @cached_property
    def alive(self) -> Bools | None:
        """Which rows have an allowed entry; None for all of them."""
        alive: Bools = self.low < FORBIDDEN
        return None if alive.all() else alive

    @cached_property
    def normal(self) -> bool:
        """Whether every row and column has a zero."""
        return not (self.low.any() or self.turned.low.any())

    @cached_property
    def zero(self) -> bool:
        """Whether all entries are zero."""
        return not self.cells.any()

    @cached_property
    def parts(self) -> tuple[Ints, Ints | None, Ints | None]:
        """(core, left, right): cells = core + left[row] + right[column] with the least core; None for zeros.

        Lines that are forbidden as a whole keep their entries: arc consistency removes them when their node's turn comes.
        """
        cells = self.cells
        left = np.where(self.low >= FORBIDDEN, 0, self.low)
        if left.any():
            cells = np.where(cells >= FORBIDDEN, FORBIDDEN, cells - left[:, None])
        low = cells.min(axis=0)
        right = np.where(low >= FORBIDDEN, 0, low)
        if right.any():
            cells = np.where(cells >= FORBIDDEN, FORBIDDEN, cells - right[None, :])
        return cells, left if left.any() else None, right if right.any() else None

    @cached_property
    def sole(self) -> Ints | None:
        """The only allowed column of every row; None where some row has another number of them."""
        allowed = self.cells < FORBIDDEN
        return allowed.argmax(axis=1) if (np.count_nonzero(allowed, axis=1) == 1).all() else None

    @cached_property
    def cheapest(self) -> Ints:
        """The first column of the least entry of every row."""
        return self.cells.argmin(axis=1)


class Cores:
    """Cores by identity, and results computed from them. All are kept alive, so that identities stay unique."""

    def __init__(self) -> None:
        self._known: dict[int, Core] = {}
        self._made: dict[Hashable, object] = {}

    def of(self, cells: Ints) -> Core:
        """What is known of an array; its transpose ``of(cells).turned.cells`` is one array for all."""
        core = self._known.get(id(cells))
        if core is None:
            core = self._known[id(cells)] = Core(cells)
            self._known[id(core.turned.cells)] = core.turned
        return core

    def made(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of ``make``, kept under a key; the cores whose identities are part of it must be known here."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]  # a key names what is made
