"""Exact presolve: a smaller problem with the same optimum, and the way back.

    small, postsolve = presolve(problem)
    problem.cost(postsolve.restore(x)) == small.cost(x)      # for every allowed x; so are the profiles at the kept times

The whole graph comes first (aliases.py): *forbidden* strategies, *aliases* merged along bijections, and *fold*, what then becomes a
cost of one node or a parallel edge. Then single nodes, until nothing changes (what is found out about one is used for its copies in
other layers, reducer.py); the names are those of the log (postsolve.py):

- *forbidden*: strategies of cost FORBIDDEN and strategies without an allowed partner across some edge go (arc consistency).
- *fixed*: a node with one strategy becomes a cost of its neighbours and a constant use of memory.
- *normal*: row and column minima of tables move into the nodes; a table that is constant, or a sum of a row and a column
  term, becomes zero and goes. *Parallel* edges are one edge.
- *followers*: where each strategy of a node allows just one of a neighbour (the result of an op, an alias), the neighbour
  merges into the node by an index map. Exact: the neighbour had no other choice.
- *free*: nodes without bytes and at most two neighbours are eliminated by min-plus products of bounded size. Exact: their best
  strategy depends on those neighbours only.
- *dominated*: strategy i dominates j when it costs no more, needs no more bytes, and no strategy of any neighbour makes it lose more
  than the difference: exchanging j for i never hurts. Of equal strategies the first stays.
- *loose times*: a time that cannot exceed the limit even if every node takes its largest bytes is dropped; a carrier that only lives
  at such times goes too, which frees more nodes. Not done when the peak is part of the objective.
- *windows*: a node that loads any is not eliminated, and no strategy of it is dominated: costs alone do not tell. All else holds as it is;
  loads follow their nodes (``Postsolve.followed``).
- *compact*: equal rows and columns of tables, equal tables and equal columns of memory are stored once; times that another one
  covers go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import Bools, Ints, Loads
from solver_shard.solve import parameters as tuned
from solver_shard.solve.presolve.aliases import merge_aliases
from solver_shard.solve.presolve.postsolve import Ledger, Merge, Postsolve, Steps
from solver_shard.solve.presolve.reducer import Core, Reducer
from solver_shard.solve.problem import Edge, Problem, at_times, compact_table, counts, over_time, regrouped, uncovered

__all__ = ["NoAssignment", "presolve"]


def presolve(problem: Problem, keep: Sequence[Bools] | None = None, stop: Callable[[], bool] | None = None) -> tuple[Problem, Postsolve]:
    """Reduce a problem; see the module.

    Args:
        problem: the problem.
        keep: per node, the strategies that may be chosen; all when None.
        stop: asked now and then whether to be content with what is done; what is left then is larger, and as exact.

    Raises:
        NoAssignment: forbidden entries leave no assignment at all.
    """
    ledger = Ledger()
    loads = problem.loads
    problem, stages = _merged(problem if loads is None else replace(problem, loads=None), keep, ledger)
    ledger.begin("parallel")
    reducer = Reducer(problem, ledger, () if loads is None else _loaded(loads, stages, problem.size))
    reducer.changed.update(reducer.alive())
    reducer.touched.update(reducer.alive())
    before = -1
    while before < len(reducer.steps):
        before = len(reducer.steps)
        if not _settle(reducer, stop):
            break
        ledger.begin("dominated")
        for v in sorted(reducer.changed):
            reducer.changed.discard(v)
            if reducer.unary[v] is not None and v not in reducer.loaded:
                _dominated(reducer, v)
    _forbidden(reducer, reducer.alive())
    ledger.begin("compact")
    small, steps = _reduced(reducer)
    postsolve = Postsolve(stages=(*stages, steps), size=small.size, log=ledger.steps())
    return small if loads is None else _with(small, loads.substituted(*postsolve.followed())), postsolve


def _with(problem: Problem, loads: Loads) -> Problem:
    """A problem with windows, in which every pair that loads any has an edge."""
    known = {(edge.a, edge.b) for edge in problem.edges}
    pairs = dict.fromkeys((min(u, v), max(u, v)) for u, v in loads.edges[:, :2].tolist())
    nothing, sizes = np.zeros((1, 1), dtype=np.int64), problem.sizes
    edges = [
        Edge(a=a, b=b, core=nothing, rows=np.zeros(sizes[a], dtype=np.int64), cols=np.zeros(sizes[b], dtype=np.int64))
        for a, b in pairs
        if (a, b) not in known
    ]
    return replace(problem, edges=(*problem.edges, *edges), loads=loads)


def _loaded(loads: Loads, stages: Sequence[Merge | Steps], count: int) -> set[int]:
    """The nodes that loaded ones follow after these stages, of so many."""
    owner, _ = Postsolve(stages=stages, size=count).followed()
    return {int(owner[v]) for v in loads.loaded()}


def _merged(problem: Problem, keep: Sequence[Bools] | None, ledger: Ledger) -> tuple[Problem, list[Merge | Steps]]:
    """Rounds of aliases.py while they merge a good part of the nodes and anything is forbidden."""
    stages: list[Merge | Steps] = []
    while True:
        size = problem.size
        problem, merge = merge_aliases(problem, ledger, keep)
        stages.append(merge)
        keep = None
        if problem.size > tuned.MERGED_SHARE * size or all(edge.core.max() < FORBIDDEN for edge in problem.edges):
            return problem, stages


def _settle(reducer: Reducer, stop: Callable[[], bool] | None) -> bool:
    """All passes but dominance until nothing changes; false where that was stopped."""
    first = True
    while first or reducer.touched:
        first = False
        if reducer.problem.weight == 0:
            _loose_times(reducer)
        while reducer.touched:
            for i, v in enumerate(sorted(reducer.touched)):
                if i % 50 == 0 and stop is not None and stop():
                    return False
                if v in reducer.touched:
                    reducer.touched.discard(v)
                    _simplify(reducer, v)
    return True


def _simplify(reducer: Reducer, v: int) -> None:
    """Whatever one node allows; marks what changed as touched."""
    _forbidden(reducer, [v])
    if reducer.size(v) == 1:
        reducer.ledger.begin("fixed")
        reducer.fix(v)
        return
    known = reducer.cores.of
    busy = sorted(w for w, edge in reducer.adjacent[v].items() if not known(edge.core).idle)
    if busy:
        reducer.ledger.begin("normal")
        for w in busy:
            _normalise(reducer, v, w)
        reducer.ledger.begin("followers")
    for w in busy:
        edge = reducer.adjacent[v].get(w)
        if edge is None or not known(edge.core).hard:
            continue
        for leader, node in ((v, w), (w, v)):
            strategy_of = _follower(reducer, edge, leader)
            if strategy_of is not None:
                reducer.follow(node, leader, strategy_of)
                reducer.touched.add(leader)
                return
    reducer.ledger.begin("free")
    if v not in reducer.loaded and not reducer.carriers[v] and _cheap_to_eliminate(reducer, v):
        reducer.eliminate(v)


def _forbidden(reducer: Reducer, nodes: list[int]) -> None:
    """Arc consistency from the given nodes on."""
    reducer.ledger.begin("forbidden")
    queue = list(nodes)
    waiting = set(queue)
    while queue:
        v = queue.pop()
        waiting.discard(v)
        if reducer.unary[v] is None:
            continue
        costs = reducer.costs(v)
        keep = None if costs.max() < FORBIDDEN else costs < FORBIDDEN
        for edge in reducer.adjacent[v].values():
            core = reducer.cores.of(edge.core)
            if core.hard and not core.idle and (alive := (core if edge.a == v else core.turned).alive) is not None:
                own = alive[edge.rows if edge.a == v else edge.cols]
                keep = own if keep is None else keep & own
        if keep is None or keep.all():
            continue
        reducer.restrict(v, keep)
        for w in reducer.adjacent[v]:
            if w not in waiting:
                waiting.add(w)
                queue.append(w)


def _normalise(reducer: Reducer, v: int, w: int) -> None:
    """Row and column minima of the table move to the nodes; a table of zeros goes."""
    edge = reducer.adjacent[v][w]
    core = reducer.cores.of(edge.core)
    if core.normal and not core.zero:
        return
    rest, left, right = core.parts
    if left is not None:
        reducer.unary[edge.a] = np.minimum(reducer.costs(edge.a) + left[edge.rows], FORBIDDEN)
    if right is not None:
        reducer.unary[edge.b] = np.minimum(reducer.costs(edge.b) + right[edge.cols], FORBIDDEN)
    if rest.zero:
        reducer.drop_edge(edge.a, edge.b)
    elif rest is not core:
        reducer.cores.add(rest)
        reducer.set_edge(Edge(a=edge.a, b=edge.b, core=rest.cells, rows=edge.rows, cols=edge.cols))


def _follower(reducer: Reducer, edge: Edge, leader: int) -> Ints | None:
    """The only strategy of the other node for each of the leader's, or None where some leave a choice."""
    target = reducer.core(edge, leader).sole
    if target is None:
        return None
    rows, cols = (edge.rows, edge.cols) if edge.a == leader else (edge.cols, edge.rows)
    if (np.bincount(cols)[target] != 1).any():
        return None
    strategy = np.empty(int(cols.max()) + 1, dtype=np.int64)
    strategy[cols] = np.arange(len(cols))
    return np.asarray(strategy[target][rows])


