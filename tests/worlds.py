"""Tensors on all devices of a simulated mesh."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.ops.shards import Parts, local_move
from solver_shard.runtime.collectives import StepLike, in_turn, prepare
from solver_shard.verification.simulate import World


def after_step(world: World, parts: Parts, step: StepLike, shape: Sequence[int]) -> Parts:
    """The parts of a tensor of this global shape after one step of a transition."""

    def work(device: int) -> torch.Tensor:
        exchange = prepare(step, tuple(shape), world.mesh, device)
        return in_turn((exchange.pack,) if exchange.is_local else world.member(device).stages(exchange))(parts[device])

    return tuple(world.each(work))


def moved(parts: Parts, before: Layout, after: Layout, shape: Sequence[int], mesh: Mesh) -> Parts:
    """The parts of a tensor in another layout, without communication; InternalError where some device would need what another holds."""
    moves = (local_move(before, after, tuple(shape), mesh, device) for device in range(mesh.size))
    return tuple(part if move is None else move(part) for part, move in zip(parts, moves, strict=True))
