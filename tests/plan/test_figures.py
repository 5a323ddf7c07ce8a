"""Plans whose figures do not agree are refused when they are read, by the figure; plans of every kind that is made are not."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from lowered import lowered, random_assignment
from plan_examples import example, stepped
from programs import trained_mlp

from solver_shard.errors import InputError
from solver_shard.plan.io import check_figures, plan_from_json, plan_to_json

OPTIONS: list[dict[str, Any]] = [
    {},
    {"overlap": 0.7, "memory_weight": 3},
    {"objective": "memory", "microbatches": 3, "clip": True, "reduce_dtype": "f32"},
    {"fusion": True, "optimizer": "sgd"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_is_made_is_read_back(options: dict[str, Any]) -> None:
    case = lowered(trained_mlp(12, 8, 20, 2), "2,1,3", **options)
    for seed in range(4):
        plan = case.plan(random_assignment(case.graph, seed))
        assert plan_from_json(plan_to_json(plan)) == plan


CHANGES: dict[str, tuple[str, Any]] = {
    "costs.compute_ns": ("ops.0.nanoseconds", 5001),
    "ops\\[1\\].nanoseconds": ("ops.1.nanoseconds", -5000),
    "costs.communication_ns": ("costs.communication_ns", 1),
    "costs.total_ns": ("costs.total_ns", 1),
    "costs.hidden_ns": ("costs.hidden_ns", 0),
    "costs.by_kind_ns": ("costs.by_kind_ns.all_gather", 1),
    "costs.objective": ("costs.objective", 1),
    "costs.update_ns": ("costs.update_ns", -1),
    "reshards\\[0\\].nanoseconds": ("reshards.0.nanoseconds", 3501),
    "reshards\\[0\\].nbytes": ("reshards.0.nbytes", -1),
    "reshards\\[0\\].stop": ("reshards.0.stop", 99),
    "reshards\\[0\\].readers": ("reshards.0.readers", [[0, 0]]),
    "reshards\\[1\\].readers": ("reshards.1.readers", [[1, 1], [1, 1]]),
    "reshards\\[0\\].steps": ("reshards.0.steps.0.before", "RR"),
    "reshards\\[0\\].layout": ("reshards.0.layout", "S(1)R"),
    "holds\\[0\\].reshard": ("holds.0.layout", "S(0)R"),
    "tensors\\[2\\].layout": ("tensors.2.layout", "RR"),
    "reshards\\[0\\].source": ("tensors.1.layout", "S(0)S(1)"),
    "reshards\\[9\\].source": ("tensors.1.state", "S(1)S(1)"),
    "ops\\[0\\].operand_layouts\\[1\\]": ("ops.0.operand_layouts.1", "S(0)R"),
    "memory.limit": ("memory.limit", 19_999),
    "memory.times": ("memory.times.0", 1),
    "memory.peak:": ("memory.peak", 9281),
    "memory.peak_time": ("memory.peak_time", 0),
    "memory.peak_op": ("memory.peak_op", "optimizer"),
    "memory.at_peak": ("memory.at_peak.inputs", 0),
    "memory.holders": ("memory.holders.0.nbytes", 1),
    "memory.series.copies": ("memory.series.copies.0", -1),
    "certificate.objective": ("certificate.objective", 1),
    "certificate.bound": ("certificate.bound", 10**9),
    "certificate.gap": ("certificate.gap", 0.5),
    "certificate.history": ("certificate.history.0.bound", 1),
}


@pytest.mark.parametrize(("message", "change"), CHANGES.items(), ids=CHANGES)
def test_a_changed_figure_is_named(message: str, change: tuple[str, Any]) -> None:
    data = json.loads(plan_to_json(stepped(example())))
    *path, last = [int(part) if part.isdigit() else part for part in change[0].split(".")]
    place = data
    for part in path:
        place = place[part]
    assert place[last] != change[1]
    place[last] = change[1]
    with pytest.raises(
        InputError, match=f"not a valid plan: {message}.* the file says .*: it was changed after it was written; take it as"
    ):
        plan_from_json(json.dumps(data))


def test_what_is_called_optimal_is_as_good_as_its_bound() -> None:
    plan = stepped(example())
    found = dataclasses.replace(plan.certificate, bound=plan.costs.objective - 1, gap=1 / plan.costs.objective, history=())
    with pytest.raises(InputError, match=r"certificate\.status: the file says True, and its other figures give False"):
        check_figures(dataclasses.replace(plan, certificate=found))
    check_figures(dataclasses.replace(plan, certificate=dataclasses.replace(found, status="gap")))


def test_every_number_of_a_plan_that_is_added_up_is_checked() -> None:
    """All nanoseconds of the file, one larger each: none is left out of the sums."""
    text = plan_to_json(stepped(example()))
    data = json.loads(text)
    places = [place for place in numbers(data) if place[-1] in ("nanoseconds", "traffic_ns", "peak") or place[0] == "costs"]
    assert len(places) > 30
    for place in places:
        if place[-1] == "unshared_ns":  # what launches take that no step shows
            continue
        changed = json.loads(text)
        *path, last = place
        inner = changed
        for part in path:
            inner = inner[part]
        inner[last] += 1
        with pytest.raises(InputError, match="the file says"):
            plan_from_json(json.dumps(changed))


def numbers(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the whole numbers are."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return list(itertools.chain.from_iterable(numbers(item, (*place, key)) for key, item in items))
    return [place] if type(value) is int else []
