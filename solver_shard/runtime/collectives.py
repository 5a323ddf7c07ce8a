"""Collectives of a step as one device runs them: what it sends, and what it makes of what it receives, prepared once.

>>> mesh = Mesh.parse("2,2")
>>> exchange = prepare(Step(kind="all_gather", axes=("d1",), before=S(0)S(0), after=S(0)R, ...), (8, 2), mesh, device=1)
>>> exchange.pack(part).shape, exchange.unpack(received).shape
(torch.Size([4]), torch.Size([4, 2]))

A collective is called on flat buffers, padded to equal sizes as a real run pads uneven shards. Which elements a device sends and
where it puts what it receives follows from the layouts before and after the step alone, so a step that is not what it says (rows
that would come from a device outside the group, say) is an error. Rows of equal length are sent from where they lie and stay where they
arrive; what else needs a copy is what a plan counts (:mod:`solver_shard.costs.transitions`).

A ``Communicator`` takes what is prepared to the other devices: ``Processes`` to the processes of a real mesh,
``solver_shard.verification.simulate.SimulatedDevice`` to devices that are simulated in one process.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from solver_shard.errors import InternalError
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.ops.shards import Box, Shape, boxes, covers, group_of, local_move
from solver_shard.plan.plan import LOCAL

Move = Callable[[torch.Tensor], torch.Tensor]
"""From one local tensor or buffer to the next."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One step on one device.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce or all_to_all; slice moves nothing between devices, and has ``pack`` alone.
        axes: names of the mesh axes, as the plan writes them.
        group: positions of these axes.
        members: the devices of the group, in the order in which they send and receive.
        reduction: sum, avg, max or min; empty where nothing is reduced.
        pack: from the local tensor to the flat buffer that the collective is called with.
        unpack: from the buffer that it returns to the new local tensor.
        placed: whether that is a copy; else it is the buffer as it lies.
        nbytes: bytes of the call, as the plan says; None where it says nothing.
        title: the step, for a person to find.
    """

    kind: str
    axes: tuple[str, ...]
    group: tuple[int, ...]
    members: tuple[int, ...]
    reduction: str
    pack: Move
    unpack: Move
    placed: bool = False
    nbytes: int | None = None
    title: str = ""

    @property
    def is_local(self) -> bool:
        return self.kind in LOCAL

    def called_with(self, sent: torch.Tensor) -> int:
        """The bytes of the call, counted as in ``Step``: of a gathered output, of the buffer otherwise."""
        return int(sent.nbytes) * (len(self.members) if self.kind == "all_gather" else 1)

    def collective(self, group: str, *, averages: bool = True) -> Move:
        """The functional collective on a packed buffer, within the process group of this name; it is waited for.

        Complex numbers go as pairs of real ones: not every backend knows them.

        Args:
            averages: whether the backend has an average; where it has none, a sum is divided.
        """
        move = self._real_collective(group, averages)

        def paired(buffer: torch.Tensor) -> torch.Tensor:
            if not buffer.is_complex():
                return move(buffer)
            return torch.view_as_complex(move(torch.view_as_real(buffer.contiguous())))

        return paired

    def _real_collective(self, group: str, averages: bool) -> Move:
        op: Any = torch.ops._c10d_functional
        size, wait, reduction = len(self.members), op.wait_tensor.default, self.reduction
        divided = reduction == "avg" and not averages
        if divided:
            reduction = "sum"
        if self.kind == "all_gather":
            gather = op.all_gather_into_tensor.default
            return lambda buffer: wait(gather(buffer, size, group))
        if self.kind == "all_to_all":
            swap = op.all_to_all_single.default

            def exchanged(buffer: torch.Tensor) -> torch.Tensor:
                pieces = [len(buffer) // size] * size
                received: torch.Tensor = wait(swap(buffer, pieces, pieces, group))
                return received

            return exchanged
        if self.kind == "all_reduce":
            reduce = op.all_reduce.default
            total: Move = lambda buffer: wait(reduce(buffer, reduction, group))  # noqa: E731
        else:
            scatter = op.reduce_scatter_tensor.default
            total = lambda buffer: wait(scatter(buffer, reduction, size, group))  # noqa: E731
        return (lambda buffer: total(buffer).div_(size)) if divided else total


def prepare(step: StepLike, shape: Shape, mesh: Mesh, device: int) -> Exchange:
    """One step of a tensor of this global shape, on one device.

    Raises:
        InternalError: the step is not the collective that it says it is.
    """
    return _prepared(step, shape, mesh, device)  # type: ignore[arg-type]  # steps are frozen values


@functools.lru_cache(maxsize=65536)
def _prepared(step: StepLike, shape: Shape, mesh: Mesh, device: int) -> Exchange:
    group = tuple(sorted(mesh.index(name) for name in step.axes))
    if step.kind in LOCAL:
        moved = local_move(step.before, step.after, shape, mesh, device) or _same
        return Exchange(kind=step.kind, axes=step.axes, group=group, members=(device,), reduction="", pack=moved, unpack=_same)
    changed = {axis for axis, (a, b) in enumerate(zip(step.before, step.after, strict=True)) if a != b}
    if step.kind not in _KINDS or not changed or changed != set(group):
        _wrong(step, f"it changes axes {', '.join(mesh.names[a] for a in sorted(changed)) or 'none'}")
    view = _View(step=step, shape=shape, mesh=mesh, device=device, group=group, members=group_of(group, mesh, device))
    reduction, pack, (unpack, placed) = _KINDS[step.kind](view)
    return Exchange(
        kind=step.kind,
        axes=step.axes,
        group=group,
        members=view.members,
        reduction=reduction,
        pack=pack,
        unpack=unpack,
        placed=placed,
        nbytes=step.nbytes,
        title=_title(step),
    )


def in_turn(moves: Sequence[Move]) -> Move:
    """One move after the other; what a move has made is gone when the one after it is done."""
    if len(moves) == 1:
        return moves[0]

    def run(part: torch.Tensor) -> torch.Tensor:
        for move in moves:
            part = move(part)
        return part

    return run


def all_reduce_over(axes: Sequence[str], reduction: str, mesh: Mesh, device: int, nbytes: int | None = None) -> Exchange:
    """An all-reduce inside an op, of a buffer that the op makes; of these bytes, where the plan says so."""
    group = tuple(sorted(mesh.index(name) for name in axes))
    return Exchange(
        kind="all_reduce",
        axes=tuple(axes),
        group=group,
        members=group_of(group, mesh, device),
        reduction=reduction,
        pack=_same,
        unpack=_same,
        nbytes=nbytes,
        title=f"a {reduction} inside an op on {', '.join(axes)}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """A step as one device sees it."""

    step: StepLike
    shape: Shape
    mesh: Mesh
    device: int
    group: tuple[int, ...]
    members: tuple[int, ...]

    @property
    def held(self) -> tuple[Box, ...]:
        return boxes(self.step.before, self.shape, self.mesh)

    @property
    def wanted(self) -> tuple[Box, ...]:
        return boxes(self.step.after, self.shape, self.mesh)

    @property
    def first(self) -> tuple[int, ...]:
        """The group of device 0, which has the fullest shards: the sizes that all groups pad to are its."""
        return group_of(self.group, self.mesh, 0)

    def reduction(self) -> str:
        before, after = self.step.before, self.step.after
        if any(self.held[member] != self.held[self.device] for member in self.members):
            _wrong(self.step, "devices of one group hold different parts")
        kinds = {before[axis].reduction if before[axis].is_partial else "nothing" for axis in self.group}
        if len(kinds) != 1 or "nothing" in kinds or any(after[axis].is_partial for axis in self.group):
            _wrong(self.step, f"it would reduce {', '.join(sorted(kinds))}")
        return kinds.pop()

    def sending(self) -> tuple[Move, int]:
        """This device's pieces for the members of its group, in their order, each padded to the longest."""
        own, wanted = self.held[self.device], self.wanted
        longest = max(_volume(self.held[s].overlap(wanted[r])) for s in self.first for r in self.first)
        pieces = [own.overlap(wanted[member]) for member in self.members]
        dim = _row(pieces, own)
        if dim is not None and all(_volume(piece) == longest for piece in pieces):
            return _dealt(own.length, dim, len(pieces)), longest
        places = [(slice(k * longest, k * longest + _volume(piece)), piece.length, piece.inside(own)) for k, piece in enumerate(pieces)]

        def pack(part: torch.Tensor) -> torch.Tensor:
            buffer = part.new_zeros(len(places) * longest)
            for lies, length, at in places:
                buffer[lies].view(length).copy_(part[at])
            return buffer

        return pack, longest

    def receiving(self, pieces: Sequence[Box], longest: int) -> tuple[Move, bool]:
        """Put the members' pieces together, and whether that takes a copy; they must make up the new local tensor, each element once."""
        target = self.wanted[self.device]
        if not covers(target, [piece.overlap(target) for piece in pieces]):
            _wrong(self.step, "a device does not get each of its elements once from its group")
        dim = _row(pieces, target)
        if dim is not None and all(_volume(piece) == longest for piece in pieces):
            return _collected(pieces[0].length, dim, len(pieces))
        places = []
        for k, piece in enumerate(pieces):
            met = piece.overlap(target)
            if not met.empty:
                lies = slice(k * longest, k * longest + _volume(piece))
                places.append((lies, piece.length, met.inside(target), met.inside(piece)))

        def unpack(received: torch.Tensor) -> torch.Tensor:
            whole = received.new_empty(target.length)
            for lies, length, here, there in places:
                whole[here] = received[lies].view(length)[there]
            return whole

        return unpack, True


