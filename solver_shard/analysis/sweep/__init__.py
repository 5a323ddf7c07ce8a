"""The same model on many meshes, batches, memory limits and clusters: what is fastest, what is smallest, and what is proven of it.

>>> found = sweep("gpt2", devices=8, batches=[16], seq=1024, folder="gpt2-8")   # doctest: +SKIP
>>> print(found)                                                                # doctest: +SKIP
>>> best = solver_shard.load_plan(f"gpt2-8/{ranked(found.rows)[0].name}.json")  # doctest: +SKIP

The model is traced once for every batch size, never for a mesh, a limit or a cluster. Points run in processes of their own, on this
machine or on a Ray cluster; with a work limit the plans do not depend on how many run at once. With a folder every plan is kept there,
and a sweep that stopped half-way goes on from what it has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from solver_shard import __version__
from solver_shard.analysis.sweep.points import DEFAULT_AXES, Point, grid
from solver_shard.analysis.sweep.points import meshes as meshes_of
from solver_shard.analysis.sweep.results import Row, Store, Sweep, locked, pending_row
from solver_shard.analysis.sweep.run import Step, Task, run_local
from solver_shard.api import traced_step
from solver_shard.arguments import Several, checked, each
from solver_shard.codec import encode
from solver_shard.errors import InputError
from solver_shard.mesh import Mesh
from solver_shard.options import MAX_WORKERS, Options, SweepOptions, with_options
from solver_shard.program import Program
from solver_shard.text import format_bytes, format_ns, parse_bytes
from solver_shard.tracing.load import is_entry_point

if TYPE_CHECKING:
    import torch

    from solver_shard.costs.cluster import Cluster


OF_POINTS = ("batch", "memory_limit", "reserve")
"""Options that points differ in; the others are those of the sweep."""


@with_options("sweep")
@checked
def sweep(
    model: str | os.PathLike[str] | torch.nn.Module | Program,
    inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    *,
    devices: int | None = None,
    axes: Several[int] = DEFAULT_AXES,
    meshes: Several[str | int | Mesh] = (),
    batches: Several[int | None] = None,
    memories: Several[str | int | None] = None,
    clusters: Several[str | os.PathLike[str] | Cluster] = "h100",
    loss_fn: Callable[..., Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    workers: int = 1,
    ray: str | None = None,
    command: str | None = None,
    progress: Callable[[str], None] | None = None,
    watch: Callable[[Sweep], None] | None = None,
    **options: Unpack[SweepOptions],
) -> Sweep:
    """Plan a model at every combination of mesh, batch, memory limit and cluster.

    >>> found = sweep("gpt2", devices=8, batches=[16], seq=1024, folder="gpt2-8")  # doctest: +SKIP

    Args:
        model, inputs, loss_fn: as of ``solver_shard.optimize``.
        devices: a mesh for every way to write this number as a product of factors larger than 1; give it, or ``meshes``.
        axes: how many factors: a number of mesh axes, or several.
        meshes: meshes by hand, one or several: ``["dp=8,tp=8", "dp=16,tp=4"]``.
        batches, memories, clusters: what to try of each, one or several, as the ``batch``, ``memory`` and ``cluster`` of ``optimize``.
        folder: where the plans and ``sweep.json`` go; made if it is not there. One that holds this sweep already, whole or in part,
            is gone on with. None keeps rows only.
        jobs: how many points run at once; default: as many as there are processor cores for, at ``workers`` each.
        workers: processor cores for each point.
        ray: address of a Ray cluster whose machines run the points, or ``local`` for one on this machine; ``jobs`` then only says how
            large a local one is.
        command: what plans record as their origin.
        progress: called with a line of text when something starts or is done.
        watch: called with what is known so far: at the start, and after every point.
        OPTIONS

    Returns:
        A row for each point: step time in nanoseconds, peak in bytes per device, bound and gap; ``str()`` of it is the table.

    Raises:
        InputError: an argument is not usable, or the folder holds something else.
        TraceError, RuleError: as of ``optimize``. What goes wrong at a single point is in its row instead.
    """
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    jobs = _jobs(jobs, workers)
    points = grid(
        model,
        meshes=_meshes(devices, each(axes), each(meshes)),
        batches=each(batches),
        memories=each(memories),
        clusters=each(clusters),
        workers=workers,
        options=options,
    )
    fresh = Sweep(
        model=_named(model),
        tool=f"solver-shard {__version__}",
        asked=_asked(model, points[0].request.options, options.get("reserve")),
        rows=tuple(map(pending_row, points)),
    )
    say = progress or (lambda line: None)
    with contextlib.ExitStack() as stack:
        if folder is not None:
            stack.enter_context(locked(folder))
        state = _SweepRows(fresh, None if folder is None else Store(folder, fresh, points), watch)
        left = [point for point in points if not state.rows[point.name].done]
        if left:
            state.show()  # the folder is written once the model is traced: a name that is no model leaves nothing behind
        else:
            state.publish()
        if len(left) < len(points):
            say(f"{len(points) - len(left)} of {len(points)} points are there already")
        command = command or f"solver_shard.analysis.sweep.sweep({fresh.model!r}, ...)"
        steps = _Steps(model, inputs, loss_fn, state, command, workers, say)
        if not left and not _is_preset_or_config(model):
            steps.of(points[0])  # what a module or a function makes may have changed
        tasks = (Task(point=point, step=steps.of(point), path=state.path(point)) for point in left)
        if ray is None or not left:
            found = run_local(tasks, jobs=jobs, started=lambda point: say(f"solving {point.name}"))
        else:
            from solver_shard.analysis.sweep.run import run_ray

            found = run_ray(tasks, address=ray, cores=jobs * workers, say=say)
        stack.enter_context(contextlib.closing(found))
        for row in found:
            state.put(row)
            say(f"{len(points) - state.sweep.pending} of {len(points)}: {said_of(row)}")
        return state.sweep


def said_of(row: Row) -> str:
    """A point that is done, in a line."""
    if not row.fits or row.step_ns is None or row.peak is None:
        return f"{row.name}: {row.status}{f' ({row.seconds:.0f} s)' if row.seconds is not None else ''}"
    return f"{row.name}: {format_ns(row.step_ns)}, {format_bytes(row.peak)}, {row.status} ({row.seconds:.0f} s)"


class _SweepRows:
    """The rows so far, and where they are kept."""

    def __init__(self, fresh: Sweep, store: Store | None, watch: Callable[[Sweep], None] | None) -> None:
        self.fresh, self.store, self.watch = fresh, store, watch
        self.rows = {row.name: row for row in fresh.rows} if store is None else store.rows
        self.programs: dict[str, str] = {} if store is None else store.programs

    @property
    def sweep(self) -> Sweep:
        return dataclasses.replace(self.fresh, rows=tuple(self.rows.values()), programs=dict(self.programs))

    def path(self, point: Point) -> Path | None:
        return None if self.store is None else self.store.path(point)

    def put(self, row: Row) -> None:
        self.rows[row.name] = row
        self.publish()

    def publish(self) -> None:
        if self.store is not None:
            self.store.write(self.sweep)
        self.show()

    def show(self) -> None:
        if self.watch is not None:
            self.watch(self.sweep)


class _Steps:
    """The traced step of every batch size: each is traced once, when its first point is run, and gone when the next one's is."""

    def __init__(
        self,
        model: str | torch.nn.Module | Program,
        inputs: Mapping[str, Any] | tuple[Any, ...] | None,
        loss_fn: Callable[..., Any] | None,
        state: _SweepRows,
        command: str,
        workers: int,
        say: Callable[[str], None],
    ) -> None:
        self.model, self.inputs, self.loss_fn = model, inputs, loss_fn
        self.state, self.command, self.workers, self.say = state, command, workers, say
        self.last: tuple[int | None, Step] | None = None

    def of(self, point: Point) -> Step:
        options = point.request.options
        if self.last is None or self.last[0] != options.batch:
            self.say(f"tracing the model{f', batch {options.batch}' if options.batch is not None else ''}")
            self.last = options.batch, self._traced(options)
        return self.last[1]

    def _traced(self, options: Options) -> Step:
        program, traced, source = traced_step(self.model, options, inputs=self.inputs, loss_fn=self.loss_fn)
        key, print_ = "" if options.batch is None else str(options.batch), fingerprint(program)
        if self.state.programs.setdefault(key, print_) != print_:
            raise InputError(
                f"{self.state.fresh.model} is not the model that the points in the folder were planned for: its step has changed; give "
                "another folder"
            )
        self.state.publish()
        return Step(program=program, traced=traced, source=source, command=self.command, workers=self.workers)


