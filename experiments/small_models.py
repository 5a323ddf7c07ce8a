"""The planned memory of small models that are no language models against the bytes that a device holds, op by op.

    python experiments/small_models.py [MODEL ...] [--markdown experiments/small_models.md]

Every model of ``tests/small_models.py`` takes one training step with AdamW as random plans on two and on four devices say, and with every
op replicated. A row has the peak of forward and backward, planned and measured (see tests/measured.py), how much of the
measured one the plan says more (+) or less (-), the same of the update, and the op at which planned and measured bytes differ most.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from measured import measure
from memory import near
from points import plan_of, random_point
from small_models import MODELS, make

from solver_shard import Mesh, Rulebook, SolverShardError, trace
from solver_shard.costs.model import CostModel
from solver_shard.graph.lowering import lower
from solver_shard.graph.nodes import OpNode
from solver_shard.options import Options
from solver_shard.plan.evaluate import evaluate
from solver_shard.runtime.schedule import schedule

PLANS = (("2,2", None), ("2", 1))
"""Mesh and seed; None with every op replicated."""


NOTES = """
What stays: a view op that gets more than it asks for cuts a slice, which a run clones; the copy that it was given counts until the view's
readers are done. So does a copy of which a view is read that is held otherwise. A view of a copy that is held counts with its own
elements, where the run has the whole copy (the unbound steps of recurrent cells: told too low). While others may still read a tensor, its
bytes count until the reader of its last reshard has run, though that reader may have a copy.
"""


def study(name: str) -> list[str]:
    """The rows of one model."""
    model, inputs = make(name)
    program = trace(model, inputs, name=name)
    known = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False)) | inputs
    values = {t: known[program.tensors[t].name].detach() for t in program.sources()}
    rows, options = [], Options(memory_limit=1 << 40)
    for mesh, seed in PLANS:
        costs = CostModel(Mesh.parse(mesh), near())
        lowering = lower(program, Rulebook(), costs, optimizer_state=options.optimizer_state())
        fixed = {v: 0 for v, node in enumerate(lowering.nodes) if isinstance(node, OpNode) and seed is None}
        start = f"| {name} | {mesh} | {'whole' if seed is None else f'random {seed}'} |"
        try:
            plan = plan_of(lowering, random_point(lowering.graph, seed or 0, fixed), costs, options)
            schedule(plan, program)
            said, found = evaluate(plan, program, Rulebook(), costs).totals, measure(plan, program, values).totals
        except (SolverShardError, RuntimeError) as error:
            rows.append(f"{start} {type(error).__name__}: {str(error).splitlines()[0][:100]} | | | | |")
            continue
        planned, measured = max(said[:-1]), max(found[:-1])
        worst = max(range(len(program.ops)), key=lambda i: abs(said[i] - found[i]))
        update = said[-1] / found[-1] - 1
        op = f"{program.ops[worst].name} {said[worst] - found[worst]:+,}"
        rows.append(f"{start} {planned:,} | {measured:,} | {planned / measured - 1:+.2%} | {update:+.2%} | {op} |")
    print("\n".join(rows), flush=True)
    return rows


def markdown(rows: list[str]) -> str:
    """The table, and how many hold."""
    apart = [abs(float(cells[6].strip().rstrip("%"))) for cells in (row.split("|") for row in rows) if cells[6].strip()]
    update = [abs(float(cells[7].strip().rstrip("%"))) for cells in (row.split("|") for row in rows) if cells[7].strip()]
    within, of_update = sum(x <= 5 for x in apart), sum(x <= 5 for x in update)
    return "\n".join(
        [
            "# Planned memory of small models against measured memory",
            "",
            "By `python experiments/small_models.py --markdown experiments/small_models.md` (see the script). Bytes of the fullest device.",
            "",
            f"Of {len(rows)} plans of {len({row.split('|')[1] for row in rows})} models, {len(apart)} run; {within} have a peak of forward",
            f"and backward within 5% of the measured one (largest difference {max(apart):.2f}%), {of_update} an update within 5% (largest",
            f"{max(update):.2f}%).",
            "",
            "| model | mesh | plan | planned peak | measured peak | apart | update apart | largest difference at an op, bytes |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            NOTES,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args()
    unknown = set(options.models) - set(MODELS)
    if unknown:
        parser.error(f"unknown model {', '.join(sorted(unknown))}; models: {', '.join(MODELS)}")
    torch.set_num_threads(1)
    rows = [row for name in options.models or MODELS for row in study(name)]
    if options.markdown:
        options.markdown.write_text(markdown(rows))


if __name__ == "__main__":
    main()
