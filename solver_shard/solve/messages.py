"""Message passing (TRW-S, Kolmogorov 2006) on a problem without its memory limit: a lower bound and a reparametrisation.

    messages = Messages(problem, scale)
    bound = messages.sweep(theta)               # rises from call to call, at most min over x of theta(x) + tables(x)
    parts = messages.reparametrise(theta)       # the same costs, all >= 0, plus parts.constant; parts.constant is the bound

Costs are integers times ``scale`` (a power of two), kept in float64. Messages are rounded down to integers, so every sum is
exact as long as it stays below 2**53 (``scale_of`` sees to that) and the bound is valid as computed: no tolerance anywhere.
FORBIDDEN is infinite here. Messages are kept per row and column of an edge's core, not per strategy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from solver_shard.choice.graph import FORBIDDEN, Ints
from solver_shard.solve.problem import Floats, Problem
from solver_shard.solve.rounding import ANY, consistent
from solver_shard.solve.solution import MIB
from solver_shard.solve.waves import CLASH, Waves

HEADROOM = 2.0**49
"""Largest scaled objective; leaves sums of differences exact in float64."""


__all__ = ["CLASH", "HEADROOM", "Grouping", "Messages", "Parts", "scale_of", "scaled", "scaled_constant"]


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A reparametrisation: cost(x) + penalties(x) = constant + sum of unary + sum of tables, every entry >= 0.

    ``unary`` is float64 per node and strategy; ``tables[e]`` float64 over the rows and columns of the core of edge e.
    """

    constant: float
    unary: list[Floats]
    tables: list[Floats]


class Grouping:
    """Minimum over the strategies of each row of a core."""

    __slots__ = ("count", "order", "starts")

    def __init__(self, rows: Ints, count: int) -> None:
        self.count = count
        identity = len(rows) == count
        order = np.argsort(rows, kind="stable")
        if identity and (order == np.arange(count)).all():
            self.order: Ints | None = None
            self.starts: Ints | None = None
        else:
            self.order = order
            self.starts = None if identity else np.searchsorted(rows[order], np.arange(count))

    def __call__(self, values: Floats) -> Floats:
        if self.order is None:
            return values
        if self.starts is None:
            return values[self.order]
        return np.minimum.reduceat(values[self.order], self.starts)


