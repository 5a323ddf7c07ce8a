"""Better assignments from a good one: forest moves under memory prices, and integer programs on regions.

    improver = Improver(flat, rows, multipliers, extra)
    found = improver.run(chosen, seed=[0], share=0.5, nodes=80, clock=Clock(None, 5.0))
    found.assignment, found.value

*Forest moves* (local_search.py) change most nodes at once, under prices of memory that are the relaxation's times a random factor, plus
extra prices where the last result exceeded the limit; what they give is repaired and improved under the limit. They start from the
incumbent, a disturbed incumbent or their last result. *Regions* free some connected nodes, with the few strategies each whose bounds
are least, and solve that exactly. Forest moves gain most at first, regions at the end: the share of work of each follows its gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from solver_shard.graph.choice_graph import Ints
from solver_shard.solve.bounds.lagrangian import Dual
from solver_shard.solve.bounds.subgradient import Rows
from solver_shard.solve.flat import Flat
from solver_shard.solve.integer_program import cells_of, solve_kernel
from solver_shard.solve.limits import Clock
from solver_shard.solve.presolve import presolve
from solver_shard.solve.presolve.reducer import NoAssignment
from solver_shard.solve.primal.local_search import Forest, Local
from solver_shard.solve.primal.region import region
from solver_shard.solve.problem import Floats

FACTORS = (0.8, 0.9, 1.0, 1.0, 1.1, 1.25)
"""Of the relaxation's prices of memory, for forest moves."""

KICK = 0.02
"""Share of the nodes that a disturbed incumbent gets a random strategy at."""

MOST_MOVES = 60
FIRST_NODES, LEAST_NODES, MOST_NODES = 80, 20, 1500
FIRST_VALUES = 6
MOST_CELLS = 25_000
"""Pairs of a region after presolve beyond which it is made smaller instead of solved."""

