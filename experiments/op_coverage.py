"""Which model families trace, need no fallback, and have something to shard in every op that matters.

    python experiments/op_coverage.py [FAMILY ...] [--markdown experiments/op_coverage.md]

Every family of tests/model_zoo.py, in several forms: training with dropout and fused attention, training with attention written
out, in half precision, and forward only; forty more at the sizes of their default configs, with two layers; and the small models of
recommenders, vision, preferences and graphs of experiments/practitioners.py ("practitioners"). An op counts as
"replicated only" where its calls without any strategy but replication make up over 1% of the step's operations or of the bytes that
ops read and write.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from solver_shard import Rulebook, SolverShardError, trace
from solver_shard.rules.rulebook import usage

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the models are those of the tests
import model_zoo
import practitioners

FORMS: dict[str, dict[str, Any]] = {
    "training": {},
    "training, eager attention": {"attention": "eager"},
    "training, bf16": {"dtype": torch.bfloat16},
    "forward": {"training": False},
}


USUAL = "training, default config"
SMALL = "practitioners"


def study(family: str, form: str) -> dict[str, Any]:
    """One model in one form."""
    settings = FORMS.get(form, {})
    row: dict[str, Any] = {"family": family, "form": form}
    start = time.perf_counter()
    try:
        if form == SMALL:
            case = next(case for case in practitioners.CASES if case.name == family)
            with torch.device("meta"):
                model, inputs = case.make(False)
            settings = {"training": not case.options.get("forward_only", False)}
        else:
            model, inputs = model_zoo.usual(family) if form == USUAL else model_zoo.make(family, **settings)
        program = trace(model, inputs, name=family, forward_only=not settings.get("training", True))
        rows = usage(program, Rulebook())
    except (SolverShardError, ValueError) as error:
        return row | {"failed": f"{type(error).__name__}: {error}"}
    whole = [r.op for r in rows if max(r.replicated_flops, r.replicated_nbytes) > 0.01]
    return row | {
        "ops": len(program.ops),
        "kinds": len(rows),
        "fallbacks": [r.op for r in rows if r.source == "fallback"],
        "replicated_only": [
            f"{r.op} ({r.replicated_flops:.1%} of flops, {r.replicated_nbytes:.1%} of bytes)" for r in rows if r.op in whole
        ],
        "seconds": round(time.perf_counter() - start, 1),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The record."""
    lines = [
        __doc__.split("\n\n")[0],
        "",
        f"torch {torch.__version__}, transformers {_version()}. Made by `python experiments/op_coverage.py`.",
        "",
    ]
    lines += ["| family | form | ops | kinds of ops | without a rule | replicated only, over 1% |", "|---|---|---|---|---|---|"]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['family']} | {row['form']} | - | - | does not trace: {row['failed'][:300].replace('|', '/')} | - |")
            continue
        found = [", ".join(row[key]) or "none" for key in ("fallbacks", "replicated_only")]
        lines.append(f"| {row['family']} | {row['form']} | {row['ops']} | {row['kinds']} | {found[0]} | {found[1]} |")
    return "\n".join([*lines, ""])


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help=f"default: all of {', '.join(model_zoo.FAMILIES)}")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for family in options.family or model_zoo.FAMILIES:
        for form in FORMS if family != SMALL else ():
            if form == "training, eager attention" and family in ("resnet-50", "mamba", "mamba2", "convnext", "swin"):
                continue  # no attention of their own choice
            rows.append(study(family, form))
            print(json.dumps(rows[-1]), flush=True)
    for kind in model_zoo.USUAL if not options.family else ():
        rows.append(study(kind, USUAL))
        print(json.dumps(rows[-1]), flush=True)
    for case in practitioners.CASES if not options.family or SMALL in options.family else ():
        rows.append(study(case.name, SMALL))
        print(json.dumps(rows[-1]), flush=True)
    if options.markdown:
        options.markdown.write_text(markdown(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
