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
rows in :mod:`solver_shard.analysis.sweep.results`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Literal

from solver_shard.analysis.sweep.points import MAX_POINTS, Point
from solver_shard.arguments import checked
from solver_shard.codec import decode, encode
from solver_shard.errors import InfeasibleError, InputError
from solver_shard.files import read_json, read_text, write_whole
from solver_shard.plan.io import load_plan
from solver_shard.plan.plan import Plan
from solver_shard.text import format_bytes, format_ns, table, text_of

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

        return table_text(self)


@checked
def load_sweep(path: str | os.PathLike[str]) -> Sweep:
    """Read ``sweep.json``, or the one in a folder.

    >>> load_sweep("gpt2-8").rows[0].step_ns  # doctest: +SKIP

    Args:
        path: of the file, or of the folder of ``sweep -o``.

    Returns:
        A row for each point; ``str()`` is the table.

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
    what = point.request
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


# Which points of a sweep are worth a look: the front of time against memory, the ranking, and how far it is proven.
#
# Points with different batches are compared by the time that one sequence (one sample) takes: the step time over the batch. With one batch
# this is the order of step times. A point is on the front where no other is at least as good in both time and peak, and better in one.
#
# The solver proves a bound for each point: no plan of it is faster. Where the bound of a point lies below the time of another one that
# ranks before it, a longer search could still turn the two around; the table says so instead of promising an order.

MOST_NAMED = 6
"""Points that one sentence names."""

MOST_TEXT = 300
"""Characters of a message in the table; the file has all of it."""


def time_of(row: Row) -> Fraction:
    """Nanoseconds per sequence, exact; of the whole step where there is no batch. Only of rows that fit."""
    assert row.step_ns is not None, "a row that fits has a step time"
    return Fraction(row.step_ns, row.batch or 1)


def per_second(row: Row) -> float | None:
    """Tokens per second; without a sequence length samples, and without a batch steps. None where there is no plan."""
    return (row.seq or 1 if row.batch else 1) * 1e9 / float(time_of(row)) if row.fits and row.step_ns else None


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Those that fit, fastest first, of equal ones the smaller peak; then in the order of the points."""
    return sorted((row for row in rows if row.fits), key=_time_and_peak)


def front(rows: Iterable[Row]) -> list[Row]:
    """Those that fit and that no other beats by being at least as fast and at least as small, one of the two strictly; fastest first."""
    found: list[Row] = []
    for row in ranked(rows):
        if not found or _peak(row) < _peak(found[-1]) or _time_and_peak(row) == _time_and_peak(found[-1]):
            found.append(row)
    return found


def proves_time(sweep: Sweep) -> bool:
    """Whether the bounds are of the step time: with another objective they say nothing of the ranking."""
    return sweep.asked.get("objective") == "time" and sweep.asked.get("memory_weight") == "0"


def not_proven_slower(row: Row, than: Row) -> bool:
    """Whether a longer search could make a point as fast as one that ranks before it: its bound is below the other's time."""
    assert row.bound is not None, "a row that fits has a bound"
    return Fraction(row.bound, row.batch or 1) < time_of(than)


