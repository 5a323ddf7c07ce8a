"""Random pins, sets of pins and templates on 40 small models: none may be below the bound of the problem without it.

    python experiments/pins.py [--cases 2000] [--first 0] [--rows FILE] [--markdown experiments/pins.md]

Cases are those of ``tests/pin_cases.py``: thirty-two in a row ask one problem (model, mesh, cluster, objective, limit). Every plan on the
way, with pins or without, is held against the solver's claim and the evaluator (time, peak, objective), and is looked for in the graph
without pins, as are random points of the graph with pins. Then plans are pinned to themselves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import pin_cases


def of_itself(problem: tuple[str, str, str, str, float]) -> tuple[str, str]:
    """What came of a plan pinned to itself, and what is wrong."""
    try:
        plan, pinned = pin_cases.pinned_to_itself(*problem)
    except pin_cases.InfeasibleError:
        return "itself: no plan in so little work", ""
    same, proven = pinned.certificate.objective == plan.certificate.objective, plan.certificate.status == "optimal"
    wrong = f"{problem}: {plan.certificate.objective}, pinned {pinned.certificate.objective}" if proven and not same else ""
    return "itself: equal" if same else "itself: another, not proven" if not proven else "itself: another objective", wrong


def in_a_row(seeds: range) -> dict[str, Any]:
    """What came of the cases: their models, how often what, what is wrong, and the CPU seconds that they took."""
    begun, names, counts, faults = time.process_time(), set(), Counter[str](), []
    for seed in seeds:
        case = pin_cases.draw(seed)
        try:
            result, wrong = case.check(), ""
        except Exception as error:  # one case must not end all
            result, wrong = "error", f": {type(error).__name__}: {error}"[:300]
        names.add(case.name)
        counts[("template" if case.template else "pins") + (", fused" if case.fusion else "") + f": {result}"] += 1
        if result in ("below", "outside", "error"):
            faults.append(f"seed {seed}: {case}{wrong}")
    seconds = round(time.process_time() - begun, 1)
    return {"first": seeds.start, "models": sorted(names), "counts": counts, "faults": faults, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--itself", type=int, default=60, help="problems whose plan is pinned to itself")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="wall seconds after which no further cases are begun")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--rows", type=Path, help="a file that gets a line for every problem; those that it has are not asked again")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    begun, kept = time.monotonic(), []
    if options.rows and options.rows.exists():
        kept = [json.loads(line) for line in options.rows.read_text().splitlines()]
    known = {row["first"] for row in kept}
    end = options.first + options.cases
    seeds = [range(x, min(x + pin_cases.IN_A_ROW, end)) for x in range(options.first, end, pin_cases.IN_A_ROW) if x not in known]
    counts = Counter[str]()
    faults: list[str] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        waiting = [pool.submit(in_a_row, x) for x in seeds] if options.seconds > 0 else []
        for done in as_completed(waiting):
            if done.cancelled():
                continue
            kept.append(done.result())
            print(json.dumps(kept[-1]), flush=True)
            if options.rows:
                with options.rows.open("a") as file:
                    file.write(json.dumps(kept[-1]) + "\n")
            if time.monotonic() - begun > options.seconds:
                for other in waiting:
                    other.cancel()
        for kind, wrong in pool.map(of_itself, pin_cases.problems(options.itself)):
            counts[kind] += 1
            faults += [wrong] if wrong else []
    for row in kept:
        counts.update(row["counts"])
        faults += row["faults"]
    models, cpu = {name for row in kept for name in row["models"]}, sum(row["seconds"] for row in kept)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    total = sum(n for key, n in counts.items() if not key.startswith("itself"))
    lines = [
        "# Pins and templates against the problem without them",
        "",
        f"By `python experiments/pins.py {' '.join(sys.argv[1:])}` at {commit}, {time.strftime('%Y-%m-%d')}:",
        f"{total:,} of {options.cases:,} cases, over {len(models)} models; {cpu:.0f} CPU seconds for the cases.",
        "",
        "| outcome | cases |",
        "|---|---|",
        *(f"| {key} | {n} |" for key, n in sorted(counts.items())),
        "",
        "*below*: faster (or smaller) than the bound of the problem without; *outside*: no point of the graph without, or of another price",
        "or peak there: faults. Three plans of every case are looked for: the one that is found, and two at random. *none*: no such plan,",
        "or none within the work given.",
        "",
        "Faults: " + ("none." if not faults else ""),
        *(f"- {fault}" for fault in faults),
    ]
    print("\n".join(lines))
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
