"""What the solver's studies share: child processes measured from outside, an exact evaluator, rows that survive a restart.

Nothing here uses solver_shard: a solution is checked in Python's integers from the file itself.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORBIDDEN = 10**18
SAMPLE_SECONDS = 0.5
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Child:
    """How a child process went.

    Attributes:
        code: exit code; negative for a signal.
        timed_out: whether it was killed because its time was over.
        wall_s, cpu_s: of the process; the CPU time of its children counts where it waited for them.
        max_rss_mib: largest resident set of any one of its processes.
        tree_mib: largest sum of the proportional sets of all its processes at one time, sampled twice a second.
        lines: what it wrote to stdout and stderr, each line with the seconds since the start.
    """

    code: int
    timed_out: bool
    wall_s: float
    cpu_s: float
    max_rss_mib: int
    tree_mib: int
    lines: tuple[tuple[float, str], ...]

    def row(self) -> dict[str, Any]:
        """The figures for a table."""
        return {
            "code": self.code,
            "timed_out": self.timed_out,
            "wall_s": round(self.wall_s, 2),
            "cpu_s": round(self.cpu_s, 2),
            "max_rss_mib": self.max_rss_mib,
            "tree_mib": max(self.tree_mib, self.max_rss_mib),
        }


def run_child(
    command: Sequence[str], *, seconds: float | None = None, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Child:
    """Run a command in a session of its own, and measure it; after so many seconds all of its session is killed."""
    started = time.monotonic()
    process = subprocess.Popen(
        list(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, **(env or {})},
        cwd=cwd,
    )
    lines: list[tuple[float, str]] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.monotonic() - started, line.rstrip("\n")))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    tree, timed_out, sampled = 0, False, 0.0
    try:
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            now = time.monotonic() - started
            if pid:
                break
            if seconds is not None and now > seconds and not timed_out:
                timed_out = True
                os.killpg(process.pid, signal.SIGKILL)
            if now - sampled >= SAMPLE_SECONDS:
                sampled, tree = now, max(tree, _tree_kib(process.pid))
            time.sleep(0.02)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    reader.join(timeout=5)
    return Child(
        code=process.returncode,
        timed_out=timed_out,
        wall_s=now,
        cpu_s=usage.ru_utime + usage.ru_stime,
        max_rss_mib=usage.ru_maxrss // 1024,
        tree_mib=tree // 1024,
        lines=tuple(lines),
    )


def _tree_kib(session: int) -> int:
    """Proportional set size of all processes of a session, in KiB."""
    total = 0
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"/proc/{entry.name}/stat") as file:
                if int(file.read().rsplit(")", 1)[1].split()[3]) != session:
                    continue
            with open(f"/proc/{entry.name}/smaps_rollup") as file:
                total += sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
        except (OSError, IndexError, ValueError):
            continue  # it ended meanwhile
    return total


def load_problem(path: Path) -> dict[str, Any]:
    """The ``problem`` of an IOPDDL file, plain or gzip."""
    packed = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed)["problem"]
    return found


def evaluate(problem: Mapping[str, Any], solution: Sequence[int]) -> dict[str, Any]:
    """Cost, peak and forbidden choices of a solution by the contest's definition, in Python's integers.

    Raises:
        ValueError: it is no solution: a wrong number of strategies, or one that its node does not have.
    """
    nodes, edges = problem["nodes"], problem["edges"]
    sizes = [len(costs) for costs in nodes["costs"]]
    if len(solution) != len(sizes):
        raise ValueError(f"{len(solution)} strategies for {len(sizes)} nodes")
    for v, (x, size) in enumerate(zip(solution, sizes, strict=True)):
        if type(x) is not int or not 0 <= x < size:
            raise ValueError(f"strategy {x!r} of node {v}, which has {size}")
    cost = forbidden = 0
    change: dict[int, int] = {}
    for (start, stop), costs, usages, x in zip(nodes["intervals"], nodes["costs"], nodes["usages"], solution, strict=True):
        cost += costs[x]
        forbidden += costs[x] >= FORBIDDEN
        if start < stop:
            change[start] = change.get(start, 0) + usages[x]
            change[stop] = change.get(stop, 0) - usages[x]
    for members, table in zip(edges["nodes"], edges["costs"], strict=True):
        cell = 0
        for v in members:
            cell = cell * sizes[v] + solution[v]
        cost += table[cell]
        forbidden += table[cell] >= FORBIDDEN
    used = peak = 0
    for time_point in sorted(change):
        used += change[time_point]
        peak = max(peak, used)
    limit = problem.get("usage_limit")
    return {"cost": cost, "peak": peak, "limit": limit, "forbidden": forbidden, "feasible": limit is None or peak <= limit}


class Rows:
    """Rows of a study as JSON lines; what is there already is not measured again.

    A row's key is what it is about (instance, seed, limits): rows with the same key are the same measurement.
    """

    def __init__(self, path: Path, key: Sequence[str]) -> None:
        self.path, self.key, self.rows = path, tuple(key), list[dict[str, Any]]()
        if path.exists():
            self.rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]

    def has(self, wanted: Mapping[str, Any]) -> bool:
        return any(all(row.get(k) == wanted[k] for k in self.key) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def machine() -> str:
    """The machine in words, for the head of a table."""
    model = platform.machine()
    try:
        names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def python(script: Path, *arguments: object) -> list[str]:
    """The command line that runs a script of this project with this interpreter."""
    return [sys.executable, str(script), *map(str, arguments)]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join("" if cell is None else str(cell) for cell in row) + " |" for row in rows]


def number(value: float | None) -> str:
    """A whole number with separators, or a dash.

    >>> number(6548641531)
    '6,548,641,531'
    """
    return (
        "-"
        if value is None or (isinstance(value, float) and not math.isfinite(value))
        else f"{value:,.0f}"
        if isinstance(value, float)
        else f"{value:,}"
    )


def gap_of(cost: int | None, bound: int | None) -> float | None:
    """(cost - bound) / cost in exact arithmetic, then rounded once; None where one is missing."""
    if cost is None or bound is None:
        return None
    return 0.0 if cost <= bound else (cost - bound) / cost
