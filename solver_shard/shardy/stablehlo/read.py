"""Between a module of jaxlib's bindings and the graph that propagation works on: ops, attributes, meshes, shardings and rules."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from solver_shard.errors import InputError
from solver_shard.shardy.graph import Block, Direction, Function, GraphOp, GraphValue, OpKind, PropagationGraph, ShardingRule, Traits
from solver_shard.shardy.sharding import AxisRef, DimSharding, MeshSpec, TensorSharding

MAX_RANK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleReading:
    """A graph and, at the same positions, the values, ops and functions of the module it was read from."""

    graph: PropagationGraph
    values: tuple[Any, ...]
    ops: tuple[Any, ...]
    functions: tuple[Any, ...]


def read_graph(module: Any, mlir: Bindings) -> ModuleReading:
    """The graph of a verified module.

    Raises:
        InputError: a shape that is not static, a tuple, or control flow between the blocks of a function.
    """
    meshes = {
        op.attributes["sym_name"].value: read_mesh(op.attributes["mesh"], mlir)
        for op in (o.operation for o in module.body.operations)
        if op.name == "sdy.mesh"
    }
    return _GraphReader(module, mlir, meshes).read()


@dataclass(slots=True)
class _GraphReader:
    module: Any
    mlir: Bindings
    meshes: dict[str, MeshSpec]
    values: list[GraphValue] = field(default_factory=list)
    ops: list[GraphOp | None] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    positions: dict[Any, int] = field(default_factory=dict)
    names: Any = None
    shardings: Any = None

    def read(self) -> ModuleReading:
        self.names = self.mlir.ir.AsmState(self.module.operation)
        self.shardings = ShardingReader(self.mlir, self.meshes)
        functions, handles = [], []
        for op in (o.operation for o in self.module.body.operations):
            if op.name == "func.func":
                functions.append(self._function(op))
                handles.append(op)
            elif len(op.regions):
                raise InputError(f"{where(op)}: {op.name} lies beside functions; a module holds meshes and functions")
        graph = PropagationGraph(
            values=tuple(self.values),
            ops=tuple(op for op in self.ops if op is not None),
            functions=tuple(functions),
            meshes=self.meshes,
        )
        return ModuleReading(graph=graph, values=tuple(self.positions), ops=tuple(self.handles), functions=tuple(handles))

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
        self.values.append(GraphValue(name=value.get_name(self.names), shape=shape, dtype=dtype, sharding=sharding))
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
        kind = KINDS.get(name, OpKind.CONSTRAINT if name in OUT_SHARDING else OpKind.PLAIN)
        if name == "stablehlo.custom_call":
            name = f"{name}@{attributes['call_target_name'].value}"
        computation = kind in (OpKind.MANUAL, OpKind.NAMED)
        plain = plain_attributes(op, self.mlir)
        self.ops[position] = GraphOp(
            name=name,
            operands=operands,
            results=results,
            kind=kind,
            traits=self._traits(name, plain, operands, results, regions, kind),
            regions=regions,
            rule=read_rule(attributes["sdy.sharding_rule"], self.mlir) if "sdy.sharding_rule" in attributes else None,
            in_shardings=self.shardings.per_value(attributes["in_shardings"]) if computation and "in_shardings" in attributes else None,
            manual_axes=tuple(self.mlir.sdy.ManualAxesAttr(attributes["manual_axes"])) if kind is OpKind.MANUAL else (),
            direction=Direction(attributes["allowed_direction"].value) if kind is OpKind.BARRIER else Direction.BOTH,
            group=attributes["group_id"].value if kind is OpKind.GROUP else None,
            callee=attributes["callee"].value if kind is OpKind.CALL else None,
            attributes=plain,
        )
        return position

    def _result_shardings(self, op: Any) -> tuple[TensorSharding | None, ...] | None:
        attributes = op.attributes
        kind = KINDS.get(op.name, OpKind.PLAIN)
        single = "out_sharding" if op.name in OUT_SHARDING else "sharding"
        if op.name in OUT_SHARDING or kind in (OpKind.CONSTRAINT, OpKind.EDGE):
            return (self.shardings.one(attributes[single]) if single in attributes else None,)
        several = "out_shardings" if kind in (OpKind.MANUAL, OpKind.NAMED) else "sdy.sharding"
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
        kind: OpKind,
    ) -> Traits:
        same = bool(operands and results) and self.values[operands[0]].shape == self.values[results[0]].shape
        inside = [op for block in regions for i in block.ops[:-1] if (op := self.ops[i]) is not None]
        pure = kind is not OpKind.RETURN and not has_side_effect(name, attributes) and all(Traits.PURE in op.traits for op in inside)
        return traits(name, same_shape=same, pure=pure)


def where(op: Any) -> str:
    """The place of an op in the text, as ``line 4``; its location where it was made elsewhere."""
    location = str(op.location)
    parts = location.removeprefix("loc(").removesuffix(")").split(":")
    if len(parts) == 3 and parts[1].isdigit():
        return f"line {parts[1]}"
    return location


_READ: Mapping[str, tuple[str, ...]] = {
    "stablehlo.all_gather": ("all_gather_dim",),
    "stablehlo.all_to_all": ("split_dimension", "concat_dimension"),
    "stablehlo.batch_norm_inference": ("feature_index",),
    "stablehlo.broadcast_in_dim": ("broadcast_dimensions",),
    "stablehlo.concatenate": ("dimension",),
    "stablehlo.convolution": ("dimension_numbers", "batch_group_count", "feature_group_count"),
    "stablehlo.custom_call": ("has_side_effect",),
    "stablehlo.dot_general": ("dot_dimension_numbers",),
    "stablehlo.fft": ("fft_length",),
    "stablehlo.gather": ("dimension_numbers",),
    "stablehlo.reduce": ("dimensions",),
    "stablehlo.reduce_scatter": ("scatter_dimension",),
    "stablehlo.reduce_window": ("window_dimensions", "window_strides", "padding"),
    "stablehlo.reverse": ("dimensions",),
    "stablehlo.scatter": ("scatter_dimension_numbers",),
    "stablehlo.select_and_scatter": ("window_dimensions", "window_strides", "padding"),
    "stablehlo.sort": ("dimension",),
    "stablehlo.transpose": ("permutation",),
    "stablehlo.triangular_solve": ("left_side", "transpose_a"),
}
"""Attributes of the ops' own definitions: the verifier has checked them."""

