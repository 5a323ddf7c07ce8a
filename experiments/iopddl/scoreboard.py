"""The engine on instances of the IOPDDL contest, beside the published figures and, where its folder is given, the research prototype.

    python experiments/iopddl/scoreboard.py FOLDER [--instances A,G,M,S] [--seeds 0,1,2] [--time-limit 300] [--workers 2]
        [--rows experiments/iopddl/scoreboard.jsonl] [--markdown experiments/iopddl/scoreboard.md] [--prototype FOLDER] [--only-table]

FOLDER holds ``*.json`` or ``*.json.gz`` files; the published ones are asplos-2025-iopddl-LETTER.json.gz. Every run is a process of its own.
Its solution is checked by an evaluator that shares no code with the product (measure.py), and counts only if that says so. A row
that is there already (instance, seed, limits, workers) is not run again, so a study that was stopped goes on where it was; rows are only
worth comparing when the machine had nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measure import Rows, evaluate, gap_of, load_problem, machine, number, python, run_child, table  # noqa: E402

KEY = ("by", "instance", "seed", "time_limit", "workers", "stop_gap")
GRACE = 120.0
"""Seconds beyond the time limit (reading, start-up) after which a run is killed and counts as failed."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """What is known of an instance: the contest's winner on eight cores, the best value and bound published, this project's targets."""

    winner: int | None
    best: int
    best_bound: int
    by: str
    median: int | None = None
    better_than: int | None = None
    bound: int | None = None
    proven_within_s: float | None = None


# The solver's specification, sections 4 ("Best published") and the contest's results.
PUBLISHED = {
    "A": Published(
        winner=6_569_457_676,
        best=6_548_641_531,
        best_bound=6_513_812_172,
        by="published after the contest",
        median=6_549_000_000,
        better_than=6_548_641_531,
        bound=6_519_000_000,
    ),
    "G": Published(winner=None, best=217_039, best_bound=216_933, by="published after the contest", median=217_039, proven_within_s=20.0),
    "M": Published(
        winner=49_928_460_991,
        best=49_928_157_537,
        best_bound=49_429_153_686,
        by="published after the contest",
        median=49_928_000_000,
        bound=49_899_000_000,
    ),
    "S": Published(
        winner=1_534_613_444,
        best=1_511_377_982,
        best_bound=1_511_240_136,
        by="25 hours of a commercial solver",
        median=1_511_350_000,
        bound=1_510_780_000,
    ),
}

# How the prototype's README runs it; %s is the instance.
PROTOTYPE = {
    "G": ["exact.py", "%s", "15", "60"],
    "": ["forest.py", "%s", "--dual", "40", "--forest", "50", "--cp", "15", "--lns", "40"],
}


def name_of(path: Path) -> str:
    """The instance's name: the last letter-like part of asplos-2025-iopddl-A.json.gz, else the file's stem."""
    stem = path.name.removesuffix(".gz").removesuffix(".json")
    return stem.rsplit("-", 1)[1] if "iopddl-" in stem else stem


def find(folder: Path, wanted: Sequence[str]) -> dict[str, Path]:
    """The files of the wanted instances, all but the example when none is named."""
    files = {name_of(path): path for path in sorted(folder.iterdir()) if re.search(r"\.json(\.gz)?$", path.name)}
    missing = [name for name in wanted if name not in files]
    if missing:
        raise SystemExit(f"no instance {', '.join(missing)} in {folder}; it has {', '.join(files)}")
    return {name: files[name] for name in wanted} if wanted else {name: path for name, path in files.items() if name != "example"}


def run_engine(name: str, path: Path, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """One row: the engine on one instance with one seed."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run.json"
        options = ["--time-limit", given.time_limit, "--seed", seed, "--workers", given.workers, "--gap", given.gap]
        child = run_child(python(HERE.parent / "engine_run.py", path, "-o", output, *options), seconds=given.time_limit + GRACE)
        found = json.loads(output.read_text()) if output.exists() else None
    row = {"by": "engine", "instance": name, "seed": seed, "time_limit": given.time_limit, "workers": given.workers, "stop_gap": given.gap}
    row |= child.row()
    if found is None:
        return row | {"error": "\n".join(line for _, line in child.lines[-15:])}
    assignment = found.pop("assignment")
    row |= found
    row["presolve_s"] = round(sum(seconds for stage, seconds, _ in found["stages"] if "presolve" in stage), 3)
    return row | checked(path, assignment, claimed=found["cost"] if found["feasible"] else None)


def checked(path: Path, assignment: Sequence[int] | None, claimed: int | None) -> dict[str, Any]:
    """What the independent evaluator says; ``valid`` only if it agrees with what was claimed."""
    if assignment is None:
        return {"valid": False}
    exact = evaluate(load_problem(path), assignment)
    valid = exact["feasible"] and not exact["forbidden"] and (claimed is None or exact["cost"] == claimed)
    return {
        "valid": valid,
        "exact_cost": exact["cost"],
        "exact_peak": exact["peak"],
        "limit": exact["limit"],
        "forbidden": exact["forbidden"],
    }


