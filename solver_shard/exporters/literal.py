"""Files of names, strings, numbers, tuples, lists, dicts and calls of a few known names, read as data: nothing in them is ever run.

>>> read_assignments('SPECS = {"w": P("tp", None)}', calls=("P",))
{'SPECS': {'w': LiteralCall(name='P', args=('tp', None), kwargs={})}}

The forms that other tools keep as Python (PartitionSpecs, parallel styles, torchtitan's sharding configs) come back in this way;
``weight_pins`` makes pins of the styles among them.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from solver_shard.errors import InputError
from solver_shard.files import read_json
from solver_shard.program import Program, Role
from solver_shard.text import Paths, check_patterns, suggestion

MAX_BYTES = 16 * 2**20
MAX_TOKENS = 1_000_000
"""Words, signs and lines of a Python text: its parser takes up to a kilobyte for each."""

MAX_FORMATTED = 50_000
"""Braces of a text with f-strings, for which it takes time by the square of their number."""

MAX_DEPTH = 40
MAX_ITEMS = 1_000_000


@dataclass(frozen=True, slots=True)
class LiteralCall:
    """A call as written: the last part of the called name, and its arguments as data."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Name:
    """A bare or dotted name as written, its last part: ``TP`` or ``MeshAxisName.TP``."""

    name: str


def read_assignments(text: str, *, calls: Collection[str] = (), file: str = "file") -> dict[str, Any]:
    """The values of a Python file's plain assignments ``NAME = literal`` at its top level; all other statements are skipped.

    An assignment whose value is no literal is left out, so a caller that misses a name says so.

    Args:
        calls: names that may be called; only keyword and positional arguments of literals are allowed.

    Raises:
        InputError: too large, nested too deeply, or not Python.
    """
    tree = _parse(text, file, "exec")
    found: dict[str, Any] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
            try:
                found[statement.targets[0].id] = _LiteralReader(calls, file).value(statement.value, 0)
            except _NotLiteralError:
                continue
    return found


def read_value(text: str, *, calls: Collection[str] = (), file: str = "file") -> Any:
    """One value, as JSON or as a Python literal with calls of known names; InputError says where it is something else."""
    if len(text) > MAX_BYTES:
        raise InputError(f"{file} has {len(text):,} characters; at most {MAX_BYTES:,} are read")
    try:
        return read_json(text)
    except ValueError:
        pass
    tree = _parse(text.strip(), file, "eval")
    try:
        return _LiteralReader(calls, file).value(tree.body, 0)
    except _NotLiteralError as error:
        raise InputError(f"{file}: {error}; give JSON, or a literal of strings, numbers, lists, tuples and dicts") from None


_TOKEN = re.compile(r"\w+|[^\w \t]")
_FORMATTED = re.compile(r"""\b(?:[fF][rR]?|[rR][fF])["']""")


class _NotLiteralError(Exception):
    pass


def _parse(text: str, file: str, mode: str) -> Any:
    if len(text) > MAX_BYTES:
        raise InputError(f"{file} has {len(text):,} characters; at most {MAX_BYTES:,} are read")
    if next(itertools.islice(_TOKEN.finditer(text), MAX_TOKENS, None), None) is not None:
        raise InputError(f"{file} has more than {MAX_TOKENS:,} words and signs, the most that are read; give the file that export wrote")
    if text.count("{") > MAX_FORMATTED and _FORMATTED.search(text) is not None:
        raise InputError(f"{file} has f-strings among more than {MAX_FORMATTED:,} braces; leave code out of a file of that size")
    try:
        return ast.parse(text, filename=file, mode=mode)
    except SyntaxError as error:
        raise InputError(f"{file}, line {error.lineno}: neither JSON nor Python: {error.msg}; give the file that export wrote") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{file}: cannot be read ({type(error).__name__}: {error}); give the file that export wrote") from None


