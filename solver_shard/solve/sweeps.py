"""Message passing (TRW-S, Kolmogorov 2006) on flat arrays, compiled: the same bound and messages as ``messages.Messages``.

    passing = Passing(flat)
    bound = passing.sweep(theta)            # without the problem's constant

All values are integers in float64 below 2**53, so sums are exact and the bound is valid as computed. Costs alone would not see to
that: messages about strategies that nothing allowed contains grow until a sum has several CLASH in it, and prices of memory have no
end. So unary costs are at most MOST, and all messages to a node together at most twice that: a smaller message, as a smaller cost,
only makes the bound less. With a share of 1/d a node has at most 2d edges, and each message is at most MOST/d.
"""

from __future__ import annotations

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve.flat import Flat, Graph
from solver_shard.solve.jit import compiled
from solver_shard.solve.problem import Floats

MOST = 2.0**51
"""Largest unary cost; times the share of a node, the largest message to it."""

EXACT = 2.0**53
NO_BOUND = -(2.0**60)
"""What a sweep gives whose sums were not exact: below anything."""


class Passing:
    """The state of message passing: ``forward`` to second nodes over core columns, ``backward`` to first nodes over core rows."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.forward = np.zeros(int(flat.graph.fo[-1]))
        self.backward = np.zeros(int(flat.graph.bo[-1]))
        widest = int(max(flat.graph.k.max(initial=1), flat.graph.nr.max(initial=1), flat.graph.nc.max(initial=1)))
        self.scratch = np.zeros((4, widest))
        cells = int((flat.graph.nr * flat.graph.nc).sum())
        self.work = 2 * (1e-9 * cells + 4e-9 * int(flat.graph.off[-1]) + 1e-7 * len(flat.graph.ea))

    def sweep(self, theta: Floats) -> float:
        """One pass forward and one back; the bound."""
        f = self.flat
        return _sweep(f.graph, theta, self.forward, self.backward, self.scratch)

    def decode(self, theta: Floats) -> Ints:
        """Node by node, the best given the earlier ones and the messages of the later ones; call after a sweep."""
        f = self.flat
        chosen = np.zeros(f.size, dtype=np.int64)
        _decode(f.graph, theta, self.backward, chosen, self.scratch)
        return chosen

    def forward_pass(self, theta: Floats) -> None:
        """The first half of a sweep."""
        f = self.flat
        _forward(f.graph, theta, self.forward, self.backward, self.scratch)

    def beliefs(self, theta: Floats) -> Floats:
        """theta plus all messages that come in, per flat strategy."""
        f = self.flat
        total = theta.copy()
        _beliefs(f.graph, self.forward, self.backward, total)
        return total


@compiled
def _belief(g: Graph, v: int, k: int, off: int, theta: Floats, forward: Floats, backward: Floats, out: Floats) -> None:
    for x in range(k):
        out[x] = theta[off + x]
    for q in range(g.bs[v], g.bs[v + 1]):
        e = g.bl[q]
        m, o = g.cmap[e], g.fo[e]
        if m < 0:
            for x in range(k):
                out[x] += forward[o + x]
        else:
            for x in range(k):
                out[x] += forward[o + g.maps[m + x]]
    for q in range(g.fs[v], g.fs[v + 1]):
        e = g.fl[q]
        m, o = g.rmap[e], g.bo[e]
        if m < 0:
            for x in range(k):
                out[x] += backward[o + x]
        else:
            for x in range(k):
                out[x] += backward[o + g.maps[m + x]]


@compiled
def _gather(k: int, values: Floats, m: int, maps: Ints, count: int, out: Floats) -> None:
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
def _forward(g: Graph, theta: Floats, forward: Floats, backward: Floats, scratch: Floats) -> None:
    belief, part = scratch[0], scratch[1]
    row, out = scratch[2], scratch[3]
    for v in range(len(g.k)):
        if g.fs[v] == g.fs[v + 1]:
            continue
        kv = g.k[v]
        _belief(g, v, kv, g.off[v], theta, forward, backward, belief)
        for x in range(kv):
            part[x] = np.floor(belief[x] * g.share[v])
        for q in range(g.fs[v], g.fs[v + 1]):
            e = g.fl[q]
            rows, cols = g.nr[e], g.nc[e]
            _gather(kv, part, g.rmap[e], g.maps, rows, row)
            for c in range(cols):
                out[c] = np.inf
            for r in range(rows):
                low = row[r] - backward[g.bo[e] + r]
                cell = g.toff[e] + r * cols
                for c in range(cols):
                    value = low + g.pool[cell + c]
                    out[c] = value if value < out[c] else out[c]
            least = np.inf
            for c in range(cols):
                least = min(least, out[c])
            most = np.floor(MOST * g.share[g.eb[e]])
            for c in range(cols):
                forward[g.fo[e] + c] = min(out[c] - least, most)


@compiled
def _back(g: Graph, theta: Floats, forward: Floats, backward: Floats, scratch: Floats) -> float:
    bound, largest = 0.0, 0.0
    belief, part, col = scratch[0], scratch[1], scratch[2]
    for v in range(len(g.k) - 1, -1, -1):
        kv = g.k[v]
        _belief(g, v, kv, g.off[v], theta, forward, backward, belief)
        low = np.inf
        for x in range(kv):
            low = min(low, belief[x])
        bound += low
        largest = max(largest, abs(bound))
        if g.bs[v] == g.bs[v + 1]:
            continue
        for x in range(kv):
            part[x] = np.floor((belief[x] - low) * g.share[v])
        for q in range(g.bs[v], g.bs[v + 1]):
            e = g.bl[q]
            rows, cols = g.nr[e], g.nc[e]
            _gather(kv, part, g.cmap[e], g.maps, cols, col)
            for c in range(cols):
                col[c] -= forward[g.fo[e] + c]
            least = np.inf
            for r in range(rows):
                cell = g.toff[e] + r * cols
                best = np.inf
                for c in range(cols):
                    value = col[c] + g.pool[cell + c]
                    best = value if value < best else best
                backward[g.bo[e] + r] = best
                least = min(least, best)
            most = np.floor(MOST * g.share[g.ea[e]])
            for r in range(rows):
                backward[g.bo[e] + r] = min(backward[g.bo[e] + r] - least, most)
            bound += least
            largest = max(largest, abs(bound))
    return bound if largest <= EXACT else NO_BOUND


@compiled
def _sweep(g: Graph, theta: Floats, forward: Floats, backward: Floats, scratch: Floats) -> float:
    _forward(g, theta, forward, backward, scratch)
    return _back(g, theta, forward, backward, scratch)


@compiled
def _decode(g: Graph, theta: Floats, backward: Floats, chosen: Ints, scratch: Floats) -> None:
    total = scratch[0]
    for v in range(len(g.k)):
        kv = g.k[v]
        for x in range(kv):
            total[x] = theta[g.off[v] + x]
        for q in range(g.fs[v], g.fs[v + 1]):
            e = g.fl[q]
            m, o = g.rmap[e], g.bo[e]
            for x in range(kv):
                total[x] += backward[o + (x if m < 0 else g.maps[m + x])]
        for q in range(g.bs[v], g.bs[v + 1]):
            e = g.bl[q]
            x = chosen[g.ea[e]]
            r = x if g.rmap[e] < 0 else g.maps[g.rmap[e] + x]
            cell, m = g.toff[e] + r * g.nc[e], g.cmap[e]
            for y in range(kv):
                total[y] += g.pool[cell + (y if m < 0 else g.maps[m + y])]
        best = 0
        for x in range(1, kv):
            if total[x] < total[best]:
                best = x
        chosen[v] = best


@compiled
def _beliefs(g: Graph, forward: Floats, backward: Floats, total: Floats) -> None:
    for e in range(len(g.ea)):
        a, b = g.ea[e], g.eb[e]
        for x in range(g.k[a]):
            total[g.off[a] + x] += backward[g.bo[e] + (x if g.rmap[e] < 0 else g.maps[g.rmap[e] + x])]
        for y in range(g.k[b]):
            total[g.off[b] + y] += forward[g.fo[e] + (y if g.cmap[e] < 0 else g.maps[g.cmap[e] + y])]
