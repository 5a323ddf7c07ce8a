"""What a plan's step takes where collectives run beside compute: window by window, from the plan alone.

>>> step = by_windows(plan)
>>> step.total_ns <= plan.costs.total_ns + plan.costs.hidden_ns     # what it takes with one thing after the other
True

The windows are those of :mod:`solver_shard.costs.schedule`, with its classes of collectives and its prices. Every collective of the plan
is in the windows that the schedule says, with the time that the plan says; what it takes of each lane is worked out from its bytes. The
plan was not made for this: it is the best one for the time that its objective counts, and its proof is of that time.

**Memory.** A parameter that is gathered ahead is there from the start of the window that it is gathered in. What a reduction starts from
and what it makes are there until the end of the window that it runs in. The peak with these is ``WindowedStep.peak``: it may be beyond the
limit that the plan keeps with one thing after the other. Not counted are the buffers into which a runtime copies what moves together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from solver_shard.costs.collectives import Collectives
from solver_shard.costs.schedule import Load, StepSchedule, WindowTime, contention_ns, window_time
from solver_shard.layout import Layout
from solver_shard.plan.index import PlanIndex, purpose_of
from solver_shard.plan.plan import LOCAL, OpCollective, Plan, Reshard, ReshardStep
from solver_shard.program import DTYPE_BYTES

Share = tuple[str, str]
"""A purpose (``index.PURPOSES``), and the lane that a collective takes most of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedStep:
    """A step of a plan by windows.

    Attributes:
        schedule: its windows.
        lanes: names of the lanes.
        windows: time of one run of each window.
        total_ns: of the step: every window as often as it runs.
        compute_ns: of it, ops and the update.
        exposed, hidden: by purpose and lane, nanoseconds of collectives that make the step longer than its compute, and of others.
        peak: bytes per device at the fullest time, with what is gathered ahead and what waits for its reduction.
    """

    schedule: StepSchedule
    lanes: tuple[str, ...]
    windows: tuple[WindowTime, ...]
    total_ns: int
    compute_ns: int
    exposed: Mapping[Share, int]
    hidden: Mapping[Share, int]
    peak: int

    def bound_by(self, time: WindowTime) -> str:
        """What a window takes its time for: compute, or the name of a lane."""
        return "compute" if time.lane is None else self.lanes[time.lane]


def schedule_of(plan: Plan) -> StepSchedule:
    """The windows of a plan's step."""
    return StepSchedule.of([(op.module, op.phase) for op in plan.ops], plan.options.microbatches)


def by_windows(plan: Plan) -> WindowedStep:
    """The time of a plan's step with its collectives beside compute, as far as the schedule lets them.

    >>> step = by_windows(plan)                                                    # doctest: +SKIP
    >>> sum(step.exposed.values()) == step.total_ns - step.compute_ns              # doctest: +SKIP
    True

    Args:
        plan: its overlap option plays no part; ``plan.cluster.kappa`` says what collectives take from compute beside them.
    """
    schedule, filled = schedule_of(plan), _Filled(plan)
    times = tuple(
        window_time(window, compute, loads, len(filled.collectives.lanes))
        for window, compute, loads in zip(schedule.windows, filled.compute, filled.loads, strict=True)
    )
    exposed: dict[Share, int] = {}
    hidden: dict[Share, int] = {}
    for time in times:
        for total, part in ((exposed, time.exposed), (hidden, time.hidden)):
            for key, nanoseconds in part.items():
                total[key] = total.get(key, 0) + time.window.runs * nanoseconds  # type: ignore[index, call-overload]  # keys are Shares
    return WindowedStep(
        schedule=schedule,
        lanes=filled.collectives.lanes,
        windows=times,
        total_ns=sum(time.window.runs * time.nanoseconds for time in times),
        compute_ns=sum(time.window.runs * time.compute for time in times),
        exposed=exposed,
        hidden=hidden,
        peak=_peak(plan, schedule),
    )


