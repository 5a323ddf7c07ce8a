"""StableHLO modules with sdy annotations: from text to the graph that propagation works on, and back.

>>> module = StablehloModule.parse(text)
>>> module.graph.values[0].sharding          # of the first function's first argument
>>> module.print(propagate(module.graph, "user-priority", StablehloRules()).graph)

jaxlib parses and prints (``pip install 'solver-shard[jax]'``); no pass of the reference implementation is run. The printed module
differs from the parsed one in what the graph changed, and in nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from solver_shard.errors import InputError
from solver_shard.files import read_text
from solver_shard.frontends.stablehlo_bindings import bindings
from solver_shard.frontends.stablehlo_errors import MAX_BYTES, check_bounds, parse_error
from solver_shard.frontends.stablehlo_read import read_graph
from solver_shard.frontends.stablehlo_write import write_graph
from solver_shard.propagation.graph import Graph


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
    graph: Graph

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
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {path}: {error}; give a StableHLO module as text") from None
        return cls.parse(text, str(path))

    def print(self, graph: Graph | None = None, *, verify: bool = True) -> str:
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
