"""The part of lowering that brings gradients to the update where they are accumulated, converted or clipped.

Nodes and prices are those of :mod:`solver_shard.choice.accumulate`. Gradients that go to the update as they are made, one microbatch
in their own dtype, are not handled here: theirs is a plain reshard with purpose "optimizer".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from solver_shard.choice.accumulate import (
    NORM_BYTES,
    accumulator_layouts,
    addition_ns,
    arrival_table,
    conversion_ns,
    in_place_table,
    norm_axes,
    norm_table,
)
from solver_shard.choice.graph import FORBIDDEN, Ints, repeated
from solver_shard.choice.groups import ACCUMULATE, OPTIMIZER, Group
from solver_shard.choice.nodes import Kind, Node
from solver_shard.choice.tables import Layouts, equal_table

if TYPE_CHECKING:
    from solver_shard.choice.lower import _Lowerer


def lower_gradient(low: _Lowerer, t: int, k: int) -> None:
    """The optimizer reshard of a gradient, group ``k`` of tensor ``t``, with the accumulator that it starts from if there is one."""
    group, dtype = low.lives.groups[t][k], low._reduced_dtype(t)
    need = low._needed(t, group)
    if low.accumulates:
        producer, start, inside = _accumulator(low, t, group), low.lives.end - 1, len(need)
    else:
        producer, start, inside = low._producer(t), group.start, 0
    held = low.nodes[producer].layouts
    usages = np.concatenate([np.zeros(inside, dtype=np.int64), low._bytes(t, need, dtype)])
    node = Node(kind=Kind.RESHARD, item=t, group=k, layouts=need[:inside] + need, aliases=inside)
    v = low._add(node, np.zeros_like(usages), usages, (start, low.lives.end))
    key = _key(low, t, OPTIMIZER, held, need)
    if low.accumulates:
        low._edge(producer, v, ("reduce", key), lambda: in_place_table(held, need, low._moves(t, OPTIMIZER, held, need)))
    else:
        low._edge(producer, v, ("convert", key), lambda: _converting(low, t, OPTIMIZER, held, need))
    low._handed_over(t, v)


def lower_clipping(low: _Lowerer) -> None:
    """Over which axes the gradient norm is summed: at least those that cut any state."""
    groups = norm_axes(low.mesh_shape)
    times = np.array([low.costs.collective_ns("all_reduce", axes, NORM_BYTES) for axes in groups], dtype=np.int64)
    v = low._add(Node(kind=Kind.CLIP, item=-1, axes=groups), times, np.zeros_like(times), (0, 0))
    for p in low.program.gradients:
        state = low.index[Kind.STATE, p, 0]
        layouts = low.nodes[state].layouts
        low._edge(v, state, ("norm", layouts), lambda y=layouts: norm_table(groups, y))  # type: ignore[misc]


def _accumulator(low: _Lowerer, t: int, group: Group) -> int:
    """The node of a gradient's accumulator, and that of its way there from each microbatch."""
    tensor, dtype, producer = low.program.tensors[t], low._reduced_dtype(t), low._producer(t)
    need = accumulator_layouts(tensor.shape, low.mesh_shape, low.pending.get(t, frozenset()), low.costs.mesh.wholes)
    if low.restriction is not None:
        need = low._restricted(t, need, low.restriction.accumulator)
    held = low.nodes[producer].layouts
    alias = tuple(layout for layout in need if layout in set(held))
    layouts = alias + need
    own, kept = low._bytes(t, layouts), low._bytes(t, layouts, dtype)
    times = repeated(addition_ns(len(alias), own, kept, tensor.dtype, low.costs), low.microbatches)
    usages = np.concatenate([np.zeros(len(alias), dtype=np.int64), kept[len(alias) :]])
    v = low._add(Node(kind=Kind.ACCUMULATE, item=t, layouts=layouts, aliases=len(alias)), times, usages, (group.start, group.stop))
    key = _key(low, t, ACCUMULATE, held, need)
    low._edge(producer, v, ("arrive", key), lambda: arrival_table(held, alias, need, _arrivals(low, t, held, need)))
    node = Node(kind=Kind.ACCUMULATOR, item=t, layouts=need)
    w = low._add(node, np.zeros(len(need), dtype=np.int64), low._bytes(t, need, dtype), (0, low.lives.end))
    low._edge(v, w, ("equal", layouts, need), lambda: equal_table(layouts, need))
    return w


def _arrivals(low: _Lowerer, t: int, held: Layouts, need: Layouts) -> Ints:
    return repeated(_converting(low, t, ACCUMULATE, held, need), low.microbatches)


def _converting(low: _Lowerer, t: int, purpose: str, held: Layouts, need: Layouts) -> Ints:
    """Transitions of a gradient in the reduce dtype, with the conversion before them where that is not its own."""
    table, own, dtype = low._moves(t, purpose, held, need), low.program.tensors[t].dtype, low._reduced_dtype(t)
    if dtype == own:
        return table
    times = conversion_ns(low._bytes(t, held), low._bytes(t, held, dtype), own, low.costs)
    return np.where(table >= FORBIDDEN, FORBIDDEN, table + times[:, None])


def _key(low: _Lowerer, t: int, purpose: str, held: Layouts, need: Layouts) -> object:
    tensor = low.program.tensors[t]
    return (tensor.shape, tensor.dtype, held, need, low._scope(t, purpose), low._bucket(t, purpose))
