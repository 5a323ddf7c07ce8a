"""A rulebook's rule as propagation uses it: one rule format serves the solver and the passes.

Every factor that the solver may cut carries shardings. What the op must see whole blocks them, and so do factors that only a named
implementation can cut (it needs collectives inside, which propagation does not know of).
"""

from __future__ import annotations

from collections.abc import Mapping

from solver_shard.program import Program
from solver_shard.propagation.graph import Graph
from solver_shard.propagation.rule import ShardingRule
from solver_shard.rulebook.build import Rulebook
from solver_shard.rulebook.rule import Rule


def sharding_rule(rule: Rule) -> ShardingRule | None:
    """The factors of a rule with their types; None where the op has no rule to propagation.

    A dim without factors gets one of its own, of size 1, operands first.
    """
    if not rule.propagates:
        return None
    sizes = [factor.size for factor in rule.factors]

    def fill(dims: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        filled = []
        for held in dims:
            wide = tuple(f for f in held if sizes[f] != 1) or held[:1]  # of several factors none has size 1
            if not wide:
                wide = (len(sizes),)
                sizes.append(1)
            filled.append(wide)
        return tuple(filled)

    operands = tuple(map(fill, rule.operands))
    results = tuple(map(fill, rule.results))
    kinds, blocked = _kinds(rule)

    def of(kind: str) -> tuple[int, ...]:
        return tuple(i for i, found in kinds.items() if found == kind)

    return _compact(
        ShardingRule(
            sizes=tuple(sizes),
            operands=operands,
            results=results,
            reduction=of("reduction"),
            need_replication=of("need_replication"),
            permutation=of("permutation"),
            blocked=blocked,
        )
    )


def _kinds(rule: Rule) -> tuple[Mapping[int, str], tuple[int, ...]]:
    """The type of every factor, and those that are blocked; rows of ATen ops leave both to what the solver may do."""
    special = {way.factor for way in rule.implementations}
    kinds: dict[int, str] = {}
    blocked = []
    for i, factor in enumerate(rule.factors):
        kinds[i] = factor.kind
        whole = factor.kind == "pass_through" and (not factor.cut or i in special)
        if whole:
            kinds[i] = "need_replication"
        elif factor.kind == "pass_through" and factor.reduction and any(all(i not in held for held in dims) for dims in rule.results):
            kinds[i] = "reduction"
        if factor.blocked or whole:
            blocked.append(i)
    return kinds, tuple(blocked)


def _compact(rule: ShardingRule) -> ShardingRule:
    """The rule without factors that no tensor holds."""
    used = sorted({f for dims in (*rule.operands, *rule.results) for held in dims for f in held})
    if len(used) == len(rule.sizes):
        return rule
    place = {f: i for i, f in enumerate(used)}

    def moved(factors: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(place[f] for f in factors if f in place)

    return ShardingRule(
        sizes=tuple(rule.sizes[f] for f in used),
        operands=tuple(tuple(map(moved, dims)) for dims in rule.operands),
        results=tuple(tuple(map(moved, dims)) for dims in rule.results),
        reduction=moved(rule.reduction),
        need_replication=moved(rule.need_replication),
        permutation=moved(rule.permutation),
        blocked=moved(rule.blocked),
        custom=rule.custom,
    )


class ProgramRules:
    """The registry of a traced program's ops; the graph's first ops are the program's (see ``program.program_graph``)."""

    def __init__(self, program: Program, rulebook: Rulebook) -> None:
        self._program = program
        self._rulebook = rulebook
        self._known: dict[int, ShardingRule | None] = {}

    def __call__(self, graph: Graph, op: int, *, conservative: bool) -> ShardingRule | None:
        """The rule of an op; None where it has none."""
        if op >= len(self._program.ops):
            return None
        rule = self._rulebook.rule(self._program, op)
        if id(rule) not in self._known:
            self._known[id(rule)] = sharding_rule(rule)
        return self._known[id(rule)]
