"""When everything in a step runs: windows of the compute stream, what runs beside them, and which collectives share a launch.

>>> ops = [("model.embed", "forward"), ("model.layers.0.mlp", "forward"), ("model.layers.1.mlp", "forward"), ("model.head", "forward")]
>>> schedule = StepSchedule.of([*ops, *((module, "backward") for module, _ in reversed(ops))], microbatches=1)
>>> [window.name for window in schedule.windows[:5]]
['head', 'model.embed forward', 'model.layers.0 forward', 'model.layers.1 forward', 'model.head forward']
>>> [schedule.windows[w].name for w in schedule.ahead(2)], [schedule.windows[w].name for w in schedule.behind(5)]
(['model.layers.0 forward'], ['model.layers.0 backward'])

A step runs on one compute stream and on **lanes** (``Collectives.lanes``), side by side. The compute stream is cut into **windows**: what
one unit (below) does in one phase of one microbatch, its forward pass, or its backward pass with what is computed again there. What is in
no unit is a window of its own between two of them; inside of one it belongs to it. The **update** is the last window. Between the last
microbatch and the update lies the **tail**, before the first microbatch the **head**: windows without compute.

**Blocking** collectives stop the compute stream where they are: reshards of activations, collectives inside ops, those of outputs and of
gradient clipping. **Asynchronous** ones have slack of one window, as fully sharded training has it (PyTorch's FSDP2 prefetches one module
and waits for the reduction of one module after the next one's backward pass):

    gather of a parameter       beside the window before that of its first reader                      (``ahead``)
    reduction of a gradient     beside the window after that in which it is made                       (``behind``)
    gather of updated values    beside the window before that which reads the parameter first, in the first microbatch of the next step
                                (``ahead`` with ``once``), as Megatron-LM's overlapped parameter gather does

What the first window reads is gathered in the head, what the last one makes is reduced in the tail: beside nothing. From one microbatch to
the next, the last window of the one is before the first of the other. What is paid once a step is in the first microbatch (gathers of
updated values) or the last one (reductions of accumulated gradients), so that first, middle and last microbatches have windows of their
own; the middle ones are alike, and one window of ``runs`` repetitions stands for all.

**Time.** A window takes as long as the fullest of what runs side by side in it:

    time = max(compute + blocking + contention, for every lane: what blocking and asynchronous collectives take of it)

and a step the sum of its windows. A collective that runs beside compute costs its launch on the compute stream, and takes a part kappa of
the rest of its time from it (**contention**: ``Cluster.kappa``). So with kappa = 1 a step takes what all its parts take one after the
other.

A **bucket** holds the parameters of one unit and dtype that are moved for one purpose: gathered for the forward or the
backward pass, gathered after the update, or, as gradients, reduced for it: into an accumulator, or to the update. A unit is
what users hand to ``fully_shard``: the module down to the first number in its path (a block of a numbered stack), and the
model itself for all parameters outside of blocks. PyTorch FSDP gathers and reduces a unit with one collective (Zhao et al.,
"PyTorch FSDP", VLDB 16(12), 2023, section 3.2); DDP reduces buckets of gradients (Li et al., "PyTorch Distributed", VLDB
13(12), 2020, section 3.2).

**Price.** Every member pays 1/k of the launch and of the latency per hop, k being the number of members, and its own bytes in
full; each step is rounded up. k is counted on the program, once and for all, so that the price of a tensor does not depend on
what others decide. Where all k members take the same step, the sum is the time of the one collective that moves them
together (at most k ns more by rounding, and less where the fastest algorithm for one of them is not the fastest for all).

**What is launched.** Steps of one bucket with the same collective, the same axes and the same place in their transitions are one
launch (``launch_of``); all others are launches of their own. So where only some members move, or by other collectives, or on other axes,
there are fewer tensors per launch than k says and the price is too low: k members that move by m launches pay for one of the m, and a
block that reduce-scatters its matrices and all-reduces its norms launches twice and pays once. What is left out is known exactly once a
plan is: ``unshared_ns`` is, over all launches, the time of the collective that moves the launch's bytes together less what its members
pay, where that is more. Every plan states it beside its time, and price + ``unshared_ns`` is never below the time of its launches. It is
no part of the objective, because no sum of prices of single tensors can be exact (one member that moves alone needs a whole launch).

**Limits.** The objective, and so the proof, is about the price without ``unshared_ns``; plans whose blocks move alike have none. Memory
is not bucketed: a gathered parameter is counted from its own first reader, not from that of the whole unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from solver_shard.program import Program, Role

Ints = NDArray[np.int64]

REDUCED = ("accumulate", "optimizer")
GATHERED = ("forward", "backward", "update")

_PARTS = 1_000_000
"""kappa is taken in millionths."""


def unit_of(name: str) -> str:
    """The unit of a parameter: its path up to the first part that is a number, "" where there is none."""
    parts = name.split(".")
    for depth, part in enumerate(parts[:-1], start=1):
        if part.isdecimal():
            return ".".join(parts[:depth])
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of the compute stream.

    Attributes:
        name: the unit and phase, or the modules of what is in no unit; head, tail, update.
        kind: forward or backward, or head, tail, update.
        microbatch: of which it is: only, first, middle or last; empty for head, tail and update.
        runs: how often a step has it: once, but for those of the middle microbatches.
        start, stop: positions of its ops, half-open; those of head and tail are none.
    """

    name: str
    kind: Literal["head", "forward", "backward", "tail", "update"]
    microbatch: Literal["", "only", "first", "middle", "last"]
    runs: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSchedule:
    """The windows of a step, and which of them something runs in or beside: positions in ``windows``, one of each kind of microbatch.

    Attributes:
        windows: in the order in which they run first: head, those of each kind of microbatch, tail, update.
        stretch: of every op, which of the windows of its microbatch it is in.
        kinds: number of kinds of microbatches, 1 to 3.
        length: number of windows of a microbatch.
    """

    windows: tuple[Window, ...]
    stretch: tuple[int, ...]
    kinds: int
    length: int

    @staticmethod
    def of(places: Sequence[tuple[str, str]], microbatches: int) -> StepSchedule:
        """The schedule of a step of so many microbatches, of ops in their order: the module and the phase of each."""
        stretches = _stretches(places)
        names: tuple[tuple[Literal["only", "first", "middle", "last"], int], ...] = (("only", 1),)
        if microbatches > 1:
            names = (("first", 1), *((("middle", microbatches - 2),) if microbatches > 2 else ()), ("last", 1))
        windows = [Window(name="head", kind="head", microbatch="", runs=1, start=0, stop=0)]
        for microbatch, runs in names:
            for start, stop in stretches:
                phase: Literal["forward", "backward"] = "backward" if places[start][1] == "backward" else "forward"
                name = f"{_window_name([module for module, _ in places[start:stop]])} {phase}"
                windows.append(Window(name=name, kind=phase, microbatch=microbatch, runs=runs, start=start, stop=stop))
        end = len(places)
        windows.append(Window(name="tail", kind="tail", microbatch="", runs=1, start=end, stop=end))
        windows.append(Window(name="update", kind="update", microbatch="", runs=1, start=end, stop=end + 1))
        stretch = tuple(itertools.chain.from_iterable([k] * (stop - start) for k, (start, stop) in enumerate(stretches)))
        return StepSchedule(windows=tuple(windows), stretch=stretch, kinds=len(names), length=len(stretches))

    @property
    def update(self) -> int:
        """The window of the update."""
        return len(self.windows) - 1

    @property
    def tail(self) -> int:
        return len(self.windows) - 2

    def of_op(self, i: int) -> tuple[int, ...]:
        """The windows in which an op runs."""
        return self._of_stretch(self.stretch[i])

    def ending(self) -> tuple[int, ...]:
        """The last windows of microbatches: what the step returns is there."""
        return self._of_stretch(self.length - 1) if self.length else (self.update,)

    def ahead(self, i: int, *, once: bool = False) -> tuple[int, ...]:
        """The windows before those of an op; ``once``: before that of the first microbatch alone."""
        k = self.stretch[i]
        if k > 0:
            return self._of_stretch(k - 1)[: 1 if once else None]
        return (0, *(() if once else self._of_stretch(self.length - 1)[:-1]))

    def behind(self, i: int, *, once: bool = False) -> tuple[int, ...]:
        """The windows after those of an op; ``once``: after that of the last microbatch alone."""
        k = self.stretch[i]
        if k < self.length - 1:
            return self._of_stretch(k + 1)[-1 if once else 0 :]
        return (*(() if once else self._of_stretch(0)[1:]), self.tail)

    def place(self, purpose: str, op: int | None, *, parameter: bool, accumulated: bool) -> Place:
        """Where the collectives of a reshard run.

        Args:
            purpose: as of ``Reshard``.
            op: its first reader; of a gradient what makes it; of updated values what reads the parameter first; None where there is none.
            parameter: whether it is of a parameter.
            accumulated: whether gradients are, over several microbatches.
        """
        if purpose == "output":
            return Place(windows=self.ending(), asynchronous=False)
        if op is None:
            return Place(windows=self.ending() if purpose == "accumulate" else (self.update,), asynchronous=False)
        if purpose in REDUCED:
            return Place(windows=self.behind(op, once=purpose == "optimizer" and accumulated), asynchronous=True)
        if purpose == "update":
            return Place(windows=self.ahead(op, once=True), asynchronous=True)
        return Place(windows=self.ahead(op) if parameter else self.of_op(op), asynchronous=parameter)

    def beside(self, purpose: str, op: int | None, *, accumulated: bool) -> tuple[int, ...]:
        """The windows in which a reshard reads and writes device memory besides; the arguments are those of ``place``."""
        if purpose == "output" or (op is None and purpose == "accumulate"):
            return self.ending()
        return (self.update,) if op is None or (purpose == "optimizer" and accumulated) else self.of_op(op)

    def _of_stretch(self, k: int) -> tuple[int, ...]:
        return tuple(1 + kind * self.length + k for kind in range(self.kinds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The windows in which collectives run, once in each, and whether beside the compute there or instead of it."""

    windows: tuple[int, ...]
    asynchronous: bool


def _stretches(places: Sequence[tuple[str, str]]) -> list[tuple[int, int]]:
    """Where the windows of a microbatch begin and end."""
    units = [(unit_of(f"{module}."), phase) for module, phase in places]
    following = list(units)  # the unit of the next op that is in one, in the same phase
    for i in reversed(range(len(units) - 1)):
        if not units[i][0] and units[i][1] == units[i + 1][1]:
            following[i] = following[i + 1]
    starts: list[int] = []
    current = None
    for i, unit in enumerate(units):
        inside = current is not None and (unit == current or (not unit[0] and following[i] == current))
        if not inside:
            starts.append(i)
            current = unit
    return list(itertools.pairwise([*starts, len(units)])) if starts else []


def _window_name(modules: Sequence[str]) -> str:
    """A unit's name, or the modules that there are in none, without those inside of others."""
    units = [unit_of(f"{module}.") for module in modules]
    named = [unit for unit in units if unit]
    if named:
        return named[0]
    paths = list(dict.fromkeys(module for module in modules if module))
    inner = [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]
    return ", ".join(inner) or "outside of modules"


def contention_ns(nanoseconds: Ints, launch_ns: Ints | int, kappa: float) -> Ints:
    """What a collective that runs beside compute takes from it: its launch, and a part of the rest, rounded up.

    >>> contention_ns(np.array([1000, 50]), 100, 0.25).tolist()
    [325, 50]
    """
    launch = np.minimum(nanoseconds, launch_ns)
    return np.asarray(nanoseconds - (_PARTS - round(kappa * _PARTS)) * (nanoseconds - launch) // _PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A collective, or several of a kind, in one run of a window.

    Attributes:
        key: what it is counted under.
        asynchronous: whether it runs beside the compute.
        nanoseconds: its time, launch included.
        contention: what it takes from compute where it is asynchronous.
        lanes: what it takes of each lane.
    """

    key: Hashable
    asynchronous: bool
    nanoseconds: int
    contention: int
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTime:
    """How long one run of a window takes and why.

    Attributes:
        window: which.
        compute: nanoseconds of its ops.
        blocking, contention: of collectives, on the compute stream.
        lanes: of each lane, by blocking and asynchronous collectives.
        asynchronous: of each lane, by asynchronous ones.
        nanoseconds: the largest of the compute stream's sum and the lanes'.
        lane: the lane that is as long as that, None where the compute stream is.
        exposed: by key, nanoseconds of collectives that make the window longer than its compute: they sum up to what it is longer.
        hidden: by key, the rest of the collectives' time.
    """

    window: Window
    compute: int
    blocking: int
    contention: int
    lanes: tuple[int, ...]
    asynchronous: tuple[int, ...]
    nanoseconds: int
    lane: int | None
    exposed: Mapping[Hashable, int]
    hidden: Mapping[Hashable, int]


def window_time(window: Window, compute: int, loads: Sequence[Load], lanes: int) -> WindowTime:
    """The time of one run of a window, and what of its collectives is exposed.

    Blocking collectives are exposed. Of asynchronous ones it is what they take from compute where the compute stream is the fullest; where
    a lane is, it is what that lane takes longer than compute and blocking collectives, in proportion to their part of it.
    """
    blocking = sum(load.nanoseconds for load in loads if not load.asynchronous)
    contention = sum(load.contention for load in loads if load.asynchronous)
    beside = tuple(sum(load.lanes[r] for load in loads if load.asynchronous) for r in range(lanes))
    full = tuple(beside[r] + sum(load.lanes[r] for load in loads if not load.asynchronous) for r in range(lanes))
    stream = compute + blocking + contention
    nanoseconds = max(stream, *full) if full else stream
    lane = None if nanoseconds == stream else full.index(nanoseconds)
    exposed: dict[Hashable, int] = {}
    hidden: dict[Hashable, int] = {}
    left, weight = (nanoseconds - compute - blocking, contention if lane is None else beside[lane])
    for load in loads:
        paid = load.nanoseconds
        if load.asynchronous:
            share = load.contention if lane is None else load.lanes[lane]
            paid = left * share // weight if weight else 0
            left, weight = left - paid, weight - share
        exposed[load.key] = exposed.get(load.key, 0) + paid
        hidden[load.key] = hidden.get(load.key, 0) + load.nanoseconds - paid
    return WindowTime(
        window=window,
        compute=compute,
        blocking=blocking,
        contention=contention,
        lanes=full,
        asynchronous=beside,
        nanoseconds=nanoseconds,
        lane=lane,
        exposed=exposed,
        hidden=hidden,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Paid:
    """One step of a transition of a tensor in a bucket: the launch that it is part of, its bytes, and what it pays."""

    launch: Hashable
    kind: str
    axes: tuple[int, ...]
    nbytes: int
    nanoseconds: int
    runs: int = 1
    """How often it is made in a step: once, or for every microbatch; the same for all of a launch."""


def launch_of(purpose: str, parameter: str, dtype: str, number: int, kind: str, axes: tuple[Hashable, ...]) -> Hashable:
    """What steps of one launch have in common; ``number`` counts the steps of a transition."""
    return purpose, unit_of(parameter), dtype, number, kind, axes


def unshared_ns(steps: Iterable[Paid], collective_ns: Callable[[str, tuple[int, ...], int], int]) -> int:
    """Nanoseconds that launches take beyond what the members of their buckets pay for them (see the module)."""
    launches: dict[Hashable, list[Paid]] = {}
    for step in steps:
        launches.setdefault(step.launch, []).append(step)
    missing = 0
    for members in launches.values():
        whole = collective_ns(members[0].kind, members[0].axes, sum(step.nbytes for step in members))
        missing += members[0].runs * max(0, whole - sum(step.nanoseconds for step in members))
    return missing


def bucket_sizes(program: Program, moves: Iterable[tuple[int, str]]) -> Mapping[tuple[int, str], int]:
    """How many tensors share the launch of each move that is in a bucket; all others have one of their own.

    Args:
        moves: (tensor position, purpose) of everything that may be moved; purposes as in ``Reshard.purpose``.
    """
    parameter_of = {gradient: parameter for parameter, gradient in program.gradients.items()}
    bucket: dict[tuple[int, str], tuple[str, str, str]] = {}
    members: dict[tuple[str, str, str], set[int]] = {}
    for t, purpose in moves:
        tensor = program.tensors[t]
        if purpose in REDUCED and t in parameter_of:
            unit = unit_of(program.tensors[parameter_of[t]].name)
        elif purpose in GATHERED and tensor.role is Role.PARAMETER:
            unit = unit_of(tensor.name)
        else:
            continue
        bucket[t, purpose] = key = (purpose, unit, tensor.dtype)
        members.setdefault(key, set()).add(t)
    return {move: len(members[key]) for move, key in bucket.items()}
