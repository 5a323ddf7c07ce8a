"""What becomes of gradients until the optimizer steps: summed over microbatches, reduced in a dtype of their own, clipped to a norm.

A step of N microbatches runs the program N times and then the update once. Where N > 1 every trained parameter's gradient has two
nodes more. ACCUMULATE is its way from where it is made into the accumulator, taken N times: as it is (an alias: the addition reads
the producer's bytes), or resharded first (a copy: the bytes that arrive live until they are added). ACCUMULATOR, tied to it,
owns the accumulator's bytes for the whole step. The gradient's optimizer reshard then starts from the accumulator, once. So an
accumulator may be

- unreduced, ``P(sum)``, and reduced once: DDP's ``no_sync`` (Li et al., "PyTorch Distributed", VLDB 13(12), 2020, section 3.2.4),
  ZeRO-1;
- cut, each microbatch's gradient reduce-scattered into it: ZeRO-2 and 3 (Rajbhandari et al., "ZeRO", SC 2020), FSDP2;
- cut inside a node and unreduced across nodes: FSDP2's ``set_requires_all_reduce`` for hybrid sharding.

**Memory traffic.** The addition reads what arrives and the accumulator, and writes the accumulator, N times (the first one too: it
is added to zeros). A conversion to the reduce dtype before a collective reads the gradient and writes the buffer that is
communicated, as FSDP2's copy into its reduce-scatter input does; into an accumulator of the gradient's own layout the addition
converts on the way. (A kernel that adds weight gradients up as it makes them, Megatron-LM's ``gradient_accumulation_fusion``, pays
less; it is not modelled.) That a loss is a mean over N microbatches is a factor of 1/N in the loss, and free.

**In place.** What a reduction leaves lies inside the accumulator's bytes wherever a device could cut it from the whole of what it
accumulates: NCCL's all_reduce and reduce_scatter work in place.

**Clipping** needs the norm of all gradients. Each device sums the squares of the slices that its optimizer states read, one
all-reduce of one f32 sums over the axes that cut any state (CLIP chooses them), and each slice is scaled:
``torch.nn.utils.clip_grad_norm_`` in the sharded form that torchtitan and FSDP2 run.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import numpy as np

from solver_shard.choice.graph import FORBIDDEN, Ints
from solver_shard.choice.tables import Layouts, equal_table
from solver_shard.costs.layouts import free_moves, legal_layouts
from solver_shard.costs.model import CostModel
from solver_shard.layout import Layout, R

LINEAR = ("avg", "sum")
"""Pending reductions that may wait until after the addition."""

NORM_BYTES = 4
"""Of the norm that all devices of a group sum up: one f32."""


def accumulator_layouts(
    shape: Sequence[int], mesh_shape: Sequence[int], pending: Collection[str], wholes: Sequence[str] | None = None
) -> Layouts:
    """What an accumulator may be laid out as, where the gradient can be made with these reductions ``pending``.

    ``wholes``: as of ``legal_layouts``, where several axes may cut one dim in either order.
    """
    return legal_layouts(shape, mesh_shape, tuple(reduction for reduction in LINEAR if reduction in pending), wholes)


def addition_ns(aliases: int, own: Ints, held: Ints, dtype: str, costs: CostModel) -> Ints:
    """Time of adding once, per strategy of ACCUMULATE: the first ``aliases`` read the gradient as made, the others as it arrives.

    Args:
        own, held: bytes per device of the strategy's layout in the gradient's dtype, and in the accumulator's.
    """
    arriving = np.where(np.arange(len(own)) < aliases, own, held)
    return costs.compute_ns(0, arriving + 2 * held, dtype)


def conversion_ns(own: Ints, held: Ints, dtype: str, costs: CostModel) -> Ints:
    """Time of bringing a gradient into the reduce dtype: it is read in its own (bytes ``own``), and written."""
    return costs.compute_ns(0, own + held, dtype)


def in_place_table(held: Layouts, need: Layouts, moves: Ints) -> Ints:
    """The way from an accumulator to the update: in its own bytes where they hold the result, else to a copy.

    ``moves`` has the transitions' costs, (held, need); the table's columns are ``need`` twice.
    """
    whole = tuple(Layout(R if p.is_partial else p for p in layout) for layout in held)
    inside = free_moves(whole, need)
    return np.concatenate([np.where(inside, moves, FORBIDDEN), np.where(inside, FORBIDDEN, moves)], axis=1)


def arrival_table(held: Layouts, alias: Layouts, need: Layouts, moves: Ints) -> Ints:
    """The way of a gradient to its accumulator: as it is, or to a copy where that has another layout."""
    same = equal_table(held, need) == 0
    return np.concatenate([equal_table(held, alias), np.where(same, FORBIDDEN, moves)], axis=1)


def norm_axes(mesh_shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Every set of axes over which a norm may be summed, smallest first; axes of one device are in none."""
    live = [a for a, size in enumerate(mesh_shape) if size > 1]
    return tuple(itertools.chain.from_iterable(itertools.combinations(live, k) for k in range(len(live) + 1)))


def norm_table(groups: Sequence[tuple[int, ...]], states: Layouts) -> Ints:
    """A norm that is summed over some axes may leave out none that cuts a state."""
    cut = [{a for a, placement in enumerate(layout) if placement.is_shard} for layout in states]
    return np.array([[0 if axes <= set(group) else FORBIDDEN for axes in cut] for group in groups], dtype=np.int64)