_NUMBERS = {
    "stablehlo.convolution": "ConvDimensionNumbers",
    "stablehlo.dot_general": "DotDimensionNumbers",
    "stablehlo.gather": "GatherDimensionNumbers",
    "stablehlo.scatter": "ScatterDimensionNumbers",
}
_REDUCING = ("stablehlo.reduce", "stablehlo.scatter")


def plain_attributes(op: Any, mlir: Bindings) -> dict[str, Any]:
    """Attributes of an op of the bindings.

    The attributes of a StableHLO op that its sharding rule depends on, as plain data by the names that StableHLO gives them.

    The members of dimension numbers (``#stablehlo.dot<lhs_batching_dimensions = [0], ...>``) are attributes of their own. Of a region
    that combines pairs of values with one op, that op's name is the attribute ``body``. All else is left out: the values of constants,
    configurations of kernels, and what anybody may hang on an op under a name of their own.
    """
    name, attributes = op.name, op.attributes
    found: dict[str, Any] = {}
    for key in _READ.get(name, ()):
        if key in attributes:
            found.update(_plain(name, key, attributes[key], mlir))
    if name in _REDUCING:
        body = _body(op)
        if body is not None:
            found["body"] = body
    return found


def _plain(op: str, name: str, attribute: Any, mlir: Bindings) -> dict[str, Any]:
    if name.endswith("dimension_numbers"):
        kind = getattr(mlir.stablehlo, _NUMBERS[op])
        numbers = kind(attribute)
        members = (m for m, accessor in vars(kind).items() if isinstance(accessor, property))
        return {m: tuple(v) if isinstance(v := getattr(numbers, m), list) else v for m in members}
    if name == "padding":
        flat = tuple(attribute)
        return {name: tuple(zip(flat[::2], flat[1::2], strict=True))}
    if name == "transpose_a":
        return {name: mlir.stablehlo.TransposeAttr(attribute).value}
    return {name: tuple(attribute) if isinstance(attribute, mlir.ir.DenseI64ArrayAttr) else attribute.value}


def _body(op: Any) -> str | None:
    """The op with which a region combines each of its first arguments with its counterpart among the others; None if it does not.

    The region of a reduction of n tensors has 2n arguments and returns n values.
    """
    if len(op.regions) != 1 or len(op.regions[0].blocks) != 1:
        return None
    block = op.regions[0].blocks[0]
    arguments = list(block.arguments)
    returned = list(block.operations)[-1].operands
    if not len(returned) or len(arguments) != 2 * len(returned):
        return None
    names = set()
    for i, value in enumerate(returned):
        maker = value.owner
        pair = {arguments[i], arguments[len(returned) + i]}
        if value in arguments or len(maker.operands) != 2 or set(maker.operands) != pair:
            return None
        names.add(maker.name)
    return names.pop() if len(names) == 1 else None