def fingerprint(program: Program) -> str:
    """Equal for equal steps, in every process."""
    parts = (program.tensors, program.ops, program.outputs, sorted(program.gradients.items()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _meshes(devices: int | None, axes: Sequence[int], given: Sequence[str | int | Mesh]) -> Sequence[str | int | Mesh]:
    if (devices is None) == (not given):
        raise InputError("give one of devices (--devices 64), for all shapes of that many, and meshes (--mesh dp=8,tp=8), by hand")
    return given if devices is None else meshes_of(devices, axes)


def _jobs(jobs: int | None, workers: int) -> int:
    cores = len(os.sched_getaffinity(0))
    found = max(1, cores // workers) if jobs is None and isinstance(workers, int) and workers > 0 else 1 if jobs is None else jobs
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= MAX_WORKERS:
        raise InputError(f"{found!r} jobs are not legal; give a whole number of points to run at once, 1 to {MAX_WORKERS}")
    return found


def _is_preset_or_config(model: str | torch.nn.Module | Program) -> bool:
    return isinstance(model, str) and not is_entry_point(model)


def _named(model: str | torch.nn.Module | Program) -> str:
    """How a plan's source begins that is made of this model."""
    if isinstance(model, str):
        return model
    return f"program {model.name}" if isinstance(model, Program) else f"module {type(model).__module__}.{type(model).__qualname__}"


def _asked(model: str | torch.nn.Module | Program, options: Options, reserve: str | int | None) -> dict[str, str]:
    """What all points share, as text, so that a folder can say what differs."""
    said = {name: _text(value) for name, value in encode(options).items() if name not in OF_POINTS}
    said["rules"] = ", ".join(f"{file.name} ({_digest(file.text)})" for file in options.rules) or "none"
    said["reserve"] = "default" if reserve is None else str(parse_bytes(reserve, least=0))
    if _is_preset_or_config(model) and os.path.isfile(str(model)):
        said["config"] = _digest(Path(str(model)).read_text(encoding="utf-8", errors="replace"))
    return said


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
