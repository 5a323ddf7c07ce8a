"""From a parsed module to the graph that propagation works on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from solver_shard.annotations import MeshSpec, TensorSharding
from solver_shard.errors import InputError
from solver_shard.frontends.stablehlo_attributes import plain_attributes
from solver_shard.frontends.stablehlo_bindings import Bindings
from solver_shard.frontends.stablehlo_ops import KINDS, OUT_SHARDING, has_side_effect, traits
from solver_shard.frontends.stablehlo_shardings import ShardingReader, read_mesh, read_rule
from solver_shard.propagation.graph import Block, Direction, Function, Graph, Kind, Op, Traits, Value

MAX_RANK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A graph and, at the same positions, the values, ops and functions of the module it was read from."""

    graph: Graph
    values: tuple[Any, ...]
    ops: tuple[Any, ...]
    functions: tuple[Any, ...]


def read_graph(module: Any, mlir: Bindings) -> Reading:
    """The graph of a verified module.

    Raises:
        InputError: a shape that is not static, a tuple, or control flow between the blocks of a function.
    """
    meshes = {
        op.attributes["sym_name"].value: read_mesh(op.attributes["mesh"], mlir)
        for op in (o.operation for o in module.body.operations)
        if op.name == "sdy.mesh"
    }
    return _Reader(module, mlir, meshes).read()


