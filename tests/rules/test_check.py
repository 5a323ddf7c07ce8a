"""``rules check``: rules are sound and complete on numbers, and a planted fault in either way is found."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from solver_shard.cli import main
from solver_shard.errors import RuleError
from solver_shard.layout import P, R, S
from solver_shard.rules.check import check_rules, draws_of
from solver_shard.rules.check.instances import Instance, load_instances, parse_instance, parse_instances
from solver_shard.rules.check.shards import run_local
from solver_shard.rules.check.truth import ground_truth, holds
from solver_shard.rules.table import load_table

TABLE = load_table()
INSTANCES = load_instances()
SLICE = 70
"""Rows that a test run checks; ``experiments/rules.py`` checks them all."""


def test_a_seeded_slice_of_the_rows_is_sound_and_complete() -> None:
    heavy = [op for op in TABLE if "attention" in op or "batch_norm" in op]
    draw = random.Random(20)
    ops = draw.sample([op for op in TABLE if op not in heavy], SLICE)
    ops += [draw.choice(heavy), "aten.einsum.default", "aten.native_layer_norm_backward.default", "aten._softmax.default"]
    report = check_rules(ops, table=TABLE, instances=INSTANCES)
    assert len(report.ops) >= SLICE
    assert report.passed, [(op.op, op.wrong[:2], op.missing[:2]) for op in report.ops if not op.passed]
    assert sum(op.combinations for op in report.ops) > 1000


def test_every_row_has_an_instance_and_every_instance_a_row() -> None:
    assert sorted(INSTANCES) == sorted(TABLE)
    assert all(INSTANCES.values())


def with_row(tmp_path: Path, op: str, row: str) -> Path:
    mine = tmp_path / "mine.toml"
    mine.write_text(f'"aten.{op}" = {{ {row} }}\n')
    return mine


WRONG = {
    "an activation is not linear": ("relu.default", 'family = "pointwise", linear = "self"'),
    "a falling function makes a maximum a minimum": ("neg.default", 'family = "pointwise", monotone = "self"'),
    "softmax sees its dim whole": ("_softmax.default", 'family = "pointwise"'),
    "a mean of means, not a sum": ("mean.dim", 'family = "reduce", reduction = "sum"'),
    "a mean of uneven parts": ("mean.dim", 'family = "reduce", reduction = "avg"'),
    "rows of a cumulative sum depend on each other": ("cumsum.default", 'family = "along", whole = [-1]'),
    "a product is linear in one factor at a time": ("mul.Tensor", 'family = "pointwise", linear = "self other"'),
    "a number is not added on every device": ("add.Scalar", 'family = "pointwise", linear = "self"'),
    "a root of what a maximum's parts need not have": ("sqrt.default", 'family = "pointwise", monotone = "self"'),
    "a gathered dim is whole": ("index_select.default", 'dims = "a b, c -> a c"'),
    "a factory that counts": ("arange.default", 'family = "factory"'),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_rule_is_found(what: str, tmp_path: Path) -> None:
    op, row = WRONG[what]
    calls = {"aten.index_select.default": [parse_instance("aten.index_select.default", "self=f64[4, 6], dim=1, index=i64.below(6)[6]")]}
    table = load_table([with_row(tmp_path, op, row.replace("a b, c -> a c", "a b, b -> a b"))])
    report = check_rules([f"aten.{op}"], table=table, instances={**INSTANCES, **calls})
    assert not report.passed
    assert report.ops[0].wrong


MISSING = {
    "linear": ("neg.default", 'family = "pointwise", monotone = "-self"', "self=P(sum) -> P(sum)"),
    "monotone": ("relu.default", 'family = "pointwise"', "self=P(max) -> P(max)"),
    "a dim": ("cumsum.default", 'family = "along", whole = [0, 1, 2], linear = "self"', "self=S(0) -> S(0)"),
    "a reduction": ("sum.dim_IntList", 'family = "reduce", linear = "self"', "self=S(0) -> P(sum)"),
    "uneven parts": ("amax.default", 'family = "reduce", reduction = "max", even = true', "S(1) -> P(max) on 3"),
    "one of two operands": ("mm.default", 'dims = "m k, k n -> m n", reduce = { k = "sum" }, linear = ["self"]', "mat2=P(sum) -> P(sum)"),
    "everything": ("mm.default", 'dims = "m k, j n -> l o", whole = "m k j n l o"', "self=S(0), mat2=R -> S(0)"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISSING)
def test_a_missing_strategy_is_found(what: str, tmp_path: Path) -> None:
    op, row, line = MISSING[what]
    report = check_rules([f"aten.{op}"], table=load_table([with_row(tmp_path, op, row)]), instances=INSTANCES)
    (found,) = report.ops
    assert not report.passed
    assert not found.wrong
    assert any(line in missing for missing in found.missing), found.missing


def test_an_exclusion_forgives_what_it_names_and_says_why(tmp_path: Path) -> None:
    row = 'family = "pointwise", excludes = [{ what = "self=P(max)", reason = "no model has one" }]'
    (found,) = check_rules(["aten.relu.default"], table=load_table([with_row(tmp_path, "relu.default", row)]), instances=INSTANCES).ops
    assert found.excluded == (("self=P(max) -> P(max)", "no model has one"),)
    assert found.missing
    assert all("P(min)" in line for line in found.missing)


def test_a_row_without_an_instance_fails() -> None:
    report = check_rules(["aten.relu.default"], table=TABLE, instances={})
    assert not report.passed
    assert "no instance" in report.ops[0].notes[0]


def test_a_row_of_ones_own_brings_its_instances(tmp_path: Path) -> None:
    row = 'dims = "m k, k n -> m n", reduce = { k = "sum" }, linear = ["self", "mat2"], instances = ["self=f64[4, 9], mat2=f64[9, 8]"]'
    report = check_rules(["mm"], table=load_table([with_row(tmp_path, "mm.default", row)]), instances={})
    assert report.passed
    assert report.ops[0].instances == 1


def test_random_and_uninitialised_results_are_checked_for_their_shapes_and_say_so() -> None:
    report = check_rules(["bernoulli", "rand_like", "empty_like"], table=TABLE, instances=INSTANCES)
    assert report.passed
    assert {op.op: op.notes for op in report.ops} == {
        "aten.bernoulli.default": ("random: shapes only",),
        "aten.bernoulli.p": ("random: shapes only",),
        "aten.rand_like.default": ("random: shapes only",),
        "aten.empty_like.default": ("uninitialised: shapes only",),
    }


def test_the_ground_truth_of_a_matrix_product() -> None:
    (call, *_) = INSTANCES["aten.mm.default"]
    draws, _ = draws_of(call, 3)
    found = ground_truth(call.op, draws, 2, run_local).combinations
    kept = {ins: outs for ins, (outs,) in found.items() if not any(p in (P("avg"), P("max"), P("min")) for p in ins)}
    assert {ins: sorted(outs) for ins, outs in kept.items() if ins != (R, R)} == {
        (S(0), R): [S(0)],
        (R, S(1)): [S(1)],
        (S(1), S(0)): [P("sum")],
        (P("sum"), R): [P("sum")],
        (R, P("sum")): [P("sum")],
    }
    assert R in kept[R, R]


def test_what_is_pending_in_a_maximum_is_found_outward_from_what_is_replicated() -> None:
    call = parse_instance("aten.maximum.default", "self=f64[8, 6], other=f64[6]")
    draws, _ = draws_of(call, 3)
    found = ground_truth(call.op, draws, 3, run_local).combinations
    for ins in ((P("max"), P("max")), (P("max"), R), (R, P("max"))):
        assert P("max") in found[ins][0]
    assert (P("min"), P("min")) not in found
    assert holds(call.op, draws, 3, run_local, (P("sum"), P("sum"))) is None


def test_luck_of_one_draw_is_no_truth() -> None:
    """Numbers that are all finite have parts that are, whatever is pending."""
    plain, wild = (parse_instance("aten.isfinite.default", f"self=f64{kind}[8, 6]") for kind in ("", ".wild"))
    lucky, others = draws_of(plain, 1)[0], draws_of(wild, 3)[0]
    assert holds(plain.op, lucky, 2, run_local, (P("sum"),)) is not None
    assert holds(plain.op, [*lucky, *others], 2, run_local, (P("sum"),)) is None


def test_budget_keeps_the_cuts_of_one_index_and_says_how_many_were_tried() -> None:
    text = "grad_out=f64[4, 6, 8], input=f64[4, 6, 8], normalized_shape=(8,), mean=f64[4, 6, 1], rstd=f64.positive[4, 6, 1], "
    text += "weight=f64[8], bias=f64[8], output_mask=(True, True, True)"
    name = "aten.native_layer_norm_backward.default"
    report = check_rules([name], table=TABLE, instances={name: [parse_instance(name, text)]}, budget=100)
    assert report.passed
    assert report.ops[0].notes == ("100 of 576 cuts tried on 2 devices", "100 of 144 cuts tried on 3 devices")


def test_names_of_ops() -> None:
    assert [op.op for op in check_rules(["relu"], table=TABLE, instances={}).ops] == ["aten.relu.default"]
    assert [op.op for op in check_rules(["max.dim"], table=TABLE, instances={}).ops] == ["aten.max.dim"]
    with pytest.raises(RuleError, match="no row is called 'rellu'; close: relu"):
        check_rules(["rellu"], table=TABLE, instances={})


BAD = {
    "x": "cannot be read|arguments without a name|neither",
    "self=f64[8, 6": r"cannot be read \(SyntaxError\)",
    "f64[8]": "arguments without a name",
    "self=f63[8]": "has no dtype",
    "self=f64.odd[8]": "no values of kind 'odd'",
    "self=i64.below[8]": "no values of kind 'below'",
    "self=f64[2.5]": "a size that is no whole number",
    "self=f64[1000, 1000]": "1000000 elements, more than",
    "self=__import__('os')": "neither a value nor a tensor",
    "self=f64[8], inplace=True": "no argument 'inplace'",
    "": "needs its argument 'self'",
    "self=y": "neither a value nor a tensor",
}


@pytest.mark.parametrize("text", BAD)
def test_a_call_that_cannot_be_read_says_what_is_legal(text: str) -> None:
    with pytest.raises(RuleError, match=BAD[text]) as error:
        parse_instance("aten.relu.default", text, "mine.toml")
    assert "mine.toml" in str(error.value)
    assert "aten.relu.default" in str(error.value)


def test_instance_files_are_read_as_data() -> None:
    found = parse_instances('"aten.relu.default" = ["self=f64[8, 6]"]', "mine.toml")
    assert found["aten.relu.default"][0].specs[0].shape == (8, 6)
    for text in ('"aten.relu.default" = "self=f64[8]"', '"aten.relu.default" = [1]', "a ="):
        with pytest.raises(RuleError, match=r"instances file mine\.toml"):
            parse_instances(text, "mine.toml")


def test_draws_are_the_same_on_every_run_and_differ_in_sign() -> None:
    call = parse_instance("aten.relu.default", "self=f64[8, 6]")
    first, second = call.draw(0)[0], call.draw(2)[0]
    assert torch.equal(first, call.draw(0)[0])
    assert torch.equal(first.sign(), -second.sign())


def test_a_call_that_does_not_run_is_named() -> None:
    calls = {"aten.mm.default": [parse_instance("aten.mm.default", "self=f64[4, 6], mat2=f64[8, 6]")]}
    (found,) = check_rules(["mm"], table=TABLE, instances=calls).ops
    assert "the call does not run" in found.wrong[0]


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["rules", "check", "--quiet", *arguments])
    return code, capsys.readouterr().out


def test_the_command_prints_a_table_and_exits_by_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_cli(capsys, "mm", "relu")
    assert code == 0
    assert "2 of 2 ops sound and complete" in out
    mine = with_row(tmp_path, "relu.default", 'family = "pointwise", linear = "self"')
    code, out = run_cli(capsys, "relu", "--rules", str(mine))
    assert code == 1
    assert "wrong: aten.relu.default: P(sum):0 on 2 devices" in out
    assert "missing: aten.relu.default: self=P(max) -> P(max)" in out


def test_the_command_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_cli(capsys, "mm", "--json", "--dtensor")
    found = json.loads(out)
    assert code == 0
    assert found["passed"]
    assert found["ops"][0]["sound"]
    assert found["ops"][0]["complete"]
    assert found["ops"][0]["dtensor"]["false"] == []
    assert found["ops"][0]["dtensor"]["registered"] == "single-dim"


def test_an_op_of_ones_own_is_imported_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checked_ops.py").write_text(
        "import torch\n"
        "@torch.library.custom_op('checked::scaled', mutates_args=())\n"
        "def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:\n"
        "    return x * weight\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    row = 'dims = "b s h, h -> b s h", linear = ["x", "weight"], instances = ["x=f64[4, 8, 6], weight=f64[6]"]'
    mine = tmp_path / "mine.toml"
    mine.write_text(f'"checked.scaled.default" = {{ {row} }}\n')
    words = ["checked.scaled.default", "--rules", str(mine)]
    assert run_cli(capsys, *words, "--import", "checked_ops")[0] == 0
    mine.write_text(f'"checked.scaled.default" = {{ {row.replace(chr(34) + "x" + chr(34) + ", ", "")} }}\n')
    code, out = run_cli(capsys, *words)
    assert code == 1
    assert "missing: checked.scaled.default: x=P(sum), weight=R -> P(sum)" in out
    assert main(["rules", "check", "--quiet", *words, "--import", "no_such_module"]) == 1
    assert "cannot import 'no_such_module'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('no licence')", "ValueError: no licence"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import no_such_thing", "no_such_thing"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(
    body: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_ops.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["rules", "check", "mm", "--quiet", "--import", "broken_ops"]) == 1
    assert f"cannot import 'broken_ops': {message}" in capsys.readouterr().err.replace("No module named ", "").replace("'no_", "no_")


@pytest.mark.parametrize("name", ["", "..ops"])
def test_what_is_no_module_name_cannot_be_imported(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "check", "mm", "--quiet", "--import", name]) == 1
    assert f"cannot import {name!r}" in capsys.readouterr().err


def test_rows_for_ops_that_do_not_exist_are_refused_whatever_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('"aten.nope.default" = { family = "pointwise" }\n')
    assert main(["rules", "check", "relu", "--quiet", "--rules", str(mine)]) == 1
    assert "row 'aten.nope.default': no op of this name exists" in capsys.readouterr().err


def test_instances_are_values() -> None:
    made = parse_instance("aten.add.Tensor", "self=(x := f64[8, 6]), other=x, alpha=-2")
    assert isinstance(made, Instance)
    assert len(made.specs) == 1
    assert made.op.attributes["alpha"] == -2
