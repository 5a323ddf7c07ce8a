"""Random problems for the tests of flat arrays, and what enumeration says of them."""

from __future__ import annotations

import itertools

import numpy as np

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import Ints
from solver_shard.solve.problem import Carrier, Edge, Problem

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


def some_problem(
    rng: np.random.Generator,
    *,
    nodes: int = 6,
    strategies: int = 4,
    degree: float = 1.6,
    times: int = 7,
    high: int | None = None,
    forbidden: float = 0.25,
    consistent: bool = True,
    limited: bool = True,
) -> Problem:
    """Shared cores and index maps, forbidden pairs, several spans a column, columns and nodes with none, one or several carriers.

    ``consistent``: every strategy has an allowed partner across every edge, as after presolve; otherwise strategies may be forbidden too.
    """
    high = int(rng.choice([3, 50, 10**6, 10**12])) if high is None else high
    sizes = rng.integers(1, strategies + 1, nodes)
    unary = [rng.integers(0, high, k) for k in sizes]
    if not consistent:
        unary = [np.where(rng.random(len(row)) < 0.05, FORBIDDEN, row) for row in unary]
    pairs = [(a, b) for a, b in itertools.combinations(range(nodes), 2) if rng.random() < degree * 2 / max(nodes - 1, 1)]
    edges = tuple(_edge(rng, a, b, sizes, high, forbidden, consistent) for a, b in rng.permutation(pairs).tolist()) if pairs else ()
    edges = _shared(edges, rng)
    times = int(rng.choice([0, 1, times, times]))
    spans: list[tuple[int, int, int]] = []
    columns = int(rng.integers(1, 5)) if times else 0
    for column in range(columns):
        for _ in range(int(rng.integers(1, 4))):
            start, stop = sorted(rng.choice(times + 1, 2, replace=False).tolist())
            spans.append((column, start, stop))
    bytes_high = int(rng.choice([2, 30, 10**12]))
    count = int(rng.integers(0, 2 * nodes)) if columns else 0
    carriers = tuple(
        Carrier(node=v, usage=rng.integers(0, bytes_high, sizes[v]), column=int(rng.integers(columns)))
        for v in rng.integers(0, nodes, count).tolist()
    )
    problem = Problem(
        unary=tuple(unary),
        edges=edges,
        carriers=carriers,
        spans=np.array([spans[i] for i in rng.permutation(len(spans))], dtype=np.int64).reshape(-1, 3),
        base=rng.integers(0, bytes_high, times),
        times=np.sort(rng.choice(100, times, replace=False)),
        constant=int(rng.integers(0, high)),
    )
    if not limited:
        return problem
    least, most = problem.least(), problem.ceiling()
    limit = int(least + rng.random() * (most - least)) if rng.random() < 0.9 else max(0, least - 1)
    return Problem(
        unary=problem.unary,
        edges=problem.edges,
        carriers=problem.carriers,
        spans=problem.spans,
        base=problem.base,
        times=problem.times,
        constant=problem.constant,
        limit=limit,
    )


def _edge(rng: np.random.Generator, a: int, b: int, sizes: Ints, high: int, forbidden: float, consistent: bool) -> Edge:
    height, width = int(rng.integers(1, sizes[a] + 1)), int(rng.integers(1, sizes[b] + 1))
    if rng.random() < 0.5:
        height, width = int(sizes[a]), int(sizes[b])
    core = rng.integers(0, high, (height, width))
    core[rng.random(core.shape) < forbidden] = FORBIDDEN
    if consistent:
        for r in np.flatnonzero((core == FORBIDDEN).all(axis=1)).tolist():
            core[r, rng.integers(width)] = 0
        for c in np.flatnonzero((core == FORBIDDEN).all(axis=0)).tolist():
            core[rng.integers(height), c] = 0
    return Edge(a=a, b=b, core=core, rows=_map(rng, int(sizes[a]), height), cols=_map(rng, int(sizes[b]), width))


def _map(rng: np.random.Generator, size: int, count: int) -> Ints:
    """Every row of a core has some strategy."""
    if size == count and rng.random() < 0.7:
        return np.arange(size)
    return rng.permutation(np.concatenate([np.arange(count), rng.integers(0, count, size - count)])).astype(np.int64)


def _shared(edges: tuple[Edge, ...], rng: np.random.Generator) -> tuple[Edge, ...]:
    """Some edges take over the core of an earlier one of the same shape."""
    cores: dict[tuple[int, ...], Ints] = {}
    result = []
    for edge in edges:
        core = cores.setdefault(edge.core.shape, edge.core) if rng.random() < 0.5 else edge.core
        result.append(Edge(a=edge.a, b=edge.b, core=core, rows=edge.rows, cols=edge.cols))
    return tuple(result)


def every(problem: Problem) -> list[Ints]:
    """All assignments, allowed or not."""
    return [np.array(x, dtype=np.int64) for x in itertools.product(*[range(int(k)) for k in problem.sizes])]


def allowed(problem: Problem) -> list[Ints]:
    """All assignments without a forbidden strategy or pair."""
    return [x for x in every(problem) if problem.allowed(x)]


def optimum(problem: Problem) -> int | None:
    """The least cost within the limit."""
    return min((value for x in allowed(problem) if (value := problem.value(x)) is not None), default=None)


def rows_of(problem: Problem, theta: Floats) -> list[Floats]:
    """Values per flat strategy as a row per node."""
    return np.split(theta, problem.offsets[1:-1].tolist())
