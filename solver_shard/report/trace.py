"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

>>> write_trace(chrome_trace(timeline(plan), plan), "trace.json.gz")

The form is the Trace Event Format's JSON object
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): slices are complete events (``X``), memory is counters
(``C``), names of rows are metadata (``M``), a collective with more hidden than there is compute for has an instant (``i``). Times are
microseconds in whole 2048ths, which floats add and subtract without an error: viewers do, and would draw a slice that ends a rounding
error late around what follows it. Rounded they are the nanoseconds of the timeline. There are four processes, one for each kind of row:

- ``step``: phases, inside microbatches where there are several;
- ``compute``: modules, inner ones inside outer ones, and ops;
- ``collectives``: a thread for each group of mesh axes; ``cat`` is ``exposed`` or ``hidden``;
- ``memory``: counters of the bytes of a device by category, in all, and of the limit.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping

from solver_shard.files import write_whole
from solver_shard.plan.plan import Plan
from solver_shard.report.timeline import COLLECTIVES, MODULES, OPS, PHASES, Row, Timeline

PROCESSES = ("step", "compute", COLLECTIVES, "memory")
"""By kind of row; the first one's pid is 1."""

MEMORY = PROCESSES.index("memory") + 1

PARTS = 2048
"""Of a microsecond, of which all times are multiples: fine enough that times and durations, rounded, are the right nanoseconds."""

Event = Mapping[str, object]


def chrome_trace(line: Timeline, plan: Plan) -> str:
    """JSON text, one event to a line; ``otherData`` names the plan and sums up the step in nanoseconds.

    Args:
        line: of this plan.
    """
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
        "peak_bytes": plan.memory.peak,
    }
    events = ",\n".join(_dump(event) for event in trace_events(line))
    return f'{{"displayTimeUnit":"ns","otherData":{_dump(about)},"traceEvents":[\n{events}\n]}}\n'


def trace_events(line: Timeline) -> Iterator[Event]:
    """All events: names of rows first, then slices row by row, marks, and memory in the order of time."""
    threads = {row: number for number, row in enumerate(_rows(line), start=1)}
    for pid, name in enumerate(PROCESSES, start=1):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for row, tid in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": _process(row), "tid": tid, "args": {"name": row[1]}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": _process(row), "tid": tid, "args": {"sort_index": tid}}
    for piece in line.slices:
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


def write_trace(text: str, path: str | os.PathLike[str]) -> int:
    """Write a trace, compressed if the name ends in ``.gz``, the same bytes for the same text; how many bytes were written.

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
    return [*fixed, *sorted(row for row in found if row not in fixed)]


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
