"""One run of a rival (see tests/rivals.py) in a process of its own: a file in, a JSON file with its answer out.

    python experiments/rival_run.py NAME FILE -o OUT.json [--seconds 600] [--gap 1e-4] [--workers 2] [--memory-gib 12]

The log on stdout has a line ``incumbent SECONDS VALUE BOUND`` for each that the solver tells of; HiGHS and toulbar2 write their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from rivals import RIVALS, solve_with  # noqa: E402

from solver_shard.graph.iopddl import read  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RIVALS)
    parser.add_argument("file", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--gap", type=float, default=1e-4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory-gib", type=float, default=12.0, help="address space that the process may use")
    given = parser.parse_args()
    most = int(given.memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    graph = read(given.file)

    def report(seconds: float, value: float | None, bound: float | None) -> None:
        print("incumbent", round(seconds, 3), value, bound, flush=True)

    answer = solve_with(given.name, graph, seconds=given.seconds, gap=given.gap, workers=given.workers, report=report)
    given.output.write_text(json.dumps(dataclasses.asdict(answer)))


if __name__ == "__main__":
    main()
