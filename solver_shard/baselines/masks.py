"""What a baseline decides, as the strategies of a choice graph that it leaves: a whole plan when the rest is completed, or a hint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from solver_shard.choice.fold import Folded
from solver_shard.choice.graph import FORBIDDEN
from solver_shard.choice.nodes import Lowering
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
