"""How solving grows with the number of layers, free and tied, and two large steps that have 300 s: gap, time, memory.

    python experiments/layers.py [--studies growth,large] [--layers 2,4,8,16,32,64,126] [--model llama3-8b] [--mesh dp=32,tp=8]
        [--time-limit 300] [--growth-limit 300] [--growth-gap 1e-3] [--rows experiments/layers.jsonl] [--markdown experiments/layers.md]
        [--only-table]

*growth*: the model with other numbers of layers, tied and free: seconds of solving until a gap of ``--growth-gap``; each twice, with the
memory of an H100 (70 GiB less its reserve) and with one limit for all so tight that memory decides (``--tight``, per layer, on top of what
a step of one layer needs). *large*: free Llama-3-8B, batch 64 x 8192, on dp=32,tp=8 and tied Llama-3-405B, batch 512 x 8192, on
dp=64,cp=16,tp=8, both within 70GiB: the gap after ``--time-limit`` seconds of solving, to be at most 1%.

Every run is a process of its own, the whole job from tracing to the plan; seconds of solving are those of the plan's certificate. Rows
that are there already are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from measure import ROOT, Rows, gap_of, machine, number, python, run_child, table  # noqa: E402
from traced_graphs import config  # noqa: E402

KEY = ("model", "layers", "mesh", "batch", "seq", "memory", "problem", "time_limit", "stop_gap")
SLACK_S = 1500.0
"""Beyond the limits, for tracing, lowering and the plan; then a run is killed."""

LARGE = (
    {"model": "llama3-8b", "layers": None, "mesh": "dp=32,tp=8", "batch": 64, "seq": 8192, "memory": "70GiB", "problem": "free"},
    {"model": "llama3-405b", "layers": None, "mesh": "dp=64,cp=16,tp=8", "batch": 512, "seq": 8192, "memory": "70GiB", "problem": "tied"},
)
WANTED_GAP = 0.01


def growth(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs of the first study: few layers first, so that a study that is stopped has something to say."""
    what = {"model": given.model, "mesh": given.mesh, "batch": given.batch, "seq": 8192}
    found = []
    for layers in map(int, given.layers.split(",")):
        for problem in ("tied", "free"):
            for memory in ("70GiB", f"{given.tight_base + given.tight * layers:g}GiB") if given.tight else ("70GiB",):
                found.append({**what, "layers": layers, "memory": memory, "problem": problem})
    return found


def run(what: dict[str, Any], time_limit: float, stop_gap: float) -> dict[str, Any]:
    """One row: the whole command in a process of its own, its progress with times, and the certificate of its plan."""
    with tempfile.TemporaryDirectory() as folder, config(what["model"], what["layers"]) as source:
        facts_path = Path(folder) / "facts.json"
        child = run_child(
            python(
                HERE / "layers_run.py",
                source,
                *("--mesh", what["mesh"], "--batch", what["batch"], "--seq", what["seq"], "--memory", what["memory"]),
                *("--problem", what["problem"], "--time-limit", time_limit, "--gap", stop_gap, "-o", facts_path),
            ),
            seconds=time_limit + SLACK_S,
            cwd=ROOT,
        )
        found = json.loads(facts_path.read_text()) if facts_path.exists() else {"error": "\n".join(line for _, line in child.lines[-8:])}
    return {**what, "time_limit": time_limit, "stop_gap": stop_gap, **child.row(), **found}


def at_gap(row: dict[str, Any], gap: float) -> float | None:
    """Seconds of solving until the gap was closed, by the progress lines and the certificate; None where it was not."""
    final = gap_of(row.get("objective"), row.get("bound"))
    for seconds, objective, bound in row.get("history", []):
        if objective is not None and bound is not None and (gap_of(objective, bound) or 0.0) <= gap:
            return float(seconds)
    return None if final is None or final > gap else float(row["solve_s"])


def slope(points: Sequence[tuple[int, float]]) -> float | None:
    """The exponent p of seconds = c * layers^p by least squares in logarithms; 1 is linear.

    >>> round(slope([(2, 1.0), (4, 2.0), (8, 4.0)]), 6)
    1.0
    """
    logs = [(math.log(layers), math.log(max(seconds, 0.05))) for layers, seconds in points]
    if len(logs) < 2:
        return None
    mean_x, mean_y = sum(x for x, _ in logs) / len(logs), sum(y for _, y in logs) / len(logs)
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    return None if spread == 0 else sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread


