"""The public surface: what is promised is what is there, and importing it is light."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import solver_shard

PACKAGE = Path(solver_shard.__file__).parent
README = (PACKAGE.parent / "README.md").read_text(encoding="utf-8")
FUNCTIONS = [name for name in solver_shard.__all__ if name[0].islower()]


def test_the_promised_names_are_sorted_and_are_those_with_a_home() -> None:
    assert list(solver_shard.__all__) == sorted(solver_shard.__all__)
    assert set(solver_shard.__all__) == set(solver_shard._HOMES)
    assert set(solver_shard.__all__) <= set(dir(solver_shard))


@pytest.mark.parametrize("name", solver_shard.__all__)
def test_every_promised_name_can_be_imported(name: str) -> None:
    home = importlib.import_module(f"solver_shard.{solver_shard._HOMES[name]}")
    assert getattr(solver_shard, name) is getattr(home, name)


def test_nothing_else_is_public() -> None:
    code = (
        "import types, solver_shard\n"
        "found = {n for n in vars(solver_shard) if not n.startswith('_') and not isinstance(getattr(solver_shard, n), types.ModuleType)}\n"
        "print(sorted(found - set(solver_shard.__all__) - {'annotations', 'TYPE_CHECKING', 'Any'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        solver_shard.optimise  # noqa: B018 - the access is what is tested


def test_importing_the_package_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, solver_shard; assert not {'torch', 'numpy', 'ortools'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_no_public_name_is_a_submodule() -> None:
    """``import solver_shard.NAME`` would put the module in the function's place."""
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert not modules & set(solver_shard.__all__)


def test_the_readme_has_every_public_name_and_no_deep_path() -> None:
    assert [name for name in solver_shard.__all__ if not re.search(rf"`(solver_shard\.)?{re.escape(name)}\b", README)] == []
    assert re.findall(r"solver_shard\.[a-z_]+\.\w+", README) == []
    named = set(re.findall(r"solver_shard\.(\w+)", README))
    assert named <= set(solver_shard.__all__)


@pytest.mark.parametrize("name", [*FUNCTIONS, "ShardedOptimizer"])
def test_help_has_an_example_every_argument_what_comes_back_and_what_goes_wrong(name: str) -> None:
    function = getattr(solver_shard, name)
    text = inspect.getdoc(function) or ""
    assert re.search(r"^(>>> |    \w+ = )", text, re.MULTILINE), "an example"
    arguments = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    documented = set(re.findall(r"\w+", " ".join(re.findall(r"^    (\S[^:]*):", arguments[1], re.MULTILINE)))) if arguments else set()
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    assert [p.name for p in parameters if p.name not in documented and f"``{p.name}``" not in (arguments or [""])[0]] == []
    returns = inspect.signature(function).return_annotation
    assert "\nReturns:\n" in text or inspect.isclass(function) or returns in (None, "None")
    assert "\nRaises:\n" in text or name in ("chrome_trace",)
