"""Hold a graph against its laws before a pass runs over it; messages name the op and the value."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from solver_shard.annotations import TensorSharding, check_sharding
from solver_shard.errors import InputError
from solver_shard.propagation.graph import Graph, Kind, Op
from solver_shard.propagation.rule import FactorDims, ShardingRule, check_rule


def check_graph(graph: Graph) -> None:
    """Check all shardings and the rules that ops carry.

    Raises:
        InputError: a sharding that breaks a law (see ``annotations.check_sharding``), or a rule that does not fit its op.
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
        if op.kind in (Kind.MANUAL, Kind.NAMED):
            if op.in_shardings is not None and len(op.in_shardings) != len(op.operands):
                raise InputError(f"{named(graph, op)}: {len(op.in_shardings)} in_shardings for {len(op.operands)} operands; give one each")
            for position, (value, sharding) in enumerate(zip(op.operands, op.in_shardings or (), strict=False)):
                check(sharding, value, f"in_shardings {position} of {named(graph, op)}")
        if op.kind is Kind.CALL and all(op.callee != function.name for function in graph.functions):
            have = ", ".join("@" + function.name for function in graph.functions)
            raise InputError(f"{named(graph, op)} calls @{op.callee}, which is not in the module; it has {have}")
        if op.rule is not None:
            fit_rule(graph, op, op.rule)


def fit_rule(graph: Graph, op: Op, rule: ShardingRule) -> None:
    """Hold a rule against the op it is for: as many operands and results, and as many dims each.

    Raises:
        InputError: they differ, or the rule breaks a law (see ``rule.check_rule``).
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


def named(graph: Graph, op: Op) -> str:
    """An op for a person to read: ``stablehlo.add (%3)``."""
    return f"{op.name} ({', '.join(graph.values[v].name for v in op.results)})" if op.results else op.name


def _ranks(graph: Graph, values: Sequence[int]) -> tuple[int, ...]:
    return tuple(len(graph.values[value].shape or ()) for value in values)


@lru_cache(maxsize=65536)
def _lawful(rule: ShardingRule) -> None:
    check_rule(rule, f"the sharding rule {rule}")


@lru_cache(maxsize=65536)
def _fits(rule: ShardingRule, operands: tuple[int, ...], results: tuple[int, ...]) -> bool:
    def ranks(tensors: tuple[FactorDims, ...]) -> tuple[int, ...]:
        return tuple(len(dims) for dims in tensors)

    return ranks(rule.operands) == operands and ranks(rule.results) == results