def _all_gather(view: _View) -> tuple[str, Move, tuple[Move, bool]]:
    longest = max(_volume(view.held[member]) for member in view.first)
    unpack = view.receiving([view.held[member] for member in view.members], longest)
    if _volume(view.held[view.device]) == longest:
        return "", _flat, unpack
    return "", lambda part: _padded(part.reshape(-1), longest), unpack


def _all_to_all(view: _View) -> tuple[str, Move, tuple[Move, bool]]:
    pack, longest = view.sending()
    return "", pack, view.receiving([view.held[member].overlap(view.wanted[view.device]) for member in view.members], longest)


def _reduce_scatter(view: _View) -> tuple[str, Move, tuple[Move, bool]]:
    reduction = view.reduction()
    pack, longest = view.sending()
    return reduction, pack, view.receiving([view.held[view.device].overlap(view.wanted[view.device])], longest)


def _all_reduce(view: _View) -> tuple[str, Move, tuple[Move, bool]]:
    return view.reduction(), _same, (_same, False)  # the functional collective copies, whatever the strides


_KINDS: dict[str, Callable[[_View], tuple[str, Move, tuple[Move, bool]]]] = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
}


def _row(pieces: Sequence[Box], whole: Box) -> int | None:
    """The dim along which pieces of one size lie one after the other and make up the whole; None where they do not."""
    first = pieces[0]
    dims = [d for d, (n, m) in enumerate(zip(first.length, whole.length, strict=True)) if n != m]
    if not dims and len(pieces) == 1:
        return 0 if whole.length else None
    if len(dims) != 1 or first.empty:
        return None
    dim = dims[0]
    expected = [
        Box(tuple(s + k * first.length[d] if d == dim else s for d, s in enumerate(whole.start)), first.length) for k in range(len(pieces))
    ]
    return dim if list(pieces) == expected and len(pieces) * first.length[dim] == whole.length[dim] else None