def _cheap_to_eliminate(reducer: Reducer, v: int) -> bool:
    if len(reducer.adjacent[v]) > 2:
        return False
    around: list[int] = [edge.core.shape[edge.a == v] for edge in reducer.adjacent[v].values()]
    cells: int = math.prod(around) * reducer.size(v)
    return cells <= tuned.MAX_ELIMINATION_CELLS


def _loose_times(reducer: Reducer) -> None:
    """Drop times that no choice can fill, then carriers that live at no kept time."""
    reducer.ledger.begin("loose times")
    limit = reducer.problem.limit
    if len(reducer.times) == 0:
        return
    largest = np.zeros(reducer.problem.width, dtype=np.int64)
    for v in reducer.alive():
        for usage, column in reducer.carriers[v]:
            largest[column] += usage.max()
    most = reducer.base + over_time(reducer.spans, largest, len(reducer.times))
    tight = np.zeros(len(most), dtype=bool) if limit is None else most > limit
    if tight.all():
        return
    reducer.keep_times(tight)
    lives = np.zeros(reducer.problem.width, dtype=bool)
    lives[reducer.spans[:, 0]] = True
    for v in reducer.alive():
        kept = [(usage, column) for usage, column in reducer.carriers[v] if lives[column]]
        if len(kept) < len(reducer.carriers[v]):
            reducer.carriers[v] = kept
            reducer.touched.add(v)


