"""The best assignment below a target, or that there is none: by enumeration in exact integers, cut short where nothing can come of it.

    best_below(problem, target, split_of(dual)).assignment      # TooMany where that takes too many labels

Nodes are decided one after the other, in an order in which few decided nodes have an undecided neighbour. A **label** is what of a partial
assignment matters for the rest: the strategies of those few, the cost so far, the bytes in use at the times that decided and undecided
nodes share. A label goes where

- its bytes and the least of the undecided nodes exceed the limit at some time (also where they make the peak too expensive);
- its cost, and the least that every undecided neighbour adds to it, reach the target;
- the same is so of the parts of a split (``Split``), in which memory has a price: with good prices that leaves few;
- another label with the same strategies costs no more and has no more bytes at any time (Desrochers and Soumis 1988 label resource
  constrained paths so). Bytes that cannot matter any more, because the rest cannot fill a time even at its largest, do not count.

Of a problem with windows a label also has what the terms of open windows carry; when the last node that loads a window is decided, it
closes, and its fullest term is paid. The split is of the problem priced by weights of the terms: what a window takes beyond these is added
to its parts, at least as much as some term surely reaches. What a term lacks to matter at all is no difference between labels.

So an answer rests on sums of int64 alone, in which nothing is rounded: costs above the target are cut to it, sums of bytes are below 2**63
in every graph. The split is in floats that are exact (trws.py) and only ever drops what a valid bound excludes; no solver is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import MAX_BYTES, MIB, WEIGHT, Bools, Ints, Loads
from solver_shard.solve import parameters as tuned
from solver_shard.solve.bounds.elimination import EXACT
from solver_shard.solve.bounds.lagrangian import LagrangianDual
from solver_shard.solve.bounds.trws import Parts
from solver_shard.solve.problem import Edge, Floats, Problem

MOST_LOADS = 2**40
"""Nanoseconds of all windows up to which sums of products with WEIGHT are below 2**63."""

MOST_WEIGHT = 2**42
"""Weight of the peak whose product with a MiB is below 2**63."""


class TooMany(Exception):  # noqa: N818 - not an error: it ends one way of proving
    """More labels than may be made, or than there is time for; ``work``: spent."""

    def __init__(self, work: float) -> None:
        super().__init__(work)
        self.work = work


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Parts that are never negative: every assignment within the limit has constant + their sum <= scale x its objective.

    ``edges``: of the tables, one for every edge of the problem, in its order.
    """

    parts: Parts
    constant: float
    scale: float
    edges: Sequence[Edge]

    def table(self, e: int) -> Floats:
        """The parts of an edge, strategy by strategy."""
        edge = self.edges[e]
        return self.parts.tables[e][edge.rows[:, None], edge.cols]

    def room(self, target: int) -> float:
        """What the parts of an assignment below the target stay below."""
        scaled = scaled_up(target, self.scale)
        return scaled - self.constant if abs(scaled) < EXACT / 2 else np.inf


@dataclass(frozen=True, slots=True, eq=False)
class Enumeration:
    """The best assignment below the target, None where there is none, and the work that it took."""

    assignment: Ints | None
    work: float


def split_of(dual: LagrangianDual) -> Split | None:
    """At a dual's best multipliers; None where sums would not be exact."""
    parts = dual.parts()
    most = sum(float(row[np.isfinite(row)].max(initial=0)) for row in parts.unary)
    most += sum(float(table[np.isfinite(table)].max(initial=0)) for table in parts.tables)
    constant = parts.constant + dual.offset(dual.multipliers)
    if not most + abs(constant) < EXACT / 2:
        return None
    return Split(parts, constant, dual.scale, dual.problem.edges)


def best_below(
    problem: Problem,
    target: int | None,
    split: Split | None = None,
    *,
    weights: Ints | None = None,
    least_peak: int = 0,
    most_work: float = np.inf,
    over: Callable[[], bool] = lambda: False,
) -> Enumeration:
    """See the module.

    Args:
        problem: with edges between different nodes, no two between the same ones; one between all that load a window together.
        target: only what has an objective below this counts; None: any assignment within the limit.
        split: of the problem, of ``problem.priced(weights)`` where it has windows.
        weights: of the terms of its windows.
        least_peak: a bound on the peak of every assignment.
        most_work: that may be spent.
        over: asked at every step whether to stop.

    Raises:
        TooMany: it would take more work than that, or more memory than a step may have.
    """
    labels = _Labels(problem, target, split, weights, least_peak, most_work, over)
    return labels.run()


