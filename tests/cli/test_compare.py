"""``solver-shard compare``: a table from files, and wrong usage told before any work is done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from solver_shard.api import optimize
from solver_shard.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = "entry_models:mlp"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    optimize(MODEL, mesh="dp=2,tp=2", time_limit=10).save(path)
    return path


def run(*words: str | Path) -> int:
    return main(["compare", *map(str, words), "--quiet"])


def test_a_table_of_files_recipes_and_given_plans(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tp.py").write_text("PLAN = {'up': ColwiseParallel(), 'down': RowwiseParallel()}\n")
    (tmp_path / "pins.txt").write_text("# the first layer by columns\nup.weight=tp=S(0)  # of dim 0\n\n")
    more = ("--with", "dp=ddp,tp=replicate", "--parallelize", tmp_path / "tp.py", "--pins", tmp_path / "pins.txt", "--data", "ddp")
    assert run(plan, "--model", MODEL, *more, "-o", tmp_path / "table.md") == 0
    out = capsys.readouterr().out
    assert out.startswith("MLP on dp=2,tp=2 (4 devices)")
    for name in (str(plan), "dp=ddp,tp=replicate", "tp.py", "pins.txt"):
        assert f"\n  {name}" in out
    assert "what parallelize_module runs along tp; dp by ddp" in out
    assert (tmp_path / "table.md").read_text().startswith("| plan | step, ms |")


def test_json_and_a_difference(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plan, "--model", MODEL, "--with", "zero3", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in data["rows"]] == [str(plan), "zero3"]
    assert run(plan, "--model", MODEL, "--diff", plan, "zero3") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"A  {plan}\nB  zero3\n")
    assert "Layouts that differ" in out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["-o", "table.html"], 2, "has none of the suffixes"),
        (["--model", MODEL, "--config", "x.json"], 2, "give one of --model and --config"),
        (["--with", "none", "--with", "zero3"], 2, "'none' leaves no other recipe"),
        ([], 1, "say which model it is: --model"),
        (["--tp-plan", "no-such-file.json"], 1, "cannot read no-such-file.json"),
        (["--model", MODEL, "--with", "none", "--diff", "a", "b"], 1, "no row is called 'a'; there are"),
        (["--model", MODEL, "--diff", "tp=expert-parallel,dp=ddp", "zero3"], 1, "tp=expert-parallel,dp=ddp is left out: template"),
    ],
)
def test_wrong_usage_is_told(plan: Path, words: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plan, *words) == code
    assert says in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_plan_given_twice_is_refused(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plan, plan) == 2
    assert "given twice" in capsys.readouterr().err


def test_a_row_that_was_asked_for_and_cannot_be_had_is_an_error_beside_the_others(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plan, "--model", MODEL, "--with", "zero3", "--with", "zero9") == 1
    out, err = capsys.readouterr()
    assert "\n  zero3" in out
    assert err.startswith("error: zero9: 'zero9' is no pass or walk (")
