"""The devices of a mesh as threads of this process, each with a compiled step of its own: what real processes do, without starting any."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from solver_shard.mesh import Mesh
from solver_shard.ops.implementations import free
from solver_shard.ops.shards import groups, reduce
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.runtime.collectives import Exchange, Move, all_reduce_over, in_turn
from solver_shard.runtime.step import Compiled, compile_step

Buffers = dict[int, torch.Tensor]


class Meeting:
    """Where all devices put a buffer, and each takes what it needs of the others'."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.barrier, self.buffers = mesh, threading.Barrier(mesh.size, timeout=60), Buffers()

    def share(self, device: int, buffer: torch.Tensor, take: Callable[[Buffers], torch.Tensor]) -> torch.Tensor:
        self.buffers[device] = buffer
        self.barrier.wait()
        made = take(self.buffers)
        self.barrier.wait()
        return made


class Device:
    """A communicator, for one device."""

    def __init__(self, meeting: Meeting, device: int) -> None:
        self.meeting, self.device, self.counts = meeting, device, Counter[tuple[str, tuple[str, ...], int]]()

    def stages(self, exchange: Exchange) -> tuple[Move, ...]:
        def call(buffer: torch.Tensor) -> torch.Tensor:
            self.counts[exchange.kind, exchange.axes, exchange.called_with(buffer)] += 1
            return self.meeting.share(self.device, buffer, lambda buffers: self._made(exchange, buffers))

        return exchange.pack, call, exchange.unpack

    def _made(self, exchange: Exchange, buffers: Buffers) -> torch.Tensor:
        members = [buffers[member] for member in exchange.members]
        place, size = exchange.members.index(self.device), len(members)
        if exchange.kind == "all_gather":
            return torch.cat(members)
        if exchange.kind == "all_to_all":
            return torch.cat([member.chunk(size)[place] for member in members])
        total = reduce(members, exchange.reduction)
        return total if exchange.kind == "all_reduce" else total.chunk(size)[place].clone()

    def all_reduce(self, axes: Sequence[str], reduction: str, nbytes: int | None = None) -> Move:
        return in_turn(self.stages(all_reduce_over(axes, reduction, self.meeting.mesh, self.device, nbytes)))

    def free(self, axes: Sequence[int], reduction: str) -> Move:
        teams = groups(tuple(axes), self.meeting.mesh)

        def run(buffer: torch.Tensor) -> torch.Tensor:
            return self.meeting.share(
                self.device, buffer, lambda buffers: free(reduction, [buffers[d] for d in sorted(buffers)], teams)[self.device]
            )

        return run


def compiled(plan: Plan, program: Program) -> list[tuple[Compiled, Device]]:
    """A step for every device."""
    meeting = Meeting(plan.mesh)
    devices = [Device(meeting, device) for device in range(plan.mesh.size)]
    return [(compile_step(plan, program, device=d.device, communicator=d), d) for d in devices]


def together(work: Sequence[Callable[[], object]]) -> None:
    """Run one function per device at the same time; the first error is raised."""
    failed: list[BaseException] = []

    def guarded(run: Callable[[], object]) -> None:
        try:
            run()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(run,)) for run in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise next((error for error in failed if not isinstance(error, threading.BrokenBarrierError)), failed[0])
