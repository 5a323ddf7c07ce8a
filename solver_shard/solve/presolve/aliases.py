"""Presolve's first stage: everything that a whole graph allows at once, before any node is looked at alone.

On published graphs most tables have only the entries 0 and FORBIDDEN, and once strategies without a partner are gone they are
bijections: the two nodes are aliases of one decision. Tens of thousands of nodes become some hundreds. Moving the edges of one node
at a time would move each of them thousands of times; here every edge is moved once.

1. *forbidden*: strategies of cost FORBIDDEN, and those without an allowed partner across some edge, go (arc consistency).
2. *aliases*: breadth-first along bijections from the first node of each group, composing permutations. Exact: any allowed
   assignment follows them. A strategy of the first node that comes back as another one along a second path occurs in none.
3. *fold*: costs of a group's nodes add up; a table between two of them, or with a node of one strategy, becomes a cost; so does one
   that is the sum of a row and a column term. Parallel edges add up.

``Merge`` (postsolve.py) is the way back: the strategy of every node as a function of its group's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import Bools, Ints
from solver_shard.graph.narrowing import Arc, Arcs
from solver_shard.solve import parameters as tuned
from solver_shard.solve.presolve.postsolve import Ledger, Merge
from solver_shard.solve.presolve.reducer import NoAssignment, add_edges
from solver_shard.solve.problem import Edge, Need, Problem, at_times, compact_table, regrouped, uncovered


def merge_aliases(problem: Problem, ledger: Ledger, keep: Sequence[Bools] | None = None) -> tuple[Problem, Merge]:
    """One round of the stage; see the module.

    Args:
        problem: any.
        ledger: where what is removed is counted.
        keep: per node, the strategies that may be chosen; all when None.

    Raises:
        NoAssignment: forbidden entries leave some node without a strategy.
    """
    before = ledger.begin("forbidden")
    pairs = _Pairs(problem)
    domains = _consistent(problem, keep, pairs)
    left = sum(size if own is None else len(own) for own, size in zip(domains, problem.sizes.tolist(), strict=True))
    ledger.strategies += int(problem.offsets[-1]) - left
    ledger.begin("aliases")
    every = {size: np.arange(size) for size in np.unique(problem.sizes).tolist()}
    strategies, leader = _aliases(problem, domains, pairs, every)
    count = np.array([len(own) for own in strategies], dtype=np.int64)
    leads = leader == np.arange(problem.size)
    ledger.nodes += int((~leads).sum())
    ledger.strategies += left - int(count[leads].sum())
    ledger.begin("fold")
    free = leads & (count > 1)
    ledger.nodes += int((leads & ~free).sum())
    ledger.strategies += int((leads & ~free).sum())
    number = np.where(free, np.cumsum(free) - 1, -1)
    merge = Merge(
        group=number[leader],
        offsets=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(count)]),
        strategies=np.concatenate([np.zeros(0, dtype=np.int64), *strategies]),
    )
    smaller = _folded(problem, merge, strategies, count[free], pairs, every)
    ledger.edges += len(problem.edges) - len(smaller.edges)
    ledger.cells += sum(edge.core.size for edge in problem.edges) - sum(edge.core.size for edge in smaller.edges)
    ledger.times += len(problem.times) - len(smaller.times)
    ledger.begin(before)
    return smaller, merge


class _Pairs:
    """The allowed pairs of the edges that forbid some; edges with the same table share what is found out about it.

    Attributes:
        which: int64[edges], the kind of each edge: of equal core, rows and columns.
        edges: one edge of each kind.
        hard: bool per kind, some pair is forbidden.
    """

    def __init__(self, problem: Problem) -> None:
        known: dict[tuple[int, int, int], int] = {}
        which = [known.setdefault((id(e.core), id(e.rows), id(e.cols)), len(known)) for e in problem.edges]
        self.which = np.array(which, dtype=np.int64)
        _, first = np.unique(self.which, return_index=True)
        self.edges = [problem.edges[e] for e in first.tolist()]
        self._cells: dict[int, Bools] = {}
        self.hard = [not self.cells(edge.core).all() for edge in self.edges]
        self._allowed: list[Bools | None] = [None] * len(self.edges)
        self._bijection: list[tuple[Ints, Ints] | None] = [None] * len(self.edges)
        self._asked = [False] * len(self.edges)

    def allowed(self, kind: int) -> Bools:
        """bool[strategies of a, strategies of b]."""
        found = self._allowed[kind]
        if found is None:
            edge = self.edges[kind]
            found = self._allowed[kind] = self.cells(edge.core)[edge.rows[:, None], edge.cols[None, :]]
        return found

    def bijection(self, kind: int, left: Ints | None, right: Ints | None) -> tuple[Ints, Ints] | None:
        """The partner of every strategy of either side where each has one among ``left`` and ``right`` (all where None)."""
        if left is not None or right is not None:
            return _bijection(self.allowed(kind), left, right)
        if not self._asked[kind]:
            self._asked[kind] = True
            self._bijection[kind] = _bijection(self.allowed(kind), None, None)
        return self._bijection[kind]

    def cells(self, core: Ints) -> Bools:
        """Which cells of a core are allowed."""
        if id(core) not in self._cells:
            self._cells[id(core)] = core < FORBIDDEN
        return self._cells[id(core)]


def _bijection(allowed: Bools, left: Ints | None, right: Ints | None) -> tuple[Ints, Ints] | None:
    rows = np.arange(allowed.shape[0]) if left is None else left
    cols = np.arange(allowed.shape[1]) if right is None else right
    part = allowed[rows[:, None], cols[None, :]]
    if len(rows) != len(cols) or not (part.sum(axis=1) == 1).all() or not (part.sum(axis=0) == 1).all():
        return None
    forward = np.zeros(allowed.shape[0], dtype=np.int64)
    forward[rows] = cols[part.argmax(axis=1)]
    backward = np.zeros(allowed.shape[1], dtype=np.int64)
    backward[cols] = rows[part.argmax(axis=0)]
    return forward, backward


def _consistent(problem: Problem, keep: Sequence[Bools] | None, pairs: _Pairs) -> list[Ints | None]:
    """Per node the strategies with an allowed partner across every edge; None for all of them."""
    fine = np.concatenate([np.zeros(0, dtype=np.int64), *problem.unary]) < FORBIDDEN
    if keep is not None:
        fine &= np.concatenate([np.zeros(0, dtype=bool), *keep])
    domains = np.split(fine, problem.offsets[1:-1].tolist()) if problem.size else []
    if problem.size and not np.logical_or.reduceat(fine, problem.offsets[:-1]).all():
        raise NoAssignment
    hard = np.flatnonzero(np.array(pairs.hard, dtype=bool)[pairs.which]).tolist() if pairs.hard else []
    edges = [problem.edges[e] for e in hard]
    arcs = Arcs(problem.size, [Arc(edge.a, edge.b, pairs.cells(edge.core), edge.rows, edge.cols) for edge in edges])
    emptied = arcs.propagate(domains, range(problem.size))
    if emptied is not None:
        raise NoAssignment(emptied)
    return [None if domain.all() else np.flatnonzero(domain) for domain in domains]


def _aliases(problem: Problem, domains: list[Ints | None], pairs: _Pairs, every: dict[int, Ints]) -> tuple[list[Ints], Ints]:
    """Per node its strategies, in the order of its leader's, and its leader: the first node of its group."""
    near: list[list[tuple[int, Ints]]] = [[] for _ in range(problem.size)]
    for edge, kind in zip(problem.edges, pairs.which.tolist(), strict=True):
        if pairs.hard[kind]:
            found = pairs.bijection(kind, domains[edge.a], domains[edge.b])
            if found is not None:
                near[edge.a].append((edge.b, found[0]))
                near[edge.b].append((edge.a, found[1]))
    strategies = [every[size] if own is None else own for own, size in zip(domains, problem.sizes.tolist(), strict=True)]
    leader = np.full(problem.size, -1, dtype=np.int64)
    led = leader.tolist()
    for first in range(problem.size):
        if led[first] >= 0:
            continue
        led[first] = first
        if not near[first]:
            continue
        group, broken = [first], np.zeros(len(strategies[first]), dtype=bool)
        for v in group:  # grows as it is walked
            own = strategies[v]
            for w, partner in near[v]:
                mine = partner[own]
                if led[w] < 0:
                    led[w], strategies[w] = first, mine
                    group.append(w)
                else:
                    broken |= strategies[w] != mine
        if broken.all():
            raise NoAssignment(first)
        if broken.any():
            for v in group:
                strategies[v] = strategies[v][~broken]
    return strategies, np.array(led, dtype=np.int64)


