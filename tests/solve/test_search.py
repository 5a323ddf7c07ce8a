"""When a search ends: at the gap that is asked for, and with ``fine`` a little later."""

from __future__ import annotations

import numpy as np
from flat_problems import some_problem

from solver_shard.solve.limits import Clock
from solver_shard.solve.parameters import FINE_GAP, FINE_SHARE, FINE_WORK, SolveParameters
from solver_shard.solve.search import Search

GAP = 0.01


def search_at(bound: int, *, fine: bool, clock: Clock) -> Search:
    problem = some_problem(np.random.default_rng(0), nodes=3)
    search = Search(problem, clock, SolveParameters(gap=GAP), report=lambda *told: None)
    search.fine, search.best.value, search.best.bound = fine, 100_000, bound
    return search


def test_the_gap_ends_it() -> None:
    assert search_at(99_500, fine=False, clock=Clock(None, None)).stopped()
    assert not search_at(98_500, fine=False, clock=Clock(None, None)).stopped()


def test_a_little_more_work_goes_into_a_finer_gap() -> None:
    clock = Clock(None, None)
    clock.spend(50.0)
    search = search_at(99_500, fine=True, clock=clock)
    assert not search.stopped()
    clock.spend(50.0 * FINE_SHARE + FINE_WORK / 2)
    assert not search.stopped()
    clock.spend(FINE_WORK)
    assert search.stopped()


def test_a_gap_that_is_fine_ends_it_at_once() -> None:
    assert search_at(100_000 - int(100_000 * GAP * FINE_GAP), fine=True, clock=Clock(None, None)).stopped()
    enough = search_at(99_500, fine=True, clock=Clock(None, None))
    enough.enough = 100_000
    assert enough.stopped()
