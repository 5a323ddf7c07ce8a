"""Ctrl-C and the total time limit of a command, with signals sent to this process."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from plan_examples import example

import solver_shard.api
from solver_shard.cli import main
from solver_shard.cli.options import written_if_possible
from solver_shard.cli.terminal import MESSAGE, catch_interrupts, time_out
from solver_shard.errors import SolverShardError
from solver_shard.files import write_whole
from solver_shard.plan.io import load_plan
from solver_shard.plan.plan import Plan


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_first_asks_the_solver_to_stop_and_the_second_ends_at_once() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with catch_interrupts(said.append) as interrupt:
        assert interrupt() is False
        press_ctrl_c()
        assert (interrupt(), interrupt()) == (True, True)
        assert said == [MESSAGE]
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is before


def test_before_the_solver_runs_the_first_one_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), catch_interrupts(None):
        press_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_thread_that_gets_no_signals_leaves_them_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[bool] = []

    def work() -> None:
        with catch_interrupts(None) as interrupt, time_out(60.0, interrupt):
            seen.append(interrupt() is False and signal.getsignal(signal.SIGINT) is before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]


def test_a_total_time_limit_ends_what_runs_before_the_solver() -> None:
    before = signal.getsignal(signal.SIGALRM)

    def trace_for_long() -> None:
        with catch_interrupts(None) as interrupt, time_out(0.01, interrupt):
            while True:
                time.sleep(0.01)

    with pytest.raises(SolverShardError, match=r"total time limit of 0\.01 s was over before any plan was found; give more --total-time"):
        trace_for_long()
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_total_time_limit_leaves_the_solver_alone() -> None:
    with catch_interrupts(None) as interrupt, time_out(0.01, interrupt):
        interrupt()
        time.sleep(0.05)  # the alarm strikes, and changes nothing


def test_an_interrupted_solve_still_gives_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    meanwhile: list[Plan] = []

    def optimize(_model: str, **options: object) -> Plan:
        assert options["stop"]() is False  # type: ignore[operator]  # what the command hands on
        options["incumbent"](example(source="fallback"))  # type: ignore[operator]
        meanwhile.append(load_plan(path))
        press_ctrl_c()
        assert options["stop"]() is True  # type: ignore[operator]
        return example()

    monkeypatch.setattr(solver_shard.api, "optimize", optimize)
    assert main(["solve", "gpt2", "--mesh", "8", "-q", "-o", str(path)]) == 0
    assert meanwhile == [example(source="fallback")]
    assert load_plan(path) == example()


def test_while_tracing_an_interrupt_ends_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(solver_shard.api, "optimize", lambda _model, **_options: press_ctrl_c())
    assert main(["solve", "gpt2", "--mesh", "8", "-q"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_write_that_is_interrupted_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]
    assert path.read_text() == "old"


def test_an_incumbent_that_cannot_be_written_does_not_end_the_search(tmp_path: Path) -> None:
    written_if_possible(lambda text: write_whole(tmp_path / "no" / "plan.json", text))("text")
