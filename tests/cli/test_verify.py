"""``solver-shard verify``: a plan and a model in, a verdict out, and exit code 0 only where all of it holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from solver_shard.api import optimize
from solver_shard.cli import main
from solver_shard.plan.io import save_plan

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = "entry_models:mlp"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    save_plan(optimize(MODEL, mesh="dp=2,tp=2", template="dp=zero3,tp=zero1", time_limit=10), path)
    return path


def test_a_plan_that_holds(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(planned), MODEL]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("MLP on dp=2,tp=2: holds\n")
    assert "4 devices of dp=2,tp=2, simulated in one process, in f32" in out
    assert re.search(r"gradient +4 +the model itself, f32 +\S+ +2e-04 +ok", out)
    assert re.search(r"all_reduce +dp,tp +\d+ +\d+ +[\d,]+ +[\d,]+ +ok", out)
    assert "running" in err


def test_the_same_as_json(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(planned), MODEL, "--json", "--twin", "-q"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["holds"]
    assert all(row["holds"] for row in (*found["differences"], *found["collectives"]))
    assert found["changes"] == ["floats of its own -> f64", found["changes"][1]]
    assert err == ""


FAULTS = {
    "a corrupted strategy": (r'("strategy":\[)"[^"]*"', r'\1"nonsense"', "the plan is not legal"),
    "a wrong prediction": (r'("kind":"all_gather","axes":\["dp"\],"nbytes":)(\d+)', r"\g<1>9\2", "a device calls it with"),
}


@pytest.mark.parametrize(("pattern", "other", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_a_corrupted_plan_does_not_hold(
    pattern: str, other: str, message: str, planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = planned.read_text()
    wrong, count = re.subn(pattern, other, text, count=1)
    assert count == 1
    assert wrong != text
    path = tmp_path / "wrong.json"
    path.write_text(wrong)
    assert main(["verify", str(path), MODEL, "-q"]) == 1
    out = capsys.readouterr().out
    assert "DOES NOT HOLD" in out
    assert message in out


def test_a_corrupted_layout_is_refused(planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(re.sub(r'("name":"down.weight".*?"layout":)"[^"]*"', r'\1"S(1)R"', planned.read_text(), count=1))
    assert main(["verify", str(path), MODEL, "-q"]) == 1
    assert "it was changed after it was written; take it as solve wrote it" in capsys.readouterr().err


def test_another_model_is_an_error(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(planned), "gpt2", "-q"]) == 1
    assert "the plan was not made from a preset or config" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], [MODEL, "--config", "config.json"], [MODEL, "--processes", "0"], [MODEL, "--seed", "x"]])
def test_usage(words: list[str], planned: Path) -> None:
    assert main(["verify", str(planned), *words]) == 2
