"""Run the main job's cases from the command line and record time, memory, gap and sizes by stage.

    python experiments/main_job.py [CASE ...] [--markdown experiments/main_job.md]

Each case is one ``solver-shard solve`` process. Wall seconds and peak memory are of the whole process, Python's start and
the imports included; stages are what the plan itself records.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES: dict[str, list[str]] = {
    "gpt2, 8": ["gpt2", "--batch", "16", "--seq", "1024", "--dtype", "f32", "--mesh", "8", "--cluster", "h100"],
    "gpt2, 32x8": ["gpt2", "--batch", "256", "--seq", "1024", "--dtype", "f32", "--mesh", "dp=32,tp=8", "--cluster", "h100"],
    "llama3-8b, 32x8": [
        *["llama3-8b", "--batch", "64", "--seq", "8192", "--dtype", "bf16", "--mesh", "dp=32,tp=8"],
        *["--cluster", "h100", "--memory", "70GiB"],
    ],
    "llama3-8b, 8x4x8": [
        *["llama3-8b", "--batch", "64", "--seq", "8192", "--dtype", "bf16", "--mesh", "dp=8,cp=4,tp=8"],
        *["--cluster", "h100", "--memory", "70GiB", "--time-limit", "120"],
    ],
}


def run(name: str, arguments: list[str]) -> dict[str, Any]:
    """One case: what the process used, and what its plan says."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "solver_shard", "solve", *arguments, "-o", str(path), "--quiet"]
        start = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - start
        if os.waitstatus_to_exitcode(status):
            raise SystemExit(f"{name}: exit code {os.waitstatus_to_exitcode(status)} from {' '.join(command)}")
        plan = json.loads(path.read_text())
        certificate, memory = plan["certificate"], plan["memory"]
        return {
            "case": name,
            "command": "solver-shard solve " + " ".join(arguments),
            "wall_s": round(wall, 1),
            "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
            "max_rss_gib": round(usage.ru_maxrss / 2**20, 2),
            "status": certificate["status"],
            "gap": certificate["gap"],
            "objective_ns": certificate["objective"],
            "bound_ns": certificate["bound"],
            "peak_gib": round(memory["peak"] / 2**30, 2),
            "limit_gib": round(memory["limit"] / 2**30, 2),
            "plan_mb": round(path.stat().st_size / 1e6, 2),
            "stages_s": certificate["stages"],
        }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table that the README quotes."""
    lines = [
        "# The main job's cases",
        "",
        f"By `python experiments/main_job.py` on {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}.",
        "",
        "| case | whole command | CPU | peak RSS | step time | bound | gap | status | memory of limit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['case']} | {r['wall_s']} s | {r['cpu_s']} s | {r['max_rss_gib']} GiB | {r['objective_ns'] / 1e6:.3f} ms | "
            f"{r['bound_ns'] / 1e6:.3f} ms | {r['gap']:.4%} | {r['status']} | {r['peak_gib']} of {r['limit_gib']} GiB |"
        )
    lines += ["", "Commands and seconds by stage:", ""]
    for r in rows:
        stages = ", ".join(f"{stage} {seconds:g}" for stage, seconds in r["stages_s"].items())
        lines += [f"- `{r['command']}`", f"  {stages}; plan file {r['plan_mb']} MB"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args()
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"no case {', '.join(sorted(unknown))}; cases: {', '.join(CASES)}")
    rows = []
    for name in options.cases or CASES:
        rows.append(run(name, CASES[name]))
        print(json.dumps(rows[-1]), flush=True)
    if options.markdown:
        options.markdown.write_text(markdown(rows))


if __name__ == "__main__":
    main()
