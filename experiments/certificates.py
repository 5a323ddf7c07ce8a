"""What the solver proves against enumeration, to the last unit: graphs of large bytes, of large costs, and conflicts of dense graphs.

    python experiments/certificates.py [--bytes 5000] [--costs 6000] [--conflicts 700] [--markdown experiments/certificates.md]

Graphs have five to nine nodes (tests/large_numbers.py, tests/conflict_cases.py), every one asked for an objective (least time, least peak,
or time with a price on the peak) without a gap, under a limit that binds, that is loose, or that nothing keeps. Status, objective, bound,
every bound on the way and the least peak are compared with all assignments. Conflicts are asked for until so many were found; what is
blamed must be impossible, and without any one element of it possible. A slice of the same runs with the tests.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]

import conflict_cases  # noqa: E402
import large_numbers  # noqa: E402

from solver_shard.solve.iis import compute_infeasible_subsystem  # noqa: E402


def graphs(large: str, count: int) -> Iterator[tuple[str, str]]:
    """(Kind, what is wrong) of every graph."""
    for seed in range(count):
        question = large_numbers.asked(seed, large=large)
        price = " with a price on the peak" if question.weight else ""
        kind = "infeasible" if question.best is None else f"least {question.objective}{price}"
        wrong = large_numbers.wrong(question)
        yield kind, wrong and f"large {large}, seed {seed}: {wrong}"


def conflicts(count: int) -> Iterator[tuple[str, str]]:
    """The same until so many conflicts were found."""
    found_so_far = seed = 0
    while found_so_far < count:
        graph, pins, every = conflict_cases.dense_case(seed)
        found = compute_infeasible_subsystem(graph, pins, time_limit=None)
        wrong = conflict_cases.wrong(graph, pins, every, found)
        kind = "none" if found is None else " and ".join(["pins"] * bool(found.constraints) + ["times"] * bool(found.times)) or "the graph"
        found_so_far += found is not None
        yield kind, wrong and f"conflict, seed {seed}: {wrong}"
        seed += 1


def report(name: str, runs: Iterator[tuple[str, str]]) -> tuple[str, int]:
    """A row of the table, and how many answers differ; differences are printed."""
    started, kinds, wrong = time.process_time(), Counter[str](), 0
    for kind, fault in runs:
        kinds[kind] += 1
        if fault:
            wrong += 1
            print(fault, flush=True)
    parts = ", ".join(f"{kind} {number:,}" for kind, number in sorted(kinds.items()))
    row = f"| {name} | {kinds.total():,} | {parts} | {wrong} | {time.process_time() - started:.0f} |"
    print(row, flush=True)
    return row, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=5000, help="graphs of large bytes")
    parser.add_argument("--costs", type=int, default=6000, help="graphs of costs beyond 2**53")
    parser.add_argument("--conflicts", type=int, default=700, help="conflicts of dense graphs")
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    found = [
        report("large bytes", graphs("bytes", given.bytes)),
        report("costs beyond 2^53", graphs("costs", given.costs)),
        report("conflicts of dense graphs", conflicts(given.conflicts)),
    ]
    if given.markdown:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
        ).stdout.strip()
        rows = "\n".join(row for row, _ in found)
        given.markdown.write_text(
            "# What is proven, against enumeration\n\n"
            f"By `python experiments/certificates.py --bytes {given.bytes} --costs {given.costs} --conflicts {given.conflicts}`, "
            f"{date.today().isoformat()}, on commit {commit}, {platform.machine()}, Python {platform.python_version()}. "
            "*Wrong* counts answers of which anything differs from enumeration: status, objective, bound to the last unit, a bound on\n"
            "the way, the least peak; of conflicts, that what is blamed is impossible and each element needed.\n\n"
            f"| what | runs | of which | wrong | CPU s |\n|---|---|---|---|---|\n{rows}\n"
        )
    return 1 if any(wrong for _, wrong in found) else 0


if __name__ == "__main__":
    sys.exit(main())
