"""Counts over time as spans agree with the matrix of counts that they stand for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solver_shard.graph.choice_graph import Ints
from solver_shard.solve.problem import at_times, between, canonical, counts, counts_at, over_time, shared, uncovered

TIMES, COLUMNS = 9, 4


@st.composite
def some_spans(draw: st.DrawFn) -> Ints:
    row = st.tuples(st.integers(0, COLUMNS - 1), st.integers(0, TIMES), st.integers(0, TIMES))
    rows = [(column, min(a, b), max(a, b)) for column, a, b in draw(st.lists(row, max_size=12))]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def matrix(spans: Ints) -> Ints:
    result = np.zeros((TIMES, COLUMNS), dtype=np.int64)
    for column, start, stop in spans.tolist():
        result[start:stop, column] += 1
    return result


@given(some_spans())
def test_canonical_spans_have_the_same_counts_and_no_joint(spans: Ints) -> None:
    found = canonical(spans)
    assert (matrix(found) == matrix(spans)).all()
    assert (found[:, 1] < found[:, 2]).all()
    assert found.tolist() == sorted(found.tolist())
    starts, stops = ({(c, t) for c, t in found[:, [0, end]].tolist()} for end in (1, 2))
    assert not starts & stops


@given(some_spans(), st.lists(st.integers(0, 2**40), min_size=COLUMNS, max_size=COLUMNS))
def test_a_sum_over_time_is_the_product_with_the_matrix(spans: Ints, weights: list[int]) -> None:
    each = np.array(weights, dtype=np.int64)
    assert (over_time(spans, each, TIMES) == matrix(spans) @ each).all()
    assert (counts(spans, TIMES, COLUMNS) == matrix(spans)).all()
    where = np.array([7, 0, 3])
    assert (counts_at(spans, where, COLUMNS) == matrix(spans)[where]).all()


@given(some_spans(), st.lists(st.booleans(), min_size=TIMES, max_size=TIMES))
def test_some_times_are_rows_of_the_matrix(spans: Ints, keep: list[bool]) -> None:
    mask = np.array(keep)
    assert (counts(at_times(spans, mask), int(mask.sum()), COLUMNS) == matrix(spans)[mask]).all()


@given(some_spans())
def test_equal_columns_are_one(spans: Ints) -> None:
    found, place = shared(spans, COLUMNS)
    dense, new = matrix(spans), matrix(found)
    for column in range(COLUMNS):
        assert (new[:, place[column]] == dense[:, column]).all() if place[column] >= 0 else not dense[:, column].any()
    used = place.max(initial=-1) + 1
    assert len({new[:, column].tobytes() for column in range(used)}) == used


@given(some_spans(), st.lists(st.integers(0, 2), min_size=TIMES, max_size=TIMES))
def test_every_time_is_covered_by_a_kept_one_and_no_kept_one_by_its_neighbour(spans: Ints, base: list[int]) -> None:
    rows = np.concatenate([matrix(spans), np.array(base)[:, None]], axis=1)
    keep = uncovered(spans, rows[:, -1])
    kept = rows[keep]
    assert all((kept >= row).all(axis=1).any() for row in rows)
    for left, right in itertools.pairwise(kept):
        assert (left > right).any()
        assert (right > left).any()


@pytest.mark.parametrize("seed", range(20))
def test_times_between_repetitions_go_and_every_peak_stays(seed: int) -> None:
    rng = np.random.default_rng(seed)
    period, layers = 3, 8
    rows = []
    for column in range(6):
        at = int(rng.integers(period))
        for layer in range(layers):
            start = layer * period + at
            rows.append((column, *[(start, start + 1), (0, start + 1), (start, layers * period)][column % 3]))
    spans = np.array(rows, dtype=np.int64)
    keep = between(spans, layers * period)
    assert keep.sum() <= 4 * period
    for _ in range(20):
        profile = over_time(spans, rng.integers(0, 100, 6), layers * period)
        assert profile[keep].max() == profile.max()
