"""Prices of alternatives are those of a fresh solve with the layout as a pin; what is said of a plan is what is in it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import numpy as np
import pytest
from blocks import MESH, planned, traced
from plan_examples import example

from solver_shard.analysis import counterfactual
from solver_shard.analysis.difference import changes
from solver_shard.analysis.explain import Explanation, ObjectiveBounds, Price, explain
from solver_shard.analysis.explanation import Explainer, explanation
from solver_shard.errors import InfeasibleError, InputError
from solver_shard.graph.build import Lowered
from solver_shard.graph.choice_graph import Masks
from solver_shard.graph.nodes import OpNode, StateNode
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.pipeline import plan_program
from solver_shard.plan.plan import Plan, PlannedTensor
from solver_shard.solve.limits import Clock

pytestmark = pytest.mark.usefixtures("one_thread")

LITTLE: dict[str, Any] = {"mesh": "dp=4", "memory": "930MiB", "reserve": 0, "optimizer": "adamw-fused"}


def asked(plan: Plan, pattern: str, instead: str | None = None, **options: Any) -> Explanation:
    return explain(plan, pattern, instead, model=traced()[0], **{"time_limit": 120.0, **options})


def value_of(plan: Plan) -> ObjectiveBounds:
    return ObjectiveBounds(bound=plan.certificate.bound, objective=plan.certificate.objective)


def agree(one: ObjectiveBounds, other: ObjectiveBounds) -> None:
    """Equal where both are proven, overlapping elsewhere."""
    if one.proven and other.proven:
        assert one == other
    assert one.bound <= other.objective
    assert other.bound <= one.objective


LAYOUTS = {
    "parameters": ("layers.*.up.weight", "S(0),R"),
    "an input": ("x", "R,S(1)"),
    "activations": ("layers.*.down:out", "S(0),R"),
    "gradients": ("grad(layers.*.up.weight)", "S(1),S(0)"),
}


@pytest.mark.parametrize(("pattern", "layout"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_price_is_that_of_a_fresh_solve_with_the_pin(pattern: str, layout: str) -> None:
    plan = planned()
    found = asked(plan, pattern, layout).instead
    assert found is not None
    assert found.best is not None
    fresh = value_of(planned(pins=(f"{pattern}={layout}",)))
    agree(found.best.value, fresh)
    assert found.best.value.proven
    assert found.best.low <= fresh.objective - plan.certificate.objective <= found.best.high
    assert found.best.low >= 0


@pytest.mark.parametrize(("pattern", "layout"), [("layers.*.up.weight", "S(1)"), ("layers.*.down:out", "S(0)")])
def test_a_price_under_a_memory_limit_that_binds(pattern: str, layout: str) -> None:
    plan = planned(**LITTLE)
    assert plan.certificate.objective > planned(mesh="dp=4").certificate.objective
    found = asked(plan, pattern, layout).instead
    assert found is not None
    assert found.best is not None
    assert found.best.peak <= plan.options.usable_memory
    agree(found.best.value, value_of(planned(pins=(f"{pattern}={layout}",), **LITTLE)))


def test_free_layers_are_priced_one_by_one() -> None:
    plan = planned(tied=False)
    found = asked(plan, "layers.1.up.weight", "R,R")
    assert (found.count, found.wider, found.problem) == (1, False, "free")
    assert found.instead is not None
    assert found.instead.best is not None
    agree(found.instead.best.value, value_of(planned(pins=("layers.1.up.weight=R,R",), tied=False)))


def forced(plan: Plan, kind: type, wanted: dict[str, Any]) -> Plan:
    """A fresh solve in which nodes of these ops or tensors are narrowed."""

    def decided(lowered: Lowered) -> tuple[Masks, str]:
        masks, lowering = {}, lowered.lowering
        for v, node in enumerate(lowering.nodes):
            if isinstance(node, StateNode) and kind is StateNode and lowering.program.tensors[node.tensor].name in wanted:
                masks[v] = np.array([x == wanted[lowering.program.tensors[node.tensor].name] for x in node.layouts])
            made = lowering.program.ops[node.op].results[0] if isinstance(node, OpNode) and kind is OpNode else None
            if made is not None and lowering.program.tensors[made].name in wanted:
                column = lowering.strategies[node.op]
                name = wanted[lowering.program.tensors[made].name]
                masks[v] = np.array([column.names(k) == name for k in range(len(column.axis_choice))])
        assert len(masks) == len(wanted)
        return masks, "forced"

    return plan_program(traced()[0], mesh=Mesh.parse(MESH), cluster=plan.cluster, options=plan.options, baseline=decided, relays=True)


def test_the_price_of_an_optimizer_state() -> None:
    plan = planned()
    found = asked(plan, "layers.*.down.weight", "R,R", of="state").instead
    assert found is not None
    assert found.best is not None
    whole = {f"layers.{i}.down.weight": Layout.parse("RR") for i in range(3)}
    agree(found.best.value, value_of(forced(plan, StateNode, whole)))


def test_the_price_of_a_strategy() -> None:
    plan = planned()
    found = asked(plan, "layers.*.up:out", "a,a", of="strategy")
    assert found.instead is not None
    assert found.instead.best is not None
    wanted = {f"layers.{i}.up.einsum": ("a", "a") for i in range(3)}
    agree(found.instead.best.value, value_of(forced(plan, OpNode, wanted)))


@pytest.mark.parametrize("of", ["layout", "strategy"])
def test_what_was_chosen_costs_nothing(of: Any) -> None:
    plan = planned()
    pattern = "layers.2.down:out" if of == "strategy" else "layers.2.down.weight"  # the first layer is another: it reads the input
    present = asked(plan, pattern, "*,*", of=of).present
    found = asked(plan, pattern, present, of=of)
    assert found.instead is not None
    assert found.instead.best is not None
    assert (found.instead.best.low, found.instead.best.high) == (0, 0)
    assert found.instead.best.changes.nothing
    assert "it is what the plan does: nothing changes" in str(found)


def test_an_interval_of_a_plan_that_is_not_proven_holds_the_true_price() -> None:
    pattern, layout = LAYOUTS["parameters"]
    true = planned(pins=(f"{pattern}={layout}",)).certificate.objective - planned().certificate.objective
    plan = planned(gap=0.05)
    worse = dataclasses.replace(plan.certificate, bound=plan.certificate.bound - 1000)  # still a bound
    found = asked(dataclasses.replace(plan, certificate=worse), pattern, layout).instead
    assert found is not None
    assert found.best is not None
    assert found.best.low < found.best.high
    assert found.best.low <= true <= found.best.high


def test_within_a_work_limit_the_same_is_found_however_slow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(workers: int) -> dict[str, Any]:
        return asked(planned(tied=False), "layers.1.up.weight", alternatives=2, work_limit=0.1, time_limit=None, workers=workers).data()

    fast = found(workers=1)
    assert any(price["best"]["low"] < price["best"]["high"] for price in fast["alternatives"])  # the limit is felt
    minutes = itertools.count(0.0, 60.0)
    monkeypatch.setitem(Clock.__init__.__kwdefaults__, "now", lambda: next(minutes))  # a minute goes by between any two looks at it
    monkeypatch.setattr(counterfactual.time, "monotonic", lambda: next(minutes))
    assert found(workers=2) == fast


def test_bounds_after_a_price_are_said_in_words() -> None:
    note = "bounds after a price: it is that of the best plan found, which is not proven to be the best there is"
    plan = planned(mesh="dp=4")
    table = asked(plan, "layers.*.up.weight", alternatives=1)
    assert note not in str(table)
    assert note in str(dataclasses.replace(table, alternatives=tuple(unproven(price) for price in table.alternatives)))
    one = asked(plan, "layers.*.up.weight", "S(1)")
    assert one.instead is not None
    assert ", exactly" in str(one)
    text = str(dataclasses.replace(one, instead=unproven(one.instead)))
    assert "as far as found, proven to be between +0 ns and +" in text
    assert "; more --time-limit or --work-limit narrows this\n" in text
    assert ", proven to within 7 ns\n" in str(dataclasses.replace(one, instead=unproven(one.instead, low=1_000_000, high=1_000_007)))


def unproven(price: Price, low: int = 0, high: int = 10**6) -> Price:
    """The same with bounds of its price."""
    assert price.best is not None
    return dataclasses.replace(price, best=dataclasses.replace(price.best, low=low, high=high))


def test_the_alternatives_are_all_layouts_ranked_by_price() -> None:
    plan = planned(mesh="dp=4")
    found = asked(plan, "layers.*.up.weight", alternatives=1)
    (best,), (other,) = found.alternatives, found.others
    assert best.best is not None
    assert other.best is not None
    assert best.best.value.objective <= other.best.value.objective
    assert {found.present, best.label, other.label} == {"R", "S(0)", "S(1)"}
    assert not found.untried
    for price in (best, other):
        assert price.best is not None
        agree(price.best.value, value_of(planned(mesh="dp=4", pins=(f"layers.*.up.weight={price.label}",))))
    assert "Alternatives for layers.{0..2}.up.weight, all 3 alike" in str(found)


def test_copies_that_decide_alike_are_priced_together_and_it_is_said() -> None:
    found = asked(planned(), "layers.2.up.weight", "R,R")
    assert found.wider
    assert found.about == ("layers.{1,2}.up.weight",)
    assert "the price is of all 2 together" in str(found)


def test_a_layout_that_does_not_fit_is_told_with_what_it_needs() -> None:
    plan = planned(**LITTLE)
    found = asked(plan, "layers.*.*.weight", "R")
    assert found.instead is not None
    assert (found.instead.outcome, found.instead.best) == ("too large", None)
    assert found.instead.least is not None
    assert found.instead.least > plan.options.usable_memory
    assert "does not fit into memory: no plan with it needs less than" in str(found)
    with pytest.raises(InfeasibleError):
        planned(pins=("layers.*.*.weight=R",), **LITTLE)


def test_what_no_plan_does_is_told_apart_from_what_does_not_fit() -> None:
    found = asked(planned(template="dp=ddp,tp=megatron"), "layers.*.down:out", "R,R", of="strategy")
    assert found.instead is not None
    assert found.instead.outcome == "impossible"
    assert "running layers.{0..2}.down.einsum as R,R is impossible: no plan of this template runs so, whatever the memory" in str(found)


ILLEGAL = {
    "no such dim": ("x", "S(2),R", "layout", "has dims 0 to 1; S\\(2\\) is not one of them"),
    "a stored tensor that is partial": ("layers.*.up.weight", "P(sum),R", "layout", "is stored, not computed"),
    "no layout": ("x", "whole", "layout", "cannot read pin"),
    "nobody asks for it": ("layers.*.up.weight", "P(sum),R", "forward", "stored, not computed"),
    "no such strategy": (
        "layers.*.up:out",
        "q,R",
        "strategy",
        "q,R is no strategy of aten.einsum.default in layers.0.up.*; legal: dp: R, a",
    ),
    "no state": ("x", "R,R", "state", "'x' has no optimizer state in this plan"),
    "no op makes it": ("x", "R,R", "strategy", "made by no op"),
    "no such name": ("layer.up", "R,R", "layout", "no tensor, op or module of this plan is called 'layer.up'"),
}


@pytest.mark.parametrize(("pattern", "instead", "of", "message"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_what_is_not_legal_is_told_apart(pattern: str, instead: str, of: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        asked(planned(), pattern, instead, of=of)


def test_pins_and_template_of_the_plan_are_kept() -> None:
    with pytest.raises(InputError, match=r"R,R is no legal layout of 'x'.*legal: S\(0\)S?\(?.*The plan's pins 'x=dp=S\(0\)' are kept"):
        asked(planned(pins=("x=dp=S(0)",)), "x", "R,R")
    with pytest.raises(InputError, match="The plan's template 'dp=ddp,tp=megatron' is kept"):
        asked(planned(template="dp=ddp,tp=megatron"), "layers.*.up.weight", "S(0),S(0)")


def test_a_plan_that_keeps_what_a_pass_decided_has_no_prices() -> None:
    plan = planned()
    kept = dataclasses.replace(plan, options=dataclasses.replace(plan.options, propagation="basic"))
    with pytest.raises(InputError, match="keeps what basic decided"):
        asked(kept, "x", "R,R")


def test_changes_add_up() -> None:
    before, after = planned(), planned(pins=("layers.*.up.weight=S(0),R",))
    found = changes(before, after)
    assert found.total_ns == found.compute_ns + found.update_ns + found.communication_ns
    talk = [sum(plan.costs.by_kind_ns.values()) for plan in (before, after)]
    assert sum(c.nanoseconds for c in found.collectives) == talk[1] - talk[0]
    assert sum(c.count for c in found.layouts if c.name.startswith("layers.") and c.name.endswith(".up.weight")) == 3
    assert changes(before, before).nothing


def test_collectives_around_a_parameter_are_named_with_their_purpose() -> None:
    text = str(explanation(planned(template="dp=zero3,tp=megatron"), "layers.*.up.weight"))
    assert "layers.{1,2}.up.weight  f32[8192, 4096]  trained parameter  x2" in text
    assert "gathers dim 1 (4096), for up" in text
    assert "adds up the gradient, each device keeps its part of dim 1 (4096)" in text
    assert "of the new values" in str(explanation(planned(template="dp=zero1,tp=megatron"), "layers.*.up.weight"))


def test_ops_are_explained_axis_by_axis_with_the_source_of_their_rule() -> None:
    text = str(explanation(example(source="fallback"), "layers.*.down"))
    assert "layers.{0..2}.down: aten.einsum.default  forward, 5.00 us of compute each  x3" in text or "layers.2.down" in text
    assert "strategies from no rule: replicated on every axis" in text
    assert "tp  strategy b  cuts" in text
    assert "-> partial sums" in text
    ops = explanation(example(), "aten.einsum.default").ops
    assert sum(op.count for op in ops) == 6


def test_every_tensor_has_an_explanation_that_says_every_collective_of_the_plan() -> None:
    plan = planned()
    explainer = Explainer(plan)
    found = [explainer.tensor(t) for t in range(len(plan.tensors))]
    own = [c for one in found for c in one.collectives if not (one.gradient is not None and c.when == "optimizer")]
    assert sum(c.count * c.nanoseconds for c in own) == sum(plan.costs.by_kind_ns.values())
    assert json.loads(explanation(plan, "x").to_json())["tensors"][0]["layout"] == str(plan.tensors[names(plan)["x"]].layout)


def names(plan: Plan) -> dict[str, int]:
    tensors: tuple[PlannedTensor, ...] = plan.tensors
    return {tensor.name: t for t, tensor in enumerate(tensors)}
