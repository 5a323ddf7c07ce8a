"""A sweep that is killed half-way and goes on: all shapes of 64 devices for Llama-3-8B, and what of it is done twice.

    python experiments/sweep.py [--folder FOLDER] [--kill-after POINTS] [--markdown experiments/sweep.md] [-- ARGUMENTS]

The command is run, killed (SIGKILL) when so many points are in its folder, and run again to the end. Checked: no process of the first
run lives on, each run traces the model once, the plans of the first are not touched by the second, and every point is there. ARGUMENTS
replace those of ``solver-shard sweep``; the folder must be new.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from solver_shard import InputError, load_sweep
from solver_shard.analysis.sweep.results import Sweep

ARGUMENTS = shlex.split("llama3-8b --devices 64 --axes 2,3 --batch 64 --seq 8192 --memory 70GiB")
POLL = 0.1


class Run:
    """One run of the command; its progress goes to our stderr and is kept."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.start = time.perf_counter()
        command = [sys.executable, "-m", "solver_shard", "sweep", *arguments, "-o", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            print(line, end="", file=sys.stderr, flush=True)

    def end(self) -> str:
        """Wait for it; what it printed."""
        assert self.process.stdout is not None
        text = self.process.stdout.read()
        self.process.wait()
        self.reader.join()
        self.wall = time.perf_counter() - self.start
        return text

    def stop(self) -> None:
        """End it, if it still runs because this script failed."""
        if self.process.poll() is None:
            self.process.kill()

    @property
    def traces(self) -> int:
        return sum("tracing the model" in line for line in self.lines)


def so_far(folder: Path) -> int:
    """Points that are in the folder."""
    with contextlib.suppress(InputError):
        found = load_sweep(folder)
        return len(found.rows) - found.pending
    return 0


def living(group: int) -> list[int]:
    """Processes of a group that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                found.append(int(path.parent.name))
    return found


def plans(folder: Path) -> dict[str, tuple[int, int]]:
    """Plan files with when they were written and which file they are."""
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.glob("*.json") if path.name != "sweep.json"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="new folder for the plans (default: a temporary one)")
    parser.add_argument("--kill-after", type=int, default=7, help="points after which the first run is killed")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("arguments", nargs="*", default=ARGUMENTS, help="of solver-shard sweep")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        record = study(options.arguments, options.folder or Path(temporary) / "sweep", options.kill_after)
    print(record)
    if options.markdown is not None:
        options.markdown.write_text(record)


def study(arguments: list[str], folder: Path, kill_after: int) -> str:
    if folder.exists():
        raise SystemExit(f"{folder} is there already; give a new folder")
    first = Run(arguments, folder)
    atexit.register(first.stop)
    while first.process.poll() is None and so_far(folder) < kill_after:
        time.sleep(POLL)
    if first.process.poll() is not None:
        raise SystemExit(f"the first run ended with code {first.process.returncode} before it could be killed")
    os.kill(first.process.pid, signal.SIGKILL)
    first.end()
    time.sleep(1.0)
    left = living(first.process.pid)
    assert not left, f"processes of the killed run live on: {left}"
    half, before = load_sweep(folder), plans(folder)
    second = Run(arguments, folder)
    atexit.register(second.stop)
    table = second.end()
    whole, after = load_sweep(folder), plans(folder)
    assert second.process.returncode == 0, f"the second run ended with code {second.process.returncode}"
    assert (first.traces, second.traces) == (1, 1), f"the runs traced {first.traces} and {second.traces} times, for one batch"
    assert all(after[name] == written for name, written in before.items()), "the second run wrote plans of the first anew"
    done = {row.name: row for row in half.rows if row.done}
    assert all(row == done[row.name] for row in whole.rows if row.name in done), "rows of the first run changed"
    assert whole.pending == 0, f"{whole.pending} points are missing"
    return markdown(arguments, first, second, half, whole, table)


def markdown(arguments: list[str], first: Run, second: Run, half: Sweep, whole: Sweep, table: str) -> str:
    cores = len(os.sched_getaffinity(0))
    there = len(half.rows) - half.pending
    seconds = sum(row.seconds or 0.0 for row in whole.rows)
    slowest = max(whole.rows, key=lambda row: row.seconds or 0.0)
    open_ = sum(row.status == "feasible" for row in whole.rows)
    return "\n".join(
        [
            "# A sweep that is killed and goes on",
            "",
            f"By `python experiments/sweep.py` on {platform.machine()}, {cores} cores, Python {platform.python_version()}.",
            "",
            "```",
            f"solver-shard sweep {shlex.join(arguments)} -o FOLDER",
            "```",
            "",
            f"- First run: killed (SIGKILL) after {first.wall:.0f} s with {there} of {len(half.rows)} points in the folder; none of its",
            "  processes lived on. One trace.",
            f"- Second run, the same command: {second.wall:.0f} s for the other {half.pending}, one trace. No plan of the first run was "
            "touched.",
            f"- Together {first.wall + second.wall:.0f} s. Pricing and solving took {seconds:.0f} s over all points, "
            f"{slowest.seconds:.0f} s for the slowest ({slowest.mesh}).",
            f"- {len(whole.rows) - open_} of {len(whole.rows)} points are proven, to the gap or not to fit; {open_} ended at their limit.",
            "",
            "```",
            table.rstrip(),
            "```",
            "",
        ]
    )


if __name__ == "__main__":
    main()
