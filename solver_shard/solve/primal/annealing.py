"""Simulated annealing on one flat problem, compiled: single changes at falling temperature, with memory above the limit at a price.

    annealing = Annealing(flat, rng, work=0.3)
    better = annealing.run(chosen, price=0.2, sweeps=3000)
    better = annealing.epoch(chosen, price=0.2, clock=clock)    # several runs, longer ones each time

Message passing and integer programs are weak where everything is on circles: dense graphs, whose optimum no bound comes near and whose
regions are as hard as the whole. Annealing (Kirkpatrick et al. 1983) needs neither. The limit is kept by strategic oscillation (Glover
1989): a byte of the peak above the limit costs ``price``, which rises while the limit is broken and falls while it is kept, so that the
walk crosses it again and again; what is returned keeps it. What is forbidden has such a price, too: single changes would mostly be stuck
behind it. Where the peak is part of the objective it costs its weight at any height.
"""

from __future__ import annotations

import numpy as np

from solver_shard.graph.choice_graph import MIB, Ints
from solver_shard.solve import parameters as tuned
from solver_shard.solve.bounds.trws import CLASH
from solver_shard.solve.bounds.trws_compiled import compiled
from solver_shard.solve.flat import Bytes, Flat, Graph
from solver_shard.solve.limits import Clock
from solver_shard.solve.primal import local_search
from solver_shard.solve.problem import Floats

RISE, FALL = 1.2, 0.95
"""Factors of the price of memory after a sweep that ends above the limit, and after one within it; of what is forbidden, likewise."""

BARRIER = 4.0
"""First price of a forbidden choice, as a part of the first temperature; and the least there is, of the present one."""


class Annealing:
    """Runs on one flat problem; every run continues the random numbers of the last.

    Attributes:
        work: of the next epoch.
        idle: epochs in a row that gave nothing.
    """

    def __init__(self, flat: Flat, rng: np.random.Generator, *, work: float) -> None:
        self.flat, self.rng = flat, rng
        self.limit = int(flat.limit) if flat.limit is not None else 2**62
        self.weight = flat.problem.weight * flat.scale / MIB
        self.free = np.flatnonzero(flat.graph.k > 1)
        degrees = np.diff(flat.graph.fs) + np.diff(flat.graph.bs)
        self.sweep_work = tuned.PROPOSAL_WORK * float((1 + degrees[self.free]).sum())
        self.work, self.idle = work, 0

    def epoch(self, chosen: Ints, *, price: float, clock: Clock) -> Ints:
        """The best of several runs, each from the best so far; see ``run``."""
        value, start = self.flat.problem.value(chosen), chosen
        spent = 0.0
        sweeps = min(
            tuned.ANNEALING_MOST_SWEEPS,
            max(self.work / tuned.ANNEALING_RUNS, min(self.work, tuned.ANNEALING_LEAST_SWEEPS * self.sweep_work))
            / max(1e-12, self.sweep_work),
        )
        while spent < self.work and not clock.over():
            most = tuned.ANNEALING_RUN_SHARE * clock.time_left() if clock.paced else np.inf
            own = max(1, int(min(sweeps, most / max(1e-12, self.sweep_work))))
            better = self.run(chosen, price=price, sweeps=own)
            clock.spend(own * self.sweep_work)
            spent += max(own * self.sweep_work, 1e-3 * self.work)
            found = self.flat.problem.value(better)
            if found is not None and (value is None or found < value):
                chosen, value = better, found
        self.idle = 0 if chosen is not start else self.idle + 1
        self.work = min(tuned.ANNEALING_MOST_WORK, tuned.ANNEALING_GROWTH * self.work)
        return chosen

    def run(self, chosen: Ints, *, price: float, sweeps: int) -> Ints:
        """The best assignment within the limit of a run; the given one if none is better or within it.

        Args:
            chosen: int64[nodes].
            price: scaled cost per byte above the limit at first; 0 for a price that fits the costs.
            sweeps: each has as many proposals as there are nodes with a choice.
        """
        flat, chosen = self.flat, chosen.copy()
        if not len(self.free):
            return chosen
        usage = float(flat.bytes.usage.mean()) if len(flat.bytes.usage) else 0.0
        typical = self._typical(chosen) or self.weight * usage
        if not typical:  # nothing costs anything
            return chosen
        top, added = local_search.build(flat.profile(chosen))
        best = chosen.copy()
        seed = int(self.rng.integers(1, 2**62))
        price = price or typical / max(1.0, usage)
        _anneal(
            flat.graph,
            flat.bytes,
            flat.theta,
            self.free,
            self.limit,
            self.weight,
            price,
            tuned.HOT * typical,
            tuned.COLD * typical,
            sweeps,
            chosen,
            self._clashes(chosen),
            top,
            added,
            best,
            seed,
        )
        return best

    def _typical(self, chosen: Ints) -> float:
        """What a random change costs or saves, in the median of those that do."""
        g = self.flat.graph
        nodes = self.free[self.rng.integers(len(self.free), size=tuned.TEMPERATURE_SAMPLES)]
        strategies = (self.rng.random(tuned.TEMPERATURE_SAMPLES) * g.k[nodes]).astype(np.int64)
        changes = _changes(g, self.flat.theta, chosen, nodes, strategies)
        sizes = np.abs(changes[changes != 0])
        return float(np.median(sizes)) if len(sizes) else 0.0

    def _clashes(self, chosen: Ints) -> int:
        """Forbidden choices of an assignment."""
        g = self.flat.graph
        rows, cols = self.flat.cells(chosen)
        return int((self.flat.theta[g.off[:-1] + chosen] >= CLASH).sum() + (g.pool[g.toff + rows * g.nc + cols] >= CLASH).sum())


