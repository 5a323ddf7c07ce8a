"""The engine on choice graphs of transformer steps: time, work and memory until a gap of 1e-4, and HiGHS alone on the same files.

    python experiments/choice_graphs.py FOLDER [--seeds 0,1,2] [--time-limit 180] [--workers 2] [--highs-seconds 1800]
        [--rows experiments/choice_graphs.jsonl] [--markdown experiments/choice_graphs.md] [--only-table]

FOLDER holds IOPDDL files (``*.json.gz``); those named in TARGETS have a time to keep. Every run is a process of its own; solutions are
checked by an evaluator that shares no code with the product. HiGHS solves the edge-variable model of tests/rivals.py, without presolve of
ours; where it finishes it confirms the optimum. Rows that are there already are not run again.
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
sys.path.insert(0, str(HERE))

from measure import Rows, evaluate, gap_of, load_problem, machine, number, python, run_child, table  # noqa: E402

GAP = 1e-4
TARGETS = {
    "llama_2axis_32x8_1layer": 5.0,
    "llama_2axis_32x8_4layer": 15.0,
    "llama_3axis_8x4x8_1layer": 30.0,
    "llama_3axis_8x4x8_2layer": 90.0,
}
"""Seconds within which the gap is to be closed, by the start of the file's name."""

KEY = ("by", "instance", "seed", "time_limit", "workers")


def target(name: str) -> float | None:
    return next((seconds for start, seconds in TARGETS.items() if name.startswith(start)), None)


