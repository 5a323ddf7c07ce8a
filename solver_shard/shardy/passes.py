"""The propagation passes: basic, aggressive, op-priority, user-priority, each running the one before; and the laws that graphs keep.

propagated = propagate(graph, "user-priority", registry)
propagated.graph.values[i].sharding
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from solver_shard.errors import InputError
from solver_shard.rules.rule import FactorDims
from solver_shard.shardy.graph import Direction, GraphOp, OpKind, PropagationGraph, Registry, ShardingRule, Traits, check_rule
from solver_shard.shardy.sharding import AxisRef, DimSharding, MeshSpec, TensorSharding, check_sharding
from solver_shard.shardy.step import NO_SHARDING, PropagationState, StrategyName
from solver_shard.shardy.sweep import Directions, settle_groups, sweep

PassName = Literal["basic", "aggressive", "op-priority", "user-priority"]
Dump = Callable[[PropagationGraph, str], None]
"""Called with the graph as it stands, rules on its ops, and the name of the file to write."""


FactorStrategy = Literal["basic", "aggressive", "basic-then-aggressive"]
"""How the axes of one op's factors are settled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PropagationOptions:
    """What the passes can be asked.

    Attributes:
        conservative: parts of axes never propagate, and rules lose what could yield uneven shards.
        strategy: of aggressive propagation and up; ``basic-then-aggressive`` runs two sweeps per level.
        run_op_priority: of op-priority and user-priority; False: one aggressive propagation instead of the five levels.
        keep_rules: leave the rules that were made on the ops (rules that users wrote always stay).
        dump: of user-priority: called after every user priority but the last.
    """

    conservative: bool = False
    strategy: FactorStrategy = "aggressive"
    run_op_priority: bool = True
    keep_rules: bool = False
    dump: Dump | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Propagated:
    """What a pass made of a graph; positions of values and ops are as in the graph that was given (see ``graph``)."""

    graph: PropagationGraph
    warnings: tuple[str, ...] = ()


def propagate(graph: PropagationGraph, name: PassName, registry: Registry, options: PropagationOptions | None = None) -> Propagated:
    """Run one pass.

    Raises:
        InputError: an unknown pass or strategy; no main function; shardings or rules that do not fit the graph.
    """
    options = options or PropagationOptions()
    if name not in get_args(PassName):
        raise InputError(f"unknown propagation pass {name!r}; legal: {', '.join(get_args(PassName))}")
    if options.strategy not in _STRATEGIES:
        raise InputError(f"unknown propagation strategy {options.strategy!r}; legal: {', '.join(_STRATEGIES)}")
    main = _main(graph)
    check_graph(graph)
    bare = PropagationState(graph, main, [None] * len(graph.ops), {})
    grouped = settle_groups(graph, bare.slots, bare.maker)
    rules = op_rules(grouped.graph, registry, conservative=options.conservative)
    state = PropagationState(grouped.graph, main, rules, grouped.constrained)
    if name == "user-priority":
        _user_priority(state, options)
    elif name == "op-priority":
        _op_priority(state, options)
    elif name == "aggressive":
        _aggressive(state, options)
    else:
        sweep(state, "basic", conservative=options.conservative)
    return Propagated(graph=state.snapshot(keep_rules=options.keep_rules), warnings=grouped.warnings)


def populate_rules(graph: PropagationGraph, registry: Registry, *, conservative: bool = False) -> PropagationGraph:
    """The graph with the rule of every op that has one."""
    check_graph(graph)
    rules = op_rules(graph, registry, conservative=conservative)
    ops = tuple(dataclasses.replace(op, rule=rule) for op, rule in zip(graph.ops, rules, strict=True))
    return dataclasses.replace(graph, ops=ops)


def op_rules(graph: PropagationGraph, registry: Registry, *, conservative: bool) -> list[ShardingRule | None]:
    """Per op the rule that it carries, or else the registry's."""
    rules: list[ShardingRule | None] = [None] * len(graph.ops)
    for i in graph.walk():
        op = graph.ops[i]
        if op.rule is not None:
            rules[i] = op.rule
        elif op.kind in (OpKind.PLAIN, OpKind.CONSTRAINT):
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


def _aggressive(state: PropagationState, options: PropagationOptions) -> None:
    for strategy in _STRATEGIES[options.strategy]:
        sweep(state, strategy, conservative=options.conservative)


def _op_priority(state: PropagationState, options: PropagationOptions) -> None:
    if not options.run_op_priority:
        _aggressive(state, options)
        return
    for level in range(LEVELS):
        directions = op_directions(state, level)
        for strategy in _STRATEGIES[options.strategy]:
            sweep(state, strategy, directions, conservative=options.conservative)


