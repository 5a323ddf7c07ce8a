"""Local search under the memory limit, compiled: descent that keeps the limit, and repair of what exceeds it.

local = Local(flat)
chosen = local.descend(chosen, theta, rng)      # better, and still within the limit
chosen = local.repair(chosen, theta)            # within the limit, or None
"""

from __future__ import annotations

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve import loads
from solver_shard.solve.flat import Flat
from solver_shard.solve.jit import compiled
from solver_shard.solve.problem import Floats

MOVES = 20_000
"""Changes after which a repair gives up."""


class Local:
    """Scratch space for local search on one flat problem."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.costs = np.zeros(int(flat.off[-1]))
        self.limit = int(flat.limit) if flat.limit is not None else 2**62
        self.carrier_node = np.repeat(np.arange(flat.size), np.diff(flat.ms))

    def descend(self, chosen: Ints, theta: Floats, rng: np.random.Generator, sweeps: int = 30) -> Ints:
        """Change one node at a time to its cheapest strategy that keeps the limit, until none helps. ``chosen`` must keep it."""
        f, chosen = self.flat, chosen.copy()
        top, added = loads.build(f.profile(chosen))
        _descend(
            f.k, f.off, theta, f.ea, f.eb, f.nc, f.toff, f.pool, f.rmap, f.cmap, f.maps, f.fs, f.fl, f.bs, f.bl,
            f.ms, f.uoff, f.usage, f.ss, f.starts, f.stops, self.limit, chosen, top, added, rng.permutation(f.size), sweeps,
        )  # fmt: skip
        return chosen

    def settle(self, chosen: Ints, theta: Floats, sweeps: int = 10) -> Ints:
        """The same without the limit."""
        f, chosen = self.flat, chosen.copy()
        _settle(
            f.k, f.off, theta, f.ea, f.eb, f.nc, f.toff, f.pool, f.rmap, f.cmap, f.maps, f.fs, f.fl, f.bs, f.bl, chosen, sweeps,
        )  # fmt: skip
        return chosen

    def repair(self, chosen: Ints, theta: Floats, moves: int = MOVES) -> Ints | None:
        """Bring an assignment within the limit by the changes of least cost per useful byte at the time of the peak; None on failure."""
        f, chosen = self.flat, chosen.copy()
        profile = f.profile(chosen)
        if int(profile.max(initial=0)) <= self.limit:
            return chosen
        top, added = loads.build(profile)
        done = _repair(
            f.k, f.off, theta, f.ea, f.eb, f.nc, f.toff, f.pool, f.rmap, f.cmap, f.maps, f.fs, f.fl, f.bs, f.bl,
            f.ms, f.uoff, f.usage, f.ss, f.starts, f.stops, self.limit, chosen, top, added, self.carrier_node, moves,
        )  # fmt: skip
        return chosen if done else None


@compiled
def given(v, k, off, theta, ea, eb, nc, toff, pool, rmap, cmap, maps, fs, fl, bs, bl, chosen, out):  # type: ignore[no-untyped-def]
    """Cost of each strategy of node v, given all others."""
    kv = k[v]
    for x in range(kv):
        out[x] = theta[off[v] + x]
    for q in range(bs[v], bs[v + 1]):
        e = bl[q]
        x = chosen[ea[e]]
        r = x if rmap[e] < 0 else maps[rmap[e] + x]
        cell, m = toff[e] + r * nc[e], cmap[e]
        if m < 0:
            for y in range(kv):
                out[y] += pool[cell + y]
        else:
            for y in range(kv):
                out[y] += pool[cell + maps[m + y]]
    for q in range(fs[v], fs[v + 1]):
        e = fl[q]
        y = chosen[eb[e]]
        c = y if cmap[e] < 0 else maps[cmap[e] + y]
        cell, m, width = toff[e] + c, rmap[e], nc[e]
        if m < 0:
            for x in range(kv):
                out[x] += pool[cell + x * width]
        else:
            for x in range(kv):
                out[x] += pool[cell + maps[m + x] * width]


@compiled
def _settle(k, off, theta, ea, eb, nc, toff, pool, rmap, cmap, maps, fs, fl, bs, bl, chosen, sweeps):  # type: ignore[no-untyped-def]
    out = np.empty(k.max())
    for _ in range(sweeps):
        changed = 0
        for v in range(len(k)):
            given(v, k, off, theta, ea, eb, nc, toff, pool, rmap, cmap, maps, fs, fl, bs, bl, chosen, out)
            best = chosen[v]
            for x in range(k[v]):
                if out[x] < out[best]:
                    best = x
            if best != chosen[v]:
                chosen[v] = best
                changed += 1
        if changed == 0:
            break


@compiled
def _descend(
    k,
    off,
    theta,
    ea,
    eb,
    nc,
    toff,
    pool,
    rmap,
    cmap,
    maps,
    fs,
    fl,
    bs,
    bl,
    ms,
    uoff,
    usage,
    ss,
    starts,
    stops,
    limit,
    chosen,
    top,
    added,
    order,
    sweeps,
):
    out = np.empty(k.max())
    for _ in range(sweeps):
        changed = 0
        for v in order:
            given(v, k, off, theta, ea, eb, nc, toff, pool, rmap, cmap, maps, fs, fl, bs, bl, chosen, out)
            old = chosen[v]
            while True:
                best = old
                for x in range(k[v]):
                    if out[x] < out[best]:
                        best = x
                if best == old:
                    break
                loads.move(top, added, v, old, best, ms, uoff, usage, ss, starts, stops)
                if top[1] <= limit:
                    chosen[v] = best
                    changed += 1
                    break
                loads.move(top, added, v, best, old, ms, uoff, usage, ss, starts, stops)
                out[best] = np.inf
        if changed == 0:
            break


@compiled
def _repair(
    k,
    off,
    theta,
    ea,
    eb,
    nc,
    toff,
    pool,
    rmap,
    cmap,
    maps,
    fs,
    fl,
    bs,
    bl,
    ms,
    uoff,
    usage,
    ss,
    starts,
    stops,
    limit,
    chosen,
    top,
    added,
    carrier_node,
    moves,
):
    n = len(k)
    out = np.empty(k.max())
    bytes_at = np.empty(k.max())
    nodes, strategies, ratios = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n)
    stale = np.zeros(n, np.int64)
    round_ = 0
    while top[1] > limit:
        round_ += 1
        t, before = loads.argmax(top), top[1]
        excess = before - limit
        count, c = 0, 0
        while c < len(carrier_node):
            v = carrier_node[c]
            kv = k[v]
            live = False
            for x in range(kv):
                bytes_at[x] = 0.0
            while c < len(carrier_node) and carrier_node[c] == v:
                times = 0
                for s in range(ss[c], ss[c + 1]):
                    if starts[s] <= t < stops[s]:
                        times += 1
                if times:
                    live = True
                    for x in range(kv):
                        bytes_at[x] += times * usage[uoff[c] + x]
                c += 1
            if not live:
                continue
            old = chosen[v]
            given(v, k, off, theta, ea, eb, nc, toff, pool, rmap, cmap, maps, fs, fl, bs, bl, chosen, out)
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
            loads.move(top, added, v, old, new, ms, uoff, usage, ss, starts, stops)
            if top[1] > before:
                loads.move(top, added, v, new, old, ms, uoff, usage, ss, starts, stops)
                continue
            chosen[v] = new
            applied += 1
            moves -= 1
            for q in range(bs[v], bs[v + 1]):
                stale[ea[bl[q]]] = round_
            for q in range(fs[v], fs[v + 1]):
                stale[eb[fl[q]]] = round_
            if loads.argmax(top) != t or top[1] <= limit or applied >= 64:
                break
        if applied == 0 or moves <= 0:
            return top[1] <= limit
    return True
