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
        self._mark = self._now()
        self._spent: dict[str, list[float]] = {}

    def begin(self, name: str) -> str:
        """From here on ``name`` is under way; returns what was."""
        before = self._name
        if name != before:
            now = self._now()
            spent = self._spent.setdefault(before, [0.0] * len(now))
            for i, (new, old) in enumerate(zip(now, self._mark, strict=True)):
                spent[i] += new - old
            self._name, self._mark = name, now
        return before

    def steps(self) -> tuple[PresolveStep, ...]:
        """So far, in the order in which they were first begun."""
        self.begin("")
        found = []
        for name, (nodes, strategies, edges, cells, times, seconds) in self._spent.items():
            if name:
                counts = {"nodes": int(nodes), "strategies": int(strategies), "edges": int(edges), "cells": int(cells), "times": int(times)}
                found.append(PresolveStep(name=name, seconds=seconds, **counts))
        return tuple(found)

    def _now(self) -> tuple[float, ...]:
        return self.nodes, self.strategies, self.edges, self.cells, self.times, time.perf_counter()
