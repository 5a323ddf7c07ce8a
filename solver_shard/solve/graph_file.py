"""A choice graph of any origin, in a file of the ASPLOS 2025 contest's form (IOPDDL), solved: the cheapest assignment and its proof.

>>> found = solve_graph("example.json", time_limit=30)      # doctest: +SKIP
>>> print(found)                                            # doctest: +SKIP
>>> Path("solution.json").write_text(found.to_json())       # doctest: +SKIP
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from solver_shard.arguments import checked
from solver_shard.clock import Progress, StageClock
from solver_shard.errors import InfeasibleError, SolverShardError
from solver_shard.graph.choice_graph import ChoiceGraph, Ints
from solver_shard.graph.iopddl import file_nodes, read, read_solution, start_from, usage_text
from solver_shard.options import OPTIONS
from solver_shard.solve.engine import solve
from solver_shard.solve.limits import Clock, Saver, clock_of
from solver_shard.solve.solution import Event, Solution, Status, objective_value, relative_gap
from solver_shard.text import text_of

SAVES = 1.0
"""Seconds between two incumbents that a caller is given, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedGraph:
    """A solution of a file's problem; ``str()`` is the report.

    Attributes:
        file, graph: where the problem is from, and the graph that was read from it.
        objective: what was minimised: time, the total cost; memory, the peak usage.
        time_limit, work_limit: in seconds and units of work.
        solution: assignment, cost, peak and bound, see :class:`solver_shard.solve.solution.Solution`.
        seconds: that the search took.
    """

    file: str
    graph: ChoiceGraph
    objective: Literal["time", "memory"]
    time_limit: float
    work_limit: float | None
    solution: Solution
    seconds: float

    @property
    def status(self) -> str:
        """The status, or that the user ended the search before anything more could be said."""
        status = self.solution.status.value
        return "interrupted" if self.solution.interrupted and status in ("feasible", "unknown") else status

    def to_json(self) -> str:
        """Everything about the solution, with the assignment; read again by ``start``."""
        solution = self.solution
        data: dict[str, Any] = {
            "file": self.file,
            "objective": self.objective,
            "status": self.status,
            "ended": solution.ended,
            "cost": solution.cost,
            "peak": solution.peak,
            "limit": self.graph.limit,
            "bound": solution.bound,
            "gap": solution.gap,
            "peak_bound": solution.peak_bound,
            "seed": solution.seed,
            "work": round(solution.work, 6),
            "seconds": round(self.seconds, 3),
            "stages": {stage.name: round(stage.seconds, 3) for stage in solution.stages},
            "assignment": None if solution.assignment is None else list(solution.assignment[: file_nodes(self.graph)]),
        }
        return json.dumps(data, separators=(", ", ": ")) + "\n"

    def text(self, *, stages: bool = False) -> str:
        """The report; with the stages of the solver."""
        solution, graph = self.solution, self.graph
        if self.error is not None or solution.cost is None or solution.peak is None:
            return str(self.error)
        what = "peak" if self.objective == "memory" else "cost"
        said = {
            "optimal": f"optimal: no solution has a smaller {what}",
            "gap": "optimal within the gap asked for",
            "feasible": "feasible: a limit struck before the gap asked for was proven"
            if solution.ended != "search"
            else "feasible: the gap asked for is not proven, and the solver has nothing left to try; another --seed may do better",
            "interrupted": "interrupted: the best until then",
        }
        rows = [
            ("status", said[self.status]),
            ("cost", f"{solution.cost:,}"),
            ("peak", usage_text(solution.peak, graph.limit)),
            ("bound", "none" if solution.bound is None else f"{solution.bound:,} on the {what}, gap {100 * (solution.gap or 0.0):.2g}%"),
            ("time", f"{self.seconds:.2f} s, {solution.work:.2f} units of work, seed {solution.seed}"),
        ]
        sizes = f"{graph.size:,} nodes, {int(graph.offsets[-1]):,} strategies, {len(graph.edges):,} edges"
        lines = [f"{self.file}: {sizes}", *(f"  {name:<8}{text}" for name, text in rows)]
        if stages:
            lines.append("  stages")
            lines += [f"    {stage.seconds:9.2f} s  {stage.name}{f': {stage.note}' if stage.note else ''}" for stage in solution.stages]
        return text_of(lines)

    def __str__(self) -> str:
        return self.text()

    @property
    def error(self) -> SolverShardError | None:
        """That no solution is within the limit (InfeasibleError), or none was found; None where there is one."""
        solution = self.solution
        if solution.feasible:
            return None
        given = f"{self.time_limit:g} s" + ("" if self.work_limit is None else f" and {self.work_limit:g} units of work")
        given = "the time until it was interrupted" if solution.interrupted else given
        more = "give more time"
        if solution.ended == "search":
            given, more = "all that the solver would try", "another --seed may do better"
        limit = "" if self.graph.limit is None else f" within the limit of {self.graph.limit:,}"
        proven = solution.status is Status.INFEASIBLE
        if solution.peak is None:
            if proven:
                return InfeasibleError(
                    f"{self.file} has no solution{limit}: the costs of 10^18 leave none", peak_bound=solution.peak_bound or None
                )
            return SolverShardError(f"no solution of {self.file} was found in {given}, which does not prove that there is none; {more}")
        least = f"the smallest peak found is {solution.peak:,}, and none is below {solution.peak_bound:,}"
        return InfeasibleError(
            f"{self.file} has no solution{limit}: {least}"
            if proven
            else f"no solution of {self.file}{limit} was found in {given}: {least}; {more}",
            achieved_peak=solution.peak,
            peak_bound=solution.peak_bound or None,
        )


