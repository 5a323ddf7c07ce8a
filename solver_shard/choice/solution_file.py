"""Solutions of choice graphs as files, and whether they are ones, in exact integers.

    assignment = read_solution("solution.json", graph)      # [1, 0, 2, ...] or {"assignment": [1, 0, 2, ...], ...}
    judge(graph, assignment).feasible

The plain list is the form of the ASPLOS 2025 contest; the object is what ``solver-shard solve-graph -o`` writes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from solver_shard.choice.graph import FORBIDDEN, ChoiceGraph, Ints
from solver_shard.errors import InputError

MAX_BYTES = 2**26
"""Largest file that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a solution is worth.

    Attributes:
        cost: total cost; entries of 10^18 count as themselves.
        peak: largest usage at any time.
        peak_time: the first time of that usage, or None where nothing is used.
        limit: of the graph, or None.
        forbidden: how many chosen costs are 10^18 or more, which the solver never chooses.
    """

    cost: int
    peak: int
    peak_time: int | None
    limit: int | None
    forbidden: int

    @property
    def feasible(self) -> bool:
        """Whether the usage is within the limit at all times."""
        return self.limit is None or self.peak <= self.limit


def judge(graph: ChoiceGraph, assignment: Ints) -> Verdict:
    """Cost and peak by the definition, in integers of any length: they may exceed 64 bits.

    It shares nothing with the solver but the graph itself.
    """
    chosen = assignment.tolist()
    costs = graph.costs[graph.offsets[:-1] + assignment].tolist()
    costs += [
        int(graph.tables[t][chosen[u], chosen[v]]) for (u, v), t in zip(graph.edges.tolist(), graph.edge_tables.tolist(), strict=True)
    ]
    usages = np.repeat(graph.usages[graph.offsets[:-1] + assignment], np.diff(graph.interval_offsets)).tolist()
    changes: dict[int, int] = {}
    for (start, stop), usage in zip(graph.intervals.tolist(), usages, strict=True):
        changes[start] = changes.get(start, 0) + usage
        changes[stop] = changes.get(stop, 0) - usage
    peak, peak_time, used = 0, None, 0
    for moment in sorted(changes):
        used += changes[moment]
        if used > peak:
            peak, peak_time = used, moment
    return Verdict(cost=sum(costs), peak=peak, peak_time=peak_time, limit=graph.limit, forbidden=sum(c >= FORBIDDEN for c in costs))


def read_solution(path: str | Path, graph: ChoiceGraph) -> Ints:
    """A strategy per node, int64[nodes], from a file.

    Raises:
        InputError: the file cannot be read, is not a solution, or is not one of this graph; the message says where.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"cannot read solution {str(path)!r}: {reason}; 'solver-shard solve-graph ... -o FILE' writes one") from None
    if len(text) > MAX_BYTES:
        raise InputError(f"{path}: is larger than {MAX_BYTES} bytes, the most that is read of a solution")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON ({error}); a solution is a list of strategy indices, [1, 0, 2]") from None
    if isinstance(data, dict):
        data = data.get("assignment")
    if not isinstance(data, list):
        raise InputError(f"{path}: is not a solution: expected a list of strategy indices, or an object with one as its 'assignment'")
    if len(data) != graph.size:
        raise InputError(f"{path}: has {len(data)} strategies; this graph has {graph.size} nodes, and each needs one")
    for v, (x, size) in enumerate(zip(data, graph.sizes().tolist(), strict=True)):
        if type(x) is not int or not 0 <= x < size:
            raise InputError(f"{path}: node {v} has strategy {str(x)[:40]}; legal is a whole number from 0 to {size - 1}")
    return np.array(data, dtype=np.int64)
