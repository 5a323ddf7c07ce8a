"""The table of options: whatever has options reads it, so an entry more shows everywhere."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import solver_shard
from solver_shard import options as table
from solver_shard.analysis.compare import MATTERS
from solver_shard.analysis.sweep import sweep
from solver_shard.costs.memory import OPTIMIZERS, REDUCE_DTYPES
from solver_shard.options import OPTIONS, Option, Options, SolveOptions, SweepOptions, read_options, shown

OF_CALLS = {"mesh", "cluster", "workers"}
"""Options that no plan records as they are asked."""

ENTRY = """
    patience: int = option(
        3,
        int,
        help="A new option of no use.",
        about="an option of no use.",
        unit="cups of tea",
        check=_number("give a whole number of cups, 0 to 9", lambda x: 0 <= x <= 9, whole=True),
        panel=SEARCH,
        metavar="CUPS",
    )
"""

USE = """
import torch, solver_shard
from solver_shard.api import read_request
from solver_shard.cli import main
from solver_shard.plan.io import plan_to_json
from solver_shard.errors import InputError

assert main(["solve", "--help"]) == main(["sweep", "--help"]) == 0
print(solver_shard.optimize.__doc__)
model, inputs = torch.nn.Linear(8, 8), (torch.empty(4, 8),)
plan = solver_shard.optimize(model, inputs, mesh="2", loss_fn=torch.sum, patience=5)
plan.save("plan.json")
assert solver_shard.load_plan("plan.json").options.patience == 5
assert read_request("gpt2", mesh="2").options.patience == 3
try:
    solver_shard.optimize(model, inputs, mesh="2", loss_fn=torch.sum, patience=10)
except InputError as error:
    print(error)
"""


def test_an_option_is_added_by_one_entry(tmp_path: Path) -> None:
    package = tmp_path / "solver_shard"
    shutil.copytree(Path(solver_shard.__file__).parent, package)  # with its compiled files, which take most of the time
    source = (package / "options.py").read_text(encoding="utf-8")
    last = source.index("\n    @property\n    def usable_memory")
    (package / "options.py").write_text(source[:last] + ENTRY + source[last:], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", f"import solver_shard; assert {str(tmp_path)!r} in solver_shard.__file__\n{USE}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"--patience +CUPS", done.stdout)) == 2
    assert "A new option of no use. [default: 3]" in done.stdout
    assert "        patience (cups of tea): an option of no use.\n" in done.stdout
    assert done.stdout.endswith("patience 10 is not legal; give a whole number of cups, 0 to 9\n")


def test_type_checkers_are_told_of_every_option_as_the_table_has_it() -> None:
    typed = {name: hint.__forward_arg__ for name, hint in inspect.get_annotations(SolveOptions).items()}
    typed |= {name: hint.__forward_arg__ for name, hint in inspect.get_annotations(SweepOptions).items()}
    assert typed == {name: entry.annotation for name, entry in OPTIONS.items() if name not in OF_CALLS}
    assert set(inspect.get_annotations(SweepOptions)) == {entry.name for entry in shown("sweep")}


@pytest.mark.parametrize("function", [solver_shard.optimize, sweep])
def test_python_shows_every_option_with_its_default_and_words(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    for entry in shown() if function is solver_shard.optimize else shown("sweep"):
        assert entry.name in parameters
        assert parameters[entry.name].default in (entry.default, inspect.Parameter.empty)
        assert f"\n        {entry.name}" in (function.__doc__ or "")


def test_a_plan_records_every_option_under_its_default() -> None:
    made = read_options({"mesh": "2"})
    for field in dataclasses.fields(Options):
        entry = field.metadata.get("option")
        if entry is not None and entry["default"] == field.default:
            assert made[field.name] == field.default
    assert {entry.recorded for entry in OPTIONS.values()} | {"propagation"} == {f.name for f in dataclasses.fields(Options)} | {""}
    assert set(get_type_hints(Options)) == {field.name for field in dataclasses.fields(Options)}


@pytest.mark.parametrize("entry", OPTIONS.values(), ids=OPTIONS)
def test_every_option_has_help_and_a_heading_and_shows_in_solve(entry: Option) -> None:
    assert entry.help.endswith((".", ")."))
    assert entry.about.endswith((".", ""))
    assert entry.panel in (table.MODEL, table.MESH, table.MEMORY, table.OPTIMIZER, table.LAYOUTS, table.SEARCH)
    assert set(entry.shows) <= {"solve", "sweep", "compare", "propagate"}
    assert "solve" in entry.shows


def test_choices_are_those_of_the_cost_model() -> None:
    assert OPTIONS["optimizer"].choices == tuple(OPTIMIZERS)
    assert OPTIONS["reduce_dtype"].choices == REDUCE_DTYPES


def test_plans_of_one_table_agree_in_what_a_step_is_and_costs() -> None:
    assert (
        *("batch", "seq", "dtype", "microbatches", "optimizer", "master_weights", "state_bytes", "reduce_dtype", "clip"),
        *("forward_only", "checkpoint", "overlap", "fusion"),
    ) == MATTERS


def test_an_option_that_is_not_there_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="no option 'memry'; there are mesh, cluster, batch"):
        solver_shard.optimize("gpt2", mesh="2", memry="70GiB")  # type: ignore[call-arg]  # what is tested
