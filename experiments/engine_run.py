"""One run of the engine in a process of its own: a file in, a JSON file with solution, bound, history and times out.

    python experiments/engine_run.py FILE -o OUT.json [--time-limit 300] [--gap 1e-4] [--seed 0] [--workers 2] [--work-limit W]

The studies call it; run by hand it is a quick look at one instance.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

STARTED = time.monotonic()
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from solver_shard.graph.iopddl import read  # noqa: E402
from solver_shard.solve.engine import solve  # noqa: E402
from solver_shard.solve.solution import Event  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds of solving")
    parser.add_argument("--work-limit", type=float)
    parser.add_argument("--gap", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    imported = time.monotonic()
    graph = read(given.file)
    built = time.monotonic()
    print(f"read {graph.size} nodes and {len(graph.edges)} edges in {built - imported:.2f} s", flush=True)

    def report(event: Event) -> None:
        print(f"{event.seconds:8.2f} s  {event.objective}  bound {event.bound}  {event.source}", flush=True)

    solution = solve(
        graph,
        time_limit=given.time_limit,
        work_limit=given.work_limit,
        gap=given.gap,
        seed=given.seed,
        workers=given.workers,
        progress=report,
    )
    ended = time.monotonic()
    given.output.write_text(
        json.dumps(
            {
                "nodes": graph.size,
                "edges": len(graph.edges),
                "status": solution.status.value,
                "feasible": solution.feasible,
                "cost": solution.cost,
                "peak": solution.peak,
                "bound": solution.bound,
                "peak_bound": solution.peak_bound,
                "gap": solution.gap,
                "work": solution.work,
                "imports_s": round(imported - STARTED, 3),
                "read_s": round(built - imported, 3),
                "solve_s": round(ended - built, 3),
                "torch": "torch" in sys.modules,
                "stages": [[stage.name, round(stage.seconds, 3), stage.note] for stage in solution.stages],
                "history": [[round(e.seconds, 3), round(e.work, 3), e.objective, e.bound, e.source] for e in solution.history],
                "assignment": solution.assignment,
            }
        )
    )


if __name__ == "__main__":
    main()
