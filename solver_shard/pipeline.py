"""From a traced program to a plan: lower it, narrow it to a baseline's decisions where one is given, solve it, write the plan down.

**Graphs.** A graph whose plans the memory limit does not touch needs relays only where they save time; one with relays everywhere is
larger. So there may be two (``graph.build.relay_spaces``), and the second is only searched where the first has not enough (``is_enough``).

**Stages.** Tied, copies of a repeated layer share their decisions. Every tied assignment is a free one of the same cost and the same bytes.
So the free problem is not searched from nothing: a share of the limits goes to the tied problem, whose best plan is then the incumbent that
the free search starts from. What comes out is never worse than it. Bounds do not carry over, for the free problem may go lower: those of
the first stage are of tied plans only.

**Starts.** A search of a very large graph with a memory limit may take long to a first plan within it. So it starts from a template's: the
ones that cut most are tried first, until one is within the limit (:mod:`solver_shard.baselines.candidates`); where none is of the graph
as it stands, they are tried again with the transitions around their dead ends. The caller has that plan before the search begins. The
second graph begins with the one that was within the limit in the first.

**Ends.** Of the plans that cost as much as the one that was found, one is returned whose layers are alike (:mod:`solver_shard.graph.tidy`).
Where nothing was proven, the cheapest baseline is held against it (:mod:`solver_shard.baselines.hints`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from solver_shard.baselines.candidates import Candidate, candidates
from solver_shard.clock import StageClock
from solver_shard.costs.model import CostModel
from solver_shard.errors import InputError
from solver_shard.graph.choice_graph import WarmStart
from solver_shard.graph.nodes import Lowering
from solver_shard.graph.symmetry import fold, node_classes
from solver_shard.graph.templates import restrictions, warm_starts
from solver_shard.graph.tidy import tidy
from solver_shard.graph.transient_memory import Transients
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.program import Program
from solver_shard.solve.engine import solve_in_rounds
from solver_shard.solve.limits import Saver
from solver_shard.solve.parameters import SolveParameters
from solver_shard.solve.solution import Event, Solution, Status, objective_value, relative_gap

if TYPE_CHECKING:
    from solver_shard.baselines import Baseline
    from solver_shard.costs.cluster import Cluster
    from solver_shard.graph.build import Lowered
    from solver_shard.plan.decode import PlanWriter
    from solver_shard.plan.plan import Plan
    from solver_shard.tracing.clean import TracedProgram

TIED_SHARE = 0.25
"""Of the limits on time and work: what the tied stage of a free search may take."""

TIED_GAP = 1e-3
"""Relative gap at which it ends, where a smaller one is asked for: the free stage goes on from there."""

LOOSE = 0.01
"""Relative gap of that plan among those of its template."""

LEAST_SHARE = 0.1
"""Of the time: what a stage gets at least, whatever was spent before it."""

MANY, TRIED = 150_000, 12
"""Strategies of a graph from which on a plan of a template is looked for first, and how many templates are tried."""

SPLIT_PAIRS = 2e6
"""Pairs of strategies per second of the time limit, from which on a split that nobody asked for is undone. In 60 CPU s a diffusion UNet of
3,224 ops with 326 million pairs came to no plan but its start, and needed 6.6 GiB; without the split, 12 million, it was within 0.2%, in
0.9 GiB. Qwen3-30B-A3B has 55 million and is solved in 14 s."""

FIRST_INCUMBENT = 2.0
"""Seconds of solving after which a caller is first given the best plan so far."""

INCUMBENTS = 10.0
"""Seconds between two such plans, at least."""

Watch = Callable[[Solution, Transients], None]
"""Called with the best solution so far, and the tied or free problem that its bound is of."""


def plan_program(
    program: Program,
    *,
    mesh: Mesh,
    cluster: Cluster,
    options: Options,
    source: str = "",
    command: str | None = None,
    clock: StageClock | None = None,
    baseline: Baseline | None = None,
    relays: bool = False,
    workers: int = 2,
    stop: Callable[[], bool] | None = None,
    incumbent: Callable[[Plan], None] | None = None,
    traced: TracedProgram | None = None,
) -> Plan:
    """The plan of a traced program on a mesh under these options.

    Args:
        source, command: for ``Plan.provenance``.
        baseline: leaves of the choice graph only what it decides, and says what ``Options.propagation`` records.
        relays: whether what it decides may use relays.
        workers, stop, incumbent: those of :func:`optimize`.
        traced: the trace that the program was cleaned from; without it there is no hint of what DTensor would do.

    Raises:
        InputError: pins or template that this program does not have.
        InfeasibleError: no plan keeps them within the memory limit.
        SolverShardError: none was found in the time given.
    """
    from solver_shard.baselines.hints import fall_back_to_baseline
    from solver_shard.graph.build import lower_program, relay_spaces
    from solver_shard.infeasible import Unsolved, infeasible
    from solver_shard.plan.decode import PlanWriter, certificate, provenance

    clock = clock or StageClock()
    search = _Search(options.work_limit, clock, workers, stop)
    spaces = ("none",) if baseline is not None and not relays else relay_spaces(options, mesh)
    attempt: _Attempt | None = None
    for space in spaces:
        lowered = lower_program(program, mesh=mesh, cluster=cluster, options=options, clock=clock, relays=space)
        if baseline is None and attempt is None and lowered.mesh != mesh and (whole := _undone(lowered, clock)) is not None:
            lowered, options = whole, whole.options
        if baseline is not None:
            with clock.stage("decide", f"deciding {len(lowered.program.ops)} ops as a baseline does"):
                lowered = lowered.narrowed(*baseline(lowered))
        writer = PlanWriter(
            lowering=lowered.lowering,
            costs=lowered.costs,
            cluster=cluster,
            options=lowered.options,
            origin=provenance(source, command or f"solver_shard.optimize({program.name!r}, mesh={str(lowered.mesh)!r}, ...)"),
            relayed=space,
        )
        spent = clock.seconds.get("solve", 0.0)
        with clock.stage("solve", f"solving {lowered.lowering.graph.size} choices"):
            clock.bound_solver(max(options.time_limit - spent, LEAST_SHARE * options.time_limit))
            watch = None if incumbent is None else lambda found, problem, w=writer: incumbent(w.plan(found, problem, clock))
            solution, problem = search.run(lowered.lowering, lowered.costs, lowered.options, watch=watch, limited=space == spaces[-1])
        latest = _Attempt(lowered=lowered, writer=writer, problem=problem, solution=solution)
        attempt = latest if attempt is None else attempt.then(latest, spent)
        if is_enough(attempt.solution) or (attempt.solution.feasible and clock.left() < 2 * clock.seconds["lower"]):
            break
    assert attempt is not None, "there is at least one graph"
    lowered, writer, problem, solution = attempt.lowered, attempt.writer, attempt.problem, attempt.solution
    name = None
    if baseline is None and not options.template and not solution.interrupted:
        solution, name = fall_back_to_baseline(lowered, solution, problem, traced, clock)
    if not solution.feasible:
        memory = None if solution.assignment is None else writer.build_plan(solution.assignment).memory
        raise infeasible(Unsolved(lowered=lowered, problem=problem, solution=solution, memory=memory, clock=clock, stop=stop))
    with clock.stage("plan", "writing down the plan"):
        plan = writer.plan(solution, problem, clock)
    return dataclasses.replace(plan, certificate=certificate(solution, problem, clock, name))


def _undone(lowered: Lowered, clock: StageClock) -> Lowered | None:
    """The graph of a mesh whose axis was split by itself, without the split; None where it was not, or where the limits are enough for it.

    Its options say that nothing is split, so that who asks for its plan's graph gets it. Pins on a part of the axis keep the split.
    """
    from solver_shard.graph.build import lower_program

    options, mesh = lowered.options, lowered.mesh.whole
    if options.split != "auto" or options.template or options.propagation or mesh == lowered.mesh:
        return None
    pairs, most = _pairs(lowered.lowering), int(SPLIT_PAIRS * options.time_limit)
    if pairs <= most:
        return None
    clock.say(
        f"the axis that asks for a split stays whole: as {lowered.mesh} there would be {pairs / 1e6:,.0f} million pairs of strategies, "
        f"and {options.time_limit:g} s are enough for {most / 1e6:,.0f} million; give more --time-limit, or ask for it with --split"
    )
    try:
        return lower_program(
            lowered.given,
            mesh=mesh,
            cluster=lowered.costs.cluster,
            options=dataclasses.replace(options, split="off"),
            clock=clock,
            relays=lowered.relays,
        )
    except InputError:
        return None


def _pairs(lowering: Lowering) -> int:
    """Pairs of strategies over all edges of the tied graph: what presolve and bounds go through."""
    graph = fold(lowering.graph, node_classes(lowering)).graph
    ends = graph.sizes()[graph.edges]
    return int(ends.prod(axis=1).sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Attempt:
    """What the search of one graph gave."""

    lowered: Lowered
    writer: PlanWriter
    problem: Transients
    solution: Solution

    def then(self, second: _Attempt, seconds: float) -> _Attempt:
        """The better of two, with the course of both; ``seconds``: from the start of the first to that of the second."""
        solution = _after(self.solution, second.solution, seconds)
        if self.solution.feasible and (not solution.feasible or (solution.objective or 0) > (self.solution.objective or 0)):
            # the larger graph had too little time
            kept = dataclasses.replace(self.solution, history=solution.history, stages=solution.stages, work=solution.work)
            return dataclasses.replace(self, solution=kept)
        return dataclasses.replace(second, solution=solution)


def _after(first: Solution, second: Solution, seconds: float) -> Solution:
    """The second search's solution with the course of both."""
    later = tuple(dataclasses.replace(event, seconds=event.seconds + seconds, work=event.work + first.work) for event in second.history)
    return dataclasses.replace(second, history=first.history + later, stages=first.stages + second.stages, work=first.work + second.work)


