"""What is proven holds to the last unit, however large bytes and costs are: a slice of experiments/certificates.py, and single cases."""

from __future__ import annotations

import conflict_cases
import large_numbers
import numpy as np
import pytest

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import ChoiceGraph
from solver_shard.solve import integer_program, parameters
from solver_shard.solve.bounds.lagrangian import LagrangianDual
from solver_shard.solve.engine import solve
from solver_shard.solve.iis import compute_infeasible_subsystem
from solver_shard.solve.integer_program import covering, in_safe_units
from solver_shard.solve.limits import Clock
from solver_shard.solve.problem import from_graph


def leave_to(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which way a integer_program is solved: by labels at once, or by HiGHS, whose claims labels or CP-SAT make again."""
    if way == "highs, labels":
        monkeypatch.setattr(parameters, "QUICK_WORK", 0.0)
    elif way == "highs, cp-sat":
        monkeypatch.setattr(integer_program, "_enumerated", lambda *_arguments: None)


@pytest.mark.parametrize("large", ["bytes", "costs"])
def test_what_is_proven_of_large_numbers_is_what_enumeration_finds(large: str) -> None:
    for seed in range(10_000, 10_120):
        assert not large_numbers.wrong(large_numbers.asked(seed, large=large)), seed


def test_what_is_blamed_in_dense_graphs_conflicts_and_nothing_of_it_can_be_spared() -> None:
    found = 0
    for seed in (1072, *range(10_000, 10_080)):  # of the first one CP-SAT's presolve finds an assignment impossible that is not
        graph, pins, every = conflict_cases.dense_case(seed)
        conflict = compute_infeasible_subsystem(graph, pins, time_limit=None)
        assert not conflict_cases.wrong(graph, pins, every, conflict), seed
        found += conflict is not None
    assert found >= 40


def test_a_row_in_safe_units_is_implied_by_the_row_and_sums_to_less_than_2_to_the_30() -> None:
    rng = np.random.default_rng(0)
    for bits in (4, 20, 30, 31, 40, 60):
        usage = rng.integers(0, 2**bits, 8)
        chosen = rng.random(8) < 0.5
        room = int(usage[chosen].sum())
        units, units_of_room = in_safe_units(usage, room)
        assert units[chosen].sum() <= units_of_room
        assert units.sum() < 2**30
        assert bits > 27 or ((units == usage).all() and units_of_room == room)


def test_a_cover_forbids_what_exceeds_the_room_and_nothing_that_keeps_it() -> None:
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(4), 3)
    every = np.stack(np.meshgrid(*[np.arange(3)] * 4, indexing="ij"), axis=-1).reshape(-1, 4) + 3 * np.arange(4)
    for _ in range(40):
        usage = rng.integers(0, 10, 12)
        room = int(rng.integers(5, 20))
        used = usage[every].sum(axis=1)
        for chosen in every[used > room][:5]:
            groups = covering(usage, chosen, owner, room)
            hits = np.stack([np.isin(every, group).any(axis=1) for group in groups]).sum(axis=0)
            assert (used[hits == len(groups)] > room).all()
            assert all(np.isin(chosen, group).any() for group in groups)


def large_rows() -> ChoiceGraph:
    """Eight nodes whose memory rows sum beyond 2**31: CP-SAT's presolve drops what the best assignment needs."""
    nodes = {
        0: ((2, 4), [554821, 398614, 306976], [1299799276, 1471932806, 2025354373]),
        1: ((0, 3), [798092, 790273, 639171], [1792063702, 110180625, 814785762]),
        2: ((3, 4), [631631, 358819, 343151], [160731149, 1465200750, 1039459947]),
        3: ((2, 3), [412516, 195985, 203126], [39777427, 1016599380, 1510368447]),
        4: ((2, 4), [35772, 127934, 21286], [85867283, 62601049, 1118309062]),
        5: ((1, 4), [278445, 385942, 926906], [954803210, 1232922909, 299637658]),
        6: ((1, 4), [926246, 2804, 262710], [1049375008, 969939268, 1307806272]),
        7: ((0, 2), [989635, 889718, 866696], [2132543251, 357967139, 1840188692]),
    }
    x = FORBIDDEN
    tables = {
        (0, 2): [[x, 413973, 892004], [x, 933193, 316864], [0, 299876, x]],
        (1, 2): [[0, 608152, 0], [774281, 0, 410418], [783211, 162659, 994455]],
        (1, 4): [[0, 0, x], [586151, 954576, 535079], [570245, x, 317217]],
        (1, 6): [[0, 289069, 0], [x, 0, 250147], [0, x, 228778]],
        (3, 6): [[604550, x, 831997], [0, 598910, 736383], [0, 841455, x]],
        (4, 5): [[200003, x, 0], [0, 876316, x], [0, x, 0]],
        (4, 6): [[435716, 970385, 383016], [x, 885612, 619286], [235241, x, 0]],
        (6, 7): [[0, x, 0], [206654, 667522, 508773], [404803, 895522, 0]],
    }
    graph = ChoiceGraph(
        names=tuple(f"n{v}" for v in nodes),
        offsets=np.arange(9, dtype=np.int64) * 3,
        costs=np.concatenate([costs for _, costs, _ in nodes.values()]).astype(np.int64),
        usages=np.concatenate([usages for _, _, usages in nodes.values()]).astype(np.int64),
        interval_offsets=np.arange(9, dtype=np.int64),
        intervals=np.array([interval for interval, _, _ in nodes.values()], dtype=np.int64),
        edges=np.array(list(tables), dtype=np.int64),
        edge_tables=np.arange(8, dtype=np.int64),
        tables=tuple(np.array(table, dtype=np.int64) for table in tables.values()),
        limit=4630444769,
    )
    graph.validate()
    return graph


@pytest.mark.parametrize("way", ["labels", "highs, labels", "highs, cp-sat"])
def test_rows_that_sum_beyond_2_to_the_31_prove_nothing_false(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_to(way, monkeypatch)
    found = solve(large_rows(), gap=0.0, time_limit=None)
    assert (found.objective, found.bound) == (6_087_009, 6_087_009)


@pytest.mark.parametrize("way", ["highs, labels", "highs, cp-sat"])
def test_nothing_false_is_proven_of_large_numbers_where_labels_are_left_out(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_to(way, monkeypatch)
    for seed in range(20_000, 20_040):
        for large in ("bytes", "costs"):
            fault = large_numbers.wrong(large_numbers.asked(seed, large=large))
            assert not fault or (way == "highs, cp-sat" and large_numbers.is_unfinished(fault)), (seed, large, fault)


def test_a_claim_that_one_solver_makes_alone_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is called infeasible, or bounded too high, by HiGHS alone."""
    problem, _ = from_graph(large_rows(), limit=large_rows().limit)
    monkeypatch.setattr(parameters, "QUICK_WORK", 0.0)
    for false in (integer_program._Answer(None, None, True, True, 0.1), integer_program._Answer(None, 6_500_000, False, False, 0.1)):
        monkeypatch.setattr(integer_program._Highs, "solve", lambda *_arguments, answer=false: answer)
        for cutoff in (None, 6_700_000):
            dual = LagrangianDual(problem)
            dual.evaluate(np.zeros(len(problem.base)), 2)
            found = integer_program.solve_kernel(problem, dual, Clock(None, None), cutoff=cutoff, gap=0.0, seed=0, effort=10.0)
            assert not found.empty
            assert found.bound is None or found.bound <= 6_087_009
