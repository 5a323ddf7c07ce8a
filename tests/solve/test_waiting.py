"""Blocking calls that are stopped, or left behind, or awaited."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from solver_shard.solve import parameters
from solver_shard.solve.limits import Clock, call_watched, left_behind


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(parameters, "TASK_GRACE", 0.05)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Holds a call until it is set; set at the end, so that no thread stays."""
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and "solver-shard" in thread.name:
            thread.join()


def halted() -> Clock:
    clock = Clock(None, None)
    clock.halt = lambda: True
    return clock


def test_what_a_call_returns_or_raises_comes_back() -> None:
    assert call_watched(lambda: 7, Clock(None, None), seconds=60.0) == 7
    with pytest.raises(ZeroDivisionError):
        call_watched(lambda: 1 // 0, Clock(None, None), seconds=60.0)


def test_a_call_that_can_be_stopped_comes_back_with_what_it_has(gate: threading.Event) -> None:
    assert call_watched(lambda: "partial" if gate.wait() else "", halted(), seconds=60.0, stop=gate.set) == "partial"
    assert not left_behind()


def test_a_call_that_cannot_be_stopped_is_left_behind(gate: threading.Event) -> None:
    assert call_watched(gate.wait, halted(), seconds=60.0) is None
    assert left_behind()


def test_a_call_that_ignores_its_own_time_limit_is_left_behind(gate: threading.Event) -> None:
    stopped: list[bool] = []
    assert call_watched(gate.wait, Clock(None, None), seconds=0.01, stop=lambda: stopped.append(True)) is None
    assert stopped == [True]
    assert left_behind()


def test_a_limit_of_the_clock_is_the_business_of_the_call(gate: threading.Event) -> None:
    over = Clock(0.0, 0.0)
    assert over.over()
    threading.Timer(0.05, gate.set).start()
    assert call_watched(gate.wait, over, seconds=60.0) is True


def test_a_second_interrupt_stops_the_call_and_is_raised(gate: threading.Event) -> None:
    clock = Clock(None, None)

    def interrupted() -> bool:
        signal.raise_signal(signal.SIGINT)
        return False

    clock.halt = interrupted
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore the signal
    try:
        with pytest.raises(KeyboardInterrupt):
            call_watched(gate.wait, clock, seconds=60.0, stop=gate.set)
    finally:
        signal.signal(signal.SIGINT, before)
    assert gate.is_set()