# What propagation needs to know about StableHLO, sdy and func ops beside their rules: kinds, traits, side effects.

KINDS: Mapping[str, OpKind] = {
    "sdy.sharding_constraint": OpKind.CONSTRAINT,
    "sdy.reshard": OpKind.CONSTRAINT,
    "sdy.data_flow_edge": OpKind.EDGE,
    "sdy.func_data_flow_edge": OpKind.FUNC_EDGE,
    "sdy.propagation_barrier": OpKind.BARRIER,
    "sdy.sharding_group": OpKind.GROUP,
    "sdy.manual_computation": OpKind.MANUAL,
    "sdy.named_computation": OpKind.NAMED,
    "stablehlo.while": OpKind.WHILE,
    "stablehlo.case": OpKind.CASE,
    "stablehlo.optimization_barrier": OpKind.OPT_BARRIER,
    "func.call": OpKind.CALL,
    "func.return": OpKind.RETURN,
    "stablehlo.return": OpKind.RETURN,
    "sdy.return": OpKind.RETURN,
}
"""All other ops are plain."""

OUT_SHARDING = (
    "sdy.all_gather",
    "sdy.all_reduce",
    "sdy.all_slice",
    "sdy.all_to_all",
    "sdy.collective_permute",
    "sdy.reduce_scatter",
    "sdy.replicated_to_unreduced",
    "sdy.sharded_to_unreduced",
)
"""Explicit collectives of the sdy dialect: the sharding of their result is the attribute ``out_sharding``."""

ELEMENTWISE = frozenset({
    "stablehlo.abs", "stablehlo.add", "stablehlo.and", "stablehlo.atan2", "stablehlo.cbrt", "stablehlo.ceil", "stablehlo.clamp",
    "stablehlo.compare", "stablehlo.complex", "stablehlo.convert", "stablehlo.cosine", "stablehlo.count_leading_zeros",
    "stablehlo.divide", "stablehlo.exponential", "stablehlo.exponential_minus_one", "stablehlo.floor", "stablehlo.imag",
    "stablehlo.is_finite", "stablehlo.log", "stablehlo.log_plus_one", "stablehlo.logistic", "stablehlo.maximum", "stablehlo.minimum",
    "stablehlo.multiply", "stablehlo.negate", "stablehlo.not", "stablehlo.or", "stablehlo.popcnt", "stablehlo.power", "stablehlo.real",
    "stablehlo.reduce_precision", "stablehlo.remainder", "stablehlo.round_nearest_afz", "stablehlo.round_nearest_even",
    "stablehlo.rsqrt", "stablehlo.select", "stablehlo.shift_left", "stablehlo.shift_right_arithmetic", "stablehlo.shift_right_logical",
    "stablehlo.sign", "stablehlo.sine", "stablehlo.sqrt", "stablehlo.subtract", "stablehlo.tan", "stablehlo.tanh", "stablehlo.xor",
    "sdy.sharding_constraint", "sdy.reshard", "sdy.propagation_barrier",
})  # fmt: skip

PASS = frozenset(
    {
        "stablehlo.reshape",
        "stablehlo.transpose",
        "sdy.data_flow_edge",
        "sdy.func_data_flow_edge",
        "stablehlo.custom_call@MoveToDevice",
        "stablehlo.custom_call@MoveToHost",
    }
)

PASS_FORWARD = frozenset({"stablehlo.dynamic_slice", "stablehlo.dynamic_update_slice"})

IMPURE = frozenset({
    "func.call", "stablehlo.all_gather", "stablehlo.all_reduce", "stablehlo.all_to_all", "stablehlo.async_done",
    "stablehlo.async_start", "stablehlo.collective_broadcast", "stablehlo.collective_permute", "stablehlo.composite",
    "stablehlo.infeed", "stablehlo.outfeed", "stablehlo.recv", "stablehlo.reduce_scatter", "stablehlo.rng", "stablehlo.send",
    "sdy.data_flow_edge", "sdy.func_data_flow_edge", "sdy.sharding_constraint", "sdy.sharding_group", *OUT_SHARDING,
})  # fmt: skip
"""Ops with side effects: kept though nothing reads their results; custom calls say themselves whether they have any."""

_PURE_DIALECTS = frozenset({"stablehlo", "sdy", "chlo", "mhlo", "arith", "math", "complex"})


def has_side_effect(name: str, attributes: Mapping[str, Any]) -> bool:
    """Whether an op must be kept though nothing reads its results, its regions aside."""
    return name.partition(".")[0] not in _PURE_DIALECTS or name in IMPURE or bool(attributes.get("has_side_effect", False))


