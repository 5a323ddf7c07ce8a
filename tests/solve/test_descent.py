"""The tree of local_search, descent and repair under the limit, and forest moves: against plain arrays and enumeration."""

from __future__ import annotations

import numpy as np
import pytest
from flat_problems import allowed, every, some_problem

from solver_shard.graph.choice_graph import Ints
from solver_shard.solve.bounds.trws import CLASH, scale_of
from solver_shard.solve.flat import Flat
from solver_shard.solve.primal import local_search
from solver_shard.solve.primal.local_search import Forest, Local, _pick
from solver_shard.solve.problem import Problem

SEEDS = range(60)


def some_flat(seed: int, **options: int | float) -> tuple[Flat, np.random.Generator]:
    rng = np.random.default_rng(seed)
    problem = some_problem(rng, **options)  # type: ignore[arg-type] # of several types
    return Flat.of(problem, scale_of(problem)), rng


def drawn(problem: Problem, rng: np.random.Generator) -> Ints:
    return (rng.random(problem.size) * problem.sizes).astype(np.int64)


@pytest.mark.parametrize("times", [1, 2, 3, 8, 13, 100])
def test_a_tree_of_loads_is_a_plain_array(times: int) -> None:
    rng = np.random.default_rng(times)
    plain = rng.integers(0, 50, times)
    top, added = local_search.build(plain)
    assert int(top[1]) == plain.max()
    for _ in range(300):
        start, stop = sorted(rng.choice(times + 1, 2, replace=False).tolist())
        amount = int(rng.integers(-10, 11))
        amount = max(amount, -int(plain[start:stop].min()))
        local_search.add(top, added, start, stop, amount)
        plain[start:stop] += amount
        assert int(top[1]) == plain.max()
        assert local_search.argmax(top) == plain.argmax()


@pytest.mark.parametrize("seed", SEEDS)
def test_moves_of_nodes_keep_the_tree_at_the_profile(seed: int) -> None:
    flat, rng = some_flat(seed)
    problem, chosen = flat.problem, drawn(flat.problem, np.random.default_rng(seed))
    top, added = local_search.build(problem.profile(chosen))
    for _ in range(20):
        v = int(rng.integers(problem.size))
        new = int(rng.integers(problem.sizes[v]))
        local_search.move(flat.bytes, top, added, v, int(chosen[v]), new)
        chosen[v] = new
        profile = problem.profile(chosen)
        assert int(top[1]) == profile.max(initial=0)
        if len(profile):
            assert local_search.argmax(top) == profile.argmax()


@pytest.mark.parametrize("seed", SEEDS)
def test_descent_keeps_the_limit_and_ends_where_no_change_of_one_node_helps(seed: int) -> None:
    flat, rng = some_flat(seed)
    problem, local = flat.problem, Local(flat)
    within = [x for x in allowed(problem) if problem.value(x) is not None]
    for x in rng.permutation(np.array(within))[:10] if within else []:
        before = x.copy()
        found = local.descend(x, flat.theta, rng)
        assert (x == before).all(), "the given one stays as it is"
        value, old = problem.value(found), problem.value(x)
        assert value is not None
        assert old is not None
        assert value <= old
        assert problem.value(local.descend(found, flat.theta, rng)) == value
        for v in range(problem.size):
            for k in range(int(problem.sizes[v])):
                other = found.copy()
                other[v] = k
                changed = problem.value(other)
                assert changed is None or changed >= value
    for x in (drawn(problem, rng) for _ in range(5)):
        assert flat.cost(local.settle(x, flat.theta)) <= flat.cost(x)


@pytest.mark.parametrize("seed", SEEDS)
def test_repair_ends_within_the_limit_or_says_that_it_did_not(seed: int) -> None:
    flat, rng = some_flat(seed)
    problem, local = flat.problem, Local(flat)
    assert flat.limit is not None
    for x in (drawn(problem, rng) for _ in range(10)):
        before = x.copy()
        found = local.repair(x, flat.theta)
        assert (x == before).all(), "the given one stays as it is"
        if int(problem.profile(x).max(initial=0)) <= flat.limit:
            assert found is not None
            assert (found == x).all()
        if found is not None:
            assert int(problem.profile(found).max(initial=0)) <= flat.limit
    if problem.least() > flat.limit:
        assert local.repair(drawn(problem, rng), flat.theta) is None


@pytest.mark.parametrize("seed", SEEDS)
def test_repair_does_not_fail_where_nodes_share_but_one_time(seed: int) -> None:
    flat, rng = some_flat(seed, degree=0.0, times=1, strategies=3)
    least = min(int(flat.problem.profile(x).max(initial=0)) for x in every(flat.problem))
    assert (Local(flat).repair(drawn(flat.problem, rng), flat.theta) is not None) == (least <= (flat.limit or 0))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_forest_move_is_at_least_as_good_as_any_change_within_its_forest(seed: int) -> None:
    flat, rng = some_flat(seed, nodes=6, strategies=3, degree=1.5)
    problem, forest = flat.problem, Forest(flat, np.random.default_rng(seed))
    for x in rng.permutation(np.array(every(problem)))[:5]:
        theta = flat.theta + rng.integers(0, 100, len(flat.theta))
        draws = int(rng.integers(2**31))
        forest.rng = np.random.default_rng(draws)
        order = np.argsort(np.random.default_rng(draws).random(flat.size) * forest.bias)
        inside = np.zeros(flat.size, dtype=bool)
        _pick(flat.graph, order, inside)
        moved = x.copy()
        forest.move(moved, theta)
        assert (moved[~inside] == x[~inside]).all()
        best = min(flat.cost(y, theta) for y in every(problem) if (y[~inside] == x[~inside]).all())
        assert flat.cost(moved, theta) == best or best >= CLASH


@pytest.mark.parametrize("seed", SEEDS)
def test_picked_nodes_are_a_maximal_induced_forest(seed: int) -> None:
    flat, rng = some_flat(seed, nodes=12, strategies=2, degree=2.5)
    inside = np.zeros(flat.size, dtype=bool)
    _pick(flat.graph, rng.permutation(flat.size), inside)
    pairs = [(e.a, e.b) for e in flat.problem.edges]

    def acyclic(nodes: set[int]) -> bool:
        leader = list(range(flat.size))

        def root(v: int) -> int:
            return v if leader[v] == v else root(leader[v])

        for a, b in pairs:
            if a in nodes and b in nodes:
                if root(a) == root(b):
                    return False
                leader[root(a)] = root(b)
        return True

    chosen = set(np.flatnonzero(inside).tolist())
    assert acyclic(chosen)
    assert not any(acyclic(chosen | {v}) for v in range(flat.size) if v not in chosen)


@pytest.mark.parametrize("seed", range(20))
def test_one_move_solves_a_tree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    whole = some_problem(rng, nodes=6, strategies=3, degree=9.0, forbidden=0.1)
    seen: dict[int, int] = {}
    edges = tuple(e for e in whole.edges if seen.setdefault(e.b, e.a) == e.a)
    problem = Problem(unary=whole.unary, edges=edges, carriers=(), spans=whole.spans[:0], base=whole.base[:0], times=whole.times[:0])
    flat = Flat.of(problem, scale_of(problem))
    chosen = drawn(problem, rng)
    Forest(flat, rng).move(chosen, flat.theta)
    assert problem.cost(chosen) == min(problem.cost(x) for x in every(problem))
