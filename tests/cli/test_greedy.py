"""``solver-shard propagate --pass dtensor-greedy``: a model in, the plan of a greedy executor and its collectives out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from solver_shard.cli import main
from solver_shard.plan.io import load_plan

pytestmark = pytest.mark.usefixtures("one_thread")

MLP = ["propagate", "dtensor_models:mlp_step", "--mesh", "dp=2,tp=2", "-q"]
MEGATRON = ["--pin", "x=S(0),R", "--pin", "up.weight=tp=S(0)", "--pin", "up.bias=tp=S(0)", "--pin", "down.weight=tp=S(1)"]


def test_dtensors_plan_comes_with_its_own_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MLP, *MEGATRON, "--pass", "dtensor-greedy"]) == 0
    out = capsys.readouterr().out
    assert "layouts      by propagation: dtensor-greedy\n" in out
    assert "pins         x=S(0),R; up.weight=tp=S(0)" in out
    table = out.partition("DTensor's own collectives, op by op")[2]
    assert re.search(r"forward +reduce_scatter +tp +1 +4\.00 KiB", table)
    assert not re.search(r"forward +all_gather", table)
    assert re.search(r"left to the user +all_reduce +dp +5 ", table)
    assert "raises" not in table


def test_the_plan_by_our_costs_is_written_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main([*MLP, *MEGATRON, "--pass", "dijkstra-greedy", "-o", str(path)]) == 0
    assert "DTensor's own" not in capsys.readouterr().out
    plan = load_plan(path)
    assert plan.options.propagation == "dijkstra-greedy"
    assert str(plan.layouts["up.weight"]) == "RS(0)"
    assert "--pass dijkstra-greedy" in plan.provenance.command


def test_where_dtensor_raises_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["propagate", "dtensor_models:sdpa_step", "--mesh", "4", "-q", "--pass", "dtensor-greedy"]) == 0
    out = capsys.readouterr().out
    assert "DTensor raises at 2 ops; the walk goes on as if their inputs had been replicated" in out
    assert "does not have a sharding strategy registered" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pin", "down:out=R,S(0)"], "which the model computes; DTensor is given parameters, buffers and inputs"),
        (["--pin", "up.weight=S(*),R"], "leaves 'up.weight' several placements"),
        (["--pin", "up.wieght=R,R"], "up.weight"),
    ],
)
def test_pins_that_dtensor_cannot_be_given_are_errors(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MLP, *words, "--pass", "dtensor-greedy"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["module.mlir", "--pass", "dtensor-greedy"], "decides the ops of a traced model"),
        ([*MLP[1:], "--pass", "dijkstra-greedy", "--propagation-strategy", "basic"], "is no propagation"),
    ],
)
def test_options_of_the_passes_are_not_for_walks(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["propagate", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
