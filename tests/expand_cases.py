"""Random calls of ops with random layouts, and DTensor's own search on them as an oracle."""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy
from torch.distributed.tensor._ops.single_dim_strategy import (
    _dijkstra_expand_single_dim_strategy_to_mesh,
    _ShardingPlaceholder,
    _SingleDimStrategyInfo,
)

from solver_shard.expander.call import Operand, PlacedCall
from solver_shard.expander.expander import call_of, dtensor_strategies, overload
from solver_shard.expander.single_axis import Cut, Prepared, SingleAxis, mixed, of_rule, prepare
from solver_shard.layout import Layout, NamedPartial, P, Placements, R, S
from solver_shard.mesh import Mesh
from solver_shard.program import Op, Ref, Tensor
from solver_shard.rules.rulebook import build_rule
from solver_shard.rules.table import RuleTable

MESHES = ("4", "2,2", "2,3", "2,2,2")
FAMILIES = ("matmul", "pointwise", "reduction", "view", "embedding", "concat")
SIZES = (1, 2, 3, 4, 6, 8, 12, 48, 512, 1000)

logging.getLogger("torch.distributed.tensor._ops.single_dim_strategy").setLevel(logging.ERROR)  # says when a search is exhausted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call with its strategies, and what DTensor is given: the same strategies in its own words."""

    family: str
    call: PlacedCall
    given: SingleAxis
    theirs: Any
    rows: tuple[tuple[Any, ...], ...]


def random_layout(rng: random.Random, shape: Sequence[int], mesh: Mesh) -> Placements:
    """Mostly replicated and cut, sometimes partial; now and then a cut that leaves devices without a part."""
    while True:
        chosen = [rng.choice([R, R, P("sum"), *map(S, range(len(shape))), *map(S, range(len(shape)))]) for _ in mesh.axes]
        if rng.random() < 0.1:
            other = rng.choice([P("avg"), P("max")])
            chosen = [other if p == P("sum") else p for p in chosen]
        layout = Layout(chosen)
        counts = [math.prod(n for p, n in zip(layout, mesh.shape, strict=True) if p == S(d)) for d in range(len(shape))]
        if not mixed(layout) and (all(n >= c for n, c in zip(shape, counts, strict=True)) or rng.random() < 0.05):
            return layout.with_splits(mesh.shape)


def random_case(rng: random.Random, mesh: Mesh, table: RuleTable, family: str | None = None) -> Case:
    """A call of a random op of the family."""
    family = family or rng.choice(FAMILIES)
    op, inputs, given = _FAMILIES[family](rng)
    if family == "concat" and len(mesh.axes) == 3:  # three tensors of three dims have 4^9 states, which take DTensor's search minutes
        inputs = [(shape[:2], dtype) for shape, dtype in inputs[:2]]
    operands = [Operand(shape=shape, dtype=dtype, layout=random_layout(rng, shape, mesh)) for shape, dtype in inputs]
    call = call_of(op, operands, mesh, given)
    if family in ("matmul", "pointwise", "embedding"):
        found = dtensor_strategies(call)
        assert found is not None, op
        strategies = found
    else:
        tensors = [Tensor(name=f"x{i}", shape=o.sizes, dtype=o.dtype) for i, o in enumerate(operands)]
        results = [Tensor(name=f"y{i}", shape=m.sizes, dtype=m.dtype) for i, m in enumerate(call.results) if m is not None]
        made = Op(name=op, operands=tuple(range(len(tensors))), results=tuple(range(len(results))), attributes=call.attributes)
        # DTensor knows no factors: what it is not told, we do not use here either
        strategies = dataclasses.replace(of_rule(build_rule(made, tensors, results, table), mesh.shape), legal=None)
    if call.lists:  # neither search takes lists; the tensors of a list of fixed length are inputs like others
        call = dataclasses.replace(call, attributes={f"x{i}": Ref(i) for i in range(len(operands))})
    target = overload(op)
    kinds = {entry: None for entries in strategies.strategies for entry in entries}
    masks = _masks(target, operands) if any(isinstance(kind, NamedPartial) for kind in kinds) else {}
    rows = tuple(tuple(_theirs(entry, masks) for entry in entries) for entries in strategies.strategies)
    return Case(family=family, call=call, given=strategies, theirs=target, rows=rows)


def _masks(target: Any, operands: Sequence[Operand]) -> dict[str, Any]:
    from torch.distributed.tensor.placement_types import _MaskPartial

    mask = _MaskPartial(offset_shape=torch.Size(operands[0].sizes), offset_dim=0)
    return {str(mask): mask}


def _theirs(entry: Any, masks: dict[str, Any]) -> Any:
    if entry is None:
        return None
    if isinstance(entry, Cut):
        return _ShardingPlaceholder(entry.dim)
    return masks[entry.name] if isinstance(entry, NamedPartial) else Layout([entry]).to_dtensor((1,))[0]


def device_mesh(mesh: Mesh) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(mesh.size).reshape(mesh.shape))


def their_schema(case: Case, mesh: DeviceMesh) -> tuple[OpSchema, _SingleDimStrategyInfo, tuple[TensorMeta, ...]]:
    """The call as DTensor's search takes it."""
    args = []
    for operand in case.call.operands:
        spec = DTensorSpec(mesh, tuple(Layout(operand.layout).to_dtensor(case.call.mesh.shape)), tensor_meta=_meta(operand))
        args.append(OpStrategy([OpSpec(spec)]))
    info = _SingleDimStrategyInfo(
        func=lambda op, args, kwargs: [list(row) for row in case.rows],
        allow_uneven_sharding=case.given.allow_uneven_sharding,
        allow_unbacked_sharding=case.given.allow_unbacked_sharding,
    )
    metas = tuple(_meta(meta) for meta in case.call.results if meta is not None)
    return OpSchema(case.theirs, tuple(args), {}), info, metas


