"""``solver-shard propagate``: a module or a model in, shardings or a plan out, and one message for what can go wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from solver_shard.cli import main
from solver_shard.plan.io import load_plan

pytest.importorskip("jaxlib", reason="StableHLO modules are read through jaxlib: pip install 'solver-shard[jax]'")

MODULE = """
sdy.mesh @mesh = <["a"=2, "b"=4]>
func.func @main(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}p1, {?}]>},
                %y: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{?}, {"b":(1)2}]>}) -> tensor<8x4xf32> {
  %0 = stablehlo.add %x, %y : tensor<8x4xf32>
  %1 = stablehlo.tanh %0 : tensor<8x4xf32>
  %2 = stablehlo.negate %x : tensor<8x4xf32>
  return %1 : tensor<8x4xf32>
}
"""
LOOP = """
sdy.mesh @mesh = <["a"=2]>
func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>}) -> tensor<8xf32> {
  %0 = stablehlo.while(%i = %x) : tensor<8xf32>
  cond {
    %c = stablehlo.constant dense<true> : tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %t = stablehlo.tanh %i : tensor<8xf32>
    stablehlo.return %t : tensor<8xf32>
  }
  return %0 : tensor<8xf32>
}
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "module.mlir"
    path.write_text(MODULE)
    return path


def test_the_module_comes_back_with_its_shardings(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["propagate", str(module), "-q"]) == 0
    out, err = capsys.readouterr()
    assert '%0 = stablehlo.add %arg0, %arg1 {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"a", ?}, {"b":(1)2, ?}]>]>}' in out
    assert "stablehlo.negate" not in out  # nobody reads it
    assert err == ""


