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
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from solver_shard.choice.graph import FORBIDDEN, ChoiceGraph, Ints, exact_sum
from solver_shard.choice.iopddl_parse import MAX_CELLS, Contents, parse
from solver_shard.errors import InputError
from solver_shard.files import write_whole

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
class Evaluation:
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


def evaluate(path: str | Path, solution: Sequence[int]) -> Evaluation:
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
    return Evaluation(
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
        InputError: the file cannot be written.
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
    text = json.dumps({"problem": problem}, separators=(",", ":"))
    write_whole(path, gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text)
