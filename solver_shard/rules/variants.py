"""Rules that follow the rows of other ops: of in-place and out variants, and of ops on lists of tensors.

``aten.add_.Tensor`` runs what ``aten.add.Tensor`` runs and writes the result over ``self``, which keeps its layout: of the
functional op's strategies it has those that leave the result as ``self`` is. ``aten.add.out`` writes it to ``out``, a tensor
that must already have the layout of the result. Which op a variant follows is read off torch's schemas: the same arguments without
those that are only written, and the name without the last underscore.

>>> follows("aten.add_.Tensor")
FollowedOp(name='aten.add.Tensor', written=('self',), outs=())
>>> follows("aten.add.out")
FollowedOp(name='aten.add.Tensor', written=(), outs=('out',))
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from solver_shard.errors import RuleError
from solver_shard.layout import Placement, R
from solver_shard.program import Op, Ref, Tensor, refs
from solver_shard.rules.rule import AxisStrategy, Factor, FactorDims, Rule

Build = Callable[[Op, Sequence[Tensor], Sequence[Tensor]], Rule]
"""The rule of another op, built by the same rows."""

FAMILY = "family"
"""``Rule.source`` of rules that follow another op's row."""


@dataclass(frozen=True, slots=True)
class FollowedOp:
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
def follows(name: str) -> FollowedOp | None:
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
            return FollowedOp(f"{namespace}.{target}.{candidate}", tuple(written), tuple(outs))
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


PREFIXES = ("_foreach_", "_fused_", "_amp_foreach_")

_BINARY = ("add", "sub", "mul", "div")
_ELEMENTS: Mapping[str, tuple[str, str]] = {
    **{f"{name}.{kind}": (f"{name}.Tensor", "other") for name in _BINARY for kind in ("List", "Tensor")},
    **{f"{name}.{kind}": (f"{name}.Scalar", "other") for name in _BINARY for kind in ("Scalar", "ScalarList")},
    **{f"{name}.{kind}": (f"{name}.default", "") for name in ("addcdiv", "addcmul") for kind in ("Scalar", "ScalarList", "Tensor")},
    **{f"{name}.List": (f"{name}.Tensor", "max" if name == "clamp_max" else "min") for name in ("clamp_max", "clamp_min")},
    **{f"{name}.{k}": (f"{name}.default", name[6:]) for name in ("clamp_max", "clamp_min") for k in ("Scalar", "ScalarList")},
    **{f"{name}.List": (f"{name}.default", "other") for name in ("maximum", "minimum")},
    **{f"maximum.{kind}": ("clamp_min.default", "min") for kind in ("Scalar", "ScalarList")},
    **{f"minimum.{kind}": ("clamp_max.default", "max") for kind in ("Scalar", "ScalarList")},
    "lerp.List": ("lerp.Tensor", "end"),
    "lerp.Scalar": ("lerp.Scalar", "end"),
    "lerp.ScalarList": ("lerp.Scalar", "end"),
    "pow.List": ("pow.Tensor_Tensor", "exponent"),
    "pow.Scalar": ("pow.Tensor_Scalar", "exponent"),
    "pow.ScalarList": ("pow.Tensor_Scalar", "exponent"),
    "pow.ScalarAndTensor": ("pow.Scalar", "exponent"),
    "norm.Scalar": ("linalg_vector_norm.default", ""),
    "powsum.Scalar": ("linalg__powsum.default", ""),
}  # fmt: skip
"""``_foreach_NAME.OVERLOAD`` to the op of one element and its second argument; others are ``NAME.default`` of one tensor."""

_OPTIONAL = frozenset({"max_exp_avg_sqs", "momentum_buffer_list"})
"""Lists that are empty where the optimizer keeps no such state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """The op of one element, which operands and results of the list op it has, and its operands over which results are written."""

    op: Op
    operands: tuple[int, ...]
    results: tuple[int, ...]
    owners: tuple[int, ...] = ()


def is_list_op(name: str) -> bool:
    """Whether the op runs on every element of lists of tensors by itself."""
    return bool(_lists(name))


def is_list_call(op: Op) -> bool:
    """Whether the call has the lists of a list op; the op of one element may have the same name."""
    return any(isinstance(op.attributes.get(name), tuple | list) for name in _lists(op.name))


@functools.cache
def _lists(name: str) -> tuple[str, ...]:
    """Arguments with one entry per element, tensors or numbers; none for other ops."""
    if not name.startswith(tuple(f"aten.{prefix}" for prefix in PREFIXES)):
        return ()
    overload = overload_of(name)
    kinds = {a.name: str(a.type) for a in overload._schema.arguments} if overload is not None else {}
    if "List[Tensor]" not in kinds.values():
        return ()
    return tuple(name for name, kind in kinds.items() if kind in ("List[Tensor]", "List[number]"))


def elements(op: Op, results: int) -> tuple[Element, ...]:
    """The ops of all elements; RuleError where lists differ in length."""
    lists = {name: op.attributes[name] for name in _lists(op.name) if name in op.attributes}
    lengths = {name: len(value) for name, value in lists.items() if value or name not in _OPTIONAL}
    if len(set(lengths.values())) != 1:
        said = ", ".join(f"{name} has {length}" for name, length in lengths.items()) or "no list was given"
        raise RuleError(
            f"{op.name} runs on every element of its lists, which must be of one length: {said}; pass lists that belong together"
        )
    count = next(iter(lengths.values()))
    shared = (results - 1,) if op.name.startswith("aten._amp_foreach_") and results else ()  # found_inf, of all elements
    if count and (results - len(shared)) % count:
        raise RuleError(f"{op.name} on lists of {count} makes the same number of results for each, the call has {results}")
    found = []
    for k in range(count):
        attributes = {name: (value[k] if value else None) if name in lists else value for name, value in op.attributes.items()}
        name, attributes = _element(op.name, attributes)
        over = op.name.startswith("aten._foreach_") and op.name.split(".")[1].endswith("_")
        kept = list(dict.fromkeys(ref.operand for value in attributes.values() for ref in refs(value)))
        local = {key: Ref(kept.index(value.operand)) if isinstance(value, Ref) else value for key, value in attributes.items()}
        inner = Op(name=name, operands=tuple(range(len(kept))), results=(), attributes=local)
        found.append(
            Element(op=inner, operands=tuple(kept), results=(*range(k, results - len(shared), count), *shared), owners=(0,) * over)
        )
    return tuple(found)


def element_rules(op: Op, operands: Sequence[Tensor], results: Sequence[Tensor], build: Build) -> tuple[Rule, ...]:
    """The rule of every element, on that element's own operands and results."""
    found = []
    for element in elements(op, len(results)):
        ins, outs = [operands[i] for i in element.operands], [results[i] for i in element.results]
        rule = build(element.op, ins, outs or [ins[i] for i in element.owners])
        if element.owners:
            rule = variant(rule, kept=range(len(ins)), count=len(ins), owners=element.owners, results=len(outs))
        found.append(rule)
    return tuple(found)


