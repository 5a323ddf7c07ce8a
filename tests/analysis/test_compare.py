"""One table: rows are the evaluator's figures, ordered and complete, and what cannot be had is said."""

from __future__ import annotations

import csv
import dataclasses
import io
import json

import pytest

from solver_shard.analysis.compare import Comparison, compare
from solver_shard.analysis.difference import difference
from solver_shard.analysis.recipes import GREEDY, PASSES, starting_pins
from solver_shard.api import optimize
from solver_shard.costs.model import CostModel
from solver_shard.errors import InputError
from solver_shard.plan.evaluate import evaluate
from solver_shard.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = "entry_models:mlp"
RECIPES = ("zero3", "ddp", "dp=zero3,tp=expert-parallel", *PASSES, *GREEDY)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return optimize(MODEL, mesh="dp=2,tp=2", time_limit=10)


@pytest.fixture(scope="module")
def found(plan: Plan) -> Comparison:
    other = optimize(MODEL, mesh="dp=2,tp=2", pins=["up:out=S(0),S(1)"], time_limit=10)
    return compare(plan, {"other.json": other}, recipes=RECIPES, pins={"pins.txt": ["up.weight=tp=S(0)"]}, model=MODEL)


def test_rows_are_the_first_plan_then_all_others_by_time(found: Comparison) -> None:
    assert found.rows[0].name == "ours"
    times = [row.step_ns for row in found.rows[1:]]
    assert times == sorted(times)
    assert {row.name for row in found.rows} == {"ours", "other.json", "pins.txt", "zero3", "ddp", *PASSES, *GREEDY}


def test_figures_are_the_evaluators_and_add_up(found: Comparison) -> None:
    for row in found.rows:
        plan = row.plan
        priced = evaluate(plan, row.program, plan.options.rulebook(), CostModel(plan.mesh, plan.cluster))
        assert (row.step_ns, row.peak) == (priced.total_ns, priced.peak)
        assert row.step_ns == row.compute_ns + row.update_ns + row.communication_ns
        assert row.peak == sum(row.at_peak.values())
        assert found.bound_ns is not None
        assert row.regret == pytest.approx(row.step_ns / found.bound_ns - 1)


def test_no_plan_that_fits_is_faster_than_the_bound(found: Comparison) -> None:
    assert all(row.regret is not None and row.regret >= 0 for row in found.rows)
    assert found.rows[0].regret == 0


def test_a_template_has_the_price_that_solving_it_gives(found: Comparison) -> None:
    assert found.row("zero3").step_ns == optimize(MODEL, mesh="dp=2,tp=2", template="zero3", time_limit=10).costs.total_ns


def test_of_each_kind_of_template_the_best_that_fits_is_a_row_and_the_strongest_is_named(plan: Plan) -> None:
    found = compare(plan, recipes=None, model=MODEL, time_limit=5)
    tried = {t.name: t for t in found.templates}
    assert {"zero2", "zero3", "dp=zero2,tp=megatron", "dp=zero3,tp=megatron"} <= tried.keys()
    rows = {row.name: row for row in found.rows if row.kind == "template"}
    for name, row in rows.items():
        assert (row.step_ns, row.peak, row.fits) == (tried[name].step_ns, tried[name].peak, tried[name].fits)
        alone = compare(plan, recipes=[name], model=MODEL, time_limit=5).row(name)
        assert row.step_ns == pytest.approx(alone.step_ns, rel=2e-4)
    assert sum(name.endswith("tp=megatron") for name in rows) == 1
    assert found.strongest is not None
    assert found.strongest.step_ns == min(t.step_ns for t in found.templates if t.fits and t.step_ns is not None)
    assert f"the strongest that fits is {found.strongest.name}" in str(found)
    assert found.to_json()["strongest"] == found.strongest.name


def test_what_does_not_apply_is_left_out_with_the_reason(found: Comparison) -> None:
    ((name, why),) = found.left_out
    assert name == "dp=zero3,tp=expert-parallel"
    assert "has no experts" in why
    assert f"{name}: {why}" in str(found)


def test_passes_that_agree_share_a_line_and_say_where_they_start(found: Comparison) -> None:
    assert found.start == starting_pins(found.rows[0].program, found.rows[0].plan.mesh)
    assert "start from inputs cut by batch over dp, and the matrices of the blocks by tp as Megatron-LM does" in str(found)
    lines = [line for line in str(found).splitlines() if "user-priority" in line]
    assert len(lines) == 1


