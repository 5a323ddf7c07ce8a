"""How much every strategy costs at least, on flat arrays, compiled: bounds for reduced-cost fixing.

    base, extra = margins(passing, theta, forests=4, rng=rng)

The messages split the costs into a constant and parts that are never negative: theta + tables = constant + unary + cells, where the
cell (r, c) of edge e is ``core[r, c] + rows[r] + cols[c]``. On a spanning forest of the edges the least sum of those parts over all
assignments with x_v = i is exact by two passes of min-plus products; the cells of the other edges are at least zero. So
base + extra[v, i] is a lower bound on the cost of every assignment with x_v = i. Of several forests the largest counts.
"""

from __future__ import annotations

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve.flat import Graph
from solver_shard.solve.forest import _root
from solver_shard.solve.jit import compiled
from solver_shard.solve.messages import Parts
from solver_shard.solve.problem import Floats
from solver_shard.solve.sweeps import EXACT, MOST, NO_BOUND, Passing, _belief, _gather


def margins(passing: Passing, theta: Floats, *, forests: int, rng: np.random.Generator) -> tuple[float, Floats]:
    """(base, extra per flat strategy), scaled and without the problem's constant; the messages are moved by half a sweep."""
    f = passing.flat
    unary = np.empty(len(theta))
    rows, cols = np.empty_like(passing.backward), np.empty_like(passing.forward)
    passing.forward_pass(theta)
    base = _split(f.graph, theta, passing.forward, passing.backward, unary, rows, cols, passing.scratch)
    extra = unary.copy()
    used = np.zeros(len(f.graph.ea))
    for _ in range(forests):
        order = np.argsort(used + rng.random(len(f.graph.ea)), kind="stable")
        found = unary.copy()
        _along_forest(f.graph, order, rows, cols, found, used)
        np.maximum(extra, found, out=extra)
    return base, extra


def parts(passing: Passing, theta: Floats, offset: float = 0.0) -> Parts:
    """The split of the module's start, with this in the constant too. The messages stay as they are."""
    f, g = passing.flat, passing.flat.graph
    before = passing.forward.copy(), passing.backward.copy()
    unary = np.empty(len(theta))
    rows, cols = np.empty_like(passing.backward), np.empty_like(passing.forward)
    passing.forward_pass(theta)
    constant = _split(g, theta, passing.forward, passing.backward, unary, rows, cols, passing.scratch)
    passing.forward[:], passing.backward[:] = before
    tables = []
    for first, height, width, row, col in zip(g.toff.tolist(), g.nr.tolist(), g.nc.tolist(), g.bo.tolist(), g.fo.tolist(), strict=False):
        core = g.pool[first : first + height * width].reshape(height, width)
        tables.append(core + rows[row : row + height, None] + cols[col : col + width])
    return Parts(constant + offset, np.split(unary, f.problem.offsets[1:-1].tolist()) if f.size else [], tables)


@compiled
def _split(g: Graph, theta: Floats, forward: Floats, backward: Floats, unary: Floats, rows: Floats, cols: Floats, scratch: Floats) -> float:
    """The constant; fills ``unary``, ``rows`` and ``cols``. One backward pass of message passing."""
    constant, largest = 0.0, 0.0
    belief, part, least = scratch[0], scratch[1], scratch[2]
    for v in range(len(g.k) - 1, -1, -1):
        kv, o = g.k[v], g.off[v]
        _belief(g, v, kv, o, theta, forward, backward, belief)
        low = np.inf
        for x in range(kv):
            low = min(low, belief[x])
        constant += low
        largest = max(largest, abs(constant))
        lower = g.bs[v + 1] - g.bs[v]
        for x in range(kv):
            belief[x] -= low
            part[x] = np.floor(belief[x] * g.share[v])
            unary[o + x] = belief[x] - lower * part[x]
        for q in range(g.bs[v], g.bs[v + 1]):
            e = g.bl[q]
            height, width, m = g.nr[e], g.nc[e], g.cmap[e]
            _gather(kv, part, m, g.maps, width, least)
            for x in range(kv):
                unary[o + x] += part[x] - least[x if m < 0 else g.maps[m + x]]
            for c in range(width):
                cols[g.fo[e] + c] = least[c] - forward[g.fo[e] + c]
            lowest = np.inf
            for r in range(height):
                cell = g.toff[e] + r * width
                best = np.inf
                for c in range(width):
                    value = g.pool[cell + c] + cols[g.fo[e] + c]
                    best = value if value < best else best
                rows[g.bo[e] + r] = best
                lowest = min(lowest, best)
            most = np.floor(MOST * g.share[g.ea[e]])
            for r in range(height):
                backward[g.bo[e] + r] = min(rows[g.bo[e] + r] - lowest, most)
                rows[g.bo[e] + r] = -(backward[g.bo[e] + r] + lowest)
            constant += lowest
            largest = max(largest, abs(constant))
    return constant if largest <= EXACT else NO_BOUND


