"""What each transformation of presolve removed, and the time it took.

ledger.begin("followers")      # what is counted and the time that passes from here on belong to followers
ledger.nodes += 1
print(table(ledger.steps()))
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PresolveStep:
    """What one kind of transformation removed, all its uses together; a negative number was added.

    Attributes:
        name: as in the documentation of presolve.
        nodes, strategies, edges: how many.
        cells: of the edges' compact tables.
        times: at which memory is limited.
        seconds: it took.
    """

    name: str
    nodes: int
    strategies: int
    edges: int
    cells: int
    times: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.name:<14} {self.nodes:>8} {self.strategies:>10} {self.edges:>8} {self.cells:>11} {self.times:>7} {self.seconds:>8.2f} s"
        )


def table(steps: Sequence[PresolveStep]) -> str:
    """One line per step under a heading, and their sum."""
    head = f"{'presolve':<14} {'nodes':>8} {'strategies':>10} {'edges':>8} {'cells':>11} {'times':>7} {'time':>10}"
    total = PresolveStep(
        name="removed",
        nodes=sum(step.nodes for step in steps),
        strategies=sum(step.strategies for step in steps),
        edges=sum(step.edges for step in steps),
        cells=sum(step.cells for step in steps),
        times=sum(step.times for step in steps),
        seconds=sum(step.seconds for step in steps),
    )
    return "\n".join([head, *map(str, steps), str(total)])


class Ledger:
    """Counts what is removed under the name of what is under way.

    Attributes:
        nodes, strategies, edges, cells, times: removed so far; to be added to.
    """

    def __init__(self) -> None:
        self.nodes = self.strategies = self.edges = self.cells = self.times = 0
        self._name = ""
        self._counts, self._seconds = self._now(), time.perf_counter()
        self._spent: dict[str, _Spent] = {}

    def begin(self, name: str) -> str:
        """From here on ``name`` is under way; returns what was."""
        before = self._name
        if name != before:  # tens of thousands of times, most of which remove nothing
            seconds, counts = time.perf_counter(), self._now()
            spent = self._spent.get(before)
            if spent is None:
                spent = self._spent[before] = _Spent()
            spent.seconds += seconds - self._seconds
            if counts != self._counts:
                spent.counts = [total + new - old for total, new, old in zip(spent.counts, counts, self._counts, strict=True)]
            self._name, self._counts, self._seconds = name, counts, seconds
        return before

    def steps(self) -> tuple[PresolveStep, ...]:
        """So far, in the order in which they were first begun."""
        self.begin("")
        found = []
        for name, spent in self._spent.items():
            if name:
                nodes, strategies, edges, cells, times = map(int, spent.counts)
                found.append(
                    PresolveStep(
                        name=name, nodes=nodes, strategies=strategies, edges=edges, cells=cells, times=times, seconds=spent.seconds
                    )
                )
        return tuple(found)

    def _now(self) -> tuple[int, ...]:
        return self.nodes, self.strategies, self.edges, self.cells, self.times


class _Spent:
    """What one kind of transformation removed and took so far."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0, 0, 0, 0, 0]
        self.seconds = 0.0
