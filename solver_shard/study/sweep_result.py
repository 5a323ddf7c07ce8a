"""What a sweep found: a row per point. ``sweep.json`` in the folder of a sweep is this, as JSON:

    {
      "schema_version": 1,
      "model": "llama3-8b",                         as it was given; "module my.Net" or "program NAME" where it has no name
      "tool": "solver-shard 0.1.0",                 what made all of it
      "asked": {"seq": "8192", "dtype": "bf16"},    what all points share, as text; every option but the four that are swept
      "programs": {"64": "5f0c..."},                batch ("" for none) to the fingerprint of the step that was traced for it
      "rows": [
        {
          "name": "d0=8,d1=8_b64_70GiB_h100",       the point; NAME.json beside this file is its plan, where it has one
          "mesh": "d0=8,d1=8", "devices": 64,       as asked: a plan may split an axis
          "batch": 64, "seq": 8192,                 or null
          "memory_limit": 75161927680,              bytes per device
          "reserve": 6442450944,                    bytes of it that no tensor may have: peak + reserve <= memory_limit
          "cluster": "h100",
          "status": "optimal",                      optimal, gap, feasible: a plan; infeasible: no plan fits, or none was found that
                                                    does; error: see message; pending: not run yet
          "step_ns": 1530000000,                    of the plan, else null, as all up to seconds
          "compute_ns": 1100000000,                 of that, without the optimizer's update
          "communication_ns": 420000000,
          "peak": 30000000000,                      bytes per device: of the plan; where none fits the smallest that was found, or null
          "peak_bound": null,                       where none fits: no plan needs less, as far as proven, or null
          "objective": 1530000000,                  what was minimised: nanoseconds, or bytes with "objective": "memory" in asked
          "bound": 1529900000,                      no plan of this point has a lower objective
          "gap": 0.0001,                            (objective - bound) / objective
          "baseline": null,                         the baseline whose plan it is, where the solver stopped too early for a better one
          "seconds": 35.1,                          of pricing and solving
          "message": ""                             why there is no plan
        }
      ]
    }

Rows are in the order of the points. Derived figures (tokens per second, the front, the regret) are not kept: they are functions of the
rows in :mod:`solver_shard.study.pareto`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from solver_shard.errors import InfeasibleError, InputError
from solver_shard.files import read_json, read_text
from solver_shard.plan.codec import decode, encode
from solver_shard.plan.plan import Plan
from solver_shard.study.sweep_points import MAX_POINTS, Point

FILE = "sweep.json"
MAX_BYTES = 64 * 2**20

Status = Literal["optimal", "gap", "feasible", "infeasible", "error", "pending"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is known of one point; the module's docstring has the attributes."""

    name: str
    mesh: str
    devices: int
    batch: int | None
    seq: int | None
    memory_limit: int
    reserve: int
    cluster: str
    status: Status = "pending"
    step_ns: int | None = None
    compute_ns: int | None = None
    communication_ns: int | None = None
    peak: int | None = None
    peak_bound: int | None = None
    objective: int | None = None
    bound: int | None = None
    gap: float | None = None
    baseline: str | None = None
    seconds: float | None = None
    message: str = ""

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.status in ("optimal", "gap", "feasible")

    @property
    def done(self) -> bool:
        """Whether running it again would tell nothing new."""
        return self.fits or self.status == "infeasible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep, finished or not; ``str(sweep)`` is its table. The module's docstring has the attributes."""

    schema_version: Literal[1] = 1
    model: str
    tool: str
    asked: Mapping[str, str]
    programs: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[Row, ...]

    @property
    def pending(self) -> int:
        """How many points are not run yet, or failed and would be run again."""
        return sum(not row.done for row in self.rows)

    def to_json(self) -> str:
        """The text of ``sweep.json``, a line for each row."""
        data = encode(self)
        rows = ",\n".join(json.dumps(row, allow_nan=False) for row in data.pop("rows"))
        head = json.dumps(data, indent=1, allow_nan=False).removesuffix("\n}")
        return f'{head},\n "rows": [\n{rows}\n]}}\n'

    def __str__(self) -> str:
        from solver_shard.study.pareto import table_text

        return table_text(self)