def _dealt(length: Shape, dim: int, count: int) -> Move:
    """A local tensor as equal pieces along a dim, one after the other."""
    if math.prod(length[:dim]) == 1:
        return _flat
    each = count, length[dim] // count
    return lambda part: part.unflatten(dim, each).movedim(dim, 0).reshape(-1)  # a view until the last, whatever its strides


def _collected(piece: Shape, dim: int, count: int) -> tuple[Move, bool]:
    """Equal pieces one after the other, as a local tensor in which they lie along a dim, and whether that takes a copy."""
    target = tuple(n * count if d == dim else n for d, n in enumerate(piece))
    if count == 1 or math.prod(piece[:dim]) == 1:
        return lambda received: received.view(target), False
    stacked = (count, *piece)
    return lambda received: received.view(stacked).movedim(0, dim).reshape(target).contiguous(), True  # kernels rely on it


def _padded(flat: torch.Tensor, length: int) -> torch.Tensor:
    padded = flat.new_zeros(length)
    padded[: len(flat)] = flat
    return padded


def _flat(part: torch.Tensor) -> torch.Tensor:
    return part.reshape(-1)


def _same(part: torch.Tensor) -> torch.Tensor:
    return part


def _volume(box: Box) -> int:
    return math.prod(box.length)


def _title(step: StepLike) -> str:
    return f"step {step.kind} on {', '.join(step.axes)}, {step.before} → {step.after}"