def _meta(meta: Any) -> TensorMeta:
    from solver_shard.tracing.joint_graph import DTYPES

    dtype = next(d for d, name in DTYPES.items() if name == meta.dtype)
    made = torch.empty(meta.sizes, dtype=dtype, device="meta")
    return TensorMeta(made.shape, made.stride(), made.dtype)


def their_search(schema: OpSchema, info: Any, metas: Any, mesh: DeviceMesh, collect: Any = None) -> OpStrategy | None:
    """What DTensor's search finds."""
    meta = metas[0] if len(metas) == 1 else metas
    return _dijkstra_expand_single_dim_strategy_to_mesh(mesh, schema, info, meta, _collect_all_matches=collect)


def their_cost(found: OpStrategy) -> float:
    return sum(row[0] for row in found.strategies[0].redistribute_cost)


def our_search_input(case: Case) -> Prepared:
    return prepare(case.call, case.given)


def _matmul(rng: random.Random) -> tuple[str, list[tuple[tuple[int, ...], str]], dict[str, Any]]:
    b, m, k, n = (rng.choice(SIZES) for _ in range(4))
    return rng.choice(
        [
            ("aten.mm.default", [((m, k), "f32"), ((k, n), "f32")], {}),
            ("aten.addmm.default", [((n,), "bf16"), ((m, k), "bf16"), ((k, n), "bf16")], {}),
            ("aten.bmm.default", [((b, m, k), "bf16"), ((b, k, n), "bf16")], {}),
        ]
    )


def _pointwise(rng: random.Random) -> tuple[str, list[tuple[tuple[int, ...], str]], dict[str, Any]]:
    shape = tuple(rng.choice(SIZES) for _ in range(rng.randint(1, 3)))
    other = tuple(1 if rng.random() < 0.15 else n for n in shape)[rng.randint(0, 1) if rng.random() < 0.3 else 0 :]
    return rng.choice(
        [
            ("aten.add.Tensor", [(shape, "f32"), (other, "f32")], {}),
            ("aten.mul.Tensor", [(shape, "bf16"), (other, "bf16")], {}),
            ("aten.div.Tensor", [(shape, "f32"), (other, "f32")], {}),
            ("aten.maximum.default", [(shape, "f32"), (other, "f32")], {}),
            ("aten.relu.default", [(shape, "f32")], {}),
            ("aten.neg.default", [(shape, "f32")], {}),
            ("aten.where.self", [(shape, "bool"), (other, "f32"), (shape, "f32")], {}),
        ]
    )


def _reduction(rng: random.Random) -> tuple[str, list[tuple[tuple[int, ...], str]], dict[str, Any]]:
    shape = tuple(rng.choice(SIZES) for _ in range(rng.randint(1, 3)))
    dim = rng.randrange(len(shape))
    return rng.choice(
        [
            ("aten.sum.dim_IntList", [(shape, "f32")], {"dim": [dim], "keepdim": rng.random() < 0.5}),
            ("aten.mean.dim", [(shape, "f32")], {"dim": [dim]}),
            ("aten.amax.default", [(shape, "f32")], {"dim": [dim]}),
            ("aten._softmax.default", [(shape, "f32")], {"dim": dim, "half_to_float": False}),
        ]
    )


def _view(rng: random.Random) -> tuple[str, list[tuple[tuple[int, ...], str]], dict[str, Any]]:
    a, b, c = (rng.choice(SIZES) for _ in range(3))
    return rng.choice(
        [
            ("aten.view.default", [((a, b, c), "f32")], {"size": [a * b, c]}),
            ("aten.view.default", [((a * b, c), "f32")], {"size": [a, b, c]}),
            ("aten.transpose.int", [((a, b, c), "f32")], {"dim0": 0, "dim1": 2}),
            ("aten.permute.default", [((a, b, c), "f32")], {"dims": [2, 0, 1]}),
            ("aten.unsqueeze.default", [((a, b), "f32")], {"dim": 1}),
            ("aten.slice.Tensor", [((a, b + 1), "f32")], {"dim": 1, "start": 0, "end": b}),
        ]
    )


def _embedding(rng: random.Random) -> tuple[str, list[tuple[tuple[int, ...], str]], dict[str, Any]]:
    rows, width, batch, length = (rng.choice(SIZES) for _ in range(4))
    return rng.choice(
        [
            ("aten.embedding.default", [((rows, width), "f32"), ((batch, length), "i64")], {}),
            (
                "aten.embedding_dense_backward.default",
                [((batch, length, width), "f32"), ((batch, length), "i64")],
                {"num_weights": rows, "padding_idx": -1, "scale_grad_by_freq": False},
            ),
        ]
    )


def _concat(rng: random.Random) -> tuple[str, list[tuple[tuple[int, ...], str]], dict[str, Any]]:
    a, b = rng.choice(SIZES), rng.choice(SIZES)
    return "aten.cat.default", [((a, rng.choice(SIZES), b), "f32") for _ in range(rng.randint(2, 3))], {"dim": 1}


_FAMILIES = {
    "matmul": _matmul,
    "pointwise": _pointwise,
    "reduction": _reduction,
    "view": _view,
    "embedding": _embedding,
    "concat": _concat,
}
