"""Graphs built by hand, for tests that need no StableHLO."""

from __future__ import annotations

from shardy.annotation_text import parse_rule, parse_sharding

from solver_shard.shardy.graph import Block, Function, GraphOp, GraphValue, OpKind, PropagationGraph, ShardingRule, Traits
from solver_shard.shardy.sharding import MeshSpec, TensorSharding

MESHES = {"mesh": MeshSpec(axes=(("a", 2), ("b", 4)))}


def sharding(dims: str | None) -> TensorSharding | None:
    """``[{"a"}, {?}]`` over the mesh of this module."""
    return None if dims is None else parse_sharding(f"<@mesh, {dims}>", MESHES)


def chain(length: int, first: str | None, last: str | None = None) -> PropagationGraph:
    """x -> op -> op -> ... -> return, element-wise, of 8 x 4."""
    values = tuple(
        GraphValue(name=f"%{i}", shape=(8, 4), dtype="f32", sharding=sharding(first) if i == 0 else None) for i in range(length + 1)
    )
    ops = tuple(GraphOp(name="tanh", operands=(i,), results=(i + 1,), traits=Traits.ELEMENTWISE | Traits.PURE) for i in range(length))
    end = GraphOp(name="return", operands=(length,), kind=OpKind.RETURN)
    body = Block(arguments=(0,), ops=tuple(range(length + 1)))
    main = Function(name="main", body=body, result_shardings=(sharding(last),))
    return PropagationGraph(values=values, ops=(*ops, end), functions=(main,), meshes=MESHES)


def pointwise(graph: PropagationGraph, op: int, *, conservative: bool) -> ShardingRule | None:
    """A registry where all ops correspond dim by dim."""
    return parse_rule("<([i, j])->([i, j]) {i=8, j=4}>")
