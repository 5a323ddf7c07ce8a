"""Random pins, sets of pins and templates on 40 small models: none may be below the bound of the problem without it.

    python experiments/pins.py [--cases 2000] [--first 0] [--seconds 3600] [--markdown experiments/pins.md]

Cases are those of ``tests/pin_cases.py``: eight in a row ask one problem (model, mesh, cluster, objective, limit). Every plan on the way,
with pins or without, is held against the solver's claim and the evaluator (time, peak, objective), and is looked for in the graph without
pins, as are random points of the graph with pins. Then plans are pinned to themselves.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import pin_cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--itself", type=int, default=60, help="problems whose plan is pinned to itself")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="wall seconds after which no further case is begun")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    begun, models = time.monotonic(), set()
    counts: Counter[str] = Counter()
    faults = []
    for problem in pin_cases.problems(options.itself):
        try:
            plan, pinned = pin_cases.pinned_to_itself(*problem)
        except pin_cases.InfeasibleError:
            counts["itself: no plan in so little work"] += 1
            continue
        same, proven = pinned.certificate.objective == plan.certificate.objective, plan.certificate.status == "optimal"
        counts["itself: equal" if same else "itself: above, not proven" if not proven else "itself: another objective"] += 1
        if proven and not same:
            faults.append(f"{problem}: {plan.certificate.objective}, pinned {pinned.certificate.objective}")
    for seed in range(options.first, options.first + options.cases):
        if time.monotonic() - begun > options.seconds:
            break
        case = pin_cases.draw(seed)
        models.add(case.name)
        found = case.check()
        counts[("template" if case.template else "pins") + f": {found}"] += 1
        if found in ("below", "outside"):
            faults.append(f"seed {seed}: {case}")
        if seed % 50 == 0:
            print(seed, dict(counts), f"{time.process_time():.0f} s", faults, flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    total = sum(n for key, n in counts.items() if not key.startswith("itself"))
    lines = [
        "# Pins and templates against the problem without them",
        "",
        f"By `python experiments/pins.py {' '.join(sys.argv[1:])}` at {commit}, {time.strftime('%Y-%m-%d')}: {total} cases over "
        f"{len(models)} models, {time.process_time():.0f} CPU seconds.",
        "",
        "| outcome | cases |",
        "|---|---|",
        *(f"| {key} | {n} |" for key, n in sorted(counts.items())),
        "",
        "*below*: faster (or smaller) than the bound of the problem without; *outside*: no point of the graph without, or of another price or",
        "peak there: faults. Three plans of every case are looked for, the one that is found and two at random. *none*: no such plan, or none",
        "within the work given.",
        "",
        "Faults: " + ("none." if not faults else ""),
        *(f"- {fault}" for fault in faults),
    ]
    print("\n".join(lines))
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
