"""Files of whatever kind are read up to a limit, what is read is never written over, and limits of a search are checked first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plan_examples import example

from solver_shard.analysis.sweep.results import load_sweep
from solver_shard.cli import MOST_SAID, main
from solver_shard.errors import InputError
from solver_shard.files import read_text
from solver_shard.plan.io import load_plan, plan_to_json
from solver_shard.reports.studies import read_comparison, read_prices


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("four")
    assert read_text(tmp_path / "x", 4) == "four"
    with pytest.raises(InputError, match=r"x has more than 3 bytes, the most that is read of it"):
        read_text(tmp_path / "x", 3)


@pytest.mark.parametrize(
    ("module", "limit", "read"),
    [
        ("solver_shard.plan.io", "MAX_PLAN_BYTES", load_plan),
        ("solver_shard.reports.studies", "MAX_STUDY_BYTES", read_comparison),
        ("solver_shard.reports.studies", "MAX_PRICES_BYTES", read_prices),
        ("solver_shard.analysis.sweep.results", "MAX_BYTES", load_sweep),
    ],
)
def test_what_has_no_size_and_no_end_is_refused(
    module: str, limit: str, read: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{module}.{limit}", 1000)
    with pytest.raises(InputError, match="zero has more than 1,000 bytes"):
        read("/dev/zero")


@pytest.mark.parametrize(
    "words",
    [
        ["report", "plan.json", "--compare", "kept.json"],
        ["report", "plan.json", "--explain", "kept.json"],
        ["compare", "plan.json", "kept.json"],
        ["compare", "plan.json", "--tp-plan", "kept.json"],
        ["compare", "plan.json", "--parallelize", "kept.json"],
        ["compare", "plan.json", "--pins", "kept.json"],
        ["compare", "plan.json", "--config", "kept.json"],
        ["solve", "--config", "kept.json", "--mesh", "8"],
        ["solve", "gpt2", "--mesh", "8", "--rules", "kept.json"],
    ],
)
def test_no_input_is_written_over(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example().save("plan.json")
    Path("kept.json").write_text("{}")
    assert main([*words, "-o", "kept.json"]) == 2
    assert "kept.json is what is read, and would be" in capsys.readouterr().err
    assert Path("kept.json").read_text() == "{}"


def test_names_of_a_file_neither_steer_the_terminal_nor_flood_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = plan_to_json(example())
    name = example().tensors[-1].name
    hostile = text.replace(f'"name":"{name}"', f'"name":"\\u001b[2J{"x" * 1_000_000}"').replace('"dtype":"', '"dtype":"?')
    (tmp_path / "plan.json").write_text(hostile)
    assert main(["trace", str(tmp_path / "plan.json"), "-o", str(tmp_path / "t.json")]) == 1
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert len(said) < MOST_SAID + 100
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize("command", [["explain", "plan.json", "layers.0.up.weight"], ["compare", "plan.json"]])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--time-limit", "nan"], "time limit nan is not legal"),
        (["--time-limit", "-1"], "time limit -1.0 is not legal"),
        (["--workers", "1000"], "1000 workers are not legal"),
        (["--gap", "nan"], "gap nan is not legal"),
        (["--seed", "-1"], "seed -1 is not legal"),
    ],
)
def test_limits_of_a_search_are_checked_before_tracing(
    command: list[str], words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if words[0] in ("--gap", "--seed") and command[0] == "compare":
        return
    monkeypatch.chdir(tmp_path)
    example().save("plan.json")
    assert main([*command, *words, "--model", "no.such:model"]) == 1
    assert says in capsys.readouterr().err
