"""The points of a sweep as tasks of a Ray cluster, whose machines have the same solver-shard installed.

Ray is optional: ``pip install 'solver-shard[ray]'``. The traced step is plain data; it is sent once for every batch size, and plans come
back as text.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

from solver_shard import __version__
from solver_shard.errors import InputError, SolverShardError
from solver_shard.files import write_whole
from solver_shard.plan.io import plan_to_json
from solver_shard.study.sweep_points import Point
from solver_shard.study.sweep_result import Row, failed_row
from solver_shard.study.sweep_run import Step, Task, row_of, solve_point

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