def run_prototype(name: str, path: Path, prototype: Path, given: argparse.Namespace) -> dict[str, Any]:
    """One row: the prototype on one instance, with the command line of its README; its printed value and bound, its solution checked."""
    row = {"by": "prototype", "instance": name, "seed": 0, "time_limit": given.time_limit, "workers": given.workers, "stop_gap": given.gap}
    script, *arguments = PROTOTYPE.get(name, PROTOTYPE[""])
    with tempfile.TemporaryDirectory() as cache:
        env = {"IOPDDL_DIR": str(path.parent.resolve()), "PROTO_CACHE": cache, "PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": cache}
        child = run_child(python(prototype / script, *(a.replace("%s", name) for a in arguments)), env=env, cwd=prototype)
        row |= child.row()
        solutions = sorted(Path(cache).glob("*.sol"))
        assignment = json.loads(solutions[-1].read_text()) if solutions else None
    text = "\n".join(line for _, line in child.lines)
    bounds = re.findall(r"\bLB ([-+.\d]+(?:e[-+]?\d+)?)", text)
    row |= checked(path, assignment, claimed=None)
    row["cost"] = row.get("exact_cost")
    row["bound"] = row["cost"] if "PROVEN OPTIMAL" in text else int(float(bounds[-1])) if bounds else None
    if not row["valid"]:
        row["error"] = "\n".join(line for _, line in child.lines[-15:])
    return row


def summary(rows: Sequence[dict[str, Any]], name: str, by: str) -> dict[str, Any] | None:
    """Median, best and worst over the seeds of an instance; None without a valid row."""
    own = [row for row in rows if row["instance"] == name and row["by"] == by]
    valid = [row for row in own if row.get("valid")]
    if not valid:
        return None
    bounds = [row["bound"] for row in valid if row["bound"] is not None]
    return {
        "runs": len(own),
        "valid": len(valid),
        "median": int(statistics.median_high(row["exact_cost"] for row in valid)),
        "best": min(row["exact_cost"] for row in valid),
        "worst": max(row["exact_cost"] for row in valid),
        "bound": max(bounds, default=None),
        "least_bound": min(bounds, default=None),
        "read_s": max((row["read_s"] for row in valid if "read_s" in row), default=None),
        "presolve_s": max((row["presolve_s"] for row in valid if "presolve_s" in row), default=None),
        "solve_s": max((row["solve_s"] for row in valid if "solve_s" in row), default=None),
        "wall_s": max(row["wall_s"] for row in valid),
        "cpu_s": statistics.median(row["cpu_s"] for row in valid),
        "memory_mib": max(row["tree_mib"] for row in valid),
        "proven": all(row.get("status") in ("optimal", "gap") for row in valid) if by == "engine" else None,
    }


def verdicts(found: dict[str, Any], known: Published | None, time_limit: float) -> list[tuple[str, bool]]:
    """Each target of an instance with whether it is met: by every run where it says so."""
    said = [
        ("every run valid", found["valid"] == found["runs"]),
        ("memory at most 2048 MiB", found["memory_mib"] <= 2048),
        ("reading and presolve at most 20 s", (found["read_s"] or 0) + (found["presolve_s"] or 0) <= 20),
        (f"solving at most {time_limit * 1.05:g} s", (found["solve_s"] or 0) <= time_limit * 1.05),
    ]
    if known is None:
        return said
    if known.median is not None:
        said.append((f"median at most {number(known.median)}", found["median"] <= known.median))
    if known.better_than is not None:
        said.append((f"best below {number(known.better_than)}", found["best"] < known.better_than))
    if known.bound is not None:
        said.append((f"bound at least {number(known.bound)} in every run", (found["least_bound"] or 0) >= known.bound))
    if known.proven_within_s is not None:
        within = found["least_bound"] == found["worst"] and (found["solve_s"] or 0) <= known.proven_within_s
        said.append((f"proven optimal within {known.proven_within_s:g} s", within))
    return said


