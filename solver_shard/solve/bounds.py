"""How much every strategy costs at least, on flat arrays, compiled: bounds for reduced-cost fixing.

    base, extra = margins(passing, theta, forests=4, rng=rng)

The messages split the costs into a constant and parts that are never negative: theta + tables = constant + unary + cells, where the
cell (r, c) of edge e is ``core[r, c] + rows[r] + cols[c]``. On a spanning forest of the edges the least sum of those parts over all
assignments with x_v = i is exact by two passes of min-plus products; the cells of the other edges are at least zero. So
base + extra[v, i] is a lower bound on the cost of every assignment with x_v = i. Of several forests the largest counts.
"""

from __future__ import annotations

import numpy as np

from solver_shard.solve.forest import _root
from solver_shard.solve.jit import compiled
from solver_shard.solve.problem import Floats
from solver_shard.solve.sweeps import Passing, _belief, _gather


def margins(passing: Passing, theta: Floats, *, forests: int, rng: np.random.Generator) -> tuple[float, Floats]:
    """(base, extra per flat strategy), scaled and without the problem's constant; the messages are moved by half a sweep."""
    f = passing.flat
    unary = np.empty(len(theta))
    rows, cols = np.empty_like(passing.backward), np.empty_like(passing.forward)
    passing.forward_pass(theta)
    base = _split(
        f.k, f.off, theta, f.nr, f.nc, f.toff, f.pool, f.rmap, f.cmap, f.maps, f.fs, f.fl, f.bs, f.bl, f.bo, f.fo, f.share,
        passing.forward, passing.backward, unary, rows, cols, passing.scratch,
    )  # fmt: skip
    extra = unary.copy()
    used = np.zeros(len(f.ea))
    for _ in range(forests):
        order = np.argsort(used + rng.random(len(f.ea)), kind="stable")
        found = unary.copy()
        _along_forest(
            order, f.k, f.off, f.ea, f.eb, f.nr, f.nc, f.toff, f.pool, f.rmap, f.cmap, f.maps, f.fs, f.fl, f.bs, f.bl, f.bo, f.fo,
            rows, cols, found, used,
        )  # fmt: skip
        np.maximum(extra, found, out=extra)
    return base, extra


@compiled
def _split(
    k, off, theta, nr, nc, toff, pool, rmap, cmap, maps, fs, fl, bs, bl, bo, fo, share, forward, backward, unary, rows, cols, scratch
):
    """The constant; fills ``unary``, ``rows`` and ``cols``. One backward pass of message passing."""
    constant = 0.0
    belief, part, least = scratch[0], scratch[1], scratch[2]
    for v in range(len(k) - 1, -1, -1):
        kv, o = k[v], off[v]
        _belief(v, kv, o, theta, rmap, cmap, maps, fs, fl, bs, bl, bo, fo, forward, backward, belief)
        low = np.inf
        for x in range(kv):
            low = min(low, belief[x])
        constant += low
        lower = bs[v + 1] - bs[v]
        for x in range(kv):
            belief[x] -= low
            part[x] = np.floor(belief[x] * share[v])
            unary[o + x] = belief[x] - lower * part[x]
        for q in range(bs[v], bs[v + 1]):
            e = bl[q]
            height, width, m = nr[e], nc[e], cmap[e]
            _gather(kv, part, m, maps, width, least)
            for x in range(kv):
                unary[o + x] += part[x] - least[x if m < 0 else maps[m + x]]
            for c in range(width):
                cols[fo[e] + c] = least[c] - forward[fo[e] + c]
            lowest = np.inf
            for r in range(height):
                cell = toff[e] + r * width
                best = np.inf
                for c in range(width):
                    value = pool[cell + c] + cols[fo[e] + c]
                    best = value if value < best else best
                rows[bo[e] + r] = -best
                lowest = min(lowest, best)
            for r in range(height):
                backward[bo[e] + r] = -rows[bo[e] + r] - lowest
            constant += lowest
    return constant


