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
from solver_shard.costs.cluster import Cluster
from solver_shard.costs.model import CostModel
from solver_shard.plan.decode import Decoded, decode
from solver_shard.plan.plan import Certificate, Options, Plan, Provenance
from solver_shard.program import Program
from solver_shard.solve.solution import Solution
from solver_shard.stages import StageClock


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Writer:
    """What a plan says beside its solution.

    Attributes:
        program: that was lowered; ``lowering`` and ``costs`` are of it.
        origin: see ``provenance``.
    """

    program: Program
    lowering: Lowering
    costs: CostModel
    cluster: Cluster
    options: Options
    origin: Provenance

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
        """The plan of a feasible solution, and what is proven of it for ``problem``."""
        assert solution.assignment is not None, "a feasible solution has an assignment"
        program, parts = self.program, self.parts(solution.assignment)
        return Plan(
            name=program.name,
            mesh=self.costs.mesh,
            cluster=self.cluster,
            options=self.options,
            tensors=parts.tensors,
            ops=parts.ops,
            outputs=program.outputs,
            gradients={program.tensors[p].name: g for p, g in program.gradients.items()},
            reshards=parts.reshards,
            holds=parts.holds,
            clip=parts.clip,
            memory=parts.memory,
            costs=parts.costs,
            certificate=certificate(solution, problem, clock),
            provenance=self.origin,
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
    )


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
