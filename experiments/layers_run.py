"""One whole job in a process of its own, from a config to a plan, for experiments/layers.py: its certificate and its progress as JSON.

python experiments/layers_run.py CONFIG --mesh dp=32,tp=8 --batch 64 --seq 8192 --memory 70GiB --problem free -o OUT.json
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from solver_shard import InfeasibleError, SolverShardError  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--mesh", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--memory", required=True)
    parser.add_argument("--problem", choices=("tied", "free"), required=True)
    parser.add_argument("--time-limit", type=float, default=300.0)
    parser.add_argument("--gap", type=float, default=1e-4)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    from solver_shard import optimize

    history: list[tuple[float, int, int]] = []
    choices: list[int] = []
    started = 0.0

    def progress(line: str) -> None:
        """Keep when solving began and what its lines say: one a second at most."""
        nonlocal started
        print(line, flush=True)
        if match := re.fullmatch(r"solving (\d+) choices", line):
            choices.append(int(match[1]))
            started = time.monotonic()
        elif match := re.match(r"solving: objective ([\d,]+), bound ([\d,]+),", line):
            objective, bound = (int(text.replace(",", "")) for text in match.groups())
            history.append((round(time.monotonic() - started, 3), objective, bound))

    facts: dict[str, object] = {}
    try:
        plan = optimize(
            given.config,
            mesh=given.mesh,
            batch=given.batch,
            seq=given.seq,
            memory=given.memory,
            cluster="h100",
            tied=given.problem == "tied",
            time_limit=given.time_limit,
            gap=given.gap,
            progress=progress,
        )
    except InfeasibleError as error:
        facts = {"status": "infeasible", "error": str(error)[:400]}
    except SolverShardError as error:
        facts = {"status": "unknown", "error": str(error)[:400]}
    else:
        certificate = plan.certificate
        facts = {
            "status": certificate.status,
            "objective": certificate.objective,
            "bound": certificate.bound,
            "work": certificate.work,
            "problem_is": certificate.problem,
            "peak": plan.memory.peak,
            "limit": plan.memory.limit,
            "trace_s": round(certificate.stages.get("trace", 0.0), 2),
            "lower_s": round(certificate.stages.get("lower", 0.0), 2),
            "solve_s": round(certificate.stages.get("solve", 0.0), 3),
            "stages": dict(certificate.stages),
            "rounds": max([1, *(int(m[1]) for name in certificate.stages if (m := re.search(r"round (\d+)", name)))]),
        }
    facts |= {"history": history, "choices": choices[-1] if choices else None}
    given.output.write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
