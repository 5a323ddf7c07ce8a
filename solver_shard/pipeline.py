"""Solve a lowered program: tied, where copies of a repeated layer share their decisions, or free, in two stages.

Every tied assignment is a free one of the same cost and the same bytes. So the free problem is not searched from nothing: a share of the
limits goes to the tied problem, whose best plan is then the incumbent that the free search starts from. What comes out is never worse
than it. Bounds do not carry over, for the free problem may go lower: those of the first stage are of tied plans only.

A search of a very large graph with a memory limit may take long to a first plan within it. So it starts from a template's: the ones that
cut most are tried first, until one is within the limit (:mod:`solver_shard.baselines.candidates`).

Of the plans that cost as much as the one that was found, one is returned whose layers are alike (:mod:`solver_shard.graph.tidy`).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from solver_shard.baselines.candidates import candidates
from solver_shard.clock import StageClock
from solver_shard.costs.model import CostModel
from solver_shard.graph.choice_graph import WarmStart
from solver_shard.graph.nodes import Lowering
from solver_shard.graph.symmetry import node_classes
from solver_shard.graph.templates import warm_starts
from solver_shard.graph.tidy import tidy
from solver_shard.graph.transient_memory import Transients
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.program import Program
from solver_shard.solve.engine import solve_in_rounds
from solver_shard.solve.limits import Saver
from solver_shard.solve.solution import Event, Solution, Status, objective_value, relative_gap

if TYPE_CHECKING:
    from solver_shard.baselines.propagated import Propagation
    from solver_shard.costs.cluster import Cluster
    from solver_shard.graph.build import Lowered
    from solver_shard.plan.plan import Plan
    from solver_shard.program import Relays
    from solver_shard.rules.rulebook import Rulebook
    from solver_shard.tracing.clean import Traced


def plan_program(
    program: Program,
    *,
    mesh: Mesh,
    cluster: Cluster,
    options: Options,
    source: str = "",
    command: str | None = None,
    clock: StageClock | None = None,
    propagation: Propagation | None = None,
    narrow: Callable[[Lowering, CostModel, Rulebook], tuple[Lowering, str]] | None = None,
    relays: bool = False,
    workers: int = 2,
    stop: Callable[[], bool] | None = None,
    incumbent: Callable[[Plan], None] | None = None,
    traced: Traced | None = None,
) -> Plan:
    """From a traced program to a plan: sub-axes, rules, costs, choice graph, hints, solver, plan.

    A graph whose plans the memory limit does not touch needs relays only where they save time (see ``constraints``). So that one is solved
    first where time alone is the objective, and the one with relays everywhere only where the limit, or the objective, counts bytes.

    ``narrow``: leaves of the choice graph only what a baseline decides, and says what ``Options.propagation`` records; with ``relays``
    where what it decides may use them.
    ``workers``, ``stop``, ``incumbent``: those of :func:`optimize`. ``traced``: the trace that the program was cleaned from; without
    it there is no hint of what DTensor would do.
    """
    from solver_shard.baselines.hints import or_baseline
    from solver_shard.graph.build import lower_program
    from solver_shard.infeasible import Unsolved, infeasible
    from solver_shard.plan.decode import PlanWriter, certificate, provenance

    clock = clock or StageClock()
    spaces: tuple[Relays, ...] = ("shared", "everywhere")
    if propagation is not None or (narrow is not None and not relays) or options.template or mesh.size == 1:
        spaces = ("none",)
    elif options.prices_memory:
        spaces = ("everywhere",)
    given, left = program, options.work_limit
    before: tuple[Solution, Lowered, Lowering, PlanWriter, Transients] | None = None
    for space in spaces:
        made = lower_program(given, mesh=mesh, cluster=cluster, options=options, clock=clock, relays=space)
        program, rulebook, costs, pinned, lowering = made.program, made.rulebook, made.costs, made.pinned, made.lowering
        if propagation is not None:
            from solver_shard.baselines.propagated import narrow_to
            from solver_shard.shardy.program import propagate_program

            with clock.stage("propagate", f"propagating the shardings of {len(pinned)} tensors"):
                spread = propagate_program(program, made.mesh, pinned, propagation.name, rulebook, propagation.options)
                lowering = narrow_to(lowering, spread.layouts)
                options = dataclasses.replace(options, propagation=propagation.record(program, spread.lost))
        if narrow is not None:
            with clock.stage("decide", f"deciding {len(program.ops)} ops one by one"):
                lowering, said = narrow(lowering, costs, rulebook)
                options = dataclasses.replace(options, propagation=said)
        writer = PlanWriter(
            lowering=lowering,
            costs=costs,
            cluster=cluster,
            options=options,
            origin=provenance(source, command or f"solver_shard.optimize({program.name!r}, mesh={str(made.mesh)!r}, ...)"),
            relayed=made.relays,
        )
        spent = clock.seconds.get("solve", 0.0)
        with clock.stage("solve", f"solving {lowering.graph.size} choices"):
            clock.bound_solver(max(options.time_limit - spent, LEAST_SHARE * options.time_limit))
            watch = None if incumbent is None else lambda found, problem, w=writer: incumbent(w.plan(found, problem, clock))
            solution, problem = solve_lowered(
                lowering,
                costs,
                dataclasses.replace(options, work_limit=left),
                clock,
                workers=workers,
                stop=stop,
                watch=watch,
                limited=space == spaces[-1],
            )
        if before is not None:
            first = before[0]
            solution = after(first, solution, spent)
            if first.feasible and (not solution.feasible or (solution.objective or 0) > (first.objective or 0)):
                _, made, lowering, writer, problem = before  # the larger graph had too little time
                solution = dataclasses.replace(first, history=solution.history, stages=solution.stages, work=solution.work)
        if is_enough(solution) or (solution.feasible and clock.left() < 2 * clock.seconds["lower"]):
            break
        before = solution, made, lowering, writer, problem
        left = None if left is None else max(left - solution.work, LEAST_SHARE * left)
    program, mesh, rulebook, costs, pinned = made.program, made.mesh, made.rulebook, made.costs, made.pinned
    baseline = None
    if propagation is None and narrow is None and not options.template and not solution.interrupted:
        solution, baseline = or_baseline(solution, problem, lowering, costs, rulebook, pinned, traced, options, clock)
    if not solution.feasible:
        raise infeasible(
            Unsolved(
                program=program,
                options=options,
                costs=costs,
                rulebook=rulebook,
                pins=made.pins_apart(),
                restriction=made.restriction,
                lowering=lowering,
                problem=problem,
                solution=solution,
                memory=None if solution.assignment is None else writer.build_plan(solution.assignment).memory,
                clock=clock,
                stop=stop,
            )
        )
    with clock.stage("plan", "writing down the plan"):
        plan = writer.plan(solution, problem, clock)
    return dataclasses.replace(plan, certificate=certificate(solution, problem, clock, baseline))


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

FIRST_INCUMBENT = 2.0
"""Seconds of solving after which a caller is first given the best plan so far."""

INCUMBENTS = 10.0
"""Seconds between two such plans, at least."""

Watch = Callable[[Solution, Transients], None]
"""Called with the best solution so far, and the tied or free problem that its bound is of."""


def solve_lowered(
    lowering: Lowering,
    costs: CostModel,
    options: Options,
    clock: StageClock,
    *,
    workers: int = 2,
    stop: Callable[[], bool] | None = None,
    watch: Watch | None = None,
    limited: bool = True,
) -> tuple[Solution, Transients]:
    """A solution of the lowered graph, and the problem that its bound is of: tied if ``options.tied`` and something repeats, or free.

    A free search that is stopped in its tied stage ends with what that has. ``limited``: False where only a plan that the memory limit
    does not touch is of use; see ``is_enough``.
    """
    run = _Solving(lowering, costs, options, clock, workers, stop, watch, limited)
    tied = Transients(lowering, costs, node_classes(lowering))
    if options.tied or tied.folded is None:
        return run.tidied(run.stage(tied, (*run.first(tied), *run.templates(tied))), tied), tied
    first = run.stage(tied, (*run.first(tied), *run.templates(tied)), name="tied", share=TIED_SHARE, gap=max(options.gap, TIED_GAP))
    if (first.interrupted and first.status is not Status.INFEASIBLE) or not (limited or is_enough(first)):
        return first, tied
    free = Transients(lowering, costs)
    if tied.added:
        free.add(tied.added)  # they mattered there, and would be found missing here
    starts = run.templates(free)
    if first.feasible and first.assignment is not None:
        starts = (free.complete(first.assignment, "the tied plan"),)
    second = run.stage(free, starts, name="free")
    return run.tidied(_joined(first, second), free), free


def is_enough(found: Solution) -> bool:
    """Whether a search that left the memory limit aside needs no other after it: its plan keeps the limit and is proven, or time is over.

    Where tensors of a single group of readers have no relays, which never save time, the bound is then of the graph with them, too.
    """
    return found.status in (Status.OPTIMAL, Status.GAP) or found.interrupted or (found.feasible and found.ended == "limit")


def after(first: Solution, second: Solution, seconds: float) -> Solution:
    """The second search's solution with the course of both; ``seconds``: from the start of the first to that of the second."""
    return dataclasses.replace(
        second,
        history=first.history
        + tuple(dataclasses.replace(event, seconds=event.seconds + seconds, work=event.work + first.work) for event in second.history),
        stages=first.stages + second.stages,
        work=first.work + second.work,
    )


