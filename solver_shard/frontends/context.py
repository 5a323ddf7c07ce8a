"""What every cleaning handler gets: the draft, the values of raw nodes so far, and how to write an op unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from solver_shard.frontends.align import align
from solver_shard.frontends.draft import Draft, Shape, Value
from solver_shard.frontends.raw import RawNode, Use
from solver_shard.program import Ref

Result = Value | tuple[Value | None, ...]


@dataclass(slots=True)
class Context:
    """Cleaning in progress; ``values`` holds the results of every raw node met, ``readers`` the nodes that read each one."""

    readers: Mapping[str, Sequence[RawNode]] = field(default_factory=dict)
    draft: Draft = field(default_factory=Draft)
    values: list[tuple[Value | None, ...]] = field(default_factory=list)

    def value(self, use: Use) -> Value:
        """The value that a raw argument stands for."""
        found = self.values[use.node][use.result]
        assert found is not None, use
        return found

    def first(self, node: RawNode) -> Value:
        """The first tensor argument."""
        return self.value(next(item for item in node.arguments.values() if isinstance(item, Use)))

    def result(self, node: RawNode, index: int = 0) -> tuple[Shape, str]:
        """Raw shape and dtype of a result."""
        found = node.results[index]
        assert found is not None, node.name
        return found

    def generic(self, node: RawNode) -> Result:
        """Write the op as it is, on operands of exactly the raw shapes."""
        operands: list[int] = []
        attributes = refer(node.arguments, lambda use: self.draft.plain(self.value(use)), operands)
        return self.write(node, node.op, operands, attributes)

    def binary(self, node: RawNode, name: str, one: Value, two: Value, extra: Mapping[str, Any]) -> Value:
        """Write a pointwise op of two values (``self`` and ``other``) that the raw node implies."""
        shape, dtype = self.result(node)
        common = align(self.draft, [one, two], shape)
        operands: list[int] = list(dict.fromkeys(common.tensors))
        refs = [Ref(operands.index(t)) for t in common.tensors]
        attributes = {"self": refs[0], "other": refs[1], **extra}
        made = self.draft.emit(name, operands, attributes, [(common.shape, dtype)], raws=(*one.raws, *two.raws))
        return Value(made[0], common.dims)

    def write(self, node: RawNode, name: str, operands: Sequence[int], attributes: Mapping[str, Any]) -> Result:
        """Write an op whose results have the raw shapes."""
        raws = [raw for use in uses_of(node) for raw in self.value(use).raws]
        real = [r for r in node.results if r is not None]
        made = iter(self.draft.emit(name, operands, attributes, real, raws=raws, random=node.random))
        return tuple(None if r is None else self.draft.whole(next(made)) for r in node.results)


def uses_of(node: RawNode) -> list[Use]:
    """Tensor arguments in schema order."""
    found: list[Use] = []

    def walk(value: Any) -> None:
        if isinstance(value, Use):
            found.append(value)
        elif isinstance(value, tuple):
            for item in value:
                walk(item)

    for item in node.arguments.values():
        walk(item)
    return found


def refer(arguments: Mapping[str, Any], tensor_of: Any, operands: list[int]) -> dict[str, Any]:
    """Arguments as op attributes: each Use becomes a Ref into ``operands``, which is filled with ``tensor_of(use)``."""

    def walk(value: Any) -> Any:
        if isinstance(value, Use):
            tensor = tensor_of(value)
            if tensor not in operands:
                operands.append(tensor)
            return Ref(operands.index(tensor))
        if isinstance(value, tuple):
            return tuple(walk(item) for item in value)
        return value

    return {name: walk(item) for name, item in arguments.items()}
