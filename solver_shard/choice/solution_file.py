"""Solutions of IOPDDL problems as files, and as a start of the solver.

    strategies = read_solution("solution.json")         # [1, 0, 2, ...] or {"assignment": [1, 0, 2, ...], ...}
    evaluate("problem.json", strategies).feasible       # choice/iopddl.py
    solve(graph, warm_starts=[start_from(strategies, graph, "solution.json")])

The plain list is the form of the ASPLOS 2025 contest; the object is what ``solver-shard solve-graph -o`` writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from solver_shard.choice.graph import FORBIDDEN, ChoiceGraph
from solver_shard.choice.iopddl import file_nodes
from solver_shard.errors import InputError
from solver_shard.files import read_json
from solver_shard.solve.solution import WarmStart

MAX_BYTES = 2**26
"""Largest file that is read."""


def read_solution(path: str | Path) -> list[int]:
    """A strategy per node of some problem.

    Raises:
        InputError: the file cannot be read, or is not a solution; the message says what it should be.
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
        data = read_json(text.decode())
    except ValueError as error:
        raise InputError(f"{path}: is not JSON ({error}); a solution is a list of strategy indices, [1, 0, 2]") from None
    if isinstance(data, dict):
        data = data.get("assignment")
    if not isinstance(data, list):
        raise InputError(f"{path}: is not a solution: expected a list of strategy indices, or an object with one as its 'assignment'")
    wrong = next(((v, x) for v, x in enumerate(data) if type(x) is not int), None)
    if wrong is not None:
        raise InputError(f"{path}: the strategy of node {wrong[0]} is {str(wrong[1])[:40]}; it must be a whole number, its index")
    return data


def start_from(solution: Sequence[int], graph: ChoiceGraph, name: str) -> WarmStart:
    """A solution of a file as a start for the graph that was read from it; complete unless it chooses something forbidden.

    Raises:
        InputError: it is not one of this graph.
    """
    count, sizes = file_nodes(graph), graph.sizes().tolist()
    if len(solution) != count:
        raise InputError(f"{name}: has {len(solution)} strategies; this problem has {count} nodes, and needs one for each")
    for v, (x, size) in enumerate(zip(solution, sizes[:count], strict=True)):
        if not 0 <= x < size:
            raise InputError(f"{name}: has strategy {x} for node {v}; legal is an integer from 0 to {size - 1}")
    allowed = {v: np.arange(size) == x for v, (x, size) in enumerate(zip(solution, sizes[:count], strict=True))}
    joint = {v: np.ones(size, dtype=bool) for v, size in enumerate(sizes[count:], start=count)}
    for (u, v), table in zip(graph.edges.tolist(), graph.edge_tables.tolist(), strict=True):
        if v in joint:
            joint[v] &= graph.tables[table][solution[u]] < FORBIDDEN
    return WarmStart(name=name, allowed=allowed | {v: mask for v, mask in joint.items() if mask.any()})
