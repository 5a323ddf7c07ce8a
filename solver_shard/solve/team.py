"""Several tasks at once in processes of their own: the same results for any number of workers.

    first, second = run([task_a, task_b], workers=2, over=clock.over)

A task is a function without arguments; its result is pickled. The last task runs in this process, the others in forked copies of it, so
everything that a task reads is there already. Where forking is not possible, or with one worker, tasks run one after the other. A task
must not depend on the others' results, nor leave anything behind in this process that another one reads: then the number of
workers changes nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")

GRACE = 1.0
"""Seconds that a process still gets after ``over`` before it is stopped, and after that to end."""


def run(tasks: Sequence[Callable[[], T]], *, workers: int, over: Callable[[], bool]) -> list[T]:
    """The results of the tasks in their order; fewer where ``over`` says stop. An error of a task is raised here."""
    if workers < 2 or len(tasks) < 2 or not hasattr(os, "fork"):
        return [task() for task in tasks]
    results: list[T] = []
    for start in range(0, len(tasks), workers):
        *others, own = tasks[start : start + workers]
        running = [_start(task) for task in others]
        try:
            mine = own()
            for _, here in running:
                results += _wait(here, over)
            results.append(mine)
        finally:
            for process, here in running:
                here.close()
                process.terminate()
                process.join(GRACE)
                process.kill()  # one that does not end when asked
                process.join()
    return results


def _start(task: Callable[[], T]) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(task, there), daemon=True)
    process.start()
    there.close()
    return process, here


def _wait(here: Connection, over: Callable[[], bool]) -> list[Any]:
    """The answer of a process; none if it comes too late or the process was killed."""
    late: float | None = None
    while not here.poll(0.05):
        if over():
            late = late or time.monotonic()
            if time.monotonic() - late > GRACE:
                return []
    try:
        answer = here.recv()
    except EOFError:
        return []
    if isinstance(answer, BaseException):
        raise answer
    return [answer]


def _child(task: Callable[[], T], there: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    try:
        there.send(task())
    except BaseException as error:  # whatever it is: the parent raises it
        there.send(error)
    finally:
        there.close()
