"""Collectives among all devices of a mesh, simulated in one process by torch's LocalTensorMode.

Each step of a transition is one functional collective on flat buffers, padded to equal sizes as a real run pads uneven
shards. Which elements a device sends and where it puts what it receives follows from the layouts before and after the
step alone, so a step that is not what it says (rows that would come from a device outside the group, say) is an error:

>>> with World(Mesh.parse("2,2")) as world:
...     parts = world.run(parts, Step(kind="all_gather", axes=("d1",), before=S(0)S(0), after=S(0)R, ...), shape)
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from solver_shard.errors import InputError, InternalError
from solver_shard.export.shards import Box, Parts, boxes, coordinates, covers, groups, move
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh

_LOCAL = ("slice", "local")


class StepLike(Protocol):
    """A step of a plan or of a transition path."""

    @property
    def kind(self) -> str: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def before(self) -> Layout: ...
    @property
    def after(self) -> Layout: ...


class World:
    """All devices of a mesh in this process; a context manager that holds a fake process group of the mesh's size.

    Attributes:
        counts: collectives run so far, by kind and axis names.
        sent: bytes that one device called them with, by kind.

    Raises:
        InputError: on entry, when the process already has a process group.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.sent: Counter[str] = Counter()
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
        if step.kind in _LOCAL:
            return move(parts, step.before, step.after, shape, self.mesh)
        axes = tuple(sorted(self.mesh.index(name) for name in step.axes))
        changed = {axis for axis, (a, b) in enumerate(zip(step.before, step.after, strict=True)) if a != b}
        if step.kind not in _COLLECTIVES or not changed or changed != set(axes):
            _wrong(step, f"it changes axes {', '.join(self.mesh.names[a] for a in sorted(changed)) or 'none'}")
        self.counts[step.kind, step.axes] += 1
        made, nbytes = _COLLECTIVES[step.kind](self, parts, step, axes, tuple(shape))
        if nbytes != step.nbytes:
            _wrong(step, f"a device calls it with {nbytes} bytes, the plan says {step.nbytes}")
        self.sent[step.kind] += nbytes
        return made

    def all_reduce(self, buffers: Sequence[torch.Tensor], reduction: str, axes: Sequence[str]) -> Parts:
        """Reduce one buffer per device within the groups of these axes: a collective inside an op."""
        self.counts["all_reduce", tuple(axes)] += 1
        self.sent["all_reduce"] += max(buffer.nbytes for buffer in buffers)
        group = tuple(sorted(self.mesh.index(name) for name in axes))
        return tuple(self._call(torch.ops._c10d_functional.all_reduce, list(buffers), group, reduction))

    def _call(self, op: Any, buffers: Sequence[torch.Tensor], axes: tuple[int, ...], *arguments: Any) -> list[torch.Tensor]:
        """One functional collective on every device's buffer."""
        from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

        if axes not in self._groups:
            members = list(groups(axes, self.mesh)[0])
            self._groups[axes] = dist.new_group(members).group_name
        with LocalTensorMode(self.mesh.size):
            result = op(LocalTensor(dict(enumerate(buffers))), *arguments, self._groups[axes])
            result = torch.ops._c10d_functional.wait_tensor(result)
        return [result._local_tensors[device] for device in range(self.mesh.size)]

    def _all_gather(self, parts: Parts, step: StepLike, axes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Parts, int]:
        held, wanted = boxes(step.before, shape, self.mesh), boxes(step.after, shape, self.mesh)
        longest = max(part.numel() for part in parts)
        team = groups(axes, self.mesh)
        sent = [_padded(part.reshape(-1), longest) for part in parts]
        received = self._call(torch.ops._c10d_functional.all_gather_into_tensor, sent, axes, len(team[0]))
        made = []
        for device, target in enumerate(wanted):
            members = next(g for g in team if device in g)
            chunks = received[device].split(longest) if longest else [received[device]] * len(members)
            found = [(held[m], chunk[: math.prod(held[m].length)].view(held[m].length)) for m, chunk in zip(members, chunks, strict=True)]
            made.append(_assemble(step, target, found, parts[device]))
        return tuple(made), received[0].nbytes

    def _all_to_all(self, parts: Parts, step: StepLike, axes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Parts, int]:
        held, wanted = boxes(step.before, shape, self.mesh), boxes(step.after, shape, self.mesh)
        team = groups(axes, self.mesh)
        plan = {(s, r): held[s].overlap(wanted[r]) for g in team for s in g for r in g}
        sent, longest = self._outgoing(parts, held, plan, team)
        sizes = [longest] * len(team[0])
        received = self._call(torch.ops._c10d_functional.all_to_all_single, sent, axes, sizes, sizes)
        made = []
        for device, target in enumerate(wanted):
            members = next(g for g in team if device in g)
            chunks = received[device].split(longest) if longest else [received[device]] * len(members)
            found = []
            for member, chunk in zip(members, chunks, strict=True):
                piece = plan[member, device]
                found.append((piece, chunk[: math.prod(piece.length)].view(piece.length)))
            made.append(_assemble(step, target, found, parts[device]))
        return tuple(made), sent[0].nbytes

    def _reduce_scatter(self, parts: Parts, step: StepLike, axes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Parts, int]:
        held, wanted = boxes(step.before, shape, self.mesh), boxes(step.after, shape, self.mesh)
        team = groups(axes, self.mesh)
        self._same_boxes(step, held, team)
        plan = {(s, r): held[s].overlap(wanted[r]) for g in team for s in g for r in g}
        sent, _ = self._outgoing(parts, held, plan, team)
        reduction = self._reduction(step, axes)
        received = self._call(torch.ops._c10d_functional.reduce_scatter_tensor, sent, axes, reduction, len(team[0]))
        made = []
        for device, target in enumerate(wanted):
            piece = plan[device, device]
            made.append(_assemble(step, target, [(piece, received[device][: math.prod(piece.length)].view(piece.length))], parts[device]))
        return tuple(made), sent[0].nbytes

    def _all_reduce(self, parts: Parts, step: StepLike, axes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Parts, int]:
        held = boxes(step.before, shape, self.mesh)
        self._same_boxes(step, held, groups(axes, self.mesh))
        received = self._call(torch.ops._c10d_functional.all_reduce, [p.contiguous() for p in parts], axes, self._reduction(step, axes))
        return tuple(received), max(part.nbytes for part in parts)

    def _outgoing(
        self, parts: Parts, held: Sequence[Box], plan: dict[tuple[int, int], Box], team: Sequence[Sequence[int]]
    ) -> tuple[list[torch.Tensor], int]:
        """Every device's pieces for the members of its group, in their order, each padded to the longest."""
        longest = max(math.prod(piece.length) for piece in plan.values())
        sent = []
        for device in range(len(coordinates(self.mesh))):
            members = next(g for g in team if device in g)
            own = [parts[device][plan[device, m].inside(held[device])].reshape(-1) for m in members]
            sent.append(torch.cat([_padded(piece, longest) for piece in own]))
        return sent, longest

    def _same_boxes(self, step: StepLike, held: Sequence[Box], team: Sequence[Sequence[int]]) -> None:
        if any(held[member] != held[group[0]] for group in team for member in group):
            _wrong(step, "devices of one group hold different parts")

    def _reduction(self, step: StepLike, axes: tuple[int, ...]) -> str:
        kinds = {step.before[axis].reduction if step.before[axis].is_partial else "nothing" for axis in axes}
        if len(kinds) != 1 or "nothing" in kinds or any(step.after[axis].is_partial for axis in axes):
            _wrong(step, f"it would reduce {', '.join(sorted(kinds))}")
        return kinds.pop()


_COLLECTIVES: dict[str, Callable[[World, Parts, StepLike, tuple[int, ...], tuple[int, ...]], tuple[Parts, int]]] = {
    "all_gather": World._all_gather,
    "all_to_all": World._all_to_all,
    "reduce_scatter": World._reduce_scatter,
    "all_reduce": World._all_reduce,
}


def _padded(flat: torch.Tensor, length: int) -> torch.Tensor:
    return flat if len(flat) == length else torch.cat([flat, flat.new_zeros(length - len(flat))])


def _assemble(step: StepLike, target: Box, found: Sequence[tuple[Box, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    """Put received pieces into the local tensor of a device; they must make it up, each element once."""
    whole = like.new_empty(target.length)
    placed = []
    for box, data in found:
        piece = box.overlap(target)
        placed.append(piece)
        if not piece.empty:
            whole[piece.inside(target)] = data[piece.inside(box)]
    if not covers(target, placed):
        _wrong(step, "a device does not get each of its elements once from its group")
    return whole


def _wrong(step: StepLike, problem: str) -> NoReturn:
    raise InternalError(f"step {step.kind} on {', '.join(step.axes)}, {step.before} → {step.after}: {problem}; please report this")