def _dominated(reducer: Reducer, v: int) -> None:
    """Drop strategies that another one of the node is never worse than."""
    costs = reducer.costs(v)
    if not 1 < len(costs) <= tuned.MAX_DOMINANCE:
        return
    usages = [usage for usage, _ in reducer.carriers[v]]
    views = [(reducer.core(edge, v), edge.rows if edge.a == v else edge.cols) for _, edge in sorted(reducer.adjacent[v].items())]
    key: list[object] = ["dominated", costs.tobytes(), *[usage.tobytes() for usage in usages]]
    for core, rows in views:
        key += [id(core), rows.tobytes()]
    dead = reducer.cores.made(tuple(key), lambda: _worse(costs, usages, views))
    if dead is not None:
        reducer.restrict(v, ~dead)


def _worse(costs: Ints, usages: list[Ints], views: list[tuple[Core, Ints]]) -> Bools | None:
    """Which strategies are never better than another one; None where that is not so of any.

    Args:
        costs: of each strategy.
        usages: bytes of each strategy, per carrier.
        views: core of each edge, seen from the node, and the row of each strategy.
    """
    k = len(costs)
    better: Bools = np.less_equal(costs[:, None], costs[None, :])
    np.fill_diagonal(better, False)
    for usage in usages:
        better &= usage[:, None] <= usage[None, :]
    if not better.any():
        return None
    # Every row of a normalised table has a zero: what i loses to j there it loses in the worst case too, and no loss is negative.
    floor = np.maximum(costs[:, None] - costs[None, :], -FORBIDDEN)
    for core, rows in views:
        floor = np.minimum(floor + core.cells[rows[:, None], core.cheapest[rows]], FORBIDDEN)
        better &= floor <= 0
        if not better.any():
            return None
    first, second = np.nonzero(better)
    margin = costs[first] - costs[second]
    for core, rows in views:
        mine, other = rows[first], rows[second]
        loss = np.zeros(len(first), dtype=np.int64)
        step = max(1, tuned.DOMINANCE_CELLS // core.cells.shape[1])
        for part in range(0, len(first), step):
            ours, theirs = core.cells[mine[part : part + step]], core.cells[other[part : part + step]]
            loss[part : part + step] = np.where(theirs < FORBIDDEN, ours - theirs, -FORBIDDEN).max(axis=1)
        margin = margin + loss
        kept = margin <= 0
        first, second, margin = first[kept], second[kept], margin[kept]
    if not len(first):
        return None
    dead = np.zeros(k, dtype=bool)
    beats = np.zeros((k, k), dtype=bool)
    beats[first, second] = True
    for j in np.flatnonzero(beats.any(axis=0)).tolist():  # of strategies that dominate each other the first stays
        rivals = np.flatnonzero(beats[:, j] & ~dead)
        dead[j] = any(i < j or not beats[j, i] for i in rivals.tolist())
    return dead if dead.any() else None


def _reduced(reducer: Reducer) -> tuple[Problem, Steps]:
    nodes = reducer.alive()
    index = {v: i for i, v in enumerate(nodes)}
    unary = []
    for v in nodes:
        low = int(reducer.costs(v).min())
        reducer.constant += low
        unary.append(reducer.costs(v) - low)
    edges = _compact_edges(reducer, index)
    needs = [(index[v], usage, column) for v in nodes for usage, column in reducer.carriers[v]]
    carriers, spans, base = regrouped(needs, reducer.spans, reducer.base)
    times = reducer.times
    for keep in (uncovered, _uncovered_times):
        kept = keep(spans, base)
        times, base, spans = times[kept], base[kept], at_times(spans, kept)
    reducer.ledger.times += len(reducer.times) - len(times)
    problem = Problem(
        unary=tuple(unary),
        edges=tuple(edges),
        carriers=carriers,
        spans=spans,
        base=base,
        times=times,
        constant=reducer.constant,
        limit=reducer.problem.limit,
        weight=reducer.problem.weight,
    )
    return problem, Steps(steps=tuple(reducer.steps), count=reducer.problem.size, nodes=np.array(nodes, dtype=np.int64))


def _compact_edges(reducer: Reducer, index: dict[int, int]) -> list[Edge]:
    """The edges between new numbers of nodes, their cores compact; equal cores, and equal maps to their lines, are one array."""
    compact: dict[int, tuple[Ints, Ints | None, Ints | None]] = {}
    cores: dict[tuple[tuple[int, ...], bytes], Ints] = {}
    maps: dict[bytes, Ints] = {}
    edges = []
    for v in index:
        for w, edge in sorted(reducer.adjacent[v].items()):
            if v > w:
                continue
            found = compact.get(id(edge.core))
            if found is None:
                core, rows, cols = compact_table(edge.core)
                same = core.shape == edge.core.shape
                core = edge.core if same else core
                core = cores.setdefault((core.shape, core.tobytes()), core)
                found = compact[id(edge.core)] = (core, None, None) if same else (core, rows, cols)
            core, row_of, col_of = found
            rows = edge.rows if row_of is None else row_of[edge.rows]
            cols = edge.cols if col_of is None else col_of[edge.cols]
            rows, cols = maps.setdefault(rows.tobytes(), rows), maps.setdefault(cols.tobytes(), cols)
            reducer.ledger.cells += edge.core.size - core.size
            edges.append(Edge(a=index[v], b=index[w], core=core, rows=rows, cols=cols))
    return edges


def _uncovered_times(spans: Ints, base: Ints) -> Bools:
    """Times at which more can be in use than at any other one; all where there are too many to compare."""
    columns = int(spans[:, 0].max(initial=-1)) + 1
    if len(base) > tuned.MAX_COVERED_TIMES or len(base) * columns > tuned.MAX_COVERED_CELLS:
        return np.ones(len(base), dtype=bool)
    rows = np.concatenate([counts(spans, len(base), columns), base[:, None]], axis=1)
    order = np.argsort(-rows.sum(axis=1), kind="stable")  # a time can only be covered by one of a larger or equal sum
    rows = rows[order]
    kept = np.zeros(len(base), dtype=bool)
    alive = np.ones(len(rows), dtype=bool)
    for t in range(len(rows)):
        if not alive[t]:
            continue
        kept[order[t]] = True
        later = t + 1 + np.flatnonzero(alive[t + 1 :])
        alive[later] = (rows[later] > rows[t]).any(axis=1)
    return kept