def list_rule(op: Op, operands: Sequence[Tensor], results: Sequence[Tensor], build: Build) -> Rule:
    """One rule for the whole call: an axis does the same to all elements that can.

    Ops on lists of tensors, element by element: ``_foreach_add`` is an ``add`` per element, ``_fused_adamw_`` one update per parameter.

    Elements do not see each other, so every element has the rule of the op that runs on it alone (``element_rules``).
    Where one rule must stand for the whole call, an axis does the same to every element: strategy ``a`` cuts factor ``a`` of each (an
    element that lacks the strategy is replicated). An op is a list op if its schema takes a list of tensors; ``_fused_rms_norm`` only
    shares the prefix.
    """
    parts = elements(op, len(results))
    rules = element_rules(op, operands, results, build)
    names = dict.fromkeys(s.name for rule in rules for s in rule.strategies() if s.implementation is None)
    factors: list[Factor] = []
    strategies = []
    for name in names:
        chosen = [next((s for s in rule.strategies() if s.name == name), None) for rule in rules]
        cut = [rule.factors[s.factor] for rule, s in zip(rules, chosen, strict=True) if s is not None and s.factor is not None]
        whole = [s if s is not None else rule.strategies()[0] for rule, s in zip(rules, chosen, strict=True)]
        found = _together(name, parts, whole, len(operands), len(results), len(factors) if cut else None)
        if found is not None:
            strategies.append(found)
            if cut:
                factors.append(_shared(name, cut))
    dims: list[FactorDims] = [((),) * len(t.shape) for t in (*operands, *results)]
    return Rule(
        factors=tuple(factors),
        operands=tuple(dims[: len(operands)]),
        results=tuple(dims[len(operands) :]),
        explicit=tuple(strategies) or (AxisStrategy(name="R", operands=(), results=()),),
        flops=sum(rule.flops for rule in rules),
        source=FAMILY if all(rule.source != "fallback" for rule in rules) else "fallback",
        family=rules[0].family if rules else "",
    )


def _together(
    name: str, parts: Sequence[Element], chosen: Sequence[AxisStrategy], operands: int, results: int, factor: int | None
) -> AxisStrategy | None:
    """One strategy from one per element; None where a tensor that several elements read would need two placements."""
    ins: list[Placement | None] = [None] * operands
    outs: list[Placement | None] = [None] * results
    for part, strategy in zip(parts, chosen, strict=True):
        for places, at, found in ((ins, part.operands, strategy.operands), (outs, part.results, strategy.results)):
            for position, placement in zip(at, found, strict=True):
                if places[position] not in (None, placement):
                    return None
                places[position] = placement
    return AxisStrategy(
        name=name,
        operands=tuple(R if p is None else p for p in ins),
        results=tuple(R if p is None else p for p in outs),
        factor=factor,
    )


def _shared(name: str, cut: Sequence[Factor]) -> Factor:
    """As many shards as every element allows."""
    if any(factor.even or factor.filled for factor in cut):
        return Factor(name=name, size=math.gcd(*(factor.size for factor in cut)), even=True)
    return Factor(name=name, size=min(factor.size for factor in cut))


def _element(name: str, attributes: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the op of one element."""
    base, overload = name.split(".")[1:]
    if not base.startswith("_foreach_"):
        return name, attributes
    stem = base.removeprefix("_foreach_").removesuffix("_")
    target, second = _ELEMENTS.get(f"{stem}.{overload}", (f"{stem}.default", ""))
    names = {"scalars": "value", "scalar": second, "tensors1": "end", "weights": "weight"}
    found = {}
    for position, (key, value) in enumerate(attributes.items()):
        if key == "scalars" and isinstance(value, Ref):
            continue  # a tensor of one number per element: read whole
        found[second if position == 1 and second else names.get(key, key)] = value
    if target in ("linalg_vector_norm.default", "linalg__powsum.default"):
        found = {"self": found["self"], "ord": found.get("ord", 2), "dim": None, "keepdim": False, "dtype": found.get("dtype")}
    return f"aten.{target}", found
