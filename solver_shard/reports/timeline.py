"""When everything in one predicted step happens, in integer nanoseconds: ops, collectives, memory, and what overlap hides.

>>> line = timeline(plan)
>>> line.stop == plan.costs.total_ns, sum(line.exposed.values()) == plan.costs.communication_ns
(True, True)

**Order.** A step is what the objective counts, laid end to end: it ends at ``costs.total_ns``. A reshard runs just before the first of its
readers; a gradient's way to its accumulator, or to the update, just after the op that makes it (after the last microbatch, where gradients
are accumulated); outputs come after the last op; the update, the collective of clipping before it and the gathers of new values after it
come last. Collectives inside an op are drawn after its compute, as plans do not say where in the middle of it they are. Ops that take no
time (views) are left out.

**Microbatches** run one after the other and are alike. The first and the last one are drawn in full, those between as one block with their
compute, their collectives by axes, and the fullest memory of any moment.

**Shared launches.** Every tensor has a slice of its own, as long as what it pays: its bytes and its part of the launch that it shares with
others of its block. ``costs.unshared_ns`` is no part of the step time, and so of no slice.

**Overlap.** What the objective pays of a collective is drawn where it stops the compute: *exposed*. The rest is *hidden*: it lies under
compute, on the same axes' row, in pieces where exposed collectives come between. For a gather it is the nearest compute before its readers;
for a gradient's reduction the compute after its producer; for new values that go home, the compute of the next step before they are read,
drawn at the start of this one. The discount knows no dependencies, so there may be less compute than it hides: what finds none is
``unplaced_ns``, and a mark says so.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import itertools
import json
import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

import numpy as np

from solver_shard.arguments import checked
from solver_shard.costs.collectives import Collectives
from solver_shard.costs.schedule import launch_of
from solver_shard.files import write_whole
from solver_shard.plan.index import PlanIndex, purpose_of
from solver_shard.plan.io import check_times, load_plan
from solver_shard.plan.plan import LOCAL, OpCollective, Plan, PlannedOp, Reshard, ReshardStep
from solver_shard.plan.summary import CLIPPED
from solver_shard.plan.windows import by_windows, schedule_of
from solver_shard.text import format_ns

Kind = Literal["phase", "module", "compute", "exposed", "hidden", "window", "computing", "waiting", "beside"]
Row = tuple[str, str]
"""A kind of row and its name: ``("collectives", "dp,tp")``."""

PHASES, MODULES, OPS = ("step", "phases"), ("compute", "modules"), ("compute", "ops")
COLLECTIVES = "collectives"
SIDE_BY_SIDE = "side by side"
WINDOWS, STREAM = (SIDE_BY_SIDE, "windows"), (SIDE_BY_SIDE, "compute stream")

MOST_REPLAYED = 8
"""Microbatches of a step that is drawn side by side: all of them are drawn, and more would be as much of the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Something that takes from ``start`` until ``stop`` (nanoseconds) in a row; slices of one row lie inside or beside each other."""

    row: Row
    kind: Kind
    name: str
    start: int
    stop: int
    args: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something to be said of a moment in a row."""

    row: Row
    name: str
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step.

    Attributes:
        slices: by row, earliest first, what lies inside another after it.
        marks: collectives of which more is hidden than there is compute for.
        memory: (moment, bytes by category), from then until the next; of two at one moment the later one counts from there.
        limit: bytes that tensors may have.
        stop: where the step ends: its time.
        exposed, hidden: axes to nanoseconds of their collectives; what finds no compute to lie under is in neither.
        unplaced_ns: of what the overlap discount hides, what finds none.
        side_by_side: what a runtime makes of the plan, with a clock of its own: a compute stream and lanes; none of many microbatches.
        windows_ns, runtime_ns: what the step takes by windows, and side by side (0 where it is not drawn).
    """

    slices: tuple[Slice, ...]
    marks: tuple[Mark, ...]
    memory: tuple[tuple[int, Mapping[str, int]], ...]
    limit: int
    stop: int
    exposed: Mapping[str, int]
    hidden: Mapping[str, int]
    unplaced_ns: int
    side_by_side: tuple[Slice, ...] = ()
    windows_ns: int = 0
    runtime_ns: int = 0


@checked
def timeline(plan: Plan | str | os.PathLike[str]) -> Timeline:
    """Lay out one step of a plan.

    >>> line = timeline(plan)                                # doctest: +SKIP
    >>> write_trace(chrome_trace(line, plan), "trace.json")  # doctest: +SKIP

    Ops stand under their modules, collectives in a row for each group of mesh axes, memory by category. A reshard runs just before
    the first of its readers, a gradient's reduction just after the op that makes it, the update last. Exposed is what no compute
    hides; what an overlap hides lies under compute on the same axes' row, and ``unplaced_ns`` is what finds no compute to lie under.
    Of several microbatches the first and the last are drawn in full, those between as one block.

    The same step side by side (:func:`replay`) has rows of its own: the windows, the compute stream, where it waits, and each lane with
    what runs on it. It ends when a runtime would that gathers parameters a window ahead and reduces gradients a window behind.

    Args:
        plan: what ``optimize`` returned, or its file.

    Returns:
        Slices, memory and marks in integer nanoseconds; the last ends at ``plan.costs.total_ns``.

    Raises:
        InputError: the parts of the plan do not add up to its costs.
    """
    plan = load_plan(plan)
    check_times(plan)
    line = _TimelineBuilder(plan).run()
    if not plan.ops or plan.options.microbatches > MOST_REPLAYED:
        return dataclasses.replace(line, windows_ns=by_windows(plan).total_ns)
    run = _Replay(plan, EFFECTS["chains"])
    end = run.run()
    rows = {row: k for k, row in enumerate((WINDOWS, STREAM))}
    drawn = sorted(run.drawn, key=lambda s: (rows.get(s.row, len(rows)), s.row, s.start, -s.stop))
    return dataclasses.replace(line, side_by_side=tuple(drawn), windows_ns=by_windows(plan).total_ns, runtime_ns=end)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hidden:
    """A part of a collective to be laid under compute between two moments: the last there is, or the first.

    Attributes:
        axes: its row.
        high: None for the end of the last microbatch.
        chain: a number that it has in common with the other steps of its reshard, which do not run at once.
    """

    axes: str
    name: str
    args: Mapping[str, str | int]
    nanoseconds: int
    latest: bool
    low: int
    high: int | None
    chain: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpSpan:
    """What an op takes with the reshards around it."""

    op: PlannedOp
    start: int
    stop: int


class _TimelineBuilder:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.count = plan, plan.options.microbatches
        self.index = PlanIndex(plan)
        self.now = 0
        self.chains = itertools.count()
        self.slices: list[Slice] = []
        self.marks: list[Mark] = []
        self.memory: list[tuple[int, Mapping[str, int]]] = []
        self.waiting: list[_Hidden] = []
        self.returning: list[_Hidden] = []
        self.exposed: dict[str, int] = {}
        self.hidden: dict[str, int] = {}
        self.unplaced = 0
        self.first_read: dict[int, int] = {}
        self.last_made: dict[int, int] = {}
        names = [name for name, values in plan.memory.series.items() if any(values)]
        series = [plan.memory.series[name] for name in names]
        self.rows = {
            time: {name: values[k] for name, values in zip(names, series, strict=True)} for k, time in enumerate(plan.memory.times)
        }
        self.before: dict[int, list[Reshard]] = {}
        self.after: dict[int, list[Reshard]] = {}
        self.ending: list[Reshard] = []
        self.late: list[Reshard] = []
        self.home: list[Reshard] = []
        self._order()

    def _order(self) -> None:
        """Which op each reshard runs before or after."""
        for reshard in self.plan.reshards:
            made = self.index.makers.get(reshard.tensor)
            if not reshard.steps and not reshard.traffic_ns:
                continue
            if reshard.purpose == "update":
                self.home.append(reshard)
            elif reshard.purpose == "optimizer" and (self.count > 1 or made is None):
                self.late.append(reshard)
            elif reshard.purpose in ("accumulate", "optimizer") and made is not None:
                self.after.setdefault(made, []).append(reshard)
            elif reshard.readers:
                self.before.setdefault(min(i for i, _ in reshard.readers), []).append(reshard)
            else:
                self.ending.append(reshard)

    def run(self) -> Timeline:
        self._microbatch(1)
        if self.count > 2:
            self._those_between()
        if self.count > 1:
            self._microbatch(self.count)
        end = self.now
        self._update()
        self._lay(end)
        rows = {row: k for k, row in enumerate((PHASES, MODULES, OPS))}
        return Timeline(
            slices=tuple(sorted(self.slices, key=lambda s: (rows.get(s.row, len(rows)), s.row, s.start, -s.stop))),
            marks=tuple(self.marks),
            memory=tuple(self.memory),
            limit=self.plan.memory.limit,
            stop=self.now,
            exposed=dict(sorted(self.exposed.items())),
            hidden=dict(sorted(self.hidden.items())),
            unplaced_ns=self.unplaced,
        )

    # One microbatch, those between the first and the last, the update

    def _microbatch(self, number: int) -> None:
        start, blocks = self.now, list[_OpSpan]()
        for i, op in enumerate(self.plan.ops):
            begin = self.now
            self._remember(i)
            for t in op.operands:
                self.first_read.setdefault(t, begin)
            for reshard in self.before.get(i, ()):
                self._reshard(reshard)
            self._op(op)
            self.last_made |= dict.fromkeys(op.results, self.now)
            for reshard in self.after.get(i, ()):
                self._reshard(reshard)
            if self.now > begin:
                blocks.append(_OpSpan(op=op, start=begin, stop=self.now))
        for reshard in self.ending:
            self._reshard(reshard)
        if self.count > 1:
            self._add(PHASES, "phase", f"microbatch {number} of {self.count}", start)
        self._phases(blocks)
        self._modules(blocks)

    def _those_between(self) -> None:
        """All but the first and the last microbatch, from what the first one took."""
        count, start = self.count - 2, self.now
        name = f"microbatches 2 to {count + 1}, each as the first" if count > 1 else "microbatch 2, as the first"
        compute = count * sum(s.stop - s.start for s in self.slices if s.kind == "compute")
        exposed, hidden = dict(self.exposed), dict[str, int]()
        for part in self.waiting:
            hidden[part.axes] = hidden.get(part.axes, 0) + count * part.nanoseconds
        fullest = max((row for i, row in self.rows.items() if i < len(self.plan.ops)), key=lambda row: sum(row.values()), default=None)
        if fullest is not None:
            self.memory.append((start, fullest))
        self._spend(compute, name, {})
        for axes, nanoseconds in hidden.items():
            self._hide((axes, name, {}, nanoseconds), latest=False, low=start, high=self.now, chain=next(self.chains))
        for axes, nanoseconds in exposed.items():
            self._expose(axes, name, count * nanoseconds, {})
        self._add(PHASES, "phase", name, start)

    def _update(self) -> None:
        start, options, clip = self.now, self.plan.options, self.plan.clip
        self._remember(len(self.plan.ops))
        for reshard in self.late:
            self._reshard(reshard, late=True)
        if clip is not None:
            self._collective(clip, CLIPPED, {"purpose": "gradient clipping"})
        clipping: dict[str, str | int] = {"includes": "the passes over gradients for their norm"} if options.clip else {}
        self._spend(self.plan.costs.update_ns, f"{options.optimizer} update", clipping)
        for reshard in self.home:
            self._reshard(reshard)
        self._add(PHASES, "phase", "update", start)

    def _phases(self, blocks: Sequence[_OpSpan]) -> None:
        runs = [list(run) for _, run in itertools.groupby(blocks, key=lambda block: block.op.phase)]
        for run in runs:
            stop = self.now if run is runs[-1] else run[-1].stop
            self._add(PHASES, "phase", run[0].op.phase, run[0].start, stop)

    def _modules(self, blocks: Sequence[_OpSpan]) -> None:
        """Modules from where their ops begin until those of others do, inner ones inside outer ones."""
        opened: list[tuple[str, int]] = []
        for block in (*blocks, None):
            path = _path(block.op.module) if block is not None else ()
            now = block.start if block is not None else blocks[-1].stop if blocks else 0
            kept = 0
            while kept < min(len(opened), len(path)) and opened[kept][0] == path[kept]:
                kept += 1
            closed, opened = opened[kept:], opened[:kept]
            for depth, (part, start) in enumerate(closed):
                module = ".".join([*(name for name, _ in opened), *(name for name, _ in closed[: depth + 1])])
                self._add(MODULES, "module", part, start, now, {"module": module})
            opened += [(part, now) for part in path[kept:]]

    def _remember(self, time: int) -> None:
        """What fills the memory from here on, if anything changes at this op."""
        if time in self.rows:
            self.memory.append((self.now, self.rows[time]))

    # What takes time: ops, reshards, collectives

    def _op(self, op: PlannedOp) -> None:
        short = op.name.split(".")[1] if "." in op.name else op.name
        name = (f"{short}: {op.module}" if op.module else short) + (" (again)" if op.recompute else "")
        strategy = ", ".join(f"{axis}={chosen}" for axis, chosen in zip(self.plan.mesh.names, op.strategy, strict=True))
        reads, makes = (", ".join(map(str, layouts)) for layouts in (op.operand_layouts, op.result_layouts))
        args = {"op": op.name, "module": op.module, "phase": op.phase, "strategy": strategy, "reads": reads, "makes": makes}
        self._spend(op.nanoseconds, name, args | ({} if op.source == "table" else {"rule": op.source}))
        for inside in op.collectives:
            self._collective(inside, op.module or short, {"purpose": f"inside {short}", "implementation": op.implementation})

    def _collective(self, inside: OpCollective, place: str, args: Mapping[str, str | int]) -> None:
        axes = ",".join(self.plan.mesh.joined(inside.axes))
        self._expose(axes, f"{inside.kind} {axes}: {place}", inside.nanoseconds, {**args, "bytes": inside.nbytes})

    def _reshard(self, reshard: Reshard, late: bool = False) -> None:
        place = self.index.place(reshard)
        if reshard.purpose == "accumulate":
            self._steps(reshard, place)
            self._spend(reshard.traffic_ns, f"add gradient: {place}", {})
            return
        what = "convert gradient" if reshard.purpose == "optimizer" else "write and read copy"
        self._spend(reshard.traffic_ns, f"{what}: {place}", {})
        self._steps(reshard, place, late)

    def _steps(self, reshard: Reshard, place: str, late: bool = False) -> None:
        """The exposed part of a reshard's collectives, and the hidden one, to be laid before that or after it."""
        tensor, whole, start = self.plan.tensors[reshard.tensor], sum(step.nanoseconds for step in reshard.steps), self.now
        hidden = whole - reshard.nanoseconds
        follows = reshard.purpose in ("accumulate", "optimizer", "update") and not late
        shown = (0, reshard.nanoseconds) if follows else (hidden, whole)
        common: dict[str, str | int] = {"purpose": purpose_of(self.plan, reshard), "tensor": tensor.name}
        common["of"] = f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
        parts, at = list[_Part](), 0
        for step in reshard.steps:
            axes = ",".join(self.plan.mesh.joined(step.axes))
            seen = max(0, min(at + step.nanoseconds, shown[1]) - max(at, shown[0]))
            at += step.nanoseconds
            args = common | {"before": str(step.before), "after": str(step.after), "bytes": step.nbytes}
            args |= {"launch": f"shared by {reshard.bucket} of its block"} if reshard.bucket > 1 else {}
            args |= {"in_all_ns": step.nanoseconds, "hidden_ns": step.nanoseconds - seen} if hidden else {}
            name = f"{step.kind} {axes}: {place}"
            self._expose(axes, name, seen, args)
            parts.append((axes, name, args, step.nanoseconds - seen))
        low, high = (self.now, None) if follows else (0, start)
        if reshard.purpose == "update":
            low, high = 0, self.first_read.get(reshard.tensor)
        elif late:
            low = self.last_made.get(reshard.tensor, 0)
        chain = next(self.chains)
        for part in parts if follows else reversed(parts):
            self._hide(part, latest=not follows, low=low, high=high, chain=chain, returns=reshard.purpose == "update")

    def _spend(self, nanoseconds: int, name: str, args: Mapping[str, str | int]) -> None:
        start, self.now = self.now, self.now + nanoseconds
        self._add(OPS, "compute", name, start, self.now, args)

    def _expose(self, axes: str, name: str, nanoseconds: int, args: Mapping[str, str | int]) -> None:
        start, self.now = self.now, self.now + nanoseconds
        self.exposed[axes] = self.exposed.get(axes, 0) + nanoseconds
        self._add((COLLECTIVES, axes), "exposed", name, start, self.now, args)

    def _add(
        self, row: Row, kind: Kind, name: str, start: int, stop: int | None = None, args: Mapping[str, str | int] | None = None
    ) -> None:
        stop = self.now if stop is None else stop
        if stop > start:
            self.slices.append(Slice(row=row, kind=kind, name=name, start=start, stop=stop, args=args or {}))

    # What is hidden, under the compute of all microbatches

    def _hide(self, part: _Part, *, latest: bool, low: int, high: int | None, chain: int, returns: bool = False) -> None:
        axes, name, args, nanoseconds = part
        if nanoseconds:
            name += ", of the step before" if returns else ""
            hidden = _Hidden(axes=axes, name=name, args=args, nanoseconds=nanoseconds, latest=latest, low=low, high=high, chain=chain)
            (self.returning if returns else self.waiting).append(hidden)

    def _lay(self, end: int) -> None:
        """First what comes from the step before, by when it is read; then the rest, in the order of the step."""
        compute = merged((s.start, s.stop) for s in self.slices if s.kind == "compute" and s.start < end)
        returning = sorted(self.returning, key=lambda part: end if part.high is None else part.high)
        free: dict[str, Gaps] = {}
        edges: dict[int, int] = {}
        for part in (*returning, *self.waiting):
            row, low, high = (COLLECTIVES, part.axes), part.low, end if part.high is None else part.high
            if part.axes not in free:
                free[part.axes] = Gaps(compute)
            if part.latest:
                spans = free[part.axes].latest(low, min(high, edges.get(part.chain, high)), part.nanoseconds)
            else:
                spans = free[part.axes].first(max(low, edges.get(part.chain, low)), high, part.nanoseconds)
            if spans:
                edges[part.chain] = spans[0][0] if part.latest else spans[-1][1]
            for start, stop in spans:
                self._add(row, "hidden", part.name, start, stop, part.args)
            placed = sum(stop - start for start, stop in spans)
            self.hidden[part.axes] = self.hidden.get(part.axes, 0) + placed
            if placed < part.nanoseconds:
                missing = part.nanoseconds - placed
                self.unplaced += missing
                self.marks.append(
                    Mark(row=row, name=f"{part.name}: no compute to hide {format_ns(missing)} under", at=high if part.latest else low)
                )