def traits(name: str, *, same_shape: bool, pure: bool) -> Traits:
    """The traits of an op; ``same_shape``: its first operand and first result have one shape."""
    found = Traits.NONE
    if name in ELEMENTWISE or (name == "stablehlo.bitcast_convert" and same_shape):
        found |= Traits.ELEMENTWISE
    if name in PASS:
        found |= Traits.PASS
    if name in PASS_FORWARD:
        found |= Traits.PASS_FORWARD
    if name == "stablehlo.broadcast_in_dim":
        found |= Traits.BROADCAST
    if pure:
        found |= Traits.PURE
    return found


# Meshes, shardings and rules between the sdy dialect's attributes and this library's values.


def read_mesh(attribute: Any, mlir: Bindings) -> MeshSpec:
    """A mesh of an ``#sdy.mesh<...>`` attribute."""
    mesh = mlir.sdy.MeshAttr(attribute)
    axes = tuple((axis.name, axis.size) for axis in map(mlir.sdy.MeshAxisAttr, mesh.axes))
    return MeshSpec(axes=axes, device_ids=tuple(mesh.device_ids))


class ShardingReader:
    """Shardings of attributes, each read once; axes are resolved against the module's meshes."""

    def __init__(self, mlir: Bindings, meshes: Mapping[str, MeshSpec]) -> None:
        self._mlir = mlir
        self._meshes = meshes
        self._known: dict[Any, TensorSharding] = {}

    def one(self, attribute: Any) -> TensorSharding:
        """A ``#sdy.sharding<...>``."""
        found = self._known.get(attribute)
        if found is None:
            found = self._known[attribute] = self._read(attribute)
        return found

    def per_value(self, attribute: Any) -> tuple[TensorSharding, ...]:
        """A ``#sdy.sharding_per_value<[...]>``."""
        return tuple(self.one(a) for a in self._mlir.sdy.TensorShardingPerValueAttr(attribute).shardings)

    def _read(self, attribute: Any) -> TensorSharding:
        sdy, ir = self._mlir.sdy, self._mlir.ir
        sharding = sdy.TensorShardingAttr(attribute)
        where = sharding.mesh_or_ref
        if isinstance(where, ir.FlatSymbolRefAttr):
            mesh: str | MeshSpec = where.value
            spec = self._meshes.get(where.value)
            if spec is None:
                raise InputError(
                    f"{attribute} names mesh @{where.value}; the module has {', '.join('@' + m for m in self._meshes) or 'none'}"
                )
        else:
            mesh = spec = read_mesh(where, self._mlir)
        sizes = dict(spec.axes)
        return TensorSharding(
            mesh=mesh,
            dims=tuple(
                DimSharding(axes=self._axes(dim.axes, sizes), open=not dim.is_closed, priority=dim.priority)
                for dim in map(sdy.DimensionShardingAttr, sharding.dimension_shardings)
            ),
            replicated=self._axes(sharding.replicated_axes, sizes),
            unreduced=self._axes(sharding.unreduced_axes, sizes),
        )

    def _axes(self, attributes: Sequence[Any], sizes: Mapping[str, int]) -> tuple[AxisRef, ...]:
        found = []
        for axis in map(self._mlir.sdy.AxisRefAttr, attributes):
            part = axis.sub_axis_info
            if part is None:
                found.append(AxisRef(name=axis.name, pre=1, size=sizes[axis.name]))
            else:
                info = self._mlir.sdy.SubAxisInfoAttr(part)
                found.append(AxisRef(name=axis.name, pre=info.pre_size, size=info.size))
        return tuple(found)


