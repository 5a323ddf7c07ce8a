"""Small random choice graphs for the solver's tests, and full enumeration of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import ChoiceGraph, Loads
from solver_shard.solve.solution import objective_value


@dataclass(frozen=True)
class Point:
    """An allowed assignment."""

    cost: int
    peak: int
    assignment: tuple[int, ...]


def random_graph(rng: np.random.Generator, nodes: int, strategies: int = 4, times: int = 8) -> ChoiceGraph:
    """Forbidden strategies and pairs, functional, separable and parallel tables, none to three overlapping intervals a node."""
    sizes = rng.integers(1, strategies + 1, nodes)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    high = int(rng.choice([3, 20, 10**6]))
    costs = rng.integers(0, high, offsets[-1])
    costs[rng.random(offsets[-1]) < 0.03] = FORBIDDEN
    usages = rng.integers(0, int(rng.choice([3, 30, 10**9])), offsets[-1])
    intervals: list[tuple[int, int]] = []
    interval_offsets = [0]
    for _ in range(nodes):
        for _ in range(int(rng.choice([0, 1, 1, 1, 2, 3]))):
            start, stop = sorted(rng.integers(0, times + 1, 2).tolist())
            intervals.append((start, stop))
        interval_offsets.append(len(intervals))
    edges: list[tuple[int, int]] = []
    tables = []
    for u, v in itertools.permutations(range(nodes), 2):
        if rng.random() >= 1.6 / nodes:
            continue
        shape = (sizes[u], sizes[v])
        kind = rng.integers(5)
        if kind == 0:  # each strategy of u allows one of v
            only = rng.integers(0, sizes[v], (sizes[u], 1)) == np.arange(sizes[v])[None, :]
            table = np.where(only, rng.integers(0, high, shape), FORBIDDEN)
        elif kind == 1:  # separable
            table = rng.integers(0, high, (sizes[u], 1)) + rng.integers(0, high, (1, sizes[v]))
        else:
            table = np.where(rng.random(shape) < 0.25, FORBIDDEN, rng.integers(0, high, shape))
        edges.append((u, v))
        tables.append(table.astype(np.int64))
    graph = ChoiceGraph(
        names=tuple(f"n{v}" for v in range(nodes)),
        offsets=offsets,
        costs=costs.astype(np.int64),
        usages=usages.astype(np.int64),
        interval_offsets=np.array(interval_offsets, dtype=np.int64),
        intervals=np.array(intervals, dtype=np.int64).reshape(-1, 2),
        edges=np.array(edges, dtype=np.int64).reshape(-1, 2),
        edge_tables=np.arange(len(edges), dtype=np.int64),
        tables=tuple(tables),
        limit=None,
    )
    graph.validate()
    return graph


def windowed(rng: np.random.Generator, graph: ChoiceGraph) -> ChoiceGraph:
    """The graph with one to four windows of one to three terms, loaded by some nodes, edges and other pairs, often on several terms."""
    lanes = rng.integers(1, 4, int(rng.integers(1, 5)))
    windows = np.repeat(np.arange(len(lanes)), lanes)
    high = int(rng.choice([3, 20, 10**6]))

    def uses() -> list[tuple[int, int]]:
        return [(int(rng.integers(len(windows))), int(rng.choice([0, 1, 1, 2, 7]))) for _ in range(int(rng.integers(1, 4)))]

    sizes = graph.sizes()
    pairs = [(u, v) for u, v in itertools.permutations(range(graph.size), 2) if rng.random() < 0.8 / graph.size]
    pairs += [(u, v) for u, v in graph.edges.tolist() if rng.random() < 0.7]
    loads = Loads.of(
        windows,
        nodes=[(v, rng.integers(0, high, sizes[v]), uses()) for v in range(graph.size) if rng.random() < 0.7],
        edges=[(u, v, rng.integers(0, high, (sizes[u], sizes[v])), uses()) for u, v in pairs],
        base=rng.integers(0, high, len(windows)) * int(rng.integers(2)),
    )
    loaded = replace(graph, loads=loads)
    loaded.validate()
    return loaded


def repeated_layers(rng: np.random.Generator, one: ChoiceGraph, copies: int = 3) -> tuple[ChoiceGraph, np.ndarray]:
    """Copies of a graph with windows, and the classes that tie them; some share windows, and now and then a node is not tied."""
    own, count, every = one.loads, one.size, range(copies)
    assert own is not None
    classes = np.tile(rng.permutation(count), copies)
    classes[rng.random(len(classes)) < 0.15] += count
    shift = [int(rng.integers(copies)) * len(own.windows) for _ in every]  # whose windows each copy loads
    graph = ChoiceGraph(
        names=one.names * copies,
        offsets=np.concatenate([one.offsets[:1], *[one.offsets[1:] + k * one.offsets[-1] for k in every]]),
        costs=np.tile(one.costs, copies),
        usages=np.tile(one.usages, copies),
        interval_offsets=np.concatenate([[0], *[one.interval_offsets[1:] + k * len(one.intervals) for k in every]]).astype(np.int64),
        intervals=np.tile(one.intervals, (copies, 1)),
        edges=np.concatenate([one.edges + k * count for k in every]),
        edge_tables=np.tile(one.edge_tables, copies),
        tables=one.tables,
        loads=Loads.of(
            np.concatenate([own.windows + k * own.count for k in every]),
            base=np.tile(own.base, copies),
            nodes=[(v + k * count, own.vectors[n], [(term + shift[k], times)]) for k in every for v, n, term, times in own.nodes.tolist()],
            edges=[
                (u + k * count, v + k * count, own.tables[n], [(term + shift[k], times)])
                for k in every
                for u, v, n, term, times in own.edges.tolist()
            ],
        ),
    )
    graph.validate()
    return graph, classes


def hard_graph(rng: np.random.Generator, nodes: int, *, strategies: int = 6, degree: int = 8, room: float | None = None) -> ChoiceGraph:
    """Nothing is forbidden and nothing can be reduced: any assignment will do, and the best of 60 nodes takes minutes to prove.

    ``room``: the limit by the least possible peak; without one, no limit.
    """
    pairs = [(u, v) for u in range(nodes) for v in sorted(rng.choice(nodes, degree, replace=False).tolist()) if u < v]
    starts = rng.integers(0, 20, nodes)
    usages = rng.integers(1, 1000, nodes * strategies)
    graph = ChoiceGraph(
        names=tuple(f"n{v}" for v in range(nodes)),
        offsets=np.arange(nodes + 1, dtype=np.int64) * strategies,
        costs=rng.integers(0, 1000, nodes * strategies),
        usages=usages,
        interval_offsets=np.arange(nodes + 1, dtype=np.int64),
        intervals=np.stack([starts, starts + rng.integers(1, 15, nodes)], axis=1),
        edges=np.array(pairs, dtype=np.int64),
        edge_tables=np.arange(len(pairs), dtype=np.int64),
        tables=tuple(rng.integers(0, 1000, (strategies, strategies)) for _ in pairs),
    )
    graph.validate()
    least = graph.peak(usages.reshape(nodes, strategies).argmin(axis=1))
    return graph if room is None else replace(graph, limit=int(room * least))


def aliased_graph(rng: np.random.Generator, nodes: int, strategies: int = 3, times: int = 6, high: int = 20) -> ChoiceGraph:
    """Few decisions and many aliases of them, on several paths that do not always agree; costs below ``high``.

    Tables are bijections with and without costs, constant, separable, finite or partly forbidden, often parallel; usages are often
    zero or those of another node; no to three intervals a node, some empty.
    """
    k = int(rng.integers(1, strategies + 1))
    sizes = np.where(rng.random(nodes) < 0.7, k, rng.integers(1, strategies + 1, nodes))
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    costs = rng.integers(0, high, offsets[-1]) * (rng.random(offsets[-1]) < 0.5)
    costs[rng.random(offsets[-1]) < 0.05] = FORBIDDEN
    usages = rng.integers(0, 4, offsets[-1]) * rng.integers(0, 2, nodes).repeat(sizes)
    counts = rng.choice([0, 1, 1, 1, 2, 3], nodes)
    intervals = np.sort(rng.integers(0, times + 1, (int(counts.sum()), 2)), axis=1)
    edges, tables = [], []
    for _ in range(int(rng.integers(nodes, 2 * nodes + 1)) if nodes > 1 else 0):
        u, v = rng.choice(nodes, 2, replace=False).tolist()
        shape = (int(sizes[u]), int(sizes[v]))
        kind = rng.integers(6)
        if kind <= 2 and shape[0] == shape[1]:  # an alias, often the identity
            order = rng.permutation(shape[0]) if rng.random() < 0.3 else np.arange(shape[0])
            price = rng.integers(0, high, shape) if rng.random() < 0.2 else 0
            table = np.where(order[:, None] == np.arange(shape[1]), price, FORBIDDEN)
        elif kind == 3:
            table = np.full(shape, int(rng.integers(0, high)))
        elif kind == 4:
            table = rng.integers(0, high // 2, (shape[0], 1)) + rng.integers(0, high // 2, (1, shape[1]))
        else:
            table = np.where(rng.random(shape) < 0.2, FORBIDDEN, rng.integers(0, high, shape))
        edges.append((u, v))
        tables.append(table.astype(np.int64))
    graph = ChoiceGraph(
        names=tuple(f"n{v}" for v in range(nodes)),
        offsets=offsets,
        costs=costs.astype(np.int64),
        usages=usages.astype(np.int64),
        interval_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        intervals=intervals.astype(np.int64).reshape(-1, 2),
        edges=np.array(edges, dtype=np.int64).reshape(-1, 2),
        edge_tables=np.arange(len(edges), dtype=np.int64),
        tables=tuple(tables),
        limit=None,
    )
    graph.validate()
    return graph


def points(graph: ChoiceGraph) -> list[Point]:
    """Every allowed assignment."""
    every = itertools.product(*[range(int(k)) for k in graph.sizes()])
    return [Point(graph.cost(x), graph.peak(x), x) for x in every if graph.allowed(x)]


def best_value(found: list[Point], limit: int | None, objective: str = "time", weight: int = 0) -> int | None:
    """The optimum by enumeration, None where nothing is within the limit."""
    return min((objective_value(objective, weight, p.cost, p.peak) for p in found if limit is None or p.peak <= limit), default=None)


def some_limit(rng: np.random.Generator, found: list[Point]) -> int | None:
    """No limit, one that binds, or one that nothing keeps."""
    if not found or rng.random() < 0.3:
        return None
    peaks = sorted(p.peak for p in found)
    cheapest = min(found, key=lambda p: (p.cost, p.peak)).peak
    return int(rng.choice([peaks[0], peaks[len(peaks) // 4], peaks[len(peaks) // 2], max(0, peaks[0] - 1), max(0, cheapest - 1)]))


FAMILIES = ("dense", "grid", "chords")


def loopy_graph(rng: np.random.Generator, family: str, nodes: int, *, strategies: int = 4, room: float = 0.25) -> ChoiceGraph:
    """Nothing is forbidden, everything is on circles, and the limit binds.

    Args:
        family: "dense" has edges anywhere, 13 for 6 nodes; "grid" is a rectangle of neighbours; "chords" a random tree with half as many
            edges again between any two nodes.
        room: where the limit lies between the least possible peak and that of an assignment that descends on costs alone.
    """
    if family == "dense":
        every = list(itertools.combinations(range(nodes), 2))
        pairs = [every[i] for i in sorted(rng.choice(len(every), min(len(every), 13 * nodes // 6), replace=False).tolist())]
    elif family == "grid":
        width = int(nodes**0.5)
        pairs = [(v, v + 1) for v in range(nodes - 1) if (v + 1) % width] + [(v, v + width) for v in range(nodes - width)]
    elif family == "chords":
        tree = {(int(rng.integers(v)), v) for v in range(1, nodes)}
        while len(tree) < nodes - 1 + nodes // 2:
            u, v = sorted(rng.choice(nodes, 2, replace=False).tolist())
            tree.add((u, v))
        pairs = sorted(tree)
    else:
        raise ValueError(f"family {family!r} is not one of {FAMILIES}")
    starts = rng.integers(0, 20, nodes)
    costs, usages = rng.integers(0, 100, (nodes, strategies)), rng.integers(1, 1000, (nodes, strategies))
    graph = ChoiceGraph(
        names=tuple(f"n{v}" for v in range(nodes)),
        offsets=np.arange(nodes + 1, dtype=np.int64) * strategies,
        costs=costs.ravel(),
        usages=usages.ravel(),
        interval_offsets=np.arange(nodes + 1, dtype=np.int64),
        intervals=np.stack([starts, starts + rng.integers(1, 15, nodes)], axis=1),
        edges=np.array(pairs, dtype=np.int64),
        edge_tables=np.arange(len(pairs), dtype=np.int64),
        tables=tuple(rng.integers(0, 100, (strategies, strategies)) for _ in pairs),
    )
    graph.validate()
    chosen = costs.argmin(axis=1)
    for v in list(range(nodes)) * 3:
        price = costs[v].copy()
        for (a, b), table in zip(pairs, graph.tables, strict=True):
            price = price + (table[:, chosen[b]] if a == v else table[chosen[a]] if b == v else 0)
        chosen[v] = price.argmin()
    least, cheap = graph.peak(usages.argmin(axis=1)), graph.peak(chosen)
    return replace(graph, limit=int(least + room * max(0, cheap - least)))