_Part = tuple[str, str, Mapping[str, str | int], int]
"""Of a collective: axes, name, arguments, and how many nanoseconds of it are hidden."""


def _path(module: str) -> tuple[str, ...]:
    """A module's name as the modules that it lies in; a number belongs to the list before it.

    >>> _path("model.layers.3.mlp")
    ('model', 'layers.3', 'mlp')
    """
    parts: list[str] = []
    for part in module.split(".") if module else ():
        if part.isdecimal() and parts:
            parts[-1] += f".{part}"
        else:
            parts.append(part)
    return tuple(parts)


# Free time in a row of a timeline, given away piece by piece: the first there is after a moment, or the last before one.
#
# >>> gaps = Gaps([(0, 10), (20, 30)])
# >>> gaps.latest(5, 24, 7)
# [(7, 10), (20, 24)]
# >>> gaps.first(0, 30, 100)
# [(0, 7), (24, 30)]

Span = tuple[int, int]


def merged(spans: Iterable[Span]) -> list[Span]:
    """Spans in order, those that touch as one."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


class Gaps:
    """Spans that are free until they are taken; in order, apart from each other."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []
        for start, stop in spans:
            self.starts.append(start)
            self.stops.append(stop)

    def first(self, low: int, high: int, need: int) -> list[Span]:
        """Take the first free time between two moments, as much as is needed or there is; in order."""
        found: list[Span] = []
        k = bisect_right(self.stops, low)
        while need > 0 and k < len(self.starts) and self.starts[k] < high:
            start = max(self.starts[k], low)
            stop = min(self.stops[k], high, start + need)
            found.append((start, stop))
            need -= stop - start
            k += self._take(k, start, stop)
        return found

    def latest(self, low: int, high: int, need: int) -> list[Span]:
        """Take the last free time between two moments, as much as is needed or there is; in order."""
        found: list[Span] = []
        k = bisect_left(self.starts, high) - 1
        while need > 0 and k >= 0 and self.stops[k] > low:
            stop = min(self.stops[k], high)
            start = max(self.starts[k], low, stop - need)
            found.append((start, stop))
            need -= stop - start
            self._take(k, start, stop)
            k -= 1
        return found[::-1]

    def _take(self, k: int, start: int, stop: int) -> int:
        """Take a part of the span at ``k``; how many spans are left there up to the part's end."""
        left = [(a, b) for a, b in ((self.starts[k], start), (stop, self.stops[k])) if a < b]
        self.starts[k : k + 1] = [a for a, _ in left]
        self.stops[k : k + 1] = [b for _, b in left]
        return sum(b <= start for _, b in left)


