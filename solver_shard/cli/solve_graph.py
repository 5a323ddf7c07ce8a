"""``solver-shard solve-graph``: a choice graph of any origin in (an IOPDDL file), the cheapest assignment and its proof out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from solver_shard.cli.options import check_output, written_if_possible
from solver_shard.cli.terminal import INFEASIBLE, catch_interrupts, progress_lines
from solver_shard.errors import InfeasibleError, SolverShardError

if TYPE_CHECKING:
    from solver_shard.clock import Progress
    from solver_shard.graph.choice_graph import ChoiceGraph, Ints, WarmStart
    from solver_shard.graph.iopddl import Evaluation
    from solver_shard.solve.limits import Clock
    from solver_shard.solve.solution import Event, Solution


SAVES = 1.0
"""Seconds between two writes of the incumbent, at least."""


def solve_graph(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A problem in the ASPLOS 2025 contest's format (IOPDDL), .json or .json.gz.")
    ],
    time_limit: Annotated[float, typer.Option(help="Seconds for the solver.")] = 300.0,
    work_limit: Annotated[
        float | None, typer.Option(help="Units of solver work; the same limit and seed give the same result.", show_default=False)
    ] = None,
    gap: Annotated[float, typer.Option(help="Stop when (objective - bound) / objective is at most this.")] = 1e-4,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="For the solver's random choices.")] = 0,
    workers: Annotated[
        int, typer.Option(min=1, max=256, help="Processor cores that may be used; with a work limit the result does not depend on it.")
    ] = 2,
    objective: Annotated[Literal["time", "memory"], typer.Option(help="Minimise the total cost, or the peak usage.")] = "time",
    start: Annotated[
        Path | None, typer.Option(help="A solution to start from: a file of -o, or a JSON list of strategy indices.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the solution to this JSON file, and the best so far while the solver runs.", show_default=False
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of the report, and no progress.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Keep every line of progress, and list the solver's stages.")] = False,
    check: Annotated[
        Path | None,
        typer.Option(help="Solve nothing: validate this solution against the definition, in exact integers.", show_default=False),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    """Choose a strategy for every node of a graph, at the least total cost within the usage limit, and prove how good that is.

    Ctrl-C while the solver runs ends with the best so far and what is proven of it; a second one ends at once.

    Exit codes: 0 ok, 1 error (also a time too short to find anything), 2 usage, 3 no solution fits the limit (or none was found that
    does, or the checked one is not feasible), 130 ended by Ctrl-C.
    """
    if check is not None and (start is not None or output is not None):
        raise typer.BadParameter("--check solves nothing; leave --start and --output out", param_hint="--check")
    check_output(output, file)
    from solver_shard.files import write_whole
    from solver_shard.graph.iopddl import evaluate, file_nodes, read, read_solution, start_from
    from solver_shard.text import text_of

    if check is not None:
        checked = evaluate(file, read_solution(check))
        lines = verdict_lines(str(file), str(check), checked)
        sys.stdout.write(verdict_json(str(file), str(check), checked) if json_ else text_of(lines) + "\n")
        if not checked.feasible:
            raise typer.Exit(INFEASIBLE)
        return
    given = None if start is None else read_solution(start)
    graph = read(file)
    starts = () if given is None else (start_from(given, graph, str(start)),)
    task = Task(graph=graph, file=str(file), nodes=file_nodes(graph), objective=objective, time_limit=time_limit, work_limit=work_limit)
    from solver_shard.solve.engine import clock_of

    clock = clock_of(time_limit, work_limit)

    def text(found: Solution) -> str:
        return as_json(task, found, clock.seconds())

    def save(found: Solution) -> None:
        if output is not None:
            write_whole(output, text(found))

    with progress_lines(quiet or json_, keep=verbose) as say, catch_interrupts(say) as interrupt:
        solution = _solve(
            task,
            clock,
            starts,
            gap=gap,
            seed=seed,
            workers=workers,
            stop=interrupt,
            say=say,
            every_line=verbose,
            save=None if output is None else written_if_possible(save),
        )
        if solution.feasible:
            save(solution)
    if json_:
        sys.stdout.write(text(solution))
    elif solution.feasible:
        sys.stdout.write(text_of(report(task, solution, clock.seconds(), stages=verbose)) + "\n")
    if not solution.feasible:
        raise failure(task, solution)


def _solve(
    task: Task,
    clock: Clock,
    starts: tuple[WarmStart, ...],
    *,
    gap: float,
    seed: int,
    workers: int,
    stop: Callable[[], bool],
    say: Progress | None,
    every_line: bool,
    save: Callable[[Solution], None] | None,
) -> Solution:
    """The engine's solution; meanwhile its progress is said and its incumbent saved."""
    from solver_shard.clock import StageClock
    from solver_shard.solve.engine import solve
    from solver_shard.solve.limits import Saver
    from solver_shard.solve.solution import Solution, Status, objective_value, relative_gap

    lines = StageClock(progress=say)
    saver = None if save is None else Saver(save, every=SAVES)
    bound: int | None = None

    def halt() -> bool:
        lines.flush()
        if saver is not None:
            saver.poll()
        return stop()

    def progress(event: Event) -> None:
        nonlocal bound
        bound = event.bound
        if say is not None and every_line:
            say(str(event))
        else:
            lines.solver_event(event)

    def so_far(assignment: Ints, cost: int) -> Solution:
        peak = task.graph.peak(assignment)
        value = objective_value(task.objective, 0, cost, peak)
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

    def watch(assignment: Ints, cost: int) -> None:
        if saver is not None:
            saver.offer(lambda: so_far(assignment, cost))

    clock.halt = halt
    return solve(
        task.graph,
        objective=task.objective,
        gap=gap,
        time_limit=task.time_limit,
        work_limit=task.work_limit,
        seed=seed,
        warm_starts=starts,
        workers=workers,
        progress=progress,
        clock=clock,
        watch=watch,
    )


# What ``solve-graph`` says of a solution: as text, as JSON, or as the error that there is none.


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
