"""Small random choice graphs with bytes and costs beyond what 32 bits, or a float, can hold; and what enumeration says of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from enumeration import enumerate_allowed, totals

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import MIB, ChoiceGraph
from solver_shard.solve.engine import solve
from solver_shard.solve.solution import Event, Status

BYTES = (2**20, 2**29, 2**30, 2**31, 2**31, 2**32, 2**33, 2**36, 2**40, 2**45, 2**54, 2**57)
"""Usages are drawn below one of these: sums below and beyond 2**31, 2**32, 2**40 and 2**53."""

COSTS = (10**15, 2**53, 10**16, 3 * 10**16)
"""Costs are drawn up to one of these: totals beyond 2**53, and below FORBIDDEN."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A graph with its limit, an objective, and what enumeration finds: the least objective within the limit and the least peak."""

    graph: ChoiceGraph
    objective: str
    weight: int
    best: int | None
    least_peak: int | None


def graph_of(rng: np.random.Generator, *, costs: int, usages: int) -> ChoiceGraph:
    """Five to nine nodes of one to three strategies, sparse to dense; costs and usages up to these; one or two intervals a node."""
    nodes = int(rng.integers(5, 10))
    sizes = rng.choice([1, 2, 3, 3, 3], nodes)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    counts = rng.choice([1, 1, 1, 2], nodes)
    intervals = np.sort(rng.integers(0, 6, (int(counts.sum()), 2)), axis=1)
    intervals[:, 1] += 1
    pairs = [(u, v) for u in range(nodes) for v in range(u)]
    edges = [pairs[i] for i in rng.permutation(len(pairs))[: int(rng.integers(nodes // 2, 2 * nodes))]]
    tables = []
    for u, v in edges:
        shape = int(sizes[u]), int(sizes[v])
        table = rng.integers(0, costs, shape, endpoint=True) * (rng.random(shape) < 0.7)
        tables.append(np.where(rng.random(shape) < 0.15, FORBIDDEN, table).astype(np.int64))
    graph = ChoiceGraph(
        names=tuple(f"n{v}" for v in range(nodes)),
        offsets=offsets,
        costs=rng.integers(0, costs, offsets[-1], endpoint=True),
        usages=rng.integers(0, usages, offsets[-1], endpoint=True),
        interval_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        intervals=intervals.astype(np.int64),
        edges=np.array(edges, dtype=np.int64).reshape(-1, 2),
        edge_tables=np.arange(len(edges), dtype=np.int64),
        tables=tuple(tables),
    )
    graph.validate()
    return graph


def asked(seed: int, *, large: str) -> Asked:
    """A question with large "bytes" or large "costs": any objective; no limit, a binding one, or one that nothing keeps."""
    rng = np.random.default_rng([seed, ["bytes", "costs"].index(large)])
    if large == "bytes":
        graph = graph_of(rng, costs=int(rng.choice([10, 10**6, 10**6, 10**11])), usages=int(rng.choice(BYTES)))
    else:
        graph = graph_of(rng, costs=int(rng.choice(COSTS)), usages=int(rng.choice([1, 100, *BYTES])))
    rows = enumerate_allowed(graph)
    cost, peak = totals(graph, rows)
    if len(rows):
        peaks = np.sort(peak)
        cheapest = int(peak[cost.argmin()])
        limits = [None, *(int(peaks[int(share * (len(peaks) - 1))]) for share in (0.0, 0.02, 0.1, 0.3)), int(peaks[0]) - 1, cheapest - 1]
        limit = limits[int(rng.integers(len(limits)))]
        graph = replace(graph, limit=None if limit is None else max(0, limit))
    objective = str(rng.choice(["time", "time", "memory"]))
    weight = int(rng.choice([0, 0, 1, 1000, 10**6])) if objective == "time" else 0
    within = np.ones(len(rows), dtype=bool) if graph.limit is None else peak <= graph.limit
    values = [
        p if objective == "memory" else c + weight * p // MIB for c, p in zip(cost[within].tolist(), peak[within].tolist(), strict=True)
    ]
    return Asked(
        graph=graph,
        objective=objective,
        weight=weight,
        best=min(values, default=None),
        least_peak=int(peak.min()) if len(rows) else None,
    )


def wrong(question: Asked) -> str:
    """What is wrong with the solver's answer, to the last unit; nothing if it is right."""
    graph, events = question.graph, list[Event]()
    found = solve(
        graph,
        objective=question.objective,
        memory_weight=question.weight,
        gap=0.0,
        time_limit=None,
        work_limit=200.0,
        progress=events.append,
    )
    for event in events:
        if event.bound is not None and question.best is not None and event.bound > question.best:
            return f"bound {event.bound} above {question.best} ({event.source})"
    if question.least_peak is not None and found.peak_bound > question.least_peak:
        return f"least peak {question.least_peak}, said to be {found.peak_bound} at least"
    if question.best is None:
        return "" if found.status is Status.INFEASIBLE else f"nothing keeps the limit, and the status is {found.status}"
    if (found.status, found.objective, found.bound) != (Status.OPTIMAL, question.best, question.best):
        return f"{found.status}, {found.objective}, bound {found.bound}; the best is {question.best}"
    assert found.assignment is not None
    if not graph.allowed(found.assignment) or (graph.limit is not None and graph.peak(found.assignment) > graph.limit):
        return "the assignment is not allowed"
    return ""


def is_unfinished(fault: str) -> bool:
    """Whether nothing false was said: only less than could be."""
    return fault.startswith((f"{Status.FEASIBLE}", "nothing keeps the limit, and the status is Status.UNKNOWN"))