class _LiteralReader:
    def __init__(self, calls: Collection[str], file: str) -> None:
        self._calls = calls
        self._file = file
        self._items = 0

    def value(self, node: ast.expr, depth: int) -> Any:
        self._items += 1
        if depth > MAX_DEPTH or self._items > MAX_ITEMS:
            raise InputError(
                f"{self._file}: nested deeper than {MAX_DEPTH} or more than {MAX_ITEMS:,} items; give the file that export wrote"
            )
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            number = node.operand.value
            if isinstance(number, int | float) and not isinstance(number, bool):
                return -number
        if isinstance(node, ast.Tuple):
            return tuple(self.value(item, depth + 1) for item in node.elts)
        if isinstance(node, ast.List):
            return [self.value(item, depth + 1) for item in node.elts]
        if isinstance(node, ast.Dict):
            return self._dict(node, depth)
        if isinstance(node, ast.Name):
            return Name(node.id)
        if isinstance(node, ast.Attribute):
            return Name(node.attr)
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        raise _NotLiteralError(f"line {node.lineno} holds a {type(node).__name__}, which is no literal")

    def _dict(self, node: ast.Dict, depth: int) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            if key is None:
                raise _NotLiteralError(f"line {node.lineno} unpacks a dict")
            name = self.value(key, depth + 1)
            if not isinstance(name, str | int | Name):
                raise _NotLiteralError(f"line {node.lineno} has a {type(name).__name__} as a key")
            if name in made:
                raise InputError(f"{self._file}, line {node.lineno}: {name!r} stands twice in one dict; drop one of them")
            made[name] = self.value(item, depth + 1)
        return made

    def _call(self, node: ast.Call, depth: int) -> LiteralCall:
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name not in self._calls:
            raise _NotLiteralError(
                f"line {node.lineno} calls {name or 'something'}, which is not one of {', '.join(self._calls) or 'no names'}"
            )
        if any(keyword.arg is None for keyword in node.keywords) or any(isinstance(arg, ast.Starred) for arg in node.args):
            raise _NotLiteralError(f"line {node.lineno} unpacks arguments")
        return LiteralCall(
            name,
            tuple(self.value(arg, depth + 1) for arg in node.args),
            {str(keyword.arg): self.value(keyword.value, depth + 1) for keyword in node.keywords},
        )


Cut = Literal["columns", "rows", "whole"]


def weight_pins(cuts: Mapping[str, Cut], program: Program, axis: str) -> tuple[str, ...]:
    """One pin per parameter that the patterns match, in the program's order.

    >>> weight_pins({"layers.*.up_proj": "columns"}, program, "tp")
    ('layers.0.up_proj.weight=tp=S(0)', 'layers.0.up_proj.bias=tp=S(0)')

    By columns is the next to last dim (the output features of nn.Linear), by rows the last one (its input features; biases stay whole).
    Embeddings are the other way round, as their weight is [words, features]: rows are words.

    Args:
        cuts: module or parameter pattern to how it is cut; ``*`` stands for a layer's number (or any name between dots).
        program: of the model that the pins are for.
        axis: the mesh axis that cuts.

    Raises:
        InputError: a pattern matches nothing, or two patterns disagree on a parameter.
    """
    check_patterns(cuts, "the styles")
    parameters = {t: tensor for t, tensor in enumerate(program.tensors) if tensor.role is Role.PARAMETER}
    looked_up = {t for op in program.ops if op.name == "aten.embedding.default" for t in op.operands if t in parameters}
    names = [tensor.name for tensor in parameters.values()]
    paths, positions = Paths([*names, *(name.rpartition(".")[0] for name in names)]), list(parameters)
    found: dict[str, tuple[str, str]] = {}
    for pattern, cut in cuts.items():
        matched = [positions[k] for k in sorted({k % len(names) for k in paths.matching(pattern)})]
        for t in matched:
            tensor = parameters[t]
            placement = _placement(cut, len(tensor.shape), tensor.name.rpartition(".")[2], embedding=t in looked_up)
            before = found.setdefault(tensor.name, (placement, pattern))
            if before[0] != placement:
                raise InputError(f"{before[1]!r} and {pattern!r} disagree on {tensor.name}: {before[0]} and {placement}; drop one of them")
        if not matched:
            raise InputError(f"no module or parameter of {program.name} is called {pattern!r}; {suggestion(pattern, names, program.ties)}")
    return tuple(f"{name}={axis}={found[name][0]}" for name in names if name in found)


def _placement(cut: Cut, dims: int, name: str, *, embedding: bool) -> str:
    if cut == "whole" or not dims or (cut == "rows" and (name == "bias" or dims == 1)):
        return "R"
    if embedding:
        return "S(1)" if cut == "columns" else "S(0)"
    return f"S({max(dims - 2, 0)})" if cut == "columns" else f"S({dims - 1})"
