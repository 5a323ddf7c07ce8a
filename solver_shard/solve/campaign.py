"""Improving a large problem in epochs: several tasks at once, then what they found is put together.

An epoch has two tasks whose inputs and amounts of work are fixed before it begins: an improvement of the incumbent (neighbourhoods.py),
and an integer program on the kernel (integer_program.py) or another improvement with another seed. They run in processes of their own
where there is more than one worker; the results are the same. Where both improved the incumbent, the changes of one are tried on top of
the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from solver_shard.graph.choice_graph import Ints
from solver_shard.solve import limits
from solver_shard.solve.bounds.subgradient import Relaxation
from solver_shard.solve.integer_program import Proof
from solver_shard.solve.limits import Clock
from solver_shard.solve.primal.neighbourhoods import FIRST_NODES, Improved, Improver
from solver_shard.solve.problem import Problem

if TYPE_CHECKING:
    pass


FIRST_EPOCH_WORK, MOST_WORK, GROWTH = 1.0, 8.0, 1.5
"""Work of an improvement in the first and the later epochs."""

LEAST_SHARE = 0.25

LEAST_SECONDS, ALONE_SECONDS = 4.0, 20.0
"""Wall time of a task where nothing but time limits the whole: beside another one, and of an integer program alone."""

REST = 3
"""Epochs with an integer program alone, after one in which the improvement beside it gave nothing."""

Prover = Callable[[Clock], Proof]


class Campaign:
    """Epochs on one problem.

    Attributes:
        improver: around assignments of the problem; after ``reprice``.
        epoch: number of epochs so far.
        idle: epochs in a row that gave nothing.
    """

    def __init__(self, relaxation: Relaxation, *, seed: int, workers: int) -> None:
        self.relaxation, self.flat, self.seed, self.workers = relaxation, relaxation.flat, seed, workers
        self.improver: Improver | None = None
        self.epoch = self.idle = 0
        self.work, self.share, self.nodes = FIRST_EPOCH_WORK, 0.5, FIRST_NODES

    def reprice(self, prices: Mapping[int, float]) -> float:
        """Take over better multipliers (cost per byte by time label); the work."""
        spent = self.relaxation.work
        self.relaxation.reprice(prices)
        _, extra = self.relaxation.margins()
        self.improver = Improver(self.flat, self.relaxation.rows, self.relaxation.multipliers, extra)
        return self.relaxation.work - spent

    def run(self, incumbent: Ints, prover: Prover | None, patience: float, clock: Clock) -> tuple[list[Ints], Proof | None]:
        """One epoch: assignments worth a look, and what was proven; ``patience`` is the prover's."""
        problem: Problem = self.flat.problem
        left = clock.work_left() / 2
        work = min(left, self.work)
        seeds = [[self.seed, self.epoch, i] for i in range(2)]

        def improve(i: int) -> Improved:
            assert self.improver is not None
            own = clock.task(work=work, seconds=max(LEAST_SECONDS, 2 * work))
            return self.improver.run(incumbent, seed=seeds[i], share=self.share, nodes=self.nodes, clock=own)

        def proof() -> Proof:
            assert prover is not None
            seconds = ALONE_SECONDS if alone else max(LEAST_SECONDS, 2 * work)
            return prover(clock.task(work=left, seconds=patience * seconds))

        second = (lambda: improve(1)) if prover is None else proof
        alone = prover is not None and self.idle % (REST + 1) > 0
        tasks = [proof] if alone else [second, lambda: improve(0)]
        answers = limits.run(tasks, workers=self.workers, over=clock.over)
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
            self.work = min(MOST_WORK, self.work * GROWTH)
        return found, proofs[0] if proofs else None

    def _adapt(self, improved: list[Improved]) -> None:
        """The share of forest moves follows what they gained per work."""
        if not improved:
            return
        forest, regions = (sum(a.gains[i] for a in improved) / max(1e-9, sum(a.work[i] for a in improved)) for i in (0, 1))
        if forest + regions > 0:
            self.share = min(1 - LEAST_SHARE, max(LEAST_SHARE, 0.5 * self.share + 0.5 * forest / (forest + regions)))
        self.nodes = improved[-1].nodes
