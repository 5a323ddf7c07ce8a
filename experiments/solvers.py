"""Side by side in one run: the engine, HiGHS, SCIP, plain CP-SAT and toulbar2 on choice graphs of traced models.

    python experiments/solvers.py --cache FOLDER [CASE ...] [--seconds 600] [--solvers engine,highs,scip,cp-sat,toulbar2] [--workers 2]
        [--rows experiments/solvers.jsonl] [--markdown experiments/solvers.md] [--only-table]

Cases are those of experiments/traced_graphs.py; FOLDER keeps their files. All solvers read the same file and stop at a relative gap of 1e-4
(toulbar2 has no such option: it proves the last unit). Rivals get the edge-variable model of tests/rivals.py, toulbar2 a cost function
network with one knapsack constraint per memory row. Times are of solving alone: reading and building the model are left out for everyone,
presolve is in. HiGHS, SCIP and toulbar2 run on one thread as OR-Tools and its Python interface offer them, CP-SAT and the engine on
``--workers``. *Optimum*: the first time at which the solver's incumbent is within 1e-4 of the best value that any of them found.
*Proof*: when its own bound is within 1e-4 of its own incumbent. Who does not get there counts with ``--seconds``, as does who fails for
memory. Rows that are there already are not run again, so a study that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests")]

from measure import Rows, evaluate, gap_of, load_problem, machine, number, python, run_child, table  # noqa: E402
from rivals import RIVALS, incumbents  # noqa: E402
from traced_graphs import Case, cases, made  # noqa: E402

GAP = 1e-4
SOLVERS = ("engine", *RIVALS)
KEY = ("graph", "solver", "seconds_limit", "workers")
BUILD_SECONDS = 300.0
"""Beyond its limit, for reading, building and stopping; then the process is killed."""

SMALL_S = 1.0
"""Ratios are asked for above so many seconds."""

LARGE_NODES = 5000
"""Free graphs of so many nodes are to be solved ten times faster than by anyone else."""


def run(case: Case, path: Path, solver: str, given: argparse.Namespace) -> dict[str, Any]:
    """One row: what a solver reached, and when."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run.json"
        if solver == "engine":
            options = ["--time-limit", given.seconds, "--gap", GAP, "--workers", given.workers]
            command = python(HERE / "engine_run.py", path, "-o", output, *options)
        else:
            options = ["--seconds", given.seconds, "--gap", GAP, "--workers", given.workers, "--memory-gib", given.memory_gib]
            command = python(HERE / "rival_run.py", solver, path, "-o", output, *options)
        child = run_child(
            command, seconds=given.seconds + BUILD_SECONDS, env={"PYTHONPATH": given.pythonpath} if given.pythonpath else None
        )
        found = json.loads(output.read_text()) if output.exists() else {}
    row = {"graph": case.name, "solver": solver, "seconds_limit": given.seconds, "workers": given.workers, "tied": case.tied, **child.row()}
    lines = [line for _, line in child.lines]
    if solver == "engine":
        steps = [(e[0], e[2], e[3]) for e in found.get("history", [])]
        row |= {
            "status": found.get("status", "failed"),
            "seconds": found.get("solve_s"),
            "bound": found.get("bound"),
            "nodes": found.get("nodes"),
        }
    else:
        row |= {key: found.get(key) for key in ("seconds", "bound", "build_seconds", "size")} | {"status": found.get("status", "failed")}
        steps = incumbents(solver, lines, found.get("unit", 1.0)) if solver in ("highs", "toulbar2") else told(lines)
    row["steps"] = thinned(steps)
    if found.get("assignment"):
        exact = evaluate(load_problem(path), found["assignment"])
        row["value"] = exact["cost"] if exact["feasible"] and not exact["forbidden"] else None
        row["broken"] = row["value"] is None
    if row["status"] == "failed":
        row["error"] = "\n".join(lines[-8:])
    return row


def told(lines: Sequence[str]) -> list[tuple[float, float | None, float | None]]:
    """The ``incumbent SECONDS VALUE BOUND`` lines of a rival's process."""
    parts = [line.split() for line in lines if line.startswith("incumbent ")]
    return [(float(p[1]), None if p[2] == "None" else float(p[2]), None if p[3] == "None" else float(p[3])) for p in parts if len(p) == 4]


def thinned(steps: Sequence[tuple[float, float | None, float | None]]) -> list[list[float | None]]:
    """Only the steps at which value or bound changed."""
    kept: list[list[float | None]] = []
    value = bound = None
    for at, new_value, new_bound in steps:
        better = new_value is not None and (value is None or new_value < value)
        tighter = new_bound is not None and (bound is None or new_bound > bound)
        value, bound = new_value if better else value, new_bound if tighter else bound
        if better or tighter:
            kept.append([round(at, 3), value, bound])
    return kept


def reached(row: dict[str, Any], best: float | None) -> tuple[float | None, float | None]:
    """Seconds until the optimum and until the proof; None where they were not reached within the limit and its twentieth."""
    optimum = proof = None
    if best is not None:
        optimum = next((at for at, value, _ in row["steps"] if value is not None and value <= best * (1 + GAP)), None)
        if optimum is None and row.get("value") is not None and row["value"] <= best * (1 + GAP):
            optimum = row["seconds"]
    if row["status"] in ("optimal", "gap") and row.get("value") is not None:
        closed = [
            at for at, value, bound in row["steps"] if value is not None and bound is not None and (value - bound) <= GAP * abs(value)
        ]
        proof = min([row["seconds"], *closed])
    if proof is not None and optimum is not None:
        optimum = min(optimum, proof)
    most = row["seconds_limit"] * 1.05
    return None if optimum is None or optimum > most else optimum, None if proof is None or proof > most else proof