# A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.
#
# >>> write_trace(chrome_trace(timeline(plan), plan), "trace.json.gz")
#
# The form is the Trace Event Format's JSON object
# (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): slices are complete events (``X``), memory is counters
# (``C``), names of rows are metadata (``M``), a collective with more hidden than there is compute for has an instant (``i``). Times are
# microseconds in whole 2048ths, which floats add and subtract without an error: viewers do, and would draw a slice that ends a rounding
# error late around what follows it. Rounded they are the nanoseconds of the timeline. There are five processes, one for each kind of row:
#
# - ``step``: phases, inside microbatches where there are several;
# - ``compute``: modules, inner ones inside outer ones, and ops;
# - ``collectives``: a thread for each group of mesh axes; ``cat`` is ``exposed`` or ``hidden``;
# - ``memory``: counters of the bytes of a device by category, in all, and of the limit;
# - ``side by side``: the step as a runtime makes it, by a clock of its own, if the plan has at most ``MOST_REPLAYED`` microbatches.

PROCESSES = ("step", "compute", COLLECTIVES, "memory", SIDE_BY_SIDE)
"""By kind of row; the first one's pid is 1."""

MEMORY = PROCESSES.index("memory") + 1

PARTS = 2048
"""Of a microsecond, of which all times are multiples: fine enough that times and durations, rounded, are the right nanoseconds."""

