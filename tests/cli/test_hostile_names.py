"""No name in a plan file steers the terminal or makes a line of its own, whatever command shows it, and whether it is a plan or not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hostile_plans import COMMANDS, TRACED, hostile_plan, let_through, said
from plan_examples import example

from solver_shard.cli import main
from solver_shard.errors import InfeasibleError, InputError, printable
from solver_shard.plan.summary import lookup

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("seed", range(12))
def test_no_command_lets_a_name_through(seed: int, tmp_path: Path) -> None:
    text = hostile_plan(seed)
    for command in (*COMMANDS, *(TRACED if seed == 0 else ())):
        assert let_through(said(tmp_path, text, command)) == [], command


def test_what_lets_names_through_would_be_seen() -> None:
    assert let_through("a\x1b[2J") != []
    assert let_through("name\nEVIL") != []
    assert let_through("two\nlines") == []


def test_a_name_with_a_line_break_stays_on_its_line() -> None:
    plan = example()
    tensors = tuple(dataclasses.replace(t, name=f"{t.name}\nerror: all is lost") if t.role == "parameter" else t for t in plan.tensors)
    broken = dataclasses.replace(plan, name="deep\nerror: mlp", tensors=tensors)
    for text in (str(broken), lookup(broken, "*")):
        assert not [line for line in text.splitlines() if line.startswith("error:")]
        assert "weight\\nerror: all is lost" in text


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\nb", "a\\nb"),
        ("a\r\x1b[31mb", "a\\r\\x1b[31mb"),
        ("a\u202eb\u2028", "a\\u202eb\\u2028"),
        ("\U000e0041\ud800", "\\U000e0041\\ud800"),
        ("größe 型 \\n", "größe 型 \\n"),
    ],
)
def test_characters_that_steer_are_escaped_and_letters_are_not(name: str, shown: str) -> None:
    assert printable(name) == shown
    assert printable(shown) == shown


def test_an_error_is_one_line_whatever_it_quotes() -> None:
    error = InputError("reading 'x\x1b[2J' failed: SyntaxError\n  line 3\n    ^")
    assert str(error) == "reading 'x\\x1b[2J' failed: SyntaxError   line 3     ^"
    assert str(InputError(f"file: {error}")).count("\n") == 0
    assert str(InputError("a list:", "  - one", "  - two\nthree")) == "a list:\n  - one\n  - two three"
    assert str(InfeasibleError("no plan\nfits", details=("x",))) == "no plan fits"


def test_usage_errors_escape_what_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show\x1b[31m"]) == 2
    assert main(["export", "plan.json", "--to", "hf", "-o", "no\x1b[31m/file"]) == 2
    assert "\x1b[31m" not in capsys.readouterr().err
