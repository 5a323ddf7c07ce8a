"""Message passing (TRW-S, Kolmogorov 2006) on flat arrays, compiled: the same bound and messages as ``trws.Messages``.

    passing = Passing(flat)
    bound = passing.sweep(theta)            # without the problem's constant

All values are integers in float64 below 2**53, so sums are exact and the bound is valid as computed. Costs alone would not see to
that: messages about strategies that nothing allowed contains grow until a sum has several CLASH in it, and prices of memory have no
end. So unary costs are at most MOST, and all messages to a node together at most twice that: a smaller message, as a smaller cost,
only makes the bound less. With a share of 1/d a node has at most 2d edges, and each message is at most MOST/d.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba
import numpy as np
from numba.core.caching import FunctionCache

from solver_shard.graph.choice_graph import Ints
from solver_shard.solve.bounds.trws import Parts
from solver_shard.solve.flat import Flat, Graph
from solver_shard.solve.problem import Floats

# Compilation of the inner loops that numpy cannot batch: numba, cached on disk.
#
#     @compiled
#     def kernel(values): ...
#
# Kernels are plain Python over numpy arrays and scalars: with ``NUMBA_DISABLE_JIT=1`` they run as they are, with the same results.
#
# The first run that needs them compiles for about 15 s of one core; numba keeps the result beside the modules, or in
# ``NUMBA_CACHE_DIR`` where that is set or the modules' folder cannot be written. Importing numba takes longer than solving a small
# problem, so only modules of the way of large problems import this one, and they are themselves imported where a problem is large
# (``bounding.is_large``).

P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compile on first use. Values are never NaN, infinities are allowed, sums keep their order."""
    result: Any = numba.njit(fastmath={"nnan", "nsz"}, error_model="numpy")(function)
    if result is not function:  # it is with ``NUMBA_DISABLE_JIT=1``
        result._cache = _KernelCache(function)  # type: ignore[no-untyped-call]  # what ``cache=True`` does, with our reader
    kernel: Callable[P, T] = result
    return kernel


class _KernelCache(FunctionCache):
    """Compiled kernels on disk. What cannot be read is compiled anew.

    An index names classes of arguments by module; one that another release of this package has left beside the modules may name
    some that are no more, and numba reads the names before it compares the files' dates.
    """

    def load_overload(self, sig: object, target_context: object) -> object:
        """The machine code of a signature; None where there is none."""
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:
            self.flush()  # type: ignore[no-untyped-call]
            return None


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


def min_marginals(passing: Passing, theta: Floats, *, forests: int, rng: np.random.Generator) -> tuple[float, Floats]:
    """(base, extra per flat strategy), scaled and without the problem's constant; the messages are moved by half a sweep.

    The messages split the costs into a constant and parts that are never negative: theta + tables = constant + unary + cells, where the
    cell (r, c) of edge e is ``core[r, c] + rows[r] + cols[c]``. On a spanning forest of the edges the least sum of those parts over all
    assignments with x_v = i is exact by two passes of min-plus products; the cells of the other edges are at least zero. So
    base + extra[v, i] is a lower bound on the cost of every assignment with x_v = i. Of several forests the largest counts.
    """
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
    """The split that ``min_marginals`` describes, with this in the constant too. The messages stay as they are."""
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


@compiled
def _root(leader: Ints, v: int) -> int:
    while leader[v] != v:
        leader[v] = leader[leader[v]]
        v = leader[v]
    return v