def table_text(sweep: Sweep) -> str:
    """The table that a person reads: fastest first with the front marked, then what does not fit, failed, or is not run yet."""
    rows = sweep.rows
    shown = [part for part in _PARTS if len({part.text(row) for row in rows}) > 1 or part.name == "mesh"]
    lines = [_title(sweep), *_asked(sweep, shown)]
    for section in (_plans(sweep, shown), _misfits(rows, shown), _failures(rows, shown)):
        lines += ["", *section] if section else []
    waiting = sum(row.status == "pending" for row in rows)
    lines += ["", f"{waiting} of {len(rows)} points are not run yet"] if waiting else []
    return text_of(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part of what identifies a point, as a column."""

    name: str
    text: Callable[[Row], str]
    right: bool = True


_PARTS = (
    _Part(name="mesh", text=lambda row: row.mesh, right=False),
    _Part(name="devices", text=lambda row: str(row.devices)),
    _Part(name="batch", text=lambda row: "" if row.batch is None else str(row.batch)),
    _Part(name="limit", text=lambda row: format_bytes(row.memory_limit)),
    _Part(name="cluster", text=lambda row: row.cluster, right=False),
)


def _title(sweep: Sweep) -> str:
    rows = sweep.rows
    counts = [
        (sum(row.fits for row in rows), "with a plan"),
        (sum(row.status == "infeasible" for row in rows), "without one that fits"),
        (sum(row.status == "error" for row in rows), "failed"),
    ]
    said = ", ".join(f"{count} {what}" for count, what in counts if count)
    return f"{sweep.model}: {len(rows)} point{'s' * (len(rows) != 1)}{f', {said}' if said else ''}"


def _asked(sweep: Sweep, shown: Sequence[_Part]) -> list[str]:
    """What all points share; the columns say the rest."""
    row, asked, names = sweep.rows[0], sweep.asked, {part.name for part in shown}
    said = [f"{row.devices} device{'s' * (row.devices != 1)}"] if "devices" not in names else []
    said += [f"batch {row.batch}"] if "batch" not in names and row.batch is not None else []
    said += [f"seq {row.seq}"] if row.seq is not None else []
    said += [text for name in ("dtype", "optimizer") if (text := asked.get(name, "none")) != "none"]
    said += [f"{asked['microbatches']} microbatches"] if asked.get("microbatches", "1") != "1" else []
    said += ["forward only"] if asked.get("forward_only") == "true" else []
    said += ["every layer checkpointed"] if asked.get("checkpoint") == "true" else []
    said += [f"cluster {row.cluster}"] if "cluster" not in names else []
    if "limit" not in names:
        said += [f"{format_bytes(row.memory_limit)} per device" + (f" less {format_bytes(row.reserve)} reserve" if row.reserve else "")]
    kept = [asked[name] for name in ("template", "pins") if asked.get(name, "none") != "none"]
    return [f"  {', '.join(said)}", *(f"  {text}" for text in kept)]


def _plans(sweep: Sweep, shown: Sequence[_Part]) -> list[str]:
    rows = ranked(sweep.rows)
    if not rows:
        return []
    best, marked, proves = rows[0], {row.name for row in front(rows)}, proves_time(sweep)
    unsure = {row.name for above, row in itertools.pairwise(rows) if proves and not_proven_slower(row, above)}
    rate = "tokens/s" if best.seq and best.batch else "samples/s" if best.batch else "steps/s"
    head = ["", *(part.name for part in shown), "step time", rate, "slower by", "peak", "communication", "gap"]
    cells = [head]
    for row in rows:
        step, talk, gap = row.step_ns or 0, row.communication_ns or 0, row.gap or 0.0
        slower = "best" if time_of(row) == time_of(best) else f"{100 * float(time_of(row) / time_of(best) - 1):.1f}%"
        cells.append(
            [
                ("*" if row.name in marked else " ") + ("~" if row.name in unsure else " "),
                *(part.text(row) for part in shown),
                format_ns(step),
                f"{per_second(row) or 0:,.0f}" if (per_second(row) or 0) >= 10 else f"{per_second(row) or 0:.3g}",
                slower,
                format_bytes(_peak(row)),
                f"{100 * talk / max(step, 1):.0f}%",
                f"{100 * gap:.2g}%" + (f" ({row.baseline})" if row.baseline else ""),
            ]
        )
    right = [i + 1 for i, part in enumerate(shown) if part.right]
    right += range(len(shown) + 1, len(head))
    lines = table(cells, right=right, header=True)
    lines.append("  *  on the front: no other plan is at least as fast and as small, and better in one")
    if not proves:
        return [*lines, "  the proofs are not of the step time, for another objective was asked: nothing is proven of this order"]
    if unsure:
        lines.append("  ~  not proven slower than the row above: its bound is lower than that one's step time")
    return [*lines, *_proof(rows, shown)]


def _proof(rows: Sequence[Row], shown: Sequence[_Part]) -> list[str]:
    """What is proven of the fastest."""
    best, *others = rows
    if not others:
        return []
    rivals = [row for row in others if not_proven_slower(row, best)]
    name = _label(best, shown)
    if not rivals:
        return [f"  proven: none of the others is faster than {name}"]
    named = [f"{_label(row, shown)} (bound {format_ns(row.bound or 0)})" for row in rivals[:MOST_NAMED]]
    more = f", +{len(rivals) - MOST_NAMED} more" if len(rivals) > MOST_NAMED else ""
    return [f"  not proven slower than {name}: {', '.join(named)}{more}"]


def _misfits(rows: Sequence[Row], shown: Sequence[_Part]) -> list[str]:
    misfits = [row for row in rows if row.status == "infeasible"]
    if not misfits:
        return []
    cells = [[*(part.text(row) for part in shown), *_needs(row)] for row in misfits]
    right = [i for i, part in enumerate(shown) if part.right] + [len(shown), len(shown) + 1, len(shown) + 2]
    head = [*(part.name for part in shown), "for tensors", "least peak found", "proven least"]
    lines = ["No plan fits", *table([head, *cells], right=right, header=True)]
    return lines + [f"  {_label(row, shown)}: {_short(row.message)}" for row in misfits if row.peak is None and row.peak_bound is None]


def _needs(row: Row) -> list[str]:
    return [
        format_bytes(row.memory_limit - row.reserve),
        *("" if size is None else format_bytes(size) for size in (row.peak, row.peak_bound)),
    ]


def _failures(rows: Sequence[Row], shown: Sequence[_Part]) -> list[str]:
    failed = [f"  {_label(row, shown)}: {_short(row.message)}" for row in rows if row.status == "error"]
    return ["Failed; the same command runs them again", *failed] if failed else []


def _label(row: Row, shown: Sequence[_Part]) -> str:
    """A point in a sentence."""
    words = {"mesh": "", "devices": None, "batch": "batch ", "limit": "", "cluster": ""}
    return " ".join(f"{words[part.name]}{text}" for part in shown if words[part.name] is not None and (text := part.text(row)))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_TEXT else f"{line[: MOST_TEXT - 3]}..."


def _time_and_peak(row: Row) -> tuple[Fraction, int]:
    return time_of(row), _peak(row)


def _peak(row: Row) -> int:
    assert row.peak is not None, "a row that fits has a peak"
    return row.peak


# The folder of a sweep: a plan file for each point, and ``sweep.json``, which is written anew whenever a point is done.
#
# A file there is complete or absent, so a sweep that was killed goes on from what it has: a plan that is there is read, and is that of a
# point if mesh, cluster, options, model and tool are the point's. What is there and is something else is never written over: it is named,
# and nothing runs. Points that did not fit are in ``sweep.json`` only; those that failed run again.
#
# A folder belongs to one set of arguments, but for the points themselves: more meshes, batches, limits or clusters may be asked later, and
# those that are there stay.

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\Z")
"""What ``write_whole`` leaves of a file where it is killed."""


class Store:
    """A folder that one process at a time writes a sweep to.

    Attributes:
        rows: of all points, by name, in their order: those that are there, and pending ones.
        programs: see ``Sweep``.
    """

    def __init__(self, folder: str | os.PathLike[str], fresh: Sweep, points: Sequence[Point]) -> None:
        self.folder, self.fresh = Path(folder), fresh
        self.rows = {point.name: pending_row(point) for point in points}
        self.programs: dict[str, str] = {}
        before = self._before()
        if before is not None:
            self.programs.update(before.programs)
            self._take(before, points)

    def path(self, point: Point) -> Path:
        """Where the point's plan is, or will be."""
        return self.folder / point.file

    def write(self, sweep: Sweep) -> None:
        """Write ``sweep.json`` anew."""
        write_whole(self.folder / FILE, sweep.to_json())

    def _before(self) -> Sweep | None:
        """The sweep that is there, if it is this one; None for a folder without anything."""
        if not (self.folder / FILE).exists():
            there = sorted(path.name for path in self.folder.iterdir() if not _left_over(path.name, {FILE}))
            if there:
                raise InputError(
                    f"{self.folder} holds {there[0]!r}{f' and {len(there) - 1} more' if len(there) > 1 else ''} but no {FILE}; give a "
                    "folder that is new, empty, or holds a sweep of the same arguments"
                )
            return None
        before = load_sweep(self.folder)
        differs = difference(before, self.fresh)
        gone = [row.name for row in before.rows if row.name not in self.rows]
        if differs is None and gone:
            differs = f"it has the point {gone[0]}{f' and {len(gone) - 1} more' if len(gone) > 1 else ''}, which this one does not ask for"
        if differs is not None:
            raise InputError(
                f"{self.folder} holds another sweep: {differs}; give another folder, or the same arguments (more points are fine)"
            )
        return before

    def _take(self, before: Sweep, points: Sequence[Point]) -> None:
        """The rows of what is there: of plans from the plans themselves."""
        names = {FILE, *(point.file for point in points)}
        for path in self.folder.iterdir():
            if _left_over(path.name, names):
                path.unlink(missing_ok=True)
        known = {row.name: row for row in before.rows}
        for point in points:
            row, path = known.get(point.name), self.path(point)
            if path.exists() or path.is_symlink():
                self.rows[point.name] = plan_row(point, self._plan_of(point))
            elif row is not None and row.status in ("infeasible", "error"):
                self.rows[point.name] = _same_point(row, self.rows[point.name])

    def _plan_of(self, point: Point) -> Plan:
        path = self.path(point)
        try:
            plan = load_plan(path)
            wrong = mismatch(plan, point, self.fresh)
        except InputError as error:
            wrong = str(error)
        if wrong is not None:
            raise InputError(f"{path} is not the plan of this sweep's point: {wrong}; move it away, and run again")
        return plan


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Make the folder, if its parent is there, and keep other sweeps out of it; the lock goes with the process, however that ends.

    Raises:
        InputError: it cannot be made or written, or another sweep runs in it.
    """
    import fcntl

    folder = Path(folder)
    try:
        folder.mkdir(exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"cannot use the folder {str(folder)!r}: {reason}; give one whose parent exists and that can be written") from None
    try:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InputError(f"cannot write in the folder {str(folder)!r}; give another")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another sweep runs in {folder}; wait for it, or give another folder") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def difference(one: Sweep, other: Sweep) -> str | None:
    """The first thing in which what two sweeps ask for differs, beside their points; None where there is none."""
    for what, a, b in (("model", one.model, other.model), ("made by", one.tool, other.tool)):
        if a != b:
            return f"{what} {a}, not {b}"
    return _differs(one.asked, other.asked)


def mismatch(plan: Plan, point: Point, sweep: Sweep) -> str | None:
    """Why a plan is not that of a point; None where it is."""
    what = point.request
    if what.mesh not in (plan.mesh, plan.mesh.whole):
        return f"it is for the mesh {plan.mesh.whole}"
    if plan.cluster != what.cluster:
        return f"it is for another cluster, {plan.cluster.title}"
    if plan.options != what.options:
        return "it was made with other options"
    if not plan.provenance.source.startswith(sweep.model):
        return f"it is of the model {plan.provenance.source}"
    return None if plan.provenance.tool == sweep.tool else f"it was made by {plan.provenance.tool}"


def _differs(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    for name in dict.fromkeys((*one, *other)):
        if one.get(name) != other.get(name):
            return f"{name} is {one.get(name, 'not there')}, here {other.get(name, 'not there')}"
    return None


def _same_point(row: Row, point: Row) -> Row:
    """A row without a plan, if its point is what its name says."""
    asked = ("mesh", "devices", "batch", "seq", "memory_limit", "reserve", "cluster")
    return row if all(getattr(row, name) == getattr(point, name) for name in asked) else point


def _left_over(name: str, files: set[str]) -> bool:
    """Whether this is a temporary file that a killed process left of one of these."""
    found = _TEMPORARY.match(name)
    return found is not None and any(file[:100] == found[1] for file in files)
