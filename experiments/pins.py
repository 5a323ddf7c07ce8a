"""Random pins, sets of pins and templates on 40 small models: none may be below the bound of the problem without it.

    python experiments/pins.py [--cases 2000] [--first 0] [--seconds 3600] [--markdown experiments/pins.md]

Cases are those of ``tests/pin_cases.py``: thirty-two in a row ask one problem (model, mesh, cluster, objective, limit). Every plan on the
way, with pins or without, is held against the solver's claim and the evaluator (time, peak, objective), and is looked for in the graph
without pins, as are random points of the graph with pins. Then plans are pinned to themselves.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

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


def in_a_row(seeds: range) -> tuple[list[tuple[str, str, str]], float]:
    """Of every case its model, what came of it, and what is wrong; and the CPU seconds that they took."""
    begun, found = time.process_time(), []
    for seed in seeds:
        case = pin_cases.draw(seed)
        try:
            result, wrong = case.check(), ""
        except Exception as error:  # one case must not end all
            result, wrong = "error", f": {type(error).__name__}: {error}"[:300]
        kind = ("template" if case.template else "pins") + (", fused" if case.fusion else "")
        found.append((case.name, f"{kind}: {result}", f"seed {seed}: {case}{wrong}" if result in ("below", "outside", "error") else ""))
    return found, time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--itself", type=int, default=60, help="problems whose plan is pinned to itself")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="wall seconds after which no further cases are begun")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    begun, cpu, models = time.monotonic(), 0.0, set()
    counts: Counter[str] = Counter()
    faults = []
    rows = range(options.first, options.first + options.cases, pin_cases.IN_A_ROW)
    seeds = [range(x, min(x + pin_cases.IN_A_ROW, rows.stop)) for x in rows]
    with ProcessPoolExecutor(options.jobs) as pool:
        waiting = {pool.submit(in_a_row, x) for x in seeds}
        for done in as_completed(waiting):
            if done.cancelled():
                continue
            found, seconds = done.result()
            cpu += seconds
            models |= {name for name, _, _ in found}
            counts.update(kind for _, kind, _ in found)
            faults += [wrong for *_, wrong in found if wrong]
            print(sum(counts.values()), dict(counts), f"{cpu:.0f} s", faults, flush=True)
            if time.monotonic() - begun > options.seconds:
                for other in waiting:
                    other.cancel()
        for kind, wrong in pool.map(of_itself, pin_cases.problems(options.itself)):
            counts[kind] += 1
            faults += [wrong] if wrong else []
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    total = sum(n for key, n in counts.items() if not key.startswith("itself"))
    lines = [
        "# Pins and templates against the problem without them",
        "",
        f"By `python experiments/pins.py {' '.join(sys.argv[1:])}` at {commit}, {time.strftime('%Y-%m-%d')}: {total} cases over "
        f"{len(models)} models; {cpu:.0f} CPU seconds for the cases.",
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