def _wrong(step: StepLike, problem: str) -> NoReturn:
    raise InternalError(f"{_title(step)}: {problem}; please report this")


class Communicator(Protocol):
    """What talks to the other devices."""

    def stages(self, exchange: Exchange) -> tuple[Move, ...]:
        """One step, prepared: from the local tensor before to the one after, in one or more moves."""

    def all_reduce(self, axes: Sequence[str], reduction: str, nbytes: int | None = None) -> Move:
        """An all-reduce within the group over these axes; of a buffer of these bytes, where the plan says so."""

    def free(self, axes: Sequence[int], reduction: str) -> Move:
        """One of ``FREE`` reductions, which a plan does not list, within the groups over the axes at these positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Collectives of one kind and size that have run.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce or all_to_all; exchange for what brings tokens to the devices of their experts,
            which a plan does not list (see ``Processes.free``).
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
    """One process of a real mesh: a ``Communicator`` that records what has run.

    >>> processes = Processes(mesh, device_mesh)
    >>> for stage in processes.stages(prepare(step, shape, mesh, processes.device)):
    ...     part = stage(part)               # pack, a collective among the processes of the group, unpack
    >>> processes.recorded()
    (Recorded(kind='all_gather', axes=('dp',), nbytes=4096, count=1),)

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
        kind, axes, nbytes = exchange.kind, exchange.axes, exchange.called_with

        def packed(part: torch.Tensor) -> torch.Tensor:
            buffer = pack(part)
            counts[kind, axes, nbytes(buffer)] += 1
            return buffer

        return packed, exchange.collective(self.group(exchange.group), averages=self._averages), exchange.unpack

    def all_reduce(self, axes: Sequence[str], reduction: str, nbytes: int | None = None) -> Move:
        """An all-reduce within the group over these axes."""
        return in_turn(self.stages(all_reduce_over(axes, reduction, self.mesh, self.device, nbytes)))

    def free(self, axes: Sequence[int], reduction: str) -> Move:
        """Rows that lie with their experts: an all-reduce here, for the rows of a real run lie in even chunks as their layout says.

        It is recorded as kind ``exchange``.
        """
        team = group_of(tuple(axes), self.mesh, self.device)
        place, names = team.index(self.device), tuple(self.mesh.names[axis] for axis in axes)
        group, counts = self.group(tuple(axes)), self.counts
        op = torch.ops._c10d_functional

        def total(buffer: torch.Tensor) -> torch.Tensor:
            counts["exchange", names, buffer.nbytes] += 1
            reduced: torch.Tensor = op.wait_tensor.default(op.all_reduce.default(buffer.contiguous(), "sum", group))
            return reduced

        def offset(buffer: torch.Tensor) -> torch.Tensor:
            apart = buffer.new_zeros((len(team), *buffer.shape))
            apart[place] = buffer
            return total(apart)[:place].sum(0).to(buffer.dtype)

        return total if reduction == "exchange" else offset

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
