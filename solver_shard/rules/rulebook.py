"""From an op and its tensors to its rule; the rules of a program, conservative ones, and what a program makes of them.

>>> from solver_shard.program import Op, Ref, Tensor
>>> op = Op(name="aten.mul.Tensor", operands=(0, 1), results=(2,), attributes={"self": Ref(0), "other": Ref(1)})
>>> x = Tensor(name="x", shape=(8, 4), dtype="f32")
>>> rule = build_rule(op, [x, x], [x], load_table())
>>> [s.name for s in rule.strategies() if "avg" not in s.name]
['R', 'a', 'b', 'P(sum):0', 'P(sum):1']
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from solver_shard.errors import RuleError
from solver_shard.program import Op, Program, Tensor
from solver_shard.rules.draft import FALLBACK, OpCall, RuleDraft
from solver_shard.rules.registered import dtensor_rule
from solver_shard.rules.row import RuleRow
from solver_shard.rules.rule import FactorDims, Implementation, Rule
from solver_shard.rules.table import RuleTable, load_table
from solver_shard.rules.variants import derive, is_list_call, list_rule


def build_rule(
    op: Op,
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
    table: RuleTable,
    *,
    conservative: bool = False,
    trust_dtensor: bool = False,
) -> Rule:
    """The rule of one op instance. RuleError where row and op disagree.

    It comes from the op's row (one of the user's replaces a shipped one); for an op on lists, from the rows of its elements; for an
    in-place or out variant, from the row of the op it follows; else from strategies that are registered with DTensor and proven (or
    trusted); else the op is replicated. ``conservative`` leaves out what could carry a sharding to a dim that it does not divide
    (StableHLO rows only; of the others see ``Rulebook``).
    """
    if is_list_call(op):
        return list_rule(op, operands, results, functools.partial(build_rule, table=table))
    row = table.get(op.name)
    if row is not None:
        return _from_row(row, op, operands, results, table, conservative)
    derived = derive(op, operands, results, functools.partial(build_rule, table=table))
    if derived is not None:
        return derived
    return dtensor_rule(op, operands, results, trust=trust_dtensor) or RuleDraft(OpCall.of(op, operands, results)).rule(
        family=FALLBACK, source=FALLBACK
    )


def _from_row(row: RuleRow, op: Op, operands: Sequence[Tensor], results: Sequence[Tensor], table: RuleTable, conservative: bool) -> Rule:
    call = OpCall.of(op, operands, results, conservative=conservative)
    try:
        return table.family(row).build(call, **row.settings).rule(family=row.family, source="user" if row.user else "table")
    except RuleError as error:
        raise RuleError(f"rules file {row.file}, row {op.name!r}: {error}") from None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        shapes = ", ".join(str(t.shape) for t in operands)
        raise RuleError(
            f"{op.name}: rules file {row.file} gives it family {row.family!r}, which does not fit its arguments "
            f"({', '.join(op.attributes) or 'none'}; operand shapes {shapes or 'none'}): {type(error).__name__}: {error}; correct the row"
        ) from error


class Rulebook:
    """Rules of a program's ops, each distinct signature (op, shapes, dtypes, arguments) built once; equal ones are one.

    Args:
        table: rows; default the shipped ones.
        conservative: drop what could make shards uneven or cut a dim inside (see ``conservative``).
        trust_dtensor: take what torch registers with DTensor where it is not proven (see :mod:`solver_shard.rules.registered`).
    """

    def __init__(self, table: RuleTable | None = None, *, conservative: bool = False, trust_dtensor: bool = False) -> None:
        self.table = load_table() if table is None else table
        self.conservative = conservative
        self.trust_dtensor = trust_dtensor
        self._rules: dict[Hashable, Rule] = {}
        self._known: dict[Rule, Rule] = {}

    def rule(self, program: Program, op_position: int) -> Rule:
        """The rule of the op at this position; RuleError where its row disagrees with it."""
        op = program.ops[op_position]
        tensors = program.tensors
        key = signature(op, tensors)
        found = self._rules.get(key)
        if found is None:
            operands = [tensors[t] for t in op.operands]
            found = build_rule(op, operands, [tensors[t] for t in op.results], self.table, trust_dtensor=self.trust_dtensor)
            found = conservative(found) if self.conservative else found
            found = self._rules[key] = self._known.setdefault(found, found)
        return found

    def fallbacks(self, program: Program) -> Mapping[str, tuple[int, ...]]:
        """Ops without a rule: name to their positions in the program."""
        found: dict[str, tuple[int, ...]] = {}
        for i, op in enumerate(program.ops):
            if self.rule(program, i).source == FALLBACK:
                found[op.name] = (*found.get(op.name, ()), i)
        return found


def signature(op: Op, tensors: Sequence[Tensor]) -> Hashable:
    """What a rule depends on: name, shapes, dtypes, arguments."""
    shapes = tuple((tensors[t].shape, tensors[t].dtype) for t in op.operands)
    made = tuple((tensors[t].shape, tensors[t].dtype) for t in op.results)
    return op.name, shapes, made, tuple((name, _frozen(value)) for name, value in op.attributes.items())


def _frozen(value: Any) -> Hashable:
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    return value if isinstance(value, Hashable) else repr(value)


def conservative(rule: Rule) -> Rule:
    """The rule without strategies that could lead to uneven or split shards.

    - Every factor is cut into equal shards only, so that all devices hold the same number of elements.
    - Rows do not lie with their experts (``own-experts``), whose numbers differ.
    - Nothing is cut below another factor (no strategy that needs sub-axes), and a factor that is a whole dim of no tensor is not cut: a
      view from [6, 4] to [4, 6] could be cut in two, but on both sides only inside a dim.

    The counterpart in Shardy is ``conservative-propagation``, in which split axes never propagate and rules lose the factors that could
    yield shards that do not divide. (Rules here never cut the dims of slices, pads, concatenations or convolution windows anyway.)
    """
    split = _split(rule)
    factors = tuple(replace(factor, even=True, cut=factor.cut and index not in split) for index, factor in enumerate(rule.factors))
    explicit = None if rule.explicit is None else tuple(s for s in rule.explicit if not s.after and s.factor not in split)
    ways = tuple(way for way in rule.implementations if factors[way.factor].cut and _follows(rule, way))
    return replace(rule, factors=factors, explicit=explicit, implementations=ways)


def _follows(rule: Rule, way: Implementation) -> bool:
    """Whether an implementation cuts only dims that hold its factor: rows that lie with their experts are as many as are routed."""
    tensors = [*zip(rule.operands, way.operands, strict=True), *zip(rule.results, way.results, strict=True)]
    return all(way.factor in dims[place.dim] for dims, place in tensors if place.is_shard)


def _split(rule: Rule) -> set[int]:
    """Factors that are never a whole dim, or that lie below another one."""
    held = [[f for f in dim if rule.factors[f].size > 1] for dims in (*rule.operands, *rule.results) for dim in dims]
    inside = {f for factors in held for f in factors if len(factors) > 1}
    whole = {f for factors in held for f in factors if len(factors) == 1}
    minor = {f for factors in held for f in factors[1:]}
    return (inside - whole) | minor


@dataclass(frozen=True, slots=True, kw_only=True)
class OpUsage:
    """One op of a program, all its calls together.

    Attributes:
        rule: the rule of its most frequent call, in einsum-like notation where a rule has factors.
        family: rule family, or where the rule comes from if it is of none.
        source: as in ``Rule.source``; ``file`` is the rules file of its row, empty for none.
        count: calls.
        flops, nbytes: its shares of the program's operations and of the bytes that ops read and write, 0 to 1.
        replicated_flops, replicated_nbytes: the parts of these shares in calls whose only strategy is to replicate everything.
        implementations: names of the implementations that its calls may run.
        strategies: the largest number of single-axis strategies that one of its calls has, replication included.
    """

    op: str
    rule: str
    family: str
    source: str
    file: str
    count: int
    flops: float
    nbytes: float
    replicated_flops: float
    replicated_nbytes: float
    implementations: tuple[str, ...]
    strategies: int


def usage(program: Program, rulebook: Rulebook) -> tuple[OpUsage, ...]:
    """Every op of the program, those with the largest share of operations or bytes first; then by name.

    It says by which rules they run, and how much of the program's work has no strategy but replication:

        for row in usage(program, Rulebook()):
            print(row.op, row.rule, row.source, row.count, f"{row.flops:.1%}", f"{row.nbytes:.1%}")
        aten.einsum.default  abc,dc->abd | ...  table  45  97.2%  38.0%
    """
    calls: dict[str, list[tuple[Rule, int, int]]] = {}
    for i, op in enumerate(program.ops):
        rule = rulebook.rule(program, i)
        calls.setdefault(op.name, []).append((rule, rule.flops, traffic(program, op, rule)))
    flops = max(sum(call[1] for found in calls.values() for call in found), 1)
    nbytes = max(sum(call[2] for found in calls.values() for call in found), 1)
    rows = [_row(op, found, flops, nbytes, rulebook) for op, found in calls.items()]
    return tuple(sorted(rows, key=lambda row: (-max(row.flops, row.nbytes), row.op)))


def traffic(program: Program, op: Op, rule: Rule) -> int:
    """Bytes that one call reads and writes on a single device; none for a view."""
    if rule.view:
        return 0
    read = sum(program.tensors[t].nbytes for t, on in zip(op.operands, rule.reads or (True,) * len(op.operands), strict=True) if on)
    return read + sum(program.tensors[t].nbytes for t in op.results)


def describe(rule: Rule) -> str:
    """The factors of a rule as einsum-like text: ``a b*, c b* -> a c | b sum``; ``*`` marks factors that no axis may cut.

    After the bar: what results become where a factor that they lack is cut, and the operands that may be partial together.
    """
    left = ", ".join(" ".join(_terms(rule, dims)) or "()" for dims in rule.operands)
    right = ", ".join(" ".join(_terms(rule, dims)) or "()" for dims in rule.results)
    return " | ".join([f"{left} -> {right}".strip(), *_notes(rule)])


def _terms(rule: Rule, dims: FactorDims) -> Iterator[str]:
    for held in dims:
        names = [rule.factors[f].name + ("" if rule.factors[f].cut else "*") for f in held]
        yield "1" if not names else names[0] if len(names) == 1 else f"({' '.join(names)})"


def _notes(rule: Rule) -> list[str]:
    held = {f for strategy in (*rule.strategies(), *rule.minor_strategies()) for f in (strategy.factor,) if f is not None}
    sums = [f"{factor.name} {factor.reduction}" for f, factor in enumerate(rule.factors) if factor.reduction and f in held]
    linear = list(dict.fromkeys("+".join(map(str, found.operands)) for found in rule.linear))
    notes = [", ".join(sums)] if sums else []
    return [*notes, f"linear in {', '.join(linear)}"] if linear else notes


def _row(op: str, calls: list[tuple[Rule, int, int]], flops: int, nbytes: int, rulebook: Rulebook) -> OpUsage:
    rules = [rule for rule, _, _ in calls]
    first = max(rules, key=lambda rule: (len(rule.strategies()), rules.count(rule)))
    whole = [(f, b) for rule, f, b in calls if len(rule.strategies()) == 1]
    row = rulebook.table.get(op) if first.source in ("table", "user") else None
    return OpUsage(
        op=op,
        rule=f"replicated: {row.get('reason')}" if row and row.family == "replicated" else describe(first),
        family=first.family,
        source=first.source,
        file=row.file if row else "",
        count=len(calls),
        flops=sum(f for _, f, _ in calls) / flops,
        nbytes=sum(b for _, _, b in calls) / nbytes,
        replicated_flops=sum(f for f, _ in whole) / flops,
        replicated_nbytes=sum(b for _, b in whole) / nbytes,
        implementations=tuple(dict.fromkeys(way.name for rule in rules for way in rule.implementations)),
        strategies=max(len(rule.strategies()) for rule in rules),
    )
