"""The way back from a presolved problem: every transformation with its own inverse.

    full = postsolve.restore(assignment)         # an assignment of the reduced problem as one of the original
    masks = postsolve.reduce({node: mask})       # restrictions on the original as restrictions on the reduced problem

A stage of presolve leaves a ``Merge`` (many nodes at once, aliases.py) or ``Steps`` (one node at a time, reducer.py). ``Postsolve`` holds
the stages in the order in which they were done.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from solver_shard.graph.choice_graph import Bools, Ints

UNKNOWN = -2
"""In place of the node that one follows."""


def _after(second: Ints, first: Ints | None) -> Ints:
    """One map of strategies after another."""
    return second if first is None else second[first]


@dataclass(frozen=True, slots=True)
class Restrict:
    """Node keeps the strategies ``kept``: x_old = kept[x_new]."""

    node: int
    kept: Ints


@dataclass(frozen=True, slots=True)
class Follow:
    """Node's strategy is a function of another node's: x = strategy_of[x_leader]."""

    node: int
    leader: int
    strategy_of: Ints


@dataclass(frozen=True, slots=True)
class Eliminate:
    """Node's best strategy given its neighbours': best[rows[x_a], cols[x_b]] (or best[rows[x_a]] with one, best[()] with none)."""

    node: int
    neighbours: tuple[int, ...]
    maps: tuple[Ints, ...]
    best: Ints


Step = Restrict | Follow | Eliminate


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """x[v] = strategies[offsets[v] + y], y the strategy of node ``group[v]`` of the smaller problem (0 where that is -1: decided)."""

    group: Ints
    offsets: Ints
    strategies: Ints

    def restore(self, assignment: Ints) -> Ints:
        """The larger problem's assignment for one of the smaller."""
        chosen = np.append(assignment, 0)[self.group]
        result: Ints = self.strategies[self.offsets[:-1] + chosen]
        return result

    def followed(self, owner: Ints, maps: Sequence[Ints | None]) -> tuple[Ints, list[Ints | None]]:
        """See ``Postsolve.followed``: from what is so of the smaller problem to what is so of the larger one."""
        own = [self.strategies[start:stop] for start, stop in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True)]
        groups = self.group.tolist()
        return np.append(owner, -1)[self.group], [row if g < 0 else _after(row, maps[g]) for g, row in zip(groups, own, strict=True)]

    def reduce(self, allowed: Mapping[int, Bools]) -> dict[int, Bools]:
        """Restrictions on nodes as restrictions on their groups; what cannot be said or met is dropped."""
        masks: dict[int, Bools] = {}
        for v, mask in sorted(allowed.items()):
            g = int(self.group[v])
            own = mask[self.strategies[self.offsets[v] : self.offsets[v + 1]]]
            both = own & masks[g] if g in masks else own
            if g >= 0 and both.any():
                masks[g] = both
        return masks


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """What was done to single nodes.

    Attributes:
        steps: in order.
        count: nodes of the larger problem.
        nodes: node of the larger problem behind each one of the smaller.
    """

    steps: Sequence[Step]
    count: int
    nodes: Ints

    def restore(self, assignment: Ints) -> Ints:
        """The larger problem's assignment for one of the smaller."""
        full = np.zeros(self.count, dtype=np.int64)
        full[self.nodes] = assignment
        for step in reversed(self.steps):
            if isinstance(step, Restrict):
                full[step.node] = step.kept[full[step.node]]
            elif isinstance(step, Follow):
                full[step.node] = step.strategy_of[full[step.leader]]
            else:
                full[step.node] = step.best[tuple(m[full[w]] for m, w in zip(step.maps, step.neighbours, strict=True))]
        return full

    def followed(self, owner: Ints, maps: Sequence[Ints | None]) -> tuple[Ints, list[Ints | None]]:
        """See ``Postsolve.followed``: from what is so of the smaller problem to what is so of the larger one."""
        owners = np.full(self.count, UNKNOWN, dtype=np.int64)
        owners[self.nodes] = owner
        functions: list[Ints | None] = [None] * self.count
        for v, own in zip(self.nodes.tolist(), maps, strict=True):
            functions[v] = own
        for step in reversed(self.steps):
            v = step.node
            if isinstance(step, Restrict):
                functions[v] = _after(step.kept, functions[v])
            elif isinstance(step, Follow):
                owners[v], functions[v] = owners[step.leader], _after(step.strategy_of, functions[step.leader])
            elif not step.neighbours:
                owners[v], functions[v] = -1, step.best.reshape(1)
        return owners, functions

    def reduce(self, allowed: Mapping[int, Bools]) -> dict[int, Bools]:
        """Restrictions on the larger problem's nodes; what cannot be said or met is dropped."""
        masks = dict(allowed)
        for step in self.steps:
            own = masks.get(step.node)
            if own is None:
                continue
            if isinstance(step, Restrict):
                rest = np.asarray(own[step.kept], dtype=bool)
                if rest.any():
                    masks[step.node] = rest
                else:
                    del masks[step.node]
            elif isinstance(step, Follow):
                leads = np.asarray(own[step.strategy_of], dtype=bool)
                known = masks.get(step.leader)
                both = leads if known is None else np.asarray(leads & known)
                if both.any():
                    masks[step.leader] = both
        return {i: masks[v] for i, v in enumerate(self.nodes.tolist()) if v in masks}


@dataclass(frozen=True, slots=True, eq=False)
class Postsolve:
    """The way back (and forth) between a problem and its reduced form.

    Attributes:
        stages: in the order in which they were done.
        size: nodes of the reduced form.
        log: what each transformation removed.
    """

    stages: Sequence[Merge | Steps]
    size: int
    log: tuple[PresolveStep, ...] = ()

    def restore(self, assignment: Ints) -> Ints:
        """The original's assignment for one of the reduced form: of the same cost, and of the same bytes at every time that is left."""
        for stage in reversed(self.stages):
            assignment = stage.restore(assignment)
        return assignment

    def followed(self) -> tuple[Ints, list[Ints | None]]:
        """Which node of the reduced form each of the original's follows, and with which strategy for each of that one's.

        That node is -1 where the strategy is decided: it is the only one then. It is UNKNOWN where a node was eliminated, and its strategy
        depends on several. No strategies (None) are the same ones.
        """
        owner: Ints = np.arange(self.size)
        maps: list[Ints | None] = [None] * self.size
        for stage in reversed(self.stages):
            owner, maps = stage.followed(owner, maps)
        return owner, maps

    def reduce(self, allowed: Mapping[int, Bools]) -> list[Bools | None]:
        """Restrictions on the original's nodes as restrictions on the reduced form's; what cannot be said or met is dropped."""
        masks = {v: np.asarray(mask, dtype=bool) for v, mask in allowed.items() if np.any(mask)}
        for stage in self.stages:
            masks = stage.reduce(masks)
        return [masks.get(v) for v in range(self.size)]


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
    """Counts what each transformation of presolve removed, and the time it took, under the name of what is under way.

        ledger.begin("followers")      # what is counted and the time that passes from here on belong to followers
        ledger.nodes += 1
        print(table(ledger.steps()))

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
