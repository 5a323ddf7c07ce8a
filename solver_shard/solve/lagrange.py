"""Multipliers on the memory limit at the few times that matter: rows are added where decoded assignments exceed the limit.

For multipliers l >= 0 (scaled cost per byte, one per row) every assignment x within the limit costs at least

    min over x of [cost(x) + sum_t l_t (usage_t(x) - least_t)]  -  sum_t l_t (limit - least_t)

where least_t is in use whatever is chosen. Message passing bounds the minimum from below; products are rounded down and the last sum is
rounded up by more than the rounding of its few hundred operations: the bound is valid as computed.
"""

from __future__ import annotations

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve.flat import Flat
from solver_shard.solve.problem import Floats
from solver_shard.solve.sweeps import MOST

MARGIN = 1e-12


class Rows:
    """Memory rows of some times.

    Attributes:
        times: in the order in which they were added.
        slack: per row, bytes above ``least`` that the limit leaves (at least 1).
    """

    def __init__(self, flat: Flat, most: int = 400) -> None:
        self.flat, self.most = flat, most
        self.limit = flat.limit if flat.limit is not None else 2**62
        self.times: list[int] = []
        self.known: set[int] = set()
        self.index: list[Ints] = []
        self.bytes: list[Ints] = []
        self.least: list[int] = []

    def __len__(self) -> int:
        return len(self.times)

    def copy(self) -> Rows:
        """The same rows, to add others to."""
        other = Rows(self.flat, self.most)
        other.times, other.known = list(self.times), set(self.known)
        other.index, other.bytes, other.least = list(self.index), list(self.bytes), list(self.least)
        return other

    def add(self, time: int) -> bool:
        """Add the row of a time; false if it is there."""
        if time in self.known:
            return False
        where, above, least = self.flat.row(time)
        self.known.add(time)
        self.times.append(time)
        self.index.append(where)
        self.bytes.append(above)
        self.least.append(least)
        return True

    @property
    def slack(self) -> Floats:
        return np.maximum(1.0, self.limit - np.array(self.least, dtype=np.float64))

    def price(self, multipliers: Floats) -> Floats:
        """theta plus penalties, rounded down; less where they are beyond any use (see sweeps.py)."""
        total = np.zeros(len(self.flat.theta))
        for i in np.flatnonzero(multipliers):
            total[self.index[i]] += multipliers[i] * self.bytes[i]
        result: Floats = np.minimum(self.flat.theta + np.floor(total * (1 - MARGIN)), MOST)
        return result

    def offset(self, multipliers: Floats) -> float:
        """What the bound loses for the bytes that the limit allows; not positive where a plan exists."""
        room = self.limit - np.array(self.least, dtype=np.float64)
        total = float(multipliers @ room)
        return float(np.floor(-total - MARGIN * float(multipliers @ np.abs(room))))

    def exceeded(self, profile: Ints, count: int) -> list[int]:
        """Times of the largest excess, some distance apart from each other and from known ones."""
        found: list[int] = []
        left = profile.copy()
        apart, near = max(1, len(profile) // 150), max(0, len(profile) // 1500)
        for time in self.times:
            left[max(0, time - near) : time + near + 1] = 0
        while len(found) < count and len(left):
            time = int(left.argmax())
            if left[time] <= self.limit:
                break
            found.append(time)
            left[max(0, time - apart) : time + apart + 1] = 0
        return found