EFFORT = 3.0
"""Work units for one region."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Improved:
    """What a run gave: the best assignment (the given one if nothing better), its objective, gains by forest moves and regions, the
    work of each, and the region size to go on with."""

    assignment: Ints
    value: int
    gains: tuple[float, float]
    work: tuple[float, float]
    nodes: int


class Improver:
    """Searches around assignments of one flat problem.

    Args:
        flat: the problem.
        rows: memory rows of its relaxation.
        multipliers: their prices (scaled cost per byte times slack).
        extra: scaled least increase of the bound per flat strategy.
    """

    def __init__(self, flat: Flat, rows: Rows, multipliers: Floats, extra: Floats) -> None:
        self.flat, self.rows, self.multipliers, self.extra = flat, rows, multipliers, extra
        self.local = Local(flat)
        g = flat.graph
        self.neighbours = [np.concatenate([g.eb[g.fl[g.fs[v] : g.fs[v + 1]]], g.ea[g.bl[g.bs[v] : g.bs[v + 1]]]]) for v in range(flat.size)]
        cells = int((g.nr * g.nc).sum())
        self.move_work = 6e-10 * cells + 3e-7 * flat.size
        self.repair_work = 3e-4 + 6e-7 * flat.size
        self.descend_work = 1.2e-6 * flat.size

    def run(self, chosen: Ints, *, seed: Sequence[int], share: float, nodes: int, clock: Clock) -> Improved:
        """Spend the clock's work, ``share`` of it on forest moves; regions have about so many nodes at first."""
        rng = np.random.default_rng(seed)
        start = self.flat.problem.value(chosen)
        assert start is not None
        work = clock.work_left()
        after, spent = self._forests(chosen, rng, work * share, clock) if share > 0 else (chosen, 0.0)
        middle = self.flat.problem.value(after)
        assert middle is not None
        best, regions, nodes = self._regions(after, rng, work * (1 - share), nodes, clock)
        value = self.flat.problem.value(best)
        assert value is not None
        return Improved(
            assignment=best, value=value, gains=(float(start - middle), float(middle - value)), work=(spent, regions), nodes=nodes
        )

    def _forests(self, chosen: Ints, rng: np.random.Generator, work: float, clock: Clock) -> tuple[Ints, float]:
        flat, problem = self.flat, self.flat.problem
        forest, rows = Forest(flat, rng), self.rows.copy()
        base = self.multipliers
        bump, multipliers = np.zeros(len(base)), base
        best, value, state, spent = chosen, problem.value(chosen), chosen, 0.0
        while spent < work and not clock.over():
            theta = rows.price(multipliers / rows.slack) if len(rows) else flat.theta
            mode = int(rng.integers(3))
            if mode < 2:
                state = best
            state = state.copy()
            if mode == 1:
                kicked = rng.random(flat.size) < KICK
                state[kicked] = (rng.random(int(kicked.sum())) * flat.graph.k[kicked]).astype(np.int64)
            spent += self._moves(forest, state, theta)
            profile = flat.profile(state)
            repaired = self.local.repair(state, theta)
            spent += self.repair_work
            if repaired is not None:
                better = self.local.descend(repaired, flat.theta, rng, 10)
                found = problem.value(better)
                spent += self.descend_work
                if found is not None and (value is None or found < value):
                    best, value = better, found
            if flat.limit is None:
                continue
            new = sum(rows.add(t) for t in rows.exceeded(profile, 3))
            base, bump = np.append(base, np.zeros(new)), np.append(bump, np.zeros(new))
            if len(rows):
                excess = (profile[rows.times] - flat.limit) / rows.slack
                over_limit = excess > 0
                unit = 0.03 * max(float(base.sum()), 1e-3 * abs(flat.cost(best)))
                bump *= 0.7
                bump[over_limit] += unit * np.minimum(excess[over_limit], 1.0) / max(1, int(over_limit.sum()))
                multipliers = base * rng.choice(FACTORS) + bump
        return best, spent

    def _moves(self, forest: Forest, state: Ints, theta: Floats) -> float:
        """Forest moves until three in a row hardly help; the work."""
        cost, stale, moves = self.flat.cost(state, theta), 0, 0
        while stale < 3 and moves < MOST_MOVES:
            forest.move(state, theta)
            moves += 1
            now = self.flat.cost(state, theta)
            stale = stale + 1 if now > cost - 1e-5 * abs(cost) else 0
            cost = now
        return moves * self.move_work

    def _regions(self, chosen: Ints, rng: np.random.Generator, work: float, nodes: int, clock: Clock) -> tuple[Ints, float, int]:
        flat, spent, step = self.flat, 0.0, 0
        nodes = min(nodes, flat.size)
        while spent < work and not clock.over():
            step += 1
            picked = self._pick(chosen, rng, nodes, step)
            small = region(flat, chosen, picked, self._keep(chosen, picked, FIRST_VALUES))
            spent += 1e-3 * len(picked) + 2e-5 * len(small.problem.spans)
            try:
                kernel, undo = presolve(small.problem)
            except NoAssignment:
                continue
            cells = cells_of(kernel)
            if cells > MOST_CELLS:
                nodes = max(LEAST_NODES, int(0.7 * nodes))
                continue
            now = small.problem.value(small.positions(chosen[picked]))
            own = clock.task(work=EFFORT, seconds=2 * EFFORT)
            dual = Dual(kernel)
            for _ in range(4):
                dual.evaluate(np.zeros(len(kernel.base)), 5)
            own.spend(dual.work)
            result = solve_kernel(kernel, dual, own, cutoff=now, gap=1e-6, seed=int(rng.integers(2**31)), effort=EFFORT, sure=False)
            spent += own.work + 1e-2
            if result.assignment is not None:
                better = chosen.copy()
                better[picked] = small.strategies(undo.restore(result.assignment))
                chosen = self.local.descend(better, flat.theta, rng, 5)
            if not result.proven:
                nodes = max(LEAST_NODES, int(0.8 * nodes))
            elif own.work < EFFORT / 6:
                nodes = min(MOST_NODES, flat.size, int(1.05 * nodes) + 1)
        return chosen, spent, nodes

    def _keep(self, chosen: Ints, picked: Ints, values: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """The strategies of each picked node whose bounds are least, and its own."""
        flat = self.flat
        keep = np.zeros(len(self.extra), dtype=bool)
        for v in picked.tolist():
            row = self.extra[flat.graph.off[v] : flat.graph.off[v + 1]].copy()
            row[chosen[v]] = -1.0
            keep[flat.graph.off[v] + np.argsort(row, kind="stable")[:values]] = True
        return keep

    def _pick(self, chosen: Ints, rng: np.random.Generator, count: int, step: int) -> Ints:
        """A region: around a random node, around nodes that live at a tight time, or around one whose strategy looks bad."""
        flat = self.flat
        mode = step % 3
        if mode == 1 and len(flat.base) and len(flat.bytes.starts) and flat.limit is not None:
            profile = flat.profile(chosen)
            tight = np.flatnonzero(profile >= 0.98 * profile.max())
            time = int(rng.choice(tight))
            m = flat.bytes
            carriers = np.repeat(np.arange(len(m.node)), np.diff(m.ss))[(m.starts <= time) & (time < m.stops)]
            live = np.unique(m.node[carriers])
            starts = rng.choice(live, min(len(live), 6), replace=False) if len(live) else rng.integers(flat.size, size=1)
        elif mode == 2:
            bad = self.extra[flat.graph.off[:-1] + chosen]
            weight = bad + 1e-3 * bad.max(initial=0.0) + 1e-9
            starts = np.array([rng.choice(flat.size, p=weight / weight.sum())])
        else:
            starts = rng.integers(flat.size, size=1)
        picked: dict[int, None] = {}
        each = max(1, count // len(starts))
        for start in starts.tolist():
            self._around(start, min(each, count - len(picked)), picked, rng)
        while len(picked) < min(count, flat.size):
            self._around(int(rng.integers(flat.size)), count - len(picked), picked, rng)
        return np.array(sorted(picked), dtype=np.int64)

    def _around(self, start: int, count: int, picked: dict[int, None], rng: np.random.Generator) -> None:
        """Add up to so many nodes, breadth first from one of them."""
        queue, seen, head = [start], {start}, 0
        while head < len(queue) and count > 0:
            v = queue[head]
            head += 1
            if v not in picked:
                picked[v] = None
                count -= 1
            for w in rng.permutation(self.neighbours[v]).tolist():
                if w not in seen:
                    seen.add(w)
                    queue.append(w)
