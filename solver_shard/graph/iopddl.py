"""IOPDDL files (the ASPLOS 2025 contest's JSON) to and from a ChoiceGraph, and the exact value of any solution.

    graph = read("example.json")                     # also .json.gz, told by content
    write(graph, "copy.json.gz")                     # compressed where the name ends in .gz
    evaluate("example.json", [0, 0, 2, 2, 0]).cost   # by the contest's definition

The format (repository google/iopddl): ``problem.nodes.{intervals, costs, usages}``, ``problem.edges.{nodes, costs}`` with
row-major tables, and an optional ``problem.usage_limit``. Intervals are half-open. A cost of 10**18 means forbidden to the solver;
the contest's checker, and ``evaluate``, add it like any other.

**Edges of any number of nodes.** One of one node, or of twice the same, is a node cost. One of three nodes or more becomes a node: its
strategies are the allowed joint choices of the members, at their cost and without bytes, tied to each member by a table that
forbids what does not fit. These nodes follow those of the file: the first N strategies of a solution are the file's.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.errors import InputError
from solver_shard.files import read_json, write_whole
from solver_shard.graph.choice_graph import MAX_BYTES as MOST_BYTES
from solver_shard.graph.choice_graph import ChoiceGraph, Ints, WarmStart, exact_sum

MAX_JOINT = 20_000
"""Most allowed joint choices of one edge of three nodes or more."""

NODE = "node "
"""How the names of a file's nodes begin."""


def read(path: str | Path) -> ChoiceGraph:
    """Read an IOPDDL problem, plain or gzip.

        >>> read("example.json").size
        5

    Equal tables are stored once.

    Raises:
        InputError: the file cannot be read, is not such a problem, or is too large; the message says where.
    """
    builder = _Builder(Path(path), parse(path))
    return builder.graph()


def file_nodes(graph: ChoiceGraph) -> int:
    """How many nodes of a graph that was read are the file's own; those that stand for edges follow them."""
    return sum(name.startswith(NODE) for name in graph.names)


class _Builder:
    """A graph of a file's contents."""

    def __init__(self, path: Path, contents: Contents) -> None:
        self.path, self.contents = path, contents
        self.sizes: list[int] = contents.sizes().tolist()
        self.names = [f"{NODE}{v}" for v in range(len(self.sizes))]
        self.costs = contents.costs.copy()
        self.joint: list[Ints] = []  # costs of the nodes that stand for edges
        self.edges: list[tuple[int, int]] = []
        self.edge_tables: list[int] = []
        self.tables: list[Ints] = []
        self.known: dict[tuple[int, tuple[int, ...]], int] = {}
        self.cells = 0

    def graph(self) -> ChoiceGraph:
        contents = self.contents
        for e, (nodes, table) in enumerate(zip(contents.edges, contents.edge_tables, strict=True)):
            if len(nodes) == 2 and nodes[0] != nodes[1]:
                self._pair(nodes, table)
            else:
                self._other(e, nodes, contents.tables[table])
        more = sum(map(len, self.joint))
        intervals = np.concatenate([contents.intervals, np.zeros((len(self.joint), 2), dtype=np.int64)])
        graph = ChoiceGraph(
            names=tuple(self.names),
            offsets=np.cumsum([0, *self.sizes], dtype=np.int64),
            costs=np.concatenate([self.costs, *self.joint]),
            usages=np.concatenate([contents.usages, np.zeros(more, dtype=np.int64)]),
            interval_offsets=np.arange(len(self.sizes) + 1, dtype=np.int64),
            intervals=intervals,
            edges=np.array(self.edges, dtype=np.int64).reshape(-1, 2),
            edge_tables=np.array(self.edge_tables, dtype=np.int64),
            tables=tuple(self.tables),
            limit=contents.limit,
        )
        graph.validate()
        return graph

    def _pair(self, nodes: tuple[int, ...], table: int) -> None:
        shape = (self.sizes[nodes[0]], self.sizes[nodes[1]])
        if (table, shape) not in self.known:
            self.known[table, shape] = len(self.tables)
            self.tables.append(self.contents.tables[table].reshape(shape))
        self.edges.append((nodes[0], nodes[1]))
        self.edge_tables.append(self.known[table, shape])

    def _other(self, e: int, nodes: tuple[int, ...], flat: Ints) -> None:
        """An edge whose nodes are one, or more than two."""
        members = sorted(set(nodes))
        table = np.einsum(flat.reshape([self.sizes[v] for v in nodes]), [members.index(v) for v in nodes], list(range(len(members))))
        if len(members) == 1:
            start, stop = self.contents.offsets[members[0]], self.contents.offsets[members[0] + 1]
            self.costs[start:stop] = np.minimum(self.costs[start:stop] + table, FORBIDDEN)
            return
        if len(members) == 2:
            self._tie((members[0], members[1]), np.ascontiguousarray(table))
            return
        choices = np.argwhere(table < FORBIDDEN)
        if not len(choices):
            choices = np.zeros((1, len(members)), dtype=np.int64)  # forbidden whatever is chosen
        self.cells += len(choices) * sum(self.sizes[v] for v in members)
        if len(choices) > MAX_JOINT or self.cells > MAX_CELLS:
            raise InputError(
                f"{self.path}: edge {e} of {len(members)} nodes allows {len(choices)} joint choices; legal are {MAX_JOINT} an edge, and "
                f"{MAX_CELLS} cells of the tables between such choices and their members in all; split the edge"
            )
        self.joint.append(table[tuple(choices.T)])
        self.names.append(f"edge {e}")
        self.sizes.append(len(choices))
        for i, v in enumerate(members):
            fits = choices[:, i][None, :] == np.arange(self.sizes[v])[:, None]
            self._tie((v, len(self.sizes) - 1), np.where(fits, 0, FORBIDDEN))

    def _tie(self, nodes: tuple[int, int], table: Ints) -> None:
        self.edges.append(nodes)
        self.edge_tables.append(len(self.tables))
        self.tables.append(table)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEvaluation:
    """What a solution of a file costs and uses, by the contest's definition.

    Attributes:
        cost: sum of all chosen costs; 10**18 counts as itself.
        peak: largest sum of the usages of the live nodes.
        limit: of the file, or None.
        forbidden: chosen node costs and table entries of 10**18.
    """

    cost: int
    peak: int
    limit: int | None
    forbidden: int

    @property
    def feasible(self) -> bool:
        """Within the limit, and nothing forbidden is chosen."""
        return self.forbidden == 0 and (self.limit is None or self.peak <= self.limit)


