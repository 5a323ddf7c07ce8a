"""Studies are run by hand, long after a name has moved: what each imports, reads and calls of ours must be there, its keywords included."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parent
EXPERIMENTS = TESTS.parent / "experiments"
SCRIPTS = sorted(EXPERIMENTS.rglob("*.py"))


def is_ours(module: str, script: Path) -> bool:
    """Whether a module is of the package or a helper of the tests or the studies."""
    first = module.partition(".")[0]
    return first == "solver_shard" or any(
        (folder / first).is_dir() or (folder / f"{first}.py").exists() for folder in (TESTS, EXPERIMENTS, script.parent)
    )


def imported(tree: ast.AST, script: Path) -> Iterator[tuple[str, object]]:
    """What the script calls each thing of ours that it imports anywhere, and the thing.

    Raises:
        ImportError: there is no such module.
        AttributeError: the module has no such name.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if is_ours(alias.name, script):
                    module = importlib.import_module(alias.name)
                    first = alias.name.partition(".")[0]  # which is what "import a.b" binds
                    yield (alias.asname, module) if alias.asname else (first, sys.modules[first])
        elif isinstance(node, ast.ImportFrom) and is_ours(str(node.module), script):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    with contextlib.suppress(ModuleNotFoundError):
                        importlib.import_module(f"{node.module}.{alias.name}")
                yield alias.asname or alias.name, getattr(module, alias.name)


def meant(node: ast.expr, names: dict[str, object]) -> object | None:
    """The thing that an expression of names and dots means, ``None`` where it is not one of ours or not known before it runs.

    Raises:
        AttributeError: a module or class has no such attribute.
    """
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = meant(node.value, names)
        return getattr(owner, node.attr) if isinstance(owner, ModuleType | type) else None
    return None


def check_call(call: ast.Call, function: object) -> None:
    """Whether a function takes these arguments, as far as they can be counted where ``*`` and ``**`` stand.

    Raises:
        TypeError: it does not.
    """
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # no function, or one of C
        return
    given = [None for argument in call.args if not isinstance(argument, ast.Starred)]
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    whole = len(given) == len(call.args) and len(keywords) == len(call.keywords)
    (signature.bind if whole else signature.bind_partial)(*given, **keywords)


def faults(script: Path) -> Iterator[str]:
    """What a script says of ours that is not so, with its lines."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    rebound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    rebound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    names = {name: thing for name, thing in imported(tree, script) if name not in rebound}
    for node in ast.walk(tree):
        try:
            if isinstance(node, ast.Attribute):
                meant(node, names)
            elif isinstance(node, ast.Call) and (function := meant(node.func, names)) is not None:
                check_call(node, function)
        except (AttributeError, TypeError) as error:
            yield f"line {node.lineno}: {ast.unparse(node)[:80]}: {error}"


@pytest.fixture(params=SCRIPTS, ids=lambda script: str(script.relative_to(EXPERIMENTS)))
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A study, with the helpers beside it importable and those that it imports forgotten afterwards."""
    path: Path = request.param
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    yield path
    for name in set(sys.modules) - before:
        if EXPERIMENTS in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


def test_a_study_imports_without_running_and_names_only_what_there_is(script: Path) -> None:
    spec = importlib.util.spec_from_file_location(f"study_{script.stem}", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    assert list(faults(script)) == []
