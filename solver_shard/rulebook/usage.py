"""Which ops a program runs, by which rules, and how much of its work has no strategy but replication.

>>> for row in usage(program, Rulebook()):
...     print(row.op, row.rule, row.source, row.count, f"{row.flops:.1%}", f"{row.nbytes:.1%}")
aten.einsum.default  abc,dc->abd | ...  table  45  97.2%  38.0%
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from solver_shard.program import Op, Program
from solver_shard.rulebook.build import Rulebook
from solver_shard.rulebook.rule import Dims, Rule


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
    """Every op of the program, those with the largest share of operations or bytes first; then by name."""
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


def _terms(rule: Rule, dims: Dims) -> Iterator[str]:
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
