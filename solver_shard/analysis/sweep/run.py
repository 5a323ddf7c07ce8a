"""The points of a sweep in processes of this machine: a forked copy of this one for each point, so many at a time.

for row in run_local(tasks, traced, jobs=2, ...):
    ...

A point's process finds the trace in its memory, writes the plan's file by itself and hands back a row. What goes wrong in one (an error,
or the system ends it for its memory) is that point's row; the others go on. They end with this process, even if that one is killed, and
ignore Ctrl-C, which is this process's business.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solver_shard import __version__
from solver_shard.analysis.sweep.points import Point
from solver_shard.analysis.sweep.results import Row, failed_row, plan_row
from solver_shard.errors import InputError, SolverShardError
from solver_shard.files import write_whole
from solver_shard.pipeline import plan_program
from solver_shard.plan.io import plan_to_json, save_plan
from solver_shard.plan.plan import Plan
from solver_shard.program import Program

if TYPE_CHECKING:
    from solver_shard.tracing.clean import TracedProgram


GRACE = 2.0
"""Seconds that a process gets to end when asked."""

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """A traced step of one batch size, which all its points share.

    Attributes:
        program, traced: as of ``source.traced_of``.
        source, command: what plans say of their origin.
        workers: processor cores for each point.
    """

    program: Program
    traced: TracedProgram | None
    source: str
    command: str
    workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """A point to run, the step that it is of, and the file of its plan, if it is wanted."""

    point: Point
    step: Step
    path: Path | None


def solve_point(point: Point, step: Step) -> Plan | Exception:
    """The plan of a point, or why there is none."""
    request = point.request
    try:
        return plan_program(
            step.program,
            mesh=request.mesh,
            cluster=request.cluster,
            options=request.options,
            source=step.source,
            command=step.command,
            workers=step.workers,
            traced=step.traced,
        )
    except Exception as error:  # one point's failure is its row; the others go on
        return error


def row_of(point: Point, found: Plan | Exception, seconds: float) -> Row:
    """What the sweep says of what was found."""
    return failed_row(point, found, seconds) if isinstance(found, Exception) else plan_row(point, found)


def run_local(tasks: Iterable[Task], *, jobs: int, started: Callable[[Point], None] | None = None) -> Generator[Row, None, None]:
    """Rows as they are found, in no fixed order. The next task is asked for when a process is free, so it may be made only then."""
    waiting = iter(tasks)
    running: dict[Connection, tuple[ForkProcess, Point, float]] = {}
    more = True
    try:
        while more or running:
            while more and len(running) < jobs:
                task = next(waiting, None)
                more = task is not None
                if task is not None:
                    if started is not None:
                        started(task.point)
                    process, here = _start(task)
                    running[here] = (process, task.point, time.perf_counter())
            for ready in wait(list(running)) if running else ():
                assert isinstance(ready, Connection), "pipes are what is waited for"
                process, point, start = running.pop(ready)
                yield _answer(ready, process, point, time.perf_counter() - start)
    finally:
        for here, (process, _, _) in running.items():
            process.terminate()
            here.close()
        for process, _, _ in running.values():
            process.join(GRACE)
            process.kill()  # one that does not end when asked
            process.join()


def _start(task: Task) -> tuple[ForkProcess, Connection]:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(task, there, os.getpid()), name=f"solver-shard: {task.point.name}")
    process.start()
    there.close()
    return process, here


def _answer(here: Connection, process: ForkProcess, point: Point, seconds: float) -> Row:
    """The row that a process hands back; what it left of itself otherwise."""
    try:
        row: Row = pickle.loads(here.recv_bytes())
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        hint = "; was there memory for it? Try fewer --jobs" if code == -signal.SIGKILL else ""
        row = failed_row(point, RuntimeError(f"its process {how}{hint}"), seconds)
    finally:
        here.close()
        process.join()
    return row


def _child(task: Task, there: Connection, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before this was asked
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    start = time.perf_counter()
    found = solve_point(task.point, task.step)
    if isinstance(found, Plan) and task.path is not None:
        try:
            save_plan(found, task.path)
        except Exception as error:  # a full disk, most likely
            found = error
    there.send_bytes(pickle.dumps(row_of(task.point, found, time.perf_counter() - start)))
    there.close()
    os._exit(0)  # no exit handlers of the process this is a copy of; a solver left behind ends, too


# The points of a sweep as tasks of a Ray cluster, whose machines have the same solver-shard installed.
#
# Ray is optional: ``pip install 'solver-shard[ray]'``. The traced step is plain data; it is sent once for every batch size, and plans come
# back as text.

LOCAL = "local"

REACH_SECONDS = 10.0

OBJECT_STORE = 256 * 2**20
"""Bytes of shared memory of a cluster that is started here: a few traced steps, of some megabytes each."""


def run_ray(tasks: Iterable[Task], *, address: str, cores: int, say: Callable[[str], None]) -> Generator[Row, None, None]:
    """Rows as they are found; all tasks are handed to the cluster, which decides where and when they run.

    Args:
        address: ``host:port``, ``ray://host:port``, ``auto`` for a cluster that this machine is part of, or ``local`` to start one
            here.
        cores: of the one that is started here.

    Raises:
        InputError: Ray is not installed, or the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError:
        raise InputError("--ray needs Ray, which is not installed: pip install 'solver-shard[ray]', or leave --ray out") from None

    local = address == LOCAL
    say("starting Ray on this machine" if local else f"connecting to Ray at {address}")
    try:
        if local:
            ray.init(
                address="local",
                num_cpus=cores,
                object_store_memory=OBJECT_STORE,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
            )
        else:
            _reach(address)
            ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, OSError, OverflowError) as error:
        raise InputError(f"cannot reach a Ray cluster at {address!r}: {error}; give host:port, ray://host:port, auto or local") from None
    try:
        yield from _rows(ray, tasks, say)
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """OSError where nobody listens at ``host:port``: Ray itself would go on trying for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal() and len(port) < 6:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS).close()


def _rows(ray: Any, tasks: Iterable[Task], say: Callable[[str], None]) -> Generator[Row, None, None]:
    remote = ray.remote(max_retries=0)(_solve)
    sent: dict[int, Any] = {}
    running: dict[Any, Task] = {}
    for task in tasks:
        step = task.step
        if id(step) not in sent:
            sent = {id(step): ray.put(step)}  # a step lives while its tasks are made, and Ray keeps what a task needs
        running[remote.options(num_cpus=step.workers).remote(task.point, sent[id(step)], __version__)] = task
    say(f"{len(running)} points are handed to Ray")
    while running:
        (ready,), _ = ray.wait(list(running), num_returns=1)
        task = running.pop(ready)
        try:
            row, text = ray.get(ready)
            if text is not None and task.path is not None:
                write_whole(task.path, text)
        except Exception as error:  # a machine that was lost, a version that differs, a full disk: this point's
            row = failed_row(task.point, _bare(error), 0.0)
        yield row


def _solve(point: Point, step: Step, version: str) -> tuple[Row, str | None]:
    """On the cluster: a point's row, and its plan as text."""
    if version != __version__:
        raise SolverShardError(f"solver-shard {version} asks, and {__version__} is installed where its points run; install the same")
    start = time.perf_counter()
    found = solve_point(point, step)
    row = row_of(point, found, time.perf_counter() - start)
    return row, None if isinstance(found, Exception) else plan_to_json(found)


def _bare(error: Exception) -> Exception:
    """The error without the traceback that Ray puts around it."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return cause
    lines = [line for line in str(error).splitlines() if line.strip()]
    return RuntimeError(lines[-1] if lines else type(error).__name__)
