"""Comparisons and sweeps for the tests of the HTML report, small and made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from solver_shard.analysis.sweep.results import Row, Sweep


def compared(**changed: Any) -> dict[str, Any]:
    """A comparison of two plans, as ``compare --json`` writes it."""
    first = {
        "name": "ours",
        "kind": "plan",
        "step_ns": 100_000,
        "compute_ns": 60_000,
        "update_ns": 5_000,
        "communication_ns": 35_000,
        "by_kind_ns": {"all_gather": 20_000, "reduce_scatter": 15_000, "all_reduce": 0, "all_to_all": 0},
        "unshared_ns": 0,
        "peak": 5000,
        "at_peak": {"parameters": 3000, "activations": 2000},
        "fits": True,
        "regret": 0.0,
        "status": "optimal",
        "proven": True,
        "gap": 0.0,
        "notes": [],
    }
    second = {
        **first,
        "name": "zero3",
        "kind": "template",
        "step_ns": 125_000,
        "regret": 0.25,
        "fits": False,
        "proven": False,
        "notes": ["a note"],
    }
    return {
        "schema_version": 1,
        "name": "deep mlp",
        "mesh": "dp=4,tp=2",
        "devices": 8,
        "cluster": "h100",
        "limit": 20_000,
        "bound_ns": 100_000,
        "bound_text": "tied plan within 19.5 KiB",
        "start": [],
        "rows": [first, second],
        "left_out": [{"name": "expert-parallel", "why": "no experts"}],
        **changed,
    }


def write(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path


def row(name: str, mesh: str, step: int | None, peak: int | None, status: Any = "optimal", **more: Any) -> Row:
    plan = {} if step is None else {"compute_ns": step // 2, "communication_ns": step // 2, "objective": step, "bound": step, "gap": 0.0}
    return Row(
        name=name, mesh=mesh, devices=8, batch=8, seq=64, memory_limit=10**10, reserve=0, cluster="h100", status=status, step_ns=step,
        peak=peak, **{**plan, **more},
    )  # fmt: skip


def swept() -> Sweep:
    rows = (
        row("a", "dp=8", 3_000_000, 4 * 2**30),
        row("b", "dp=4,tp=2", 2_000_000, 5 * 2**30),
        row("c", "dp=2,tp=4", 4_000_000, 6 * 2**30),
        row("d", "tp=8", None, 20 * 2**30, "infeasible"),
        row("e", "dp=1", None, None, "error", message="it broke"),
    )
    return Sweep(model="tiny", tool="solver-shard", asked={"seq": "64", "objective": "time", "memory_weight": "0"}, rows=rows)
