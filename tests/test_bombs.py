"""Files that are small and would take much: nested without end, or of few characters for each thing that is made of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from solver_shard.errors import InputError, RuleError
from solver_shard.exporters.literal import MAX_FORMATTED, MAX_TOKENS, read_assignments, read_value
from solver_shard.files import MAX_VALUES, read_json, read_toml
from solver_shard.rules.families import FAMILIES
from solver_shard.rules.table import parse_rows

BOMBS = {
    "lists": "S = [" + "[]," * 4_000_000 + "]",
    "names": "a\n" * 7_000_000,
    "deep": "S = " + "[" * 5_000_000 + "]" * 5_000_000,
    "signs": "S = " + "~" * 15_000_000 + "1",
    "f-string": 'S = f"' + "{a}" * 200_000 + '"',
    "calls": "S = " + "a(" * 3_000_000 + ")" * 3_000_000,
}


@pytest.mark.parametrize("kind", BOMBS)
def test_python_of_many_words_or_levels_is_refused_before_it_is_parsed(kind: str) -> None:
    with pytest.raises(InputError, match=r"mine.py has (more than 1,000,000 words and signs|f-strings among more than 50,000 braces)"):
        read_assignments(BOMBS[kind], file="mine.py")


@pytest.mark.parametrize(
    "text", ["[" * 500_000, "[" * 40 + "a", "~" * 500_000 + "1", "a(" * 150_000, "a" + "[0]" * 200_000, "not " * 400_000]
)
def test_levels_within_those_bounds_are_refused_too(text: str) -> None:
    with pytest.raises(InputError, match=r"mine.py.*(cannot be read|neither JSON nor Python|nested deeper|no literal)"):
        read_value(text, file="mine.py")


def test_a_file_as_export_writes_them_is_far_from_the_bounds() -> None:
    text = "SPECS = {\n" + "".join(f'    "model.layers.{i}.self_attn.q_proj.weight": P("dp", None),\n' for i in range(20_000)) + "}\n"
    assert len(read_assignments(text, calls=("P",))["SPECS"]) == 20_000


def test_reading_the_worst_that_is_read_takes_less_than_two_gigabytes() -> None:
    code = (
        "import resource; from solver_shard.exporters.literal import read_assignments, MAX_TOKENS\n"
        "read_assignments('a\\n' * (MAX_TOKENS // 2))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 2 * 2**20  # KiB


def test_json_and_toml_say_where_they_end() -> None:
    with pytest.raises(ValueError, match=f"more than {MAX_VALUES:,} values"):
        read_json("[" + "{}," * MAX_VALUES)
    with pytest.raises(ValueError, match="nested too deep"):
        read_json("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deep"):
        read_toml("a = " + "[" * 100_000)
    with pytest.raises(ValueError, match=r"line 2 has a name of more than 32 parts, 'a.a.a.*write a name with dots in quotes"):
        read_toml("b = 1\n" + "a." * 400_000 + "a = 1")
    with pytest.raises(RuleError, match=r"mine.toml: not valid TOML: line 1 has a name of more than 32 parts"):
        parse_rows("a." * 400_000 + "a = 1", "mine.toml", FAMILIES, user=True)


def test_the_bounds_are_those_of_this_file() -> None:
    assert (MAX_TOKENS, MAX_FORMATTED) == (1_000_000, 50_000)
