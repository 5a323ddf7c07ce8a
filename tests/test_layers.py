"""The house: the floors that CONTRIBUTING draws, no circle of imports, no two classes of one name, few files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

import solver_shard

PACKAGE = Path(solver_shard.__file__).parent
DRAWING = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
FLOORS = {name: height for height, line in enumerate(re.findall(r"^[a-z ]+(?=   +\S)", DRAWING, re.MULTILINE)) for name in line.split()}
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
    if path.parent != PACKAGE or not path.name.startswith("__")
}
LATE = {("plan.plan", "plan.io"), ("plan.plan", "plan.summary")}
"""``Plan.save`` and ``str(plan)`` are methods for their users' sake, and written a file further up."""


def imports(source: str) -> Iterator[str]:
    """The modules of the package that a file imports anywhere: at its top, in functions, for types."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [
                f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}"[13:] in MODULES else str(node.module) for alias in node.names
            ]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name.removeprefix("solver_shard.") for name in names if name.startswith("solver_shard."))


def packages(module: str) -> list[str]:
    """The packages around a module, whose own code runs before it."""
    parts = module.split(".")
    return [".".join(parts[:k]) for k in range(1, len(parts))]


def edges() -> Iterator[tuple[str, str]]:
    """Every module with what runs where it imports: other modules, and the packages around them that are not around it."""
    for name, path in MODULES.items():
        for to in imports(path.read_text(encoding="utf-8")):
            yield name, to
            yield from ((name, package) for package in packages(to) if package != name and package not in packages(name))


EDGES = list(dict.fromkeys(edges()))


def floor(module: str) -> int:
    return FLOORS[module.partition(".")[0]]


def test_every_folder_has_a_floor() -> None:
    assert {name.partition(".")[0] for name in MODULES} == set(FLOORS)


@pytest.mark.parametrize("name", sorted(FLOORS))
def test_no_import_goes_up(name: str) -> None:
    up = [f"{module} imports {to}" for module, to in EDGES if module.partition(".")[0] == name and floor(to) > floor(module)]
    assert not up


def test_no_files_and_no_folders_import_each_other_in_a_circle() -> None:
    files = nx.DiGraph([(a, b) for a, b in EDGES if (a, b) not in LATE])
    folders = nx.DiGraph([(a.partition(".")[0], b.partition(".")[0]) for a, b in EDGES])
    folders.remove_edges_from(list(nx.selfloop_edges(folders)))
    assert [sorted(circle) for graph in (files, folders) for circle in nx.strongly_connected_components(graph) if len(circle) > 1] == []


def test_an_import_that_goes_up_is_seen() -> None:
    late = "def save(self):\n    from solver_shard.cli import app\n    import solver_shard.api\n"
    assert list(imports(late)) == ["cli.app", "api"]
    assert all(floor(module) > floor("plan.plan") for module in imports(late))


def test_the_house_stays_small() -> None:
    assert len(list(PACKAGE.rglob("*.py"))) <= 200


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
