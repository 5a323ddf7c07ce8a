"""StableHLO modules with sdy annotations: from text to the graph that propagation works on, and back.

>>> module = StablehloModule.parse(text)
>>> module.graph.values[0].sharding          # of the first function's first argument
>>> module.print(propagate(module.graph, "user-priority", StablehloRules()).graph)

jaxlib parses and prints (``pip install 'solver-shard[jax]'``); no pass of the reference implementation is run. The printed module
differs from the parsed one in what the graph changed, and in nothing else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from solver_shard.arguments import checked
from solver_shard.errors import InputError
from solver_shard.files import read_text
from solver_shard.shardy.data_flow import add_edges, sink_edges
from solver_shard.shardy.graph import OpKind, PropagationGraph
from solver_shard.shardy.passes import FactorStrategy, PassName, PropagationOptions, populate_rules, propagate
from solver_shard.shardy.sharding import format_sharding
from solver_shard.shardy.stablehlo.read import bindings, read_graph
from solver_shard.shardy.stablehlo.write import write_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class StablehloModule:
    """A module's text and what propagation sees of it.

    Attributes:
        text: as it was given.
        file: what messages call it.
        graph: its values, ops, functions and meshes.
    """

    text: str
    file: str
    graph: PropagationGraph

    @classmethod
    def parse(cls, text: str, file: str = "module") -> StablehloModule:
        """Read a module's text.

        Raises:
            InputError: jaxlib is missing; the text is no valid module (the message names line, value and what is legal), is too
                large or nested too deeply; or a tensor has no static shape.
        """
        check_bounds(text, file)
        mlir = bindings()
        with mlir.context():
            try:
                module = mlir.ir.Module.parse(text)
            except mlir.ir.MLIRError as error:
                raise parse_error(error, text, file) from None
            except ValueError as error:
                raise InputError(f"{file}: jaxlib cannot read it: {error}") from None
            try:
                return cls(text=text, file=file, graph=read_graph(module, mlir).graph)
            except InputError as error:
                raise InputError(f"{file}, {error}") from None

    @classmethod
    def load(cls, path: Path) -> StablehloModule:
        """Read a file; InputError as in ``parse``, and where it cannot be read."""
        try:
            text = read_text(path, MAX_BYTES)
        except (OSError, ValueError) as error:  # no UTF-8, or with a null byte no path
            raise InputError(f"cannot read {path}: {error}; give a StableHLO module as text") from None
        return cls.parse(text, str(path))

    def print(self, graph: PropagationGraph | None = None, *, verify: bool = True) -> str:
        """The module as jaxlib prints it, changed to what ``graph``, made from this module's graph, says.

        ``verify=False`` is for the state between two user priorities, where axes that are kept aside need not be in
        their short form (the text is then in MLIR's generic form).

        Raises:
            InputError: the changed module is not valid, as where a manual computation does not name all its manual axes, and they
                are used for something else.
        """
        mlir = bindings()
        with mlir.context() as context:
            module = mlir.ir.Module.parse(self.text)
            if graph is not None:
                write_graph(read_graph(module, mlir), graph, mlir, context)
                if not verify:
                    return str(module)
                try:
                    module.operation.verify()
                except mlir.ir.MLIRError as error:
                    fault = parse_error(error, self.text, self.file)
                    raise InputError(f"{fault}; the module with these shardings is not valid, so it is not written") from None
            return str(module)


# What the MLIR parser and verifier object to, as messages that name line, value and what is legal.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PropagatedModule:
    """A module after a pass.

    Attributes:
        text: of the module.
        shardings: plain data, the sharding of every value, function after function.
        warnings: what the pass says, a sentence each, and the ops through which nothing propagates.
        stages: name and text of the module after every user priority but the last, where they were asked for.
    """

    text: str
    shardings: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    stages: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.text


@checked
def propagate_module(
    path: str | os.PathLike[str],
    *,
    which: PassName | Literal["populate-op-sharding-rules"] = "user-priority",
    strategy: FactorStrategy = "aggressive",
    conservative_propagation: bool = False,
    run_op_priority: bool = True,
    keep_rules: bool = False,
    stages: bool = False,
) -> PropagatedModule:
    """Spread the shardings that a StableHLO module has over all its other values, greedily, as Shardy does.

    A module without ``sdy.data_flow_edge`` ops gets edges on what its control flow hands on, and loses them after the pass; one that has
    edges is taken as it is.

    >>> print(propagate_module("mlp.mlir", which="user-priority"))  # doctest: +SKIP

    Args:
        path: of the module, as text. It is parsed and printed by jaxlib (``pip install 'solver-shard[jax]'``); nothing is run.
        which: basic, aggressive, op-priority or user-priority, each of which runs the ones before; populate-op-sharding-rules only
            attaches rules to the ops.
        strategy: from aggressive on, how the axes of one op's factors are settled: basic, aggressive or basic-then-aggressive.
        conservative_propagation: propagate no part of an axis, nor what could yield uneven shards.
        run_op_priority: op-priority takes five levels of ops one after the other; False takes all at once.
        keep_rules: leave the rules that were made on the ops.
        stages: keep the module after every user priority but the last.

    Returns:
        The module's text, the sharding of every value as data, and warnings.

    Raises:
        InputError: no such file, no module, or jaxlib is missing; the message says what to do.
    """
    from solver_shard.shardy.stablehlo.rules import StablehloRules

    module, rules = StablehloModule.load(Path(path)), StablehloRules()
    warnings: tuple[str, ...] = ()
    kept: list[tuple[str, str]] = []
    if which == "populate-op-sharding-rules":
        graph = populate_rules(module.graph, rules, conservative=conservative_propagation)
    else:
        has_edges = any(module.graph.ops[i].kind is OpKind.EDGE for i in module.graph.walk())

        def without_edges(graph: PropagationGraph) -> PropagationGraph:
            return graph if has_edges else sink_edges(graph)

        def keep(graph: PropagationGraph, name: str) -> None:
            kept.append((name, module.print(without_edges(graph), verify=False)))

        options = PropagationOptions(
            conservative=conservative_propagation,
            strategy=strategy,
            run_op_priority=run_op_priority,
            keep_rules=keep_rules,
            dump=keep if stages else None,
        )
        done = propagate(module.graph if has_edges else add_edges(module.graph), which, rules, options)
        graph, warnings = without_edges(done.graph), done.warnings
    text = module.print(graph)
    unknown = (f"no sharding rule for {name}; nothing propagates through it" for name in rules.missing)
    return PropagatedModule(text=text, shardings=_shardings(graph), warnings=(*warnings, *unknown), stages=tuple(kept))


def _shardings(graph: PropagationGraph) -> dict[str, Any]:
    """Every value's sharding, function after function."""

    def entry(number: int, **more: Any) -> dict[str, Any]:
        value = graph.values[number]
        sharding = None if value.sharding is None else format_sharding(value.sharding, graph.meshes)
        return {"value": value.name, **more, "shape": value.shape, "dtype": value.dtype, "sharding": sharding}

    def inside(ops: tuple[int, ...]) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        for i in ops:
            op = graph.ops[i]
            rule = {} if op.rule is None else {"rule": str(op.rule)}
            entries += [entry(value, op=op.name, **rule) for value in op.results]
            for block in op.regions:
                entries += inside(block.ops)
        return entries

    functions = [
        {
            "function": function.name,
            "arguments": [entry(value) for value in function.body.arguments],
            "values": inside(function.body.ops),
            "results": [None if s is None else format_sharding(s, graph.meshes) for s in function.result_shardings],
        }
        for function in graph.functions
    ]
    return {"meshes": {name: str(mesh) for name, mesh in graph.meshes.items()}, "functions": functions}
