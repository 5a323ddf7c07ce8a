"""The search on one presolved problem: bound, incumbent, fixing, integer programs and elimination, until the gap is closed.

    search = Search(problem, clock, parameters, report=report)
    search.run()
    search.best.assignment, search.best.value, search.best.bound

0. *weigh* (bounds/lagrangian.py), where a problem has windows: the best weights of their terms make it one that has none, whose bounds are
   bounds of it. What is found is judged with the windows, and programs have these.
1. *bound* (bounds/): every decoded assignment within the limit is an incumbent.
2. *fix*, whenever incumbent and bound have come closer. If that removes a good part of the strategies, the problem is presolved again and
   bounding starts over on the smaller one. Without memory that waits for the bound to settle.
3. *prove* (integer_program.py): integer programs on ever more of the strategies that may still matter.
4. *sharpen* (``Sharpening``), where a problem is narrow as those of traced models are and programs bring incumbent and bound no nearer:
   exact bounds by elimination, and multipliers that are best for these. They mostly leave a small part of the strategies.
5. *improve*: a large problem by large neighbourhood search beside the proof, a small one by annealing before and after each program; where
   the gap is wide, annealing goes on beside all of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from solver_shard.graph.choice_graph import Bools, Ints
from solver_shard.solve import parameters as tuned
from solver_shard.solve.bounds.bounding import Bounding, SmallBounding, is_large
from solver_shard.solve.bounds.elimination import EXACT, CuttingPlanes, TooWide, between, eliminate
from solver_shard.solve.bounds.lagrangian import WindowDual
from solver_shard.solve.bounds.trws import Parts, scale_of
from solver_shard.solve.integer_program import MinMarginals, Proof, enumerate_whole, prove, prove_quickly
from solver_shard.solve.limits import Clock
from solver_shard.solve.parameters import SolveParameters
from solver_shard.solve.presolve import presolve
from solver_shard.solve.presolve.reducer import NoAssignment
from solver_shard.solve.problem import Floats, Problem

if TYPE_CHECKING:
    from solver_shard.solve.primal.annealing import Annealing
    from solver_shard.solve.primal.lns import LargeNeighbourhoodSearch

Report = Callable[[Ints | None, int | None, str], None]
"""Called with a better assignment of the search's problem, or a better bound, and what found it."""

Restore = Callable[[Ints], Ints]


@dataclass
class Best:
    """What is known about a problem: the best assignment and its value, and a lower bound on every solution."""

    assignment: Ints | None = None
    value: int | None = None
    bound: int = -1

    def gap(self) -> float:
        if self.value is None:
            return float("inf")
        return max(0, self.value - self.bound) / max(1, abs(self.value))


@dataclass
class _Ladder:
    """Which integer program comes next: larger ones as long as they are solved to the end, then the same with more effort.

    Attributes:
        cells: pairs before presolve.
        patience: times the usual effort.
        ended: nothing larger may help.
        complete: one that held every strategy that may still matter was solved to the end: nothing at all may help.
        pause: epochs to go without one, because the last one was of no use.
    """

    cells: int = tuned.FIRST_CELLS
    patience: float = 1.0
    ended: bool = False
    complete: bool = False
    pause: int = 0

    @property
    def first(self) -> bool:
        """Whether none was tried so far: one that holds everything is done before an improvement would be."""
        return self.cells == tuned.FIRST_CELLS and self.patience == 1.0 and not self.ended

    @property
    def due(self) -> bool:
        return not self.ended and self.pause == 0

    def climb(self, proof: Proof | None, *, useful: bool) -> None:
        """After a program, or an epoch without one."""
        if proof is None:
            self.pause = max(0, self.pause - 1)
            return
        self.complete = proof.whole and proof.proven
        self.ended = proof.large or self.complete or (not proof.proven and self.patience >= tuned.KERNEL_PATIENCE)
        if proof.proven:
            self.cells = tuned.KERNEL_GROWTH * proof.cells
        else:
            self.patience = min(tuned.KERNEL_PATIENCE, 3 * self.patience)
        self.pause = 0 if useful or proof.proven else tuned.KERNEL_PAUSE


