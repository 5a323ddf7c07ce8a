"""A solution of a choice graph written down as a plan, with its certificate and where it comes from.

>>> Writer(program=program, lowering=lowering, ...).plan(solution, problem, clock)      # doctest: +SKIP
"""

from __future__ import annotations

import datetime
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass

from solver_shard import __version__
from solver_shard.choice.nodes import Lowering
from solver_shard.choice.transients import Transients
from solver_shard.constraints import Relays, without
from solver_shard.costs.cluster import Cluster
from solver_shard.costs.model import CostModel
from solver_shard.errors import InternalError
from solver_shard.plan.decode import Decoded, decode
from solver_shard.plan.evaluate import evaluate
from solver_shard.plan.plan import Certificate, Moment, Options, Plan, Provenance
from solver_shard.program import Program
from solver_shard.rulebook.build import Rulebook
from solver_shard.solve.solution import Solution
from solver_shard.stages import StageClock

MAX_MOMENTS = 200
"""Of the course of a solve, what a plan keeps at most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Writer:
    """What a plan says beside its solution.

    Attributes:
        program: that was lowered; ``lowering`` and ``costs`` are of it.
        origin: see ``provenance``.
        relayed: behind which tensors the lowered graph has relays.
    """

    program: Program
    lowering: Lowering
    costs: CostModel
    cluster: Cluster
    options: Options
    origin: Provenance
    relayed: Relays = "shared"

    def parts(self, assignment: Sequence[int]) -> Decoded:
        """Layouts, prices and memory of an assignment of the lowered graph."""
        return decode(
            self.lowering,
            assignment,
            self.costs,
            self.options.optimizer_state(),
            limit=self.options.usable_memory,
            objective=self.options.objective,
            memory_weight=self.options.memory_weight,
        )

    def plan(self, solution: Solution, problem: Transients, clock: StageClock) -> Plan:
        """The plan of a feasible solution and what is proven of it; InternalError where its figures are not the solver's."""
        assert solution.assignment is not None, "a feasible solution has an assignment"
        parts = self.parts(solution.assignment)
        claimed = (solution.cost, solution.peak, solution.objective)
        written = (parts.costs.total_ns, parts.memory.peak, parts.costs.objective)
        if written != claimed:
            raise _unlike("the solver", claimed, "the plan", written)
        return self.made(parts, certificate(solution, problem, clock))

    def check(self, plan: Plan, rulebook: Rulebook) -> None:
        """Hold a finished plan against the evaluator; InternalError where its figures are others."""
        used = {t for t in self.lowering.relays if t in plan.relays}
        kept = without(self.program, self.lowering.relays, self.lowering.relays - used)
        found = evaluate(plan, kept.program, rulebook, self.costs)
        claimed = (plan.costs.total_ns, plan.memory.peak, plan.certificate.objective)
        evaluated = (found.total_ns, found.peak, found.objective)
        if evaluated != claimed:
            raise _unlike("the plan", claimed, "the evaluator", evaluated)

    def made(self, parts: Decoded, proof: Certificate) -> Plan:
        """A plan of these parts."""
        program = parts.program
        return Plan(
            name=program.name,
            mesh=self.costs.mesh,
            cluster=self.cluster,
            options=self.options,
            tensors=parts.tensors,
            ops=parts.ops,
            outputs=program.outputs,
            gradients={program.tensors[p].name: g for p, g in program.gradients.items()},
            ties=dict(program.ties),
            reshards=parts.reshards,
            holds=parts.holds,
            clip=parts.clip,
            memory=parts.memory,
            costs=parts.costs,
            certificate=proof,
            provenance=self.origin,
            relays=parts.relays,
            relayed=self.relayed,
        )


def certificate(solution: Solution, problem: Transients, clock: StageClock, baseline: str | None = None) -> Certificate:
    """What is proven, for the tied or the free problem, with the seconds of the stages so far; and the baseline whose plan it is."""
    assert solution.objective is not None, "a feasible solution has an objective"
    assert solution.bound is not None, "a feasible solution has a bound"
    stages = {**clock.seconds, **{f"solve: {stage.name}": round(stage.seconds, 3) for stage in solution.stages}}
    status = solution.status.value
    assert status in ("optimal", "gap", "feasible")
    if solution.interrupted and status == "feasible":
        status = "interrupted"
    return Certificate(
        objective=solution.objective,
        bound=solution.bound,
        gap=solution.gap or 0.0,
        status=status,  # type: ignore[arg-type]  # narrowed by the assertion above, which mypy does not follow for enums
        problem="free" if problem.folded is None else "tied",
        baseline=baseline,
        seed=solution.seed,
        work=solution.work,
        stages=stages,
        versions=_versions("ortools", "numpy"),
        ended=solution.ended if status == "feasible" else None,
        history=history(solution, clock.seconds.get("solve", 0.0) + clock.seconds.get("baselines", 0.0), baseline),
    )


def history(solution: Solution, seconds: float, baseline: str | None = None) -> tuple[Moment, ...]:
    """The course of a solve that took so many seconds: only moments at which something became better, thinned evenly by their number.

    Which moments are kept depends on what was found, never on when, so that runs that find the same keep the same. Prices below that of
    the solution are left out: they were of assignments that turned out not to keep the limit.
    """
    moments: list[Moment] = []
    best, bound = None, None
    for event in solution.history:
        value, proven = event.objective, event.bound
        if value is not None and solution.objective is not None and value >= solution.objective:
            best = value if best is None else min(best, value)
        if proven is not None and solution.bound is not None:
            bound = max(bound or 0, min(proven, solution.bound))
        if (best, bound) != ((moments[-1].objective, moments[-1].bound) if moments else (None, None)):
            moments.append(Moment(seconds=round(event.seconds, 3), objective=best, bound=bound, source=event.source))
    if not moments or (best, bound) != (solution.objective, solution.bound):
        end = max([seconds, *(moment.seconds for moment in moments)])
        source = f"baseline {baseline}" if baseline else "the end of the search"
        moments.append(Moment(seconds=round(end, 3), objective=solution.objective, bound=solution.bound, source=source))
    last = len(moments) - 1
    kept = range(last + 1) if last < MAX_MOMENTS else [k * last // (MAX_MOMENTS - 1) for k in range(MAX_MOMENTS)]
    return tuple(moments[k] for k in kept)


def _unlike(one: str, claimed: tuple[int | None, ...], other: str, found: tuple[int | None, ...]) -> InternalError:
    figures = zip(("step time", "peak", "objective"), claimed, found, strict=True)
    said = "; ".join(f"{name} {a} by {one}, {b} by {other}" for name, a, b in figures if a != b)
    return InternalError(f"{one} and {other} disagree: {said}; please report this, with the model and the command")


def provenance(source: str, command: str) -> Provenance:
    """Where a plan comes from: these versions, now."""
    return Provenance(
        tool=f"solver-shard {__version__}",
        versions=_versions("torch", "transformers", "ortools", "numpy"),
        command=command,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        source=source,
    )


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