def _folded(problem: Problem, merge: Merge, strategies: list[Ints], sizes: Ints, pairs: _Pairs, every: dict[int, Ints]) -> Problem:
    """The problem on the groups of more than one strategy."""
    constant = problem.constant
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
    total = np.zeros(int(offsets[-1]), dtype=np.int64)
    unary = [total[start:stop] for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    group = merge.group.tolist()

    def pay(g: int, costs: Ints) -> None:
        nonlocal constant
        if g < 0:
            if costs[0] >= FORBIDDEN:
                raise NoAssignment(g)
            constant += int(costs[0])
        else:
            np.minimum(unary[g] + costs, FORBIDDEN, out=unary[g])

    for g, row, own in zip(group, problem.unary, strategies, strict=True):
        pay(g, row[own])
    known: dict[int, _Shape] = {}
    for edge in pairs.edges:
        if id(edge.core) not in known:
            known[id(edge.core)] = _Shape(edge.core)
    shapes = [known[id(edge.core)] for edge in pairs.edges]
    parallel: dict[tuple[int, int], list[Edge]] = {}
    for edge, kind in zip(problem.edges, pairs.which.tolist(), strict=True):
        shape, a, b = shapes[kind], group[edge.a], group[edge.b]
        if shape.separable:
            constant += shape.constant
            if shape.left.any():
                pay(a, shape.left[edge.rows[strategies[edge.a]]])
            if shape.right.any():
                pay(b, shape.right[edge.cols[strategies[edge.b]]])
            continue
        if a == b and a >= 0 and shape.free and pairs.bijection(kind, None, None) is not None:
            continue  # an alias inside its group, where all of it was followed
        rows, cols = _taken(edge.rows, strategies[edge.a], every), _taken(edge.cols, strategies[edge.b], every)
        if a == b or a < 0 or b < 0:
            pay(b if a < 0 else a, edge.core[rows, cols])
        elif a < b:
            parallel.setdefault((a, b), []).append(_moved(edge, a, b, edge.core, rows, cols))
        else:
            parallel.setdefault((b, a), []).append(_moved(edge, b, a, shape.turned, cols, rows))
    for g, row in enumerate(unary):
        if row.min() >= FORBIDDEN:
            raise NoAssignment(g)
    needs: list[Need] = [(group[c.node], c.usage[strategies[c.node]], c.column) for c in problem.carriers]
    carriers, spans, base = regrouped(needs, problem.spans, problem.base)
    kept = uncovered(spans, base)
    return Problem(
        unary=tuple(unary),
        edges=tuple(_sum(edges) for _, edges in sorted(parallel.items())),
        carriers=carriers,
        spans=at_times(spans, kept),
        base=base[kept],
        times=problem.times[kept],
        constant=constant,
        limit=problem.limit,
        weight=problem.weight,
    )


class _Shape:
    """What is known of a core.

    Attributes:
        free: what it allows costs nothing.
        separable: it is ``constant + left[row] + right[col]``.
        turned: the core as its transpose sees it, one array for all.
    """

    def __init__(self, core: Ints) -> None:
        forbidden = core >= FORBIDDEN
        self.turned = core.T
        self.free = not core[~forbidden].any()
        self.separable = not forbidden.any() and not (core - core[:1] - core[:, :1] + core[0, 0]).any()
        self.constant = int(core.min())
        self.left: Ints = core.min(axis=1) - self.constant
        self.right: Ints = core.min(axis=0) - self.constant


def _taken(lines: Ints, strategies: Ints, every: dict[int, Ints]) -> Ints:
    """The lines of some strategies; the same array where these are all in their order."""
    return lines if strategies is every.get(len(lines)) else lines[strategies]


def _moved(edge: Edge, a: int, b: int, core: Ints, rows: Ints, cols: Ints) -> Edge:
    """An edge between groups; rows and columns that no strategy uses are left out."""
    if len(rows) + len(cols) == len(edge.rows) + len(edge.cols):  # permutations of all strategies
        return Edge(a=a, b=b, core=core, rows=rows, cols=cols)
    used_rows = np.bincount(rows, minlength=core.shape[0]) > 0
    used_cols = np.bincount(cols, minlength=core.shape[1]) > 0
    if used_rows.all() and used_cols.all():
        return Edge(a=a, b=b, core=core, rows=rows, cols=cols)
    return Edge(a=a, b=b, core=core[used_rows][:, used_cols], rows=(np.cumsum(used_rows) - 1)[rows], cols=(np.cumsum(used_cols) - 1)[cols])


def _sum(edges: list[Edge]) -> Edge:
    """Parallel edges as one."""
    first = edges[0]
    if len(edges) == 1:
        return first
    if len(first.rows) * len(first.cols) > tuned.DENSE_SUM_CELLS:
        for edge in edges[1:]:
            first = add_edges(first, edge)
        return first
    total = first.table()
    for edge in edges[1:]:
        total += edge.table()
        np.minimum(total, FORBIDDEN, out=total)
    core, rows, cols = compact_table(total)
    return Edge(a=first.a, b=first.b, core=core, rows=rows, cols=cols)
