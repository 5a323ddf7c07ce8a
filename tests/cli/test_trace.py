"""``solver-shard trace``: a plan in, a trace out, and two lines of what it shows."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
from pathlib import Path

import pytest
from plan_examples import example, stepped

from solver_shard.api import optimize
from solver_shard.cli import main
from solver_shard.plan.io import load_plan, save_plan

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    save_plan(optimize("entry_models:mlp", mesh="dp=2,tp=2", template="dp=zero3,tp=zero1", time_limit=10, overlap=0.5), path)
    return path


def test_a_solved_plan(planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plan = tmp_path / "trace.json", load_plan(planned)
    assert main(["trace", str(planned), "-o", str(output)]) == 0
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"wrote .*trace\.json \(\S+ KiB\): one step of MLP on dp=2,tp=2, \S+ us; open it in ui\.perfetto\.dev", first)
    assert re.fullmatch(r"  compute \S+ \S+, update \S+ \S+, exposed collectives \S+ us \(.*dp.*\); peak memory \S+ KiB", second)
    assert re.fullmatch(r"  \S+ us of collectives are hidden behind compute by the overlap asked for(, \S+ us of them without .*)?", third)
    assert re.fullmatch(r"  side by side: \S+ us by windows, \S+ us with a queue for each lane; drawn in rows of its own", fourth)
    assert json.loads(output.read_text())["otherData"]["step_ns"] == plan.costs.total_ns
    assert main(["trace", str(planned), "-o", str(tmp_path / "trace.json.gz"), "-q"]) == 0
    assert capsys.readouterr().out == ""
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()) == output.read_bytes()


def test_a_step_forward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = optimize("entry_models:mlp", mesh="dp=2,tp=2", forward_only=True, time_limit=10)
    plan.save(tmp_path / "plan.json")
    assert main(["trace", str(tmp_path / "plan.json"), "-o", str(tmp_path / "trace.json")]) == 0
    assert "hidden" not in capsys.readouterr().out
    phases = [event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event.get("cat") == "phase"]
    assert phases == ["forward"]


def test_what_cannot_be_written_or_is_no_plan(planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(planned), "-o", str(tmp_path / "none" / "trace.json")]) == 2
    assert main(["trace", str(planned), "-o", str(planned)]) == 2
    assert "would be lost" in capsys.readouterr().err
    assert main(["trace", str(planned)]) == 2
    capsys.readouterr()
    save_plan(dataclasses.replace(example(), costs=stepped(example()).costs), tmp_path / "changed.json")
    assert main(["trace", str(tmp_path / "changed.json"), "-o", str(tmp_path / "trace.json")]) == 1
    assert "it was changed after it was written" in capsys.readouterr().err
    assert not (tmp_path / "trace.json").exists()
