"""Conflicts of pins and memory times against full enumeration: what is blamed conflicts, and nothing of it can be spared."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from conflict_cases import Enumerated, random_pins, wrong
from random_graphs import random_graph

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import ChoiceGraph, Constraint
from solver_shard.solve import iis
from solver_shard.solve.iis import (
    Decision,
    ExplainedArcs,
    InfeasibleSubsystem,
    compute_infeasible_subsystem,
    core_by_assumptions,
    least_bytes,
    without,
)
from solver_shard.solve.limits import Clock
from solver_shard.solve.solution import Status


def trading_graph(rng: np.random.Generator) -> ChoiceGraph:
    """Pairs of nodes that have bytes at one of two times or the other, as a tensor that is kept or made again: several times conflict."""
    pairs, times, k = 4, 5, 3
    usages = rng.integers(0, 9, (pairs, k))
    spans = [(int(t), int(t) + 1) for _ in range(pairs) for t in rng.choice(times, size=2, replace=False)]
    return ChoiceGraph(
        names=tuple(f"n{v}" for v in range(2 * pairs)),
        offsets=np.arange(0, 2 * pairs * k + 1, k),
        costs=rng.integers(0, 9, 2 * pairs * k),
        usages=np.stack([usages, 9 - usages], axis=1).ravel(),
        interval_offsets=np.arange(2 * pairs + 1),
        intervals=np.array(spans),
        edges=np.arange(2 * pairs).reshape(-1, 2),
        edge_tables=np.zeros(pairs, dtype=np.int64),
        tables=(np.where(np.eye(k, dtype=bool), 0, FORBIDDEN),),
    )


def random_case(seed: int) -> tuple[ChoiceGraph, list[Constraint], Enumerated]:
    """A graph of up to six nodes with pins, and a limit that often binds."""
    rng = np.random.default_rng(seed)
    graph = trading_graph(rng) if seed % 4 == 0 else random_graph(rng, int(rng.integers(2, 7)))
    pins = random_pins(rng, graph)
    every = Enumerated(graph, pins)
    if not len(every.assignments) or rng.random() < 0.2:
        return graph, pins, every
    profiles = every.profiles[every.which(range(len(pins)), [], None)] if rng.random() < 0.5 else every.profiles
    profiles = profiles if len(profiles) else every.profiles
    peaks = sorted(profiles.max(axis=1).tolist())
    each = int(profiles.min(axis=0).max())  # enough for every time alone, seldom for all
    limit = max(0, int(rng.choice([peaks[0] - 1, peaks[0], peaks[len(peaks) // 3], each, each, each])))
    return replace(graph, limit=limit), pins, every


def test_what_is_blamed_conflicts_and_nothing_of_it_can_be_spared() -> None:
    kinds = {"none": 0, "pins": 0, "times": 0, "pins and times": 0, "several times": 0}
    for seed in range(400):
        graph, pins, every = random_case(seed)
        found = compute_infeasible_subsystem(graph, pins, time_limit=None)
        assert not wrong(graph, pins, every, found), seed
        if found is None:
            kinds["none"] += 1
        else:
            kinds[" and ".join([*(["pins"] if found.constraints else []), *(["times"] if found.times else [])]) or "none"] += 1
            kinds["several times"] += len(found.times) > 1
    assert min(kinds.values()) >= 10, kinds


def test_what_cp_sat_leaves_open_the_solver_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iis, "decide", lambda problem, clock, **options: Decision(None))
    for seed in range(60):
        graph, pins, every = random_case(seed)
        assert not wrong(graph, pins, every, compute_infeasible_subsystem(graph, pins, time_limit=None)), seed


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("_fewest", lambda self, kept, times: kept),
        ("_fewest", lambda self, kept, times: kept[1:]),
        ("_fewest_times", lambda self, kept, times: times),
    ],
)
def test_a_planted_fault_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., list[int]]) -> None:
    monkeypatch.setattr(iis._DeletionFilter, name, fault)
    cases = [random_case(seed) for seed in range(150)]
    assert any(wrong(graph, pins, every, compute_infeasible_subsystem(graph, pins, time_limit=None)) for graph, pins, every in cases)


def test_prices_are_those_of_enumeration() -> None:
    priced = {"pins": 0, "times": 0}
    for seed in range(200):
        graph, pins, every = random_case(seed)
        found = compute_infeasible_subsystem(graph, pins, time_limit=None)
        if found is None:
            continue
        times = range(every.profiles.shape[1])
        for k in found.constraints:
            solution = without(graph, pins, k, gap=0.0, time_limit=None)
            others = [j for j in range(len(pins)) if j != k]
            keeping = every.which(others, [], None)
            within = every.which(others, times, graph.limit)
            bare = iis.narrowed(graph, {}, dropped=pins[k].edges)
            if len(within):
                assert solution.cost == solution.bound == min(bare.cost(every.assignments[i]) for i in within), seed
            elif len(keeping):
                assert solution.status is Status.INFEASIBLE
                assert solution.peak == solution.peak_bound == every.profiles[keeping].max(axis=1).min(), seed
            else:
                assert solution.assignment is None, seed
            priced["pins"] += 1
        for t in found.times:
            others = [s for s in found.times if s != t]
            least = every.profiles[every.which(found.constraints, others, graph.limit), t].min()
            assert least_bytes(graph, pins, found, t, time_limit=None) == (least, least), seed
            priced["times"] += 1
    assert min(priced.values()) >= 25, priced


def test_the_reasons_of_arc_consistency_and_of_cp_sat_conflict() -> None:
    seen = [0, 0]
    for seed in range(150):
        graph, pins, every = random_case(seed)
        arcs, kept = ExplainedArcs(graph, pins), range(len(pins))
        core = arcs.left(kept).core
        if core is not None:
            assert not every.possible(core, [], None), seed
            seen[0] += 1
        rows = [graph.usages * np.repeat(row, graph.sizes()) for row in iis._living(graph, range(every.profiles.shape[1]))]
        found = core_by_assumptions(
            arcs, kept, rows if graph.limit is not None else [], graph.limit or 0, Clock(None, None), effort=10.0, seed=0
        )
        if found is not None:  # in the units of a row not every conflict shows
            assert not every.possible(*found, graph.limit), seed
            seen[1] += 1
    assert min(seen) >= 20, seen


def two_of_three() -> tuple[ChoiceGraph, list[Constraint]]:
    """Three nodes of two strategies, no two alike, which arc consistency does not see to be impossible; and a pin of no part in it."""
    unlike = np.where(np.eye(2, dtype=bool), FORBIDDEN, 0)
    graph = ChoiceGraph(
        names=("a", "b", "c", "d"),
        offsets=np.arange(0, 9, 2),
        costs=np.zeros(8, dtype=np.int64),
        usages=np.array([1, 2, 3, 4, 5, 6, 7, 8]),
        interval_offsets=np.arange(5),
        intervals=np.array([[0, 1], [1, 2], [2, 3], [3, 4]]),
        edges=np.array([[0, 1], [1, 2], [0, 2]]),
        edge_tables=np.zeros(3, dtype=np.int64),
        tables=(unlike,),
    )
    ops = [Constraint(name=f"{u}{v}", edges=(e,)) for e, (u, v) in enumerate([("a", "b"), ("b", "c"), ("a", "c")])]
    return graph, [Constraint(name="d", allowed={3: np.array([True, False])}), *ops]


def test_what_only_a_search_sees() -> None:
    graph, pins = two_of_three()
    assert ExplainedArcs(graph, pins).left(range(4)).core is None
    assert compute_infeasible_subsystem(graph, pins) == InfeasibleSubsystem(constraints=(1, 2, 3))


def test_memory_alone_blames_no_pin_and_pins_alone_no_time() -> None:
    graph, pins = two_of_three()
    assert compute_infeasible_subsystem(replace(graph, limit=0), pins) == InfeasibleSubsystem(constraints=(1, 2, 3))
    path = replace(graph, edges=graph.edges[:2], edge_tables=graph.edge_tables[:2], limit=7)
    assert compute_infeasible_subsystem(replace(path, limit=6), pins[:1]) == InfeasibleSubsystem(constraints=(), times=(3,))
    assert compute_infeasible_subsystem(path, pins[:1]) is None
    high = [*pins[1:3], Constraint(name="d high", allowed={3: np.array([False, True])})]
    found = compute_infeasible_subsystem(path, high)
    assert found == InfeasibleSubsystem(constraints=(2,), times=(3,))
    assert least_bytes(path, high, found, 3) == (8, 8)


def test_limits_that_strike_leave_a_conflict_that_may_not_be_minimal(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, pins = two_of_three()
    asked = itertools.count()
    possible = iis._DeletionFilter._possible

    def tired(self: iis._DeletionFilter, kept: list[int], times: list[int]) -> object:
        return possible(self, kept, times) if next(asked) == 0 else (None, None)

    monkeypatch.setattr(iis._DeletionFilter, "_possible", tired)
    monkeypatch.setattr(iis._DeletionFilter, "_less", lambda self, kept, times: (kept, times))
    assert compute_infeasible_subsystem(graph, pins) == InfeasibleSubsystem(constraints=(0, 1, 2, 3), minimal=False)
    assert compute_infeasible_subsystem(graph, pins, work_limit=1e-9) is None


def test_the_same_work_limit_gives_the_same_conflict() -> None:
    for seed in range(20):
        graph, pins, _ = random_case(seed)
        for work in (None, 1e-3, 0.1):
            once, again = (compute_infeasible_subsystem(graph, pins, time_limit=None, work_limit=work) for _ in range(2))
            assert once == again
