"""Tasks in forked processes under hostile conditions: children that die, raise, or never answer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from solver_shard.solve import limits, parameters

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="tasks run in this process where there is no fork")


class TroubleError(Exception):
    """Raised by a task; pickled on its way."""


def never() -> bool:
    return False


def dies() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def exits() -> int:
    os._exit(3)


def raises() -> int:
    raise TroubleError("in the child")


def sleeps() -> int:
    time.sleep(600)
    return 0


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_results_are_the_same_for_any_number_of_workers_and_in_order(count: int) -> None:
    def task(i: int) -> Callable[[], list[float]]:
        return lambda: np.random.default_rng(i).random(1000 * (count - i)).tolist()

    tasks = [task(i) for i in range(count)]
    alone = limits.run(tasks, workers=1, over=never)
    assert [len(found) for found in alone] == [1000 * (count - i) for i in range(count)]
    for workers in (2, 3, 9):
        assert limits.run(tasks, workers=workers, over=never) == alone


@forks
@pytest.mark.parametrize("end", [dies, exits])
def test_a_child_that_dies_gives_fewer_results(end: Callable[[], int]) -> None:
    assert limits.run([end, lambda: 7], workers=2, over=never) == [7]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("place", [0, 1])
def test_an_error_of_a_task_is_raised_wherever_it_runs(workers: int, place: int) -> None:
    tasks: list[Callable[[], int]] = [lambda: 1, lambda: 2]
    tasks[place] = raises
    with pytest.raises(TroubleError, match="in the child"):
        limits.run(tasks, workers=workers, over=never)


@forks
def test_a_child_that_never_answers_is_ended_when_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "TASK_GRACE", 0.0)
    asked: list[int] = []

    def over() -> bool:
        asked.append(1)
        return len(asked) > 2

    assert limits.run([sleeps, lambda: 7], workers=2, over=over) == [7]
    assert len(asked) >= 3


@forks
def test_an_error_of_the_own_task_ends_the_children() -> None:
    with pytest.raises(TroubleError):
        limits.run([sleeps, sleeps, raises], workers=3, over=never)


@forks
def test_a_child_that_ignores_being_asked_to_end_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "TASK_GRACE", 0.0)
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)

    def stubborn() -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        there.send(os.getpid())
        return sleeps()

    def own() -> int:
        pid = here.recv()
        assert alive(pid)
        return pid

    (pid,) = limits.run([stubborn, own], workers=2, over=lambda: True)
    assert not alive(pid)


@forks
def test_an_answer_that_cannot_be_sent_is_an_error_not_a_wait() -> None:
    with pytest.raises(Exception, match=r"(?i)pickle|local object"):
        limits.run([lambda: lambda: 1, lambda: 2], workers=2, over=never)  # type: ignore[list-item, return-value]