@dataclass(slots=True)
class _Reader:
    module: Any
    mlir: Bindings
    meshes: dict[str, MeshSpec]
    values: list[Value] = field(default_factory=list)
    ops: list[Op | None] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    positions: dict[Any, int] = field(default_factory=dict)
    names: Any = None
    shardings: Any = None

    def read(self) -> Reading:
        self.names = self.mlir.ir.AsmState(self.module.operation)
        self.shardings = ShardingReader(self.mlir, self.meshes)
        functions, handles = [], []
        for op in (o.operation for o in self.module.body.operations):
            if op.name == "func.func":
                functions.append(self._function(op))
                handles.append(op)
            elif len(op.regions):
                raise InputError(f"{where(op)}: {op.name} lies beside functions; a module holds meshes and functions")
        graph = Graph(
            values=tuple(self.values),
            ops=tuple(op for op in self.ops if op is not None),
            functions=tuple(functions),
            meshes=self.meshes,
        )
        return Reading(graph=graph, values=tuple(self.positions), ops=tuple(self.handles), functions=tuple(handles))

    def _function(self, op: Any) -> Function:
        name = op.attributes["sym_name"].value
        arguments = self._dictionaries(op, "arg_attrs")
        body = self._block(op, op.regions[0], arguments) if len(op.regions[0].blocks) else Block()
        return Function(name=name, body=body, result_shardings=tuple(self._dictionaries(op, "res_attrs")))

    def _dictionaries(self, op: Any, name: str) -> list[TensorSharding | None]:
        """The shardings in a function's attributes of arguments or results."""
        kind = self.mlir.ir.FunctionType(op.attributes["function_type"].value)
        count = len(kind.inputs if name == "arg_attrs" else kind.results)
        if name not in op.attributes:
            return [None] * count
        return [self.shardings.one(d["sdy.sharding"]) if "sdy.sharding" in d else None for d in op.attributes[name]]

    def _block(self, op: Any, region: Any, shardings: list[TensorSharding | None] | None = None) -> Block:
        if len(region.blocks) != 1:
            raise InputError(f"{where(op)}: {op.name} has {len(region.blocks)} blocks; only structured control flow is supported")
        block = region.blocks[0]
        arguments = tuple(
            self._value(argument, shardings[i] if shardings is not None else None, static=False)
            for i, argument in enumerate(block.arguments)
        )
        return Block(arguments=arguments, ops=tuple(self._op(inner.operation) for inner in block.operations))

    def _value(self, value: Any, sharding: TensorSharding | None, *, static: bool) -> int:
        position = len(self.values)
        shape, dtype = self._type(value, static=static)
        self.values.append(Value(name=value.get_name(self.names), shape=shape, dtype=dtype, sharding=sharding))
        self.positions[value] = position
        return position

    def _type(self, value: Any, *, static: bool) -> tuple[tuple[int, ...] | None, str]:
        """Shape and element type; no shape for tokens, and for arguments of unknown size, which only opaque ops can read."""
        ir = self.mlir.ir
        kind = value.type
        ranked = isinstance(kind, ir.RankedTensorType)
        if ranked and kind.rank > MAX_RANK:
            raise InputError(f"{value.get_name(self.names)} is a tensor of {kind.rank} dims; at most {MAX_RANK} are read")
        if ranked and kind.has_static_shape:
            return tuple(kind.shape), str(kind.element_type)
        tensor = ranked or isinstance(kind, ir.UnrankedTensorType)
        if static and (tensor or isinstance(kind, ir.TupleType)):
            what = "a tensor whose shape is not static" if tensor else "a tuple"
            name = value.get_name(self.names)
            raise InputError(f"{where(value.owner)}: {name} of {value.owner.name} is {what}, {kind}; give every tensor static sizes")
        return None, str(kind)

    def _op(self, op: Any) -> int:
        position = len(self.ops)
        self.ops.append(None)
        self.handles.append(op)
        operands = tuple(self.positions[v] for v in op.operands)
        given = self._result_shardings(op)
        results = tuple(self._value(v, given[i] if given is not None else None, static=True) for i, v in enumerate(op.results))
        regions = tuple(self._block(op, region) for region in op.regions)
        name = op.name
        attributes = op.attributes
        kind = KINDS.get(name, Kind.CONSTRAINT if name in OUT_SHARDING else Kind.PLAIN)
        if name == "stablehlo.custom_call":
            name = f"{name}@{attributes['call_target_name'].value}"
        computation = kind in (Kind.MANUAL, Kind.NAMED)
        plain = plain_attributes(op, self.mlir)
        self.ops[position] = Op(
            name=name,
            operands=operands,
            results=results,
            kind=kind,
            traits=self._traits(name, plain, operands, results, regions, kind),
            regions=regions,
            rule=read_rule(attributes["sdy.sharding_rule"], self.mlir) if "sdy.sharding_rule" in attributes else None,
            in_shardings=self.shardings.per_value(attributes["in_shardings"]) if computation and "in_shardings" in attributes else None,
            manual_axes=tuple(self.mlir.sdy.ManualAxesAttr(attributes["manual_axes"])) if kind is Kind.MANUAL else (),
            direction=Direction(attributes["allowed_direction"].value) if kind is Kind.BARRIER else Direction.BOTH,
            group=attributes["group_id"].value if kind is Kind.GROUP else None,
            callee=attributes["callee"].value if kind is Kind.CALL else None,
            attributes=plain,
        )
        return position

    def _result_shardings(self, op: Any) -> tuple[TensorSharding | None, ...] | None:
        attributes = op.attributes
        kind = KINDS.get(op.name, Kind.PLAIN)
        single = "out_sharding" if op.name in OUT_SHARDING else "sharding"
        if op.name in OUT_SHARDING or kind in (Kind.CONSTRAINT, Kind.EDGE):
            return (self.shardings.one(attributes[single]) if single in attributes else None,)
        several = "out_shardings" if kind in (Kind.MANUAL, Kind.NAMED) else "sdy.sharding"
        if several not in attributes:
            return None
        found: tuple[TensorSharding | None, ...] = self.shardings.per_value(attributes[several])
        return found

    def _traits(
        self,
        name: str,
        attributes: Mapping[str, Any],
        operands: tuple[int, ...],
        results: tuple[int, ...],
        regions: tuple[Block, ...],
        kind: Kind,
    ) -> Traits:
        same = bool(operands and results) and self.values[operands[0]].shape == self.values[results[0]].shape
        inside = [op for block in regions for i in block.ops[:-1] if (op := self.ops[i]) is not None]
        pure = kind is not Kind.RETURN and not has_side_effect(name, attributes) and all(Traits.PURE in op.traits for op in inside)
        return traits(name, same_shape=same, pure=pure)


def where(op: Any) -> str:
    """The place of an op in the text, as ``line 4``; its location where it was made elsewhere."""
    location = str(op.location)
    parts = location.removeprefix("loc(").removesuffix(")").split(":")
    if len(parts) == 3 and parts[1].isdigit():
        return f"line {parts[1]}"
    return location
