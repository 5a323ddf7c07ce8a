"""Rules of in-place and out variants, from the row of the op that they follow.

``aten.add_.Tensor`` runs what ``aten.add.Tensor`` runs and writes the result over ``self``, which keeps its layout: of the
functional op's strategies it has those that leave the result as ``self`` is. ``aten.add.out`` writes it to ``out``, a tensor
that must already have the layout of the result. Which op a variant follows is read off torch's schemas: the same arguments without
those that are only written, and the name without the last underscore.

>>> follows("aten.add_.Tensor")
Followed(name='aten.add.Tensor', written=('self',), outs=())
>>> follows("aten.add.out")
Followed(name='aten.add.Tensor', written=(), outs=('out',))
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from solver_shard.layout import Placement
from solver_shard.program import Op, Ref, Tensor, refs
from solver_shard.rulebook.rule import AxisStrategy, Rule

Build = Callable[[Op, Sequence[Tensor], Sequence[Tensor]], Rule]
"""The rule of another op, built by the same rows."""

FAMILY = "family"
"""``Rule.source`` of rules that follow another op's row."""


@dataclass(frozen=True, slots=True)
class Followed:
    """The functional op of a variant.

    Attributes:
        written: arguments that are read and written over, one per result that they take, in order.
        outs: arguments that are only written, in the order of the results.
    """

    name: str
    written: tuple[str, ...]
    outs: tuple[str, ...]


def overload_of(name: str) -> Any:
    """Torch's overload of this name; None where no library that is imported defines it."""
    import torch

    namespace, _, rest = name.replace("::", ".").partition(".")
    base, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    except (AttributeError, RuntimeError):
        return None


@functools.cache
def follows(name: str) -> Followed | None:
    """The op that a variant follows; None for ops that write to none of their arguments, or that follow no other."""
    import torch

    overload = overload_of(name)
    if not isinstance(overload, torch._ops.OpOverload):
        return None
    arguments = overload._schema.arguments
    mutable = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    outs = [a.name for a in arguments if a.name in mutable and a.kwarg_only]
    written = [a for a in mutable if a not in outs]
    if not mutable:
        return None
    namespace, base = name.split(".")[:2]
    target = base[:-1] if written and base.endswith("_") and not base.endswith("__") else base
    packet = getattr(getattr(torch.ops, namespace), target, None)
    wanted = [_plain(a) for a in arguments if a.name not in outs]
    for candidate in packet.overloads() if packet is not None else ():
        schema = getattr(packet, candidate)._schema
        pure = not any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        if pure and [_plain(a) for a in schema.arguments] == wanted and len(schema.returns) >= len(outs):
            return Followed(f"{namespace}.{target}.{candidate}", tuple(written), tuple(outs))
    return None


def derive(op: Op, operands: Sequence[Tensor], results: Sequence[Tensor], build: Build) -> Rule | None:
    """The rule of a variant; None for ops that are none, or that follow an op without a rule."""
    found = follows(op.name)
    if found is None:
        return None
    attributes = {name: value for name, value in op.attributes.items() if name not in found.outs}
    kept = list(dict.fromkeys(ref.operand for value in attributes.values() for ref in refs(value)))
    inner = Op(name=found.name, operands=tuple(range(len(kept))), results=(), attributes=_renumbered(attributes, kept))
    owners = [ref.operand for name in (*found.written, *found.outs) for ref in refs(op.attributes.get(name))]
    made = list(results) or [operands[i] for i in owners]
    rule = build(inner, [operands[i] for i in kept], made)
    if rule.source not in ("table", "user", FAMILY):
        return None
    return variant(rule, kept=kept, count=len(operands), owners=owners, results=len(results))


def variant(rule: Rule, *, kept: Sequence[int], count: int, owners: Sequence[int], results: int) -> Rule:
    """The functional op's rule as that of the variant.

    Args:
        kept: the variant's operand for every operand of the functional op.
        count: operands of the variant.
        owners: operands of the variant over which the first results are written.
        results: how many results the variant returns.
    """
    strategies = tuple(
        chosen
        for strategy in (*rule.strategies(), *rule.minor_strategies())
        if (chosen := _written(strategy, kept, count, owners, results)) is not None
    )
    dims = [rule.results[owners.index(i)] if i in owners else rule.operands[list(kept).index(i)] for i in range(count)]
    reads = rule.reads or (True,) * len(rule.operands)
    return replace(
        rule,
        operands=tuple(dims),
        results=rule.results[:results],
        linear=(),
        implementations=(),
        reads=tuple(any(on for at, on in zip(kept, reads, strict=True) if at == i) for i in range(count)),
        alike=tuple(i for i in rule.alike if i < results),
        view=False,
        explicit=strategies,
        source=FAMILY,
    )


def _written(strategy: AxisStrategy, kept: Sequence[int], count: int, owners: Sequence[int], results: int) -> AxisStrategy | None:
    """None where a tensor that is written over would have to change its layout; implementations are for functional ops."""
    if strategy.implementation is not None:
        return None
    placements: list[Placement | None] = [None] * count
    wanted = [*zip(kept, strategy.operands, strict=True), *zip(owners, strategy.results, strict=False)]
    for operand, placement in wanted:
        if placements[operand] not in (None, placement):
            return None
        placements[operand] = placement
    return replace(strategy, operands=tuple(p for p in placements if p is not None), results=strategy.results[:results])


def _plain(argument: Any) -> tuple[str, str]:
    """Name and type, without what says that it is written."""
    return argument.name, re.sub(r"\(\w+!?\)", "", str(argument.type))


def _renumbered(value: Any, kept: Sequence[int]) -> Any:
    if isinstance(value, Ref):
        return Ref(kept.index(value.operand))
    if isinstance(value, dict):
        return {name: _renumbered(item, kept) for name, item in value.items()}
    return tuple(_renumbered(item, kept) for item in value) if isinstance(value, tuple | list) else value
