"""Message passing without compiled loops, a wave of nodes at a time.

    waves = Waves(edges, sizes, cores)
    bound = waves.sweep(theta, messages)        # what node after node would do, message for message

A node's messages to later nodes depend on those from earlier ones only, so nodes without a path between them can be done together: wave
w holds the nodes whose longest path of earlier neighbours has w edges. A traced model of 5,000 nodes has some 30 waves: numpy's cost per
call is paid 30 times a sweep instead of 5,000. All values are integers in float64 below 2**53, so sums do not depend on their order.

Ragged rows lie end to end: strategies by node, messages by edge (``messages``: all of ``forward``, over the columns of cores, then all
of ``backward``, over their rows), cells by edge and line. ``np.minimum.reduceat`` takes the least of each line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve.problem import Edge, Floats

CLASH = 2.0**50
"""Stands for FORBIDDEN where a sum that has some must still be compared: larger than any of other costs, and still exact."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Out:
    """Edges from the nodes of a wave to one side; a *line* is a row or column of a core on the side that the messages reach.

    Attributes:
        strategies: positions among the wave's strategies, by edge and own line.
        own_starts: where each own line begins there.
        known: the message that came over each own line.
        cells: core entries by line; ``own`` the own line of each; ``starts`` where each line begins.
        edge_starts: where the lines of each edge begin; ``edge`` the edge of each line.
        targets: the message of each line.
    """

    strategies: Ints
    own_starts: Ints
    known: Ints
    cells: Floats
    own: Ints
    starts: Ints
    edge_starts: Ints
    edge: Ints
    targets: Ints

    def send(self, part: Floats, messages: Floats) -> float:
        """Send what the strategies' shares say, less its least entry per edge; the sum of these."""
        values = np.minimum.reduceat(part[self.strategies], self.own_starts) - messages[self.known]
        found = np.minimum.reduceat(self.cells + values[self.own], self.starts)
        least = np.minimum.reduceat(found, self.edge_starts)
        messages[self.targets] = found - least[self.edge]
        return float(least.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Decided:
    """What the decisions of earlier nodes cost each strategy of a wave; one entry per edge and strategy.

    Attributes:
        node, row_at: of each edge, its earlier node and where the rows of that one's strategies begin.
        edge, width: of each entry, its edge and the width of that one's core.
        cell: of each entry, where its column begins in the pool of cores.
        at: of each entry, its strategy in the wave.
    """

    node: Ints
    row_at: Ints
    edge: Ints
    width: Ints
    cell: Ints
    at: Ints

    def add(self, total: Floats, chosen: Ints, rows: Ints, pool: Floats) -> None:
        row = rows[self.row_at + chosen[self.node]]
        total += np.bincount(self.at, pool[self.cell + row[self.edge] * self.width], len(total))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Wave:
    """Nodes that are done together.

    Attributes:
        nodes: which.
        strategies: flat positions of their strategies.
        incoming: messages to them, by strategy; ``starts`` where each strategy's begin. Nodes without edges come last.
        node_starts: where the strategies of each node begin; ``node`` the node of each strategy.
        share: of each strategy's node.
        ahead, ahead_at: messages from later nodes, and the strategy of each one.
        later, earlier: edges to later and earlier nodes, if any.
        decided: costs of earlier decisions, if any.
    """

    nodes: Ints
    strategies: Ints
    incoming: Ints
    starts: Ints
    node_starts: Ints
    node: Ints
    share: Floats
    ahead: Ints
    ahead_at: Ints
    later: _Out | None
    earlier: _Out | None
    decided: _Decided | None

    def belief(self, theta: Floats, messages: Floats) -> Floats:
        """Costs of their strategies with all messages that come in."""
        total = theta[self.strategies]
        if len(self.starts):
            total[: len(self.starts)] += np.add.reduceat(messages[self.incoming], self.starts)
        return total

    def best(self, total: Floats) -> Ints:
        """The first strategy of least total of every node."""
        least = np.minimum.reduceat(total, self.node_starts)
        hits = np.flatnonzero(total == least[self.node])
        return hits[np.searchsorted(hits, self.node_starts)] - self.node_starts


class Waves:
    """The waves of a problem's edges; each from an earlier to a later node."""

    def __init__(self, edges: Sequence[Edge], sizes: Ints, cores: Sequence[Floats], share: Floats) -> None:
        self.count = len(sizes)
        layout = _Layout(edges, sizes, cores)
        level = _levels(edges, self.count)
        degree = np.bincount(layout.first, minlength=self.count) + np.bincount(layout.second, minlength=self.count)
        order = np.lexsort((np.arange(self.count), degree == 0, level))
        bounds = np.searchsorted(level[order], np.arange(int(level.max(initial=-1)) + 2))
        # Edges by the wave of their first and of their second node, once.
        waves = []
        by_first, by_second = np.argsort(level[layout.first], kind="stable"), np.argsort(level[layout.second], kind="stable")
        first_bounds = np.searchsorted(level[layout.first][by_first], np.arange(len(bounds)))
        second_bounds = np.searchsorted(level[layout.second][by_second], np.arange(len(bounds)))
        for w in range(len(bounds) - 1):
            nodes = order[bounds[w] : bounds[w + 1]]
            out = by_first[first_bounds[w] : first_bounds[w + 1]]
            back = by_second[second_bounds[w] : second_bounds[w + 1]]
            waves.append(layout.wave(nodes, out, back, share))
        self.waves = waves
        self.pool, self.rows = layout.pool, layout.rows

    def sweep(self, theta: Floats, messages: Floats) -> float:
        """One pass forward and one back; the bound."""
        for wave in self.waves:
            if wave.later is not None:
                wave.later.send(np.floor(wave.belief(theta, messages) * wave.share), messages)
        bound = 0.0
        for wave in reversed(self.waves):
            belief = wave.belief(theta, messages)
            least = np.minimum.reduceat(belief, wave.node_starts)
            bound += float(least.sum())
            if wave.earlier is not None:
                bound += wave.earlier.send(np.floor((belief - least[wave.node]) * wave.share), messages)
        return bound

    def decode(self, theta: Floats, messages: Floats) -> Ints:
        """Per node the best strategy given the earlier decisions and the messages of later nodes."""
        chosen = np.zeros(self.count, dtype=np.int64)
        for wave in self.waves:
            total = theta[wave.strategies]
            total += np.bincount(wave.ahead_at, messages[wave.ahead], len(total))
            if wave.decided is not None:
                wave.decided.add(total, chosen, self.rows, self.pool)
            chosen[wave.nodes] = wave.best(total)
        return chosen


def _levels(edges: Sequence[Edge], count: int) -> Ints:
    """Per node the number of edges of its longest path of earlier neighbours."""
    earlier: list[list[int]] = [[] for _ in range(count)]
    for edge in edges:
        earlier[edge.b].append(edge.a)
    level: list[int] = []
    for near in earlier:
        level.append(1 + max(map(level.__getitem__, near)) if near else 0)
    return np.array(level, dtype=np.int64)


class _Layout:
    """Where everything lies, and the index arrays of a wave."""

    def __init__(self, edges: Sequence[Edge], sizes: Ints, cores: Sequence[Floats]) -> None:
        self.edges, self.cores, self.sizes = edges, cores, sizes
        self.offsets = _starts(sizes)
        self.first = np.array([edge.a for edge in edges], dtype=np.int64)
        self.second = np.array([edge.b for edge in edges], dtype=np.int64)
        self.height = np.array([core.shape[0] for core in cores], dtype=np.int64)
        self.width = np.array([core.shape[1] for core in cores], dtype=np.int64)
        self.forward = _starts(self.width)[:-1]
        self.backward = _starts(self.height)[:-1] + int(self.width.sum())
        self.row_at = _starts(sizes[self.first])[:-1]
        self.rows = np.concatenate([np.zeros(0, dtype=np.int64), *[edge.rows for edge in edges]])
        place: dict[int, int] = {}
        pool = [np.zeros(0)]
        end = 0
        for core in cores:
            if id(core) not in place:
                place[id(core)] = end
                pool.append(np.minimum(core, CLASH).ravel())
                end += core.size
        self.pool = np.concatenate(pool)
        self.pooled = np.array([place[id(core)] for core in cores], dtype=np.int64)

    def wave(self, nodes: Ints, out: Ints, back: Ints, share: Floats) -> _Wave:
        sizes = self.sizes[nodes]
        begin = _starts(sizes)
        strategies = np.repeat(self.offsets[nodes], sizes) + _within(sizes)
        place = np.full(len(self.sizes), -1, dtype=np.int64)
        place[nodes] = begin[:-1]
        ahead_at, ahead = self._incoming(out, place, ahead=True)
        behind_at, behind = self._incoming(back, place, ahead=False)
        at = np.concatenate([ahead_at, behind_at])
        order = np.argsort(at, kind="stable")
        return _Wave(
            nodes=nodes,
            strategies=strategies,
            incoming=np.concatenate([ahead, behind])[order],
            starts=np.searchsorted(at[order], np.arange(int(at.max(initial=-1)) + 1)),
            node_starts=begin[:-1],
            node=np.repeat(np.arange(len(nodes)), sizes),
            share=np.repeat(share[nodes], sizes),
            ahead=ahead,
            ahead_at=ahead_at,
            later=self._out(out, place, ahead=True),
            earlier=self._out(back, place, ahead=False),
            decided=self._decided(back, behind_at, behind),
        )

    def _incoming(self, edges: Ints, place: Ints, *, ahead: bool) -> tuple[Ints, Ints]:
        """Of every edge and strategy of its node in the wave: the strategy's place, and the message from the other node."""
        at, message = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for e in edges.tolist():
            edge = self.edges[e]
            node, lines, start = (edge.a, edge.rows, self.backward[e]) if ahead else (edge.b, edge.cols, self.forward[e])
            at.append(place[node] + np.arange(len(lines)))
            message.append(start + lines)
        return np.concatenate(at), np.concatenate(message)

    def _decided(self, edges: Ints, at: Ints, message: Ints) -> _Decided | None:
        if not len(edges):
            return None
        edge = np.repeat(np.arange(len(edges)), self.sizes[self.second[edges]])
        return _Decided(
            node=self.first[edges],
            row_at=self.row_at[edges],
            edge=edge,
            width=self.width[edges][edge],
            cell=self.pooled[edges][edge] + message - self.forward[edges][edge],
            at=at,
        )

    def _out(self, edges: Ints, place: Ints, *, ahead: bool) -> _Out | None:
        if not len(edges):
            return None
        lines, own_lines = (self.width[edges], self.height[edges]) if ahead else (self.height[edges], self.width[edges])
        to, known = (self.forward, self.backward) if ahead else (self.backward, self.forward)
        strategies, cells, own, sizes = [], [], [], []
        begin = _starts(own_lines)
        for e, start in zip(edges.tolist(), begin.tolist(), strict=False):
            edge = self.edges[e]
            lines_of, node = (edge.rows, edge.a) if ahead else (edge.cols, edge.b)
            strategies.append(place[node] + np.argsort(lines_of, kind="stable"))
            sizes.append(np.bincount(lines_of))
            core = self.cores[e].T if ahead else self.cores[e]
            cells.append(core.ravel())
            own.append(start + np.broadcast_to(np.arange(core.shape[1]), core.shape).ravel())
        return _Out(
            strategies=np.concatenate(strategies),
            own_starts=_starts(np.concatenate(sizes))[:-1],
            known=np.repeat(known[edges], own_lines) + _within(own_lines),
            cells=np.concatenate(cells),
            own=np.concatenate(own),
            starts=_starts(np.repeat(own_lines, lines))[:-1],
            edge_starts=_starts(lines)[:-1],
            edge=np.repeat(np.arange(len(edges)), lines),
            targets=np.repeat(to[edges], lines) + _within(lines),
        )


def _starts(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)]).astype(np.int64)


def _within(lengths: Ints) -> Ints:
    """0, 1, ... within each run of the given lengths."""
    return np.arange(int(lengths.sum())) - np.repeat(_starts(lengths)[:-1], lengths)
