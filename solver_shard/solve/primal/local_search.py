"""Local search under the memory limit, compiled: descent that keeps the limit, repair of what exceeds it, and forest moves.

local = Local(flat)
chosen = local.descend(chosen, theta, rng)      # better, and still within the limit
chosen = local.repair(chosen, theta)            # within the limit, or None
Forest(flat, rng).move(chosen, theta)           # better under these prices, in place
"""

from __future__ import annotations

import numpy as np

from solver_shard.graph.choice_graph import Bools, Ints
from solver_shard.solve import parameters as tuned
from solver_shard.solve.bounds.trws_compiled import _root, compiled
from solver_shard.solve.flat import Bytes, Flat, Graph
from solver_shard.solve.problem import Floats


class Local:
    """Scratch space for local search on one flat problem."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.limit = int(flat.limit) if flat.limit is not None else 2**62

    def descend(self, chosen: Ints, theta: Floats, rng: np.random.Generator, sweeps: int = 30) -> Ints:
        """Change one node at a time to its cheapest strategy that keeps the limit, until none helps. ``chosen`` must keep it."""
        f, chosen = self.flat, chosen.copy()
        top, added = build(f.profile(chosen))
        _descend(f.graph, f.bytes, theta, self.limit, chosen, top, added, rng.permutation(f.size), sweeps)
        return chosen

    def settle(self, chosen: Ints, theta: Floats, sweeps: int = 10) -> Ints:
        """The same without the limit."""
        f, chosen = self.flat, chosen.copy()
        _settle(f.graph, theta, chosen, sweeps)
        return chosen

    def repair(self, chosen: Ints, theta: Floats, moves: int = tuned.REPAIR_MOVES) -> Ints | None:
        """Bring an assignment within the limit by the changes of least cost per useful byte at the time of the peak; None on failure."""
        f, chosen = self.flat, chosen.copy()
        profile = f.profile(chosen)
        if int(profile.max(initial=0)) <= self.limit:
            return chosen
        top, added = build(profile)
        done = _repair(f.graph, f.bytes, theta, self.limit, chosen, top, added, moves)
        return chosen if done else None


@compiled
def given(g: Graph, v: int, theta: Floats, chosen: Ints, out: Floats) -> None:
    """Cost of each strategy of node v, given all others."""
    kv = g.k[v]
    for x in range(kv):
        out[x] = theta[g.off[v] + x]
    for q in range(g.bs[v], g.bs[v + 1]):
        e = g.bl[q]
        x = chosen[g.ea[e]]
        r = x if g.rmap[e] < 0 else g.maps[g.rmap[e] + x]
        cell, m = g.toff[e] + r * g.nc[e], g.cmap[e]
        if m < 0:
            for y in range(kv):
                out[y] += g.pool[cell + y]
        else:
            for y in range(kv):
                out[y] += g.pool[cell + g.maps[m + y]]
    for q in range(g.fs[v], g.fs[v + 1]):
        e = g.fl[q]
        y = chosen[g.eb[e]]
        c = y if g.cmap[e] < 0 else g.maps[g.cmap[e] + y]
        cell, m, width = g.toff[e] + c, g.rmap[e], g.nc[e]
        if m < 0:
            for x in range(kv):
                out[x] += g.pool[cell + x * width]
        else:
            for x in range(kv):
                out[x] += g.pool[cell + g.maps[m + x] * width]


@compiled
def _settle(g: Graph, theta: Floats, chosen: Ints, sweeps: int) -> None:
    out = np.empty(g.k.max())
    for _ in range(sweeps):
        changed = 0
        for v in range(len(g.k)):
            given(g, v, theta, chosen, out)
            best = chosen[v]
            for x in range(g.k[v]):
                if out[x] < out[best]:
                    best = x
            if best != chosen[v]:
                chosen[v] = best
                changed += 1
        if changed == 0:
            break


@compiled
def _descend(g: Graph, m: Bytes, theta: Floats, limit: int, chosen: Ints, top: Ints, added: Ints, order: Ints, sweeps: int) -> None:
    out = np.empty(g.k.max())
    for _ in range(sweeps):
        changed = 0
        for v in order:
            given(g, v, theta, chosen, out)
            old = chosen[v]
            while True:
                best = old
                for x in range(g.k[v]):
                    if out[x] < out[best]:
                        best = x
                if best == old:
                    break
                move(m, top, added, v, old, best)
                if top[1] <= limit:
                    chosen[v] = best
                    changed += 1
                    break
                move(m, top, added, v, best, old)
                out[best] = np.inf
        if changed == 0:
            break


@compiled
def _repair(g: Graph, m: Bytes, theta: Floats, limit: int, chosen: Ints, top: Ints, added: Ints, moves: int) -> bool:
    n = len(g.k)
    out = np.empty(g.k.max())
    bytes_at = np.empty(g.k.max())
    nodes, strategies, ratios = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n)
    stale = np.zeros(n, np.int64)
    round_ = 0
    while top[1] > limit:
        round_ += 1
        t, before = argmax(top), top[1]
        excess = before - limit
        count, c = 0, 0
        while c < len(m.node):
            v = m.node[c]
            kv = g.k[v]
            live = False
            for x in range(kv):
                bytes_at[x] = 0.0
            while c < len(m.node) and m.node[c] == v:
                times = 0
                for s in range(m.ss[c], m.ss[c + 1]):
                    if m.starts[s] <= t < m.stops[s]:
                        times += 1
                if times:
                    live = True
                    for x in range(kv):
                        bytes_at[x] += times * m.usage[m.uoff[c] + x]
                c += 1
            if not live:
                continue
            old = chosen[v]
            given(g, v, theta, chosen, out)
            best, best_ratio = -1, np.inf
            for x in range(kv):
                saved = bytes_at[old] - bytes_at[x]
                if saved > 0:
                    ratio = max(out[x] - out[old], 0.0) / min(saved, excess) - 1e-9 * saved / excess
                    if ratio < best_ratio:
                        best, best_ratio = x, ratio
            if best >= 0:
                nodes[count], strategies[count], ratios[count] = v, best, best_ratio
                count += 1
        applied = 0
        for i in np.argsort(ratios[:count]):
            v, new = nodes[i], strategies[i]
            if stale[v] == round_:
                continue
            old = chosen[v]
            move(m, top, added, v, old, new)
            if top[1] > before:
                move(m, top, added, v, new, old)
                continue
            chosen[v] = new
            applied += 1
            moves -= 1
            for q in range(g.bs[v], g.bs[v + 1]):
                stale[g.ea[g.bl[q]]] = round_
            for q in range(g.fs[v], g.fs[v + 1]):
                stale[g.eb[g.fl[q]]] = round_
            if argmax(top) != t or top[1] <= limit or applied >= 64:
                break
        if applied == 0 or moves <= 0:
            return bool(top[1] <= limit)
    return True


def build(profile: Ints) -> tuple[Ints, Ints]:
    """Bytes in use over time under changes: a tree of maxima with additions to ranges, (top, added), of a profile.

    Both have two entries per leaf, leaves from ``leaves = len(top) // 2`` on; times that do not exist use nothing. ``top[1]`` is the peak.
    Adding to a span costs the logarithm of the number of times, whatever its length.
    """
    leaves = 1
    while leaves < len(profile):
        leaves *= 2
    top = np.zeros(2 * leaves, dtype=np.int64)
    top[leaves : leaves + len(profile)] = profile
    width = leaves
    while width > 1:
        top[width // 2 : width] = np.maximum(top[width : 2 * width : 2], top[width + 1 : 2 * width : 2])
        width //= 2
    return top, np.zeros(2 * leaves, dtype=np.int64)


@compiled
def add(top: Ints, added: Ints, start: int, stop: int, amount: int) -> None:
    """Add to all times from start to stop (exclusive)."""
    leaves = len(top) // 2
    left, right = start + leaves, stop + leaves
    while left < right:
        if left & 1:
            top[left] += amount
            added[left] += amount
            left += 1
        if right & 1:
            right -= 1
            top[right] += amount
            added[right] += amount
        left >>= 1
        right >>= 1
    left, right = (start + leaves) >> 1, (stop - 1 + leaves) >> 1
    while left >= 1:
        top[left] = max(top[2 * left], top[2 * left + 1]) + added[left]
        if right != left:
            top[right] = max(top[2 * right], top[2 * right + 1]) + added[right]
        left >>= 1
        right >>= 1


@compiled
def argmax(top: Ints) -> int:
    """The first time of the peak."""
    leaves = len(top) // 2
    p = 1
    while p < leaves:
        p = 2 * p if top[2 * p] >= top[2 * p + 1] else 2 * p + 1
    return p - leaves


@compiled
def move(m: Bytes, top: Ints, added: Ints, v: int, old: int, new: int) -> None:
    """Change node v from one strategy to another; calling it with both exchanged takes that back."""
    for c in range(m.ms[v], m.ms[v + 1]):
        amount = m.usage[m.uoff[c] + new] - m.usage[m.uoff[c] + old]
        if amount != 0:
            for s in range(m.ss[c], m.ss[c + 1]):
                add(top, added, m.starts[s], m.stops[s], amount)


class Forest:
    """Forest moves on one flat problem: the best joint change of the nodes of a random induced forest, given all others.

    A random order picks a maximal set of nodes that induces a forest of the graph; dynamic programming along its trees finds the best
    strategies of all of them at once, exactly. On graphs of low degree that is most of the nodes, so a few moves leave what coordinate
    descent is stuck in. Memory enters as prices in ``theta``.
    """

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
