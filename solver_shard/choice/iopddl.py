"""IOPDDL files (the ASPLOS 2025 contest's JSON) to and from a ChoiceGraph.

    graph = read("example.json")            # also .json.gz, told by content
    write(graph, "copy.json.gz")            # compressed where the name ends in .gz

The format (repository google/iopddl): ``problem.nodes.{intervals, costs, usages}``, ``problem.edges.{nodes, costs}`` with
row-major tables, and an optional ``problem.usage_limit``. Intervals are half-open. A cost of 10**18 means forbidden.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from solver_shard.choice.graph import FORBIDDEN, ChoiceGraph, Ints
from solver_shard.errors import InputError

MAX_BYTES = 2**30
"""Largest (decompressed) file that is read."""

MAX_NODES = 1_000_000
MAX_CELLS = 200_000_000
MAX_TIME = 2**40


def read(path: str | Path) -> ChoiceGraph:
    """Read an IOPDDL problem, plain or gzip.

        >>> read("example.json").size
        5

    Equal tables are stored once; an edge from a node to itself and an edge of one node become node costs.

    Raises:
        InputError: the file cannot be read, is not such a problem, or is too large; the message says where.
    """
    path = Path(path)
    problem = _get(_get(_load(path), "problem", path), None, path)
    nodes, edges = _get(problem, "nodes", path), problem.get("edges", {"nodes": [], "costs": []})
    intervals, costs, usages = (_list(nodes, key, f"{path}: problem.nodes") for key in ("intervals", "costs", "usages"))
    pairs, tables = (_list(edges, key, f"{path}: problem.edges") for key in ("nodes", "costs"))
    if not len(intervals) == len(costs) == len(usages):
        raise InputError(
            f"{path}: {len(intervals)} intervals, {len(costs)} node costs and {len(usages)} usages; there must be one each per node"
        )
    if len(pairs) != len(tables):
        raise InputError(f"{path}: {len(pairs)} edges but {len(tables)} tables; there must be one table per edge")
    if len(costs) > MAX_NODES:
        raise InputError(f"{path}: {len(costs)} nodes; at most {MAX_NODES} are read")
    node_costs = [_ints(row, f"{path}: costs of node {v}") for v, row in enumerate(costs)]
    node_usages = [_ints(row, f"{path}: usages of node {v}") for v, row in enumerate(usages)]
    spans = [_ints(row, f"{path}: interval of node {v}") for v, row in enumerate(intervals)]
    for v, (cost, usage, span) in enumerate(zip(node_costs, node_usages, spans, strict=True)):
        if len(cost) == 0 or len(cost) != len(usage):
            raise InputError(
                f"{path}: node {v} has {len(cost)} costs and {len(usage)} usages; it needs one of each per strategy, at least one strategy"
            )
        if len(span) != 2 or span[0] > span[1] or span[1] > MAX_TIME:
            raise InputError(f"{path}: node {v} has interval {span.tolist()}; legal is [start, stop] with 0 <= start <= stop <= {MAX_TIME}")
    kept, edge_tables, unique = _edges(path, pairs, tables, node_costs)
    limit = problem.get("usage_limit")
    if limit is not None:
        limit = int(_ints([limit], f"{path}: usage_limit")[0])
    count = len(node_costs)
    empty = np.zeros(0, dtype=np.int64)
    graph = ChoiceGraph(
        names=tuple(f"node {v}" for v in range(count)),
        offsets=_offsets(len(row) for row in node_costs),
        costs=np.concatenate([empty, *node_costs]),
        usages=np.concatenate([empty, *node_usages]),
        interval_offsets=np.arange(count + 1, dtype=np.int64),
        intervals=np.array(spans, dtype=np.int64).reshape(count, 2),
        edges=np.array(kept, dtype=np.int64).reshape(-1, 2),
        edge_tables=np.array(edge_tables, dtype=np.int64),
        tables=tuple(unique),
        limit=limit,
    )
    graph.validate()
    return graph


def write(graph: ChoiceGraph, path: str | Path) -> None:
    """Write a graph as an IOPDDL problem; compressed where the name ends in ``.gz``.

    The format has one interval per node. Every further interval of a node becomes an extra node after the last one, with the
    same usages, no costs, and tied to its node by a table that forbids different strategies: the first ``graph.size``
    strategies of a solution of the file are a solution of the graph, of the same cost and peak.
    """
    path = Path(path)
    spans: list[list[int]] = []
    extra: list[tuple[int, list[int]]] = []
    for v in range(graph.size):
        own = graph.node_intervals(v).tolist()
        spans.append(own[0] if own else [0, 0])
        extra += [(v, span) for span in own[1:]]
    costs = [graph.node_costs(v).tolist() for v in range(graph.size)]
    usages = [graph.node_usages(v).tolist() for v in range(graph.size)]
    pairs = graph.edges.tolist()
    tables = [graph.tables[table].ravel().tolist() for table in graph.edge_tables.tolist()]
    for v, span in extra:
        size = len(costs[v])
        pairs.append([v, len(costs)])
        tables.append([0 if x == y else FORBIDDEN for x in range(size) for y in range(size)])
        spans.append(span)
        costs.append([0] * size)
        usages.append(usages[v])
    problem: dict[str, Any] = {
        "name": path.name.split(".")[0],
        "nodes": {"intervals": spans, "costs": costs, "usages": usages},
        "edges": {"nodes": pairs, "costs": tables},
    }
    if graph.limit is not None:
        problem["usage_limit"] = graph.limit
    text = json.dumps({"problem": problem}, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            text = gzip.GzipFile(fileobj=file).read(MAX_BYTES + 1) if packed else file.read(MAX_BYTES + 1)
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); give an IOPDDL problem as .json or .json.gz") from None
    except Exception as error:  # zlib.error and its like have no common base
        raise InputError(f"{path}: is a damaged gzip file ({error})") from None
    if len(text) > MAX_BYTES:
        raise InputError(f"{path}: is larger than {MAX_BYTES} bytes, the most that is read")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON ({error}); give an IOPDDL problem as .json or .json.gz") from None


def _get(value: Any, key: str | None, path: Path) -> Any:
    if not isinstance(value, dict):
        raise InputError(f"{path}: is not an IOPDDL problem: expected an object with problem.nodes and problem.edges")
    if key is None:
        return value
    if key not in value:
        raise InputError(
            f"{path}: has no {key!r}; an IOPDDL file has problem.nodes.{{intervals, costs, usages}} and problem.edges.{{nodes, costs}}"
        )
    return value[key]


def _list(value: Any, key: str, where: str) -> list[Any]:
    if not isinstance(value, dict) or not isinstance(value.get(key), list):
        raise InputError(f"{where}.{key} is not a list")
    result: list[Any] = value[key]
    return result


def _ints(row: Any, where: str) -> Ints:
    """A list of integers in 0..10**18 as an array."""
    if not isinstance(row, list) or not all(type(x) is int and 0 <= x <= FORBIDDEN for x in row):
        bad = next((x for x in row if type(x) is not int or not 0 <= x <= FORBIDDEN), None) if isinstance(row, list) else row
        raise InputError(f"{where}: {str(bad)[:60]!r} is not an integer from 0 to 10^18")
    return np.array(row, dtype=np.int64)


def _edges(path: Path, pairs: list[Any], tables: list[Any], node_costs: list[Ints]) -> tuple[list[tuple[int, int]], list[int], list[Ints]]:
    """Checked edges with their table numbers and the distinct tables; self-edges and one-node edges go into ``node_costs``."""
    kept: list[tuple[int, int]] = []
    edge_tables: list[int] = []
    unique: list[Ints] = []
    known: dict[tuple[tuple[int, ...], bytes], int] = {}
    cells = 0
    for e, (pair, row) in enumerate(zip(pairs, tables, strict=True)):
        if not isinstance(pair, list) or not all(type(v) is int and 0 <= v < len(node_costs) for v in pair):
            raise InputError(f"{path}: edge {e} is {str(pair)[:60]}; it must list nodes from 0 to {len(node_costs) - 1}")
        if not 1 <= len(pair) <= 2:
            raise InputError(
                f"{path}: edge {e} has {len(pair)} nodes; only edges of two are supported: make it a node with edges to its members"
            )
        table = _ints(row, f"{path}: table of edge {e}")
        shape = tuple(len(node_costs[v]) for v in pair)
        if len(table) != int(np.prod(shape)):
            raise InputError(f"{path}: edge {e} has a table of {len(table)} costs; nodes {pair} need {' x '.join(map(str, shape))}")
        if len(pair) == 1 or pair[0] == pair[1]:
            own = table if len(pair) == 1 else table.reshape(shape).diagonal()
            node_costs[pair[0]] = np.minimum(node_costs[pair[0]] + own, FORBIDDEN)
            continue
        key = (shape, table.tobytes())
        if key not in known:
            cells += len(table)
            if cells > MAX_CELLS:
                raise InputError(f"{path}: more than {MAX_CELLS} table cells, the most that is read")
            known[key] = len(unique)
            unique.append(table.reshape(shape))
        kept.append((pair[0], pair[1]))
        edge_tables.append(known[key])
    return kept, edge_tables, unique


def _offsets(sizes: Iterable[int]) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.fromiter(sizes, dtype=np.int64))]).astype(np.int64)
