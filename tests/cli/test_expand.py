"""``solver-shard expand``: what it prints, and what it says of inputs it cannot use."""

from __future__ import annotations

import json

import pytest

from solver_shard.cli import main

MM = ["expand", "aten.mm.default", "--inputs", "f32[512,1024]| S(0)R", "f32[1024,512]| RS(1)", "--mesh", "dp=4,tp=2"]


def test_inputs_that_fit_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(MM) == 0
    assert capsys.readouterr().out.splitlines() == [
        "aten.mm.default on dp=4,tp=2, priced by cluster h100",
        "  input 0   f32[512, 1024]| S(0)R  as it is",
        "  input 1   f32[1024, 512]| RS(1)  as it is",
        "  result 0  f32[512, 512]| S(0)S(1)",
        "cost 0 ns",
        "1 states visited; the full product of 8 strategies on 2 axes has 64",
    ]


def test_moves_come_with_their_bytes_and_costs(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["expand", "aten.mm.default", "--inputs", "f32[512,1024]| S(0)S(1)", "f32[1024,512]| S(0)S(1)", "--mesh", "2,4"]
    assert main([*command, "--prices", "dtensor", "--devices-per-host", "1"]) == 0
    out = capsys.readouterr().out
    assert "priced by DTensor's formulas, 1 devices per host" in out
    assert [line.split()[0] for line in out.splitlines() if "->" in line] == ["all_gather", "all_to_all"]
    assert "KiB" in out
    assert "µs" in out


def test_all_ways_are_ranked_and_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MM, "--all"]) == 0
    text = capsys.readouterr().out
    assert main([*MM, "--all", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    costs = [way["cost"] for way in data["all"]]
    assert costs == sorted(costs)
    assert f"{len(costs)} ways" in text
    assert data["results"] == ["S(0)S(1)"]
    assert data["visited"] == 1


def test_other_arguments_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["expand", "aten.sum.dim_IntList", "--inputs", "f32[8,16]| S(1)", "--mesh", "4"]
    assert main([*command, "--arg", "dim=[1]"]) == 0
    assert "result 0  f32[8]| P(sum)" in capsys.readouterr().out
    assert main([*command, "--arg", "dim=[1"]) == 2
    assert "write NAME=JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (["expand", "aten.mm", "--inputs", "f32[8,8]| R", "--mesh", "2"], 1, "there is no op 'aten.mm'"),
        (["expand", "aten.mm.default", "--inputs", "f32[8,8]", "--mesh", "2"], 1, "cannot read input 'f32[8,8]'"),
        ([*MM, "--inputs", "f32[8,8]| RR"], 2, "give all inputs after one --inputs"),
    ],
)
def test_what_cannot_be_used_is_an_error_that_says_what_can(
    command: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == code
    assert message in capsys.readouterr().err.replace("\n", " ")
