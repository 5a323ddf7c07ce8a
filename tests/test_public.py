"""The public surface: what is promised is what is there, and importing it is light."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import solver_shard


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
