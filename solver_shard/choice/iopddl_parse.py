"""What an IOPDDL file says, as flat arrays: the untrusted part of reading, bounded in time and memory.

>>> parse("example.json").sizes()  # doctest: +SKIP
array([3, 3, 3, 3, 3])

Nothing is believed: sizes are bounded before JSON is parsed, every number is checked to be an integer in range, every length
against the others. Tables may have any number of nodes; equal ones are stored once.
"""

from __future__ import annotations

import gzip
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from solver_shard.choice.graph import FORBIDDEN, Ints
from solver_shard.choice.graph import MAX_BYTES as MOST_BYTES
from solver_shard.errors import InputError
from solver_shard.files import read_json

MAX_BYTES = 2**29
"""Largest (decompressed) file that is read."""

MAX_VALUES = 40_000_000
"""Most numbers in a file: some 40 bytes each while it is parsed."""

MAX_NODES = 1_000_000
MAX_CELLS = 40_000_000
"""Most cells of distinct tables."""

MAX_TIME = 2**40
MAX_ARITY = 30

CHUNK = 2**24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """A checked file of N nodes and E edges.

    Attributes:
        offsets: int64[N + 1]; the strategies of node v are ``offsets[v]:offsets[v + 1]`` of the two next arrays.
        costs, usages: int64 per strategy, from 0 to 10**18.
        intervals: int64[N, 2].
        edges: the nodes of each edge, one or more.
        edge_tables: the table of each edge.
        tables: distinct tables, int64, row-major and flat.
        limit: or None.
    """

    offsets: Ints
    costs: Ints
    usages: Ints
    intervals: Ints
    edges: list[tuple[int, ...]]
    edge_tables: list[int]
    tables: list[Ints]
    limit: int | None

    def sizes(self) -> Ints:
        """Number of strategies of each node."""
        return np.diff(self.offsets)


def parse(path: str | Path) -> Contents:
    """Read and check a file, plain or gzip (told by content).

    Raises:
        InputError: the file cannot be read, is not an IOPDDL problem, or is too large; the message says where.
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
    node_costs, offsets = _rows(costs, f"{path}: costs of node")
    node_usages, usage_offsets = _rows(usages, f"{path}: usages of node")
    spans, span_offsets = _rows(intervals, f"{path}: interval of node")
    _check_nodes(path, offsets, usage_offsets, spans, span_offsets)
    limit = problem.get("usage_limit")
    if limit is not None:
        limit = int(_ints([limit], f"{path}: usage_limit")[0])
    if len(offsets) > 1:
        most = sum(np.maximum.reduceat(node_usages, offsets[:-1]).tolist())
        if most > MOST_BYTES:
            raise InputError(
                f"{path}: the largest usages of all nodes sum to {most}; sums of usages must stay below 2^63: use a larger unit"
            )
    flat, edge_tables = _tables(path, tables)
    contents = Contents(
        offsets=offsets,
        costs=node_costs,
        usages=node_usages,
        intervals=spans.reshape(-1, 2),
        edges=_edges(path, pairs, len(costs)),
        edge_tables=edge_tables,
        tables=flat,
        limit=limit,
    )
    _check_tables(path, contents)
    return contents


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            source = gzip.GzipFile(fileobj=file) if packed else file
            chunks: list[bytes] = []
            length = values = 0
            while chunk := source.read(CHUNK):
                length += len(chunk)
                values += sum(chunk.count(mark) for mark in (b",", b"[", b"{"))
                if length > MAX_BYTES:
                    raise InputError(f"{path}: is larger than {MAX_BYTES} bytes, the most that is read")
                if values > MAX_VALUES:
                    raise InputError(f"{path}: has more than {MAX_VALUES} numbers, the most that are read")
                chunks.append(chunk)
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); give an IOPDDL problem as .json or .json.gz") from None
    except InputError:
        raise
    except Exception as error:  # zlib.error and its like have no common base
        raise InputError(f"{path}: is a damaged gzip file ({error})") from None
    try:
        text = b"".join(chunks)
        chunks.clear()
        decoded = text.decode()
        del text  # it is large: not to be held while the numbers are made
        return read_json(decoded)
    except ValueError as error:
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
    if isinstance(row, list) and set(map(type, row)) <= {int}:
        try:
            found = np.array(row, dtype=np.int64)
            if not len(found) or (found.min() >= 0 and found.max() <= FORBIDDEN):
                return found
        except OverflowError:
            pass
    bad = next((x for x in row if type(x) is not int or not 0 <= x <= FORBIDDEN), None) if isinstance(row, list) else row
    raise InputError(f"{where}: {_short(bad)!r} is not an integer from 0 to 10^18")


def _short(value: Any) -> str:
    """The beginning of a value's text; an integer may have thousands of digits, a list millions of items."""
    if isinstance(value, (list, dict)):
        return f"{type(value).__name__} of {len(value)}"
    return str(value)[:60]