def run_engine(path: Path, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """One row: when the engine's gap closed, by its own history, and what the run used."""
    name = path.name.split(".json")[0]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run.json"
        options = ["--time-limit", given.time_limit, "--seed", seed, "--workers", given.workers, "--gap", GAP]
        child = run_child(python(HERE / "engine_run.py", path, "-o", output, *options), seconds=given.time_limit + 120)
        found = json.loads(output.read_text()) if output.exists() else None
    row = {"by": "engine", "instance": name, "seed": seed, "time_limit": given.time_limit, "workers": given.workers, **child.row()}
    if found is None:
        return row | {"valid": False, "error": "\n".join(line for _, line in child.lines[-15:])}
    assignment, history = found.pop("assignment"), found["history"]
    exact = evaluate(load_problem(path), assignment) if assignment else None
    valid = exact is not None and exact["feasible"] and not exact["forbidden"] and exact["cost"] == found["cost"]
    closed = next((e for e in history if e[2] is not None and e[3] is not None and (gap_of(e[2], e[3]) or 0.0) <= GAP), None)
    row |= found | {"valid": valid, "gap_s": closed[0] if closed else None, "gap_work": closed[1] if closed else None}
    if valid and exact is not None:
        near = [e for e in history if e[2] is not None and e[2] <= exact["cost"] * (1 + GAP)]
        row["incumbent_s"] = near[0][0] if near else None
        row["exact_cost"] = exact["cost"]
    return row


def run_highs(path: Path, given: argparse.Namespace) -> dict[str, Any]:
    """One row: HiGHS alone."""
    name = path.name.split(".json")[0]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run.json"
        options = ["--seconds", given.highs_seconds, "--gap", GAP, "--workers", given.workers, "--memory-gib", given.highs_memory_gib]
        child = run_child(python(HERE / "rival_run.py", "highs", path, "-o", output, *options), seconds=given.highs_seconds + 300)
        found = json.loads(output.read_text()) if output.exists() else None
    row = {"by": "highs", "instance": name, "seed": 0, "time_limit": given.highs_seconds, "workers": given.workers, **child.row()}
    if found is None:
        return row | {"status": "failed", "error": "\n".join(line for _, line in child.lines[-15:])}
    assignment = found.pop("assignment")
    return row | found | {"checked": evaluate(load_problem(path), assignment) if assignment else None}


def markdown(rows: Sequence[dict[str, Any]], given: argparse.Namespace) -> str:
    """The whole report."""
    names = list(dict.fromkeys(row["instance"] for row in rows))
    lines = [
        "# Choice graphs of transformer steps: time to a gap of 1e-4",
        "",
        f"By `python experiments/choice_graphs.py FOLDER --time-limit {given.time_limit:g} --workers {given.workers}`, {machine()}.",
        "Seconds are of the solver (presolve included, reading not) and the worst of the seeds; work counts units that do not depend on",
        "the machine's load; memory is of all processes of a run together, sampled twice a second.",
        "",
    ]
    body, told = [], []
    for name in names:
        engine = [row for row in rows if row["instance"] == name and row["by"] == "engine"]
        closed = [row for row in engine if row.get("valid") and row.get("gap_s") is not None]
        wanted, all_closed = target(name), bool(engine) and len(closed) == len(engine)
        worst = max((row["gap_s"] for row in closed), default=None)
        first = engine[0] if engine else {}
        body.append(
            [
                name,
                first.get("nodes"),
                first.get("edges"),
                f"{len(closed)} of {len(engine)}",
                worst,
                None if not closed else f"{max(row['gap_work'] for row in closed):.1f}",
                None if wanted is None else f"{wanted:g}",
                None if wanted is None else "yes" if all_closed and worst is not None and worst <= wanted else "**no**",
                number(min((row["exact_cost"] for row in engine if row.get("valid")), default=None)),
                number(max((row["bound"] for row in engine if row.get("bound") is not None), default=None)),
                max((row.get("read_s", 0) for row in engine), default=None),
                f"{max((row['tree_mib'] for row in engine), default=0)} MiB",
            ]
        )
        for row in (r for r in rows if r["instance"] == name and r["by"] == "highs"):
            own = min((r["exact_cost"] for r in engine if r.get("valid")), default=None)
            told.append([name, row["status"], number(row.get("value")), number(row.get("bound")), *confirmation(row, own)])
            told[-1] += [
                f"{row['seconds']:.1f} s" if "seconds" in row else f"{row['wall_s']:.0f} s, then stopped",
                f"{row['tree_mib']} MiB",
            ]
    head = ["graph", "nodes", "edges", "closed", "gap closed after s", "work", "target s", "met", "cost", "bound", "read s", "memory"]
    lines += [*table(head, body), ""]
    head = ["graph", "HiGHS says", "its cost", "its bound", "agrees", "its time", "memory"]
    lines += ["## HiGHS alone, confirming", "", *table(head, told), ""]
    failed = [row for row in rows if row.get("error") or (row["by"] == "engine" and not row.get("valid"))]
    lines += [
        f"- failed: {row['by']} on {row['instance']}, seed {row['seed']}: {str(row.get('error', 'wrong solution'))[-400:]}"
        for row in failed
    ]
    return "\n".join(lines) + "\n"


def confirmation(row: dict[str, Any], own: int | None) -> list[str]:
    """Whether HiGHS' proof leaves room for something better than ours by more than the gap."""
    if row["status"] != "optimal" or own is None:
        return ["did not finish" if row["status"] != "optimal" else "nothing to compare"]
    return ["yes" if abs(own - row["value"]) <= 2 * GAP * own else f"**no**: ours {number(own)}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--instances", default="", help="starts of file names, by commas; default all in the folder")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--time-limit", type=float, default=180.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--highs-seconds", type=float, default=1800.0, help="for HiGHS alone; 0 leaves it out")
    parser.add_argument("--highs-memory-gib", type=float, default=12.0)
    parser.add_argument("--rows", type=Path, default=HERE / "choice_graphs.jsonl")
    parser.add_argument("--markdown", type=Path, default=HERE / "choice_graphs.md")
    parser.add_argument("--only-table", action="store_true", help="run nothing, write the table from the rows that are there")
    given = parser.parse_args()
    files = sorted(path for path in given.folder.iterdir() if path.name.endswith((".json", ".json.gz")))
    starts = tuple(name for name in given.instances.split(",") if name)
    files = [path for path in files if not starts or path.name.startswith(starts)]
    if not files:
        parser.error(f"no such IOPDDL file in {given.folder}")
    store = Rows(given.rows, KEY)
    names = {path: path.name.split(".json")[0] for path in files}
    for seed in [] if given.only_table else [int(text) for text in given.seeds.split(",")]:
        for path, name in names.items():
            wanted = {"by": "engine", "instance": name, "seed": seed, "time_limit": given.time_limit, "workers": given.workers}
            if not store.has(wanted):
                store.add(row := run_engine(path, seed, given))
                print(
                    time.strftime("%H:%M:%S"), name, "seed", seed, "closed after", row.get("gap_s"), "s, cost", row.get("cost"), flush=True
                )
    for path, name in names.items() if given.highs_seconds > 0 and not given.only_table else ():
        wanted = {"by": "highs", "instance": name, "seed": 0, "time_limit": given.highs_seconds, "workers": given.workers}
        if not store.has(wanted):
            store.add(row := run_highs(path, given))
            print(time.strftime("%H:%M:%S"), name, "HiGHS", row["status"], row.get("value"), row.get("seconds"), "s", flush=True)
    limits = {"engine": given.time_limit, "highs": given.highs_seconds}
    own = [
        r for r in store.rows if r["instance"] in names.values() and r["workers"] == given.workers and r["time_limit"] == limits[r["by"]]
    ]
    given.markdown.write_text(markdown(own, given))
    print(given.markdown.read_text())


if __name__ == "__main__":
    main()