Event = Mapping[str, object]


@checked
def chrome_trace(line: Timeline, plan: Plan | str | os.PathLike[str]) -> str:
    """JSON text, one event to a line; ``otherData`` names the plan and sums up the step in nanoseconds.

    >>> text = chrome_trace(timeline(plan), plan)  # doctest: +SKIP

    Args:
        line: of this plan.
        plan: whose timeline it is, or its file.

    Returns:
        The trace, which ui.perfetto.dev and chrome://tracing open; times in microseconds, as the format has them.
    """
    plan = load_plan(plan)
    about = {
        "plan": plan.name,
        "mesh": str(plan.mesh.whole),
        "cluster": plan.cluster.title,
        "made_by": f"{plan.provenance.tool}: {plan.provenance.command}",
        "predicted": "by the cost model of the plan, not measured",
        "step_ns": line.stop,
        "compute_ns": plan.costs.compute_ns,
        "update_ns": plan.costs.update_ns,
        "exposed_ns": plan.costs.communication_ns,
        "hidden_ns": plan.costs.hidden_ns,
        "hidden_without_compute_ns": line.unplaced_ns,
        "launches_not_counted_ns": plan.costs.unshared_ns,
        "by_windows_ns": line.windows_ns,
        "side_by_side_ns": line.runtime_ns,
        "peak_bytes": plan.memory.peak,
    }
    events = ",\n".join(_dump(event) for event in trace_events(line))
    return f'{{"displayTimeUnit":"ns","otherData":{_dump(about)},"traceEvents":[\n{events}\n]}}\n'


