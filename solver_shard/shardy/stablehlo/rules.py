"""Where StableHLO ops get their sharding rules: rows of rules/stablehlo.toml, and what an op's neighbours say.

A few rules depend on more than the op: parts of a concatenation that are slices, constant start indices, a state that a random
generator reads.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from solver_shard.program import Op, Ref, Tensor
from solver_shard.rules.rulebook import build_rule
from solver_shard.rules.table import STABLEHLO, RuleTable, load_table
from solver_shard.shardy.graph import PropagationGraph, ShardingRule
from solver_shard.shardy.program import sharding_rule

CONSTANTS = ("stablehlo.constant", "sdy.constant")


class StablehloRules:
    """Rules of a graph's ops; equal ops get their rule once.

    Attributes:
        missing: names of the ops asked for that no row knows, in the order in which they came up.
    """

    def __init__(self, table: RuleTable | None = None) -> None:
        self._table = load_table(shipped=STABLEHLO) if table is None else table
        self._rules: dict[Hashable, ShardingRule | None] = {}
        self._graph: PropagationGraph | None = None
        self._makers: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}
        self.missing: list[str] = []

    def __call__(self, graph: PropagationGraph, op: int, *, conservative: bool) -> ShardingRule | None:
        """The rule of an op; None where it has none. RuleError where a row does not fit the op."""
        found = graph.ops[op]
        if found.name not in self._table:
            if found.name not in self.missing:
                self.missing.append(found.name)
            return None
        if found.results and graph.values[found.results[0]].shape is None:
            return None  # a token
        if graph is not self._graph:
            self._index(graph)
        attributes = {**found.attributes, **self._facts(graph, op)}
        operands = [_tensor(graph, v) for v in found.operands]
        results = [_tensor(graph, v) for v in found.results]
        shapes = tuple((t.shape, t.dtype) for t in operands), tuple((t.shape, t.dtype) for t in results)
        key = (found.name, *shapes, tuple(sorted(attributes.items())), conservative)
        if key not in self._rules:
            call = Op(
                name=found.name,
                operands=found.operands,
                results=found.results,
                attributes={"operands": tuple(map(Ref, range(len(operands)))), **attributes},
            )
            self._rules[key] = sharding_rule(build_rule(call, operands, results, self._table, conservative=conservative))
        return self._rules[key]

    def _index(self, graph: PropagationGraph) -> None:
        self._graph = graph
        self._makers, self._readers = {}, {}
        for i in graph.walk():
            for v in graph.ops[i].results:
                self._makers[v] = i
            for v in graph.ops[i].operands:
                self._readers.setdefault(v, []).append(i)

    def _facts(self, graph: PropagationGraph, op: int) -> dict[str, Any]:
        """What the op's rule depends on beside the op."""
        found = graph.ops[op]
        if found.name == "stablehlo.concatenate":
            makers = [self._maker(graph, v) for v in found.operands]
            sliced = tuple(name == "stablehlo.slice" for name in makers)
            origins = {
                graph.ops[self._makers[v]].operands[0] if is_slice else v for v, is_slice in zip(found.operands, sliced, strict=True)
            }
            return {"sliced": sliced, "one_origin": len(origins) == 1}
        if found.name == "stablehlo.dynamic_update_slice":
            return {"constant_start": all(self._maker(graph, v) in CONSTANTS for v in found.operands[2:])}
        if found.name == "stablehlo.custom_call@X64Combine":
            readers = (graph.ops[i].name for v in found.results for i in self._readers.get(v, ()))
            return {"feeds_rng": "stablehlo.rng_bit_generator" in readers}
        return {}

    def _maker(self, graph: PropagationGraph, value: int) -> str:
        """Name of the op that makes a value; empty for arguments."""
        i = self._makers.get(value)
        return "" if i is None else graph.ops[i].name


def _tensor(graph: PropagationGraph, value: int) -> Tensor:
    found = graph.values[value]
    return Tensor(name=found.name, shape=found.shape or (), dtype=found.dtype)