def _user_priority(state: PropagationState, options: PropagationOptions) -> None:
    reserved = hide_priorities(state)
    _op_priority(state, options)
    finished = 0
    for priority, places in reserved.items():
        if options.dump is not None:
            options.dump(state.snapshot(keep_rules=True), f"00.propagation_after_user_priority_{finished}.mlir")
        restore_priority(state, priority, places)
        _op_priority(state, options)
        finished = priority


def _main(graph: PropagationGraph) -> int:
    """The position of the function whose results take part."""
    names = [function.name for function in graph.functions]
    if len(names) == 1:
        return 0
    if "main" not in names:
        have = f"the module has {', '.join('@' + n for n in names)}" if names else "the module has no function"
        raise InputError(f"propagation needs a function @main, or only one function; {have}; rename the entry function to @main")
    return names.index("main")


LEVELS = 5
"""Of op-priority; see ``op_directions``."""


def op_directions(state: PropagationState, level: int) -> Directions:
    """The directions in which ops take part at a level of op-priority.

    In every level more ops take part, in more directions; the heuristics of earlier levels stay on:

        0  ops that pass a sharding through, where every operand that is no scalar has this one use
        1  the same ops without that condition
        2  all ops, along factors that pass through; broadcasts only backward
        3  all ops along all factors; broadcasts only backward
        4  everything both ways
    """

    def directions(op: int, rule: ShardingRule) -> tuple[Direction, ...]:
        node = state.graph.ops[op]
        flow = node.traits & (Traits.ELEMENTWISE | Traits.PASS | Traits.PASS_FORWARD | Traits.BROADCAST)
        single = level > 0 or not flow or all(len(state.users[v]) == 1 for v in node.operands if state.ranks[v])
        return _directions(rule, flow, level, single)

    return directions


