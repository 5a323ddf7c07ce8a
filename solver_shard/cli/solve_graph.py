"""``solver-shard solve-graph``: a choice graph of any origin in (an IOPDDL file), the cheapest assignment and its proof out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from solver_shard.cli import INFEASIBLE
from solver_shard.cli.interrupt import catch_interrupts
from solver_shard.cli.options import Objective
from solver_shard.cli.output import check_output, written_if_possible
from solver_shard.cli.progress import progress_lines

if TYPE_CHECKING:
    from solver_shard.choice.graph import Ints
    from solver_shard.cli.graph_report import Task
    from solver_shard.solve.clock import Clock
    from solver_shard.solve.solution import Event, Solution, WarmStart
    from solver_shard.stages import Progress

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
    objective: Annotated[Objective, typer.Option(help="Minimise the total cost, or the peak usage.")] = Objective.TIME,
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
    from solver_shard.choice.iopddl import evaluate, file_nodes, read
    from solver_shard.choice.solution_file import read_solution, start_from
    from solver_shard.cli.graph_report import Task, as_json, failure, report, verdict_json, verdict_lines
    from solver_shard.files import write_whole
    from solver_shard.names import text_of

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
    task = Task(
        graph=graph, file=str(file), nodes=file_nodes(graph), objective=objective.value, time_limit=time_limit, work_limit=work_limit
    )
    from solver_shard.solve.engine import clock_of  # after the files were read: what is wrong with them is said at once

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
    from solver_shard.solve.anytime import Saver
    from solver_shard.solve.engine import solve
    from solver_shard.solve.solution import Solution, Status, objective_value, relative_gap
    from solver_shard.stages import StageClock

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