class Search:
    """A search on a presolved problem.

    Attributes:
        best: what is known; the value of an incumbent from elsewhere may be put in before ``run``.
        infeasible: proven that no assignment keeps the limit.
        enough: a value at which to stop.
        stop: a further reason to stop.
        rescue: called once when bounding finds no assignment within the limit: looks for one in other ways, and says whether it is proven
            that there is none.
        relax: called once with the search, where it has an incumbent and gets on no more: looks for a better bound in other ways.
        multipliers: cost per byte by time label, for the next problem.
        weights: of the terms of windows, for the next problem; ``dual``: where they are from.
        lns: large neighbourhood search on the search's problem, where it is large.
        annealing: of the search's problem, where its programs are not tiny or its gap is wide; ``annealed``: its work.
        fine: whether a little more work goes into a smaller gap than the one asked for.
        patient: problems shrink only when their bound is done. At first they shrink as soon as they can, which is fast and sometimes
            ends where little can be proven; then the search begins anew, patiently, with the incumbent it has.
    """

    def __init__(self, problem: Problem, clock: Clock, parameters: SolveParameters, *, report: Report, least_peak: int = 0) -> None:
        self.problem, self.clock, self.parameters, self.report = problem, clock, parameters, report
        self.least_peak = least_peak
        self.best = Best()
        self.infeasible = False
        self.enough: int | None = None
        self.stop: Callable[[], bool] | None = None
        self.rescue: Callable[[], bool] | None = None
        self.relax: Callable[[Search], None] | None = None
        self.multipliers: dict[int, float] = {}
        self.lns: LargeNeighbourhoodSearch | None = None
        self.annealing: Annealing | None = None
        self.annealed = 0.0
        self.fine = False
        self.until: float | None = None
        self.patient = False
        self.wide = np.inf
        self.level = -np.inf
        self.rng = np.random.default_rng(parameters.seed)
        self.weights: Ints | None = None
        self.dual: WindowDual | None = None

    def closed(self) -> bool:
        return self._enough() or self.infeasible or (self.best.value is not None and self.best.gap() <= self.parameters.gap)

    def done(self) -> bool:
        """Whether it is closed, and nothing more is worth trying."""
        if not self.closed():
            return False
        if not self.fine or self.infeasible or self._enough() or self.best.gap() <= tuned.FINE_GAP * self.parameters.gap:
            return True
        if self.until is None:
            self.until = (1 + tuned.FINE_SHARE) * self.clock.work + tuned.FINE_WORK
        return self.clock.work >= self.until

    def _enough(self) -> bool:
        return self.enough is not None and self.best.value is not None and self.best.value <= self.enough

    def stopped(self) -> bool:
        return self.done() or self.clock.over() or (self.stop is not None and self.stop())

    def offer(self, assignment: Ints, source: str) -> bool:
        """Take an assignment as incumbent if it is within the limit and better."""
        value = self.problem.value(assignment)
        if value is None or (self.best.value is not None and value >= self.best.value):
            return False
        self.best.assignment, self.best.value = assignment, value
        self.report(assignment, None, source)
        return True

    def raise_bound(self, bound: int, source: str) -> None:
        if self.best.value is not None:
            bound = min(bound, self.best.value)
        if bound > self.best.bound:
            self.best.bound = bound
            self.report(None, bound, source)

    def run(self) -> None:
        """Search until the gap is closed, nothing more can be done, or the clock says stop."""
        self.raise_bound(self.problem.constant, "presolve")
        current: Problem = self.problem
        restore: Restore = _same
        while True:
            if current.limit is not None and current.least() > current.limit:
                self._exhausted("presolve")
                return
            if current.size == 0:
                self._nothing_left(current, restore)
                return
            smaller = self._round(current, restore)
            if smaller is None:
                return
            current, restore = smaller

    def _nothing_left(self, current: Problem, restore: Restore) -> None:
        nothing = np.zeros(0, dtype=np.int64)
        value = current.value(nothing)
        if value is not None:
            self.offer(restore(nothing), "presolve")
            self.raise_bound(value, "presolve")
        self._exhausted("presolve")

    def _exhausted(self, source: str) -> None:
        """No better solution exists than the incumbent."""
        if self.best.value is None:
            self.infeasible = True
        else:
            self.raise_bound(self.best.value, source)

    def _round(self, current: Problem, restore: Restore) -> tuple[Problem, Restore] | None:
        """Bound, fix, prove and improve; a smaller problem to go on with, or None at the end."""
        most = current.most()

        def found(bound: int, assignment: Ints | None, source: str) -> None:
            if bound > most:
                self._exhausted(source)
            self.raise_bound(bound, source)
            if assignment is not None:
                self.offer(restore(assignment), source)

        bounding = self._bounding(current if current.loads is None else self._weighed(current, restore), found)
        fixed_at = np.inf
        for _ in bounding.steps():
            if self.stopped():
                return None
            if self._far:
                self._anneal(current)
            if self.patient or not len(current.base):  # messages alone nearly always solve what has no memory: let them settle
                continue
            room = self._room(bounding)
            if room < min(0.5 * fixed_at, 0.05 * abs(bounding.level())) and current.offsets[-1] > tuned.WORTH_FIXING:
                fixed_at = room
                keep = self._fixing(bounding.margins())
                if keep is not None:
                    self.multipliers, self.level = bounding.prices(), bounding.level()
                    return self._smaller(current, restore, keep)
        if self.best.value is None and self.rescue is not None:
            rescue, self.rescue = self.rescue, None
            self.infeasible = rescue()
        if self.stopped():
            return None
        return self._close(current, restore, bounding)

    def _weighed(self, current: Problem, restore: Restore) -> Problem:
        """The problem priced by the best weights of its windows' terms that are found; what that proves and finds on the way is taken."""
        dual = WindowDual(current, self.weights, self.multipliers)
        started = self.clock.work
        while not (dual.finished or self.stopped()) and self.clock.work - started < tuned.WEIGHTS_WORK:
            bound, found = self._optimum(dual.relaxed()[0])
            for assignment in found:
                self.offer(restore(assignment), "weights")
            self.raise_bound(bound, "weights")
            dual.take(bound, found, self.best.value)
        self.weights, self.multipliers, self.dual = dual.weights, dual.prices, dual
        return current.priced(dual.weights)

    def _whole(self, dual: WindowDual, margins: MinMarginals, restore: Restore) -> None:
        """Keep ever more windows whole, as long as labels can enumerate what is left below the incumbent."""
        while self.best.value is not None and not self.stopped() and dual.keep_whole():
            while not (dual.finished or self.stopped()):
                value = self.best.value
                relaxed, weights = dual.relaxed()
                answer = enumerate_whole(relaxed, margins, value=value, weights=weights, work=tuned.WHOLE_WORK, clock=self.clock)
                if answer is None:
                    return
                bound, assignment = answer
                self.raise_bound(bound, "whole windows")
                if assignment is None:
                    return
                self.offer(restore(assignment), "whole windows")
                dual.take(bound, [assignment], self.best.value)

    def _optimum(self, relaxed: Problem) -> tuple[int, list[Ints]]:
        """A bound of a problem without windows, mostly its optimum, and assignments that were found, the best one last."""
        self.clock.spend(1e-3 * relaxed.size)
        try:
            small, postsolve = presolve(relaxed, stop=self.clock.over)
        except NoAssignment:
            self.infeasible = self.best.value is None
            return (self.best.bound if self.best.value is None else self.best.value), []
        found: list[Ints] = []
        bound = -(2**62)

        def report(assignment: Ints | None, proven: int | None, source: str) -> None:
            nonlocal bound
            if assignment is not None:
                found.append(postsolve.restore(assignment))
            bound = bound if proven is None else proven

        gap = max(self.parameters.gap / 4, min(tuned.WEIGHTS_GAP, tuned.WEIGHTS_GAP_SHARE * self.best.gap()))
        inner = Search(small, self.clock, replace(self.parameters, gap=gap), report=report)
        inner.stop = lambda: self.stop is not None and self.stop()
        inner.run()
        return bound, found

    def _bounding(self, current: Problem, found: Callable[[int, Ints | None, str], None]) -> Bounding:
        def value() -> int | None:
            return self.best.value

        if is_large(current):  # compiled loops, so imported only here: numba takes longer to import than a small problem to solve
            from solver_shard.solve.bounds.subgradient import LargeBounding
            from solver_shard.solve.primal.lns import LargeNeighbourhoodSearch

            large = LargeBounding(
                current,
                self.clock,
                found=found,
                value=value,
                prices=self.multipliers,
                known=self.best.bound,
                reached=self.level,
                rng=self.rng,
            )
            if current is self.problem and self.lns is None:
                self.lns = LargeNeighbourhoodSearch(large.relaxation, self.parameters)
            return large
        return SmallBounding(
            current,
            self.clock,
            gap=self.parameters.gap,
            found=found,
            value=value,
            prices=self.multipliers,
            least_peak=self.least_peak,
            rng=self.rng,
        )

    def _room(self, bounding: Bounding) -> float:
        """Distance of the incumbent to the bound; infinite without one."""
        return np.inf if self.best.value is None else self.best.value - bounding.level()

    def _close(self, current: Problem, restore: Restore, bounding: Bounding) -> tuple[Problem, Restore] | None:
        """Prove and improve until the gap is closed or nothing helps; a smaller problem if that has become possible."""
        margins = bounding.margins()
        self.multipliers, self.level = bounding.prices(), bounding.level()
        if self.lns is not None:
            self.clock.spend(self.lns.reprice(self.multipliers))
        if self.dual is not None and not current.weight:
            self._whole(self.dual, margins, restore)
        ladder, tried = _Ladder(), None
        sharpening, sharpened, settled = self._sharpening(bounding, margins), np.inf, False
        while not self.stopped():
            if self.relax is not None and self.best.value is not None and (settled or self.clock.used() > tuned.RELAX_AFTER):
                relax, self.relax = self.relax, None
                relax(self)
                continue
            if self.lns is None or self._far:
                self._anneal(current)
            if settled and sharpening is not None and self.best.value is not None:
                before = self._gap(margins)
                if before < tuned.SHARPEN_NEARER * sharpened:
                    sharpening.again()
                if not sharpening.finished:
                    margins, tried = self._sharpen(sharpening, current, restore), None
                    sharpened = min(before, self._gap(margins))
                    ladder = _Ladder() if self._gap(margins) < tuned.SHARPEN_STEADY * before else ladder
            if self.best.value is not None and self.best.value != tried:
                tried = self.best.value
                keep = self._fixing(margins)
                if keep is not None:
                    return self._smaller(current, restore, keep)
            if self.stopped():
                break
            known = self.best.bound, self.best.value
            proof = self._epoch(current, margins, ladder, quickly=sharpening is not None and not sharpening.wide)
            if proof is not None:
                self._take(proof, restore)
            ladder.climb(proof, useful=known != (self.best.bound, self.best.value))
            settled = known[1] is not None and self._gap(margins) > tuned.SHARPEN_STEADY * (known[1] - margins.base)
            if ladder.complete:
                return None
            if ladder.ended and sharpening is not None and not sharpening.finished and self.best.value is not None:
                settled = settled or self.lns is None
                continue
            if ladder.ended and self.lns is not None and not self.patient:
                self.patient = True
                self.multipliers, self.level = {}, -np.inf
                return self.problem, _same
            improving = self.lns or self.annealing
            if ladder.ended and (improving is None or self.best.assignment is None or improving.idle > tuned.IDLE_EPOCHS):
                break
        return None

    def _anneal(self, current: Problem) -> None:
        """Improve the incumbent by annealing: where no integer program solves the problem at once, or far from its bound."""
        if self.best.assignment is None or self.problem.loads is not None:
            return
        if self.annealing is None:
            if int(current.offsets[-1]) <= tuned.TINY_VALUES and current.pairs <= tuned.TINY_CELLS:
                return
            from solver_shard.solve.flat import Flat
            from solver_shard.solve.primal.annealing import Annealing

            flat = self.lns.flat if self.lns is not None else Flat.of(self.problem, scale_of(self.problem))
            self.annealing = Annealing(flat, self.rng, work=tuned.ANNEALING_FIRST_WORK)
        before = self.clock.work
        price = sum(self.multipliers.values()) * self.annealing.flat.scale
        self.offer(self.annealing.epoch(self.best.assignment, price=price, clock=self.clock), "annealing")
        self.annealed += self.clock.work - before

    @property
    def _far(self) -> bool:
        """Whether annealing is worth a part of the work beside other ways to improve: the incumbent is far from the bound."""
        work = tuned.ANNEALING_FIRST_WORK if self.annealing is None else self.annealing.work
        return (
            self.best.assignment is not None
            and self.best.gap() > tuned.ANNEALING_FAR
            and self.annealed + work < tuned.ANNEALING_SHARE * self.clock.work
        )

    def _gap(self, margins: MinMarginals) -> float:
        """Distance of the incumbent to the bound of the margins."""
        return np.inf if self.best.value is None else self.best.value - margins.base

    def _epoch(self, current: Problem, margins: MinMarginals, ladder: _Ladder, *, quickly: bool) -> Proof | None:
        """An integer program where the ladder has one, and improvements beside it."""

        def prover(clock: Clock) -> Proof:
            def one(cells: int) -> Proof:
                return prove(
                    current,
                    margins,
                    value=self.best.value,
                    multipliers=self.multipliers,
                    least_peak=self.least_peak,
                    cells=cells,
                    patience=ladder.patience,
                    parameters=self.parameters,
                    clock=clock,
                    weights=self.weights,
                )

            return prove_quickly(one, ladder.cells) if quickly else one(ladder.cells)

        if self.lns is None or self.best.assignment is None or (ladder.first and current.pairs <= tuned.FIRST_CELLS):
            return None if ladder.ended else prover(self.clock)
        found, proof = self.lns.run(self.best.assignment, prover if ladder.due else None, ladder.patience, self.clock)
        for assignment in found:
            self.offer(assignment, "improvement")
        return proof

    def _take(self, proof: Proof, restore: Restore) -> None:
        """Use what a kernel gave."""
        if proof.large and not proof.bound:
            return
        if proof.assignment is not None:
            self.offer(restore(proof.assignment), "kernel")
        if proof.bound is None:
            self._exhausted("kernel")
        else:
            self.raise_bound(proof.bound, "kernel")

    def _fixing(self, margins: MinMarginals) -> list[Bools] | None:
        """Which strategies may still occur in a better solution; None where that removes little."""
        if self.best.value is None:
            return None
        keep = self._kept(margins)
        if not all(mask.any() for mask in keep):
            self._exhausted("fixing")
            return None
        return keep if _share(keep) < tuned.FIXING_SHRINK else None

    def _kept(self, margins: MinMarginals) -> list[Bools]:
        """The strategies that are below the incumbent."""
        assert self.best.value is not None
        room = margins.room(self.best.value)
        return [row < room for row in margins.extra]

    def _sharpening(self, bounding: Bounding, margins: MinMarginals) -> Sharpening | None:
        """Exact margins of a problem that is worth shrinking and not known to be too wide for them."""
        current = bounding.problem
        count = int(current.offsets[-1])
        return (
            Sharpening(current, bounding, margins, self.clock) if tuned.WORTH_FIXING < count < tuned.SHARPEN_NARROWER * self.wide else None
        )

    def _sharpen(self, sharpening: Sharpening, current: Problem, restore: Restore) -> MinMarginals:
        """Some steps; the margins after them."""
        started = self.clock.work
        while self.best.value is not None and not sharpening.finished and not self.stopped():
            sharpening.step(self.best.value, self.parameters.gap / 4 * abs(self.best.value))
            for assignment in sharpening.found:
                self.offer(restore(assignment), "elimination")
            sharpening.found.clear()
            self.raise_bound(current.whole(sharpening.margins.base), "elimination")
            if _share(self._kept(sharpening.margins)) < tuned.SHARPEN_HALF or self.clock.work - started > tuned.SHARPEN_WORK:
                break
        if sharpening.wide:
            self.wide = float(current.offsets[-1])
        self.multipliers = sharpening.prices
        return sharpening.margins

    def _smaller(self, current: Problem, restore: Restore, keep: list[Bools]) -> tuple[Problem, Restore] | None:
        try:
            smaller, postsolve = presolve(current, keep)
        except NoAssignment:
            self._exhausted("fixing")
            return None
        self.clock.spend(1e-3 * current.size)
        return smaller, lambda x: restore(postsolve.restore(x))


