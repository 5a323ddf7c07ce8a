"""Graphs that are all circles: incumbents of the engine beside plain CP-SAT and HiGHS, after the same seconds.

    python experiments/loopy_graphs.py [--seeds 14] [--nodes 60] [--seconds 60] [--rows experiments/loopy_graphs.jsonl]
        [--markdown experiments/loopy_graphs.md] [--only-table]

Three families of tests/random_graphs.py (edges anywhere, a grid, a tree with chords), each with a limit that binds. Every solver has one
worker, no gap, and a process of its own; the rivals solve the edge-variable model of tests/rivals.py. A row holds what was known after
10, 60 and 300 seconds, as far as it ran; a solver that has proven its optimum keeps it. Rivals are not run where the engine had proven its
optimum by the first mark: nothing is better. Rows that are there already are not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests")]

from measure import Rows, evaluate, load_problem, machine, number, python, run_child, table  # noqa: E402
from random_graphs import FAMILIES, loopy_graph  # noqa: E402
from rivals import incumbents  # noqa: E402

from solver_shard.graph.iopddl import write  # noqa: E402

MARKS = (10.0, 60.0, 300.0)
SOLVERS = ("engine", "cp-sat", "highs")
KEY = ("by", "family", "nodes", "seed", "seconds")


def run(by: str, path: Path, seconds: float) -> dict[str, Any]:
    """What a solver knew at each mark, and what it said at the end, checked by an evaluator of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run.json"
        if by == "engine":
            command = python(HERE / "engine_run.py", path, "-o", output, "--time-limit", seconds, "--workers", 1, "--gap", 0)
        else:
            command = python(HERE / "rival_run.py", by, path, "-o", output, "--seconds", seconds, "--workers", 1, "--gap", 0)
        child = run_child(command, seconds=3 * seconds + 120)
        if not output.exists():
            return {"error": "\n".join(line for _, line in child.lines[-15:])}
        answer = json.loads(output.read_text())
    if by == "engine":
        events = [(event[0], event[2]) for event in answer["history"] if event[2] is not None]
        value, ended = answer["cost"], answer["solve_s"]
    else:
        lines = [line for _, line in child.lines]
        if by == "cp-sat":
            events = [(float(w[1]), float(w[2])) for line in lines if (w := line.split()) and w[0] == "incumbent"]
        else:
            events = [(s, v) for s, v, _ in incumbents(by, lines, answer["unit"]) if v is not None]
        value, ended = answer["value"], answer["seconds"]
    exact = evaluate(load_problem(path), answer["assignment"]) if answer["assignment"] else None
    known = [min((round(v) for s, v in events if s <= mark), default=None) for mark in MARKS]
    return {
        "known": [v if ended > mark else value for mark, v in zip(MARKS, known, strict=True)],
        "value": value,
        "bound": answer["bound"],
        "proven": answer["status"] == "optimal",
        "valid": exact is not None and exact["feasible"] and not exact["forbidden"] and exact["cost"] == value,
        "ended": ended,
        "cpu_s": child.cpu_s,
    }


def markdown(rows: Sequence[dict[str, Any]], given: argparse.Namespace) -> str:
    """Counts by mark, then every graph."""
    graphs = list(dict.fromkeys((row["family"], row["nodes"], row["seed"]) for row in rows))
    by = {(row["by"], row["family"], row["nodes"], row["seed"]): row for row in rows if "error" not in row}
    lines = [
        "# Graphs that are all circles: incumbents after the same seconds",
        "",
        f"By `python experiments/loopy_graphs.py --seeds {given.seeds} --nodes {given.nodes} --seconds {given.seconds:g}`, {machine()}.",
        "One worker each. A value with * is proven. Worse: graphs on which the engine's incumbent is above the rival's at that time.",
        "",
    ]
    body = []
    for i, mark in enumerate(MARKS):
        if mark > given.seconds:
            continue
        for rival in SOLVERS[1:]:
            proven = sum("error" not in by["engine", *g] and _at_once(by["engine", *g]) for g in graphs if ("engine", *g) in by)
            pairs = [
                (by["engine", *g]["known"][i], by[rival, *g]["known"][i]) for g in graphs if ("engine", *g) in by and (rival, *g) in by
            ]
            a = [float("inf") if x is None else x for x, _ in pairs]
            b = [float("inf") if y is None else y for _, y in pairs]
            counts = [sum(x < y for x, y in zip(a, b, strict=True)), sum(x == y for x, y in zip(a, b, strict=True))]
            body.append([f"{mark:g} s", rival, proven, len(pairs), *counts, len(pairs) - sum(counts)])
    lines += [*table(["after", "rival", "proven at once", "other graphs", "engine better", "equal", "engine worse"], body), ""]
    shown = [mark for mark in MARKS if mark <= given.seconds]
    head = ["graph", *(f"{solver} {mark:g} s" for solver in SOLVERS for mark in shown), "engine's bound"]
    body = []
    for g in graphs:
        cells: list[object] = [f"{g[0]} {g[1]}, seed {g[2]}"]
        for solver in SOLVERS:
            row = by.get((solver, *g))
            for i in range(len(shown)):
                value = None if row is None else row["known"][i]
                cells.append("-" if row is None else number(value) + ("*" if row["proven"] and row["ended"] <= MARKS[i] else ""))
        body.append([*cells, number(by["engine", *g]["bound"]) if ("engine", *g) in by else "-"])
    lines += [*table(head, body), ""]
    lines += [f"- failed: {row}" for row in rows if "error" in row or not row["valid"]]
    return "\n".join(lines) + "\n"


def _at_once(row: dict[str, Any]) -> bool:
    """Whether an optimum was proven by the first mark."""
    return bool(row.get("proven")) and row["ended"] <= MARKS[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=14, help="graphs of each family")
    parser.add_argument("--nodes", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rows", type=Path, default=HERE / "loopy_graphs.jsonl")
    parser.add_argument("--markdown", type=Path, default=HERE / "loopy_graphs.md")
    parser.add_argument("--only-table", action="store_true")
    given = parser.parse_args()
    store = Rows(given.rows, KEY)
    for seed in range(0 if given.only_table else given.seeds):
        for family in FAMILIES:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "graph.json"
                write(loopy_graph(np.random.default_rng(seed), family, given.nodes), path)
                for by in SOLVERS:
                    row = {"by": by, "family": family, "nodes": given.nodes, "seed": seed, "seconds": given.seconds}
                    if not store.has(row):
                        store.add(row := row | run(by, path, given.seconds))
                        print(row, flush=True)
                    if by == "engine" and store.has(row) and _at_once(next(r for r in store.rows if all(r[k] == row[k] for k in KEY))):
                        break
    own = [row for row in store.rows if row["nodes"] == given.nodes and row["seconds"] == given.seconds and row["seed"] < given.seeds]
    given.markdown.write_text(markdown(own, given))
    print(given.markdown.read_text())


if __name__ == "__main__":
    main()
