"""Prices of ``explain`` on Llama-3-8B, each held against a fresh solve with the layout as a pin.

    python experiments/explain.py [PLAN.json] [-o experiments/explain.md]

Without a plan file, the main job's plan is solved first. The model is traced once. Every alternative is priced twice: by ``explain``, from
the present plan, and by ``plan_program`` with one more pin, from nothing. Both give an interval [bound, objective] of the best plan with
that layout; where both are proven they must be equal, elsewhere they must overlap (``CHECK`` would say so and the script fail).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

from solver_shard import Plan, load_plan, optimize
from solver_shard.analysis.counterfactual import Limits
from solver_shard.analysis.explain import AlternativePricer, Explanation, ObjectiveBounds
from solver_shard.analysis.explanation import explanation
from solver_shard.analysis.reopen import Reopened, Retraced, reopen, retrace
from solver_shard.clock import StageClock
from solver_shard.pipeline import plan_program
from solver_shard.text import format_bytes, format_ns

QUESTIONS = (
    ("model.layers.*.self_attn.k_proj.weight", "S(0),R"),
    ("model.layers.*.self_attn.k_proj.weight", "R,S(0)"),
    ("model.layers.*.mlp.up_proj.weight", "S(1),S(0)"),
    ("model.layers.*.mlp.up_proj.weight", "R,R"),
    ("model.layers.*.mlp.down_proj.weight", "dp=S(*)"),
    ("lm_head.weight", "R,S(0)"),
    ("model.embed_tokens.weight", "R,R"),
    ("input_ids", "S(0),R"),
    ("model.layers.*.mlp:out", "S(0),R"),
    ("model.layers.*.post_attention_layernorm:out", "S(0),R"),
    ("model.layers.*.self_attn.o_proj:out", "S(0),S(2)"),
)
TABLE = "model.layers.*.self_attn.k_proj.weight"
INSTEAD = ("model.layers.*.mlp:out", "S(0),R")
LIMIT = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", nargs="?", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    plan = load_plan(given.plan) if given.plan else optimize("llama3-8b", batch=64, seq=8192, mesh="dp=32,tp=8", memory="70GiB")
    retraced = retrace(plan)
    reopened = reopen(plan, retraced)
    rows, agree = [], True
    for pattern, layout in QUESTIONS:
        row, fine = question(plan, retraced, reopened, pattern, layout)
        print(row, flush=True)
        rows.append(row)
        agree &= fine
    start = time.process_time()
    shown = asking(reopened, TABLE).alternatives(5)
    instead = asking(reopened, INSTEAD[0]).instead(INSTEAD[1])
    print(f"{shown}\n\n{instead}\n{time.process_time() - start:.1f} s of processor time", flush=True)
    if given.output:
        given.output.write_text(report(plan, rows, shown, instead), encoding="utf-8")
    return 0 if agree else 1


def asking(reopened: Reopened, pattern: str) -> AlternativePricer:
    """Questions about a pattern, with the time limit of this study."""
    return AlternativePricer(
        reopened,
        explanation(reopened.plan, pattern),
        pattern=pattern,
        of="layout",
        limits=Limits(seconds=LIMIT),
        gap=None,
        seed=None,
        workers=1,
        clock=StageClock(),
        stop=None,
    )


def question(plan: Plan, retraced: Retraced, reopened: Reopened, pattern: str, layout: str) -> tuple[str, bool]:
    """A row of the table, and whether the two prices agree."""
    start = time.process_time()
    found: Explanation = asking(reopened, pattern).instead(layout)
    middle = time.process_time()
    options = dataclasses.replace(plan.options, pins=(*plan.options.pins, f"{pattern}={layout}"), time_limit=LIMIT)
    fresh = plan_program(retraced.program, mesh=plan.mesh, cluster=plan.cluster, options=options, traced=retraced.traced, workers=1)
    end = time.process_time()
    assert found.instead is not None
    best = found.instead.best
    assert best is not None, f"{pattern}={layout}: {found.instead.outcome}"
    other = ObjectiveBounds(bound=fresh.certificate.bound, objective=fresh.certificate.objective)
    both = best.value.proven and other.proven
    agrees = best.value == other if both else best.value.bound <= other.objective and other.bound <= best.value.objective
    price = best.value.objective - found.now.objective
    cells = (
        f"`{pattern}`",
        f"`{layout}`",
        f"{100 * price / found.now.objective:+.3f}%",
        "exactly" if best.low == best.high else f"{best.low:+,} to {best.high:+,} ns",
        f"{interval(best.value)}",
        f"{interval(other)}",
        "equal" if both and agrees else "overlap" if agrees else "CHECK",
        f"{middle - start:.1f} s",
        f"{end - middle:.1f} s",
    )
    return f"| {' | '.join(cells)} |", agrees


def interval(value: ObjectiveBounds) -> str:
    return f"{value.objective:,}" if value.proven else f"{value.bound:,} to {value.objective:,}"


def report(plan: Plan, rows: list[str], shown: Explanation, instead: Explanation) -> str:
    head = (
        "| tensors | instead | price | proven | explain, ns | fresh solve, ns | | explain | fresh |",
        "|---|---|---|---|---|---|---|---|---|",
    )
    return "\n".join(
        [
            "# Prices of other layouts, and the same by a fresh solve",
            "",
            f"`python experiments/explain.py`: {plan.provenance.source} on {plan.mesh},",
            f"{format_bytes(plan.options.memory_limit)} per device. The plan takes",
            f"{format_ns(plan.costs.total_ns)} a step, gap {plan.certificate.gap:.2g}. Columns five and six are the step time of the best",
            "plan with the layout: one number where it is proven optimal, else [bound, objective]. The last two are processor seconds for",
            "an answer, without tracing and reopening.",
            "",
            *head,
            *rows,
            "",
            f"`solver-shard explain plan.json '{TABLE}'`:",
            "",
            "```",
            str(shown),
            "```",
            "",
            f"`solver-shard explain plan.json '{INSTEAD[0]}' --instead '{INSTEAD[1]}'`:",
            "",
            "```",
            str(instead),
            "```",
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
