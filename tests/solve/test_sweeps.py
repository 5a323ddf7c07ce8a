"""Compiled message passing: the bound and messages of the plain one to the last bit, and never above any allowed cost."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from flat_problems import allowed, rows_of, some_problem

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import Ints
from solver_shard.solve.bounds.trws import Messages, scale_of
from solver_shard.solve.bounds.trws_compiled import Passing, compiled
from solver_shard.solve.flat import Flat, Floats
from solver_shard.solve.problem import Edge, Problem

SEEDS = range(80)


def beliefs_of(passing: Passing, theta: Floats) -> Floats:
    """theta plus all messages that come in, per flat strategy."""
    g, total = passing.flat.graph, theta.copy()
    for e in range(len(g.ea)):
        for v, messages, start, mapped in (
            (g.ea[e], passing.backward, g.bo[e], g.rmap[e]),
            (g.eb[e], passing.forward, g.fo[e], g.cmap[e]),
        ):
            at = np.arange(g.k[v]) if mapped < 0 else g.maps[mapped : mapped + g.k[v]]
            total[g.off[v] : g.off[v] + g.k[v]] += messages[start + at]
    return total


def alone(unary: list[Ints], edges: list[Edge]) -> Problem:
    """A problem without memory."""
    nothing = np.zeros(0, dtype=np.int64)
    return Problem(unary=tuple(unary), edges=tuple(edges), carriers=(), spans=np.zeros((0, 3), dtype=np.int64), base=nothing, times=nothing)


def plain(a: int, b: int, core: Ints) -> Edge:
    return Edge(a=a, b=b, core=core, rows=np.arange(core.shape[0]), cols=np.arange(core.shape[1]))


@pytest.mark.parametrize("seed", SEEDS)
def test_sweeps_are_those_of_messages(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = some_problem(rng, nodes=int(rng.integers(1, 25)), strategies=6)
    flat = Flat.of(problem, scale_of(problem))
    passing, messages = Passing(flat), Messages(problem, flat.scale)
    for _ in range(8):
        theta = flat.theta + rng.integers(0, 2**30, len(flat.theta)) * (rng.random() < 0.5)
        assert passing.sweep(theta) == messages.sweep(rows_of(problem, theta))
        for ours, theirs, starts in (
            (passing.forward, messages.forward, flat.graph.fo),
            (passing.backward, messages.backward, flat.graph.bo),
        ):
            split = np.split(ours, starts[1:-1].tolist()) if problem.edges else []
            assert [part.tolist() for part in split] == [part.tolist() for part in theirs]
        assert passing.decode(theta).tolist() == messages.decode(rows_of(problem, theta)).tolist()
        beliefs = np.concatenate([messages.belief(rows_of(problem, theta), v) for v in range(problem.size)])
        assert beliefs_of(passing, theta).tolist() == beliefs.tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_are_below_every_allowed_cost_even_where_strategies_are_dead(seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    problem = some_problem(rng, nodes=int(rng.integers(2, 7)), degree=3.0, forbidden=0.5, consistent=bool(seed % 2))
    flat = Flat.of(problem, scale_of(problem))
    theta = flat.theta + rng.integers(0, 2**20, len(flat.theta))
    least = min((flat.cost(x, theta) for x in allowed(problem)), default=np.inf)
    passing = Passing(flat)
    for _ in range(30):
        assert passing.sweep(theta) <= least


def test_the_bound_of_a_tree_is_its_optimum() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = rng.integers(1, 5, 6)
        edges = [plain(int(rng.integers(v)), v, rng.integers(0, 100, (0, 0))) for v in range(1, 6)]
        edges = [plain(e.a, e.b, rng.integers(0, 100, (sizes[e.a], sizes[e.b]))) for e in edges]
        problem = alone([rng.integers(0, 100, k) for k in sizes], edges)
        flat = Flat.of(problem, 2.0**20)
        passing = Passing(flat)
        bound = max(passing.sweep(flat.theta) for _ in range(60))
        assert bound / flat.scale == pytest.approx(min(problem.cost(x) for x in allowed(problem)), abs=1e-3)


@pytest.mark.parametrize("seed", range(12))
def test_dead_strategies_of_many_neighbours_do_not_make_sums_inexact(seed: int) -> None:
    """Many neighbours say CLASH of the same strategies, some of them do not: the shares of that would be larger than exact sums."""
    rng = np.random.default_rng(seed)
    nodes = 40
    pairs = [(a, b) for a in range(nodes) for b in range(a + 1, nodes) if rng.random() < 0.7]
    unary = [np.where(rng.random(4) < 0.5, FORBIDDEN, rng.integers(0, 2**35, 4)) for _ in range(nodes)]
    edges = [plain(a, b, np.where(rng.random((4, 4)) < 0.7, FORBIDDEN, rng.integers(0, 2**35, (4, 4)))) for a, b in pairs]
    for row in [*unary, *(edge.core.ravel() for edge in edges)]:
        row[0] = int(rng.integers(0, 2**35)) | 1  # the first strategies together are allowed
    problem = alone(unary, edges)
    flat = Flat.of(problem, scale_of(problem))
    known = flat.cost(np.zeros(nodes, dtype=np.int64))
    passing = Passing(flat)
    for _ in range(20):
        bound = passing.sweep(flat.theta)
        assert bound <= known
        assert beliefs_of(passing, flat.theta).max() <= 2.0**53
    assert bound > 0.5 * known


@pytest.mark.parametrize("seed", range(40))
def test_unary_costs_beyond_all_measure_give_no_bound_too_high(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = some_problem(rng, nodes=5, high=10**12)
    flat = Flat.of(problem, scale_of(problem))
    # one strategy of each node is free of penalties: those together are the least but for costs
    free = (rng.random(problem.size) * problem.sizes).astype(np.int64)
    theta = flat.theta + 2.0**50
    theta[flat.graph.off[:-1] + free] -= 2.0**50
    least = min((flat.cost(x, theta) for x in allowed(problem)), default=np.inf)
    passing = Passing(flat)
    for _ in range(40):
        assert passing.sweep(theta) <= least


def test_kernels_that_another_release_left_behind_are_compiled_anew(tmp_path: Path) -> None:
    """The index on disk names a class of an argument; that class has another name since."""
    path = tmp_path / "kernels_of_a_release.py"
    for name in ("Bytes", "Limits", "Limits"):
        path.write_text(
            f"from typing import NamedTuple\n\nclass {name}(NamedTuple):\n    least: int\n\n"
            f"def twice(value):\n    return 2 * value.least\n\nargument = {name}(21)\n"
        )
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        try:
            spec.loader.exec_module(module)
            assert compiled(module.twice)(module.argument) == 42
        finally:
            del sys.modules[path.stem]
