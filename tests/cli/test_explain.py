"""``solver-shard explain``: from the plan alone, with a layout that is asked for, and with one that cannot be had."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from blocks import planned

from solver_shard.cli import main
from solver_shard.plan.io import save_plan

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = ["--model", "blocks:blocks", "-q"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    save_plan(planned(), path)
    return path


def test_without_alternatives_the_plan_alone_is_explained(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(saved), "layers.*.down:out", "--alternatives", "0"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(
        "layers.0.down.einsum  f32[4096, 4096]  activation\n  made by down (aten.einsum.default, forward)\n    dp  strategy "
    )
    assert "layers.{1,2}.down.einsum  f32[4096, 4096]  activation  x2\n" in out
    assert "adds up partial sums, each device keeps its part of dim 0 (4096), for add in layers.#" in out
    assert "Alternatives" not in out
    assert err == ""


def test_a_layout_that_is_asked_for(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(saved), "x", "--instead", "R,S(1)", *MODEL]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"\npinning x to R,S\(1\) costs \+[0-9.]+ us \(\+0\.[0-9]+%\), exactly\n", out)
    assert "what else would change" in out
    assert err == ""


def test_the_same_as_json(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(saved), "x", "--instead", "R,S(1)", "--json", *MODEL]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["instead"]["best"]
    assert best["low"] == best["high"] == best["value"]["objective"] - found["now"]["objective"]
    assert found["static"]["tensors"][0]["name"] == "x"
    assert "plan" not in found


def test_what_does_not_fit_has_an_exit_code_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned()
    limit = dataclasses.replace(plan.options, memory_limit=plan.memory.peak, reserve=0)
    path = tmp_path / "tight.json"
    memory = dataclasses.replace(plan.memory, limit=limit.usable_memory)
    save_plan(dataclasses.replace(plan, options=limit, memory=memory), path)
    assert main(["explain", str(path), "layers.*.*.weight", "--instead", "R,R", *MODEL]) == 3
    assert "does not fit into memory" in capsys.readouterr().out


def test_a_plan_of_no_preset_asks_for_its_model(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(saved), "x", "-q"]) == 1
    assert "say which model it is: --model" in capsys.readouterr().err


def test_alternatives_are_priced_of_one_tensor(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(saved), "layers.*.*.weight"]) == 0
    assert capsys.readouterr().out.endswith("\n\n2 different tensors or ops; name one of them to price its alternatives\n")


def test_a_work_limit_ends_a_price(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asking = ["explain", str(saved), "x", "--instead", "R,S(1)", "--json", "--work-limit"]
    assert main([*asking, "1e-4", *MODEL]) == 0
    found = json.loads(capsys.readouterr().out)["instead"]["best"]
    assert found["low"] < found["high"]
    assert main([*asking, "0", *MODEL]) == 1
    assert "work limit 0.0 is not legal; give a number of work units, more than 0" in capsys.readouterr().err


def test_slips_are_told(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(saved), "x", "--of", "shape"]) == 2
    assert main(["explain", str(saved), "x", "--model", "a:b", "--config", "c.json"]) == 2
    assert main(["explain", str(saved), "nothing", "--alternatives", "0"]) == 1
    assert "no tensor, op or module of this plan is called 'nothing'" in capsys.readouterr().err
