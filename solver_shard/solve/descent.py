"""Local search under the memory limit, compiled: descent that keeps the limit, and repair of what exceeds it.

local = Local(flat)
chosen = local.descend(chosen, theta, rng)      # better, and still within the limit
chosen = local.repair(chosen, theta)            # within the limit, or None
"""

from __future__ import annotations

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve import loads
from solver_shard.solve.flat import Bytes, Flat, Graph
from solver_shard.solve.jit import compiled
from solver_shard.solve.problem import Floats

MOVES = 20_000
"""Changes after which a repair gives up."""


class Local:
    """Scratch space for local search on one flat problem."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.limit = int(flat.limit) if flat.limit is not None else 2**62

    def descend(self, chosen: Ints, theta: Floats, rng: np.random.Generator, sweeps: int = 30) -> Ints:
        """Change one node at a time to its cheapest strategy that keeps the limit, until none helps. ``chosen`` must keep it."""
        f, chosen = self.flat, chosen.copy()
        top, added = loads.build(f.profile(chosen))
        _descend(f.graph, f.bytes, theta, self.limit, chosen, top, added, rng.permutation(f.size), sweeps)
        return chosen

    def settle(self, chosen: Ints, theta: Floats, sweeps: int = 10) -> Ints:
        """The same without the limit."""
        f, chosen = self.flat, chosen.copy()
        _settle(f.graph, theta, chosen, sweeps)
        return chosen

    def repair(self, chosen: Ints, theta: Floats, moves: int = MOVES) -> Ints | None:
        """Bring an assignment within the limit by the changes of least cost per useful byte at the time of the peak; None on failure."""
        f, chosen = self.flat, chosen.copy()
        profile = f.profile(chosen)
        if int(profile.max(initial=0)) <= self.limit:
            return chosen
        top, added = loads.build(profile)
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
                loads.move(m, top, added, v, old, best)
                if top[1] <= limit:
                    chosen[v] = best
                    changed += 1
                    break
                loads.move(m, top, added, v, best, old)
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
        t, before = loads.argmax(top), top[1]
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
            loads.move(m, top, added, v, old, new)
            if top[1] > before:
                loads.move(m, top, added, v, new, old)
                continue
            chosen[v] = new
            applied += 1
            moves -= 1
            for q in range(g.bs[v], g.bs[v + 1]):
                stale[g.ea[g.bl[q]]] = round_
            for q in range(g.fs[v], g.fs[v + 1]):
                stale[g.eb[g.fl[q]]] = round_
            if loads.argmax(top) != t or top[1] <= limit or applied >= 64:
                break
        if applied == 0 or moves <= 0:
            return bool(top[1] <= limit)
    return True
