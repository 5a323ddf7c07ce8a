"""Instances that look like those of the IOPDDL contest, from a seed: to be robust on the family and not on four files.

    python experiments/iopddl/generate.py OUT [--profiles small,large,equal,tables] [--seeds 0,1,2] [--nodes 30000]

writes OUT/gen-PROFILE-NODES-SEED.json.gz. The contest's files are choice graphs of training steps on a mesh of two axes; so are these:
layers of matmuls, elementwise chains, norms and residuals, forward and backward, with weights and optimizer state alive all the time
and activations alive from their forward to their backward readers. As in the four published files (figures of A, G, M, S):

- a node's strategies are its layouts, (rank + 1)^axes of them: 4, 9, 16, 25; those of a matmul are choices of m, n, k or none per axis;
- an elementwise op follows one operand by a bijection (a table of 0 and 10^18), mostly the identity (63-94% of all tables in A, 41% in G),
  and reads others through a table of resharding costs, with few distinct values (4-40% of the cells);
- 4 to 17 thousand zero tables to constants of one strategy, a few separable tables, some parallel edges, 6-15% empty intervals;
- 70% of the nodes cost nothing; some strategies of matmuls cost 10^18 and the others an all-reduce or nothing;
- the limit is 1.1 times the peak of the nodes' least usages; the largest usages come to 29 to 58 times the limit.

What differs by profile: "small" ties the layers by bijections, so that merging them leaves a few hundred variables; "large" does not;
"equal" has two axes of one size and speed and rounded costs, so that many solutions cost the same; "tables" has tensors of more dims
and nodes of hundreds of strategies. Each instance has a solution within the limit: the witness of the least usage everywhere.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORBIDDEN = 10**18
SLACK = 1.1
Ints = NDArray[np.int64]
Layout = tuple[int, ...]
"""Per mesh axis the dim that it cuts, or -1."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What makes instances of one kind.

    Attributes:
        mesh: devices per axis.
        speed: cost of a byte moved over each axis.
        tied: share of matmuls and weights of later layers that follow those of the first by a bijection.
        chain: elementwise ops after each matmul, on average.
        unit: costs are rounded up to multiples of it.
        ranks: ranks of activations that are drawn.
        products: nodes per layer whose strategies are pairs of layouts.
        batch: activations' bytes against those of the weights, as a power of two.
    """

    mesh: tuple[int, ...]
    speed: tuple[float, ...]
    tied: float
    chain: float
    unit: int = 1
    ranks: tuple[int, ...] = (2, 3)
    products: float = 0.0
    batch: int = 2


PROFILES = {
    "small": Profile(mesh=(8, 4), speed=(1.0, 0.3), tied=1.0, chain=9.0, ranks=(2, 2, 3)),
    "large": Profile(mesh=(8, 4), speed=(1.0, 0.3), tied=0.0, chain=4.0, ranks=(2, 3)),
    "equal": Profile(mesh=(8, 8), speed=(1.0, 1.0), tied=0.0, chain=4.0, unit=4096, ranks=(2, 3)),
    "tables": Profile(mesh=(8, 4), speed=(1.0, 0.3), tied=0.0, chain=5.0, ranks=(3, 4), products=0.15),
}


@dataclass
class Tensor:
    """What a node holds: its dims, the layout that each of its strategies gives it, its bytes without cuts."""

    node: int
    dims: tuple[int, ...]
    layouts: list[Layout]
    nbytes: int


@dataclass
class Draft:
    """A graph being written: nodes in order of time, and edges."""

    profile: Profile
    rng: np.random.Generator
    starts: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    costs: list[list[int]] = field(default_factory=list)
    usages: list[list[int]] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    bijections: list[tuple[int, int, Ints]] = field(default_factory=list)
    known: dict[Any, list[int]] = field(default_factory=dict)
    clock: int = 0

    def layouts(self, dims: Sequence[int]) -> list[Layout]:
        """Every layout whose cuts divide the dims."""
        choices = [range(-1, len(dims))] * len(self.profile.mesh)
        return [layout for layout in itertools.product(*choices) if not self._uneven(layout, dims)]

    def cuts(self, layout: Layout, rank: int) -> list[int]:
        cut = [1] * rank
        for size, d in zip(self.profile.mesh, layout, strict=True):
            if d >= 0:
                cut[d] *= size
        return cut

    def shards(self, layout: Layout) -> int:
        return math.prod(size for size, d in zip(self.profile.mesh, layout, strict=True) if d >= 0)

    def priced(self, cost: float) -> int:
        unit = self.profile.unit
        return math.ceil(cost / unit) * unit

    def reshard(self, source: Layout, target: Layout, nbytes: int) -> int:
        """Cost of taking a tensor from one layout to another: gathers and all-to-alls by axis; everything is gathered where two move."""
        moved = [a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s != t and s >= 0]
        if sum(target[a] >= 0 for a in moved) > 1:
            moved, target = [a for a, s in enumerate(source) if s >= 0], (-1,) * len(target)
        total = 0.0
        for a in moved:
            n = self.profile.mesh[a]
            local = nbytes / self.shards(source) * (1 if target[a] >= 0 else n)
            total += self.profile.speed[a] * local * (n - 1) / n + 1
        return self.priced(total) if moved else 0

    def node(
        self, dims: Sequence[int], layouts: list[Layout], nbytes: int, costs: list[int] | None = None, *, always: bool = False
    ) -> Tensor:
        """A node that lives from now (or always) to its last reader."""
        usages = [max(1, nbytes // self.shards(layout)) for layout in layouts]
        self.starts.append(0 if always else self.clock)
        self.stops.append(-1 if always else self.clock + 1)
        self.costs.append(costs or [0] * len(layouts))
        self.usages.append(usages)
        self.clock += 1
        return Tensor(len(self.costs) - 1, tuple(dims), layouts, nbytes)

    def edge(self, u: int, v: int, table: list[int]) -> None:
        self.pairs.append((u, v))
        self.tables.append(table)

    def read(self, tensor: Tensor) -> None:
        """Something reads this now: it lives at least until then."""
        if self.stops[tensor.node] >= 0:
            self.stops[tensor.node] = max(self.stops[tensor.node], self.clock + 1)

    def follow(self, first: Tensor, second: Tensor, order: Ints | None = None) -> None:
        """Tie the strategies of two nodes one to one: strategy i of the first to ``order[i]`` of the second, by default to the same one."""
        size = len(first.layouts)
        if order is None:
            same = first.layouts == second.layouts
            order = np.arange(size) if same else np.array([second.layouts.index(layout) for layout in first.layouts])
        key = ("follow", order.tobytes())
        if key not in self.known:
            table = np.full((size, size), FORBIDDEN, dtype=np.int64)
            table[np.arange(size), order] = 0
            self.known[key] = table.ravel().tolist()
        self.edge(first.node, second.node, self.known[key])
        self.bijections.append((first.node, second.node, order))

    def move(self, source: Tensor, reader: Tensor, wanted: list[Layout]) -> None:
        """A reader's strategies want a tensor in these layouts."""
        key = (tuple(source.layouts), tuple(wanted), source.nbytes)
        if key not in self.known:
            self.known[key] = [self.reshard(a, b, source.nbytes) for a in source.layouts for b in wanted]
        self.edge(source.node, reader.node, self.known[key])
        self.read(source)

    def unary(self, x: Tensor) -> Tensor:
        """An elementwise op of one operand; now and then its strategies are listed in another order."""
        size = len(x.layouts)
        order = self.rng.permutation(size) if self.rng.random() < 0.02 else np.arange(size)
        layouts = list[Layout]([()] * size)
        for i, j in enumerate(order.tolist()):
            layouts[j] = x.layouts[i]
        self.read(x)
        y = self.node(x.dims, layouts, x.nbytes)
        self.follow(x, y, order)
        return y

    def binary(self, x: Tensor, y: Tensor) -> Tensor:
        """An elementwise op that follows its first operand."""
        self.read(x)
        z = self.node(x.dims, x.layouts, x.nbytes)
        self.follow(x, z)
        self.move(y, z, z.layouts)
        return z

    def dot(self, x: Tensor, w: Tensor, dims: tuple[int, ...], nbytes: int) -> Tensor:
        """A matmul of x's last dim and w's first: per axis m (any other dim of x), n, k or nothing; alike where the shapes are."""
        key = ("dot", x.dims, w.dims, nbytes)
        if key not in self.known:
            self.known[key] = self._matmul(x.dims, w.dims, dims, nbytes)
        wanted_x, wanted_w, results, costs = self.known[key]
        y = self.node(dims, results, nbytes, costs)
        self.move(x, y, wanted_x)
        self.move(w, y, wanted_w)
        return y

    def _matmul(
        self, x: tuple[int, ...], w: tuple[int, ...], dims: tuple[int, ...], nbytes: int
    ) -> tuple[list[Layout], list[Layout], list[Layout], list[int]]:
        """Layouts of both operands and the result, and costs, by strategy."""
        rank = len(dims)
        found: list[tuple[Layout, Layout, Layout, int]] = []
        for choice in itertools.product(range(-1, rank + 1), repeat=len(self.profile.mesh)):  # rank - 1 is n, rank is k
            layouts = (
                tuple(len(x) - 1 if c == rank else -1 if c == rank - 1 else c for c in choice),
                tuple(0 if c == rank else 1 if c == rank - 1 else -1 for c in choice),
                tuple(-1 if c == rank else c for c in choice),
            )
            if any(c == -1 for c in choice) and self.rng.random() < 0.5:
                continue
            if any(self._uneven(layout, size) for layout, size in zip(layouts, (x, w, dims), strict=True)):
                continue
            n = [(self.profile.mesh[a], self.profile.speed[a]) for a, c in enumerate(choice) if c == rank]
            local = nbytes / self.shards(layouts[2])
            found.append((*layouts, self.priced(sum(2 * speed * local * (m - 1) / m + 1 for m, speed in n))))
        most = max(self.shards(result) for _, _, result, _ in found)
        costs = [FORBIDDEN if self.shards(result) < most and self.rng.random() < 0.1 else cost for _, _, result, cost in found]
        return [part[0] for part in found], [part[1] for part in found], [part[2] for part in found], costs

    def _uneven(self, layout: Layout, dims: Sequence[int]) -> bool:
        return any(dims[d] % cut for d, cut in enumerate(self.cuts(layout, len(dims))))

    def reduce(self, x: Tensor) -> Tensor:
        """A sum over the last dim."""
        layouts = self.layouts(x.dims[:-1])
        y = self.node(x.dims[:-1], layouts, max(1, x.nbytes // x.dims[-1]))
        self.move(x, y, layouts)
        return y

    def spread(self, x: Tensor, like: Tensor) -> Tensor:
        """A broadcast along the last dim; it costs nothing to cut what is whole."""
        y = self.node(like.dims, like.layouts, like.nbytes)
        wanted = [tuple(-1 if d == len(like.dims) - 1 else d for d in layout) for layout in like.layouts]
        self.move(x, y, wanted)
        return y

    def widen(self, x: Tensor, like: Tensor) -> Tensor:
        """A vector broadcast along all dims but the last."""
        y = self.node(like.dims, like.layouts, like.nbytes)
        last = len(like.dims) - 1
        self.move(x, y, [tuple(0 if d == last else -1 for d in layout) for layout in like.layouts])
        return y

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        """An op whose strategies are pairs of layouts of its operands, as a gather's or a convolution's."""
        pairs = list(itertools.product(x.layouts, w.layouts))
        keep = sorted(self.rng.choice(len(pairs), min(len(pairs), int(self.rng.integers(100, 900))), replace=False).tolist())
        least = max(self.shards(layout) for layout in x.layouts)
        keep = sorted({*keep, next(i for i, (layout, _) in enumerate(pairs) if self.shards(layout) == least)})
        pairs = [pairs[i] for i in keep]
        y = self.node(
            x.dims, [a for a, _ in pairs], x.nbytes, [self.priced(float(c)) for c in self.rng.integers(0, 3, len(pairs)) * x.nbytes // 64]
        )
        self.move(x, y, [a for a, _ in pairs])
        self.move(w, y, [b for _, b in pairs])
        return y

    def scalar(self, reader: Tensor) -> None:
        """A small operand that is whole or cut, at a price that does not depend on its reader's strategy: a separable table."""
        c = self.node((2,), [(-1,) * len(self.profile.mesh)] * 2, 8, [0, int(self.rng.integers(1, 100))])
        rows, columns = self.rng.integers(0, 100, 2), self.rng.integers(0, 100, len(reader.layouts))
        self.edge(c.node, reader.node, (rows[:, None] + columns[None, :]).ravel().tolist())
        self.read(c)

    def constant(self, reader: Tensor, shared: Tensor | None = None) -> Tensor:
        """A constant of one strategy, which anything may read: a table of zeros; with an interval or without one."""
        c = shared or self.node((1,), [(-1,) * len(self.profile.mesh)], int(self.rng.integers(1, 64)))
        self.edge(c.node, reader.node, [0] * len(reader.layouts))
        self.read(c)
        if shared is None and self.rng.random() < 0.5:
            self.starts[c.node] = self.stops[c.node] = 0
        return c


def generate(name: str, nodes: int, seed: int) -> dict[str, Any]:
    """The ``problem`` of an IOPDDL file with about so many nodes.

    >>> generate("small", 500, 0)["usage_limit"] > 0
    True
    """
    profile = PROFILES[name]
    draft = Draft(profile, np.random.default_rng([list(PROFILES).index(name), nodes, seed]))
    start = _input(draft)
    shared = draft.constant(start)
    x, stack, layer = start, list[list[tuple[Tensor, ...]]](), 0
    kinds = [_dims(draft) for _ in range(3)]
    first: dict[int, list[tuple[Tensor, ...]]] = {}
    while len(draft.costs) < nodes * 0.44:  # the backward pass and the update are about as much again and a half
        x, saved = _forward(draft, x, kinds[layer % len(kinds)], shared)
        for one, other in zip(first.setdefault(layer % len(kinds), saved), saved, strict=True):
            if one is not other and draft.rng.random() < profile.tied:
                _tie(draft, one, other)
        stack.append(saved)
        layer += 1
    gradient = draft.spread(draft.reduce(x), x)
    for saved in reversed(stack):
        gradient = _backward(draft, gradient, saved, shared)
    return _problem(draft, name, nodes, seed)


def _dims(draft: Draft) -> tuple[int, int]:
    """Hidden and inner width of a kind of layers."""
    hidden = 2 ** int(draft.rng.integers(8, 12))
    return hidden, hidden * int(draft.rng.choice([1, 2, 4]))


def _input(draft: Draft) -> Tensor:
    rank = int(draft.rng.choice(draft.profile.ranks))
    dims = (*(2 ** int(draft.rng.integers(5, 8)) for _ in range(rank - 1)), 1024)
    return draft.node(dims, draft.layouts(dims), math.prod(dims) * draft.profile.batch, always=True)


def _chain(draft: Draft, x: Tensor, shared: Tensor) -> Tensor:
    """Elementwise ops one after the other; some read a constant, some have a side result that nothing lives for."""
    for _ in range(int(draft.rng.poisson(draft.profile.chain))):
        x = draft.unary(x)
        chance = draft.rng.random()
        if chance < 0.12:
            draft.constant(x)
        elif chance < 0.2:
            draft.constant(x, shared)
        elif chance < 0.32:
            side = draft.unary(x)
            draft.starts[side.node] = draft.stops[side.node] = 0
        elif chance < 0.36:
            draft.edge(draft.pairs[-1][0], x.node, [0] * (len(draft.costs[draft.pairs[-1][0]]) * len(x.layouts)))  # a parallel edge
    return x


def _forward(draft: Draft, x: Tensor, widths: tuple[int, int], shared: Tensor) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """A layer: norm, two matmuls with chains, a residual. Saved are weight, its state, operand, result and bias of each matmul."""
    saved: list[tuple[Tensor, ...]] = []
    residual = x
    hidden, inner = widths
    x = _chain(draft, x, shared)
    x = draft.binary(x, draft.spread(draft.unary(draft.reduce(x)), x))
    for width in (inner, residual.dims[-1] if draft.rng.random() < 0.7 else hidden):
        shape = (x.dims[-1], width)
        w = draft.node(shape, draft.layouts(shape), math.prod(shape) * 2, always=True)
        state = draft.node(shape, w.layouts, math.prod(shape) * 4, always=True)
        draft.follow(w, state)
        if draft.rng.random() < draft.profile.products and len(x.layouts) * len(w.layouts) >= 100:
            x = draft.product(x, w)
        dims = (*x.dims[:-1], width)
        y = draft.dot(x, w, dims, math.prod(dims) * draft.profile.batch)
        bias = draft.node((width,), draft.layouts((width,)), width * 4, always=True)
        saved.append((w, state, x, y, bias))
        x = _chain(draft, draft.binary(y, draft.widen(bias, y)), shared)
    if x.dims == residual.dims:
        x = draft.binary(x, residual)
    return x, saved


def _tie(draft: Draft, one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    """The weight and matmul of a layer decide as those of another of the same shapes do."""
    for a, b in ((one[0], other[0]), (one[3], other[3])):
        if a.layouts == b.layouts:
            draft.follow(a, b)


def _backward(draft: Draft, gradient: Tensor, saved: Sequence[tuple[Tensor, ...]], shared: Tensor) -> Tensor:
    """Gradients of a layer: of the operand and of the weight of each matmul, then the update, which follows the weight."""
    incoming = gradient
    for w, state, x, y, bias in reversed(saved):
        if gradient.dims != y.dims:  # the residual was left out: a resized gradient
            gradient = draft.spread(draft.reduce(gradient), y) if gradient.dims[:-1] == y.dims[:-1] else draft.spread(draft.reduce(y), y)
        gradient = _chain(draft, draft.binary(gradient, y), shared)
        turned = draft.node(w.dims[::-1], draft.layouts(w.dims[::-1]), w.nbytes)
        swap = {layout: tuple(d if d < 0 else 1 - d for d in layout) for layout in w.layouts}
        order = np.array([turned.layouts.index(swap[layout]) for layout in w.layouts])
        draft.follow(w, turned, order)
        into = draft.dot(gradient, turned, x.dims, x.nbytes)
        flat = (math.prod(x.dims[:-1]), x.dims[-1])
        held = Tensor(
            x.node, flat, [tuple(min(d, 1) if d == len(x.dims) - 1 else min(d, 0) for d in layout) for layout in x.layouts], x.nbytes
        )
        rows = draft.node(flat[::-1], draft.layouts(flat[::-1]), x.nbytes)
        draft.move(held, rows, [tuple(d if d < 0 else 1 - d for d in layout) for layout in rows.layouts])
        cols_dims = (flat[0], gradient.dims[-1])
        last = len(gradient.dims) - 1
        view = Tensor(
            gradient.node,
            cols_dims,
            [tuple(d if d < 0 else 1 if d == last else 0 for d in layout) for layout in gradient.layouts],
            gradient.nbytes,
        )
        of_weight = draft.dot(rows, view, w.dims, w.nbytes)
        update = draft.binary(draft.unary(state), of_weight)
        for _ in range(3):
            update = draft.unary(update)
        draft.follow(w, update)
        _update_bias(draft, bias, gradient)
        gradient = into
    if gradient.dims == incoming.dims:
        gradient = draft.binary(gradient, incoming)
    return gradient


def _update_bias(draft: Draft, bias: Tensor, gradient: Tensor) -> None:
    """The gradient of a bias and its update: many small nodes."""
    last = len(gradient.dims) - 1
    view = Tensor(gradient.node, bias.dims, [tuple(0 if d == last else -1 for d in layout) for layout in gradient.layouts], bias.nbytes)
    moments = [draft.node(bias.dims, bias.layouts, bias.nbytes, always=True) for _ in range(2)]
    summed = draft.node(bias.dims, bias.layouts, bias.nbytes)
    draft.move(view, summed, bias.layouts)
    for moment in moments:
        draft.follow(bias, moment)
        summed = draft.unary(draft.unary(draft.binary(summed, moment)))
    draft.follow(bias, summed)
    draft.scalar(summed)


def _problem(draft: Draft, name: str, nodes: int, seed: int) -> dict[str, Any]:
    """The problem with its limit: SLACK times the peak of the least usages, or the witness' peak where that is more."""
    end = draft.clock
    spans = [[start, end if stop < 0 else stop] for start, stop in zip(draft.starts, draft.stops, strict=True)]
    least = [min(usages) for usages in draft.usages]
    witness = _witness(draft)
    held = [usages[x] for usages, x in zip(draft.usages, witness, strict=True)]
    limit = max(int(SLACK * _peak(spans, least)), _peak(spans, held))
    return {
        "name": f"gen-{name}-{nodes}-{seed}",
        "nodes": {"intervals": spans, "costs": draft.costs, "usages": draft.usages},
        "edges": {"nodes": [list(pair) for pair in draft.pairs], "costs": draft.tables},
        "usage_limit": limit,
    }


def _peak(spans: Sequence[Sequence[int]], usages: Sequence[int]) -> int:
    change = np.zeros(max(stop for _, stop in spans) + 1, dtype=np.int64)
    for (start, stop), usage in zip(spans, usages, strict=True):
        change[start] += usage
        change[stop] -= usage
    return int(np.cumsum(change).max())


def _witness(draft: Draft) -> list[int]:
    """An allowed assignment of little usage: in every set of nodes tied by bijections, the strategy of the least sum."""
    neighbours: list[list[tuple[int, Ints]]] = [[] for _ in draft.costs]
    for u, v, order in draft.bijections:
        neighbours[u].append((v, order))
        neighbours[v].append((u, np.argsort(order)))
    chosen = [-1] * len(draft.costs)
    for root in range(len(chosen)):
        if chosen[root] >= 0:
            continue
        mapped = {root: np.arange(len(draft.costs[root]))}
        allowed = np.ones(len(draft.costs[root]), dtype=bool)
        queue = [root]
        while queue:
            u = queue.pop()
            for v, order in neighbours[u]:
                image = order[mapped[u]]
                if v not in mapped:
                    mapped[v] = image
                    queue.append(v)
                else:
                    allowed &= mapped[v] == image
        total = np.zeros(len(allowed), dtype=np.float64)
        for v, image in mapped.items():
            allowed &= np.array(draft.costs[v])[image] < FORBIDDEN
            total += np.array(draft.usages[v], dtype=np.float64)[image]
        if not allowed.any():
            raise ValueError("the ties of some nodes leave them no common strategy: choose another seed")
        best = int(np.where(allowed, total, np.inf).argmin())
        for v, image in mapped.items():
            chosen[v] = int(image[best])
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--profiles", default=",".join(PROFILES))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--nodes", type=int, default=30_000)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.profiles.split(","):
        for seed in map(int, given.seeds.split(",")):
            problem = generate(name, given.nodes, seed)
            path = given.out / f"{problem['name']}.json.gz"
            path.write_bytes(gzip.compress(json.dumps({"problem": problem}, separators=(",", ":")).encode(), mtime=0))
            sizes = [len(costs) for costs in problem["nodes"]["costs"]]
            print(f"{path}: {len(sizes)} nodes, {len(problem['edges']['nodes'])} edges, {max(sizes)} strategies at most", flush=True)


if __name__ == "__main__":
    main()
