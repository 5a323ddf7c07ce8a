"""Large neighbourhood search (Shaw 1998): better assignments from a good one, beside the proof.

    lns = LargeNeighbourhoodSearch(relaxation, parameters)
    lns.reprice(prices)
    found, proof = lns.run(incumbent, prover, patience, clock)      # one epoch

Two kinds of neighbourhoods, both solved exactly. *Forest moves* (local_search.py) change most nodes at once, under prices of memory that
are the relaxation's times a random factor, plus extra prices where the last result exceeded the limit; what they give is repaired and
improved under the limit. They start from the incumbent, a disturbed incumbent or their last result. *Regions* free some connected nodes,
with the few strategies each whose min-marginals are least, and solve that with the integer program. Forest moves gain most at first,
regions at the end: the share of work of each follows its gains.

An epoch has two tasks whose inputs and amounts of work are fixed before it begins: a search around the incumbent, and an integer program on
the kernel (integer_program.py) or another search with another seed. They run in processes of their own where there is more than one worker;
the results are the same. Where both improved the incumbent, the changes of one are tried on top of the other. It proves nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import Bools, Ints
from solver_shard.solve import limits
from solver_shard.solve import parameters as tuned
from solver_shard.solve.bounds.lagrangian import LagrangianDual
from solver_shard.solve.bounds.subgradient import Relaxation, Rows
from solver_shard.solve.flat import Flat
from solver_shard.solve.integer_program import Proof, cells_of, solve_kernel
from solver_shard.solve.limits import Clock
from solver_shard.solve.parameters import SolveParameters
from solver_shard.solve.presolve import presolve
from solver_shard.solve.presolve.reducer import NoAssignment
from solver_shard.solve.primal.local_search import Forest, Local
from solver_shard.solve.problem import Carrier, Edge, Floats, Problem, compact_edge

Prover = Callable[[Clock], Proof]


class LargeNeighbourhoodSearch:
    """Epochs on one problem.

    Attributes:
        improver: around assignments of the problem; after ``reprice``.
        epoch: number of epochs so far.
        idle: epochs in a row that gave nothing.
    """

    def __init__(self, relaxation: Relaxation, parameters: SolveParameters) -> None:
        self.relaxation, self.flat, self.parameters = relaxation, relaxation.flat, parameters
        self.improver: NeighbourhoodSearch | None = None
        self.epoch = self.idle = 0
        self.work, self.share, self.nodes = tuned.FIRST_EPOCH_WORK, 0.5, tuned.FIRST_NODES

    def reprice(self, prices: Mapping[int, float]) -> float:
        """Take over better multipliers (cost per byte by time label); the work."""
        spent = self.relaxation.work
        self.relaxation.reprice(prices)
        _, extra = self.relaxation.margins()
        self.improver = NeighbourhoodSearch(self.flat, self.relaxation.rows, self.relaxation.multipliers, extra)
        return self.relaxation.work - spent

    def run(self, incumbent: Ints, prover: Prover | None, patience: float, clock: Clock) -> tuple[list[Ints], Proof | None]:
        """One epoch: assignments worth a look, and what was proven; ``patience`` is the prover's."""
        problem: Problem = self.flat.problem
        left = clock.work_left() / 2
        work = min(left, self.work)
        seeds = [[self.parameters.seed, self.epoch, i] for i in range(2)]

        def improve(i: int) -> Improved:
            assert self.improver is not None
            own = clock.task(work=work, seconds=max(tuned.TASK_SECONDS, 2 * work))
            return self.improver.run(incumbent, seed=seeds[i], share=self.share, nodes=self.nodes, clock=own)

        def proof() -> Proof:
            assert prover is not None
            seconds = tuned.ALONE_SECONDS if alone else max(tuned.TASK_SECONDS, 2 * work)
            return prover(clock.task(work=left, seconds=patience * seconds))

        second = (lambda: improve(1)) if prover is None else proof
        alone = prover is not None and self.idle % (tuned.LNS_REST + 1) > 0
        tasks = [proof] if alone else [second, lambda: improve(0)]
        answers = limits.run(tasks, workers=self.parameters.workers, over=clock.over)
        self.epoch += 1
        improved = [a for a in answers if isinstance(a, Improved)]
        proofs = [a for a in answers if isinstance(a, Proof)]
        clock.spend(sum(sum(a.work) for a in improved) + sum(a.work for a in proofs))
        self._adapt(improved)
        found = [a.assignment for a in sorted(improved, key=lambda a: a.value)]
        if len(found) == 2:
            crossed = found[0].copy()
            changed = found[1] != incumbent
            crossed[changed] = found[1][changed]
            found.append(crossed)
        now = problem.value(incumbent)
        better = any(a.value < now for a in improved if now is not None)
        self.idle = 0 if better else self.idle + 1
        if improved:
            self.work = min(tuned.MOST_EPOCH_WORK, self.work * tuned.EPOCH_GROWTH)
        return found, proofs[0] if proofs else None

    def _adapt(self, improved: list[Improved]) -> None:
        """The share of forest moves follows what they gained per work."""
        if not improved:
            return
        forest, regions = (sum(a.gains[i] for a in improved) / max(1e-9, sum(a.work[i] for a in improved)) for i in (0, 1))
        if forest + regions > 0:
            self.share = min(1 - tuned.LEAST_SHARE, max(tuned.LEAST_SHARE, 0.5 * self.share + 0.5 * forest / (forest + regions)))
        self.nodes = improved[-1].nodes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Improved:
    """What a run gave: the best assignment (the given one if nothing better), its objective, gains by forest moves and regions, the
    work of each, and the region size to go on with."""

    assignment: Ints
    value: int
    gains: tuple[float, float]
    work: tuple[float, float]
    nodes: int


