"""Fold tied nodes of a choice graph into one: one decision for all copies of a repeated layer.

A class of nodes with equal strategies becomes a single node whose cost is the sum over its members, with the intervals
of all of them (so its usage counts once for every member that is live). Edges between members of two classes add up;
an edge inside a class can only be used on its diagonal and becomes node cost. The folded problem is the free one
restricted to assignments that are equal within each class: every folded assignment expands to a free one of exactly the
same cost and memory profile. It does drop all others, so a bound of the folded problem is of tied plans only, and a certificate says so.

>>> expand(folded, folded_assignment)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from solver_shard.choice.graph import FORBIDDEN, ChoiceGraph, Ints, repeated


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Folded:
    """A folded graph and the folded node of every free node."""

    graph: ChoiceGraph
    member: Ints


def fold(graph: ChoiceGraph, classes: Ints) -> Folded:
    """Tie all nodes with equal class number; they must have the same number of strategies, in the same order."""
    _, first, member = np.unique(classes, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")  # folded nodes keep the order in which their first members appear
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    member = rank[member].astype(np.int64)
    leaders = first[order]
    copies = np.bincount(member)
    costs, usages, intervals = [], [], []
    members: list[list[int]] = [[] for _ in leaders]
    for v, c in enumerate(member.tolist()):
        members[c].append(v)
    for c, leader in enumerate(leaders.tolist()):
        cost = graph.node_costs(leader)
        costs.append(repeated(cost, int(copies[c])))
        usages.append(graph.node_usages(leader))
        intervals.append(np.concatenate([graph.node_intervals(v) for v in members[c]]))
    counts: dict[tuple[int, int, int, bool], int] = {}
    for (u, v), table in zip(graph.edges.tolist(), graph.edge_tables.tolist(), strict=True):
        a, b = int(member[u]), int(member[v])
        if a == b:
            costs[a] = _plus(costs[a], np.diagonal(graph.tables[table]))
        else:
            key = (a, b, table, False) if a < b else (b, a, table, True)
            counts[key] = counts.get(key, 0) + 1
    tables: list[Ints] = []
    known: dict[tuple[int, bool, int], int] = {}
    edges, edge_tables = [], []
    for (a, b, table, flipped), count in counts.items():
        if (table, flipped, count) not in known:
            known[table, flipped, count] = len(tables)
            source = graph.tables[table]
            tables.append(repeated(source.T if flipped else source, count))
        edges.append((a, b))
        edge_tables.append(known[table, flipped, count])
    folded = ChoiceGraph(
        names=tuple(graph.names[v] for v in leaders.tolist()),
        offsets=np.concatenate([[0], np.cumsum([len(c) for c in costs])]).astype(np.int64),
        costs=np.concatenate(costs),
        usages=np.concatenate(usages),
        interval_offsets=np.concatenate([[0], np.cumsum([len(x) for x in intervals])]).astype(np.int64),
        intervals=np.concatenate(intervals),
        edges=np.array(edges, dtype=np.int64).reshape(-1, 2),
        edge_tables=np.array(edge_tables, dtype=np.int64),
        tables=tuple(tables),
        limit=graph.limit,
    )
    return Folded(graph=folded, member=member)


def expand(folded: Folded, assignment: Sequence[int] | Ints) -> tuple[int, ...]:
    """The free graph's assignment that a folded one stands for."""
    return tuple(np.asarray(assignment, dtype=np.int64)[folded.member].tolist())


def _plus(a: Ints, b: Ints) -> Ints:
    return np.where((a >= FORBIDDEN) | (b >= FORBIDDEN), FORBIDDEN, np.minimum(a, FORBIDDEN) + np.minimum(b, FORBIDDEN))
