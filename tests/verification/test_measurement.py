"""A plan held against the clock and against bytes that are really there, in two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from entry_models import clipped_stack

import solver_shard
from solver_shard.errors import InputError
from solver_shard.plan.plan import Plan
from solver_shard.verification.measurement import _planned_parts, measure

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, inputs, loss_fn = clipped_stack()
    pins = ["layers.0.up.weight=S(0)", "layers.0.down.weight=S(1)", "layers.1.up.weight=S(0)"]
    return solver_shard.optimize(
        model, inputs, loss_fn=loss_fn, mesh="dp=2", cluster="ethernet", microbatches=2, clip=True, pins=pins, time_limit=20.0
    )


def in_processes(folder: Path, count: int, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m", "solver_shard", "measure", *words)
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_steps_are_timed_part_by_part_and_bytes_are_counted(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    ran = in_processes(tmp_path, 2, "plan.json", "entry_models:clipped_stack", "--steps", "4", "--warmup", "1", "-o", "measured.json")
    assert ran.returncode == 0, ran.stderr
    measured: dict[str, Any] = json.loads((tmp_path / "measured.json").read_text())
    assert (measured["planned_ns"], len(measured["step_ns"])) == (plan.costs.total_ns, 4)
    assert min(measured["step_ns"]) > 0
    assert 0.0 < measured["loss"] < 10.0
    listed: Counter[tuple[str, ...]] = Counter()
    for one in plan.collectives():
        listed[one.kind, *one.axes] += one.runs
    parts = {(part["kind"], part["name"]): part for part in measured["parts"]}
    counted = {(part["name"], *part["axes"]): part["count"] for part in measured["parts"] if part["kind"] == "collective"}
    assert counted == listed
    assert {"matmul", "streaming", "reduction"} <= {name for kind, name in parts if kind == "compute"}
    assert parts["update", ""]["measured_ns"] > 0
    assert sum(part["planned_ns"] for part in measured["parts"]) == plan.costs.total_ns
    for row in measured["memory"]:
        if row["category"] != "intermediates":  # of which a plan counts what is beyond the copies that are being made
            assert row["measured"] == pytest.approx(row["planned"], rel=0.05), row
    assert {"parameters", "optimizer", "gradients", "peak"} <= {row["category"] for row in measured["memory"]}
    for words in ("step", *(f"{kind} over {', '.join(axes)}" for kind, *axes in listed), "update", "peak", "the middle eight"):
        assert words in ran.stdout


def test_as_many_processes_as_devices(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, loss_fn = clipped_stack()
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="torchrun --nproc-per-node 2 -m solver_shard measure PLAN MODEL"):
        measure(plan, model, inputs, loss_fn=loss_fn)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match=r"the plan is for 2 devices \(dp=2\), 3 processes run; start 2"):
        measure(plan, model, inputs, loss_fn=loss_fn)


@pytest.mark.parametrize(("name", "value"), [("steps", 0), ("steps", 2.0), ("steps", True), ("warmup", -1), ("warmup", "3")])
def test_numbers_of_steps_are_whole_and_not_negative(plan: Plan, name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name}.* give a whole number"):
        measure(plan, "gpt2", **{name: value})


def test_planned_parts_are_the_whole_step(plan: Plan) -> None:
    assert sum(_planned_parts(plan, ["streaming"] * len(plan.ops)).values()) == plan.costs.total_ns