def markdown(rows: Sequence[dict[str, Any]], given: argparse.Namespace) -> str:
    """The whole report."""
    limit = given.seconds
    lines = [
        "# Solvers side by side on choice graphs of traced models",
        "",
        f"By `python experiments/solvers.py --cache FOLDER --seconds {limit:g} --workers {given.workers}`, {machine()}.",
        "Seconds of solving until the optimum / until the proof, both to 1e-4; a dash: not within the limit, counted as the limit. In",
        "brackets how many times as long as the engine to the proof.",
        "",
    ]
    solvers = [solver for solver in SOLVERS if any(row["solver"] == solver for row in rows)]
    body, verdicts = [], []
    for graph in dict.fromkeys(row["graph"] for row in rows):
        own = {row["solver"]: row for row in rows if row["graph"] == graph}
        best = min((row["value"] for row in own.values() if row.get("value") is not None), default=None)
        times = {solver: reached(row, best) for solver, row in own.items()}
        ours = times.get("engine", (None, None))[1]
        counted = {solver: limit if proof is None else proof for solver, (_, proof) in times.items()}
        cells = []
        for solver in solvers:
            if solver not in times:
                cells.append("")
                continue
            text = " / ".join("-" if at is None else f"{at:.2f}" for at in times[solver])
            if own[solver].get("broken"):
                text += ", breaks the limit"
            if own[solver]["status"] == "failed":
                text = f"failed ({own[solver]['tree_mib'] / 1024:.0f} GiB)"
            cells.append(
                text if solver == "engine" or "engine" not in counted else f"{text} ({counted[solver] / max(counted['engine'], 1e-3):.1f})"
            )
        nodes = own.get("engine", {}).get("nodes")
        size = max((row.get("size") or 0 for row in own.values()), default=0)
        body.append([graph, nodes, number(size), number(best), *cells])
        rivals = {solver: seconds for solver, seconds in counted.items() if solver != "engine"}
        if rivals and "engine" in counted:
            verdicts += judged(graph, own["engine"], counted["engine"], rivals, ours)
    lines += [*table(["graph", "nodes", "model variables", "best value", *solvers], body), "", "## Targets", "", *verdicts, ""]
    failed = [row for row in rows if row["status"] == "failed"]
    if failed:
        lines += ["## Runs that failed", ""]
        lines += [
            f"- {row['solver']} on {row['graph']}: exit {row['code']}, {row['tree_mib']} MiB: {row['error'][-200:]!r}" for row in failed
        ]
    return "\n".join(lines) + "\n"


def judged(graph: str, row: dict[str, Any], engine: float, rivals: dict[str, float], ours: float | None) -> list[str]:
    """What the targets say of one graph."""
    fastest = min(rivals, key=lambda solver: rivals[solver])
    said = []
    if engine > SMALL_S:
        ratio = engine / max(rivals[fastest], 1e-3)
        met = "yes" if ours is not None and ratio <= 1.5 else "**no**"
        said.append(f"- {graph}: at most 1.5 times the best rival ({fastest}): {ratio:.2f}: {met}")
    else:
        said.append(f"- {graph}: proven in {engine:.2f} s, below the second from which ratios count")
    if not row["tied"] and (row.get("nodes") or 0) >= LARGE_NODES:
        least = rivals[fastest] / max(engine, 1e-3)
        met = "yes" if ours is not None and least >= 10 else "**no**"
        said.append(f"- {graph}: at least 10 times faster than each: {least:.1f} ({fastest}): {met}")
    gap = gap_of(row.get("value"), row.get("bound"))
    if ours is None:
        said.append(f"- {graph}: the engine has not proven 1e-4; its gap is {'unknown' if gap is None else f'{gap:.3%}'}")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names, or starts of names; default all")
    parser.add_argument("--cache", type=Path, required=True, help="folder of the graphs' files")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--solvers", default=",".join(SOLVERS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory-gib", type=float, default=14.0, help="address space that a rival may use")
    parser.add_argument("--pythonpath", help="where pytoulbar2 is, if not installed")
    parser.add_argument("--rows", type=Path, default=HERE / "solvers.jsonl")
    parser.add_argument("--markdown", type=Path, default=HERE / "solvers.md")
    parser.add_argument("--only-table", action="store_true", help="run nothing, write the table from the rows that are there")
    given = parser.parse_args()
    solvers = given.solvers.split(",")
    if unknown := set(solvers) - set(SOLVERS):
        parser.error(f"no solver {', '.join(sorted(unknown))}; solvers: {', '.join(SOLVERS)}")
    known = cases()
    wanted = [case for name, case in known.items() if not given.cases or name.startswith(tuple(given.cases))]
    if not wanted:
        parser.error(f"no such case; cases: {', '.join(known)}")
    store = Rows(given.rows, KEY)
    for case in [] if given.only_table else wanted:
        for solver in solvers:
            key = {"graph": case.name, "solver": solver, "seconds_limit": given.seconds, "workers": given.workers}
            if store.has(key):
                continue
            store.add(row := run(case, made(case, given.cache), solver, given))
            print(time.strftime("%H:%M:%S"), case.name, solver, row["status"], row.get("value"), row.get("seconds"), flush=True)
    names = {case.name for case in wanted}
    own = [r for r in store.rows if r["graph"] in names and r["seconds_limit"] == given.seconds and r["workers"] == given.workers]
    given.markdown.write_text(markdown(own, given))
    print(given.markdown.read_text())


if __name__ == "__main__":
    main()