@compiled
def _along_forest(g: Graph, order: Ints, rows: Floats, cols: Floats, total: Floats, used: Floats) -> None:
    """Turns ``total`` (unary parts) into least sums along a spanning forest of the first possible edges of ``order``."""
    n = len(g.k)
    leader = np.arange(n)
    taken = np.zeros(len(g.ea), np.bool_)
    for e in order:
        a, b = _root(leader, g.ea[e]), _root(leader, g.eb[e])
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
                start, stop = (g.bs[v], g.bs[v + 1]) if side == 0 else (g.fs[v], g.fs[v + 1])
                for q in range(start, stop):
                    e = g.bl[q] if side == 0 else g.fl[q]
                    w = g.ea[e] if side == 0 else g.eb[e]
                    if taken[e] and not seen[w]:
                        seen[w] = True
                        via[w] = e
                        sequence[count] = w
                        count += 1
    widest = max(g.k.max(), g.nr.max() if len(g.nr) else 1, g.nc.max() if len(g.nc) else 1)
    own, out = np.empty(widest), np.empty(widest)
    up_rows, up_cols = np.zeros(len(rows)), np.zeros(len(cols))  # what a parent heard from its child, by the parent's class
    for i in range(n - 1, -1, -1):
        v = sequence[i]
        e = via[v]
        if e < 0:
            continue
        if g.eb[e] == v:
            _gather(g.k[v], total[g.off[v] : g.off[v + 1]], g.cmap[e], g.maps, g.nc[e], own)
            _to_rows(g, e, rows, cols, own, out)
            w, m = g.ea[e], g.rmap[e]
            for r in range(g.nr[e]):
                up_rows[g.bo[e] + r] = out[r]
        else:
            _gather(g.k[v], total[g.off[v] : g.off[v + 1]], g.rmap[e], g.maps, g.nr[e], own)
            _to_cols(g, e, rows, cols, own, out)
            w, m = g.eb[e], g.cmap[e]
            for c in range(g.nc[e]):
                up_cols[g.fo[e] + c] = out[c]
        for x in range(g.k[w]):
            total[g.off[w] + x] += out[x if m < 0 else g.maps[m + x]]
    least = 0.0
    for i in range(n):
        v = sequence[i]
        e = via[v]
        o, kv = g.off[v], g.k[v]
        if e < 0:
            low = total[o : o + kv].min()
            least += low
            for x in range(kv):
                total[o + x] -= low
            continue
        if g.eb[e] == v:
            w, m = g.ea[e], g.cmap[e]
            _gather(g.k[w], total[g.off[w] : g.off[w + 1]], g.rmap[e], g.maps, g.nr[e], own)
            for r in range(g.nr[e]):
                own[r] -= up_rows[g.bo[e] + r]
            _to_cols(g, e, rows, cols, own, out)
        else:
            w, m = g.eb[e], g.rmap[e]
            _gather(g.k[w], total[g.off[w] : g.off[w + 1]], g.cmap[e], g.maps, g.nc[e], own)
            for c in range(g.nc[e]):
                own[c] -= up_cols[g.fo[e] + c]
            _to_rows(g, e, rows, cols, own, out)
        for x in range(kv):
            total[o + x] += out[x if m < 0 else g.maps[m + x]]
    for x in range(len(total)):
        total[x] += least


@compiled
def _to_rows(g: Graph, e: int, rows: Floats, cols: Floats, values: Floats, out: Floats) -> None:
    """Least over the columns of cell + value, per row."""
    width = g.nc[e]
    for r in range(g.nr[e]):
        cell = g.toff[e] + r * width
        best = np.inf
        for c in range(width):
            value = values[c] + g.pool[cell + c] + cols[g.fo[e] + c]
            best = value if value < best else best
        out[r] = best + rows[g.bo[e] + r]


@compiled
def _to_cols(g: Graph, e: int, rows: Floats, cols: Floats, values: Floats, out: Floats) -> None:
    """Least over the rows of cell + value, per column."""
    width = g.nc[e]
    for c in range(width):
        out[c] = np.inf
    for r in range(g.nr[e]):
        cell, low = g.toff[e] + r * width, values[r] + rows[g.bo[e] + r]
        for c in range(width):
            value = low + g.pool[cell + c]
            out[c] = value if value < out[c] else out[c]
    for c in range(width):
        out[c] += cols[g.fo[e] + c]
