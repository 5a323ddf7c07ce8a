"""Message passing (TRW-S, Kolmogorov 2006) on flat arrays, compiled: the same bound and messages as ``messages.Messages``.

    passing = Passing(flat)
    bound = passing.sweep(theta)            # without the problem's constant

All values are integers in float64 below 2**53 (messages are rounded down), so sums are exact and the bound is valid as computed.
"""

from __future__ import annotations

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve.flat import Flat
from solver_shard.solve.jit import compiled
from solver_shard.solve.problem import Floats


class Passing:
    """The state of message passing: ``forward`` to second nodes over core columns, ``backward`` to first nodes over core rows."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.forward = np.zeros(int(flat.fo[-1]))
        self.backward = np.zeros(int(flat.bo[-1]))
        widest = int(max(flat.k.max(initial=1), flat.nr.max(initial=1), flat.nc.max(initial=1)))
        self.scratch = np.zeros((4, widest))
        cells = int((flat.nr * flat.nc).sum())
        self.work = 2 * (1e-9 * cells + 4e-9 * int(flat.off[-1]) + 1e-7 * len(flat.ea))

    def sweep(self, theta: Floats) -> float:
        """One pass forward and one back; the bound."""
        f = self.flat
        return _sweep(
            f.k, f.off, theta, f.ea, f.eb, f.nr, f.nc, f.toff, f.pool, f.rmap, f.cmap, f.maps,
            f.fs, f.fl, f.bs, f.bl, f.bo, f.fo, f.share, self.forward, self.backward, self.scratch,
        )  # fmt: skip

    def decode(self, theta: Floats) -> Ints:
        """Node by node, the best given the earlier ones and the messages of the later ones; call after a sweep."""
        f = self.flat
        chosen = np.zeros(f.size, dtype=np.int64)
        _decode(
            f.k, f.off, theta, f.ea, f.nc, f.toff, f.pool, f.rmap, f.cmap, f.maps,
            f.fs, f.fl, f.bs, f.bl, f.bo, self.backward, chosen, self.scratch,
        )  # fmt: skip
        return chosen

    def forward_pass(self, theta: Floats) -> None:
        """The first half of a sweep."""
        f = self.flat
        _forward(
            f.k, f.off, theta, f.ea, f.eb, f.nr, f.nc, f.toff, f.pool, f.rmap, f.cmap, f.maps,
            f.fs, f.fl, f.bs, f.bl, f.bo, f.fo, f.share, self.forward, self.backward, self.scratch,
        )  # fmt: skip

    def beliefs(self, theta: Floats) -> Floats:
        """theta plus all messages that come in, per flat strategy."""
        f = self.flat
        total = theta.copy()
        _beliefs(f.k, f.off, f.ea, f.eb, f.rmap, f.cmap, f.maps, f.bo, f.fo, self.forward, self.backward, total)
        return total


@compiled
def _belief(v, k, off, theta, rmap, cmap, maps, fs, fl, bs, bl, bo, fo, forward, backward, out):  # type: ignore[no-untyped-def]
    for x in range(k):
        out[x] = theta[off + x]
    for q in range(bs[v], bs[v + 1]):
        e = bl[q]
        m, o = cmap[e], fo[e]
        if m < 0:
            for x in range(k):
                out[x] += forward[o + x]
        else:
            for x in range(k):
                out[x] += forward[o + maps[m + x]]
    for q in range(fs[v], fs[v + 1]):
        e = fl[q]
        m, o = rmap[e], bo[e]
        if m < 0:
            for x in range(k):
                out[x] += backward[o + x]
        else:
            for x in range(k):
                out[x] += backward[o + maps[m + x]]


@compiled
def _gather(k, values, m, maps, count, out):  # type: ignore[no-untyped-def]
    """Least value of each core row (or column)."""
    if m < 0:
        for x in range(k):
            out[x] = values[x]
    else:
        for r in range(count):
            out[r] = np.inf
        for x in range(k):
            r = maps[m + x]
            if values[x] < out[r]:
                out[r] = values[x]


@compiled
def _forward(k, off, theta, ea, eb, nr, nc, toff, pool, rmap, cmap, maps, fs, fl, bs, bl, bo, fo, share, forward, backward, scratch):  # type: ignore[no-untyped-def]
    belief, part = scratch[0], scratch[1]
    row, out = scratch[2], scratch[3]
    for v in range(len(k)):
        if fs[v] == fs[v + 1]:
            continue
        kv = k[v]
        _belief(v, kv, off[v], theta, rmap, cmap, maps, fs, fl, bs, bl, bo, fo, forward, backward, belief)
        for x in range(kv):
            part[x] = np.floor(belief[x] * share[v])
        for q in range(fs[v], fs[v + 1]):
            e = fl[q]
            rows, cols = nr[e], nc[e]
            _gather(kv, part, rmap[e], maps, rows, row)
            for c in range(cols):
                out[c] = np.inf
            for r in range(rows):
                low = row[r] - backward[bo[e] + r]
                cell = toff[e] + r * cols
                for c in range(cols):
                    value = low + pool[cell + c]
                    out[c] = value if value < out[c] else out[c]
            least = np.inf
            for c in range(cols):
                least = min(least, out[c])
            for c in range(cols):
                forward[fo[e] + c] = out[c] - least


@compiled
def _back(k, off, theta, ea, eb, nr, nc, toff, pool, rmap, cmap, maps, fs, fl, bs, bl, bo, fo, share, forward, backward, scratch):  # type: ignore[no-untyped-def]
    bound = 0.0
    belief, part, col = scratch[0], scratch[1], scratch[2]
    for v in range(len(k) - 1, -1, -1):
        kv = k[v]
        _belief(v, kv, off[v], theta, rmap, cmap, maps, fs, fl, bs, bl, bo, fo, forward, backward, belief)
        low = np.inf
        for x in range(kv):
            low = min(low, belief[x])
        bound += low
        if bs[v] == bs[v + 1]:
            continue
        for x in range(kv):
            part[x] = np.floor((belief[x] - low) * share[v])
        for q in range(bs[v], bs[v + 1]):
            e = bl[q]
            rows, cols = nr[e], nc[e]
            _gather(kv, part, cmap[e], maps, cols, col)
            for c in range(cols):
                col[c] -= forward[fo[e] + c]
            least = np.inf
            for r in range(rows):
                cell = toff[e] + r * cols
                best = np.inf
                for c in range(cols):
                    value = col[c] + pool[cell + c]
                    best = value if value < best else best
                backward[bo[e] + r] = best
                least = min(least, best)
            for r in range(rows):
                backward[bo[e] + r] -= least
            bound += least
    return bound


@compiled
def _sweep(k, off, theta, ea, eb, nr, nc, toff, pool, rmap, cmap, maps, fs, fl, bs, bl, bo, fo, share, forward, backward, scratch):  # type: ignore[no-untyped-def]
    _forward(k, off, theta, ea, eb, nr, nc, toff, pool, rmap, cmap, maps, fs, fl, bs, bl, bo, fo, share, forward, backward, scratch)
    return _back(k, off, theta, ea, eb, nr, nc, toff, pool, rmap, cmap, maps, fs, fl, bs, bl, bo, fo, share, forward, backward, scratch)


@compiled
def _decode(k, off, theta, ea, nc, toff, pool, rmap, cmap, maps, fs, fl, bs, bl, bo, backward, chosen, scratch):  # type: ignore[no-untyped-def]
    total = scratch[0]
    for v in range(len(k)):
        kv = k[v]
        for x in range(kv):
            total[x] = theta[off[v] + x]
        for q in range(fs[v], fs[v + 1]):
            e = fl[q]
            m, o = rmap[e], bo[e]
            for x in range(kv):
                total[x] += backward[o + (x if m < 0 else maps[m + x])]
        for q in range(bs[v], bs[v + 1]):
            e = bl[q]
            x = chosen[ea[e]]
            r = x if rmap[e] < 0 else maps[rmap[e] + x]
            cell, m = toff[e] + r * nc[e], cmap[e]
            for y in range(kv):
                total[y] += pool[cell + (y if m < 0 else maps[m + y])]
        best = 0
        for x in range(1, kv):
            if total[x] < total[best]:
                best = x
        chosen[v] = best


@compiled
def _beliefs(k, off, ea, eb, rmap, cmap, maps, bo, fo, forward, backward, total):  # type: ignore[no-untyped-def]
    for e in range(len(ea)):
        a, b = ea[e], eb[e]
        for x in range(k[a]):
            total[off[a] + x] += backward[bo[e] + (x if rmap[e] < 0 else maps[rmap[e] + x])]
        for y in range(k[b]):
            total[off[b] + y] += forward[fo[e] + (y if cmap[e] < 0 else maps[cmap[e] + y])]