def markdown(rows: Sequence[dict[str, Any]], given: argparse.Namespace) -> str:
    """The whole report."""
    names = list(dict.fromkeys(row["instance"] for row in rows))
    seeds = ", ".join(sorted({str(row["seed"]) for row in rows if row["by"] == "engine"}))
    lines = [
        "# Scoreboard: instances of the IOPDDL contest",
        "",
        f"By `python experiments/iopddl/scoreboard.py FOLDER --time-limit {given.time_limit:g} --workers {given.workers}`, {machine()}.",
        f"Limit {given.time_limit:g} s of solving, gap {given.gap:g}, seeds {seeds}.",
        "Costs are those of an evaluator that shares no code with the engine. Times are the longest of the seeds, CPU the median;",
        "memory is of all processes of a run together (proportional sets, sampled twice a second).",
        "",
    ]
    body = []
    for name in names:
        found = summary(rows, name, "engine")
        if found is None:
            body.append([name, "no valid run", *[""] * 10])
            continue
        body.append(
            [
                name,
                f"{found['valid']} of {found['runs']}",
                number(found["median"]),
                number(found["best"]),
                number(found["least_bound"]),
                number(found["bound"]),
                f"{gap_of(found['median'], found['least_bound']) or 0:.4%}",
                found["read_s"],
                found["presolve_s"],
                found["solve_s"],
                round(found["cpu_s"]),
                f"{found['memory_mib']} MiB",
            ]
        )
    head = [
        "instance",
        "valid",
        "median cost",
        "best cost",
        "least bound",
        "best bound",
        "gap",
        "read s",
        "presolve s",
        "solve s",
        "CPU s",
        "memory",
    ]
    lines += ["## The engine", "", *table(head, body), ""]
    lines += ["## Targets", ""]
    for name in names:
        found = summary(rows, name, "engine")
        if found is not None:
            for text, met in verdicts(found, PUBLISHED.get(name), given.time_limit):
                lines.append(f"- {name}: {text}: {'yes' if met else '**no**'}")
    lines.append("")
    body = []
    for name in names:
        found, proto, known = summary(rows, name, "engine"), summary(rows, name, "prototype"), PUBLISHED.get(name)
        if known is None and proto is None:
            continue
        body.append(
            [
                name,
                number(found["best"]) if found else "-",
                number(found["bound"]) if found else "-",
                number(known.best) if known else "-",
                number(known.best_bound) if known else "-",
                known.by if known else "",
                number(known.winner) if known else "-",
                f"{found['best'] / known.best - 1:+.4%}" if found and known else "",
                number(proto["best"]) if proto else "-",
                number(proto["bound"]) if proto else "-",
                f"{proto['wall_s']:.0f} s, {proto['cpu_s']:.0f} CPU s" if proto else "-",
            ]
        )
    head = ["instance", "best", "bound", "best published", "its bound", "by", "winner, 8 cores", "best against it"]
    head += ["prototype", "its bound", "its time"]
    lines += ["## Beside others", "", *table(head, body), ""]
    failed = [row for row in rows if row.get("error") or not row.get("valid")]
    if failed:
        lines += ["## Runs that failed", ""]
        for row in failed:
            why = row.get("error", "not a valid solution")[-500:]
            lines.append(f"- {row['by']} on {row['instance']}, seed {row['seed']}: exit {row['code']}, {why}")
        lines.append("")
    lines += ["## Progress of the first seed", ""]
    for name in names:
        own = [row for row in rows if row["instance"] == name and row["by"] == "engine" and row.get("history")]
        if own:
            lines += [f"{name}: " + "; ".join(steps(own[0]["history"], given.time_limit)), ""]
    return "\n".join(lines)


def steps(history: Sequence[Sequence[Any]], time_limit: float) -> list[str]:
    """Incumbent and bound at some moments, for the report."""
    said = []
    for moment in (time_limit / 30, time_limit / 10, time_limit / 4, time_limit / 2, time_limit):
        before = [event for event in history if event[0] <= moment]
        if before:
            said.append(f"{moment:g} s {number(before[-1][2])} / {number(before[-1][3])}")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--instances", default="", help="names, by commas; default all in the folder")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--time-limit", type=float, default=300.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gap", type=float, default=0.0, help="at which a run may stop; 0 proves the optimum or uses all the time")
    parser.add_argument("--rows", type=Path, default=HERE / "scoreboard.jsonl")
    parser.add_argument("--markdown", type=Path, default=HERE / "scoreboard.md")
    parser.add_argument("--prototype", type=Path, help="folder of the research prototype, to be run beside")
    parser.add_argument("--only-table", action="store_true", help="run nothing, write the table from the rows that are there")
    given = parser.parse_args()
    instances = find(given.folder, [name for name in given.instances.split(",") if name])
    store = Rows(given.rows, KEY)
    limits = {"time_limit": given.time_limit, "workers": given.workers, "stop_gap": given.gap}
    for seed in [] if given.only_table else [int(text) for text in given.seeds.split(",")]:
        for name, path in instances.items():
            if store.has({"by": "engine", "instance": name, "seed": seed, **limits}):
                continue
            store.add(row := run_engine(name, path, seed, given))
            print(
                time.strftime("%H:%M:%S"),
                name,
                "seed",
                seed,
                "cost",
                row.get("exact_cost"),
                "bound",
                row.get("bound"),
                row["wall_s"],
                "s",
                flush=True,
            )
    for name, path in instances.items() if given.prototype and not given.only_table else ():
        if not store.has({"by": "prototype", "instance": name, "seed": 0, **limits}):
            store.add(row := run_prototype(name, path, given.prototype, given))
            print(time.strftime("%H:%M:%S"), name, "prototype", row.get("cost"), row.get("bound"), row["wall_s"], "s", flush=True)
    own = [row for row in store.rows if row["instance"] in instances and all(row[key] == limits[key] for key in limits)]
    given.markdown.write_text(markdown(own, given))
    print(given.markdown.read_text() if given.only_table else f"written: {given.markdown}")


if __name__ == "__main__":
    main()
