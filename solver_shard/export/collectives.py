"""Collectives among all devices of a mesh, simulated in one process by torch's LocalTensorMode.

Each step of a transition is one functional collective on flat buffers, padded to equal sizes as a real run pads uneven
shards. Which elements a device sends and where it puts what it receives follows from the layouts before and after the
step alone, so a step that is not what it says (rows that would come from a device outside the group, say) is an error:

>>> with World(Mesh.parse("2,2")) as world:
...     parts = world.run(parts, Step(kind="all_gather", axes=("d1",), before=S(0)S(0), after=S(0)R, ...), shape)
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from solver_shard.errors import InputError, InternalError
from solver_shard.export.exchange import Exchange, StepLike, all_reduce_over, prepare
from solver_shard.export.shards import Parts, groups
from solver_shard.mesh import Mesh


class World:
    """All devices of a mesh in this process; a context manager that holds a fake process group of the mesh's size.

    Attributes:
        counts: collectives run so far, by kind and axis names.
        sent: bytes that one device called them with, by the same.

    Raises:
        InputError: on entry, when the process already has a process group.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.sent: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._groups: dict[tuple[int, ...], str] = {}

    def __enter__(self) -> World:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if dist.is_initialized():
            raise InputError(
                "a plan is simulated in a process without a process group; call torch.distributed.destroy_process_group() first"
            )
        self._excepthook = sys.excepthook  # init_process_group puts one of its own in front, and leaves it there
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self.mesh.size)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._groups.clear()
        dist.destroy_process_group()
        sys.excepthook = self._excepthook

    def run(self, parts: Parts, step: StepLike, shape: Sequence[int]) -> Parts:
        """Take a tensor of this global shape through one step.

        Raises:
            InternalError: the step is not the collective that it says it is, or its buffer has another size.
        """
        for stage in self.stages(step, shape):
            parts = stage(parts)
        return parts

    def stages(self, step: StepLike, shape: Sequence[int]) -> tuple[Callable[[Parts], Parts], ...]:
        """``run`` as what is done in turn: pack, call, and unpack where device 0 makes a copy. Calling them raises what ``run`` raises."""
        made = [prepare(step, tuple(shape), self.mesh, device) for device in range(self.mesh.size)]

        def pack(parts: Parts) -> Parts:
            return tuple(exchange.pack(part) for exchange, part in zip(made, parts, strict=True))

        def unpack(received: Parts) -> Parts:
            return tuple(exchange.unpack(buffer) for exchange, buffer in zip(made, received, strict=True))

        if made[0].is_local:
            return (pack,)
        if made[0].placed:
            return pack, lambda sent: self._counted(step, made, sent), unpack
        return pack, lambda sent: unpack(self._counted(step, made, sent))

    def _counted(self, step: StepLike, made: Sequence[Exchange], sent: Parts) -> Parts:
        self.counts[step.kind, step.axes] += 1
        nbytes = max(exchange.nbytes(buffer) for exchange, buffer in zip(made, sent, strict=True))
        if nbytes != step.nbytes:
            raise InternalError(
                f"step {step.kind} on {', '.join(step.axes)}, {step.before} → {step.after}: a device calls it with {nbytes} bytes, "
                f"the plan says {step.nbytes}; please report this"
            )
        self.sent[step.kind, step.axes] += nbytes
        return self._call(made[0], sent)

    def all_reduce(self, buffers: Sequence[torch.Tensor], reduction: str, axes: Sequence[str]) -> Parts:
        """Reduce one buffer per device within the groups of these axes: a collective inside an op."""
        self.counts["all_reduce", tuple(axes)] += 1
        self.sent["all_reduce", tuple(axes)] += max(buffer.nbytes for buffer in buffers)
        return self._call(all_reduce_over(axes, reduction, self.mesh, 0), buffers)

    def _call(self, exchange: Exchange, buffers: Sequence[torch.Tensor]) -> Parts:
        """One functional collective on every device's buffer."""
        from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

        axes = exchange.group
        if axes not in self._groups:
            members = list(groups(axes, self.mesh)[0])
            self._groups[axes] = dist.new_group(members).group_name
        with LocalTensorMode(self.mesh.size):
            result: Any = exchange.call(LocalTensor(dict(enumerate(buffers))), self._groups[axes])
        return tuple(result._local_tensors[device] for device in range(self.mesh.size))
