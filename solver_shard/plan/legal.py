"""A plan from outside, held against its model: priced anew, or refused because the model cannot run as it says.

>>> evaluated(load_plan("plan.json"), program).total_ns
383012345

The evaluator takes a decision that is not legal for a mistake of ours (an InternalError), for it checks what solving has made. In a plan
that was read from a file it is the file's.
"""

from __future__ import annotations

from solver_shard.costs.model import CostModel
from solver_shard.errors import InputError, InternalError
from solver_shard.plan.evaluate import Evaluation, evaluate
from solver_shard.plan.plan import Plan
from solver_shard.program import Program


def evaluated(plan: Plan, program: Program) -> Evaluation:
    """What a plan costs and needs by its model, its rules and its cluster.

    Args:
        program: the model's, with places for the plan's pins (:func:`solver_shard.export.loading.fitting`).

    Raises:
        InputError: the plan decides what the model cannot run; the message names the op, tensor or reshard.
    """
    costs = CostModel(plan.mesh, plan.cluster, overlap=plan.options.overlap)
    try:
        return evaluate(plan, program, plan.options.rulebook(), costs)
    except InternalError as error:
        raise InputError(
            f"{error}. It was made by {plan.provenance.tool or 'another tool'}, perhaps of another state, or was changed after it was "
            "written; take it as solve wrote it, or solve again with the same options"
        ) from None
