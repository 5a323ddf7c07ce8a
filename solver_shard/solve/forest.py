"""Forest moves, compiled: the best joint change of the nodes of a random induced forest, given all others.

A random order picks a maximal set of nodes that induces a forest of the graph; dynamic programming along its trees finds the best
strategies of all of them at once, exactly. On graphs of low degree that is most of the nodes, so a few moves leave
what coordinate descent is stuck in. Memory enters as prices in ``theta``.
"""

from __future__ import annotations

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve.flat import Flat, Graph
from solver_shard.solve.jit import compiled
from solver_shard.solve.problem import Floats
from solver_shard.solve.spans import Bools


class Forest:
    """Scratch space for forest moves on one flat problem."""

    def __init__(self, flat: Flat, rng: np.random.Generator) -> None:
        self.flat, self.rng = flat, rng
        degree = np.diff(flat.graph.fs) + np.diff(flat.graph.bs)
        self.bias = (degree + 0.5) ** 0.7
        self.values = np.zeros(int(flat.graph.off[-1]))
        self.first, self.second = np.zeros(int(flat.graph.bo[-1]), np.int64), np.zeros(int(flat.graph.fo[-1]), np.int64)
        self.work = 2e-9 * int((flat.graph.nr * flat.graph.nc).sum()) + 1e-6 * flat.size

    def move(self, chosen: Ints, theta: Floats) -> None:
        """Improve ``chosen`` in place; its cost under ``theta`` never rises."""
        f = self.flat
        order = np.argsort(self.rng.random(f.size) * self.bias)
        _move(f.graph, theta, chosen, order, self.values, self.first, self.second)


@compiled
def _root(leader: Ints, v: int) -> int:
    while leader[v] != v:
        leader[v] = leader[leader[v]]
        v = leader[v]
    return v


@compiled
def _pick(g: Graph, order: Ints, inside: Bools) -> None:
    """Nodes of a maximal induced forest, in the given order of preference."""
    n = len(order)
    leader = np.arange(n)
    mark = np.full(n, -1)
    for v in order:
        free = True
        for side in range(2):
            start, stop = (g.bs[v], g.bs[v + 1]) if side == 0 else (g.fs[v], g.fs[v + 1])
            for q in range(start, stop):
                w = g.ea[g.bl[q]] if side == 0 else g.eb[g.fl[q]]
                if inside[w]:
                    root = _root(leader, w)
                    if mark[root] == v:
                        free = False
                        break
                    mark[root] = v
            if not free:
                break
        if not free:
            continue
        inside[v] = True
        for q in range(g.bs[v], g.bs[v + 1]):
            w = g.ea[g.bl[q]]
            if inside[w]:
                leader[_root(leader, w)] = v
        for q in range(g.fs[v], g.fs[v + 1]):
            w = g.eb[g.fl[q]]
            if inside[w]:
                leader[_root(leader, w)] = v


@compiled
def _walk(g: Graph, order: Ints, inside: Bools, sequence: Ints, via: Ints) -> int:
    """Nodes of the forest, parents first, and the edge to each one's parent (-1 for a root)."""
    count = 0
    seen = np.zeros(len(order), np.bool_)
    for root in order:
        if not inside[root] or seen[root]:
            continue
        seen[root] = True
        via[root] = -1
        sequence[count] = root
        head = count
        count += 1
        while head < count:
            v = sequence[head]
            head += 1
            for q in range(g.bs[v], g.bs[v + 1]):
                e = g.bl[q]
                w = g.ea[e]
                if inside[w] and not seen[w]:
                    seen[w] = True
                    via[w] = e
                    sequence[count] = w
                    count += 1
            for q in range(g.fs[v], g.fs[v + 1]):
                e = g.fl[q]
                w = g.eb[e]
                if inside[w] and not seen[w]:
                    seen[w] = True
                    via[w] = e
                    sequence[count] = w
                    count += 1
    return count


