"""What a module hands on: the forward results that are read outside it. The same for a Program's ops and a Plan's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class ModuleOp(Protocol):
    """An op as far as its place in the module tree goes."""

    @property
    def module(self) -> str: ...
    @property
    def operands(self) -> tuple[int, ...]: ...
    @property
    def results(self) -> tuple[int, ...]: ...


def module_outputs(forward: Sequence[ModuleOp], returned: Iterable[int]) -> dict[str, list[int]]:
    """Module path to the positions of its outputs, modules in the order of their first output.

    >>> module_outputs([op for op in program.ops if op.phase is Phase.FORWARD], program.outputs)["model.layers.0.mlp"]
    [58]

    Args:
        forward: the forward ops, in order.
        returned: tensors that the step returns; they count as read outside every module.
    """
    kept = set(returned)
    readers: dict[int, set[str]] = {}
    for op in forward:
        for t in op.operands:
            readers.setdefault(t, set()).add(op.module)
    outputs: dict[str, list[int]] = {}
    for op in forward:
        parts = op.module.split(".") if op.module else []
        for result in op.results:
            outside = readers.get(result, set())
            for depth in range(len(parts), 0, -1):
                path = ".".join(parts[:depth])
                if result in kept or any(other != path and not other.startswith(path + ".") for other in outside):
                    outputs.setdefault(path, []).append(result)
    return outputs
