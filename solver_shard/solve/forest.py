"""Forest moves, compiled: the best joint change of the nodes of a random induced forest, given all others.

A random order picks a maximal set of nodes that induces a forest of the graph; dynamic programming along its trees finds the best
strategies of all of them at once, exactly. On graphs of low degree that is most of the nodes, so a few moves leave
what coordinate descent is stuck in. Memory enters as prices in ``theta``.
"""

from __future__ import annotations

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve.flat import Flat
from solver_shard.solve.jit import compiled
from solver_shard.solve.problem import Floats


class Forest:
    """Scratch space for forest moves on one flat problem."""

    def __init__(self, flat: Flat, rng: np.random.Generator) -> None:
        self.flat, self.rng = flat, rng
        degree = np.diff(flat.fs) + np.diff(flat.bs)
        self.bias = (degree + 0.5) ** 0.7
        self.values = np.zeros(int(flat.off[-1]))
        self.first, self.second = np.zeros(int(flat.bo[-1]), np.int32), np.zeros(int(flat.fo[-1]), np.int32)
        self.work = 2e-9 * int((flat.nr * flat.nc).sum()) + 1e-6 * flat.size

    def move(self, chosen: Ints, theta: Floats) -> None:
        """Improve ``chosen`` in place; its cost under ``theta`` never rises."""
        f = self.flat
        order = np.argsort(self.rng.random(f.size) * self.bias)
        _move(
            f.k, f.off, theta, f.ea, f.eb, f.nr, f.nc, f.toff, f.pool, f.rmap, f.cmap, f.maps, f.fs, f.fl, f.bs, f.bl, f.bo, f.fo,
            chosen, order, self.values, self.first, self.second,
        )  # fmt: skip


@compiled
def _root(leader, v):  # type: ignore[no-untyped-def]
    while leader[v] != v:
        leader[v] = leader[leader[v]]
        v = leader[v]
    return v


@compiled
def _pick(order, ea, eb, fs, fl, bs, bl, inside):  # type: ignore[no-untyped-def]
    """Nodes of a maximal induced forest, in the given order of preference."""
    n = len(order)
    leader = np.arange(n)
    mark = np.full(n, -1)
    for v in order:
        free = True
        for side in range(2):
            start, stop = (bs[v], bs[v + 1]) if side == 0 else (fs[v], fs[v + 1])
            for q in range(start, stop):
                w = ea[bl[q]] if side == 0 else eb[fl[q]]
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
        for q in range(bs[v], bs[v + 1]):
            w = ea[bl[q]]
            if inside[w]:
                leader[_root(leader, w)] = v
        for q in range(fs[v], fs[v + 1]):
            w = eb[fl[q]]
            if inside[w]:
                leader[_root(leader, w)] = v


@compiled
def _walk(order, ea, eb, fs, fl, bs, bl, inside, sequence, via):  # type: ignore[no-untyped-def]
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
            for q in range(bs[v], bs[v + 1]):
                e = bl[q]
                w = ea[e]
                if inside[w] and not seen[w]:
                    seen[w] = True
                    via[w] = e
                    sequence[count] = w
                    count += 1
            for q in range(fs[v], fs[v + 1]):
                e = fl[q]
                w = eb[e]
                if inside[w] and not seen[w]:
                    seen[w] = True
                    via[w] = e
                    sequence[count] = w
                    count += 1
    return count


@compiled
def _move(k, off, theta, ea, eb, nr, nc, toff, pool, rmap, cmap, maps, fs, fl, bs, bl, bo, fo, chosen, order, values, first, second):  # type: ignore[no-untyped-def]
    n = len(k)
    inside = np.zeros(n, np.bool_)
    _pick(order, ea, eb, fs, fl, bs, bl, inside)
    sequence, via = np.empty(n, np.int64), np.empty(n, np.int64)
    count = _walk(order, ea, eb, fs, fl, bs, bl, inside, sequence, via)
    # costs given the nodes outside of the forest
    for i in range(count):
        v = sequence[i]
        o, kv = off[v], k[v]
        for x in range(kv):
            values[o + x] = theta[o + x]
        for q in range(bs[v], bs[v + 1]):
            e = bl[q]
            w = ea[e]
            if not inside[w]:
                r = chosen[w] if rmap[e] < 0 else maps[rmap[e] + chosen[w]]
                cell, m = toff[e] + r * nc[e], cmap[e]
                for y in range(kv):
                    values[o + y] += pool[cell + (y if m < 0 else maps[m + y])]
        for q in range(fs[v], fs[v + 1]):
            e = fl[q]
            w = eb[e]
            if not inside[w]:
                c = chosen[w] if cmap[e] < 0 else maps[cmap[e] + chosen[w]]
                cell, m, width = toff[e] + c, rmap[e], nc[e]
                for x in range(kv):
                    values[o + x] += pool[cell + (x if m < 0 else maps[m + x]) * width]
    # leaves first: what each class of the parent's strategies costs at least below it
    widest = max(k.max(), nr.max() if len(nr) else 1, nc.max() if len(nc) else 1)
    own, least = np.empty(widest), np.empty(widest)
    which = np.empty(widest, np.int64)
    for i in range(count - 1, -1, -1):
        v = sequence[i]
        e = via[v]
        if e < 0:
            continue
        rows, cols = nr[e], nc[e]
        child_first = ea[e] == v
        mine, classes = (rmap[e], rows) if child_first else (cmap[e], cols)
        for r in range(classes):
            own[r] = np.inf
            which[r] = 0
        for x in range(k[v]):
            r = x if mine < 0 else maps[mine + x]
            if values[off[v] + x] < own[r]:
                own[r] = values[off[v] + x]
                which[r] = x
        if child_first:
            for c in range(cols):
                least[c] = np.inf
            for r in range(rows):
                cell = toff[e] + r * cols
                for c in range(cols):
                    value = own[r] + pool[cell + c]
                    if value < least[c]:
                        least[c] = value
                        second[fo[e] + c] = which[r]
            w, theirs = eb[e], cmap[e]
        else:
            for r in range(rows):
                cell = toff[e] + r * cols
                best, at = np.inf, 0
                for c in range(cols):
                    value = own[c] + pool[cell + c]
                    if value < best:
                        best, at = value, c
                least[r] = best
                first[bo[e] + r] = which[at]
            w, theirs = ea[e], rmap[e]
        for y in range(k[w]):
            values[off[w] + y] += least[y if theirs < 0 else maps[theirs + y]]
    # roots first: choose
    for i in range(count):
        v = sequence[i]
        e = via[v]
        if e < 0:
            best = chosen[v]
            for x in range(k[v]):
                if values[off[v] + x] < values[off[v] + best]:
                    best = x
            chosen[v] = best
        elif ea[e] == v:
            w = chosen[eb[e]]
            chosen[v] = second[fo[e] + (w if cmap[e] < 0 else maps[cmap[e] + w])]
        else:
            w = chosen[ea[e]]
            chosen[v] = first[bo[e] + (w if rmap[e] < 0 else maps[rmap[e] + w])]
