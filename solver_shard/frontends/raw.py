"""The raw trace: what AOTAutograd returned, as plain values (but for the constants it holds), every argument under its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from solver_shard.program import Phase, Tensor


@dataclass(frozen=True, slots=True)
class Use:
    """In a raw node's arguments: result ``result`` of node ``node``."""

    node: int
    result: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RawNode:
    """One call of the trace.

    Attributes:
        name: node name in the traced graph.
        op: ``aten.mm.default`` style overload name; empty for sources.
        arguments: every schema argument by name, defaults filled in; tensors as ``Use``, dtypes by short name.
        results: (shape, dtype) of every result; None for a result that is not a tensor.
        strides: per result, as torch lays it out; None for a result that is not a tensor.
        pointwise: every result element depends on the operand elements at its own place only.
        random: draws from a generator; the gradient of the loss is marked so too, for it is no constant that equal ones could share.
        region: checkpointed regions that it runs in, outermost first; a backward node those of its forward node. A node
            whose results a selective policy keeps runs in none.
        source: the tensor, for sources.
    """

    name: str
    op: str
    arguments: dict[str, Any]
    results: tuple[tuple[tuple[int, ...], str] | None, ...]
    strides: tuple[tuple[int, ...] | None, ...] = ()
    phase: Phase = Phase.FORWARD
    module: str = ""
    pointwise: bool = False
    random: bool = False
    region: tuple[int, ...] = ()
    source: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RawGraph:
    """Nodes in order of execution, what they return, and which tensor is the gradient of which parameter.

    Attributes:
        outputs: (name, value) of everything returned but gradients.
        gradients: (position of the parameter's source node, value); a tied parameter has one entry per use.
        ties: other names of parameters and buffers that have several, to the one that nodes have.
        constants: values of the buffers without a name (``constant.NAME``), where the trace has them.
    """

    name: str
    nodes: tuple[RawNode, ...]
    outputs: tuple[tuple[str, Use], ...]
    gradients: tuple[tuple[int, Use], ...]
    ties: Mapping[str, str] = field(default_factory=dict, compare=False)
    constants: Mapping[str, Any] = field(default_factory=dict, compare=False)


def uses(value: Any) -> Iterator[Use]:
    """Every Use inside an argument value, in order."""
    if isinstance(value, Use):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from uses(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from uses(item)
