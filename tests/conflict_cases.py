"""Random pins and limits on small choice graphs, whether they conflict by enumeration, and what is wrong with an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from enumeration import enumerate_allowed

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import ChoiceGraph, Constraint
from solver_shard.solve.iis import InfeasibleSubsystem


def random_pins(rng: np.random.Generator, graph: ChoiceGraph, most: int = 5) -> list[Constraint]:
    """Masks on one to three nodes each, which may leave a node nothing together; sometimes one of them owns a few edges."""
    pins = []
    for k in range(int(rng.integers(0, most + 1))):
        chosen = rng.choice(graph.size, size=int(rng.integers(1, min(3, graph.size) + 1)), replace=False)
        allowed = {}
        for v in chosen.tolist():
            mask = rng.random(int(graph.sizes()[v])) < 0.6
            mask[rng.integers(len(mask))] = True
            allowed[v] = mask
        pins.append(Constraint(name=f"pin {k}", allowed=allowed))
    if len(graph.edges) and rng.random() < 0.3:
        pins.append(
            Constraint(name="an op", edges=tuple(rng.choice(len(graph.edges), size=min(2, len(graph.edges)), replace=False).tolist()))
        )
    return pins


class Enumerated:
    """Every assignment of the graph without the pins' edges, and what each keeps."""

    def __init__(self, graph: ChoiceGraph, pins: Sequence[Constraint]) -> None:
        owned = [e for pin in pins for e in pin.edges]
        free = np.ones(len(graph.edges), dtype=bool)
        free[owned] = False
        bare = replace(graph, edges=graph.edges[free], edge_tables=graph.edge_tables[free])
        self.assignments = enumerate_allowed(bare)
        self.profiles = np.zeros((len(self.assignments), int(graph.intervals[:, 1].max(initial=1))), dtype=np.int64)
        for v in range(graph.size):
            for start, stop in graph.node_intervals(v).tolist():
                self.profiles[:, start:stop] += graph.node_usages(v)[self.assignments[:, v]][:, None]
        self.keeps = np.ones((len(self.assignments), len(pins)), dtype=bool)
        for k, pin in enumerate(pins):
            for v, mask in pin.allowed.items():
                self.keeps[:, k] &= mask[self.assignments[:, v]]
            for e in pin.edges:
                u, v = graph.edges[e].tolist()
                self.keeps[:, k] &= graph.tables[graph.edge_tables[e]][self.assignments[:, u], self.assignments[:, v]] < FORBIDDEN

    def which(self, kept: Sequence[int], times: Sequence[int], limit: int | None) -> np.ndarray:
        found = self.keeps[:, list(kept)].all(axis=1)
        if times and limit is not None:
            found = found & (self.profiles[:, list(times)] <= limit).all(axis=1)
        return np.flatnonzero(found)

    def possible(self, kept: Sequence[int], times: Sequence[int], limit: int | None) -> bool:
        return len(self.which(kept, times, limit)) > 0


def wrong(graph: ChoiceGraph, pins: Sequence[Constraint], every: Enumerated, found: InfeasibleSubsystem | None) -> str:
    """What is wrong with an answer, nothing if it is right."""
    limit, times = graph.limit, range(every.profiles.shape[1] if graph.limit is not None else 0)
    if found is None:
        return "" if every.possible(range(len(pins)), times, limit) else "a conflict was not found"
    if every.possible(found.constraints, found.times, limit):
        return "what is blamed is possible"
    for k in found.constraints:
        if not every.possible([j for j in found.constraints if j != k], found.times, limit):
            return f"{pins[k].name} is blamed and not needed"
    for t in found.times:
        if not every.possible(found.constraints, [s for s in found.times if s != t], limit):
            return f"time {t} is blamed and not needed"
    return "" if found.minimal else "minimal, but not called so"


def dense_case(seed: int) -> tuple[ChoiceGraph, list[Constraint], Enumerated]:
    """Five to eight nodes with most pairs of them coupled, many pins, large bytes, and a limit that a few assignments keep, or none."""
    rng = np.random.default_rng([seed, 7])
    nodes, k = int(rng.integers(5, 9)), int(rng.integers(2, 4))
    pairs = np.array([(u, v) for u in range(nodes) for v in range(u + 1, nodes)])
    edges = pairs[rng.random(len(pairs)) < rng.uniform(0.5, 1.0)]
    share = rng.uniform(0.1, 0.35)
    counts = rng.choice([1, 1, 2, 3], nodes)
    starts = rng.integers(0, 6, int(counts.sum()))
    high = int(rng.choice([20, 10**9, 2**31, 2**32, 2**40]))
    graph = ChoiceGraph(
        names=tuple(f"n{v}" for v in range(nodes)),
        offsets=np.arange(nodes + 1, dtype=np.int64) * k,
        costs=np.zeros(nodes * k, dtype=np.int64),
        usages=rng.integers(1, high, nodes * k, endpoint=True),
        interval_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        intervals=np.stack([starts, starts + rng.integers(1, 4, len(starts))], axis=1).astype(np.int64),
        edges=edges.astype(np.int64),
        edge_tables=np.arange(len(edges), dtype=np.int64),
        tables=tuple(np.where(rng.random((k, k)) < share, FORBIDDEN, 0).astype(np.int64) for _ in edges),
    )
    graph.validate()
    pins = random_pins(rng, graph, most=9)
    every = Enumerated(graph, pins)
    if not len(every.assignments):
        return graph, pins, every
    kept = every.which(range(len(pins)), [], None)
    profiles = every.profiles[kept] if len(kept) and rng.random() < 0.7 else every.profiles
    each, peaks = int(profiles.min(axis=0).max()), np.sort(profiles.max(axis=1))
    limit = int(rng.choice([peaks[0] - 1, peaks[0], peaks[len(peaks) // 8], each, (each + int(peaks[0])) // 2]))
    return replace(graph, limit=max(0, limit)), pins, every
