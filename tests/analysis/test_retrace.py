"""The model behind a plan: presets are known, anything else is asked for, and another model is refused."""

from __future__ import annotations

import dataclasses

import pytest

from solver_shard.analysis.reopen import retrace
from solver_shard.api import optimize
from solver_shard.errors import InputError
from solver_shard.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return optimize("entry_models:mlp", mesh="dp=2,tp=2", pins=["up:out=S(0),R"], time_limit=10)


def test_a_given_model_is_traced_and_fits(plan: Plan) -> None:
    found = retrace(plan, "entry_models:mlp")
    assert found.traced is not None
    assert {t.name for t in found.program.tensors} < {t.name for t in plan.tensors}  # the pin's place is not in it yet


def test_a_plan_of_no_preset_asks_for_its_model(plan: Plan) -> None:
    with pytest.raises(InputError, match="which is no preset; say which model it is: --model"):
        retrace(plan)


def test_a_plan_never_makes_a_module_be_imported(plan: Plan) -> None:
    hostile = dataclasses.replace(plan, provenance=dataclasses.replace(plan.provenance, source="antigravity:geohash"))
    with pytest.raises(InputError, match="no preset"):
        retrace(hostile)


def test_another_model_is_refused_with_the_first_difference(plan: Plan) -> None:
    first, *others = plan.tensors
    grown = dataclasses.replace(plan, tensors=(dataclasses.replace(first, shape=(7, *first.shape[1:])), *others))
    with pytest.raises(InputError, match=f"the plan has trained parameter '{first.name}' f32\\[7, "):
        retrace(grown, "entry_models:mlp")


def test_a_preset_for_a_plan_of_another_kind_is_refused(plan: Plan) -> None:
    with pytest.raises(InputError, match="not made from a preset or config"):
        retrace(plan, "gpt2")
