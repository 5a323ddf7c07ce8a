"""How long reading and presolve take, and what they leave: on files of the IOPDDL family, and on generated ones of the largest size.

    python experiments/presolve.py FOLDER          # every .json.gz in it, then generated graphs of 65,000 nodes and 100,000 edges

Generated graphs imitate the published ones: decisions in the order of a program, each followed by a chain of aliases (tables of 0 and
FORBIDDEN that are bijections), finite tables between neighbouring decisions and, here and there, far apart ones, some of them
constant or separable; activations that live from their making to their last use, weights that live long. A small core has hundreds of
decisions that tens of thousands of nodes follow, with many parallel edges; a large core has ten thousand.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import ChoiceGraph, Ints
from solver_shard.graph.iopddl import read, write
from solver_shard.solve.presolve import presolve
from solver_shard.solve.presolve.postsolve import table
from solver_shard.solve.problem import from_graph

POOL = 40
"""Distinct tables for each pair of sizes."""


def generated(decisions: int, nodes: int, edges: int, seed: int, largest: int = 29) -> ChoiceGraph:
    """A graph of the family with so many decisions, nodes and edges; ten decisions without aliases have ``largest`` strategies."""
    rng = np.random.default_rng(seed)
    kinds = np.array([3, 4, 6, 8, 9, 12, 16, 29])
    size = kinds[rng.choice(len(kinds), decisions, p=[0.1, 0.15, 0.25, 0.25, 0.1, 0.05, 0.05, 0.05])]
    wide = rng.choice(decisions, 10, replace=False)
    size[wide] = largest
    follows = np.setdiff1d(np.arange(decisions), wide)
    leader = np.sort(np.concatenate([np.arange(decisions), rng.choice(follows, nodes - decisions)]))
    sizes = size[leader]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    own = rng.random(len(sizes)) < 0.1
    usages = (2.0 ** rng.uniform(10, 24, nodes)).astype(np.int64).repeat(sizes) // 2 ** rng.integers(0, 6, offsets[-1])
    costs = np.where(own.repeat(sizes), rng.integers(0, 10**6, offsets[-1]), 0)
    start = np.arange(nodes) // 2
    weight = rng.random(nodes) < 0.1
    stop = np.where(weight, nodes // 2, start + 1 + (rng.pareto(1.2, nodes) * 5).astype(np.int64)).clip(0, nodes // 2)
    start = np.where(weight, start // 50, start)
    empty = rng.random(nodes) < 0.15
    stop = np.where(empty, start, np.maximum(stop, start + 1))
    pairs, which, tables = _edges(rng, leader, sizes, edges)
    graph = ChoiceGraph(
        names=tuple(f"node {v}" for v in range(nodes)),
        offsets=offsets,
        costs=costs.astype(np.int64),
        usages=usages,
        interval_offsets=np.arange(nodes + 1),
        intervals=np.stack([start, stop], axis=1),
        edges=pairs,
        edge_tables=which,
        tables=tables,
    )
    least = graph.peak(np.zeros(nodes, dtype=np.int64))
    limited = ChoiceGraph(**{name: getattr(graph, name) for name in graph.__dataclass_fields__ if name != "limit"}, limit=int(0.8 * least))
    limited.validate()
    return limited


def _edges(rng: np.random.Generator, leader: Ints, sizes: Ints, count: int) -> tuple[Ints, Ints, tuple[Ints, ...]]:
    """Aliases along each group's chain, then finite tables between nodes of nearby groups until there are ``count``."""
    nodes = len(leader)
    known: dict[tuple[int, ...], int] = {}
    tables: list[Ints] = []
    pairs, which = [], []

    def add(u: int, v: int, key: tuple[int, ...]) -> None:
        if key not in known:
            known[key] = len(tables)
            tables.append(_table(rng, *key))
        pairs.append((u, v))
        which.append(known[key])

    for v in range(1, nodes):
        if leader[v] == leader[v - 1]:
            u = v - 1 if rng.random() < 0.7 else int(rng.integers(np.searchsorted(leader, leader[v]), v))
            add(u, v, (0, int(sizes[u]), int(sizes[v]), int(rng.random() < 0.1) * int(rng.integers(POOL))))
    reach = max(2, nodes // 50)
    while len(pairs) < count:
        u = int(rng.integers(nodes))
        far = int(rng.integers(1, nodes)) if rng.random() < 0.02 else 1 + int(rng.exponential(reach / 20))
        v = (u + far) % nodes
        if leader[u] != leader[v] and sizes[u] * sizes[v] < 20_000:
            add(u, v, (1 + int(rng.choice(3, p=[0.6, 0.2, 0.2])), int(sizes[u]), int(sizes[v]), int(rng.integers(POOL))))
    return np.array(pairs), np.array(which), tuple(tables)


def _table(rng: np.random.Generator, kind: int, rows: int, cols: int, number: int) -> Ints:
    """An alias (the identity where ``number`` is 0), a finite, a constant or a separable table."""
    if kind == 0:
        order = rng.permutation(rows) if number else np.arange(rows)
        return np.where(order[:, None] == np.arange(cols), 0, FORBIDDEN)
    scale = int(10.0 ** rng.uniform(2, 7))
    if kind == 1:
        found: Ints = rng.integers(0, scale, (rows, cols)) * (rng.random((rows, cols)) < 0.7)
        return found
    if kind == 2:
        return np.full((rows, cols), scale, dtype=np.int64)
    return rng.integers(0, scale, (rows, 1)) + rng.integers(0, scale, (1, cols))


def measure(path: Path, *, steps: bool) -> None:
    """One line of what is left and how long it took, in processor seconds."""
    began = time.process_time()
    graph = read(path)
    reading = time.process_time() - began
    problem, _ = from_graph(graph, limit=graph.limit)
    small, undo = presolve(problem)
    total = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{path.name}: {graph.size} nodes, {len(graph.edges)} edges -> {small.size} nodes, {int(small.offsets[-1])} strategies, "
        f"{len(small.edges)} edges, {sum(edge.core.size for edge in small.edges)} cells, {len(small.times)} times; "
        f"read {reading:.1f} s, in all {total:.1f} s, at most {peak:.2f} GiB so far",
        flush=True,
    )
    if steps:
        print(table(undo.log), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with IOPDDL files")
    parser.add_argument("--steps", action="store_true", help="print what each transformation removed")
    arguments = parser.parse_args()
    for path in sorted(arguments.folder.glob("*.json.gz")):
        measure(path, steps=arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        for name, decisions, largest in (("small-core", 500, 29), ("large-core", 12_000, 29), ("wide", 3_000, 872)):
            path = Path(folder) / f"generated-{name}.json.gz"
            write(generated(decisions, 65_000, 100_000, 0, largest), path)
            measure(path, steps=arguments.steps)


if __name__ == "__main__":
    main()
