"""A plan is found in its choice graph again: the same objective and peak to the byte, whatever it was made with."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from points import plan_of, random_point
from wide_llama import MESH, planned, traced

from solver_shard.analysis.reopen import Reopened, reopen, retrace
from solver_shard.costs.cluster import load_cluster
from solver_shard.errors import InputError
from solver_shard.graph.build import lower_program
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "template": {"template": "dp=zero3,tp=megatron-sp"},
    "pins": {"pins": ("*.mlp.up_proj.weight=tp=S(0)", "*.mlp:out=R,S(1)", "input_ids=S(0),R")},
    "microbatches": {"microbatches": 2, "reduce_dtype": "f32", "clip": True},
    "fusion, overlap and a price of memory": {"fusion": True, "overlap": 0.5, "memory_weight": 1000},
    "peak": {"objective": "memory"},
    "inference": {"forward_only": True},
}


def again(plan: Plan) -> Reopened:
    return reopen(plan, retrace(plan, traced(plan.options.forward_only)[0]))


def check(plan: Plan, found: Reopened) -> None:
    assert found.lowered.lowering.graph.allowed(found.assignment)
    parts = found.writer().build_plan(found.assignment)
    assert parts.costs == plan.costs
    assert parts.memory == plan.memory
    assert (parts.tensors, parts.ops, parts.clip) == (plan.tensors, plan.ops, plan.clip)
    assert (parts.reshards, parts.holds) == (plan.reshards, plan.holds)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_any_point_of_a_graph_is_found_again_from_its_plan(options: dict[str, Any]) -> None:
    asked = Options(memory_limit=2**40, split="off", **options)
    cluster = load_cluster("h100")
    made = lower_program(traced(asked.forward_only)[0], mesh=Mesh.parse(MESH), cluster=cluster, options=asked)
    point = random_point(made.lowering.graph, seed=1)
    plan = plan_of(made.lowering, point, made.costs, asked)
    check(plan, again(plan))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "free"])
def test_a_solved_plan_is_found_in_the_problem_that_its_bound_is_of(tied: bool) -> None:
    plan = planned(tied=tied, time_limit=20, gap=0.3)
    found = again(plan)
    check(plan, found)
    assert (found.problem.folded is None) == (plan.certificate.problem == "free")


def test_a_plan_of_other_prices_is_refused() -> None:
    plan = planned(time_limit=20, gap=0.3)
    with pytest.raises(InputError, match=r"its objective is \d+ here and \d+ in the plan.*solve it again"):
        again(dataclasses.replace(plan, cluster=load_cluster("a100")))


def test_an_edited_plan_is_refused() -> None:
    plan = planned(time_limit=20, gap=0.3)
    edited = [
        dataclasses.replace(t, layout=Layout.parse("S(1)S(1)")) if t.name.endswith("0.mlp.up_proj.weight") else t for t in plan.tensors
    ]
    assert tuple(edited) != plan.tensors
    with pytest.raises(InputError, match="the plan is no point of the choice graph"):
        again(dataclasses.replace(plan, tensors=tuple(edited)))
