"""What ``solve-graph`` says of a solution: as text, as JSON, or as the error that there is none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from solver_shard.errors import InfeasibleError, SolverShardError

if TYPE_CHECKING:
    from solver_shard.choice.graph import ChoiceGraph
    from solver_shard.choice.iopddl import Evaluation
    from solver_shard.solve.solution import Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What was asked: to minimise ``objective`` on a graph read from ``file``, which has ``nodes``, within limits of time and work."""

    graph: ChoiceGraph
    file: str
    nodes: int
    objective: Literal["time", "memory"]
    time_limit: float
    work_limit: float | None


def status_of(solution: Solution) -> str:
    """The status, or that the user ended the search before anything more could be said."""
    return "interrupted" if solution.interrupted and solution.status.value in ("feasible", "unknown") else solution.status.value


def report(task: Task, solution: Solution, seconds: float, *, stages: bool) -> list[str]:
    """Lines about a solution within the limit; with the stages of the solver."""
    assert solution.cost is not None, "a solution has a cost"
    assert solution.peak is not None, "a solution has a peak"
    what = "peak" if task.objective == "memory" else "cost"
    said = {
        "optimal": f"optimal: no solution has a smaller {what}",
        "gap": "optimal within the gap asked for",
        "feasible": "feasible: a limit struck before the gap asked for was proven"
        if solution.ended != "search"
        else "feasible: the gap asked for is not proven, and the solver has nothing left to try; another --seed may do better",
        "interrupted": "interrupted: the best until then",
    }
    rows = [
        ("status", said[status_of(solution)]),
        ("cost", f"{solution.cost:,}"),
        ("peak", usage(solution.peak, task.graph.limit)),
        ("bound", "none" if solution.bound is None else f"{solution.bound:,} on the {what}, gap {100 * (solution.gap or 0.0):.2g}%"),
        ("time", f"{seconds:.2f} s, {solution.work:.2f} units of work, seed {solution.seed}"),
    ]
    graph = task.graph
    sizes = f"{graph.size:,} nodes, {int(graph.offsets[-1]):,} strategies, {len(graph.edges):,} edges"
    lines = [f"{task.file}: {sizes}", *(f"  {name:<8}{text}" for name, text in rows)]
    if stages:
        lines.append("  stages")
        lines += [f"    {stage.seconds:9.2f} s  {stage.name}{f': {stage.note}' if stage.note else ''}" for stage in solution.stages]
    return lines


def usage(peak: int, limit: int | None) -> str:
    """The peak against the limit."""
    if limit is None:
        return f"{peak:,}, no limit"
    return f"{peak:,} of {limit:,}" + (f" ({peak / limit:.2%})" if limit else "")


def as_json(task: Task, solution: Solution, seconds: float) -> str:
    """Everything about a solution, with the assignment; read again by ``--start`` and ``--check``."""
    data: dict[str, Any] = {
        "file": task.file,
        "objective": task.objective,
        "status": status_of(solution),
        "ended": solution.ended,
        "cost": solution.cost,
        "peak": solution.peak,
        "limit": task.graph.limit,
        "bound": solution.bound,
        "gap": solution.gap,
        "peak_bound": solution.peak_bound,
        "seed": solution.seed,
        "work": round(solution.work, 6),
        "seconds": round(seconds, 3),
        "stages": {stage.name: round(stage.seconds, 3) for stage in solution.stages},
        "assignment": None if solution.assignment is None else list(solution.assignment[: task.nodes]),
    }
    return json.dumps(data, separators=(", ", ": ")) + "\n"


def failure(task: Task, solution: Solution) -> SolverShardError:
    """The error where no solution is within the limit, or none was found."""
    from solver_shard.solve.solution import Status

    given = f"{task.time_limit:g} s" + ("" if task.work_limit is None else f" and {task.work_limit:g} units of work")
    given = "the time until it was interrupted" if solution.interrupted else given
    more = "give more time"
    if solution.ended == "search":
        given, more = "all that the solver would try", "another --seed may do better"
    limit = "" if task.graph.limit is None else f" within the limit of {task.graph.limit:,}"
    proven = solution.status is Status.INFEASIBLE
    if solution.peak is None:
        if proven:
            return InfeasibleError(
                f"{task.file} has no solution{limit}: the costs of 10^18 leave none", peak_bound=solution.peak_bound or None
            )
        return SolverShardError(f"no solution of {task.file} was found in {given}, which does not prove that there is none; {more}")
    found = f"the smallest peak found is {solution.peak:,}, and none is below {solution.peak_bound:,}"
    return InfeasibleError(
        f"{task.file} has no solution{limit}: {found}"
        if proven
        else f"no solution of {task.file}{limit} was found in {given}: {found}; {more}",
        achieved_peak=solution.peak,
        peak_bound=solution.peak_bound or None,
    )


def verdict_lines(file: str, solution: str, checked: Evaluation) -> list[str]:
    """Lines about a checked solution."""
    wrong = []
    if checked.limit is not None and checked.peak > checked.limit:
        wrong.append(f"{checked.peak - checked.limit:,} above the limit")
    if checked.forbidden:
        wrong.append(f"{checked.forbidden:,} of the chosen costs are 10^18, which means forbidden (they count as they are)")
    rows = [
        ("status", f"infeasible: {'; '.join(wrong)}" if wrong else "feasible"),
        ("cost", f"{checked.cost:,}"),
        ("peak", usage(checked.peak, checked.limit)),
    ]
    return [f"{solution}: a solution of {file}", *(f"  {name:<8}{text}" for name, text in rows)]


def verdict_json(file: str, solution: str, checked: Evaluation) -> str:
    """The same as JSON."""
    data = {
        "file": file,
        "solution": solution,
        "feasible": checked.feasible,
        "cost": checked.cost,
        "peak": checked.peak,
        "limit": checked.limit,
        "forbidden": checked.forbidden,
    }
    return json.dumps(data, separators=(", ", ": ")) + "\n"
