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
    def hard(self) -> bool:
        """Whether some pair is forbidden."""
        return bool(self.cells.max() >= FORBIDDEN)

    @cached_property
    def low(self) -> Ints:
        """The least entry of every row."""
        return np.asarray(self.cells.min(axis=1))

    @cached_property
    def alive(self) -> Bools | None:
        """Which rows have an allowed entry; None for all of them."""
        if not self.hard:
            return None
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
    def parts(self) -> tuple[Core, Ints | None, Ints | None]:
        """(core, left, right): cells = core.cells + left[row] + right[column], all of them as small as can be; None for zeros.

        Lines that are forbidden as a whole keep their entries: arc consistency removes them when their node's turn comes.
        """
        cells, left, right = self.cells, _movable(self.low), None
        if left is not None:
            cells = np.where(cells >= FORBIDDEN, FORBIDDEN, cells - left[:, None])
        right = _movable(cells.min(axis=0))
        if right is not None:
            cells = np.where(cells >= FORBIDDEN, FORBIDDEN, cells - right[None, :])
        if left is None and right is None:
            return self, None, None
        core = Core(cells)
        core.hard = core.turned.hard = self.hard
        return core, left, right

    @cached_property
    def sole(self) -> Ints | None:
        """The only allowed column of every row; None where some row has another number of them."""
        if not self.hard:
            return None
        allowed = self.cells < FORBIDDEN
        return allowed.argmax(axis=1) if (np.count_nonzero(allowed, axis=1) == 1).all() else None

    @cached_property
    def idle(self) -> bool:
        """Whether it gives nothing to do: nothing to move to the nodes, no strategy that has no partner, none that is the only one."""
        if not self.normal or self.zero:
            return False
        return not self.hard or (self.sole is None and self.turned.sole is None)

    @cached_property
    def cheapest(self) -> Ints:
        """The first column of the least entry of every row."""
        return np.asarray(self.cells.argmin(axis=1))


def _movable(low: Ints) -> Ints | None:
    """Least entries of lines that may be moved to their node; None where that is nothing."""
    if low.max() >= FORBIDDEN:
        low = np.where(low >= FORBIDDEN, 0, low)
    return low if low.any() else None


class Cores:
    """Cores by identity, and results computed from them. All are kept alive, so that identities stay unique."""

    def __init__(self) -> None:
        self._known: dict[int, Core] = {}
        self._made: dict[Hashable, object] = {}

    def of(self, cells: Ints) -> Core:
        """What is known of an array; its transpose ``of(cells).turned.cells`` is one array for all."""
        return self._known.get(id(cells)) or self.add(Core(cells))

    def add(self, core: Core) -> Core:
        """Make a core known."""
        self._known[id(core.cells)] = core
        self._known[id(core.turned.cells)] = core.turned
        return core

    def made(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of ``make``, kept under a key; the cores whose identities are part of it must be known here."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]  # a key names what is made
