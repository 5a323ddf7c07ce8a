"""The folder of a sweep: a plan file for each point, and ``sweep.json``, which is written anew whenever a point is done.

A file there is complete or absent, so a sweep that was killed goes on from what it has: a plan that is there is read, and is that of a
point if mesh, cluster, options, model and tool are the point's. What is there and is something else is never written over: it is named,
and nothing runs. Points that did not fit are in ``sweep.json`` only; those that failed run again.

A folder belongs to one set of arguments, but for the points themselves: more meshes, batches, limits or clusters may be asked later, and
those that are there stay.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from solver_shard.errors import InputError
from solver_shard.files import write_whole
from solver_shard.plan.io import load_plan
from solver_shard.plan.plan import Plan
from solver_shard.study.sweep_points import Point
from solver_shard.study.sweep_result import FILE, Row, Sweep, load_sweep, pending_row, plan_row

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
    what = point.asked
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
