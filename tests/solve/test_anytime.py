"""How often what is better is written."""

from __future__ import annotations

import os

import pytest

from solver_shard.solve.limits import Saver


class Hours:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def test_only_the_newest_is_written_and_not_too_often() -> None:
    now, written = Hours(), list[int]()
    saver = Saver(written.append, every=10.0, first=2.0, now=now)
    for second in range(26):
        now.time = float(second)
        saver.offer(lambda second=second: second)
        saver.poll()
    assert written == [2, 12, 22]


def test_what_was_offered_too_soon_is_written_later_and_once() -> None:
    now, written = Hours(), list[int]()
    saver = Saver(written.append, every=10.0, now=now)
    for offered in (1, 2):
        saver.offer(lambda offered=offered: offered)
        saver.poll()
    assert written == [1]
    now.time = 10.0
    saver.poll()
    now.time = 30.0
    saver.poll()
    assert written == [1, 2]


def test_what_is_costly_is_written_less_often() -> None:
    now, written = Hours(), list[float]()

    def slowly() -> float:
        now.time += 4.0
        return now.time

    saver = Saver(written.append, every=10.0, now=now)
    while now.time < 1000.0:
        saver.offer(slowly)
        saver.poll()
        now.time += 1.0
    assert 4.0 * len(written) <= 0.02 * 1000.0 + 4.0
    assert len(written) > 2


def test_nothing_is_written_where_there_is_nothing_new() -> None:
    written = list[int]()
    saver = Saver(written.append, every=0.0)
    saver.poll()
    saver.offer(lambda: None)
    saver.poll()
    assert written == []


def test_a_forked_copy_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[int]()
    saver = Saver(written.append, every=0.0)
    saver.offer(lambda: 1)
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    saver.poll()
    assert written == []
    monkeypatch.undo()
    saver.poll()
    assert written == [1]
