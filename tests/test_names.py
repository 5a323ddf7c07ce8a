"""Folding numbered names, and help for names that do not exist."""

from __future__ import annotations

import fnmatch

import pytest

from solver_shard.errors import InputError
from solver_shard.text import MAX_NAME, Paths, check_patterns, fold_items, fold_members, fold_names, matching, suggestion


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["l.0.w", "l.1.w", "l.2.w"], ["l.{0..2}.w"]),
        (["l.0.w", "l.1.w"], ["l.{0,1}.w"]),
        (["l.5.w"], ["l.5.w"]),
        (["l.0.w", "l.2.w", "l.3.w", "l.4.w", "l.10.w"], ["l.{0,2..4,10}.w"]),
        (["l.0.w", "l.0.b", "l.1.w", "l.1.b"], ["l.{0,1}.w", "l.{0,1}.b"]),
        ([f"l.{i}.e.{j}.w" for i in range(3) for j in range(4)], ["l.{0..2}.e.{0..3}.w"]),
        (["l.0.e.0", "l.1.e.0", "l.2.e.1"], ["l.{0,1}.e.0", "l.2.e.1"]),
        (["add_1", "add_2", "conv2d"], ["add_{1,2}", "conv2d"]),
        (["grad(l.0.w)", "grad(l.1.w)"], ["grad(l.{0,1}.w)"]),
        ([f"l.{i}.w" for i in range(0, 20, 2)], ["l.{0,2,4,6,8,...,18}.w"]),
        (["l.1", "l.01", "l.2", "l." + "9" * 5000], ["l.{1,2}", "l.01", "l." + "9" * 5000]),
    ],
)
def test_numbered_names_fold(names: list[str], folded: list[str]) -> None:
    assert fold_names(names) == folded


def test_only_equal_values_fold() -> None:
    assert fold_items([("l.0", "a"), ("l.1", "b"), ("l.2", "a")]) == [("l.{0,2}", "a", 2), ("l.1", "b", 1)]


def test_members_of_a_folded_name_are_the_names_that_were_given() -> None:
    names = [f"l.{i}.e.{j}" for i in (1, 0) for j in (0, 1)]
    assert fold_members((name, 0) for name in names) == [("l.{0,1}.e.{0,1}", 0, ("l.0.e.0", "l.0.e.1", "l.1.e.0", "l.1.e.1"))]


def test_suggestions_try_stars_then_close_names() -> None:
    names = ["model.layers.0.q_proj.weight", "model.layers.1.q_proj.weight", "lm_head.weight"]
    assert suggestion("q_proj.weight", names) == "'*q_proj.weight' matches 2 of them"
    assert "lm_head.weight" in suggestion("lm_haed.weight", names)


@pytest.mark.parametrize(
    ("pattern", "found"), [("*.split[0]", [0]), ("a.split[?]", [0, 1]), ("a.*", [0, 1, 2]), ("a.split0", [2]), ("A.*", [])]
)
def test_globs_know_stars_and_question_marks_only(pattern: str, found: list[int]) -> None:
    assert matching(pattern, ["a.split[0]", "a.split[1]", "a.split0"]) == found


NAMES = ["head", "layers.0.up", "layers.1.up", "layers.1.down", "layers.10.up", "layers", "layers.0.up", "layers.0.up.weight", ""]


@pytest.mark.parametrize(
    "pattern",
    [
        *("head", "layers.*.up", "layers.1*.up", "layers.[01].up", "*", "*.*.*", "layers.?.*", "layers.**.up", "none", "layers.*.none"),
        *("", "layers."),
    ],
)
def test_paths_match_part_by_part(pattern: str) -> None:
    def alike(name: str) -> bool:
        wanted, parts = pattern.split("."), name.split(".")
        return len(wanted) == len(parts) and all(map(fnmatch.fnmatchcase, parts, wanted))

    assert Paths(NAMES).matching(pattern) == [k for k, name in enumerate(NAMES) if alike(name)]


def test_patterns_that_overlap_too_much_are_refused_and_plain_ones_never_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solver_shard.text.MAX_VISITS", 10)
    paths = Paths(NAMES)
    for _ in range(100):
        assert paths.matching("layers.1.up") == [2]
    paths.matching("*.*.up")
    with pytest.raises(InputError, match=r"at '\*\.\*\.up' the patterns have been held against more than 10 names: .* give one for all"):
        paths.matching("*.*.up")


def test_more_or_longer_patterns_than_are_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_patterns(["w" * MAX_NAME], "f")
    with pytest.raises(InputError, match=r"f: a pattern has 1,001 characters, 'w{60}'\.\.\.; at most 1,000 are read"):
        check_patterns(["w" * (MAX_NAME + 1)], "f")
    monkeypatch.setattr("solver_shard.text.MAX_RULES", 2)
    with pytest.raises(InputError, match="f: 3 rules were given; at most 2 are read"):
        check_patterns(["a", "b", "c"], "f")


def test_names_with_any_characters_fold() -> None:
    assert fold_names(["a\0.0", "a\0.1"]) == ["a\0.{0,1}"]