class _Solving:
    """Stages of one search, which share its limits."""

    def __init__(
        self,
        lowering: Lowering,
        costs: CostModel,
        options: Options,
        clock: StageClock,
        workers: int,
        stop: Callable[[], bool] | None,
        watch: Watch | None,
        limited: bool,
    ) -> None:
        self.lowering, self.mesh, self.options, self.clock = lowering, costs.mesh, options, clock
        self.workers, self.stop, self.watch, self.limited = workers, stop, watch, limited
        self.started = time.perf_counter()
        self.work = 0.0
        self.saver: Saver[Solution] | None = None

    def templates(self, problem: Transients) -> tuple[WarmStart, ...]:
        return warm_starts(self.lowering, problem.folded, self.mesh)

    def first(self, problem: Transients) -> tuple[WarmStart, ...]:
        """A plan within the memory limit of a graph so large that the search may take long to one; none where no template has one."""
        options, graph = self.options, problem.graph
        if graph.limit is None or graph.offsets[-1] < MANY or options.template or options.propagation:
            return ()
        plans = candidates(
            problem,
            self.mesh,
            objective=options.objective,
            memory_weight=options.memory_weight,
            gap=LOOSE,
            seed=options.seed,
            order=_smallest_first,
        )
        for name, plan in itertools.islice(plans, TRIED):
            if plan is not None:
                return (problem.complete(plan.assignment, f"of template {name}"),)
            if time.perf_counter() - self.started > LEAST_SHARE * self.clock.solver_seconds and options.work_limit is None:
                break
        return ()

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
            objective=options.objective,
            memory_weight=options.memory_weight,
            gap=options.gap if gap is None else gap,
            time_limit=share * max(whole - seconds, LEAST_SHARE * whole),
            work_limit=None if options.work_limit is None else share * max(options.work_limit - work, 0.0),
            seed=options.seed,
            warm_starts=starts,
            workers=self.workers,
            progress=report,
            stop=halt,
            saver=self._saver(problem),
            limited=self.limited,
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