@checked
def solve_graph(
    file: str | os.PathLike[str],
    *,
    objective: Literal["time", "memory"] = "time",
    time_limit: float = 300.0,
    work_limit: float | None = None,
    gap: float = 1e-4,
    seed: int = 0,
    workers: int = 2,
    start: str | os.PathLike[str] | Sequence[int] | None = None,
    progress: Progress | None = None,
    every_event: bool = False,
    stop: Callable[[], bool] | None = None,
    incumbent: Callable[[SolvedGraph], None] | None = None,
) -> SolvedGraph:
    """Choose a strategy for every node of a graph, at the least total cost within the usage limit, and prove how good that is.

    >>> solve_graph("example.json", gap=0.0).solution.cost  # doctest: +SKIP
    445

    Args:
        file: a problem in the contest's format, .json or .json.gz.
        objective: time, the total cost; memory, the peak usage.
        time_limit: seconds for the solver.
        work_limit: units of solver work; the same limit and seed give the same result.
        gap: stop when (objective - bound) / objective is at most this.
        seed: for the solver's random choices.
        workers: processor cores that may be used; with a work limit the result does not depend on it.
        start: a solution to start from: strategy indices by node, or a file that has them.
        progress: called with a line of text when the solver gets further; ``every_event``: with every single event.
        stop: asked again and again; True ends the search with the best so far.
        incumbent: called with the best so far, at most once a second.

    Returns:
        The solution within the limit, with its bound; or where there is none, or none was found, what is known, and its ``error``.

    Raises:
        InputError: no such file, or not of that form; the message names the place. Or a number is not legal.
    """
    limits = {"time_limit": time_limit, "work_limit": work_limit, "gap": gap, "seed": seed, "workers": workers}
    for option, value in limits.items():
        OPTIONS[option].read(value)
    name = os.fspath(file)
    given = None if start is None else start if not isinstance(start, str | os.PathLike) else read_solution(os.fspath(start))
    graph = read(name)
    title = str(start) if isinstance(start, str | os.PathLike) else "start"
    starts = () if given is None else (start_from(given, graph, title),)
    clock = clock_of(time_limit, work_limit)

    def solved(solution: Solution) -> SolvedGraph:
        return SolvedGraph(
            file=name,
            graph=graph,
            objective=objective,
            time_limit=time_limit,
            work_limit=work_limit,
            solution=solution,
            seconds=clock.seconds(),
        )

    lines = StageClock(progress=progress)
    saver = None if incumbent is None else Saver[Solution](lambda solution: incumbent(solved(solution)), every=SAVES)
    bound: int | None = None

    def halt() -> bool:
        lines.flush()
        if saver is not None:
            saver.poll()
        return stop is not None and stop()

    def report(event: Event) -> None:
        nonlocal bound
        bound = event.bound
        if progress is not None and every_event:
            progress(str(event))
        else:
            lines.solver_event(event)

    def watch(assignment: Ints, cost: int) -> None:
        if saver is not None:
            saver.offer(lambda: _so_far(graph, objective, assignment, cost, bound, seed, clock))

    clock.halt = halt
    solution = solve(
        graph,
        objective=objective,
        gap=gap,
        time_limit=time_limit,
        work_limit=work_limit,
        seed=seed,
        warm_starts=starts,
        workers=workers,
        progress=report,
        clock=clock,
        watch=watch,
    )
    return solved(solution)


def _so_far(
    graph: ChoiceGraph, objective: Literal["time", "memory"], assignment: Ints, cost: int, bound: int | None, seed: int, clock: Clock
) -> Solution:
    """An incumbent as a solution, with what is proven at that moment."""
    peak = graph.peak(assignment)
    value = objective_value(objective, 0, cost, peak)
    proven = None if bound is None else min(bound, value)
    return Solution(
        status=Status.FEASIBLE,
        assignment=tuple(assignment.tolist()),
        cost=cost,
        peak=peak,
        objective=value,
        bound=proven,
        gap=None if proven is None else relative_gap(value, proven),
        seed=seed,
        work=clock.work,
    )