@compiled
def _move(g: Graph, theta: Floats, chosen: Ints, order: Ints, values: Floats, first: Ints, second: Ints) -> None:
    n = len(g.k)
    inside = np.zeros(n, np.bool_)
    _pick(g, order, inside)
    sequence, via = np.empty(n, np.int64), np.empty(n, np.int64)
    count = _walk(g, order, inside, sequence, via)
    # costs given the nodes outside of the forest
    for i in range(count):
        v = sequence[i]
        o, kv = g.off[v], g.k[v]
        for x in range(kv):
            values[o + x] = theta[o + x]
        for q in range(g.bs[v], g.bs[v + 1]):
            e = g.bl[q]
            w = g.ea[e]
            if not inside[w]:
                r = chosen[w] if g.rmap[e] < 0 else g.maps[g.rmap[e] + chosen[w]]
                cell, m = g.toff[e] + r * g.nc[e], g.cmap[e]
                for y in range(kv):
                    values[o + y] += g.pool[cell + (y if m < 0 else g.maps[m + y])]
        for q in range(g.fs[v], g.fs[v + 1]):
            e = g.fl[q]
            w = g.eb[e]
            if not inside[w]:
                c = chosen[w] if g.cmap[e] < 0 else g.maps[g.cmap[e] + chosen[w]]
                cell, m, width = g.toff[e] + c, g.rmap[e], g.nc[e]
                for x in range(kv):
                    values[o + x] += g.pool[cell + (x if m < 0 else g.maps[m + x]) * width]
    # leaves first: what each class of the parent's strategies costs at least below it
    widest = max(g.k.max(), g.nr.max() if len(g.nr) else 1, g.nc.max() if len(g.nc) else 1)
    own, least = np.empty(widest), np.empty(widest)
    which = np.empty(widest, np.int64)
    for i in range(count - 1, -1, -1):
        v = sequence[i]
        e = via[v]
        if e < 0:
            continue
        rows, cols = g.nr[e], g.nc[e]
        child_first = g.ea[e] == v
        mine, classes = (g.rmap[e], rows) if child_first else (g.cmap[e], cols)
        for r in range(classes):
            own[r] = np.inf
            which[r] = 0
        for x in range(g.k[v]):
            r = x if mine < 0 else g.maps[mine + x]
            if values[g.off[v] + x] < own[r]:
                own[r] = values[g.off[v] + x]
                which[r] = x
        if child_first:
            for c in range(cols):
                least[c] = np.inf
            for r in range(rows):
                cell = g.toff[e] + r * cols
                for c in range(cols):
                    value = own[r] + g.pool[cell + c]
                    if value < least[c]:
                        least[c] = value
                        second[g.fo[e] + c] = which[r]
            w, theirs = g.eb[e], g.cmap[e]
        else:
            for r in range(rows):
                cell = g.toff[e] + r * cols
                best, at = np.inf, 0
                for c in range(cols):
                    value = own[c] + g.pool[cell + c]
                    if value < best:
                        best, at = value, c
                least[r] = best
                first[g.bo[e] + r] = which[at]
            w, theirs = g.ea[e], g.rmap[e]
        for y in range(g.k[w]):
            values[g.off[w] + y] += least[y if theirs < 0 else g.maps[theirs + y]]
    # roots first: choose
    for i in range(count):
        v = sequence[i]
        e = via[v]
        if e < 0:
            best = chosen[v]
            for x in range(g.k[v]):
                if values[g.off[v] + x] < values[g.off[v] + best]:
                    best = x
            chosen[v] = best
        elif g.ea[e] == v:
            w = chosen[g.eb[e]]
            chosen[v] = second[g.fo[e] + (w if g.cmap[e] < 0 else g.maps[g.cmap[e] + w])]
        else:
            w = chosen[g.ea[e]]
            chosen[v] = first[g.bo[e] + (w if g.rmap[e] < 0 else g.maps[g.rmap[e] + w])]
