"""``solver-shard solve``: a model in, a plan out; ``solver-shard solve-graph``: a choice graph of any origin (an IOPDDL file) in, the
cheapest assignment and its proof out."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from solver_shard.cli.options import (
    OUTPUT,
    Config,
    Debug,
    Model,
    Quiet,
    check_output,
    given_model,
    takes_options,
    written_if_possible,
)
from solver_shard.cli.terminal import INFEASIBLE, catch_interrupts, progress_lines, time_out

if TYPE_CHECKING:
    from solver_shard.graph.iopddl import FileEvaluation


@takes_options("solve")
def solve(
    context: typer.Context,
    model: Model = None,
    config: Config = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the plan to this JSON file, and the best so far while the solver runs.",
            show_default=False,
            metavar="FILE",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of the report.", rich_help_panel=OUTPUT)] = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Find the fastest sharding of a model on a mesh within a memory limit, and prove how far from optimal it can be.

    Ctrl-C while the solver runs ends with the best plan so far and what is proven of it; a second one ends at once.

    Exit codes: 0 ok, 1 error, 2 usage, 3 no plan fits the memory limit or the pins, 130 ended by Ctrl-C.
    """
    source = given_model(model, config)
    check_output(output, config, *options["rules"])
    from solver_shard.api import optimize
    from solver_shard.errors import printable
    from solver_shard.plan.io import plan_to_json, save_plan
    from solver_shard.plan.summary import baked_in

    with progress_lines(quiet) as progress, catch_interrupts(progress) as interrupt, time_out(options["total_time_limit"], interrupt):
        plan = optimize(
            source,
            **options,
            command=shlex.join(["solver-shard", *context.find_root().obj]),
            progress=progress,
            stop=interrupt,
            incumbent=None if output is None else written_if_possible(lambda plan: save_plan(plan, output)),
        )
        if output is not None:
            save_plan(plan, output)
    if not quiet:
        sys.stderr.writelines(f"note: {printable(line)}\n" for line in baked_in(plan))
    sys.stdout.write(plan_to_json(plan) if as_json else f"{plan}\n")


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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the report, and no progress.")] = False,
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

    if check is not None:
        _check(file, check, as_json)
        return
    from solver_shard.solve.graph_file import SolvedGraph
    from solver_shard.solve.graph_file import solve_graph as solve

    def save(solved: SolvedGraph) -> None:
        if output is not None:
            write_whole(output, solved.to_json())

    with progress_lines(quiet or as_json, keep=verbose) as say, catch_interrupts(say) as interrupt:
        solved = solve(
            file,
            objective=objective,
            time_limit=time_limit,
            work_limit=work_limit,
            gap=gap,
            seed=seed,
            workers=workers,
            start=start,
            progress=say,
            every_event=verbose,
            stop=interrupt,
            incumbent=None if output is None else written_if_possible(save),
        )
        if solved.error is None:
            save(solved)
    if as_json or solved.error is None:
        sys.stdout.write(solved.to_json() if as_json else f"{solved.text(stages=verbose)}\n")
    if solved.error is not None:
        raise solved.error


def _check(file: Path, solution: Path, as_json: bool) -> None:
    """Say whether a solution is one, and what it costs; exit with 3 where it is none."""
    from solver_shard.graph.iopddl import evaluate, read_solution
    from solver_shard.text import text_of

    checked = evaluate(file, read_solution(solution))
    shown = verdict_json(str(file), str(solution), checked) if as_json else text_of(verdict_lines(str(file), str(solution), checked)) + "\n"
    sys.stdout.write(shown)
    if not checked.feasible:
        raise typer.Exit(INFEASIBLE)


def verdict_lines(file: str, solution: str, checked: FileEvaluation) -> list[str]:
    """Lines about a checked solution."""
    from solver_shard.graph.iopddl import usage_text

    wrong = []
    if checked.limit is not None and checked.peak > checked.limit:
        wrong.append(f"{checked.peak - checked.limit:,} above the limit")
    if checked.forbidden:
        wrong.append(f"{checked.forbidden:,} of the chosen costs are 10^18, which means forbidden (they count as they are)")
    rows = [
        ("status", f"infeasible: {'; '.join(wrong)}" if wrong else "feasible"),
        ("cost", f"{checked.cost:,}"),
        ("peak", usage_text(checked.peak, checked.limit)),
    ]
    return [f"{solution}: a solution of {file}", *(f"  {name:<8}{text}" for name, text in rows)]


def verdict_json(file: str, solution: str, checked: FileEvaluation) -> str:
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