class _Filled:
    """What each window of a plan's step computes, and the collectives in it."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.schedule = plan, schedule_of(plan)
        self.collectives = Collectives(plan.mesh, plan.cluster)
        self.compute = [0] * len(self.schedule.windows)
        self.loads: list[list[Load]] = [[] for _ in self.schedule.windows]
        self._lane_times = functools.cache(self._lane_times_of)
        accumulated = plan.options.microbatches > 1
        for i, op in enumerate(plan.ops):
            windows = self.schedule.of_op(i)
            self._compute(op.nanoseconds, windows)
            for inside in op.collectives:
                self._load(inside, f"inside ops, {op.phase}", windows, asynchronous=False)
        for reshard, at in zip(plan.reshards, anchors(plan), strict=True):
            parameter = plan.tensors[reshard.tensor].role == "parameter"
            place = self.schedule.place(reshard.purpose, at, parameter=parameter, accumulated=accumulated)
            for step in reshard.steps:
                if step.kind not in LOCAL:
                    self._load(step, purpose_of(plan, reshard), place.windows, asynchronous=place.asynchronous, bucket=reshard.bucket)
            self._compute(reshard.traffic_ns, self.schedule.beside(reshard.purpose, at, accumulated=accumulated))
        self._compute(plan.costs.update_ns, (self.schedule.update,))
        if plan.clip is not None:
            self._load(plan.clip, "gradient clipping", (self.schedule.update,), asynchronous=False)

    def _compute(self, nanoseconds: int, windows: tuple[int, ...]) -> None:
        for w in windows:
            self.compute[w] += nanoseconds

    def _load(
        self, step: ReshardStep | OpCollective, purpose: str, windows: tuple[int, ...], *, asynchronous: bool, bucket: int = 1
    ) -> None:
        lanes = tuple(min(x, step.nanoseconds) for x in self._lane_times(step.kind, step.axes, step.nbytes, bucket))
        most = self.collectives.lanes[lanes.index(max(lanes))] if lanes else ""
        taken = contention_ns(np.array(step.nanoseconds), self.collectives.launch_ns(bucket), self.plan.cluster.kappa)
        load = Load(key=(purpose, most), asynchronous=asynchronous, nanoseconds=step.nanoseconds, contention=int(taken), lanes=lanes)
        for w in windows:
            self.loads[w].append(load)

    def _lane_times_of(self, kind: str, axes: tuple[str, ...], nbytes: int, bucket: int) -> tuple[int, ...]:
        positions = [self.plan.mesh.index(name) for name in axes]
        return tuple(self.collectives.lane_times(kind, positions, np.array(nbytes, dtype=np.int64), bucket).tolist())


def anchors(plan: Plan) -> tuple[int | None, ...]:
    """The op that says when each reshard of a plan runs: its first reader, what makes a gradient, what reads a new value first."""
    makers = PlanIndex(plan).makers
    first: dict[int, int] = {}
    for reshard in plan.reshards:
        if reshard.readers:
            first[reshard.tensor] = min([*(i for i, _ in reshard.readers), first.get(reshard.tensor, len(plan.ops))])

    def anchor(reshard: Reshard) -> int | None:
        if reshard.purpose in ("accumulate", "optimizer"):
            return makers.get(reshard.tensor)
        return first.get(reshard.tensor) if reshard.purpose == "update" else min((i for i, _ in reshard.readers), default=None)

    return tuple(map(anchor, plan.reshards))


def _peak(plan: Plan, schedule: StepSchedule) -> int:
    """Bytes at the fullest time of a step that gathers a window ahead and reduces a window behind."""
    end = len(plan.ops) + 1
    totals = np.zeros(end, dtype=np.int64)
    memory = plan.memory
    for k, time in enumerate(memory.times):
        totals[time : memory.times[k + 1] if k + 1 < len(memory.times) else end] = sum(values[k] for values in memory.series.values())
    for start, stop, nbytes in _waiting(plan, schedule):
        totals[start:stop] += nbytes
    return int(totals.max())


def _waiting(plan: Plan, schedule: StepSchedule) -> Iterator[tuple[int, int, int]]:
    """From when until when how many bytes are there beside those that the plan counts."""
    update, several = len(plan.ops), plan.options.microbatches > 1
    spans = schedule.windows[1 : 1 + schedule.length]
    for reshard, at in zip(plan.reshards, anchors(plan), strict=True):
        if at is None or not reshard.copy:
            continue
        k = schedule.stretch[at]
        last = k + 1 == len(spans)
        if plan.tensors[reshard.tensor].role == "parameter" and reshard.purpose in ("forward", "backward"):
            yield (spans[k - 1].start if k else 0), reshard.start, reshard.nbytes
            if several and not k:
                yield spans[-1].start, update, reshard.nbytes
        elif reshard.purpose == "accumulate" or (reshard.purpose == "optimizer" and not several):
            source = _local_bytes(plan, reshard, reshard.source)
            made = source + (reshard.nbytes if reshard.stop <= update else 0)  # what the update reads is there until then anyway
            yield at + 1, (update if last else spans[k + 1].stop), made
            if several and last:
                yield 0, spans[0].stop, made
        elif reshard.purpose == "optimizer" and reshard.start < reshard.stop:
            yield (update if last else spans[k + 1].start), update, reshard.nbytes


def _local_bytes(plan: Plan, reshard: Reshard, layout: Layout) -> int:
    """Bytes of a gradient as it is communicated."""
    tensor = plan.tensors[reshard.tensor]
    dtype = plan.options.optimizer_state().gradient_dtype(tensor.dtype)
    return math.prod(layout.local_shape(tensor.shape, plan.mesh.shape)) * DTYPE_BYTES[dtype]
