"""The propagation passes: basic, aggressive, op-priority, user-priority, each running the one before; and the rules alone.

made = propagate(graph, "user-priority", registry)
made.graph.values[i].sharding
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from solver_shard.errors import InputError
from solver_shard.propagation.check import check_graph, fit_rule
from solver_shard.propagation.graph import Graph, Kind, Registry
from solver_shard.propagation.groups import settle_groups
from solver_shard.propagation.priorities import LEVELS, hide_priorities, op_directions, restore_priority
from solver_shard.propagation.rule import ShardingRule
from solver_shard.propagation.state import State
from solver_shard.propagation.step import StrategyName
from solver_shard.propagation.sweep import sweep

PassName = Literal["basic", "aggressive", "op-priority", "user-priority"]
Dump = Callable[[Graph, str], None]
"""Called with the graph as it stands, rules on its ops, and the name of the file to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the passes can be asked.

    Attributes:
        conservative: parts of axes never propagate, and rules lose what could yield uneven shards.
        strategy: of aggressive propagation and up; ``basic-then-aggressive`` runs two sweeps per level.
        run_op_priority: of op-priority and user-priority; False: one aggressive propagation instead of the five levels.
        keep_rules: leave the rules that were made on the ops (rules that users wrote always stay).
        dump: of user-priority: called after every user priority but the last.
    """

    conservative: bool = False
    strategy: Literal["basic", "aggressive", "basic-then-aggressive"] = "aggressive"
    run_op_priority: bool = True
    keep_rules: bool = False
    dump: Dump | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Propagated:
    """What a pass made of a graph; positions of values and ops are as in the graph that was given (see ``graph``)."""

    graph: Graph
    warnings: tuple[str, ...] = ()


def propagate(graph: Graph, name: PassName, registry: Registry, options: Options | None = None) -> Propagated:
    """Run one pass.

    Raises:
        InputError: an unknown pass or strategy; no main function; shardings or rules that do not fit the graph.
    """
    options = options or Options()
    if name not in get_args(PassName):
        raise InputError(f"unknown propagation pass {name!r}; legal: {', '.join(get_args(PassName))}")
    if options.strategy not in _STRATEGIES:
        raise InputError(f"unknown propagation strategy {options.strategy!r}; legal: {', '.join(_STRATEGIES)}")
    main = _main(graph)
    check_graph(graph)
    bare = State(graph, main, [None] * len(graph.ops), {})
    grouped = settle_groups(graph, bare.slots, bare.maker)
    rules = op_rules(grouped.graph, registry, conservative=options.conservative)
    state = State(grouped.graph, main, rules, grouped.constrained)
    if name == "user-priority":
        _user_priority(state, options)
    elif name == "op-priority":
        _op_priority(state, options)
    elif name == "aggressive":
        _aggressive(state, options)
    else:
        sweep(state, "basic", conservative=options.conservative)
    return Propagated(graph=state.snapshot(keep_rules=options.keep_rules), warnings=grouped.warnings)


def populate_rules(graph: Graph, registry: Registry, *, conservative: bool = False) -> Graph:
    """The graph with the rule of every op that has one."""
    check_graph(graph)
    rules = op_rules(graph, registry, conservative=conservative)
    ops = tuple(dataclasses.replace(op, rule=rule) for op, rule in zip(graph.ops, rules, strict=True))
    return dataclasses.replace(graph, ops=ops)


def op_rules(graph: Graph, registry: Registry, *, conservative: bool) -> list[ShardingRule | None]:
    """Per op the rule that it carries, or else the registry's."""
    rules: list[ShardingRule | None] = [None] * len(graph.ops)
    for i in graph.walk():
        op = graph.ops[i]
        if op.rule is not None:
            rules[i] = op.rule
        elif op.kind in (Kind.PLAIN, Kind.CONSTRAINT):
            rule = registry(graph, i, conservative=conservative)
            if rule is not None:
                fit_rule(graph, op, rule)
            rules[i] = rule
    return rules


_STRATEGIES: dict[str, Sequence[StrategyName]] = {
    "basic": ("basic",),
    "aggressive": ("aggressive",),
    "basic-then-aggressive": ("basic", "aggressive"),
}


def _aggressive(state: State, options: Options) -> None:
    for strategy in _STRATEGIES[options.strategy]:
        sweep(state, strategy, conservative=options.conservative)


def _op_priority(state: State, options: Options) -> None:
    if not options.run_op_priority:
        _aggressive(state, options)
        return
    for level in range(LEVELS):
        directions = op_directions(state, level)
        for strategy in _STRATEGIES[options.strategy]:
            sweep(state, strategy, directions, conservative=options.conservative)


def _user_priority(state: State, options: Options) -> None:
    reserved = hide_priorities(state)
    _op_priority(state, options)
    finished = 0
    for priority, places in reserved.items():
        if options.dump is not None:
            options.dump(state.snapshot(keep_rules=True), f"00.propagation_after_user_priority_{finished}.mlir")
        restore_priority(state, priority, places)
        _op_priority(state, options)
        finished = priority


def _main(graph: Graph) -> int:
    """The position of the function whose results take part."""
    names = [function.name for function in graph.functions]
    if len(names) == 1:
        return 0
    if "main" not in names:
        have = f"the module has {', '.join('@' + n for n in names)}" if names else "the module has no function"
        raise InputError(f"propagation needs a function @main, or only one function; {have}; rename the entry function to @main")
    return names.index("main")
