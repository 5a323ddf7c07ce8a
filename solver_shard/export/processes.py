"""The devices of a real mesh: collectives among processes, and what has run of them.

>>> processes = Processes(mesh, device_mesh)
>>> for stage in processes.stages(prepare(step, shape, mesh, processes.device)):
...     part = stage(part)               # pack, a collective among the processes of the group, unpack
>>> processes.recorded()
(Recorded(kind='all_gather', axes=('dp',), nbytes=4096, count=1),)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from solver_shard.errors import InternalError
from solver_shard.export.exchange import Exchange, Move, all_reduce_over, in_turn
from solver_shard.export.implementations import FREE
from solver_shard.export.shards import group_of
from solver_shard.mesh import Mesh
from solver_shard.plan.plan import Inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Collectives of one kind and size that have run.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce or all_to_all; exchange for what brings tokens to the devices of their experts,
            which a plan does not list (see ``Processes.inside``).
        axes: names of the mesh axes that took part, as one group.
        nbytes: bytes of each call on this device: gathered output, input before a scatter, or the buffer. Device 0 has the fullest
            shards, so its numbers are the plan's.
        count: how many ran.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    count: int


class Processes:
    """One process of a mesh.

    Attributes:
        mesh: the plan's.
        device_mesh: with the axes of ``mesh``; its process groups are used, those over several axes are made when first prepared,
            by all processes alike.
        device: number of this process's device in ``mesh``.
    """

    def __init__(self, mesh: Mesh, device_mesh: DeviceMesh) -> None:
        self.mesh, self.device_mesh = mesh, device_mesh
        at = device_mesh.get_coordinate()
        assert at is not None, "the process is one of the mesh"
        self.device = sum(c * math.prod(mesh.shape[axis + 1 :]) for axis, c in enumerate(at))
        self.counts: Counter[tuple[str, tuple[str, ...], int]] = Counter()
        self._averages = device_mesh.device_type != "cuda"  # gloo has no average
        self._groups: dict[tuple[int, ...], str] = {}

    def recorded(self) -> tuple[Recorded, ...]:
        """What has run since the last ``reset``, sorted."""
        return tuple(Recorded(kind=kind, axes=axes, nbytes=nbytes, count=n) for (kind, axes, nbytes), n in sorted(self.counts.items()))

    def reset(self) -> None:
        """Forget what has run."""
        self.counts.clear()

    def stages(self, exchange: Exchange) -> tuple[Move, ...]:
        """One step, from the local tensor before it to the one after it: what is sent, what comes, what is made of that."""
        pack, counts = exchange.pack, self.counts
        kind, axes, nbytes = exchange.kind, exchange.axes, exchange.nbytes

        def packed(part: torch.Tensor) -> torch.Tensor:
            buffer = pack(part)
            counts[kind, axes, nbytes(buffer)] += 1
            return buffer

        return packed, self._collective(exchange), exchange.unpack

    def all_reduce(self, axes: Sequence[str], reduction: str) -> Move:
        """An all-reduce within the group over these axes."""
        return in_turn(self.stages(all_reduce_over(axes, reduction, self.mesh, self.device)))

    def inside(self, axes: Sequence[int], planned: Sequence[Inside]) -> Callable[[], Callable[[str, torch.Tensor], torch.Tensor]]:
        """What an implementation asks for, one run of it after the other.

        The two reductions that a plan does not price (``FREE``: rows that lie with their experts) are all-reduces here, recorded as
        kind ``exchange``, for the rows of a real run lie in even chunks as their layout says.
        """
        reduces = [{kind: self.all_reduce(step.axes, kind) for kind in ("sum", "max", "min")} for step in planned]
        team = group_of(tuple(axes), self.mesh, self.device)
        names = tuple(self.mesh.names[axis] for axis in axes)
        total = self._total(tuple(axes), names)

        def start() -> Callable[[str, torch.Tensor], torch.Tensor]:
            left = iter(reduces)

            def reduce(reduction: str, buffer: torch.Tensor) -> torch.Tensor:
                if reduction not in FREE:
                    following = next(left, None)
                    if following is None:
                        raise InternalError(
                            f"an implementation asks for a {reduction} of {buffer.nbytes} bytes that the plan does not list"
                        )
                    return following[reduction](buffer)
                if reduction == "exchange":
                    return total(buffer)
                apart = buffer.new_zeros((len(team), *buffer.shape))
                apart[team.index(self.device)] = buffer
                return total(apart)[: team.index(self.device)].sum(0).to(buffer.dtype)

            return reduce

        return start

    def _total(self, axes: tuple[int, ...], names: tuple[str, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
        group, counts = self.group(axes), self.counts
        op = torch.ops._c10d_functional

        def run(buffer: torch.Tensor) -> torch.Tensor:
            counts["exchange", names, buffer.nbytes] += 1
            made: torch.Tensor = op.wait_tensor.default(op.all_reduce.default(buffer.contiguous(), "sum", group))
            return made

        return run

    def _collective(self, exchange: Exchange) -> Move:
        """Complex numbers go as pairs of real ones: not every backend knows them."""
        move = self._real_collective(exchange)

        def paired(buffer: torch.Tensor) -> torch.Tensor:
            if not buffer.is_complex():
                return move(buffer)
            return torch.view_as_complex(move(torch.view_as_real(buffer.contiguous())))

        return paired

    def _real_collective(self, exchange: Exchange) -> Move:
        group, size = self.group(exchange.group), len(exchange.members)
        op: Any = torch.ops._c10d_functional
        wait, reduction = op.wait_tensor.default, exchange.reduction
        divided = reduction == "avg" and self._averages
        if divided:
            reduction = "sum"
        if exchange.kind == "all_gather":
            gather = op.all_gather_into_tensor.default
            return lambda buffer: wait(gather(buffer, size, group))
        if exchange.kind == "all_to_all":
            swap = op.all_to_all_single.default

            def exchanged(buffer: torch.Tensor) -> torch.Tensor:
                pieces = [len(buffer) // size] * size
                made: torch.Tensor = wait(swap(buffer, pieces, pieces, group))
                return made

            return exchanged
        if exchange.kind == "all_reduce":
            reduce = op.all_reduce.default
            total: Move = lambda buffer: wait(reduce(buffer, reduction, group))  # noqa: E731
        else:
            scatter = op.reduce_scatter_tensor.default
            total = lambda buffer: wait(scatter(buffer, reduction, size, group))  # noqa: E731
        return (lambda buffer: total(buffer).div_(size)) if divided else total

    def group(self, axes: tuple[int, ...]) -> str:
        """Name of the process group over some axes, from left to right.

        Not of ``DeviceMesh._flatten``: once a mesh knows a flattened axis, DTensor merges its own collectives over it, and then puts
        uneven shards together wrongly (torch 2.13).
        """
        if axes not in self._groups:
            if len(axes) == 1:
                made = self.device_mesh.get_group(axes[0])
            else:
                ranks = self.device_mesh.mesh.flatten().tolist()
                members = [ranks[device] for device in group_of(axes, self.mesh, self.device)]
                made = dist.new_group(members, use_local_synchronization=True, sort_ranks=False)
            self._groups[axes] = made.group_name
        return self._groups[axes]