def trace_events(line: Timeline) -> Iterator[Event]:
    """All events: names of rows first, then slices row by row, marks, and memory in the order of time."""
    threads = {row: number for number, row in enumerate(_rows(line), start=1)}
    for pid, name in enumerate(PROCESSES if line.side_by_side else PROCESSES[:-1], start=1):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for row, tid in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": _process(row), "tid": tid, "args": {"name": row[1]}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": _process(row), "tid": tid, "args": {"sort_index": tid}}
    for piece in (*line.slices, *line.side_by_side):
        where = {"pid": _process(piece.row), "tid": threads[piece.row]}
        times = {"ts": _microseconds(piece.start), "dur": _microseconds(piece.stop) - _microseconds(piece.start)}
        yield {"ph": "X", "name": piece.name, "cat": piece.kind, **where, **times, "args": piece.args}
    for mark in line.marks:
        where = {"pid": _process(mark.row), "tid": threads[mark.row]}
        yield {"ph": "i", "s": "t", "name": mark.name, "cat": "unplaced", **where, "ts": _microseconds(mark.at)}
    for moment, categories in line.memory:
        common = {"ph": "C", "pid": MEMORY, "ts": _microseconds(moment)}
        yield {**common, "name": "bytes by category", "args": categories}
        yield {**common, "name": "bytes in all", "args": {"bytes": sum(categories.values())}}
    for moment in (0, line.stop):
        yield {"ph": "C", "pid": MEMORY, "ts": _microseconds(moment), "name": "limit", "args": {"bytes": line.limit}}


