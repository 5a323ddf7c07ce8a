"""The evaluator's view of gradients between the backward pass and the update: accumulators, reduce dtype, clipping.

It recomputes from the program, the options and the cost model what lowering priced on nodes and edges of its own:

- In a step of several microbatches a gradient is added to its accumulator where it is made: what arrives and the accumulator are
  read, the accumulator is written. What arrives is the gradient as made, or in the accumulator's layout and dtype if it had to be
  communicated first. The accumulator's own bytes stay for the whole step, and the reduction after the last microbatch works in
  them unless a device gets more than its part of them.
- A gradient that is communicated in another dtype than its own is read once and written once before; with a single microbatch
  it is held in that dtype until the update, so that it is converted even where nothing is communicated.
- The norm of all gradients is one f32, all-reduced over at least every axis that cuts an optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping

from solver_shard.costs.layouts import free_move
from solver_shard.costs.memory import OptimizerState
from solver_shard.costs.model import CostModel
from solver_shard.layout import Layout, R
from solver_shard.plan.evaluate_ops import OpCheck, illegal
from solver_shard.plan.lives import ACCUMULATE
from solver_shard.plan.plan import Plan, Reshard
from solver_shard.program import Program

_GRADIENT = (ACCUMULATE, "optimizer")


class GradientCheck:
    """What happens to the gradients of one plan.

    Attributes:
        accumulates: a step has several microbatches.
    """

    def __init__(self, plan: Plan, program: Program, costs: CostModel, state: OptimizerState, ops: OpCheck) -> None:
        self.plan, self.program, self.costs, self.state, self.ops = plan, program, costs, state, ops
        self.accumulates = plan.options.microbatches > 1

    def dtype(self, t: int, purpose: str) -> str:
        """In which a tensor is communicated, and held afterwards."""
        own = self.program.tensors[t].dtype
        return (self.state.reduce_dtype or own) if purpose in _GRADIENT else own

    def converts(self, t: int, purpose: str) -> bool:
        """Whether what a reshard starts from is in another dtype than what it communicates."""
        fresh = purpose == (ACCUMULATE if self.accumulates else "optimizer")
        return fresh and self.dtype(t, purpose) != self.program.tensors[t].dtype

    def held_bytes(self, t: int, layout: Layout) -> int:
        """Bytes per device of an accumulator."""
        return self.ops.local_bytes(t, layout, self.dtype(t, ACCUMULATE))

    def in_place(self, reshard: Reshard) -> bool:
        """Whether every device cuts its part of the reduced gradient from its own part of the accumulator."""
        whole = Layout(R if placement.is_partial else placement for placement in reshard.source)
        return free_move(whole, reshard.layout)

    def traffic_nanoseconds(self, reshard: Reshard) -> int:
        """Time of converting and adding, each time that the reshard runs."""
        t, own = reshard.tensor, self.program.tensors[reshard.tensor].dtype
        other = self.dtype(t, reshard.purpose)
        total = 0
        if reshard.copy and self.converts(t, reshard.purpose):
            moved = self.ops.local_bytes(t, reshard.source, own) + self.ops.local_bytes(t, reshard.source, other)
            total += int(self.costs.compute_ns(0, moved, own))
        if reshard.purpose == ACCUMULATE:
            arriving = self.ops.local_bytes(t, reshard.layout, other if reshard.copy else own)
            total += int(self.costs.compute_ns(0, arriving + 2 * self.held_bytes(t, reshard.layout), own))
        return total

    def norm_nanoseconds(self, states: Mapping[int, Layout]) -> int:
        """Check the all-reduce of the gradient norm; its time."""
        clip, mesh = self.plan.clip, self.plan.mesh
        if not self.plan.options.clip or not states:
            if clip is not None:
                illegal("it reduces a gradient norm, but nothing is clipped")
            return 0
        needed = {mesh.names[a] for layout in states.values() for a, placement in enumerate(layout) if placement.is_shard}
        axes = () if clip is None else clip.axes
        if not needed <= set(axes):
            illegal(f"the gradient norm is summed over {', '.join(axes) or 'no axis'}, but states are cut by {', '.join(sorted(needed))}")
        if clip is None:
            return 0
        nanoseconds = self.costs.collective_ns("all_reduce", tuple(mesh.index(name) for name in axes), 4)
        if (clip.kind, clip.nbytes, clip.nanoseconds) != ("all_reduce", 4, nanoseconds):
            illegal(f"the gradient norm is an all_reduce of 4 bytes in {nanoseconds} ns, not {clip}")
        return nanoseconds
