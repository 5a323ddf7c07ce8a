"""The written trace: legal under the documented form, exact to the nanosecond, and the same bytes every time."""

from __future__ import annotations

import gzip
import itertools
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from lowered import lowered, random_assignment
from plan_examples import example
from programs import trained_mlp

from solver_shard.plan.plan import Plan
from solver_shard.plan.windows import by_windows
from solver_shard.reports.timeline import PROCESSES, SIDE_BY_SIDE, chrome_trace, replay, timeline, write_trace


def legal(trace: Any) -> list[dict[str, Any]]:
    """The events of a trace, after a check of what the Trace Event Format asks of its JSON object form."""
    assert trace["displayTimeUnit"] == "ns"
    events: list[dict[str, Any]] = trace["traceEvents"]
    processes = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    threads = {event["tid"]: event["pid"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert len(threads) == sum(event["name"] == "thread_name" for event in events), "a thread has one name, in one process"
    for event in events:
        assert event["ph"] in ("X", "C", "M", "i")
        assert isinstance(event["name"], str)
        assert event["name"]
        assert event["pid"] in processes
        assert isinstance(event["pid"], int)
        if event["ph"] in ("X", "i"):
            assert isinstance(event["tid"], int)
            assert threads[event["tid"]] == event["pid"]
        if event["ph"] != "M":
            assert isinstance(event["ts"], float)
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert isinstance(event["dur"], float)
            assert event["dur"] > 0
        if event["ph"] == "i":
            assert event["s"] == "t"
        if event["ph"] == "C":
            assert event["args"]
            assert all(type(value) is int and value >= 0 for value in event["args"].values())
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "process_sort_index", "thread_sort_index")
            assert event["args"].keys() == {"name" if event["name"].endswith("name") else "sort_index"}
    return events


def ns(microseconds: float) -> int:
    """As Perfetto reads a time."""
    return round(microseconds * 1000)


def planned(**options: Any) -> Plan:
    case = lowered(trained_mlp(12, 8, 20, 2), "2,2", **options)
    return case.plan(random_assignment(case.graph, 3))


@pytest.mark.parametrize(
    "options", [{}, {"overlap": 0.9}, {"microbatches": 4, "overlap": 0.5, "clip": True}], ids=["plain", "overlap", "microbatches"]
)
def test_a_written_trace_is_legal_and_adds_up_when_it_is_read(options: dict[str, Any]) -> None:
    plan = planned(**options)
    trace = json.loads(chrome_trace(timeline(plan), plan))
    events = legal(trace)
    beside = [event for event in events if event["ph"] == "X" and event["pid"] == PROCESSES.index(SIDE_BY_SIDE) + 1]
    slices = [event for event in events if event["ph"] == "X" and event not in beside]
    spent = {cat: sum(ns(e["dur"]) for e in slices if e["cat"] == cat) for cat in ("compute", "exposed", "hidden")}
    assert spent["compute"] == plan.costs.compute_ns + plan.costs.update_ns
    assert spent["exposed"] == plan.costs.communication_ns == trace["otherData"]["exposed_ns"]
    assert spent["hidden"] == plan.costs.hidden_ns - trace["otherData"]["hidden_without_compute_ns"]
    assert max(ns(e["ts"]) + ns(e["dur"]) for e in slices) == plan.costs.total_ns == trace["otherData"]["step_ns"]
    for tid in {e["tid"] for e in slices if e["cat"] in ("compute", "exposed", "hidden")}:
        row = [(ns(e["ts"]), ns(e["ts"]) + ns(e["dur"])) for e in slices if e["tid"] == tid]
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(row))
    assert {event["cat"] for event in beside} <= {"window", "computing", "waiting", "beside"}
    assert max(ns(e["ts"]) + ns(e["dur"]) for e in beside) == trace["otherData"]["side_by_side_ns"] == replay(plan)
    assert trace["otherData"]["by_windows_ns"] == by_windows(plan).total_ns
    exact = [(Fraction(e["ts"]), Fraction(e["dur"]), e) for e in slices]
    assert all(e["ts"] + e["dur"] == ts + dur and e["ts"] - slices[-1]["ts"] == ts - exact[-1][0] for ts, dur, e in exact), (
        "viewers add and subtract floats, and compare what they get with where others begin"
    )
    counters = [event for event in events if event["ph"] == "C"]
    total = [event["args"]["bytes"] for event in counters if event["name"] == "bytes in all"]
    assert max(total) == plan.memory.peak == trace["otherData"]["peak_bytes"]
    assert total == [sum(event["args"].values()) for event in counters if event["name"] == "bytes by category"]
    assert [event["args"]["bytes"] for event in counters if event["name"] == "limit"] == [plan.memory.limit] * 2


def test_rows_are_called_as_people_call_them() -> None:
    plan = example(layers=2)
    events = legal(json.loads(chrome_trace(timeline(plan), plan)))
    named = [(event["pid"], event["args"]["name"]) for event in events if event["name"] in ("process_name", "thread_name")]
    assert named == [
        (1, "step"), (2, "compute"), (3, "collectives"), (4, "memory"), (5, "side by side"),
        (1, "phases"), (2, "modules"), (2, "ops"), (3, "dp"), (3, "tp"), (5, "windows"), (5, "compute stream"), (5, "lane NVLink 4"),
    ]  # fmt: skip
    assert {"ph": "X", "name": "einsum: layers.0.up", "cat": "compute", "pid": 2, "tid": 3, "ts": 3.5, "dur": 5.0}.items() <= next(
        event for event in events if event["name"].startswith("einsum")
    ).items()
    assert [event["name"] for event in events if event["ph"] == "i"] == [
        "all_gather dp: layers.0.up.weight: no compute to hide 3.50 us under"
    ]


def test_the_same_plan_gives_the_same_bytes_compressed_too(tmp_path: Path) -> None:
    plan = planned(overlap=0.5)
    text = chrome_trace(timeline(plan), plan)
    assert text == chrome_trace(timeline(plan), plan)
    for name in ("a.json", "b.json", "a.json.gz", "b.json.gz"):
        assert write_trace(text, tmp_path / name) == (tmp_path / name).stat().st_size
    assert (tmp_path / "a.json").read_text() == text
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()).decode() == text
    assert (tmp_path / "a.json.gz").read_bytes()[4:8] == bytes(4), "no time of writing"
