"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import io
import re
import sys

import pytest

from solver_shard.cli.terminal import progress_lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, *, keep: bool) -> str:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress_lines(False, keep=keep) as show:
        assert show is not None
        show("pricing 7 ops on [tp]")
        show("solving: objective 1,034, bound 1,020, gap 1.35% (kernel)")
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())


def test_a_terminal_shows_the_last_line_with_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, keep=False)
    assert re.search(r"\d\.\d s  solving: objective 1,034, bound 1,020, gap 1\.35% \(kernel\)", text)


def test_lines_that_are_kept_stand_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line.strip() for line in shown(monkeypatch, keep=True).splitlines()]
    assert len([line for line in lines if re.fullmatch(r"\d+\.\d s  pricing 7 ops on \[tp\]", line)]) == 1
    assert len([line for line in lines if re.fullmatch(r"\d+\.\d s  solving: objective 1,034.*", line)]) == 1


def test_elsewhere_every_line_is_a_plain_one(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_lines(False) as show:
        assert show is not None
        show("tracing the model")
    assert re.fullmatch(r" +\d+\.\d s  tracing the model\n", capsys.readouterr().err)


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_lines(True) as show:
        assert show is None
    assert capsys.readouterr().err == ""