def test_options_reach_the_pass(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--pass aggressive --propagation-strategy basic-then-aggressive --conservative-propagation --keep-sharding-rules -q"
    assert main(["propagate", str(module), *words.split()]) == 0
    out = capsys.readouterr().out
    assert '[{"a", ?}, {?}]>]>, sdy.sharding_rule = #sdy.op_sharding_rule<([i, j], [i, j])->([i, j]) {i=8, j=4}>}' in out


def test_rules_alone(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["propagate", str(module), "--pass", "populate-op-sharding-rules", "-q"]) == 0
    out = capsys.readouterr().out
    assert "stablehlo.negate %arg0 {sdy.sharding_rule = #sdy.op_sharding_rule<([i, j])->([i, j]) {i=8, j=4}>}" in out
    assert "sharding_per_value" not in out


def test_every_value_as_json(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["propagate", str(module), "--json", "--no-run-op-priority-propagation", "-q"]) == 0
    (function,) = json.loads(capsys.readouterr().out)["functions"]
    assert [value["value"] for value in function["values"]] == ["%0", "%1"]
    assert function["arguments"][0] == {
        "value": "%arg0", "shape": [8, 4], "dtype": "f32", "sharding": '#sdy.sharding<@mesh, [{"a"}, {"b":(1)2, ?}]>',
    }  # fmt: skip
    assert function["results"] == ['#sdy.sharding<@mesh, [{"a", ?}, {"b":(1)2, ?}]>']


def test_output_and_dumps_are_written(module: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, dumps = tmp_path / "out.mlir", tmp_path / "dumps"
    dumps.mkdir()
    assert main(["propagate", str(module), "-o", str(out), "--module-dump-directory", str(dumps), "-q"]) == 0
    assert capsys.readouterr().out == ""
    assert 'sdy.sharding<@mesh, [{"a"}, {"b":(1)2, ?}]>' in out.read_text()
    assert [path.name for path in dumps.iterdir()] == ["00.propagation_after_user_priority_0.mlir"]
    assert 'replicated={"a"}' in (dumps / "00.propagation_after_user_priority_0.mlir").read_text()


def test_shardings_go_through_loops_and_no_edge_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "loop.mlir"
    path.write_text(LOOP)
    assert main(["propagate", str(path), "-q"]) == 0
    out = capsys.readouterr().out
    assert '-> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a", ?}]>})' in out
    assert "data_flow_edge" not in out


def test_ops_without_a_rule_are_told(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module.write_text(MODULE.replace("stablehlo.tanh %0", "stablehlo.custom_call @unheard_of(%0)").replace(
        "@unheard_of(%0) : tensor<8x4xf32>", "@unheard_of(%0) : (tensor<8x4xf32>) -> tensor<8x4xf32>"))  # fmt: skip
    assert main(["propagate", str(module), "-q"]) == 0
    assert "no sharding rule for stablehlo.custom_call@unheard_of; nothing propagates through it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('<@mesh, [{"a"}p1, {?}]>', '<@other, [{"a"}p1, {?}]>', "unknown mesh: @other"),
        ('<@mesh, [{"a"}p1, {?}]>', '<@mesh, [{"a"}, {"a"}]>', "duplicate axis ref"),
        ('<@mesh, [{"a"}p1, {?}]>', '<@mesh, [{"a"}]>', "rank"),
        ("stablehlo.add %x, %y", "stablehlo.add %x", "expected"),
        ("func.func @main", "func.func @f() { return }\nfunc.func @g", "a function @main, or only one function; the module has @f, @g"),
    ],
)
def test_bad_modules_are_refused_and_nothing_is_written(
    before: str, after: str, message: str, module: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.mlir"
    out.write_text("as it was")
    module.write_text(MODULE.replace(before, after))
    assert main(["propagate", str(module), "-o", str(out), "-q"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert out.read_text() == "as it was"


def test_a_file_that_cannot_be_written_is_an_error_and_leaves_nothing(
    module: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to("no/such/folder/out.mlir")
    before = sorted(tmp_path.iterdir())
    assert main(["propagate", str(module), "-o", str(tmp_path / "link"), "-q"]) == 1
    assert "give a file in a folder that exists and can be written" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_a_module_can_be_written_over_itself(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["propagate", str(module), "-o", str(module), "-q"]) == 0
    assert 'sdy.sharding<@mesh, [{"a"}, {"b":(1)2, ?}]>' in module.read_text()


def test_functions_that_call_each_other_in_a_circle_are_propagated_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "circle.mlir"
    call = "  func.call @main(%x) : (tensor<8xf32>) -> tensor<8xf32>\n"
    path.write_text(
        'sdy.mesh @mesh = <["a"=2]>\n'
        'func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>}) -> tensor<8xf32> {\n'
        f"  %0 = stablehlo.tanh %x : tensor<8xf32>\n{call}  return %0 : tensor<8xf32>\n}}\n"
    )
    assert main(["propagate", str(path), "-q"]) == 0
    assert '-> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a", ?}]>})' in capsys.readouterr().out


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["propagate", str(tmp_path / "none.mlir"), "-q"]) == 1
    assert "give a StableHLO module as text" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["{module}", "--pass", "best"],
        ["{module}", "--propagation-strategy", "best"],
        ["{module}", "--mesh", "dp=2"],
        ["{module}", "--pin", "x=S(0)"],
        ["{module}", "--batch", "8"],
        ["{module}", "--seq", "8"],
        ["{module}", "--dtype", "f32"],
        ["{module}", "--forward-only"],
        ["{module}", "--cluster", "h100"],
        ["{module}", "--module-dump-directory", "/no/such/folder"],
        ["{module}", "-o", "/no/such/folder/out.mlir"],
        ["{module}", "-o", "a" * 300],
        ["{module}", "-o", ""],
        ["entry_models:mlp", "--mesh", "dp=2", "--keep-sharding-rules"],
        ["entry_models:mlp", "--mesh", "dp=2", "--module-dump-directory", "."],
        ["entry_models:mlp"],
        ["entry_models:mlp", "--mesh", "dp=2", "--pass", "populate-op-sharding-rules"],
    ],
)
def test_usage(words: list[str], module: Path) -> None:
    assert main(["propagate", *(word.format(module=module) for word in words)]) == 2


@pytest.mark.parametrize("name", ["basic", "aggressive", "op-priority", "user-priority"])
def test_a_model_is_planned_by_every_pass(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    pins = ["--pin", "x=S(0),R", "--pin", "up.weight=R,S(0)"]
    assert main(["propagate", "entry_models:mlp", "--mesh", "dp=4,tp=2", *pins, "--pass", name, "-o", str(out), "-q"]) == 0
    assert f"by propagation: {name}" in capsys.readouterr().out
    plan = load_plan(out)
    assert {tensor.name: str(tensor.layout) for tensor in plan.tensors if tensor.role == "parameter"} == {
        "up.weight": "RS(0)", "up.bias": "RS(0)", "down.weight": "RS(1)", "down.bias": "RR",
    }  # fmt: skip
    assert plan.options.propagation == name


def test_pins_that_leave_a_choice_cannot_be_propagated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["propagate", "entry_models:mlp", "--mesh", "tp=2", "--pin", "up.weight=S(*)", "-q"]) == 1
    assert "propagation starts from one placement, R or S(dim)" in capsys.readouterr().err
