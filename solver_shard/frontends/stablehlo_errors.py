"""What the MLIR parser and verifier object to, as messages that name line, value and what is legal."""

from __future__ import annotations

import re
from typing import Any

from solver_shard.errors import InputError

MAX_BYTES = 512 * 2**20
MAX_NESTING = 250
MAX_DEPTH = 1000
"""Of brackets with those of the aliases that they hold."""
MAX_AFFINE = 2000
"""Characters of an affine map."""

_TOKENS = re.compile(
    r'"(?:[^"\\\n]++|\\.)*+"?|//[^\n]*|->|>=|<=|(?P<alias>[#!][A-Za-z_][\w$.-]*+)(?P<defined>\s*+=(?!=))?'
    r"|affine_(?:map|set)\s*<(?P<affine>(?:[^>]|(?<=-)>|>=)*+)|[(\[{<>}\])]"
)
"""Brackets, aliases, and what may hold brackets that are none. A string without an end goes to the end of its line: text is read once."""
MAX_MESSAGE = 1000
_LOCATION = re.compile(r':(\d+):\d+\)?"?\)?\Z')
_RESULTS = re.compile(r"\s*(%[\w$.#:-]+)[^=]*=\s")
_ARGUMENT = re.compile(r"op arg (\d+) - ")
_MESH = re.compile(r"sdy\.mesh\s+@([\w$.-]+)\s*=\s*<([^>]*)>")


def check_bounds(text: str, file: str) -> None:
    """Refuse text that would take the parser too much memory or stack: MLIR's own parser and printer recurse without a bound.

    Raises:
        InputError: more than ``MAX_BYTES``, brackets nested deeper than ``MAX_NESTING``, or ``MAX_DEPTH`` with aliases
            (``#a1 = [#a0]``) written out, or an affine map longer than ``MAX_AFFINE``.
    """

    def fault(piece: re.Match[str], what: str) -> InputError:
        line = text.count("\n", 0, piece.start()) + 1
        return InputError(f"{file}, line {line}: {what}; that is not read")

    if len(text) > MAX_BYTES:
        raise InputError(f"{file}: {len(text):,} characters; at most {MAX_BYTES:,} are read")
    depth, alias, deepest = 0, "", 0
    depths: dict[str, int] = {}
    for piece in _TOKENS.finditer(text):
        sign = piece[0]
        if sign in "([{<":
            depth += 1
            deepest = max(deepest, depth)
            if depth > MAX_NESTING:
                raise fault(piece, f"brackets are nested deeper than {MAX_NESTING}")
        elif sign in ")]}>":
            depth = max(depth - 1, 0)
        elif piece["defined"] is not None:
            depths[alias] = deepest
            alias, depth, deepest = piece["alias"], 0, 0
        elif piece["alias"] is not None:
            deepest = max(deepest, depth + depths.get(sign, 0) + 1)
            if deepest > MAX_DEPTH:
                raise fault(piece, f"aliases are nested deeper than {MAX_DEPTH}")
        elif piece["affine"] is not None:
            depth += 1
            if len(piece["affine"]) > MAX_AFFINE:
                raise fault(piece, f"an affine map has {len(piece['affine']):,} characters, at most {MAX_AFFINE:,} are read")


def parse_error(error: Any, text: str, file: str) -> InputError:
    """The first diagnostic of an MLIRError, with the line and the value it is about, and what is legal there."""
    diagnostics = list(error.error_diagnostics)
    message = diagnostics[0].message if diagnostics else str(error)
    found = _LOCATION.search(str(diagnostics[0].location)) if diagnostics else None
    line = int(found[1]) if found else 0
    where = f"{file}, line {line}" if line else file
    message = message.split(". If this is intended")[0]
    message = message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 3]}..."
    value = _value(message, text, line)
    return InputError(f"{where}: {message}{f' (value {value})' if value else ''}{_legal(message, text)}")


def _value(message: str, text: str, line: int) -> str | None:
    """The value that a message is about: a function's argument, or the result of the op on the line."""
    lines = text.split("\n")
    if not 0 < line <= len(lines):
        return None
    argument = _ARGUMENT.search(message)
    if argument:
        names = re.findall(r"(%[\w$.-]+)\s*:", "\n".join(lines[line - 1 : line + 200]).partition("{\n")[0])
        return names[int(argument[1])] if int(argument[1]) < len(names) else None
    result = _RESULTS.match(lines[line - 1])
    return result[1].partition(":")[0] if result else None


def _legal(message: str, text: str) -> str:
    if "unregistered dialect" in message or message.startswith("Dialect "):
        return "; ops of stablehlo, sdy, func, chlo, mhlo and MLIR's own dialects are read"
    if not re.search(r"unknown mesh|axis|doesn't match tensor rank|sharding_per_value|TensorSharding", message):
        return ""
    if "rank" in message:
        return "; write one {...} per dim of the tensor"
    meshes = ", ".join(f"@{name} = <{axes}>" for name, axes in _MESH.findall(text)) or "none"
    once = ", each axis once in a sharding" if "duplicate" in message else ""
    return f"; meshes of this module{once}: {meshes}"