class NeighbourhoodSearch:
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
                kicked = rng.random(flat.size) < tuned.KICK
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
                multipliers = base * rng.choice(tuned.PRICE_FACTORS) + bump
        return best, spent

    def _moves(self, forest: Forest, state: Ints, theta: Floats) -> float:
        """Forest moves until three in a row hardly help; the work."""
        cost, stale, moves = self.flat.cost(state, theta), 0, 0
        while stale < 3 and moves < tuned.MOST_FOREST_MOVES:
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
            small = region(flat, chosen, picked, self._keep(chosen, picked, tuned.LNS_VALUES))
            spent += 1e-3 * len(picked) + 2e-5 * len(small.problem.spans)
            try:
                kernel, postsolve = presolve(small.problem)
            except NoAssignment:
                continue
            cells = cells_of(kernel)
            if cells > tuned.LNS_CELLS:
                nodes = max(tuned.LEAST_NODES, int(0.7 * nodes))
                continue
            now = small.problem.value(small.positions(chosen[picked]))
            own = clock.task(work=tuned.LNS_EFFORT, seconds=2 * tuned.LNS_EFFORT)
            dual = LagrangianDual(kernel)
            for _ in range(4):
                dual.evaluate(np.zeros(len(kernel.base)), 5)
            own.spend(dual.work)
            result = solve_kernel(
                kernel, dual, own, cutoff=now, gap=1e-6, seed=int(rng.integers(2**31)), effort=tuned.LNS_EFFORT, sure=False
            )
            spent += own.work + 1e-2
            if result.assignment is not None:
                better = chosen.copy()
                better[picked] = small.strategies(postsolve.restore(result.assignment))
                chosen = self.local.descend(better, flat.theta, rng, 5)
            if not result.proven:
                nodes = max(tuned.LEAST_NODES, int(0.8 * nodes))
            elif own.work < tuned.LNS_EFFORT / 6:
                nodes = min(tuned.MOST_NODES, flat.size, int(1.05 * nodes) + 1)
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """Some nodes as a problem of their own, the nodes behind its nodes and the strategies behind theirs; all else stays as it is."""

    problem: Problem
    nodes: Ints
    kept: tuple[Ints, ...]

    def positions(self, strategies: Ints) -> Ints:
        """The assignment of the region that stands for some original strategies of its nodes."""
        return np.array([np.searchsorted(row, x) for row, x in zip(self.kept, strategies.tolist(), strict=True)], dtype=np.int64)

    def strategies(self, answer: Ints) -> Ints:
        """The original strategies of an assignment of the region."""
        return np.array([row[x] for row, x in zip(self.kept, answer.tolist(), strict=True)], dtype=np.int64)


