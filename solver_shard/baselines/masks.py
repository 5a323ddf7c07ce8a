"""What a baseline decides, as the strategies of a choice graph that it leaves: a whole plan when the rest is completed, or a hint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from solver_shard.choice.fold import Folded
from solver_shard.choice.graph import FORBIDDEN
from solver_shard.choice.nodes import Kind, Lowering
from solver_shard.layout import Layout
from solver_shard.names import fold_names
from solver_shard.program import Program

Masks = Mapping[int, NDArray[np.bool_]]
"""Node to the strategies that are left; nodes that are not named may choose freely."""

MAX_NAMES = 8


def narrowed(lowering: Lowering, masks: Masks) -> Lowering:
    """The lowering without all other strategies."""
    graph = lowering.graph
    costs = graph.costs.copy()
    for v, keep in masks.items():
        costs[graph.offsets[v] : graph.offsets[v + 1]][~keep] = FORBIDDEN
    return dataclasses.replace(lowering, graph=dataclasses.replace(graph, costs=costs))


def deciding(
    lowering: Lowering,
    stored: Mapping[int, Layout],
    agreeing: Callable[[int], NDArray[np.bool_]],
    nodes: Collection[int] | None = None,
) -> tuple[Masks, tuple[int, ...]]:
    """Per node of a source or an op, the strategies that do what a walk decides; and the ops of which that cannot be said.

    Args:
        stored: layouts of the sources, by tensor.
        agreeing: the strategies of an op, by its position, that do what is decided; none where that cannot be said.
        nodes: those that are restricted; all by default.
    """
    masks: dict[int, NDArray[np.bool_]] = {}
    missing = []
    for v, node in enumerate(lowering.nodes):
        if nodes is not None and v not in nodes:
            continue
        if node.kind is Kind.SOURCE:
            keep = np.array([layout == stored[node.item] for layout in node.layouts])
        elif node.kind is Kind.OP:
            keep = agreeing(node.item)
            if not keep.any():
                missing.append(node.item)
        else:
            continue
        if keep.any():
            masks[v] = keep
    return masks, tuple(missing)


def left_over(program: Program, missing: Sequence[int]) -> str:
    """``; left to the solver: mlp: aten.add.Tensor``: the ops of which a baseline says nothing; empty where there are none."""
    names = fold_names(f"{program.ops[i].module}: {program.ops[i].name}".removeprefix(": ") for i in missing)
    shown = ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
    return f"; left to the solver: {shown}" if names else ""


def folded_masks(masks: Masks, folded: Folded | None) -> dict[int, NDArray[np.bool_]]:
    """Masks of the free graph's nodes as those of the folded one's: what all copies leave, or the first of them where that is nothing."""
    if folded is None:
        return dict(masks)
    found: dict[int, NDArray[np.bool_]] = {}
    for v, mask in masks.items():
        c = int(folded.member[v])
        both = found[c] & mask if c in found else mask
        found[c] = both if both.any() else found[c]
    return found