_Later = tuple[int, Ints, Floats | None]
"""An edge to a node that is decided later: (that node, costs, parts of the split), its own strategies second."""


class _Labels:
    def __init__(
        self,
        problem: Problem,
        target: int | None,
        split: Split | None,
        weights: Ints | None,
        least_peak: int,
        most_work: float,
        over: Callable[[], bool],
    ) -> None:
        self.problem, self.most_work, self.over = problem, most_work, over
        self.split = None if target is None else split
        self.work = 0.0
        self.target = target
        room = FORBIDDEN if target is None else min(FORBIDDEN, target - problem.constant)
        self.room = max(0, room)
        """Costs, without the constant, reach this at most: then nothing else counts."""
        self.parts_room = np.inf if split is None or target is None else split.room(target)
        self.limit = problem.limit
        if problem.weight:  # weight x peak // MIB < room: so much is the peak at most
            highest = min((self.room * MIB - 1) // problem.weight, MAX_BYTES)
            self.limit = highest if self.limit is None else min(self.limit, highest)
        self.low = max(least_peak, problem.least())
        counted = (self.limit is not None or bool(problem.weight)) and len(problem.base) > 0
        self.times = len(problem.base) if counted else 0
        self.base = problem.base if counted else problem.base[:0]
        self.weights = weights
        self.windows: _Windows | None = None

    def run(self) -> Enumeration:
        problem = self.problem
        if self.room <= 0 or self.parts_room <= 0 or (self.limit is not None and self.low > self.limit):
            return Enumeration(None, self.work)
        if self.times * max(int(problem.offsets[-1]), problem.width) > tuned.LABEL_USES or problem.weight > MOST_WEIGHT:
            raise TooMany(self.work)
        if problem.loads is not None and problem.loads.most() > MOST_LOADS:
            raise TooMany(self.work)
        order, widest = _order(problem)
        self.work += 1e-4 * problem.size
        if widest > (tuned.LABEL_WIDEST if problem.loads is None else tuned.LABEL_WIDEST_WINDOWS):
            raise TooMany(self.work)
        if problem.loads is not None:
            self.windows = _Windows(problem, problem.loads, order, self.weights, None if self.split is None else self.split.scale)
        return self._along(order)

    def _along(self, order: list[int]) -> Enumeration:
        problem = self.problem
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        later: list[list[_Later]] = [[] for _ in order]
        for e, edge in enumerate(problem.edges):
            raw = np.minimum(edge.table(), self.room)
            priced = None if self.split is None else self.split.table(e)
            if place[edge.a] < place[edge.b]:
                later[edge.a].append((edge.b, raw, priced))
            else:
                later[edge.b].append((edge.a, raw.T, None if priced is None else priced.T))
        uses = self._uses()
        rest = np.zeros((2, self.times), dtype=np.int64)
        for use in uses:
            rest += np.stack([use.min(axis=0), use.max(axis=0)])
        left = np.zeros(self.times, dtype=np.int64)  # undecided nodes that may use something at a time
        for use in uses:
            left += use.any(axis=0)
        loads, taken, above = np.zeros((1, 0), dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros(1)
        if self.windows is not None:
            loads = self.windows.loads.base[None, :].copy()
            taken, above = self.windows.close(loads, self.windows.never)
        state = _State(
            front=[],
            states=np.zeros((1, 0), dtype=np.int64),
            cost=np.minimum(taken, self.room),
            value=above,
            times=np.zeros(0, dtype=np.int64),
            bytes=np.zeros((1, 0), dtype=np.int64),
            top=np.full(1, self.low, dtype=np.int64),
            near={},
            loads=loads,
        )
        opened = left == 0  # what is in use then does not depend on the choice: `low` has that
        trail: list[tuple[Ints, Ints]] = []
        for i, v in enumerate(order):
            use = uses[v]
            rest = rest - np.stack([use.min(axis=0), use.max(axis=0)])
            there = use.any(axis=0)
            left = left - there
            new = np.flatnonzero(there & ~opened)
            opened |= there
            front = [f for f in [*state.front, v] if any(place[w] > i for w, _, _ in later[f])]
            state, rows, chosen = self._step(state, v, front, later[v], use, new, rest, left)
            trail.append((rows, chosen))
            if not len(state.cost):
                return Enumeration(None, self.work)
        best = self._best(state)
        found = np.empty(problem.size, dtype=np.int64)
        for v, (rows, chosen) in zip(reversed(order), reversed(trail), strict=True):
            found[v] = chosen[best]
            best = int(rows[best])
        return Enumeration(found, self.work)

    def _uses(self) -> list[Ints]:
        """Bytes per strategy and time of every node."""
        uses = [np.zeros((int(k), self.times), dtype=np.int64) for k in self.problem.sizes]
        if self.times:
            for carrier in self.problem.carriers:
                uses[carrier.node] += carrier.usage[:, None] * self.problem.mult[:, carrier.column]
        return uses

    def _step(
        self, state: _State, v: int, front: list[int], edges: list[_Later], use: Ints, new: Ints, rest: Ints, left: Ints
    ) -> tuple[_State, Ints, Ints]:
        """All labels with every strategy of one more node, as far as they stay; the row and the strategy that each came from.

        Args:
            state: before.
            v: the node.
            front: decided nodes with undecided neighbours, after it.
            edges: from the node to undecided ones.
            use: its bytes per strategy and time.
            new: times that it is the first to use.
            rest: least and most bytes of all undecided nodes at each time, int64[2, times].
            left: how many of these use any then.
        """
        problem, room = self.problem, self.room
        near = dict(state.near)
        count, k = len(state.cost), int(problem.sizes[v])
        width = (
            4 * state.loads.shape[1]
            + len(state.times)
            + len(new)
            + sum(raw.shape[1] for raw, _ in near.values())
            + k
            + len(state.front)
            + 4
        )
        self._count(count * k * 2)
        raw, priced = near.pop(v, self._alone(v, count))
        cost = np.minimum(state.cost[:, None] + raw, room)
        value = None if priced is None else state.value[:, None] + priced
        keep = cost < room
        if value is not None:
            keep &= value < self.parts_room
        rows, chosen = np.nonzero(keep)
        self._count(len(rows) * width)
        times = np.concatenate([state.times, new])
        started = np.broadcast_to(self.base[new], (len(rows), len(new)))
        bytes_ = np.concatenate([state.bytes[rows], started], axis=1) + use[chosen][:, times]
        cost, top = cost[rows, chosen], state.top[rows]
        value = state.value[rows] if value is None else value[rows, chosen]
        loads, beyond, paid = state.loads[rows], np.zeros(len(rows)), np.zeros(len(rows), dtype=np.int64)
        if self.windows is not None:
            loads = self.windows.loaded(loads, v, chosen, state.states[rows], state.front)
            closed, above = self.windows.close(loads, self.windows.ends[v])
            cost, value = np.minimum(cost + closed, room), value + above
            paid, beyond = self.windows.at_least(loads, v)
        surely = bytes_ + rest[0][times]
        keep = np.ones(len(rows), dtype=bool) if self.limit is None else (surely <= self.limit).all(axis=1)
        if problem.weight:
            keep &= self._objective(np.minimum(cost + paid, room), np.maximum(top, surely.max(axis=1, initial=0))) < room
        near = {w: (own[rows], None if parts is None else parts[rows]) for w, (own, parts) in near.items()}
        for w, table, parts in edges:
            own, theirs = near.get(w) or self._alone(w, len(rows))
            near[w] = np.minimum(own + table[chosen], room), None if theirs is None or parts is None else theirs + parts[chosen]
        keep &= self._ahead(np.minimum(cost + paid, room), value + beyond, near)
        states = np.concatenate([state.states[rows], chosen[:, None]], axis=1)[:, [[*state.front, v].index(f) for f in front]]
        ended = left[times] == 0
        if problem.weight:
            top = np.maximum(top, bytes_[:, ended].max(axis=1, initial=0))
        times, bytes_ = times[~ended], bytes_[:, ~ended]
        floor = self.low if problem.weight else self.limit
        if floor is not None:  # below that, the rest cannot fill a time
            bytes_ = np.maximum(bytes_, floor - rest[1][times])
        kept = np.flatnonzero(keep)
        mattering = bytes_ if self.windows is None else np.concatenate([bytes_, self.windows.open(loads, v)], axis=1)
        kept = kept[self._efficient(front, states[kept], cost[kept], mattering[kept], top[kept])]
        return (
            _State(
                front=front,
                states=states[kept],
                cost=cost[kept],
                value=value[kept],
                times=times,
                bytes=bytes_[kept],
                top=top[kept],
                near={w: (own[kept], None if parts is None else parts[kept]) for w, (own, parts) in near.items()},
                loads=loads[kept],
            ),
            rows[kept],
            chosen[kept],
        )

    def _alone(self, v: int, count: int) -> tuple[Ints, Floats | None]:
        """What each strategy of a node costs without any neighbour, for so many labels."""
        own = np.minimum(self.problem.unary[v], self.room)
        shape = count, len(own)
        return np.broadcast_to(own, shape), None if self.split is None else np.broadcast_to(self.split.parts.unary[v], shape)

    def _ahead(self, cost: Ints, value: Floats, near: dict[int, tuple[Ints, Floats | None]]) -> Bools:
        """Which labels may stay below the target with the least of what each undecided neighbour adds."""
        cost, value = cost.copy(), value.copy()
        for raw, priced in near.values():
            cost = np.minimum(cost + raw.min(axis=1), self.room)
            if priced is not None:
                value += priced.min(axis=1)
        return np.asarray((cost < self.room) & ((value < self.parts_room) | (self.split is None)))

    def _objective(self, cost: Ints, peak: Ints) -> Ints:
        """Objectives without the constant, cut to the room; no peak is above the limit."""
        weight = self.problem.weight
        paid = weight * (peak >> 20) + (weight * (peak & (MIB - 1)) >> 20)
        return np.minimum(cost + np.minimum(paid, self.room), self.room)

    def _best(self, state: _State) -> int:
        """The label of the best assignment: none has anything open."""
        return int((self._objective(state.cost, state.top) if self.problem.weight else state.cost).argmin())

    def _efficient(self, front: list[int], states: Ints, cost: Ints, used: Ints, top: Ints) -> Ints:
        """Labels (ascending) that none of those compared with them is as good as, in cost and all bytes, with the same strategies."""
        kept = np.arange(len(cost))
        if len(cost) < 2:
            return kept
        codes, states_count = np.zeros(len(cost), dtype=np.int64), 1
        for column, v in zip(states.T, front, strict=True):
            size = int(self.problem.sizes[v])
            if states_count * size > 2**61:
                known, codes = np.unique(codes, return_inverse=True)
                states_count = len(known)
            codes, states_count = codes * size + column, states_count * size
        if self.problem.weight:
            used = np.concatenate([used, top[:, None]], axis=1)
        if len(kept) > tuned.LABEL_MANY and used.shape[1]:
            used = used[:, (used != used[:1]).any(axis=0)]
        near = np.stack([cost.astype(np.float64), *used.T.astype(np.float64)], axis=1)
        near -= near.min(axis=0)
        near /= np.maximum(near.max(axis=0), 1.0)
        rng = np.random.default_rng(0)
        for mixture in range(tuned.LABEL_SORTINGS if len(kept) > tuned.LABEL_MANY else 1):
            weights = np.concatenate([[1e6 if mixture == 0 else 1.0], 3 * rng.random(used.shape[1]) ** 3])
            self._count(len(kept) * (near.shape[1] + 20))
            order = np.lexsort((near[kept] @ weights, codes[kept]))
            kept = kept[order]
            dead = np.zeros(len(kept), dtype=bool)
            for far in tuned.LABEL_DISTANCES:
                ahead = np.flatnonzero((codes[kept[far:]] == codes[kept[:-far]]) & ~dead[far:]) if far < len(kept) else kept[:0]
                if not len(ahead):
                    break
                ahead = ahead[cost[kept[ahead]] <= cost[kept[ahead + far]]]
                better = (used[kept[ahead]] <= used[kept[ahead + far]]).all(axis=1)
                dead[ahead[better] + far] = True
                self._count(2 * len(ahead) * (used.shape[1] + 2))
            kept = kept[~dead]
        return np.sort(kept)

    def _count(self, cells: int) -> None:
        self.work += tuned.LABEL_NODE_WORK / 4 + tuned.LABEL_CELL_WORK * cells
        if cells > tuned.LABEL_CELLS or self.work > self.most_work or self.over():
            raise TooMany(self.work)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _State:
    """The labels after a step.

    Attributes:
        front: decided nodes with undecided neighbours.
        states: their strategies, int64[labels, front].
        cost: without the problem's constant; with the time of windows that are closed.
        value: sum of the parts of the split.
        times: that decided and undecided nodes use together, positions.
        bytes: in use then, int64[labels, times].
        loads: nanoseconds on each term of open windows, int64[labels, terms]; zero of those that are closed, whose time is in the cost.
        top: the peak at times that nothing undecided uses, and at least what is known of any peak.
        near: per undecided neighbour, what each of its strategies adds: costs, and parts of the split.
    """

    front: list[int]
    states: Ints
    cost: Ints
    value: Floats
    times: Ints
    bytes: Ints
    top: Ints
    near: dict[int, tuple[Ints, Floats | None]]
    loads: Ints


class _Windows:
    """What nodes load of windows as they are decided in an order.

    Attributes:
        loads: of the problem.
        own, joint: per node, what it loads by term, and with each node that is decided before it.
        rest: after each step, least and most that undecided nodes and pairs still load of each term, int64[2, terms].
        ends: per node, windows that close with it; of those that none loads, before the first node: ``never``.
        opens: after each step, the terms of windows that are open and may be loaded already.
    """

    def __init__(self, problem: Problem, loads: Loads, order: list[int], weights: Ints | None, scale: float | None) -> None:
        self.loads, self.scale = loads, scale
        self.weights = loads.weights(np.ones(len(loads.windows))) if weights is None else weights
        count, terms = problem.size, len(loads.windows)
        place = np.empty(count, dtype=np.int64)
        place[order] = np.arange(count)
        self.place = place
        self.own: list[dict[int, Ints]] = [{} for _ in range(count)]
        self.joint: list[dict[int, dict[int, Ints]]] = [{} for _ in range(count)]
        for v, number, term, times in loads.nodes.tolist():
            self.own[v][term] = self.own[v].get(term, 0) + loads.vectors[number] * times
        for u, v, number, term, times in loads.edges.tolist():
            early, late = (u, v) if place[u] < place[v] else (v, u)
            table = loads.tables[number] if early == u else loads.tables[number].T
            mine = self.joint[late].setdefault(early, {})
            mine[term] = mine.get(term, 0) + table * times
        steps = np.zeros((count + 1, 2, terms), dtype=np.int64)
        beyond = np.zeros((count + 1, terms), dtype=np.int64)  # least change of a term's distance to the weighted load, x WEIGHT
        first, last = np.full(loads.count, count), np.full(loads.count, -1)
        for v in order:
            for part in (self.own[v], *self.joint[v].values()):
                means: dict[int, Ints] = {}
                for term, costs in part.items():
                    window, i = int(loads.windows[term]), int(place[v])
                    steps[i, :, term] += costs.min(), costs.max()
                    first[window], last[window] = min(first[window], i), max(last[window], i)
                    means[window] = means.get(window, 0) + costs * int(self.weights[term])
                for window, mean in means.items():
                    for term in np.flatnonzero(loads.windows == window).tolist():
                        beyond[place[v], term] += int((part.get(term, 0) * WEIGHT - mean).min())
        self.rest = steps.sum(axis=0) - np.cumsum(steps, axis=0)
        self.beyond = beyond.sum(axis=0) - np.cumsum(beyond, axis=0)
        self.ends = [np.flatnonzero(last == place[v]) for v in range(count)]
        self.never = np.flatnonzero(last < 0)
        self.opens = [np.flatnonzero((first[loads.windows] <= i) & (i < last[loads.windows])) for i in range(count)]

    def loaded(self, loads: Ints, v: int, chosen: Ints, states: Ints, front: list[int]) -> Ints:
        """Loads with one more node, of these strategies."""
        loads = loads.copy()
        for term, costs in self.own[v].items():
            loads[:, term] += costs[chosen]
        for u, tables in self.joint[v].items():
            theirs = states[:, front.index(u)]
            for term, costs in tables.items():
                loads[:, term] += costs[theirs, chosen]
        return loads

    def close(self, loads: Ints, windows: Ints) -> tuple[Ints, Floats]:
        """What these windows take, and how much of it is beyond the weights, scaled and rounded down; their loads become zero."""
        terms = np.isin(self.loads.windows, windows)
        own = np.where(terms, loads, 0)
        loads[:, terms] = 0
        taken = np.maximum.reduceat(own, self.loads.starts, axis=1)
        return taken.sum(axis=1), self._scaled(
            (taken * WEIGHT - np.add.reduceat(own * self.weights, self.loads.starts, axis=1)).sum(axis=1)
        )

    def at_least(self, loads: Ints, v: int) -> tuple[Ints, Floats]:
        """After a node: what the open windows take at least, and how much of it is beyond the weights, scaled and rounded down."""
        surely = np.maximum.reduceat(loads + self.rest[self.place[v], 0], self.loads.starts, axis=1)
        mean = np.add.reduceat(loads * self.weights, self.loads.starts, axis=1)
        above = self._mattering(loads, v) * WEIGHT - mean[:, self.loads.windows] + self.beyond[self.place[v]]
        above = np.maximum(np.maximum.reduceat(above, self.loads.starts, axis=1), 0)
        return surely.sum(axis=1), self._scaled(above.sum(axis=1))

    def open(self, loads: Ints, v: int) -> Ints:
        """What of the loads tells labels apart after a node: of windows that are open and loaded, as far as it may matter."""
        return self._mattering(loads, v)[:, self.opens[self.place[v]]]

    def _mattering(self, loads: Ints, v: int) -> Ints:
        """Loads, where none lacks so much to the window's least time that the rest cannot make up for it."""
        least, most = self.rest[self.place[v]]
        surely = np.maximum.reduceat(loads + least, self.loads.starts, axis=1)
        return np.asarray(np.maximum(loads, surely[:, self.loads.windows] - most))

    def _scaled(self, weighted: Ints) -> Floats:
        if self.scale is None:
            return np.zeros(len(weighted))
        return np.asarray(np.floor(weighted / WEIGHT * self.scale * (1 - 1e-12)))


def _order(problem: Problem) -> tuple[list[int], float]:
    """Always the node after which decided nodes with undecided neighbours have the fewest states; logarithm of the most of these."""
    around: list[set[int]] = [set() for _ in range(problem.size)]
    for edge in problem.edges:
        around[edge.a].add(edge.b)
        around[edge.b].add(edge.a)
    logs = np.log2(problem.sizes).tolist()
    best: tuple[float, float, list[int]] | None = None
    for start in range(min(problem.size, tuned.LABEL_STARTS)):
        found = _order_from(start, around, logs)
        if best is None or found[:2] < best[:2]:
            best = found
    return (best[2], best[0]) if best is not None else ([], 0.0)


def _order_from(start: int, around: list[set[int]], logs: list[float]) -> tuple[float, float, list[int]]:
    """(Logarithm of the most states, states of all steps, order)."""
    undecided = [len(near) for near in around]
    left = set(range(len(around)))
    front: set[int] = set()
    order: list[int] = []
    widest = total = 0.0

    def after(v: int) -> float:
        """Logarithm of the states when this one is decided."""
        gone = sum(logs[w] for w in around[v] if w in front and undecided[w] == 1)
        return (logs[v] if undecided[v] else 0.0) - gone

    v = start
    while True:
        left.discard(v)
        order.append(v)
        for w in around[v]:
            undecided[w] -= 1
        front = {w for w in front | {v} if undecided[w]}
        states = sum(logs[w] for w in sorted(front))
        widest, total = max(widest, states), total + 2.0 ** min(states, 60.0)
        if not left:
            return widest, total, order
        near = {w for f in front for w in around[f] if w in left}
        v = min(near or left, key=lambda w: (after(w), w))


def scaled_up(value: int, scale: float) -> float:
    """A value times a power of two, rounded up."""
    whole, part = divmod(value * scale.as_integer_ratio()[0], scale.as_integer_ratio()[1])
    return float(whole + (part > 0)) if abs(whole) < EXACT else np.inf
