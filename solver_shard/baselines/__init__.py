"""What other tools and simple rules decide, as masks: which strategies of a choice graph they leave.

A baseline decides for the nodes of sources and ops, some for more; the solver completes the rest at the least cost. So its plan is priced
as every plan is (``pipeline.plan_program`` with ``baseline``), and its masks are a hint from which a search may start
(``baselines.hints``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from solver_shard.graph.choice_graph import Bools, Masks
from solver_shard.graph.nodes import Lowering, OpNode, SourceNode
from solver_shard.layout import Layout
from solver_shard.program import Program
from solver_shard.text import fold_names

if TYPE_CHECKING:
    from solver_shard.graph.build import Lowered

Baseline = Callable[["Lowered"], tuple[Masks, str]]
"""What it leaves of a lowered program's graph, and what a plan records of it (``Options.propagation``)."""

MAX_NAMES = 8


def deciding(
    lowering: Lowering,
    stored: Mapping[int, Layout],
    agreeing: Callable[[int], Bools],
    nodes: Collection[int] | None = None,
) -> tuple[Masks, tuple[int, ...]]:
    """Per node of a source or an op, the strategies that do what a walk decides; and the ops of which that cannot be said.

    Args:
        stored: layouts of the sources, by tensor.
        agreeing: the strategies of an op, by its position, that do what is decided; none where that cannot be said.
        nodes: those that are restricted; all by default.
    """
    masks: dict[int, Bools] = {}
    missing = []
    for v, node in enumerate(lowering.nodes):
        if nodes is not None and v not in nodes:
            continue
        if isinstance(node, SourceNode):
            keep = np.array([layout == stored[node.tensor] for layout in node.layouts])
        elif isinstance(node, OpNode):
            keep = agreeing(node.op)
            if not keep.any():
                missing.append(node.op)
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