@checked
def write_trace(text: str, path: str | os.PathLike[str]) -> int:
    """Write a trace, compressed if the name ends in ``.gz``, the same bytes for the same text; how many bytes were written.

    >>> write_trace(chrome_trace(timeline(plan), plan), "trace.json.gz")  # doctest: +SKIP

    Args:
        text: of ``chrome_trace``.
        path: of the file.

    Returns:
        Bytes that were written.

    Raises:
        InputError: the folder does not exist or cannot be written.
    """
    data = text.encode()
    data = gzip.compress(data, mtime=0) if os.fspath(path).endswith(".gz") else data
    write_whole(path, data)
    return len(data)


def _rows(line: Timeline) -> list[Row]:
    """Rows that have anything, those of axes by name."""
    found = dict.fromkeys([piece.row for piece in line.slices] + [mark.row for mark in line.marks])
    fixed = [row for row in (PHASES, MODULES, OPS) if row in found]
    beside = dict.fromkeys(piece.row for piece in line.side_by_side)
    return [*fixed, *sorted(row for row in found if row not in fixed), *beside]


def _microseconds(nanoseconds: int) -> float:
    """In parts of ``PARTS``, rounded up: below the next nanosecond, whether a reader rounds or cuts off.

    >>> _microseconds(300), round(1000 * _microseconds(300)), int(1000 * _microseconds(300))
    (0.30029296875, 300, 300)
    """
    return -(-nanoseconds * PARTS // 1000) / PARTS


def _process(row: Row) -> int:
    return PROCESSES.index(row[0]) + 1


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


# One step run event by event, beside :mod:`solver_shard.plan.windows`: they share the plan, where windows begin, and what collectives take
# of lanes, and nothing else.


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How far a replay goes beyond what the schedule prices; as it prices, where all is as by default.

    Attributes:
        whole_launches: what moves together is one collective with its whole launch; else each tensor pays its part, as the price says.
        barriers: a window ends when all that runs beside it is done; else ops wait for what they read, and the update for all reductions.
        queued: a lane serves collectives in the order in which they are issued; else those that stop the compute go first.
        chained: the levels of a collective follow each other, as the steps of a transition do, and each waits for its launch.
    """

    whole_launches: bool = False
    barriers: bool = True
    queued: bool = False
    chained: bool = False


EFFECTS: Mapping[str, Manner] = {
    "as priced": Manner(),
    "whole launches": Manner(whole_launches=True),
    "no barriers": Manner(whole_launches=True, barriers=False),
    "queues": Manner(whole_launches=True, barriers=False, queued=True),
    "chains": Manner(whole_launches=True, barriers=False, queued=True, chained=True),
}
"""From the schedule's price to what a runtime does, one effect after the other; the last is a runtime's step."""


def replay(plan: Plan, manner: Manner = EFFECTS["chains"]) -> int:
    """Nanoseconds of one of many steps of a plan, run event by event: a compute stream, and a queue for every lane.

    >>> replay(plan, Manner()) == by_windows(plan).total_ns                        # doctest: +SKIP
    True

    The compute stream runs the ops of all microbatches in order and issues what runs beside them at the start of each window; a collective
    that it needs at once it waits for. What collectives take from compute it pays when it issues them.
    """
    return _Replay(plan, manner).run()


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """A collective as it is issued: nanoseconds in all, of its launch and on each lane in order; and when it is done."""

    name: str
    nanoseconds: int
    launch: int
    lanes: list[tuple[int, int]]
    done: int = 0


class _Lane:
    """One lane: a queue of what runs beside compute, which what stops the compute goes before unless the lane serves in order."""

    def __init__(self) -> None:
        self.now = 0
        self.queue: list[tuple[_Job, int]] = []

    def serve(self, until: int) -> None:
        """Work off the queue as far as there is time."""
        while self.queue and self.now < until:
            job, left = self.queue[0]
            if self.now + left > until:
                self.queue[0], self.now = (job, left - (until - self.now)), until
                return
            self.now += left
            job.done = max(job.done, self.now)
            self.queue.pop(0)
        self.now = max(self.now, until)

    def finished(self) -> int:
        """When all that waits is done, if nothing comes between."""
        self.serve(self.now + sum(left for _, left in self.queue))
        return self.now


class _Replay:
    """One replay of a plan."""

    def __init__(self, plan: Plan, manner: Manner) -> None:
        self.plan, self.manner = plan, manner
        self.count, self.times = plan.options.microbatches, Collectives(plan.mesh, plan.cluster)
        self.lanes = [_Lane() for _ in self.times.lanes]
        schedule = schedule_of(plan)
        stretch = schedule.stretch
        self.blocks = [[i for i, _ in run] for _, run in itertools.groupby(enumerate(stretch), key=lambda pair: pair[1])]
        self.block_of = stretch
        self.names = [window.name for window in schedule.windows[1 : 1 + schedule.length]]
        self.now = 0
        self.drawn: list[Slice] = []
        self.durations: dict[tuple[str, tuple[str, ...], int, int], tuple[int, tuple[int, ...]]] = {}

    def run(self) -> int:
        self._sort()
        last = len(self.blocks) * self.count
        for position in range(-1, last + 1):
            start, name = self.now, "head" if position < 0 else "tail"
            self._issue(position)
            if 0 <= position < last:
                microbatch, k = divmod(position, len(self.blocks))
                self._block(microbatch, k)
                name = self.names[k] + (f", microbatch {microbatch + 1}" if self.count > 1 else "")
            if self.manner.barriers:
                self._drain()
            self._draw(WINDOWS, "window", name, start, self.now)
        start = self.now
        self._update()
        self._draw(WINDOWS, "window", "update", start, self.now)
        return self.now

    def _draw(self, row: Row, kind: Kind, name: str, start: int, stop: int) -> None:
        """A slice, joined to the one before where that goes on."""
        last = self.drawn[-1] if self.drawn else None
        if last is not None and (last.row, last.kind, last.name, last.stop) == (row, kind, name, start):
            self.drawn[-1] = dataclasses.replace(last, stop=stop)
        elif start < stop:
            self.drawn.append(Slice(row=row, kind=kind, name=name, start=start, stop=stop))

    def _spend(self, nanoseconds: int, name: str = "compute") -> None:
        """Time of the compute stream that is not spent waiting."""
        self._draw(STREAM, "computing", name, self.now, self.now + nanoseconds)
        self.now += nanoseconds

    def _await(self, moment: int, what: str) -> None:
        self._draw(STREAM, "waiting", f"waits for {what}", self.now, moment)
        self.now = max(self.now, moment)

    def _sort(self) -> None:
        """What is issued at the start of which block, and what stops the compute before or after which op.

        Blocks are numbered through all microbatches; -1 is before the first, and the one after the last before the update.
        """
        plan, several = self.plan, self.count > 1
        size, last = len(self.blocks), len(self.blocks) * self.count
        makers = {t: i for i, op in enumerate(plan.ops) for t in op.results}
        readers: dict[int, list[int]] = {}
        for reshard in plan.reshards:
            readers.setdefault(reshard.tensor, []).extend(i for i, _ in reshard.readers)
        self.issued: dict[int, list[Reshard]] = {}
        self.needed: dict[tuple[int, int], list[int]] = {}
        self.before: dict[int, list[Reshard]] = {}
        self.after: dict[int, list[Reshard]] = {}
        self.ending: list[Reshard] = []
        self.late: list[Reshard] = []
        for r, reshard in enumerate(plan.reshards):
            mine = [i for i, _ in reshard.readers]
            if reshard.purpose == "output" or (reshard.purpose == "accumulate" and reshard.tensor not in makers):
                self.ending.append(reshard)
            elif reshard.purpose in ("accumulate", "optimizer") and reshard.tensor in makers:
                block = self.block_of[makers[reshard.tensor]]
                once = reshard.purpose == "optimizer"
                for microbatch in range(self.count - 1 if once else 0, self.count):
                    self.issued.setdefault(microbatch * size + block + 1, []).append(reshard)
                if not (once and several):
                    self.after.setdefault(makers[reshard.tensor], []).append(reshard)
                else:
                    self.late.append(dataclasses.replace(reshard, steps=()))
            elif reshard.purpose == "update" and readers.get(reshard.tensor):
                first = min(readers[reshard.tensor])
                self.issued.setdefault(self.block_of[first] - 1, []).insert(0, reshard)
                self.needed.setdefault((0, first), []).append(r)
            elif mine and plan.tensors[reshard.tensor].role == "parameter":
                for microbatch in range(self.count):
                    self.issued.setdefault(microbatch * size + self.block_of[min(mine)] - 1, []).append(reshard)
                    self.needed.setdefault((microbatch, min(mine)), []).append(r)
                self.before.setdefault(min(mine), []).append(dataclasses.replace(reshard, steps=()))
            elif mine:
                self.before.setdefault(min(mine), []).append(reshard)
            else:
                self.late.append(reshard)
        assert max(self.issued, default=0) <= last
        self.position = {id(reshard): r for r, reshard in enumerate(plan.reshards)}
        self.jobs: dict[int, _Job] = {}
        self.brought: dict[int, _Job] = {}
        self.reducing: list[_Job] = []

    def _job(self, kind: str, axes: tuple[str, ...], nbytes: int, bucket: int, nanoseconds: int | None = None) -> _Job:
        key = (kind, axes, nbytes, bucket)
        if key not in self.durations:
            positions, size = [self.plan.mesh.index(name) for name in axes], np.array(nbytes, dtype=np.int64)
            whole = int(self.times.times(kind, positions, size, bucket))
            self.durations[key] = whole, tuple(self.times.lane_times(kind, positions, size, bucket).tolist())
        whole, lanes = self.durations[key]
        whole = whole if nanoseconds is None else nanoseconds
        order = [(r, min(x, whole)) for r, x in enumerate(lanes) if x]
        launch = min(whole, -int(-self.plan.cluster.launch_ns // bucket))
        name = f"{kind} {','.join(self.plan.mesh.joined(axes))}"
        return _Job(name=name, nanoseconds=whole, launch=launch, lanes=order[::-1] if kind == "all_gather" else order)

    def _issue(self, position: int) -> None:
        """Hand the lanes what runs beside a block, and pay for it on the compute stream."""
        start = self.now
        together: dict[Hashable, list[tuple[Reshard, int, ReshardStep]]] = {}
        for reshard in self.issued.get(position, ()):
            for k, step in enumerate(reshard.steps):
                if step.kind in LOCAL:
                    continue
                key: Hashable = (id(reshard), k)
                if self.manner.whole_launches and reshard.bucket > 1:
                    tensor = self.plan.tensors[reshard.tensor]
                    key = launch_of(reshard.purpose, self._owner(reshard), tensor.dtype, k, step.kind, step.axes)
                together.setdefault(key, []).append((reshard, k, step))
        for members in sorted(together.values(), key=lambda members: members[0][1]):
            first, _, step = members[0]
            if self.manner.whole_launches:
                job = self._job(step.kind, step.axes, sum(step.nbytes for _, _, step in members), 1)
            else:
                job = self._job(step.kind, step.axes, step.nbytes, first.bucket, step.nanoseconds)
            before = [
                self.brought[r.tensor] for r, _, _ in members if r.tensor in self.brought and r.purpose not in ("accumulate", "optimizer")
            ]
            before += [self.jobs[self.position[id(r)]] for r, k, _ in members if k and self.position[id(r)] in self.jobs]
            for reshard, _, _ in members:
                self.jobs[self.position[id(reshard)]] = job
                if reshard.purpose == "update":
                    self.brought[reshard.tensor] = job
                if reshard.purpose in ("accumulate", "optimizer"):
                    self.reducing.append(job)
            self._spend(job.launch + math.ceil(self._kappa * (job.nanoseconds - job.launch)), "slowed down by what runs beside it")
            self._put(job, start, max((other.done for other in before), default=0))

    @functools.cached_property
    def _kappa(self) -> Fraction:
        return Fraction(round(self.plan.cluster.kappa * 1_000_000), 1_000_000)

    @functools.cached_property
    def _index(self) -> PlanIndex:
        return PlanIndex(self.plan)

    def _owner(self, reshard: Reshard) -> str:
        return self._index.owner(reshard.tensor)

    def _put(self, job: _Job, ready: int, earliest: int) -> None:
        moment = max(ready + job.launch, earliest) if self.manner.chained else ready
        for r, left in job.lanes:
            lane = self.lanes[r]
            if self.manner.queued:
                self._append(job, r, left, moment, "beside")
                job.done = max(job.done, lane.now)
                moment = lane.now if self.manner.chained else moment
            else:
                lane.serve(moment)
                lane.queue.append((job, left))

    def _append(self, job: _Job, r: int, left: int, moment: int, category: Literal["waiting", "beside"]) -> None:
        """Run a part of a collective on a lane's queue, after what is there and not before this moment."""
        lane = self.lanes[r]
        start = max(lane.now, moment)
        lane.now = start + left
        self._draw((SIDE_BY_SIDE, f"lane {self.times.lanes[r]}"), category, job.name, start, lane.now)

    def _stop(self, job: _Job) -> None:
        """Run a collective that the compute stream waits for."""
        end, moment = self.now + job.nanoseconds, self.now + (job.launch if self.manner.chained else 0)
        for r, left in job.lanes:
            lane = self.lanes[r]
            if self.manner.queued:
                self._append(job, r, left, moment, "waiting")
                end = max(end, lane.now)
                moment = lane.now if self.manner.chained else moment
            else:
                lane.serve(self.now)
                lane.now = self.now + left
        self._await(end, job.name)

    def _wait(self, job: _Job) -> None:
        if not self.manner.queued:
            for r, _ in job.lanes:
                lane = self.lanes[r]
                lane.serve(self.now)
                ahead = [
                    left for _, left in lane.queue[: 1 + max((k for k, (other, _) in enumerate(lane.queue) if other is job), default=-1)]
                ]
                if ahead:
                    lane.serve(lane.now + sum(ahead))
        self._await(job.done, job.name)

    def _drain(self) -> None:
        self.now = max([self.now, *(lane.finished() for lane in self.lanes)])
        for lane in self.lanes:
            lane.serve(self.now)

    def _block(self, microbatch: int, k: int) -> None:
        """The ops of one block, each behind what it waits for and before what leaves it."""
        for i in self.blocks[k]:
            op = self.plan.ops[i]
            for r in () if self.manner.barriers else self.needed.get((microbatch, i), ()):
                if r in self.jobs:
                    self._wait(self.jobs[r])
            for reshard in self.before.get(i, ()):
                self._blocking(reshard)
            self._spend(op.nanoseconds)
            for inside in op.collectives:
                self._stop(self._job(inside.kind, inside.axes, inside.nbytes, 1, inside.nanoseconds))
            for reshard in self.after.get(i, ()):
                self._spend(reshard.traffic_ns)
        if k == len(self.blocks) - 1:
            for reshard in self.ending:
                self._blocking(reshard)

    def _blocking(self, reshard: Reshard) -> None:
        self._spend(reshard.traffic_ns)
        for step in reshard.steps:
            if step.kind not in LOCAL:
                self._stop(self._job(step.kind, step.axes, step.nbytes, reshard.bucket, step.nanoseconds))

    def _update(self) -> None:
        for job in self.reducing:
            self._wait(job)
        for reshard in self.late:
            self._blocking(reshard)
        clip = self.plan.clip
        if clip is not None:
            self._stop(self._job(clip.kind, clip.axes, clip.nbytes, 1, clip.nanoseconds))
        self._spend(self.plan.costs.update_ns)
        if self.manner.barriers:
            self._drain()