def markdown(rows: Sequence[dict[str, Any]], given: argparse.Namespace) -> str:
    """The whole report."""
    lines = ["# Time by number of layers, and two large steps", "", f"By `python experiments/layers.py`, {machine()}.", ""]
    large = [row for row in rows if row["time_limit"] == given.time_limit and row["stop_gap"] == given.gap]
    if large:
        body = []
        for row in large:
            gap = gap_of(row.get("objective"), row.get("bound"))
            met = "-" if gap is None else "yes" if gap <= WANTED_GAP and row.get("problem_is") == row["problem"] else "**no**"
            body.append(
                [
                    f"{row['model']}, {row['batch']} x {row['seq']}, {row['mesh']}, {row['memory']}",
                    row["problem"],
                    number(row.get("choices")),
                    row.get("status", "failed"),
                    "-" if gap is None else f"{gap:.4%}",
                    met,
                    at_gap(row, WANTED_GAP),
                    row.get("solve_s"),
                    f"{row['wall_s']:.0f} s",
                    f"{row['tree_mib'] / 1024:.2f} GiB",
                ]
            )
        head = ["step", "problem", "choices", "status", "gap", "at most 1%", "1% after s", "solving s", "whole", "memory"]
        lines += [f"## Within {given.time_limit:g} s of solving", "", *table(head, body), ""]
    grown = [row for row in rows if row["time_limit"] == given.growth_limit and row["stop_gap"] == given.growth_gap]
    lines += [f"## By number of layers, until a gap of {given.growth_gap:g}", ""] if grown else []
    for problem in ("tied", "free"):
        for tight in (False, True):
            own = [r for r in grown if r["problem"] == problem and (r["memory"] != "70GiB") == tight and r["layers"] is not None]
            if not own:
                continue
            own.sort(key=lambda row: row["layers"])
            body = []
            for row in own:
                gap = gap_of(row.get("objective"), row.get("bound"))
                body.append(
                    [
                        row["layers"],
                        row["memory"],
                        number(row.get("choices")),
                        row.get("trace_s"),
                        row.get("lower_s"),
                        row.get("solve_s"),
                        None if row.get("solve_s") is None else f"{row['solve_s'] / row['layers']:.2f}",
                        at_gap(row, given.growth_gap),
                        "-" if gap is None else f"{gap:.4%}",
                        row.get("status", "failed"),
                        f"{row['tree_mib'] / 1024:.2f} GiB",
                    ]
                )
            head = [
                "layers",
                "memory",
                "choices",
                "trace s",
                "lower s",
                "solve s",
                "per layer",
                "gap closed after s",
                "gap",
                "status",
                "RSS",
            ]
            points = [(row["layers"], row["solve_s"]) for row in own if row.get("status") in ("optimal", "gap")]
            power = slope(points)
            said = f"{own[0]['model']} on {own[0]['mesh']}, {problem}, {'tight memory' if tight else '70 GiB'}"
            if power is not None:
                verdict = "linear or better" if power <= 1.05 else "**more than linear**"
                said += f": solving grows as layers^{power:.2f} over {len(points)} of {len(own)} sizes ({verdict})"
            lines += [said, "", *table(head, body), ""]
    failed = [row for row in rows if row.get("error")]
    lines += [
        f"- failed: {row['model']}, {row['layers']} layers, {row['problem']}, {row['memory']}: {row['error'][-400:]}" for row in failed
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", default="large,growth")
    parser.add_argument("--layers", default="2,4,8,16,32,64,126")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--mesh", default="dp=32,tp=8")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--time-limit", type=float, default=300.0, help="of the large steps")
    parser.add_argument("--gap", type=float, default=1e-4, help="at which the large steps may stop")
    parser.add_argument("--growth-limit", type=float, default=300.0)
    parser.add_argument("--growth-gap", type=float, default=1e-3)
    parser.add_argument(
        "--tight-base", type=float, default=7.5, help="GiB of the tight limit that do not grow with layers, the reserve included"
    )
    parser.add_argument("--tight", type=float, default=0.45, help="GiB per layer of the tight limit; 0 leaves those runs out")
    parser.add_argument("--rows", type=Path, default=HERE / "layers.jsonl")
    parser.add_argument("--markdown", type=Path, default=HERE / "layers.md")
    parser.add_argument("--only-table", action="store_true", help="run nothing, write the table from the rows that are there")
    given = parser.parse_args()
    studies = given.studies.split(",")
    if unknown := set(studies) - {"large", "growth"}:
        parser.error(f"no study {', '.join(sorted(unknown))}; studies: large, growth")
    store = Rows(given.rows, KEY)
    plan: list[tuple[dict[str, Any], float, float]] = []
    if "large" in studies:
        plan += [(what, given.time_limit, given.gap) for what in LARGE]
    if "growth" in studies:
        plan += [(what, given.growth_limit, given.growth_gap) for what in growth(given)]
    for what, limit, stop in [] if given.only_table else plan:
        if store.has({**what, "time_limit": limit, "stop_gap": stop}):
            continue
        store.add(row := run(what, limit, stop))
        said = (what["model"], what["layers"], what["problem"], what["memory"], row.get("status", "failed"), row.get("solve_s"))
        print(time.strftime("%H:%M:%S"), *said, flush=True)
    given.markdown.write_text(markdown(store.rows, given))
    print(given.markdown.read_text())


if __name__ == "__main__":
    main()
