"""Plans in which named implementations are forced to occur give the unsharded step, at the price of the choice graph."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from e2e.test_simulate import case_of, check
from lowered import Lowered, lowered, random_assignment

from solver_shard.errors import InternalError
from solver_shard.graph.nodes import OpNode
from solver_shard.verification.simulate import simulate


def implemented(made: Lowered, seed: int) -> tuple[int, ...]:
    """A random assignment in which every op that has an implementation runs it, on some axes at least."""
    draw, fixed = random.Random(seed), {}
    for i, column in enumerate(made.lowering.strategies):
        options = [k for k in range(len(column.axis_choice)) if column.implementation(k)]
        if options:
            fixed[made.lowering.index[OpNode, i, 0]] = draw.choice(options)
    return random_assignment(made.graph, seed, fixed)


@pytest.mark.parametrize("mesh", ["2", "3", "2,2", "3,2"])
@pytest.mark.parametrize("name", ["llama", "llama in odd sizes", "gpt2 in odd sizes"])
def test_plans_of_named_implementations_give_the_unsharded_step(name: str, mesh: str) -> None:
    case = case_of(name)
    made = lowered(case.program, mesh)
    assignment = implemented(made, 0)
    plan = made.plan(assignment)
    found = made.evaluate(plan)
    assert (found.total_ns, found.peak) == (made.graph.cost(assignment), made.peak(assignment))
    assert found.inside_ns == tuple(sum(c.nanoseconds for c in op.collectives) for op in plan.ops)
    assert plan.costs.communication_ns == sum(r.nanoseconds for r in plan.reshards) + sum(found.inside_ns)
    check(case, plan)
    used = {op.implementation for op in plan.ops} - {""}
    assert used == {"masked-lookup", "own-rows", "cut-queries", "class-statistics", "own-classes"} | (
        {"norm-statistics"} if name.startswith("gpt2") else set()
    )
    text = str(plan) if len(plan.mesh.axes) == 1 else ""  # more axes have more rows than the report shows
    assert not text or all(way in text for way in (*used, "inside ops, forward", "inside ops, backward", "named implementations"))


def test_a_loss_over_a_cut_vocabulary_all_reduces_statistics_alone() -> None:
    """Megatron-LM's parallel cross entropy: a maximum, a sum of exponentials and a loss; one sum more in backward, as softmax's
    gradient is not merged with that of the loss here. The loss is summed over rows first, so that it is one number."""
    case = case_of("llama")
    batch, seq = 8, 16
    made = lowered(case.program, "tp=4", pins={})
    rows = {i: op for i, op in enumerate(case.program.ops) if "softmax" in op.name or "nll" in op.name}
    fixed = {}
    for i in rows:
        column = made.lowering.strategies[i]
        fixed[made.lowering.index[OpNode, i, 0]] = next(k for k in range(len(column.axis_choice)) if column.implementation(k))
    plan = made.plan(random_assignment(made.graph, 0, fixed))
    inside = [(plan.ops[i].name, c.kind, c.axes, c.nbytes) for i in rows for c in plan.ops[i].collectives]
    size = batch * seq * 8  # one f64 per row; the step is widened
    assert inside == [
        ("aten._log_softmax.default", "all_reduce", ("tp",), size),
        ("aten._log_softmax.default", "all_reduce", ("tp",), size),
        ("aten._log_softmax_backward_data.default", "all_reduce", ("tp",), size),
    ]
    loss = next(op for op in plan.ops if op.name == "shard.nll_loss_forward")
    assert [str(layout) for layout in loss.result_layouts] == ["P(sum)", "R"]
    check(case, plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"collectives": ()}, "is not what the plan lists"),
        ({"implementation": "guess"}, "no implementation 'guess'"),
    ],
)
def test_an_implementation_that_departs_from_the_plan_is_found_out(change: dict[str, Any], message: str) -> None:
    case = case_of("gpt2 in odd sizes")
    made = lowered(case.program, "2")
    plan = made.plan(implemented(made, 0))
    i = next(i for i, op in enumerate(plan.ops) if op.collectives)
    ops = [dataclasses.replace(op, **change) if k == i else op for k, op in enumerate(plan.ops)]
    with pytest.raises(InternalError, match=message):
        simulate(dataclasses.replace(plan, ops=tuple(ops)), case.program, case.values)
    if "implementation" in change:
        with pytest.raises(InternalError, match="says it runs implementation 'guess'"):
            made.evaluate(dataclasses.replace(plan, ops=tuple(ops)))
