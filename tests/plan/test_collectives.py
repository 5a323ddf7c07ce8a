"""A step's collectives are counted the same everywhere: reports, comparisons and traces add up to what the step pays, over random plans."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from lowered import Lowered, lowered, random_assignment
from programs import gated, trained_mlp

from solver_shard.analysis.compare import KINDS, ComparisonRow, row_of
from solver_shard.analysis.difference import changes, difference
from solver_shard.analysis.recipes import Made
from solver_shard.plan.plan import LOCAL, Plan
from solver_shard.plan.summary import collected
from solver_shard.reports.modules import module_tree
from solver_shard.verification.verdict import planned_traffic

STEPS: list[dict[str, Any]] = [
    {"clip": True},
    {"clip": True, "microbatches": 3, "overlap": 0.5},
    {"optimizer": "sgd", "clip": True, "reduce_dtype": "f32", "overlap": 0.7},
    {"microbatches": 2, "reduce_dtype": "bf16"},
    {"optimizer": "none", "overlap": 0.3},
    {"clip": True, "master_weights": False, "fusion": True},
]
PROGRAMS = [trained_mlp(), trained_mlp(layers=2, tokens=30, hidden=60), gated(whole=True)]
MESHES = ["4", "dp=2,tp=2", "dp=2,tp=3"]


@functools.cache
def step(k: int) -> Lowered:
    return lowered(PROGRAMS[k % 3], MESHES[k * 5 // 3 % 3], **STEPS[k])


def two_plans(seed: int) -> tuple[Lowered, Plan, Plan]:
    """Two random plans for one step."""
    case = step(seed % len(STEPS))
    one, two = (case.plan(random_assignment(case.graph, 2 * seed + k)) for k in (0, 1))
    return case, one, two


def row(case: Lowered, first: Plan, plan: Plan) -> ComparisonRow:
    return row_of(first, Made(name="a plan", kind="template", plan=plan, program=case.program))


@pytest.mark.parametrize("seed", range(24))
def test_what_differs_between_two_plans_adds_up_to_the_difference_of_their_step_times(seed: int) -> None:
    case, one, two = two_plans(seed)
    said = difference(row(case, one, one), row(case, one, two))
    more = {what: b - a for what, (a, b) in said.figures.items()}
    assert more["step"] == two.costs.total_ns - one.costs.total_ns == more["compute"] + more["update"] + more["communication"]
    assert more["communication"] == sum(moved.delta_ns for moved in said.collectives) - more["hidden"]
    found = changes(one, two)
    assert found.total_ns == more["step"] == found.compute_ns + found.update_ns + found.communication_ns
    assert found.communication_ns == sum(c.nanoseconds for c in found.collectives) - found.hidden_ns


@pytest.mark.parametrize("seed", range(12))
def test_every_table_of_a_plans_collectives_adds_up_to_what_its_step_pays(seed: int) -> None:
    case, plan, _ = two_plans(seed)
    paid = plan.costs.communication_ns + plan.costs.hidden_ns
    assert sum(c.runs * c.nanoseconds for c in plan.collectives()) == paid
    assert sum(part.nanoseconds for part in collected(plan)) == paid
    assert sum(count for count, _ in planned_traffic(plan).values()) == sum(c.runs for c in plan.collectives())
    assert not any(c.kind in LOCAL for c in plan.collectives())
    assert module_tree(plan, range(len(plan.tensors)))["communication_ns"] == paid
    by_kind = row(case, plan, plan).by_kind_ns
    assert tuple(by_kind) == KINDS
    assert sum(by_kind.values()) == plan.costs.communication_ns


def test_clipping_is_named_where_one_plan_needs_its_sum_and_the_other_does_not() -> None:
    case = lowered(trained_mlp(), "4", clip=True)
    plans = [case.plan(random_assignment(case.graph, seed)) for seed in range(40)]
    whole, cut = (next(plan for plan in plans if (plan.clip is None) is alone) for alone in (True, False))
    said = difference(row(case, whole, whole), row(case, whole, cut))
    (moved,) = (moved for moved in said.collectives if moved.purpose == "gradient clipping")
    assert cut.clip is not None
    assert (moved.names, moved.count, moved.delta_ns) == (("the norm of all gradients",), (0, 1), cut.clip.nanoseconds)
