"""Sets of tensors that are connected by ops outside parallel modules."""

from __future__ import annotations


class Regions:
    """Sets of tensors that are connected by local ops, and those in which a plan cannot be followed."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))
        self._bad: set[int] = set()

    def _root(self, t: int) -> int:
        while self._parent[t] != t:
            self._parent[t] = self._parent[self._parent[t]]
            t = self._parent[t]
        return t

    def join(self, tensors: list[int]) -> None:
        for t in tensors[1:]:
            self._parent[self._root(t)] = self._root(tensors[0])

    def spoil(self, t: int) -> None:
        """After all joins."""
        self._bad.add(self._root(t))

    def is_bad(self, t: int) -> bool:
        return self._root(t) in self._bad
