"""From a graph back to the module it was read from: what the graph changed is changed in the module, and nothing else.

Erased ops are erased, new ops are made where their body lists them, and shardings, operands and rules that differ are set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from solver_shard.errors import InternalError
from solver_shard.shardy.graph import Block, GraphOp, OpKind, PropagationGraph
from solver_shard.shardy.sharding import TensorSharding
from solver_shard.shardy.stablehlo.read import OUT_SHARDING, Bindings, ModuleReading, ShardingWriter, write_rule

_SINGLE = (OpKind.CONSTRAINT, OpKind.EDGE)


def write_graph(reading: ModuleReading, graph: PropagationGraph, mlir: Bindings, context: Any) -> None:
    """Change the module of a reading to what ``graph``, made from the reading's graph, says."""
    _Writer(reading, graph, mlir, context).write()


class _Writer:
    def __init__(self, reading: ModuleReading, graph: PropagationGraph, mlir: Bindings, context: Any) -> None:
        self.old = reading.graph
        self.new = graph
        self.mlir = mlir
        self.context = context
        self.values: list[Any] = list(reading.values)
        self.values += [None] * (len(graph.values) - len(reading.values))
        self.handles = list(reading.ops)
        self.functions = reading.functions
        self.shardings = ShardingWriter(mlir, graph.meshes, context)

    def write(self) -> None:
        for before, after, handle in zip(self.old.functions, self.new.functions, self.functions, strict=True):
            self._arguments(before.body.arguments, handle)
            if after.result_shardings != before.result_shardings:
                self._dictionaries(handle, "res_attrs", after.result_shardings)
            self._make(after.body, handle.regions[0])
        listed = self.new.walk()
        for i in listed:
            if i < len(self.old.ops):
                for block, region in zip(self.new.ops[i].regions, self.handles[i].regions, strict=True):
                    self._make(block, region)
        for i in listed:
            if i < len(self.old.ops):
                self._update(i)
        self._erase(set(listed))

    def _arguments(self, arguments: Sequence[int], handle: Any) -> None:
        shardings = [self.new.values[v].sharding for v in arguments]
        if shardings != [self.old.values[v].sharding for v in arguments]:
            self._dictionaries(handle, "arg_attrs", shardings)

    def _dictionaries(self, handle: Any, name: str, shardings: Sequence[TensorSharding | None]) -> None:
        """Set the ``sdy.sharding`` of a function's arguments or results, and keep their other attributes."""
        ir = self.mlir.ir
        held = list(handle.attributes[name]) if name in handle.attributes else [{}] * len(shardings)
        made = []
        for known, sharding in zip(held, shardings, strict=True):
            items = {item.name: item.attr for item in known} if known else {}
            items.pop("sdy.sharding", None)
            if sharding is not None:
                items["sdy.sharding"] = self.shardings.one(sharding)
            made.append(ir.DictAttr.get(items, context=self.context))
        handle.attributes[name] = ir.ArrayAttr.get(made, context=self.context)

    def _make(self, block: Block, region: Any) -> None:
        """Make the new ops of a body, each before the op that follows it there."""
        if not any(i >= len(self.old.ops) for i in block.ops):
            return
        for i, following in zip(block.ops, block.ops[1:], strict=False):
            if i >= len(self.old.ops):
                anchor = next(j for j in block.ops[block.ops.index(following) :] if j < len(self.old.ops))
                self._create(i, self.handles[anchor])

    def _create(self, position: int, before: Any) -> None:
        op = self.new.ops[position]
        if op.name not in ("sdy.sharding_constraint", "sdy.data_flow_edge"):
            raise InternalError(f"a pass added {op.name}, which the StableHLO writer cannot make")
        (operand,), (result,) = op.operands, op.results
        sharding = self.new.values[result].sharding
        if sharding is None and op.kind is OpKind.CONSTRAINT:
            raise InternalError(f"a pass added a constraint on {self.new.values[operand].name} without a sharding")
        attributes = {} if sharding is None else {"sharding": self.shardings.one(sharding)}
        if op.rule is not None:
            attributes["sdy.sharding_rule"] = write_rule(op.rule, self.mlir, self.context)
        made = self.mlir.ir.Operation.create(
            op.name,
            results=[self.values[operand].type],
            operands=[self.values[operand]],
            attributes=attributes,
            loc=before.location,
            ip=self.mlir.ir.InsertionPoint(before),
        )
        self.values[result] = made.results[0]

    def _update(self, position: int) -> None:
        before, after, handle = self.old.ops[position], self.new.ops[position], self.handles[position]
        for i, (old, new) in enumerate(zip(before.operands, after.operands, strict=True)):
            if old != new:
                handle.operands[i] = self.values[new]
        if after.rule != before.rule:
            self._set(handle, "sdy.sharding_rule", None if after.rule is None else write_rule(after.rule, self.mlir, self.context))
        if after.in_shardings != before.in_shardings:
            self._set(handle, "in_shardings", None if after.in_shardings is None else self.shardings.per_value(after.in_shardings))
        given = [self.new.values[v].sharding for v in after.results]
        if given != [self.old.values[v].sharding for v in after.results]:
            self._results(after, handle, given)

    def _results(self, op: GraphOp, handle: Any, shardings: Sequence[TensorSharding | None]) -> None:
        known = [s for s in shardings if s is not None]
        if known and len(known) != len(shardings):
            raise InternalError(f"a pass gave some results of {op.name} a sharding and others none")
        if op.kind in _SINGLE:
            name = "out_sharding" if op.name in OUT_SHARDING else "sharding"
            self._set(handle, name, self.shardings.one(known[0]) if known else None)
        else:
            name = "out_shardings" if op.kind in (OpKind.MANUAL, OpKind.NAMED) else "sdy.sharding"
            self._set(handle, name, self.shardings.per_value(known) if known else None)

    def _set(self, handle: Any, name: str, attribute: Any) -> None:
        if attribute is not None:
            handle.attributes[name] = attribute
        elif name in handle.attributes:
            del handle.attributes[name]

    def _erase(self, kept: set[int]) -> None:
        """Erase what no body lists any more: readers before what they read, and regions with their op."""
        for i in reversed(self.old.walk()):
            if i not in kept:
                self.handles[i].erase()
