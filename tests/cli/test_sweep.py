"""``solver-shard sweep``: options, output and exit codes."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from solver_shard.analysis import sweep as sweeping
from solver_shard.analysis.sweep.results import Row, Sweep
from solver_shard.cli import main


def found(*statuses: str) -> Sweep:
    rows = []
    for i, status in enumerate(statuses):
        nanoseconds = {"step_ns": 100 + i, "compute_ns": 50, "communication_ns": 20, "objective": 100 + i, "bound": 100 + i}
        figures: dict[str, Any] = {**nanoseconds, "peak": 9, "gap": 0.0}
        asked: dict[str, Any] = {"mesh": f"d0={i + 2}", "devices": i + 2, "batch": 4, "seq": 8, "memory_limit": 10, "reserve": 0}
        more = figures if status == "optimal" else {}
        rows.append(Row(name=f"p{i}", cluster="h100", status=status, **asked, **more))  # type: ignore[arg-type]  # texts of the type
    return Sweep(model="gpt2", tool="t", asked={"objective": "time", "memory_weight": "0"}, rows=tuple(rows))


def run(monkeypatch: pytest.MonkeyPatch, result: Sweep, *arguments: str) -> tuple[int, dict[str, Any]]:
    given: dict[str, Any] = {}

    def sweep(model: str, **options: Any) -> Sweep:
        given.update(options, model=model)
        return result

    monkeypatch.setattr(sweeping, "sweep", sweep)
    return main(["sweep", *arguments]), given


def test_a_real_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sweep", "entry_models:mlp", "--devices", "4", "-o", str(tmp_path / "new"), "--work-limit", "0.5", "--jobs", "1"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.startswith("entry_models:mlp: 2 points, 2 with a plan\n")
    assert "d0=2,d1=2" in out
    assert "solving d0=4_h100" in err
    plan = json.loads((tmp_path / "new" / "d0=4_h100.json").read_text())
    assert plan["provenance"]["command"].startswith("solver-shard sweep entry_models:mlp --devices 4")
    assert main([*arguments, "-q", "--json"]) == 0
    out, err = capsys.readouterr()
    assert out == (tmp_path / "new" / "sweep.json").read_text()
    assert err == ""


def test_options_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    code, given = run(
        monkeypatch,
        found("optimal"),
        *shlex.split("gpt2 --devices 64 --axes 2,3 --batch 8 --batch 16 --memory 70GiB --cluster h100 --cluster a100 --seq 128 --free -q"),
        *shlex.split("--jobs 3 --workers 2 --microbatches 2 --optimizer sgd --no-split --gap 0.01 --seed 7 --ray local"),
    )
    assert code == 0
    expected = {
        "model": "gpt2",
        "devices": 64,
        "axes": (2, 3),
        "batches": (8, 16),
        "memories": ("70GiB",),
        "clusters": ("h100", "a100"),
        "seq": 128,
        "tied": False,
        "jobs": 3,
        "workers": 2,
        "microbatches": 2,
        "optimizer": "sgd",
        "split": False,
        "gap": 0.01,
        "seed": 7,
        "ray": "local",
        "folder": None,
    }
    assert {name: given[name] for name in expected} == expected


def test_defaults_are_those_of_the_function_that_plans_one_point(monkeypatch: pytest.MonkeyPatch) -> None:
    from solver_shard.api import optimize

    _, given = run(monkeypatch, found("optimal"), "gpt2", "--devices", "8", "-q")
    defaults = {name: parameter.default for name, parameter in inspect.signature(optimize).parameters.items()}
    shared = [name for name in given if name in defaults and name not in ("model", "workers", "command", "progress")]
    assert len(shared) > 20
    assert {name: given[name] for name in shared} == {name: defaults[name] for name in shared}


@pytest.mark.parametrize(
    ("statuses", "code"),
    [(("optimal", "infeasible"), 0), (("optimal", "error"), 1), (("infeasible", "infeasible"), 3)],
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, statuses: tuple[str, ...], code: int) -> None:
    assert run(monkeypatch, found(*statuses), "gpt2", "--mesh", "2", "-q")[0] == code


@pytest.mark.parametrize(
    "arguments",
    [["--devices", "8"], ["gpt2"], ["gpt2", "--devices", "8", "--mesh", "8"], ["gpt2", "--devices", "8", "--axes", "2;3"]],
)
def test_usage(arguments: list[str]) -> None:
    assert main(["sweep", *arguments]) == 2


def test_ctrl_c_shows_what_is_done_and_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def sweep(_model: str, **options: Any) -> Sweep:
        options["watch"](found("pending", "pending"))
        options["watch"](found("optimal", "pending"))
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeping, "sweep", sweep)
    assert main(["sweep", "gpt2", "--devices", "8", "-q", "-o", str(tmp_path)]) == 130
    out, err = capsys.readouterr()
    assert "1 of 2 points are not run yet" in out
    assert err == f"1 of 2 points are in {tmp_path}; run the same command again to go on\ninterrupted\n"
    assert main(["sweep", "gpt2", "--devices", "8", "-q"]) == 130
    assert "with -o FOLDER they are kept" in capsys.readouterr().err


def test_results_are_read_as_they_are_written() -> None:
    sweep = found("optimal", "pending")
    assert json.loads(sweep.to_json())["rows"][1]["step_ns"] is None
    assert dataclasses.asdict(sweep)["rows"][0]["name"] == "p0"