@compiled
def _along_forest(order, k, off, ea, eb, nr, nc, toff, pool, rmap, cmap, maps, fs, fl, bs, bl, bo, fo, rows, cols, total, used):  # type: ignore[no-untyped-def]
    """Turns ``total`` (unary parts) into least sums along a spanning forest of the first possible edges of ``order``."""
    n = len(k)
    leader = np.arange(n)
    taken = np.zeros(len(ea), np.bool_)
    for e in order:
        a, b = _root(leader, ea[e]), _root(leader, eb[e])
        if a != b:
            leader[a] = b
            taken[e] = True
            used[e] += 1.0
    sequence, via = np.empty(n, np.int64), np.full(n, -1)
    seen = np.zeros(n, np.bool_)
    count = 0
    for root in range(n):
        if seen[root]:
            continue
        seen[root] = True
        sequence[count] = root
        head = count
        count += 1
        while head < count:
            v = sequence[head]
            head += 1
            for side in range(2):
                start, stop = (bs[v], bs[v + 1]) if side == 0 else (fs[v], fs[v + 1])
                for q in range(start, stop):
                    e = bl[q] if side == 0 else fl[q]
                    w = ea[e] if side == 0 else eb[e]
                    if taken[e] and not seen[w]:
                        seen[w] = True
                        via[w] = e
                        sequence[count] = w
                        count += 1
    widest = max(k.max(), nr.max() if len(nr) else 1, nc.max() if len(nc) else 1)
    own, out = np.empty(widest), np.empty(widest)
    up_rows, up_cols = np.zeros(len(rows)), np.zeros(len(cols))  # what a parent heard from its child, by the parent's class
    for i in range(n - 1, -1, -1):
        v = sequence[i]
        e = via[v]
        if e < 0:
            continue
        if eb[e] == v:
            _gather(k[v], total[off[v] : off[v + 1]], cmap[e], maps, nc[e], own)
            _to_rows(e, nr, nc, toff, pool, bo, fo, rows, cols, own, out)
            w, m = ea[e], rmap[e]
            for r in range(nr[e]):
                up_rows[bo[e] + r] = out[r]
        else:
            _gather(k[v], total[off[v] : off[v + 1]], rmap[e], maps, nr[e], own)
            _to_cols(e, nr, nc, toff, pool, bo, fo, rows, cols, own, out)
            w, m = eb[e], cmap[e]
            for c in range(nc[e]):
                up_cols[fo[e] + c] = out[c]
        for x in range(k[w]):
            total[off[w] + x] += out[x if m < 0 else maps[m + x]]
    least = 0.0
    for i in range(n):
        v = sequence[i]
        e = via[v]
        o, kv = off[v], k[v]
        if e < 0:
            low = total[o : o + kv].min()
            least += low
            for x in range(kv):
                total[o + x] -= low
            continue
        if eb[e] == v:
            w, m = ea[e], cmap[e]
            _gather(k[w], total[off[w] : off[w + 1]], rmap[e], maps, nr[e], own)
            for r in range(nr[e]):
                own[r] -= up_rows[bo[e] + r]
            _to_cols(e, nr, nc, toff, pool, bo, fo, rows, cols, own, out)
        else:
            w, m = eb[e], rmap[e]
            _gather(k[w], total[off[w] : off[w + 1]], cmap[e], maps, nc[e], own)
            for c in range(nc[e]):
                own[c] -= up_cols[fo[e] + c]
            _to_rows(e, nr, nc, toff, pool, bo, fo, rows, cols, own, out)
        for x in range(kv):
            total[o + x] += out[x if m < 0 else maps[m + x]]
    for x in range(len(total)):
        total[x] += least


@compiled
def _to_rows(e, nr, nc, toff, pool, bo, fo, rows, cols, values, out):  # type: ignore[no-untyped-def]
    """Least over the columns of cell + value, per row."""
    width = nc[e]
    for r in range(nr[e]):
        cell = toff[e] + r * width
        best = np.inf
        for c in range(width):
            value = values[c] + pool[cell + c] + cols[fo[e] + c]
            best = value if value < best else best
        out[r] = best + rows[bo[e] + r]


@compiled
def _to_cols(e, nr, nc, toff, pool, bo, fo, rows, cols, values, out):  # type: ignore[no-untyped-def]
    """Least over the rows of cell + value, per column."""
    width = nc[e]
    for c in range(width):
        out[c] = np.inf
    for r in range(nr[e]):
        cell, low = toff[e] + r * width, values[r] + rows[bo[e] + r]
        for c in range(width):
            value = low + pool[cell + c]
            out[c] = value if value < out[c] else out[c]
    for c in range(width):
        out[c] += cols[fo[e] + c]