def test_json_csv_and_markdown_say_the_same(found: Comparison) -> None:
    data = json.loads(json.dumps(found.to_json()))
    rows = list(csv.DictReader(io.StringIO(found.csv())))
    assert [row["name"] for row in data["rows"]] == [row["plan"] for row in rows] == [row.name for row in found.rows]
    assert [row["step_ns"] for row in data["rows"]] == [int(row["step_ns"]) for row in rows]
    assert data["left_out"][0]["name"] == "dp=zero3,tp=expert-parallel"
    assert found.markdown().count("\n| ") == len(found.rows)


def test_a_plan_that_needs_more_than_the_limit_stays_in_the_table(plan: Plan) -> None:
    whole = compare(plan, recipes=("replicate", "zero3"), model=MODEL)
    limit = whole.row("zero3").peak
    assert limit < whole.row("replicate").peak
    small = optimize(MODEL, mesh="dp=2,tp=2", memory=limit, reserve=0, time_limit=10)
    rows = compare(small, recipes=("replicate", "zero3"), model=MODEL)
    assert rows.row("zero3").fits
    assert not rows.row("replicate").fits
    assert rows.row("replicate").least_proven
    assert limit < (rows.row("replicate").least_peak or 0) <= rows.row("replicate").peak
    assert "no, least " in str(rows)


def test_figures_of_a_file_that_are_not_the_evaluators_are_told(plan: Plan) -> None:
    wrong = dataclasses.replace(plan, costs=dataclasses.replace(plan.costs, total_ns=plan.costs.total_ns // 2))
    rows = compare(plan, {"wrong.json": wrong}, recipes=(), model=MODEL)
    assert rows.row("wrong.json").step_ns == plan.costs.total_ns
    assert "its figures are not those of this version's prices" in rows.row("wrong.json").notes[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mesh": "dp=4"}, "its mesh is dp=4, that of the first plan dp=2,tp=2"),
        ({"mesh": "dp=2,tp=2", "cluster": "a100"}, "its cluster is a100, that of the first plan h100"),
        ({"mesh": "dp=2,tp=2", "optimizer": "sgd"}, "its optimizer is sgd, that of the first plan adamw"),
    ],
)
def test_plans_for_another_step_are_refused_by_the_first_difference(plan: Plan, options: dict[str, str], says: str) -> None:
    other = optimize(MODEL, time_limit=10, **options)
    with pytest.raises(InputError, match=f"other is no plan for the same step: {says}"):
        compare(plan, {"other": other}, recipes=(), model=MODEL)


def test_a_name_that_is_no_recipe_is_left_out_with_the_names_there_are(plan: Plan) -> None:
    ((_, why),) = compare(plan, recipes=("zero4",), model=MODEL).left_out
    assert "'zero4' is no pass or walk" in why
    assert "did you mean 'zero" in why


def test_a_difference_names_layouts_and_collectives(found: Comparison) -> None:
    said = difference(found.row("ours"), found.row("zero3"))
    assert said.figures["step"] == (found.row("ours").step_ns, found.row("zero3").step_ns)
    weights = next(x for x in said.tensors if "up.weight" in x.names)
    assert weights.role == "parameter"
    assert weights.layouts[0] != weights.layouts[1]
    effects = [abs(x.delta_ns) for x in said.collectives]
    assert effects == sorted(effects, reverse=True)
    moved = sum(x.delta_ns for x in said.collectives)
    assert moved == found.row("zero3").communication_ns - found.row("ours").communication_ns
    assert "up.weight" in str(said)


def test_a_plan_does_not_differ_from_itself(found: Comparison) -> None:
    said = difference(found.row("ours"), found.row("ours"))
    assert not said.collectives
    assert not said.tensors
    assert "Every tensor lies alike" in str(said)


def test_an_axis_without_a_template_is_the_solvers(plan: Plan) -> None:
    def step(template: str) -> int:
        return optimize(MODEL, mesh="dp=2,tp=2", template=template, time_limit=10).costs.total_ns

    assert step("free") == plan.costs.total_ns
    assert step("dp=ddp,tp=free") <= min(step("ddp"), step("dp=ddp,tp=replicate"))
