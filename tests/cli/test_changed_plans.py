"""A plan file that was changed by hand is the file's fault, in every command that reads one: what was read, and what to do next."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blocks import planned

from solver_shard.cli import main
from solver_shard.plan.io import plan_to_json

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = ["--model", "blocks:blocks", "-q"]
COMMANDS = {
    "show": lambda plan: ["show", plan],
    "explain": lambda plan: ["explain", plan, "x", "--alternatives", "0"],
    "report": lambda plan: ["report", plan, "-o", f"{plan}.html"],
    "trace": lambda plan: ["trace", plan, "-o", f"{plan}.trace"],
    "export": lambda plan: ["export", plan, "--to", "jax", "-o", f"{plan}.py"],
    "compare": lambda plan: ["compare", plan, "--with", "ddp", *MODEL],
    "verify": lambda plan: ["verify", plan, "blocks:blocks", "-q"],
}
Command = Callable[[str], list[str]]


def written(tmp_path: Path, change: Callable[[Any], object]) -> str:
    data = json.loads(plan_to_json(planned()))
    change(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    return str(path)


def other_layout(data: Any) -> None:
    layouts = data["ops"][0]["result_layouts"]
    layouts[0] = "RR" if layouts[0] != "RR" else "S(0)R"


@pytest.mark.parametrize("command", [COMMANDS["export"], COMMANDS["report"], COMMANDS["explain"]], ids=["export", "report", "explain"])
def test_layouts_that_do_not_fit_are_refused_without_the_model(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(written(tmp_path, other_layout))) == 1
    assert "and its other figures give" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_figures_that_do_not_fit_are_refused_by_every_command(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = written(tmp_path, lambda data: data["costs"].update(total_ns=1))
    assert main(command(plan)) == 1
    err = capsys.readouterr().err
    assert f"error: {plan}: not a valid plan: costs.total_ns: the file says 1, and its other figures give " in err
    assert "take it as solve wrote it, or solve again" in err
    assert "bug" not in err


def other_strategy(data: Any) -> None:
    data["ops"][0]["strategy"][0] = "nonsense"


def other_implementation(data: Any) -> None:
    data["ops"][0]["implementation"] = "nonsense"


DECISIONS = {
    "compare": (COMMANDS["compare"], "the plan is not legal: "),
    "explain": (lambda plan: ["explain", plan, "x", "--instead", "R,S(1)", *MODEL], "the plan is n"),
}


@pytest.mark.parametrize("change", [other_strategy, other_implementation])
@pytest.mark.parametrize(("command", "message"), DECISIONS.values(), ids=DECISIONS.keys())
def test_decisions_that_the_model_cannot_run_are_refused(
    command: Command, message: str, change: Callable[[Any], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(written(tmp_path, change))) == 1
    err = capsys.readouterr().err
    assert message in err
    assert "It was made by solver-shard" in err
    assert "with the same options" in err
    assert "bug" not in err