def evaluate(path: str | Path, solution: Sequence[int]) -> FileEvaluation:
    """The exact value of a solution: one strategy per node of the file, edges of any number of nodes as they are written.

    Raises:
        InputError: the file cannot be read, or the solution does not fit it.
    """
    contents = parse(path)
    sizes = contents.sizes()
    count = len(sizes)
    if len(solution) != count:
        raise InputError(f"the solution has {len(solution)} strategies; {path} has {count} nodes, and needs one for each")
    for v, (x, size) in enumerate(zip(solution, sizes.tolist(), strict=True)):
        if isinstance(x, bool) or not isinstance(x, (int, np.integer)) or not 0 <= x < size:
            raise InputError(f"the solution has strategy {str(x)[:60]} for node {v}; legal is an integer from 0 to {size - 1}")
    chosen = [int(x) for x in solution]
    flat = contents.offsets[:-1] + np.array(chosen, dtype=np.int64)
    paid = []
    strides: list[int] = sizes.tolist()
    for nodes, table in zip(contents.edges, contents.edge_tables, strict=True):
        cell = 0
        for v in nodes:
            cell = cell * strides[v] + chosen[v]
        paid.append(contents.tables[table].item(cell))
    costs = contents.costs[flat]
    bare = ChoiceGraph(
        names=tuple(map(str, range(count))),
        offsets=contents.offsets,
        costs=contents.costs,
        usages=contents.usages,
        interval_offsets=np.arange(count + 1, dtype=np.int64),
        intervals=contents.intervals,
        edges=np.zeros((0, 2), dtype=np.int64),
        edge_tables=np.zeros(0, dtype=np.int64),
        tables=(),
    )
    return FileEvaluation(
        cost=exact_sum(costs) + sum(paid),
        peak=bare.peak(chosen),
        limit=contents.limit,
        forbidden=int((costs >= FORBIDDEN).sum()) + sum(cost >= FORBIDDEN for cost in paid),
    )


def write(graph: ChoiceGraph, path: str | Path) -> None:
    """Write a graph as an IOPDDL problem; compressed where the name ends in ``.gz``. The file is written whole or not at all.

    The format has one interval per node. Every further interval of a node becomes an extra node after the last one, with the
    same usages, no costs, and tied to its node by a table that forbids different strategies: the first ``graph.size``
    strategies of a solution of the file are a solution of the graph, of the same cost and peak.

    Raises:
        InputError: the file cannot be written, or the graph has windows, which the format has not.
    """
    if graph.loads is not None:
        raise InputError(f"{path}: an IOPDDL problem has no windows; write the graph of a sequential schedule, or graph.priced(weights)")
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
    text = json.dumps({"problem": problem}, separators=(",", ":"))
    write_whole(path, gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text)


MAX_GRAPH_BYTES = 2**29
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

    The untrusted part of reading, bounded in time and memory.

    >>> parse("example.json").sizes()  # doctest: +SKIP
    array([3, 3, 3, 3, 3])

    Nothing is believed: sizes are bounded before JSON is parsed, every number is checked to be an integer in range, every length
    against the others. Tables may have any number of nodes; equal ones are stored once.

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
                if length > MAX_GRAPH_BYTES:
                    raise InputError(f"{path}: is larger than {MAX_GRAPH_BYTES} bytes, the most that is read")
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


MAX_SOLUTION_BYTES = 2**26
"""Largest file that is read."""


def read_solution(path: str | Path) -> list[int]:
    """A strategy per node of some problem.

        strategies = read_solution("solution.json")         # [1, 0, 2, ...] or {"assignment": [1, 0, 2, ...], ...}
        evaluate("problem.json", strategies).feasible       # graph/iopddl.py
        solve(graph, warm_starts=[start_from(strategies, graph, "solution.json")])

    The plain list is the form of the ASPLOS 2025 contest; the object is what ``solver-shard solve-graph -o`` writes.

    Raises:
        InputError: the file cannot be read, or is not a solution; the message says what it should be.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_SOLUTION_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"cannot read solution {str(path)!r}: {reason}; 'solver-shard solve-graph ... -o FILE' writes one") from None
    if len(text) > MAX_SOLUTION_BYTES:
        raise InputError(f"{path}: is larger than {MAX_SOLUTION_BYTES} bytes, the most that is read of a solution")
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


def usage_text(peak: int, limit: int | None) -> str:
    """The peak against the limit."""
    if limit is None:
        return f"{peak:,}, no limit"
    return f"{peak:,} of {limit:,}" + (f" ({peak / limit:.2%})" if limit else "")
