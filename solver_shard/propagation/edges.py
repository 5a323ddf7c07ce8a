"""Data-flow edges put on what control flow hands on, and taken off again with their shardings.

Without edges nothing flows through while, case, optimization barriers, manual and named computations. Modules as they are written
have none: they are added before a pass and sunk after it.

>>> sink_edges(propagate(add_edges(graph), "user-priority", registry).graph)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from solver_shard.annotations import DimSharding, MeshSpec, TensorSharding
from solver_shard.propagation.flow import axis_order, with_manual, without_manual
from solver_shard.propagation.graph import Block, Graph, Kind, Op, Traits, Value

_RESULTS = (Kind.WHILE, Kind.CASE, Kind.OPT_BARRIER, Kind.MANUAL, Kind.NAMED)
_ARGUMENTS = (Kind.MANUAL, Kind.NAMED)


def add_edges(graph: Graph) -> Graph:
    """The graph with an edge on every tensor that control flow hands on, where there is none yet; edges take over the uses.

    An edge starts with its owner's sharding. Positions are kept: edges and their results are appended.
    """
    return _Adder(graph).run()


def sink_edges(graph: Graph) -> Graph:
    """The graph without its edges, whose shardings their owners have; positions are kept."""
    owners = {op.results[0]: op.operands[0] for i in graph.walk() if (op := graph.ops[i]).kind is Kind.EDGE}
    values, ops = list(graph.values), list(graph.ops)
    for i in graph.walk():
        op = ops[i]
        changes: dict[str, object] = {}
        if op.kind in _RESULTS:
            given = {owners[e]: values[e].sharding for e in owners if owners[e] in op.results}
            _give_results(values, op.results, given)
        if op.kind in _ARGUMENTS:
            arguments = op.regions[0].arguments
            given = {owners[e]: values[e].sharding for e in owners if owners[e] in arguments}
            changes["in_shardings"] = _in_shardings(graph, op, given)
        if any(v in owners for v in op.operands) and op.kind is not Kind.EDGE:
            changes["operands"] = tuple(owners.get(v, v) for v in op.operands)
        if op.regions:
            changes["regions"] = tuple(_without_edges(graph, block) for block in op.regions)
        if changes:
            ops[i] = dataclasses.replace(op, **changes)  # type: ignore[arg-type]  # names of fields
    functions = tuple(dataclasses.replace(f, body=_without_edges(graph, f.body)) for f in graph.functions)
    return dataclasses.replace(graph, values=tuple(values), ops=tuple(ops), functions=functions)


class _Adder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values = list(graph.values)
        self.ops = list(graph.ops)
        self.edge_of: dict[int, int] = {}
        """Owner to the edge's result."""

    def run(self) -> Graph:
        graph = self.graph
        order = graph.walk()
        held = {graph.ops[i].operands[0] for i in order if graph.ops[i].kind is Kind.EDGE}
        for i in order:
            op = graph.ops[i]
            if op.kind in _RESULTS:
                for value in op.results:
                    if value not in held:
                        self._add(value, graph.values[value].sharding)
            if op.kind in _ARGUMENTS:
                for k, value in enumerate(op.regions[0].arguments):
                    if value not in held:
                        outer = op.in_shardings[k] if op.in_shardings else None
                        self._add(value, without_manual(outer, op.manual_axes) if outer is not None else None)
        for i in reversed(order):  # what a region holds comes before the op that it is a part of
            op = self.ops[i]
            changes: dict[str, object] = {}
            if any(v in self.edge_of for v in op.operands):
                changes["operands"] = tuple(self.edge_of.get(v, v) for v in op.operands)
            if op.regions:
                regions = tuple(map(self._block, op.regions))
                changes["regions"] = regions
                if not all(self.ops[j].traits & Traits.PURE for block in regions for j in block.ops[:-1]):
                    changes["traits"] = op.traits & ~Traits.PURE  # edges are never dead, nor is what holds them
            if changes:
                self.ops[i] = dataclasses.replace(op, **changes)  # type: ignore[arg-type]  # names of fields
        functions = tuple(dataclasses.replace(f, body=self._block(f.body)) for f in graph.functions)
        return dataclasses.replace(graph, values=tuple(self.values), ops=tuple(self.ops), functions=functions)

    def _add(self, owner: int, sharding: TensorSharding | None) -> None:
        value = self.graph.values[owner]
        if value.shape is None:
            return
        self.edge_of[owner] = len(self.values)
        self.ops.append(Op(name="sdy.data_flow_edge", operands=(owner,), results=(len(self.values),), kind=Kind.EDGE, traits=Traits.PASS))
        self.values.append(Value(name=f"{value.name}:edge", shape=value.shape, dtype=value.dtype, sharding=sharding))

    def _block(self, block: Block) -> Block:
        """The block with the new edges of its arguments first, and those of an op's results right after the op."""
        first = len(self.graph.ops) - len(self.graph.values)  # an edge and its result were appended together
        ops = [self.edge_of[v] + first for v in block.arguments if v in self.edge_of]
        for i in block.ops:
            ops.append(i)
            ops.extend(self.edge_of[v] + first for v in self.graph.ops[i].results if v in self.edge_of)
        return Block(arguments=block.arguments, ops=tuple(ops))


def _without_edges(graph: Graph, block: Block) -> Block:
    return Block(arguments=block.arguments, ops=tuple(i for i in block.ops if graph.ops[i].kind is not Kind.EDGE))


def _give_results(values: list[Value], results: Sequence[int], given: dict[int, TensorSharding | None]) -> None:
    """Set shardings of an op's results; where it had none, results that get none now are open."""
    said = {v: sharding for v in results if (sharding := given.get(v)) is not None}
    if not said:
        return
    mesh = next(iter(said.values())).mesh
    for v in results:
        sharding = said.get(v) or values[v].sharding or _open(values[v], mesh)
        values[v] = dataclasses.replace(values[v], sharding=sharding)


def _in_shardings(graph: Graph, op: Op, given: dict[int, TensorSharding | None]) -> tuple[TensorSharding, ...] | None:
    """The shardings that a computation declares of its operands, with what its arguments' edges say."""
    arguments = op.regions[0].arguments
    said = {v: sharding for v in arguments if (sharding := given.get(v)) is not None}
    if not said:
        return op.in_shardings
    mesh = next(iter(said.values())).mesh
    made = []
    for k, v in enumerate(arguments):
        outer = op.in_shardings[k] if op.in_shardings else None
        inner = said.get(v)
        if inner is None:
            made.append(outer or _open(graph.values[op.operands[k]], mesh))
        elif op.kind is Kind.MANUAL and outer is not None:
            made.append(with_manual(outer, inner, op.manual_axes, axis_order(graph, outer)))
        else:
            made.append(inner)
    return tuple(made)


def _open(value: Value, mesh: str | MeshSpec) -> TensorSharding:
    return TensorSharding(mesh=mesh, dims=(DimSharding(open=True),) * len(value.shape or ()))
