"""Windows: the solver against brute force, and what is proven of graphs shaped like tied transformers.

    python experiments/windows.py [--graphs 2000] [--layers 32] [--seeds 3] [--markdown experiments/windows.md]

*Brute force*: random small graphs with windows, lanes, limits and ties, one objective and one limit drawn for each; every allowed
assignment is priced one by one, in the free graph where nodes are tied. *Transformers*: layers of alike nodes with a chain of activations,
parameters that are gathered one window ahead and gradients that are reduced one window later, on two lanes beside the compute stream. The
first and the last layer are free, those between are tied in four groups, so that some windows are classes of many. The root is what weights
alone prove; what closed the rest is the source of the last bound.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from enumeration import enumerate_allowed  # noqa: E402 - found through the path above
from random_graphs import random_graph, repeated_layers, windowed  # noqa: E402

from solver_shard.graph.choice_graph import ChoiceGraph, Loads  # noqa: E402
from solver_shard.graph.symmetry import expand, fold  # noqa: E402
from solver_shard.solve.engine import solve  # noqa: E402
from solver_shard.solve.solution import Solution, objective_value  # noqa: E402


def brute_force(graphs: int) -> Counter[str]:
    """How many solves agreed with looking at every assignment, by what was asked."""
    counts: Counter[str] = Counter()
    for seed in range(graphs):
        rng = np.random.default_rng(seed)
        tied = seed % 3 == 0
        if tied:
            free, classes = repeated_layers(rng, windowed(rng, random_graph(rng, int(rng.integers(1, 4)), strategies=3)))
            folded = fold(free, classes)
            graph = folded.graph
        else:
            graph = free = windowed(rng, random_graph(rng, int(rng.integers(1, 7))))
        rows = enumerate_allowed(graph)
        prices = [free.cost(expand(folded, row)) if tied else free.cost(row) for row in rows]
        peaks = [graph.peak(row) for row in rows]
        objective, weight = [("time", 0), ("time", 0), ("time", 10**6), ("memory", 0)][int(rng.integers(4))]
        limit = None if not peaks or rng.random() < 0.3 else int(rng.choice([*peaks, min(peaks)]))
        best = min(
            (
                objective_value(objective, weight, price, peak)
                for price, peak in zip(prices, peaks, strict=True)
                if limit is None or peak <= limit
            ),
            default=None,
        )
        found = solve(replace(graph, limit=limit), objective=objective, memory_weight=weight, gap=0.0, time_limit=120.0)
        counts[f"{'weighted' if weight else objective}, {'tied' if tied else 'free'}, {'limit' if limit is not None else 'no limit'}"] += 1
        if best is None:
            counts["wrong: something where there is nothing"] += found.objective is not None and found.feasible
            continue
        counts["wrong: another optimum"] += found.objective != best
        counts["wrong: a bound above the optimum"] += found.bound is not None and found.bound > best
        counts["not proven"] += found.bound != best
    return counts


def transformer(seed: int, layers: int, *, strategies: int = 6, width: int = 20) -> tuple[ChoiceGraph, np.ndarray]:
    """A free graph of so many layers, each of ``width`` activations and as many parameters, and the classes that tie them."""
    rng = np.random.default_rng(seed)
    count, k = 2 * width, strategies
    windows = 2 * layers + 3  # a head, forward, backward, a tail, the update
    nodes, edges, joint, classes = [], [], [], []
    compute = [np.sort(rng.integers(5_000, 120_000, k))[::-1].copy() for _ in range(width)]
    bytes_ = [np.sort(rng.integers(1, 2**28, k)) for _ in range(count)]
    moves = [rng.integers(0, 300_000, (k, k)) * (1 - np.eye(k, dtype=np.int64)) for _ in range(width)]
    gathers = [rng.integers(0, 500_000, (k, k)) for _ in range(width)]
    lanes = [(int(rng.integers(1, 3)), int(rng.integers(1, 3))) for _ in range(width)]
    for layer in range(layers):
        first, group = layer * count, 0 if layer == 0 else 5 if layer == layers - 1 else 1 + 4 * layer // layers
        ahead, back = 1 + layer, 2 * layers - layer
        for i in range(width):
            v, p = first + i, first + width + i
            nodes.append((v, compute[i], [(3 * ahead, 1), (3 * back, 2)]))
            lane, other = lanes[i]
            before = v - 1 if v else None
            if before is not None:
                edges.append((before, v))
                joint.append((before, v, moves[i], [(3 * ahead, 1), (3 * ahead + lane, 1), (3 * back, 1), (3 * back + lane, 1)]))
            edges.append((v, p))
            joint.append((v, p, gathers[i], [(3 * (ahead - 1) + other, 1), (3 * (back - 1) + other, 1), (3 * (back + 1) + other, 1)]))
            joint.append((v, p, gathers[i] // 10, [(3 * (ahead - 1), 1), (3 * (back - 1), 1), (3 * (back + 1), 1)]))
        classes += [count * group + i for i in range(count)]
    size = layers * count
    starts = np.repeat(np.arange(layers), count)
    intervals = np.stack([np.where(np.arange(size) % count < width, starts, 0), np.full(size, 2 * layers)], axis=1)
    intervals[:, 1] -= np.where(np.arange(size) % count < width, starts, 0)
    graph = ChoiceGraph(
        names=tuple(f"n{v}" for v in range(size)),
        offsets=np.arange(size + 1, dtype=np.int64) * k,
        costs=np.zeros(size * k, dtype=np.int64),
        usages=np.concatenate([bytes_[v % count] for v in range(size)]),
        interval_offsets=np.arange(size + 1, dtype=np.int64),
        intervals=intervals.astype(np.int64),
        edges=np.array(edges, dtype=np.int64),
        edge_tables=np.zeros(len(edges), dtype=np.int64),
        tables=(np.zeros((k, k), dtype=np.int64),),
        loads=Loads.of(np.repeat(np.arange(windows), 3), nodes=nodes, edges=joint),
    )
    graph.validate()
    return graph, np.array(classes)


def root(found: Solution) -> int:
    """The largest bound that weights alone gave."""
    return max((event.bound for event in found.history if event.bound is not None and event.source == "weights"), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=float, default=60.0, help="units of work of each transformer")
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    lines = ["# Windows", "", f"`python experiments/windows.py --graphs {given.graphs} --layers {given.layers} --seeds {given.seeds}`", ""]
    started = time.process_time()
    counts = brute_force(given.graphs)
    lines += [f"Brute force, {given.graphs} graphs, {time.process_time() - started:.0f} CPU s:", "", "| solves | number |", "|---|---|"]
    lines += [f"| {name} | {number} |" for name, number in sorted(counts.items())]
    lines += [
        *("", f"Tied transformers of {given.layers} layers, limit 30% of the way from the least peak to that of the fastest:", ""),
        *("| seed | nodes | windows | limit | root gap | gap | last bound from | work | CPU s |", "|---|---|---|---|---|---|---|---|---|"),
    ]
    for seed in range(given.seeds):
        graph = fold(*transformer(seed, given.layers)).graph
        started = time.process_time()
        found = solve(graph, gap=1e-4, time_limit=600.0, work_limit=given.work)
        low = solve(graph, objective="memory", gap=0.01, time_limit=60.0).peak
        assert found.peak is not None
        assert low is not None
        assert graph.loads is not None
        for limit in (None, int(low + 0.3 * (found.peak - low))):
            if limit is not None:
                started = time.process_time()
                found = solve(replace(graph, limit=limit), gap=1e-4, time_limit=600.0, work_limit=given.work)
            value = found.objective or 1
            last = [event.source for event in found.history if event.bound == found.bound][:1]
            cells = [seed, graph.size, graph.loads.count, "none" if limit is None else "binds", f"{1 - root(found) / value:.2%}"]
            cells += [
                "none" if found.gap is None else f"{found.gap:.3%}",
                *last,
                f"{found.work:.1f}",
                f"{time.process_time() - started:.1f}",
            ]
            lines.append(f"| {' | '.join(map(str, cells))} |")
            print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if given.markdown:
        given.markdown.write_text(text)


if __name__ == "__main__":
    main()