def _rows(rows: list[Any], where: str) -> tuple[Ints, Ints]:
    """Lists of integers as one array, and where each begins."""
    try:
        if set(map(type, rows)) <= {list}:
            flat = _ints(list(itertools.chain.from_iterable(rows)), where)
            return flat, np.cumsum([0, *map(len, rows)], dtype=np.int64)
    except InputError:  # which row is it?
        pass
    for v, row in enumerate(rows):
        _ints(row, f"{where} {v}")
    raise AssertionError("one of the rows is wrong")


def _check_nodes(path: Path, offsets: Ints, usage_offsets: Ints, spans: Ints, span_offsets: Ints) -> None:
    sizes, usages, lengths = np.diff(offsets), np.diff(usage_offsets), np.diff(span_offsets)
    wrong = (sizes == 0) | (sizes != usages)
    if wrong.any():
        v = int(np.argmax(wrong))
        raise InputError(
            f"{path}: node {v} has {sizes[v]} costs and {usages[v]} usages; it needs one of each per strategy, at least one strategy"
        )
    wrong = lengths != 2
    if not wrong.any():
        wrong = (spans[::2] > spans[1::2]) | (spans[1::2] > MAX_TIME)
    if wrong.any():
        v = int(np.argmax(wrong))
        span = spans[span_offsets[v] : span_offsets[v + 1]][:4].tolist()
        raise InputError(f"{path}: node {v} has interval {span}; legal is [start, stop] with 0 <= start <= stop <= {MAX_TIME}")


def _tables(path: Path, rows: list[Any]) -> tuple[list[Ints], list[int]]:
    """The distinct tables, and the table of each edge; the lists are let go on the way."""
    tables: list[Ints] = []
    which: list[int] = []
    known: dict[bytes, int] = {}
    cells = 0
    for e in range(len(rows)):
        table = _ints(rows[e], f"{path}: table of edge {e}")
        rows[e] = None
        key = table.tobytes()
        if key not in known:
            cells += len(table)
            if cells > MAX_CELLS:
                raise InputError(f"{path}: more than {MAX_CELLS} table cells, the most that is read")
            known[key] = len(tables)
            tables.append(np.frombuffer(key, dtype=np.int64))
        which.append(known[key])
    return tables, which


def _edges(path: Path, pairs: list[Any], count: int) -> list[tuple[int, ...]]:
    for e, pair in enumerate(pairs):
        if not isinstance(pair, list) or not set(map(type, pair)) <= {int} or not all(0 <= v < count for v in pair):
            shown = pair[:8] if isinstance(pair, list) else pair
            raise InputError(f"{path}: edge {e} is {_short(str(shown))}; it must list nodes from 0 to {count - 1}")
        if not 1 <= len(pair) <= MAX_ARITY:
            raise InputError(f"{path}: edge {e} has {len(pair)} nodes; legal is 1 to {MAX_ARITY}")
    return [tuple(pair) for pair in pairs]


def _check_tables(path: Path, contents: Contents) -> None:
    sizes = contents.sizes().tolist()
    lengths = [len(table) for table in contents.tables]
    for e, (nodes, table) in enumerate(zip(contents.edges, contents.edge_tables, strict=True)):
        shape = [sizes[v] for v in nodes]
        if lengths[table] != math.prod(shape):
            raise InputError(
                f"{path}: edge {e} has a table of {lengths[table]} costs; nodes {list(nodes)} need {' x '.join(map(str, shape))}"
            )
