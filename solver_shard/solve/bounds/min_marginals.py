"""How much every strategy costs at least: bounds for reduced-cost fixing.

A reparametrised problem (trws.Parts) is a constant plus entries that are never negative. On a forest of its edges the
least sum over all assignments with x_v = i is exact by two passes of min-plus products; the tables of the other edges are at
least their smallest entry, zero. So constant + that sum is a lower bound on the priced cost of every assignment with x_v = i: a
strategy whose bound exceeds the incumbent cannot be part of a better solution. Several forests are tried, the largest bound counts.
"""

from __future__ import annotations

import numpy as np

from solver_shard.solve.bounds.trws import Messages, Parts
from solver_shard.solve.problem import Floats


def min_marginals(messages: Messages, parts: Parts, forests: int, rng: np.random.Generator) -> list[Floats]:
    """float64 per node and strategy: least increase over ``parts.constant``, for the best of some random spanning forests."""
    best = [row.copy() for row in parts.unary]
    count = np.zeros(len(messages.edges))
    for _ in range(forests):
        forest = _forest(messages, count + rng.random(len(messages.edges)))
        for _, e in forest:
            if e >= 0:
                count[e] += 1
        for row, found in zip(best, _tree_marginals(messages, parts, forest), strict=True):
            np.maximum(row, found, out=row)
    return best


def _forest(messages: Messages, key: Floats) -> list[tuple[int, int]]:
    """A spanning forest as (child, edge to its parent), parents first; edges of small key are preferred. Roots have edge -1."""
    n = messages.problem.size
    leader = list(range(n))

    def find(v: int) -> int:
        while leader[v] != v:
            leader[v] = leader[leader[v]]
            v = leader[v]
        return v

    around: list[list[int]] = [[] for _ in range(n)]
    for e in np.argsort(key, kind="stable").tolist():
        a, b = find(messages.edges[e].a), find(messages.edges[e].b)
        if a != b:
            leader[a] = b
            around[messages.edges[e].a].append(e)
            around[messages.edges[e].b].append(e)
    order: list[tuple[int, int]] = []
    seen = [False] * n
    for root in range(n):
        if seen[root]:
            continue
        seen[root] = True
        stack = [(root, -1)]
        while stack:
            v, via = stack.pop()
            order.append((v, via))
            for e in around[v]:
                edge = messages.edges[e]
                w = edge.b if edge.a == v else edge.a
                if not seen[w]:
                    seen[w] = True
                    stack.append((w, e))
    return order


def _tree_marginals(messages: Messages, parts: Parts, forest: list[tuple[int, int]]) -> list[Floats]:
    total = [row.copy() for row in parts.unary]
    up: dict[int, Floats] = {}
    for v, e in reversed(forest):  # children before parents
        if e < 0:
            continue
        edge, table = messages.edges[e], parts.tables[e]
        if edge.b == v:
            up[v] = (table + messages.group_cols[e](total[v])[None, :]).min(axis=1)
            total[edge.a] += up[v][edge.rows]
        else:
            up[v] = (table + messages.group_rows[e](total[v])[:, None]).min(axis=0)
            total[edge.b] += up[v][edge.cols]
    least = 0.0
    for v, e in forest:
        if e < 0:
            least += float(total[v].min())
            total[v] -= total[v].min()
            continue
        edge, table = messages.edges[e], parts.tables[e]
        if edge.b == v:
            rest = messages.group_rows[e](total[edge.a]) - up[v]
            total[v] += (table + rest[:, None]).min(axis=0)[edge.cols]
        else:
            rest = messages.group_cols[e](total[edge.b]) - up[v]
            total[v] += (table + rest[None, :]).min(axis=1)[edge.rows]
    return [row + least for row in total]