def _same(assignment: Ints) -> Ints:
    return assignment


def _share(keep: list[Bools]) -> float:
    """Part of the strategies that are kept."""
    return sum(int(mask.sum()) for mask in keep) / max(1, sum(map(len, keep)))


class Sharpening:
    """Exact bounds of one problem by elimination, step by step, and the multipliers that are best for them.

        sharpening = Sharpening(problem, bounding, margins, clock)
        while not sharpening.finished:
            sharpening.step(incumbent, small)

    For multipliers of the memory rows, elimination finds the least priced cost exactly, and an assignment that has it: a cutting plane.
    Message passing needs more steps for good multipliers, and its bound may end far below.

    Attributes:
        margins: the largest bounds that any multipliers gave; none of those given at the start is lost.
        prices: the best multipliers, cost per byte by time label.
        found: assignments of least priced cost, which may be above the limit, since this was last emptied.
        finished: no further step is worth its work, unless the incumbent comes much nearer.
        wide: the problem is too wide for any.
    """

    def __init__(self, problem: Problem, bounding: Bounding, margins: MinMarginals, clock: Clock) -> None:
        """``bounding``: of the problem, with good multipliers; ``clock``: work is added to it."""
        self.problem, self.bounding, self.margins, self.clock = problem, bounding, margins, clock
        self.prices = self.next = bounding.prices()
        self.best = -np.inf
        self.found: list[Ints] = []
        self.steps = 0
        self.planes = CuttingPlanes(problem)
        self.order = bounding.order
        self.finished = self.wide = self.order is None

    def again(self) -> None:
        """The incumbent came much nearer: the best multipliers are worth another look."""
        self.finished, self.next = self.wide, self.prices

    def step(self, value: int, small: float) -> None:
        """One elimination.

        Args:
            value: objective of an incumbent; only what costs less is looked for.
            small: distance of the bound to it that is near enough.
        """
        bound, assignment = self._eliminate(self.bounding.split(self.next), value)
        self.wide = self.steps == 0 and bound == -np.inf
        self.steps += 1
        if bound > self.best:
            self.best, self.prices = bound, self.next
        if assignment is not None:
            self.found.append(assignment)
            self.planes.add(assignment, self.next)
        room = value - self.margins.base
        single = self.problem.weight or self.problem.limit is None
        self.finished = bool(single) or bound == -np.inf or self.steps >= tuned.SHARPEN_STEPS or room <= small
        if self.finished:
            return
        answer = self.planes.best(value, near=self.prices, reach=tuned.SHARPEN_REACH)
        if answer is None or answer[0] - self.best <= tuned.SHARPEN_SMALL * room:
            self.finished = True
            return
        self.next = answer[1] if self.steps <= tuned.SHARPEN_WHOLE_STEPS and assignment is not None else between(self.prices, answer[1])

    def _eliminate(self, parts: Parts, value: int) -> tuple[float, Ints | None]:
        """(The bound, -inf where there is none, and an assignment of least priced cost, if there is one below the value)."""
        scale = self.bounding.scale
        most = EXACT - abs(parts.constant)
        if (
            self.order is None or most <= 0 or not all((row >= 0).all() for row in (*parts.unary, *parts.tables))
        ):  # sums were not exact: that says nothing
            return -np.inf, None
        room = min(_whole(value, scale) - parts.constant, most)
        if room <= 0:
            self._take(parts.constant / scale, None)
            return parts.constant / scale, None
        try:
            exact = eliminate(self.problem, parts, room, self.order, over=self.clock.over)
        except TooWide as wide:
            self.clock.spend(wide.work)
            self._take((parts.constant + wide.least) / scale, None)
            return -np.inf, None
        self.clock.spend(exact.work)
        bound = (parts.constant + exact.least) / scale
        self._take(bound, [(parts.constant + row) / scale for row in exact.extra])
        return bound, exact.assignment

    def _take(self, bound: float, lows: Sequence[Floats] | None) -> None:
        """Bounds, of all assignments and of those with each strategy, that are better than what is known."""
        base = max(self.margins.base, bound)
        known = [self.margins.base + row for row in self.margins.extra]
        best = known if lows is None else [np.maximum(old, new) for old, new in zip(known, lows, strict=True)]
        self.margins = MinMarginals(base, [np.maximum(row - base, 0.0) for row in best])


def _whole(value: int, scale: float) -> int:
    """A value times a power of two, rounded up: what reaches it costs at least the value."""
    shift = -round(math.log2(scale))
    return -(-value >> shift) if shift > 0 else value << -shift