def solve_lowered(
    lowering: Lowering,
    costs: CostModel,
    options: Options,
    clock: StageClock,
    *,
    workers: int = 2,
    stop: Callable[[], bool] | None = None,
) -> tuple[Solution, Transients]:
    """A solution of the lowered graph, and the problem that its bound is of: tied if ``options.tied`` and something repeats, or free.

    A free search that is stopped in its tied stage ends with what that has.
    """
    return _Search(options.work_limit, clock, workers, stop).run(lowering, costs, options)


def is_enough(found: Solution) -> bool:
    """Whether a search that left the memory limit aside needs no other after it: its plan keeps the limit and is proven, or time is over.

    Where tensors of a single group of readers have no relays, which never save time, the bound is then of the graph with them, too.
    """
    return found.status in (Status.OPTIMAL, Status.GAP) or found.interrupted or (found.feasible and found.ended == "limit")


class _Search:
    """Searches of one program's graphs, one after the other, which share limits; each in stages."""

    def __init__(self, work_limit: float | None, clock: StageClock, workers: int, stop: Callable[[], bool] | None) -> None:
        self.work_limit, self.clock, self.workers, self.stop = work_limit, clock, workers, stop
        self.template: str | None = None  # whose plan the last search started from
        self.handed: int | None = None  # objective of the best plan that the caller was given

    def run(
        self, lowering: Lowering, costs: CostModel, options: Options, *, watch: Watch | None = None, limited: bool = True
    ) -> tuple[Solution, Transients]:
        """``solve_lowered`` with what earlier searches have left of the work limit.

        ``limited``: False where only a plan that the memory limit does not touch is of use; see ``is_enough``.
        """
        self.lowering, self.mesh, self.options, self.limited = lowering, costs.mesh, options, limited
        self.watch = None if watch is None else functools.partial(self.hand_better, watch)
        self.started, self.work = time.perf_counter(), 0.0
        self.saver: Saver[Solution] | None = None
        solution, problem = self._stages(costs)
        if self.work_limit is not None:
            self.work_limit = max(self.work_limit - solution.work, LEAST_SHARE * self.work_limit)
        return solution, problem

    def _stages(self, costs: CostModel) -> tuple[Solution, Transients]:
        options = self.options
        tied = Transients(self.lowering, costs, node_classes(self.lowering))
        starts = (*self.first(tied), *self.templates(tied))
        if options.tied or tied.folded is None:
            return self.tidied(self.stage(tied, starts), tied), tied
        first = self.stage(tied, starts, name="tied", share=TIED_SHARE, gap=max(options.gap, TIED_GAP))
        if (first.interrupted and first.status is not Status.INFEASIBLE) or not (self.limited or is_enough(first)):
            return first, tied
        free = Transients(self.lowering, costs)
        if tied.added:
            free.add(tied.added)  # they mattered there, and would be found missing here
        starts = self.templates(free)
        if first.feasible and first.assignment is not None:
            starts = (free.complete(first.assignment, "the tied plan"),)
        second = self.stage(free, starts, name="free")
        return self.tidied(_joined(first, second), free), free

    def templates(self, problem: Transients) -> tuple[WarmStart, ...]:
        return warm_starts(self.lowering, problem.folded, self.mesh)

    def first(self, problem: Transients) -> tuple[WarmStart, ...]:
        """A plan within the memory limit of a graph so large that the search may take long to one; none where no template has one."""
        options, graph = self.options, problem.graph
        if graph.limit is None or graph.offsets[-1] < MANY or options.template or options.propagation:
            return ()
        made = restrictions(self.lowering.program, self.mesh, accumulates=options.microbatches > 1)
        for ease in (False, True):
            plans = candidates(
                problem,
                made,
                objective=options.objective,
                memory_weight=options.memory_weight,
                gap=LOOSE,
                seed=options.seed,
                order=lambda name: (name != self.template, _smallest_first(name)),
                ease=ease,
            )
            for name, plan in itertools.islice(plans, TRIED):
                if plan is not None:
                    self.template = name
                    self.hand_on(plan, problem)
                    return (problem.complete(plan.assignment, f"of template {name}{', eased' if ease else ''}"),)
                if time.perf_counter() - self.started > LEAST_SHARE * self.clock.solver_seconds and self.work_limit is None:
                    return ()
        return ()

    def hand_better(self, watch: Watch, found: Solution, problem: Transients) -> None:
        """Give the caller a plan that is better than what he was given."""
        if found.objective is not None and (self.handed is None or found.objective < self.handed):
            self.handed = found.objective
            watch(found, problem)

    def hand_on(self, plan: Candidate, problem: Transients) -> None:
        """Give the caller a plan that stands before the search of its graph begins, in which nothing is proven yet."""
        if self.watch is not None:
            first = Solution(
                status=Status.FEASIBLE,
                assignment=tuple(plan.assignment.tolist()),
                cost=plan.cost,
                peak=plan.peak,
                objective=plan.objective,
                bound=0,
                gap=relative_gap(plan.objective, 0),
                seed=self.options.seed,
            )
            self.watch(first, problem)

    def stage(
        self, problem: Transients, starts: tuple[WarmStart, ...], *, name: str = "", share: float = 1.0, gap: float | None = None
    ) -> Solution:
        """Solve a problem with a share of what is left; its events and stages say its name."""
        prefix, options, whole = f"{name}, " if name else "", self.options, self.clock.solver_seconds
        seconds, work = time.perf_counter() - self.started, self.work

        def report(event: Event) -> None:
            self.clock.solver_event(dataclasses.replace(event, source=prefix + event.source))

        def halt() -> bool:
            self.clock.flush()
            return self.stop is not None and self.stop()

        found = solve_in_rounds(
            problem,
            parameters=SolveParameters(
                objective=options.objective,
                memory_weight=options.memory_weight,
                gap=options.gap if gap is None else gap,
                seed=options.seed,
                workers=self.workers,
                time_limit=share * max(whole - seconds, LEAST_SHARE * whole),
                work_limit=None if self.work_limit is None else share * max(self.work_limit - work, 0.0),
                limited=self.limited,
            ),
            warm_starts=starts,
            progress=report,
            stop=halt,
            saver=self._saver(problem),
        )
        self.work += found.work
        return dataclasses.replace(
            found,
            history=tuple(
                dataclasses.replace(e, seconds=e.seconds + seconds, work=e.work + work, source=prefix + e.source) for e in found.history
            ),
            stages=tuple(dataclasses.replace(s, name=prefix + s.name) for s in found.stages),
        )

    def tidied(self, found: Solution, problem: Transients) -> Solution:
        """The solution with repeated layers alike where that costs nothing."""
        if found.assignment is None or found.bound is None or not found.feasible:
            return found
        chosen, peak = tidy(problem, found.assignment)
        cost, options = self.lowering.graph.cost(chosen), self.options
        value = objective_value(options.objective, options.memory_weight, cost, peak)
        bound = min(found.bound, value)
        return dataclasses.replace(
            found,
            assignment=tuple(chosen.tolist()),
            cost=cost,
            peak=peak,
            objective=value,
            bound=bound,
            gap=relative_gap(value, bound),
            status=Status.OPTIMAL if bound == value else found.status,
        )

    def _saver(self, problem: Transients) -> Saver[Solution] | None:
        """Hands on what a stage finds, no sooner after the last one's than if they were one."""
        watch, before = self.watch, self.saver
        if watch is None:
            return None
        self.saver = Saver(lambda found: watch(found, problem), first=FIRST_INCUMBENT, every=INCUMBENTS)
        if before is not None:
            self.saver.next = before.next
        return self.saver


def _smallest_first(template: str) -> int:
    """Templates that cut most are most likely to be within a memory limit."""
    cut = sum(template.count(name) for name in ("zero3", "megatron-sp", "expert-parallel"))
    return -(10 * ("zero3" in template) + cut)


def _joined(first: Solution, second: Solution) -> Solution:
    """The second stage's solution with what both took; the first one's bounds are of another problem."""
    return dataclasses.replace(
        second,
        history=tuple(dataclasses.replace(event, bound=None) for event in first.history) + second.history,
        stages=first.stages + second.stages,
        work=first.work + second.work,
    )
