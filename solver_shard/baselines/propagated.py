"""Plans of greedy propagation: what the pins and a pass decide is kept, everything else is replicated, and conflicts are paid for.

Propagation says how tensors are laid out, not how ops get there. So the choice graph is narrowed to what it says, and the solver
completes the plan at the least cost: sources are stored as decided, optimizer states like their parameters, every op runs in a way that
agrees with the most placements of its operands and results (a result that is still to be reduced on an axis agrees with any), and what
then does not fit is a transition with a price.

>>> plan = solver_shard.propagate("gpt2", mesh="dp=4,tp=2", pins=["input_ids=S(0),R"], batch=16, seq=1024).plan
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from solver_shard.graph.build import Lowered
from solver_shard.graph.choice_graph import Masks
from solver_shard.graph.nodes import Lowering, OpNode, SourceNode, StateNode
from solver_shard.layout import Layout
from solver_shard.program import Program
from solver_shard.shardy.passes import PassName, PropagationOptions
from solver_shard.shardy.program import propagate_program
from solver_shard.text import fold_items


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Propagation:
    """A pass and its options: a baseline, for ``pipeline.plan_program``."""

    name: PassName
    options: PropagationOptions = dataclasses.field(default_factory=PropagationOptions)

    def __str__(self) -> str:
        """``user-priority``, ``aggressive (basic-then-aggressive)``: what a plan records."""
        said: list[str] = [self.options.strategy] if self.options.strategy != "aggressive" else []
        said += [] if self.options.run_op_priority else ["no op priorities"]
        return f"{self.name} ({', '.join(said)})" if said else self.name

    def __call__(self, lowered: Lowered) -> tuple[Masks, str]:
        spread = propagate_program(lowered.program, lowered.mesh, lowered.pinned, self.name, lowered.rulebook, self.options)
        return propagated_masks(lowered.lowering, spread.layouts), self.record(lowered.program, spread.lost)

    def record(self, program: Program, lost: Mapping[int, str]) -> str:
        """What a plan records: the pass, and what it decided that cannot be had."""
        if not lost:
            return str(self)
        left = fold_items([(program.tensors[t].name, what) for t, what in lost.items()])
        shown = ", ".join(f"{name} {what}" for name, what, _ in left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
        return f"{self}; left out (too many shards, or an order that only parameters may have): {shown}"


def propagated_masks(lowering: Lowering, layouts: Sequence[Layout], nodes: Collection[int] | None = None) -> Masks:
    """Per node of a source, an optimizer state or an op, the strategies that leave tensors as decided."""
    masks: dict[int, NDArray[np.bool_]] = {}
    for v, node in enumerate(lowering.nodes):
        if nodes is not None and v not in nodes:
            continue
        if isinstance(node, (SourceNode, StateNode)):
            keep = np.array([layout == layouts[node.tensor] for layout in node.layouts])
        elif isinstance(node, OpNode):
            keep = _closest(lowering, node.op, layouts)
        else:
            continue
        if keep.any():
            masks[v] = keep
    return masks


def _closest(lowering: Lowering, op: int, layouts: Sequence[Layout]) -> NDArray[np.bool_]:
    """The strategies of an op that agree with the most placements of its operands and results."""
    column, call = lowering.strategies[op], lowering.program.ops[op]
    score = np.zeros(len(column.axis_choice), dtype=np.int64)
    for held, t in zip((*column.operands, *column.results), (*call.operands, *call.results), strict=True):
        made = t in call.results
        alike = [sum(p == wanted or (made and p.is_partial) for p, wanted in zip(x, layouts[t], strict=True)) for x in held.layouts]
        score += np.array(alike, dtype=np.int64)[held.chosen]
    found: NDArray[np.bool_] = score == score.max()
    return found
