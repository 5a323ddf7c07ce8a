"""The public surface: what is promised is what is there, and importing it is light."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plan_examples import example

import solver_shard
from solver_shard.program import Program, Role, Tensor

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


def test_type_checkers_are_told_the_same_names_and_homes() -> None:
    block = next(node for node in ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    told = {alias.name: str(node.module).removeprefix("solver_shard.") for node in imports for alias in node.names}
    assert told == solver_shard._HOMES


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


def test_forms_that_are_not_there_are_named_with_those_that_are() -> None:
    plan, program = example(), Program(name="none", tensors=(), ops=(), outputs=())
    with pytest.raises(solver_shard.InputError, match="no form 'onnx'; legal: dtensor-script, parallelize, hf"):
        solver_shard.export(plan, "onnx")
    with pytest.raises(solver_shard.InputError, match="no pins in the form 'dtensor-script'; legal: parallelize, hf"):
        solver_shard.read_pins("", "dtensor-script", program)
    with pytest.raises(solver_shard.InputError, match="'jax' names mesh axes; give the mesh"):
        solver_shard.read_pins("", "jax", program)


def test_declarations_of_other_tools_come_back_as_pins() -> None:
    weight = Tensor(name="up.weight", dtype="f32", shape=(16, 8), role=Role.PARAMETER)
    program = Program(name="one", tensors=(weight,), ops=(), outputs=())
    assert solver_shard.read_pins('{"up": "colwise"}', "hf", program) == ("up.weight=tp=S(0)",)
    assert solver_shard.read_pins('{"up.weight": ["tp", null]}', "jax", program, mesh="dp=2,tp=2") == ("up.weight=R,S(0)",)