class Messages:
    """The state of message passing on one problem.

    Attributes:
        forward: per edge (a, b), the message to b over the columns of the core.
        backward: per edge, the message to a over its rows.
        work: seconds-like units of one sweep.
    """

    def __init__(self, problem: Problem, scale: float) -> None:
        self.problem, self.scale = problem, scale
        n = problem.size
        self.edges = problem.edges
        shared: dict[int, Floats] = {}
        self.cores: list[Floats] = []
        for edge in problem.edges:
            key = id(edge.core)
            if key not in shared:
                shared[key] = scaled(edge.core, scale)
            self.cores.append(shared[key])
        self.group_rows = [Grouping(e.rows, e.core.shape[0]) for e in problem.edges]
        self.group_cols = [Grouping(e.cols, e.core.shape[1]) for e in problem.edges]
        widths, heights = [e.core.shape[1] for e in problem.edges], [e.core.shape[0] for e in problem.edges]
        self._all = np.zeros(sum(widths) + sum(heights))
        views = np.split(self._all, np.cumsum(widths + heights)[:-1]) if problem.edges else []
        self.forward: list[Floats] = views[: len(widths)]
        self.backward: list[Floats] = views[len(widths) :]
        self.upper: list[list[int]] = [[] for _ in range(n)]  # edges to later nodes
        self.lower: list[list[int]] = [[] for _ in range(n)]  # edges to earlier nodes
        for i, edge in enumerate(problem.edges):
            self.upper[edge.a].append(i)
            self.lower[edge.b].append(i)
        self.share = [1.0 / max(1, len(self.upper[v]), len(self.lower[v])) for v in range(n)]
        self.theta = [scaled(row, scale) for row in problem.unary]
        self.constant = scaled_constant(problem.constant, scale)
        cells = sum(e.core.size for e in problem.edges)
        self.work = 2 * (1.2e-9 * cells + 1e-5 * len(problem.edges) + 5e-6 * n)

    @cached_property
    def _waves(self) -> Waves:
        return Waves(self.edges, self.problem.sizes, self.cores, np.array(self.share))

    def sweep(self, theta: list[Floats]) -> float:
        """One pass forward and one back; the bound (without the constant)."""
        return self._waves.sweep(_flat(theta), self._all)

    def belief(self, theta: list[Floats], v: int) -> Floats:
        """theta plus all messages that come in."""
        total = theta[v].copy()
        edges = self.edges
        for e in self.lower[v]:
            total += self.forward[e][edges[e].cols]
        for e in self.upper[v]:
            total += self.backward[e][edges[e].rows]
        return total

    def decode(self, theta: list[Floats]) -> Ints:
        """An assignment: node by node, the best given the earlier ones and the messages of the later ones.

        Call after a sweep. It may hold forbidden pairs where the messages do not see far enough.
        """
        return self._waves.decode(_flat(theta), self._all)

    def decode_consistent(self, theta: list[Floats]) -> Ints | None:
        """As ``decode``, but without forbidden pairs. Slower, and rarely without an answer (None)."""
        unary = []
        for v, row in enumerate(theta):
            total = row.copy()
            for e in self.upper[v]:
                total += self.backward[e][self.edges[e].rows]
            unary.append(total)
        return consistent(self.edges, unary, self.cores, ANY)

    def decode_tight(self, theta: list[Floats], slack: float) -> Ints | None:
        """An assignment all of whose parts in the reparametrisation are at most ``slack``; None where none was found."""
        before = self._all.copy()
        parts = self.reparametrise(theta)
        self._all[:] = before
        return consistent(self.edges, parts.unary, parts.tables, slack)

    def reparametrise(self, theta: list[Floats]) -> Parts:
        """Exact reparametrisation from the current messages, by one more pass backward; ``constant`` includes the problem's."""
        n = len(theta)
        constant = self.constant
        unary: list[Floats] = [np.zeros(0)] * n
        tables: list[Floats] = [np.zeros((0, 0))] * len(self.edges)
        for v in range(n - 1, -1, -1):
            belief = self.belief(theta, v)
            low = float(belief.min())
            constant += low
            belief -= low
            part = np.floor(belief * self.share[v])
            lower = self.lower[v]
            unary[v] = belief - len(lower) * part
            for e in lower:
                # The share differs between strategies of one column: what exceeds the column's least stays with the node.
                least = self.group_cols[e](part)
                unary[v] += part - least[self.edges[e].cols]
                table = self.cores[e] + (least - self.forward[e])[None, :]
                message = table.min(axis=1)
                table -= message[:, None]
                low = float(message.min())
                constant += low
                self.backward[e][:] = message - low
                tables[e] = table
        return Parts(constant, unary, tables)


def _flat(rows: list[Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *rows])


def scaled(costs: Ints, scale: float) -> Floats:
    """Integer costs times a power of two as floats, rounded down, FORBIDDEN as infinity."""
    shift = -round(math.log2(scale))
    result = (costs >> shift).astype(np.float64) if shift > 0 else costs * scale
    result[costs >= FORBIDDEN] = np.inf
    return np.asarray(result)


def scaled_constant(constant: int, scale: float) -> float:
    """An integer times a power of two, rounded down: beyond 2**53 its float alone may be above it."""
    shift = -round(math.log2(scale))
    return float(constant >> shift if shift > 0 else constant << -shift)


def scale_of(problem: Problem) -> float:
    """The power of two by which costs are multiplied: large, but no sum may come near 2**53."""
    total = float(abs(problem.constant))
    total += sum(float(np.where(row < FORBIDDEN, row, 0).max(initial=0)) for row in problem.unary)
    total += sum(float(np.where(e.core < FORBIDDEN, e.core, 0).max(initial=0)) for e in problem.edges)
    total += problem.weight * float(problem.ceiling()) / MIB
    return float(2.0 ** min(20, int(np.floor(np.log2(HEADROOM / max(total, 1.0))))))
