"""torch's own op tests through trace, random layouts and verify: what plans, what is refused and why, what is wrong.

    python experiments/op_database.py --rows FILE [OP ...] [--samples 3] [--points 2]     # resumable: ops that have rows are not run again
    python experiments/op_database.py --rows FILE --markdown experiments/op_database.md

Every op of torch's database (``torch.testing._internal``), by its first small samples, as a model of one call: a training step where the
op is differentiable, else a forward pass, in 64-bit floats (see tests/op_cases.py). Of each, random points of the choice graphs of 2, 3
and 2x2 devices run with all devices in one process, and are held against the unsharded graph, the module itself and the plan's bytes.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the cases are those of the tests
import op_cases

MESHES = ("2", "3", "2,2")


def study(op: str, samples: int, points: int, after: int) -> list[dict[str, Any]]:
    """One row for each sample."""
    rows = []
    try:
        for case in itertools.islice(op_cases.cases(op, after + samples), after, None):
            start = time.process_time()
            found = op_cases.outcome(case, MESHES, range(points))
            seconds = round(time.process_time() - start, 2)
            rows.append(
                {"op": op, "sample": case.sample, "trained": not case.forward_only, "kind": found.kind, "said": found.said, "cpu": seconds}
            )
    except Exception as error:  # torch's own generator of samples, or the unsharded call
        rows.append({"op": op, "sample": -1, "kind": "no sample", "said": f"{type(error).__name__}: {str(error)[:100]}"})
    return rows or [{"op": op, "sample": -1, "kind": "no sample", "said": "none that is small, of plain tensors, and has a dim to cut"}]


def markdown(rows: list[dict[str, Any]]) -> str:
    """The record."""
    count = Counter(row["kind"] for row in rows)
    ops: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        ops.setdefault(row["op"], []).append(row)
    whole = [op for op, found in ops.items() if all(row["kind"] == "holds" for row in found)]
    commits = Counter(row["code"] for row in rows)
    lines = [
        "# torch's op tests",
        "",
        *__doc__.split("\n\n")[2].splitlines(),
        "",
        f"torch {torch.__version__}, {datetime.date.today()}, rows of commit {', '.join(f'{c} ({n})' for c, n in commits.items())}; "
        f"{sum(row.get('cpu', 0) for row in rows):,.0f} CPU seconds. {len(ops)} ops, {len(rows)} samples: "
        f"{', '.join(f'{n} {kind}' for kind, n in count.most_common())}.",
        "",
        "- holds: every plan ran, with the numbers of the unsharded graph and of the module, and the planned bytes",
        "- refused: not traced, with a message; unrun: planned, and refused with a message when it is to run",
        "- wrong: other numbers or bytes; failed: another error; large: over 250 ops; no sample: nothing small of plain tensors;",
        "  unset: its results are whatever was in memory",
        "",
        "| op | sample | outcome | what was said |",
        "|---|---|---|---|",
    ]
    for row in rows:
        if row["kind"] != "holds":
            said = row["said"].partition(". Supported are")[0].partition("; random ops that can")[0][:240].replace("|", "/")
            lines.append(f"| {row['op']} | {row['sample'] if row['sample'] >= 0 else ''} | {row['kind']} | {said} |")
    return "\n".join([*lines, "", f"All samples hold of {len(whole)} ops: {', '.join(whole)}.", ""])


@functools.cache
def code() -> str:
    """The commit that is checked out."""
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", nargs="*", help="default: all")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--after", type=int, default=0, help="leave out so many samples of every op")
    parser.add_argument("--points", type=int, default=2)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    if options.markdown:
        options.markdown.write_text(markdown(rows))
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    known = {row["op"] for row in rows}
    for op in options.op or op_cases.database():
        if op not in known:
            for row in study(op, options.samples, options.points, options.after):
                with options.rows.open("a") as out:
                    print(json.dumps(row | {"code": code()}), file=out)
                if row["kind"] != "holds":
                    print(json.dumps(row)[:300], flush=True)


if __name__ == "__main__":
    main()