def load_sweep(path: str | os.PathLike[str]) -> Sweep:
    """Read ``sweep.json``, or the one in a folder.

    Raises:
        InputError: no such file, too large, or not of this form; the message names the place.
    """
    path = Path(path)
    try:
        path = path / FILE if path.is_dir() else path
        data = read_json(read_text(path, MAX_BYTES))
    except OSError as error:
        raise InputError(
            f"cannot read sweep {str(path)!r}: {error.strerror or error}; 'solver-shard sweep ... -o FOLDER' writes FOLDER/{FILE}"
        ) from None
    except ValueError as error:
        raise InputError(f"{path}: not a sweep: not JSON ({error}); 'solver-shard sweep ... -o FOLDER' writes FOLDER/{FILE}") from None
    if not isinstance(data, dict) or "rows" not in data:
        raise InputError(f"{path}: not a sweep: it has no rows; 'solver-shard sweep ... -o FOLDER' writes FOLDER/{FILE}")
    try:
        sweep: Sweep = decode(Sweep, data)
        _check(sweep)
    except InputError as error:
        raise InputError(f"{path}: not a valid sweep: {error}") from None
    return sweep


def pending_row(point: Point) -> Row:
    """The row of a point that is not run yet."""
    what = point.asked
    return Row(
        name=point.name,
        mesh=str(what.mesh.whole),
        devices=what.mesh.size,
        batch=what.options.batch,
        seq=what.options.seq,
        memory_limit=what.options.memory_limit,
        reserve=what.options.reserve,
        cluster=what.cluster.name,
    )


def plan_row(point: Point, plan: Plan) -> Row:
    """The row of a point that has a plan: all of it is in the plan."""
    costs, proof = plan.costs, plan.certificate
    return dataclasses.replace(
        pending_row(point),
        status="feasible" if proof.status == "interrupted" else proof.status,
        step_ns=costs.total_ns,
        compute_ns=costs.compute_ns,
        communication_ns=costs.communication_ns,
        peak=plan.memory.peak,
        objective=proof.objective,
        bound=proof.bound,
        gap=proof.gap,
        baseline=proof.baseline,
        seconds=round(sum(value for stage, value in proof.stages.items() if not stage.startswith("solve: ")), 3),
    )


def failed_row(point: Point, error: Exception, seconds: float) -> Row:
    """The row of a point that has none: because none fits, or because something went wrong."""
    row = dataclasses.replace(pending_row(point), seconds=round(seconds, 3), message=str(error) or type(error).__name__)
    if isinstance(error, InfeasibleError):
        return dataclasses.replace(row, status="infeasible", peak=error.achieved_peak, peak_bound=error.peak_bound)
    return dataclasses.replace(row, status="error")


def _check(sweep: Sweep) -> None:
    """A plan's row has the figures of a plan, and every point is there once."""
    if len(sweep.rows) > MAX_POINTS:
        raise InputError(f"rows: {len(sweep.rows):,} points; a sweep has at most {MAX_POINTS:,}")
    seen = set[str]()
    for i, row in enumerate(sweep.rows):
        if row.name in seen:
            raise InputError(f"rows[{i}]: {row.name!r} is there twice")
        seen.add(row.name)
        figures = (row.step_ns, row.compute_ns, row.communication_ns, row.peak, row.objective, row.bound, row.gap)
        if row.fits and any(value is None or value < 0 for value in figures):
            raise InputError(f"rows[{i}]: status {row.status} without all the figures of a plan")
        if row.devices < 1 or (row.batch is not None and row.batch < 1):
            raise InputError(f"rows[{i}]: devices and batch are at least 1")
