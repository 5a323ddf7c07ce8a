"""Message passing (TRW-S, Kolmogorov 2006) on a problem without its memory limit: a lower bound and a reparametrisation.

    messages = Messages(problem, scale)
    bound = messages.sweep(theta)               # rises from call to call, at most min over x of theta(x) + tables(x)
    parts = messages.reparametrise(theta)       # the same costs, all >= 0, plus parts.constant; parts.constant is the bound

Costs are integers times ``scale`` (a power of two), kept in float64. Messages are rounded down to integers, so every sum is
exact as long as it stays below 2**53 (``scale_of`` sees to that) and the bound is valid as computed: no tolerance anywhere.
FORBIDDEN is infinite here. Messages are kept per row and column of an edge's core, not per strategy.

``Messages`` is the algorithm, ``Waves`` its sweeps in numpy; of what it leaves ``consistent`` rounds an assignment, and
``min_marginals`` bounds every strategy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import MIB, Bools, Ints
from solver_shard.graph.narrowing import Arc, Arcs
from solver_shard.solve.problem import Edge, Floats, Problem, starts_of, within

HEADROOM = 2.0**49
"""Largest scaled objective; leaves sums of differences exact in float64."""


__all__ = ["CLASH", "HEADROOM", "Grouping", "Messages", "Parts", "min_marginals", "scale_of", "scaled", "scaled_constant"]


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
    """Message passing without compiled loops, a wave of nodes at a time: what node after node would do, message for message.

    A node's messages to later nodes depend on those from earlier ones only, so nodes without a path between them can be done together: wave
    w holds the nodes whose longest path of earlier neighbours has w edges. A traced model of 5,000 nodes has some 30 waves: numpy's cost
    per call is paid 30 times a sweep instead of 5,000. All values are integers in float64 below 2**53, so sums do not depend on their
    order.

    Ragged rows lie end to end: strategies by node, messages by edge (``messages``: all of ``forward``, over the columns of cores, then all
    of ``backward``, over their rows), cells by edge and line. ``np.minimum.reduceat`` takes the least of each line.
    """

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
        self.offsets = starts_of(sizes)
        self.first = np.array([edge.a for edge in edges], dtype=np.int64)
        self.second = np.array([edge.b for edge in edges], dtype=np.int64)
        self.height = np.array([core.shape[0] for core in cores], dtype=np.int64)
        self.width = np.array([core.shape[1] for core in cores], dtype=np.int64)
        self.forward = starts_of(self.width)[:-1]
        self.backward = starts_of(self.height)[:-1] + int(self.width.sum())
        self.row_at = starts_of(sizes[self.first])[:-1]
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
        begin = starts_of(sizes)
        strategies = np.repeat(self.offsets[nodes], sizes) + within(sizes)
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
        begin = starts_of(own_lines)
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
            own_starts=starts_of(np.concatenate(sizes))[:-1],
            known=np.repeat(known[edges], own_lines) + within(own_lines),
            cells=np.concatenate(cells),
            own=np.concatenate(own),
            starts=starts_of(np.repeat(own_lines, lines))[:-1],
            edge_starts=starts_of(lines)[:-1],
            edge=np.repeat(np.arange(len(edges)), lines),
            targets=np.repeat(to[edges], lines) + within(lines),
        )


ANY = float(np.finfo(np.float64).max)
"""A slack that allows whatever is finite."""


def consistent(edges: Sequence[Edge], unary: Sequence[Floats], tables: Sequence[Floats], slack: float) -> Ints | None:
    """An assignment from parts of the costs: node by node the cheapest given the earlier ones, kept consistent; None where that gets stuck.

    After each decision, strategies whose parts to all that is left of some neighbour are above the slack leave the choice (arc
    consistency); a decision that leaves a node nothing is taken back, and the next best is made. On costs as they are, with an infinite
    slack, that avoids forbidden pairs. On reparametrised costs (``Parts``), which are never negative and mostly zero once the bound has
    settled, with a slack that is a small part of the bound, the assignments that are left are those the bound is made of: where it is
    tight, the walk finds one. Choosing by the messages alone fails there: layers that are alike have equally good strategies that do not
    fit together.

    Args:
        edges: each from an earlier to a later node.
        unary: per node and strategy.
        tables: per edge, over the rows and columns of its core.
        slack: largest part that may be paid.
    """
    domains = _Domains(edges, [row <= slack for row in unary], [table <= slack for table in tables])
    if not domains.settle():
        return None
    lower: list[list[int]] = [[] for _ in unary]
    for e, edge in enumerate(edges):
        lower[edge.b].append(e)
    chosen = np.zeros(len(unary), dtype=np.int64)
    for v, row in enumerate(unary):
        total = row.copy()
        for e in lower[v]:
            edge = edges[e]
            total += tables[e][edge.rows[chosen[edge.a]]][edge.cols]
        total[~domains.left[v]] = np.inf
        while True:
            x = int(total.argmin())
            if not np.isfinite(total[x]):
                return None
            if domains.choose(v, x):
                break
            total[x] = np.inf
        chosen[v] = x
    return chosen


class _Domains:
    """What is left to choose from at each node; always arc consistent after ``settle``."""

    def __init__(self, edges: Sequence[Edge], left: list[Bools], allowed: Sequence[Bools]) -> None:
        hard = [e for e, table in enumerate(allowed) if not table.all()]
        self.left = left
        self.arcs = Arcs(len(left), [Arc(edges[e].a, edges[e].b, allowed[e], edges[e].rows, edges[e].cols) for e in hard])

    def settle(self) -> bool:
        """Make it consistent; false where that leaves some node nothing."""
        return all(left.any() for left in self.left) and self.arcs.propagate(self.left, range(len(self.left))) is None

    def choose(self, v: int, x: int) -> bool:
        """Leave node v one strategy; false, and nothing changed, where that leaves some node nothing."""
        trail = [(v, self.left[v])]
        self.left[v] = np.arange(len(self.left[v])) == x
        if self.arcs.propagate(self.left, [v], removed=lambda w, before, *_: trail.append((w, before))) is None:
            return True
        for w, before in reversed(trail):
            self.left[w] = before
        return False


def min_marginals(messages: Messages, parts: Parts, forests: int, rng: np.random.Generator) -> list[Floats]:
    """How much every strategy costs at least over ``parts.constant``, float64 per node and strategy: bounds for reduced-cost fixing.

    On a forest of the edges the least sum over all assignments with x_v = i is exact by two passes of min-plus products; the tables of the
    other edges are at least their smallest entry, zero. So constant + that sum is a lower bound on the priced cost of every assignment
    with x_v = i: a strategy whose bound exceeds the incumbent cannot be part of a better solution. Of several random spanning forests the
    largest bound counts.
    """
    best = [row.copy() for row in parts.unary]
    count = np.zeros(len(messages.edges))
    for _ in range(forests):
        forest = _forest(messages, count + rng.random(len(messages.edges)))
        for _, e in forest:
            if e >= 0:
                count[e] += 1
        for row, found in zip(best, _tree_marginals(messages, parts, forest), strict=True):
            np.maximum(row, found, out=row)
    return best


def _forest(messages: Messages, key: Floats) -> list[tuple[int, int]]:
    """A spanning forest as (child, edge to its parent), parents first; edges of small key are preferred. Roots have edge -1."""
    n = messages.problem.size
    leader = list(range(n))

    def find(v: int) -> int:
        while leader[v] != v:
            leader[v] = leader[leader[v]]
            v = leader[v]
        return v

    around: list[list[int]] = [[] for _ in range(n)]
    for e in np.argsort(key, kind="stable").tolist():
        a, b = find(messages.edges[e].a), find(messages.edges[e].b)
        if a != b:
            leader[a] = b
            around[messages.edges[e].a].append(e)
            around[messages.edges[e].b].append(e)
    order: list[tuple[int, int]] = []
    seen = [False] * n
    for root in range(n):
        if seen[root]:
            continue
        seen[root] = True
        stack = [(root, -1)]
        while stack:
            v, via = stack.pop()
            order.append((v, via))
            for e in around[v]:
                edge = messages.edges[e]
                w = edge.b if edge.a == v else edge.a
                if not seen[w]:
                    seen[w] = True
                    stack.append((w, e))
    return order


def _tree_marginals(messages: Messages, parts: Parts, forest: list[tuple[int, int]]) -> list[Floats]:
    total = [row.copy() for row in parts.unary]
    up: dict[int, Floats] = {}
    for v, e in reversed(forest):  # children before parents
        if e < 0:
            continue
        edge, table = messages.edges[e], parts.tables[e]
        if edge.b == v:
            up[v] = (table + messages.group_cols[e](total[v])[None, :]).min(axis=1)
            total[edge.a] += up[v][edge.rows]
        else:
            up[v] = (table + messages.group_rows[e](total[v])[:, None]).min(axis=0)
            total[edge.b] += up[v][edge.cols]
    least = 0.0
    for v, e in forest:
        if e < 0:
            least += float(total[v].min())
            total[v] -= total[v].min()
            continue
        edge, table = messages.edges[e], parts.tables[e]
        if edge.b == v:
            rest = messages.group_rows[e](total[edge.a]) - up[v]
            total[v] += (table + rest[:, None]).min(axis=0)[edge.cols]
        else:
            rest = messages.group_cols[e](total[edge.b]) - up[v]
            total[v] += (table + rest[None, :]).min(axis=1)[edge.rows]
    return [row + least for row in total]