def region(flat: Flat, chosen: Ints, nodes: Ints, keep: Bools) -> Region:
    """The region of some nodes (sorted), of which only the strategies in ``keep`` (per flat strategy) may be chosen.

    What the other nodes cost given the region is in its unary costs, what they use is in its base. Between two consecutive starts or stops
    of the region's own spans only the time of the largest base is kept: exact, for the region uses the same at all of them.
    """
    whole = flat.problem
    place = {int(v): i for i, v in enumerate(nodes)}
    kept = [np.flatnonzero(keep[flat.graph.off[v] : flat.graph.off[v + 1]]) for v in nodes]
    unary = [whole.unary[v][own] for v, own in zip(nodes, kept, strict=True)]
    edges: list[Edge] = []
    for i, v in enumerate(nodes.tolist()):
        own = kept[i]
        for e in flat.graph.fl[flat.graph.fs[v] : flat.graph.fs[v + 1]].tolist():
            edge = whole.edges[e]
            other = place.get(edge.b)
            if other is None:
                unary[i] = np.minimum(unary[i] + edge.core[edge.rows[own], edge.cols[chosen[edge.b]]], FORBIDDEN)
            else:
                edges.append(_edge(edge, i, other, own, kept[other]))
        for e in flat.graph.bl[flat.graph.bs[v] : flat.graph.bs[v + 1]].tolist():
            edge = whole.edges[e]
            if edge.a not in place:
                unary[i] = np.minimum(unary[i] + edge.core[edge.rows[chosen[edge.a]], edge.cols[own]], FORBIDDEN)
    spans, base, carriers, times = _memory(flat, chosen, nodes, kept)
    problem = Problem(
        unary=tuple(unary),
        edges=tuple(edges),
        carriers=carriers,
        spans=spans,
        base=base,
        times=times,
        limit=whole.limit,
    )
    return Region(problem=problem, nodes=nodes, kept=tuple(kept))


def _edge(edge: Edge, a: int, b: int, rows: Ints, cols: Ints) -> Edge:
    used_rows, mine = np.unique(edge.rows[rows], return_inverse=True)
    used_cols, theirs = np.unique(edge.cols[cols], return_inverse=True)
    core = edge.core[used_rows[:, None], used_cols[None, :]]
    return compact_edge(Edge(a=a, b=b, core=core, rows=mine, cols=theirs))


def _memory(flat: Flat, chosen: Ints, nodes: Ints, kept: list[Ints]) -> tuple[Ints, Ints, tuple[Carrier, ...], Ints]:
    m = flat.bytes
    carriers: list[Carrier] = []
    spans: list[tuple[int, int, int]] = []
    columns: dict[tuple[tuple[int, int], ...], int] = {}
    rest = np.zeros(len(flat.base) + 1, dtype=np.int64)
    for i, v in enumerate(nodes.tolist()):
        for c in range(int(m.ms[v]), int(m.ms[v + 1])):
            usage = m.usage[m.uoff[c] : m.uoff[c] + flat.graph.k[v]]
            live = tuple(
                zip(
                    m.starts[m.ss[c] : m.ss[c + 1]].tolist(),
                    m.stops[m.ss[c] : m.ss[c + 1]].tolist(),
                    strict=True,
                )
            )
            own, least = usage[kept[i]], int(usage[kept[i]].min())
            freed = int(usage[chosen[v]]) - least
            for start, stop in live:
                rest[start] -= freed
                rest[stop] += freed
            if (own > least).any():
                if live not in columns:
                    columns[live] = len(columns)
                    spans += [(columns[live], start, stop) for start, stop in live]
                carriers.append(Carrier(node=i, usage=own - least, column=columns[live]))
    profile = flat.profile(chosen) + np.cumsum(rest)[:-1]
    table = np.array(spans, dtype=np.int64).reshape(-1, 3)
    cuts = np.unique(np.concatenate([table[:, 1], table[:, 2]])) if len(table) else np.zeros(0, dtype=np.int64)
    if len(cuts) < 2:
        return table[:0], np.zeros(0, dtype=np.int64), (), np.zeros(0, dtype=np.int64)
    inside = cuts[:-1]
    base = np.maximum.reduceat(profile[: cuts[-1]], inside)
    table = np.stack([table[:, 0], np.searchsorted(cuts, table[:, 1]), np.searchsorted(cuts, table[:, 2])], axis=1)
    return table, base, tuple(carriers), inside