@compiled
def _changes(g: Graph, theta: Floats, chosen: Ints, nodes: Ints, strategies: Ints) -> Floats:
    found = np.empty(len(nodes))
    for i in range(len(nodes)):
        found[i] = _change(g, nodes[i], theta, chosen, chosen[nodes[i]], strategies[i])[0]
    return found


@compiled
def _change(g: Graph, v: int, theta: Floats, chosen: Ints, old: int, new: int) -> tuple[float, int]:
    """Cost of another strategy of node v, given all others, and how many more forbidden choices there are; these cost nothing here."""
    total, clashes = 0.0, 0
    for x, sign in ((new, 1), (old, -1)):
        cost = theta[g.off[v] + x]
        if cost < CLASH:
            total += sign * cost
        else:
            clashes += sign
    for q in range(g.bs[v], g.bs[v + 1]):
        e = g.bl[q]
        x = chosen[g.ea[e]]
        r = x if g.rmap[e] < 0 else g.maps[g.rmap[e] + x]
        cell, m = g.toff[e] + r * g.nc[e], g.cmap[e]
        there, here = (new, old) if m < 0 else (g.maps[m + new], g.maps[m + old])
        for c, sign in ((there, 1), (here, -1)):
            cost = g.pool[cell + c]
            if cost < CLASH:
                total += sign * cost
            else:
                clashes += sign
    for q in range(g.fs[v], g.fs[v + 1]):
        e = g.fl[q]
        y = chosen[g.eb[e]]
        cell, m = g.toff[e] + (y if g.cmap[e] < 0 else g.maps[g.cmap[e] + y]), g.rmap[e]
        there, here = (new, old) if m < 0 else (g.maps[m + new], g.maps[m + old])
        for r, sign in ((there, 1), (here, -1)):
            cost = g.pool[cell + r * g.nc[e]]
            if cost < CLASH:
                total += sign * cost
            else:
                clashes += sign
    return total, clashes


@compiled
def _anneal(
    g: Graph,
    m: Bytes,
    theta: Floats,
    free: Ints,
    limit: int,
    weight: float,
    price: float,
    hot: float,
    cold: float,
    sweeps: int,
    chosen: Ints,
    clashes: int,
    top: Ints,
    added: Ints,
    best: Ints,
    seed: int,
) -> None:
    """Anneal from ``chosen``, with so many forbidden choices; ``best`` becomes the best assignment that is allowed and within the limit."""
    state = np.uint64(seed)
    barrier = BARRIER * hot
    value = weight * top[1]  # relative to the given assignment's cost
    least = value if top[1] <= limit and clashes == 0 else np.inf
    for sweep in range(sweeps):
        temperature = hot * (cold / hot) ** (sweep / max(1, sweeps - 1))
        for _ in range(len(free)):
            # xorshift64*: one draw chooses node and strategy, the next is a float
            state ^= state >> np.uint64(12)
            state ^= state << np.uint64(25)
            state ^= state >> np.uint64(27)
            draw = state * np.uint64(2685821657736338717)
            v = free[np.int64((draw >> np.uint64(33)) % np.uint64(len(free)))]
            old = chosen[v]
            new = np.int64((draw & np.uint64(0xFFFFFFF)) % np.uint64(g.k[v] - 1))
            new += new >= old
            state ^= state >> np.uint64(12)
            state ^= state << np.uint64(25)
            state ^= state >> np.uint64(27)
            draw = state * np.uint64(2685821657736338717)
            allowed = -temperature * np.log((np.float64(draw >> np.uint64(11)) + 1.0) / 9007199254740992.0)
            before = top[1]
            above = max(0, before - limit)
            change, more = _change(g, v, theta, chosen, old, new)
            if change + barrier * more - price * above - weight * before > allowed:  # no relief of memory could make up for that
                continue
            local_search.move(m, top, added, v, old, new)
            after = top[1]
            paid = change + weight * (after - before)
            if paid + barrier * more + price * (max(0, after - limit) - above) > allowed:
                local_search.move(m, top, added, v, new, old)
                continue
            chosen[v] = new
            value += paid
            clashes += more
            if after <= limit and clashes == 0 and value < least:
                least = value
                best[:] = chosen
        price *= RISE if top[1] > limit else FALL
        barrier = barrier * RISE if clashes else max(barrier * FALL, BARRIER * temperature)