class ShardingWriter:
    """Attributes of shardings, each made once."""

    def __init__(self, mlir: Bindings, meshes: Mapping[str, MeshSpec], context: Any) -> None:
        self._mlir = mlir
        self._meshes = meshes
        self._context = context
        self._known: dict[TensorSharding, Any] = {}

    def one(self, sharding: TensorSharding) -> Any:
        """A ``#sdy.sharding<...>``."""
        found = self._known.get(sharding)
        if found is None:
            found = self._known[sharding] = self._write(sharding)
        return found

    def per_value(self, shardings: Sequence[TensorSharding]) -> Any:
        """A ``#sdy.sharding_per_value<[...]>``."""
        return self._mlir.sdy.TensorShardingPerValueAttr.get([self.one(s) for s in shardings], context=self._context)

    def _write(self, sharding: TensorSharding) -> Any:
        sdy, context = self._mlir.sdy, self._context
        spec = self._meshes[sharding.mesh] if isinstance(sharding.mesh, str) else sharding.mesh
        sizes = dict(spec.axes)

        def axes(refs: Sequence[AxisRef]) -> list[Any]:
            made = []
            for ref in refs:
                whole = ref.pre == 1 and ref.size == sizes[ref.name]
                part = None if whole else sdy.SubAxisInfoAttr.get(ref.pre, ref.size, context=context)
                made.append(sdy.AxisRefAttr.get(ref.name, part, context=context))
            return made

        dims = [
            sdy.DimensionShardingAttr.get(axes(dim.axes), not dim.open, priority=dim.priority, context=context) for dim in sharding.dims
        ]
        mesh = sharding.mesh if isinstance(sharding.mesh, str) else self._mesh(sharding.mesh)
        return sdy.TensorShardingAttr.get(mesh, dims, axes(sharding.replicated), axes(sharding.unreduced), context=context)

    def _mesh(self, mesh: MeshSpec) -> Any:
        sdy, context = self._mlir.sdy, self._context
        axes = [sdy.MeshAxisAttr.get(name, size, context=context) for name, size in mesh.axes]
        return sdy.MeshAttr.get(axes, list(mesh.device_ids), context=context)


def read_rule(attribute: Any, mlir: Bindings) -> ShardingRule:
    """The rule of an ``#sdy.op_sharding_rule<...>``."""
    sdy = mlir.sdy
    rule = sdy.OpShardingRuleAttr(attribute)

    def tensors(mappings: Sequence[Any]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(
            tuple(tuple(sdy.DimMappingAttr(dim).factor_indices) for dim in sdy.TensorMappingAttr(mapping).dim_mappings)
            for mapping in mappings
        )

    return ShardingRule(
        sizes=tuple(rule.factor_sizes),
        operands=tensors(rule.operand_mappings),
        results=tensors(rule.result_mappings),
        reduction=tuple(rule.reduction_factors),
        need_replication=tuple(rule.need_replication_factors),
        permutation=tuple(rule.permutation_factors),
        blocked=tuple(rule.blocked_propagation_factors),
        custom=rule.is_custom,
    )


def write_rule(rule: ShardingRule, mlir: Bindings, context: Any) -> Any:
    """The ``#sdy.op_sharding_rule<...>`` of a rule."""
    sdy = mlir.sdy

    def tensors(mappings: Sequence[Sequence[Sequence[int]]]) -> list[Any]:
        return [
            sdy.TensorMappingAttr.get([sdy.DimMappingAttr.get(list(dim), context=context) for dim in dims], context=context)
            for dims in mappings
        ]

    return sdy.OpShardingRuleAttr.get(
        list(rule.sizes),
        tensors(rule.operands),
        tensors(rule.results),
        reduction_factors=list(rule.reduction),
        need_replication_factors=list(rule.need_replication),
        permutation_factors=list(rule.permutation),
        blocked_propagation_factors=list(rule.blocked),
        is_custom=rule.custom,
        context=context,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bindings:
    """The modules ``jaxlib.mlir.ir``, ``.dialects.sdy`` and ``.dialects.stablehlo``, and a function that makes a context."""

    ir: Any
    sdy: Any
    stablehlo: Any
    dialects: tuple[Any, ...]
    register: Any

    def context(self) -> Any:
        """A new context that knows the dialects."""
        registry = self.ir.DialectRegistry()
        self.register(registry)
        context = self.ir.Context()
        context.append_dialect_registry(registry)
        context.load_all_available_dialects()
        for dialect in self.dialects:
            dialect(context)
        return context


@functools.cache
def bindings() -> Bindings:
    """The bindings; InputError with the line to install them where jaxlib is missing.

    jaxlib's MLIR bindings, loaded when the first StableHLO module is read.

    They parse and print modules. No pass of the reference implementation is ever run.
    """
    try:
        from jaxlib.mlir import ir
        from jaxlib.mlir._mlir_libs import _jax_mlir_ext
        from jaxlib.mlir.dialects import chlo, mhlo, sdy, stablehlo
    except ImportError as error:
        raise InputError(
            f"StableHLO modules are read through jaxlib, which cannot be imported ({error}); pip install 'solver-shard[jax]'"
        ) from None
    return Bindings(
        ir=ir,
        sdy=sdy,
        stablehlo=stablehlo,
        dialects=(sdy.register_dialect, stablehlo.register_dialect, chlo.register_dialect, mhlo.register_mhlo_dialect),
        register=_jax_mlir_ext.register_dialects,
    )
