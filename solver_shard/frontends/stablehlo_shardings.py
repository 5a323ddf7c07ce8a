"""Meshes, shardings and rules between the sdy dialect's attributes and this library's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from solver_shard.annotations import AxisRef, DimSharding, MeshSpec, TensorSharding
from solver_shard.errors import InputError
from solver_shard.frontends.stablehlo_bindings import Bindings
from solver_shard.propagation.rule import ShardingRule


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
