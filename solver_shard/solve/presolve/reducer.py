"""The mutable workspace of presolve: a problem that shrinks, and the record of how to postsolve each step.

Every step is exact: the best objective of what is left (plus ``constant``) is the best objective of the graph, and
``Postsolve`` turns a solution of what is left into one of the graph of the same cost and no larger use of memory at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from functools import cached_property
from typing import TypeVar

import numpy as np

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import Bools, Ints
from solver_shard.solve import parameters as tuned
from solver_shard.solve.presolve.postsolve import Eliminate, Follow, Ledger, Restrict, Step
from solver_shard.solve.problem import Edge, Problem, at_times, canonical, over_time


class NoAssignment(Exception):  # noqa: N818 - not an error of the program: an answer
    """Forbidden entries leave some node without a strategy."""


class Reducer:
    """A problem under reduction.

    Attributes:
        unary: costs per node, or None where the node is gone.
        adjacent: node -> neighbour -> edge.
        carriers: node -> list of (bytes per strategy, column).
        spans: int64[S, 3], canonical (see problem.py).
        times: int64[times].
        constant: cost of what is gone.
        steps: what was done, in order.
        touched: nodes whose surroundings changed since they were last simplified.
        changed: nodes whose surroundings changed since dominance was last looked for.
        ledger: counts what goes.
        loaded: nodes on whose strategies the load of some window depends.
        cores: what is known of the cores of edges.
    """

    def __init__(self, problem: Problem, ledger: Ledger | None = None, loaded: Collection[int] = ()) -> None:
        self.problem, self.loaded = problem, set(loaded)
        self.ledger = ledger = ledger or Ledger()
        ledger.edges += len(problem.edges)
        ledger.cells += sum(edge.core.size for edge in problem.edges)
        self.unary: list[Ints | None] = list(problem.unary)
        self.adjacent: list[dict[int, Edge]] = [{} for _ in range(problem.size)]
        self.times = problem.times
        self.spans = canonical(problem.spans)
        self._base = problem.base
        self._change: dict[int, int] = {}  # column -> bytes per count that join the base when it is asked for
        self.carriers: list[list[tuple[Ints, int]]] = [[] for _ in range(problem.size)]
        for carrier in problem.carriers:
            self.add_carrier(carrier.node, carrier.usage, carrier.column)
        self.constant = problem.constant
        self.steps: list[Step] = []
        self.touched: set[int] = set()
        self.changed: set[int] = set()
        self.cores = Cores()
        for edge in problem.edges:
            self.add_edge(edge)

    def alive(self) -> list[int]:
        return [v for v, row in enumerate(self.unary) if row is not None]

    def costs(self, v: int) -> Ints:
        row = self.unary[v]
        assert row is not None
        return row

    def size(self, v: int) -> int:
        return len(self.costs(v))

    def core(self, edge: Edge, v: int) -> Core:
        """What is known of an edge's core, seen from v."""
        core = self.cores.of(edge.core)
        return core if edge.a == v else core.turned

    @property
    def base(self) -> Ints:
        """Bytes in use whatever is chosen, int64[times]."""
        if self._change:
            weights = np.zeros(self.problem.width, dtype=np.int64)
            weights[list(self._change)] = list(self._change.values())
            self._base = self._base + over_time(self.spans, weights, len(self._base))
            self._change = {}
        return self._base

    def keep_times(self, keep: Bools) -> None:
        """Keep some times."""
        self.ledger.times += len(keep) - int(keep.sum())
        self._base, self.times = self.base[keep], self.times[keep]
        self.spans = at_times(self.spans, keep)

    def add_edge(self, edge: Edge) -> None:
        """Add an edge; parallel edges become one."""
        a, b = edge.a, edge.b
        known = self.adjacent[a].get(b)
        if known is not None:
            edge = self._sum(known, edge)
        self.set_edge(edge)

    def set_edge(self, edge: Edge) -> None:
        known = self.adjacent[edge.a].get(edge.b)
        if known is None:
            self.ledger.edges -= 1
        else:
            self.ledger.cells += known.core.size
        self.ledger.cells -= edge.core.size
        self.adjacent[edge.a][edge.b] = edge
        self.adjacent[edge.b][edge.a] = edge
        self.touch(edge.a, edge.b)

    def drop_edge(self, a: int, b: int) -> None:
        self.ledger.edges += 1
        self.ledger.cells += self.adjacent[a][b].core.size
        del self.adjacent[a][b]
        del self.adjacent[b][a]
        self.touch(a, b)

    def touch(self, *nodes: int) -> None:
        self.touched.update(nodes)
        self.changed.update(nodes)

    def restrict(self, v: int, keep: Bools) -> None:
        """Keep some strategies of a node."""
        if keep.all():
            return
        kept = np.flatnonzero(keep)
        if len(kept) == 0:
            raise NoAssignment(v)
        self.ledger.strategies += len(keep) - len(kept)
        self.steps.append(Restrict(v, kept))
        self.unary[v] = self.costs(v)[kept]
        self.carriers[v] = [(usage[kept], column) for usage, column in self.carriers[v]]
        for edge in list(self.adjacent[v].values()):
            rows, cols = (edge.rows[kept], edge.cols) if edge.a == v else (edge.rows, edge.cols[kept])
            self.set_edge(self._slice(edge.a, edge.b, edge.core, rows, cols))
        self.touch(v)

    def follow(self, v: int, leader: int, strategy_of: Ints) -> None:
        """Merge a node into its leader; the edge between them must allow just the pairs (x, strategy_of[x])."""
        core, rows, cols, _ = self.adjacent[leader][v].seen_from(leader)
        own = self.costs(v)[strategy_of] + core[rows, cols[strategy_of]]
        self.steps.append(Follow(v, leader, strategy_of))
        if v in self.loaded:
            self.loaded.add(leader)
        self.drop_edge(leader, v)
        self.unary[leader] = np.minimum(self.costs(leader) + own, FORBIDDEN)
        for usage, column in self.carriers[v]:
            self.add_carrier(leader, usage[strategy_of], column)
        for w in list(self.adjacent[v]):
            edge = self.adjacent[v][w]
            known = self.core(edge, v)
            rows, cols = (edge.rows, edge.cols) if edge.a == v else (edge.cols, edge.rows)
            self.drop_edge(v, w)
            if leader < w:
                self.add_edge(self._slice(leader, w, known.cells, rows[strategy_of], cols))
            else:
                self.add_edge(self._slice(w, leader, known.turned.cells, cols, rows[strategy_of]))
        self._remove(v)

    def fix(self, v: int) -> None:
        """Remove a node with a single strategy."""
        for w in list(self.adjacent[v]):
            core, rows, cols, _ = self.adjacent[v][w].seen_from(v)
            self.unary[w] = np.minimum(self.costs(w) + core[rows[0], cols], FORBIDDEN)
            self.drop_edge(v, w)
        self.constant += int(self.costs(v)[0])
        for usage, column in self.carriers[v]:
            self._change[column] = self._change.get(column, 0) + int(usage[0])
        self.steps.append(Eliminate(v, (), (), np.zeros((), dtype=np.int64)))
        self._remove(v)

    def eliminate(self, v: int) -> None:
        """Min-plus elimination of a node with no bytes and at most two neighbours."""
        costs, around = self.costs(v), sorted(self.adjacent[v])
        least = int(costs.min())
        if least >= FORBIDDEN:
            raise NoAssignment(v)
        self.constant += least
        costs = np.where(costs >= FORBIDDEN, FORBIDDEN, costs - least)  # so that copies in other layers look alike
        if not around:
            self.steps.append(Eliminate(v, (), (), np.array(int(costs.argmin()), dtype=np.int64)))
        elif len(around) == 1:
            a = around[0]
            known, rows, own = self._towards(a, v)
            best, low = self.cores.made(
                ("eliminate", id(known), own.tobytes(), costs.tobytes()), lambda: _least_of_one(known.cells, own, costs)
            )
            self.steps.append(Eliminate(v, (a,), (rows,), best))
            self.unary[a] = np.minimum(self.costs(a) + low[rows], FORBIDDEN)
            self.drop_edge(a, v)
        else:
            a, b = around
            left, rows, own_left = self._towards(a, v)
            right, cols, own_right = self._towards(b, v)

            def make() -> tuple[Ints, Ints]:
                return _least_of_two(left.cells, own_left, right.cells, own_right, costs)

            key = "eliminate", id(left), own_left.tobytes(), id(right), own_right.tobytes(), costs.tobytes()
            small = left.cells.shape[0] * right.cells.shape[0] <= tuned.KEPT_CELLS
            best, low = self.cores.made(key, make) if small else make()
            self.steps.append(Eliminate(v, (a, b), (rows, cols), best))
            self.drop_edge(a, v)
            self.drop_edge(b, v)
            self.add_edge(Edge(a=a, b=b, core=low, rows=rows, cols=cols))
        self._remove(v)

    def _towards(self, w: int, v: int) -> tuple[Core, Ints, Ints]:
        """Of the edge between w and v: its core seen from w, the rows of w's strategies, the columns of v's."""
        edge = self.adjacent[w][v]
        rows, cols = (edge.rows, edge.cols) if edge.a == w else (edge.cols, edge.rows)
        return self.core(edge, w), rows, cols

    def add_carrier(self, v: int, usage: Ints, column: int) -> None:
        if not usage.any():
            return
        for i, (known, other) in enumerate(self.carriers[v]):
            if other == column:
                self.carriers[v][i] = (known + usage, column)
                return
        self.carriers[v].append((usage, column))

    def _remove(self, v: int) -> None:
        self.ledger.nodes += 1
        self.ledger.strategies += self.size(v)
        self.unary[v] = None
        self.carriers[v] = []
        self.touched.discard(v)
        self.changed.discard(v)

    def _slice(self, a: int, b: int, core: Ints, rows: Ints, cols: Ints) -> Edge:
        """An edge without the core rows and columns that no strategy uses; equal slices of one core are shared."""
        used_rows, used_cols = _used(rows, core.shape[0]), _used(cols, core.shape[1])
        if used_rows is not None or used_cols is not None:
            known = self.cores.of(core)
            parts = [b"" if used is None else used.tobytes() for used in (used_rows, used_cols)]
            core = self.cores.made(("slice", id(known), *parts), lambda: _part(known.cells, used_rows, used_cols))
            rows = rows if used_rows is None else (np.cumsum(used_rows) - 1)[rows]
            cols = cols if used_cols is None else (np.cumsum(used_cols) - 1)[cols]
        return Edge(a=a, b=b, core=core, rows=rows, cols=cols)

    def _sum(self, left: Edge, right: Edge) -> Edge:
        """Two parallel edges as one; copies of them in other layers share it."""
        if len(left.rows) * len(left.cols) > tuned.KEPT_CELLS:
            return add_edges(left, right)
        key: list[object] = ["sum"]
        for edge in (left, right):
            key += [id(self.cores.of(edge.core)), edge.rows.tobytes(), edge.cols.tobytes()]
        total = self.cores.made(tuple(key), lambda: add_edges(left, right))
        return Edge(a=left.a, b=left.b, core=total.core, rows=total.rows, cols=total.cols)