@lru_cache(maxsize=65536)
def _directions(rule: ShardingRule, flow: Traits, level: int, single: bool) -> tuple[Direction, ...]:
    passing = Direction.NONE
    if single:
        if flow & (Traits.ELEMENTWISE | Traits.PASS):
            passing = Direction.BOTH
        elif flow & Traits.PASS_FORWARD:
            passing = Direction.FORWARD
    everywhere = Direction.BACKWARD if flow & Traits.BROADCAST and level < 4 else Direction.BOTH
    return tuple(
        passing | everywhere if level > 2 or (level == 2 and rule.passes_through(factor)) else passing for factor in range(len(rule.sizes))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """A place whose sharding has dims of lower priority, and that sharding as given."""

    slot: int
    given: TensorSharding
    op: int


def hide_priorities(state: PropagationState) -> dict[int, list[Reserved]]:
    """Leave only dims of priority 0 in effect; the places that hold others, by ascending priority.

    Their dims are closed and empty, and their axes kept from all other use, until user-priority brings them back, priority after
    priority, with a full op-priority propagation in between.
    """
    found: dict[int, list[Reserved]] = {}
    for slot, op in _places(state):
        given = state.stepper.sharding(state.numbers[slot])
        if given is None:
            continue
        for priority in sorted({dim.priority or 0 for dim in given.dims} - {0}):
            found.setdefault(priority, []).append(Reserved(slot=slot, given=given, op=op))
        state.numbers[slot] = state.stepper.number(_initial(given, state.stepper.mesh(given.mesh)))
    return dict(sorted(found.items()))


def restore_priority(state: PropagationState, priority: int, places: list[Reserved]) -> None:
    """Bring the dims of one priority back into effect."""
    for place in places:
        if place.op >= 0 and state.erased[place.op]:
            continue
        now = state.stepper.sharding(state.numbers[place.slot])
        if now is None:
            continue
        back: set[AxisRef] = set()
        dims = list(now.dims)
        for position, dim in enumerate(place.given.dims):
            if (dim.priority or 0) == priority:
                dims[position] = DimSharding(dim.axes, dim.open)
                back.update(dim.axes)
        replicated = tuple(axis for axis in now.replicated if axis not in back)
        state.numbers[place.slot] = state.stepper.number(dataclasses.replace(now, dims=tuple(dims), replicated=replicated))


def _places(state: PropagationState) -> list[tuple[int, int]]:
    """All slots with a sharding of their own, and the op they belong to (-1: none); targets of edges are left out."""
    graph = state.graph
    covered = {value for flow in state.flows.values() for value in flow.targets}
    found = []
    for function, slots in zip(graph.functions, state.result_slots, strict=True):
        found += [(value, -1) for value in function.body.arguments if value not in covered]
        found += [(slot, -1) for slot in slots]
    for op in state.order:
        node = graph.ops[op]
        found += [(value, op) for value in node.results if value not in covered]
        if node.kind in (OpKind.MANUAL, OpKind.NAMED):
            found += [(slot, op) for slot in state.in_slots[op] if state.value_of[slot] not in covered]
    return [(slot, op) for slot, op in found if state.numbers[slot] != NO_SHARDING]


def _initial(given: TensorSharding, mesh: MeshSpec) -> TensorSharding:
    """The sharding with only its dims of priority 0; the axes of the others are kept replicated."""
    dims, replicated = [], list(given.replicated)
    for dim in given.dims:
        if dim.priority:
            replicated.extend(dim.axes)
            dims.append(DimSharding())
        else:
            dims.append(DimSharding(dim.axes, dim.open))
    names = [name for name, _ in mesh.axes]
    replicated.sort(key=lambda axis: (names.index(axis[0]), axis[1], axis[2]))
    return dataclasses.replace(given, dims=tuple(dims), replicated=tuple(replicated))


def check_graph(graph: PropagationGraph) -> None:
    """Hold all shardings and the rules that ops carry against their laws; messages name the op and the value.

    Raises:
        InputError: a sharding that breaks a law (see ``sharding.check_sharding``), or a rule that does not fit its op.
    """
    known: set[tuple[TensorSharding, int | None]] = set()

    def check(sharding: TensorSharding | None, value: int, where: str) -> None:
        if sharding is not None:
            shape = graph.values[value].shape
            rank = None if shape is None else len(shape)
            if (sharding, rank) not in known:
                check_sharding(sharding, graph.meshes, rank, where)
                known.add((sharding, rank))

    for function in graph.functions:
        for value in function.body.arguments:
            check(graph.values[value].sharding, value, f"argument {graph.values[value].name} of @{function.name}")
        returned = graph.ops[function.body.ops[-1]].operands if function.body.ops else ()
        for position, (value, sharding) in enumerate(zip(returned, function.result_shardings, strict=False)):
            check(sharding, value, f"result {position} of @{function.name}")
    for i in graph.walk():
        op = graph.ops[i]
        for value in op.results:
            check(graph.values[value].sharding, value, f"{graph.values[value].name} of {op.name}")
        if op.kind in (OpKind.MANUAL, OpKind.NAMED):
            if op.in_shardings is not None and len(op.in_shardings) != len(op.operands):
                raise InputError(f"{named(graph, op)}: {len(op.in_shardings)} in_shardings for {len(op.operands)} operands; give one each")
            for position, (value, sharding) in enumerate(zip(op.operands, op.in_shardings or (), strict=False)):
                check(sharding, value, f"in_shardings {position} of {named(graph, op)}")
        if op.kind is OpKind.CALL and all(op.callee != function.name for function in graph.functions):
            have = ", ".join("@" + function.name for function in graph.functions)
            raise InputError(f"{named(graph, op)} calls @{op.callee}, which is not in the module; it has {have}")
        if op.rule is not None:
            fit_rule(graph, op, op.rule)


def fit_rule(graph: PropagationGraph, op: GraphOp, rule: ShardingRule) -> None:
    """Hold a rule against the op it is for: as many operands and results, and as many dims each.

    Raises:
        InputError: they differ, or the rule breaks a law (see ``graph.check_rule``).
    """
    operands, results = _ranks(graph, op.operands), _ranks(graph, op.results)
    if not _fits(rule, operands, results):
        raise InputError(
            f"{named(graph, op)}: the sharding rule {rule} does not fit the op, whose operands have {list(operands)} dims and whose "
            f"results {list(results)}; write one list of factors per dim"
        )
    try:
        _lawful(rule)
    except InputError as error:
        raise InputError(f"{named(graph, op)}: {error}") from None


def named(graph: PropagationGraph, op: GraphOp) -> str:
    """An op for a person to read: ``stablehlo.add (%3)``."""
    return f"{op.name} ({', '.join(graph.values[v].name for v in op.results)})" if op.results else op.name


def _ranks(graph: PropagationGraph, values: Sequence[int]) -> tuple[int, ...]:
    return tuple(len(graph.values[value].shape or ()) for value in values)


@lru_cache(maxsize=65536)
def _lawful(rule: ShardingRule) -> None:
    check_rule(rule, f"the sharding rule {rule}")


@lru_cache(maxsize=65536)
def _fits(rule: ShardingRule, operands: tuple[int, ...], results: tuple[int, ...]) -> bool:
    def ranks(tensors: tuple[FactorDims, ...]) -> tuple[int, ...]:
        return tuple(len(dims) for dims in tensors)

    return ranks(rule.operands) == operands and ranks(rule.results) == results