def _used(which: Ints, count: int) -> Bools | None:
    """Which rows some strategy uses; None for all of them."""
    used = np.zeros(count, dtype=bool)
    used[which] = True
    return None if used.all() else used


def _part(cells: Ints, rows: Bools | None, cols: Bools | None) -> Ints:
    """Some rows and columns, all where None."""
    part = cells if rows is None else cells[rows]
    return part if cols is None else part[:, cols]


def _least_of_one(cells: Ints, own: Ints, costs: Ints) -> tuple[Ints, Ints]:
    """Per row the strategy of least cost plus entry, and that sum."""
    total = cells[:, own] + costs
    best = total.argmin(axis=1)
    return best, np.minimum(total[np.arange(len(best)), best], FORBIDDEN)


def _least_of_two(left: Ints, own_left: Ints, right: Ints, own_right: Ints, costs: Ints) -> tuple[Ints, Ints]:
    """Per pair of rows the strategy of least cost plus both entries, the first of several, and that sum."""
    shape = left.shape[0], right.shape[0]
    if shape[0] * shape[1] * len(costs) <= tuned.DENSE_ELIMINATION_CELLS:
        every = left[:, own_left][:, None, :] + (right[:, own_right] + costs)[None, :, :]
        return every.argmin(axis=2), np.minimum(every.min(axis=2), FORBIDDEN)
    total = np.full(shape, 4 * FORBIDDEN, dtype=np.int64)
    best = np.zeros(shape, dtype=np.int64)
    for x, cost in enumerate(costs.tolist()):
        candidate = left[:, own_left[x], None] + (right[:, own_right[x]] + cost)[None, :]
        better = candidate < total
        np.copyto(total, candidate, where=better)
        best[better] = x
    return best, np.minimum(total, FORBIDDEN)


def add_edges(left: Edge, right: Edge) -> Edge:
    """Two parallel edges as one."""
    first, rows = _pairs(left.rows, right.rows, right.core.shape[0])
    second, cols = _pairs(left.cols, right.cols, right.core.shape[1])
    core = left.core[left.rows[first][:, None], left.cols[second]] + right.core[right.rows[first][:, None], right.cols[second]]
    return Edge(a=left.a, b=left.b, core=np.minimum(core, FORBIDDEN), rows=rows, cols=cols)


def _pairs(left: Ints, right: Ints, count: int) -> tuple[Ints, Ints]:
    """Where each distinct pair first occurs, pairs in order, and which of them each one is."""
    _, first, which = np.unique(left * count + right, return_index=True, return_inverse=True)
    return first, which


T = TypeVar("T")


class Core:
    """A core seen from the node of its rows, and what is known of it: found out once, however many edges share it.

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
    """Cores by identity, and results computed from them. All are kept alive, so that identities stay unique.

    A model repeats its layers, so thousands of edges share some dozens of cores; and what is done to one of them, by slicing, adding or
    eliminating, is done to its copies with the same result. ``made`` keeps such results, so that copies share what comes out as well.
    """

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
