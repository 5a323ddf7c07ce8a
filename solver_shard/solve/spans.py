"""When bytes are in use: counts over time as intervals, so that 65,000 nodes over 40,000 times need no matrix.

A **column** says how many times something is in use at each time. It is stored as spans, rows (column, start, stop) of an
int64[S, 3] array: half-open intervals over the positions of the kept times. Spans of one column may overlap and then add up.

>>> spans = np.array([[0, 0, 3], [0, 2, 4], [1, 1, 2]])
>>> counts(spans, times=4, columns=2).T
array([[1, 1, 2, 1],
       [0, 1, 0, 0]])

What depends on a weight per column (bytes, multipliers) is one pass over the spans: a difference array and its cumulative sum.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from solver_shard.choice.graph import Ints

Bools = NDArray[np.bool_]

PERIODS = 6
"""Distances between repetitions that are tried in ``between``."""


def canonical(spans: Ints) -> Ints:
    """The same counts with the fewest spans, sorted by column, start and stop; in a column no span stops where one starts.

    Only the numbers of spans that start and that stop at a time matter for the counts, so the first start of a column is paired
    with its first stop, and so on.
    """
    if not len(spans):
        return spans.reshape(0, 3)
    columns = np.concatenate([spans[:, 0], spans[:, 0]])
    at = np.concatenate([spans[:, 1], spans[:, 2]])
    change = np.repeat(np.array([1, -1], dtype=np.int64), len(spans))
    order = np.lexsort((at, columns))
    columns, at = columns[order], at[order]
    first = np.flatnonzero(np.r_[True, (columns[1:] != columns[:-1]) | (at[1:] != at[:-1])])
    change = np.add.reduceat(change[order], first)
    columns, at = columns[first], at[first]
    starts, stops = np.maximum(change, 0), np.maximum(-change, 0)
    return np.stack([np.repeat(columns, starts), np.repeat(at, starts), np.repeat(at, stops)], axis=1)


def over_time(spans: Ints, weights: Ints, times: int) -> Ints:
    """Sum over columns of count x weight at each time, int64[times]; ``weights`` has one per column."""
    change = np.zeros(times + 1, dtype=np.int64)
    each = weights[spans[:, 0]]
    np.add.at(change, spans[:, 1], each)
    np.subtract.at(change, spans[:, 2], each)
    result: Ints = np.cumsum(change[:-1])
    return result


def counts(spans: Ints, times: int, columns: int) -> Ints:
    """The matrix of counts, int64[times, columns]."""
    change = np.zeros((times + 1, columns), dtype=np.int64)
    np.add.at(change, (spans[:, 1], spans[:, 0]), 1)
    np.subtract.at(change, (spans[:, 2], spans[:, 0]), 1)
    result: Ints = np.cumsum(change[:-1], axis=0)
    return result


def counts_at(spans: Ints, where: Ints, columns: int) -> Ints:
    """The rows of that matrix at some times, int64[len(where), columns]."""
    rows = np.zeros((len(where), columns), dtype=np.int64)
    for row, t in zip(rows, where.tolist(), strict=True):
        row += np.bincount(spans[(spans[:, 1] <= t) & (t < spans[:, 2]), 0], minlength=columns)
    return rows


def at_times(spans: Ints, keep: Bools) -> Ints:
    """The spans over the kept times only, canonical."""
    place = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(keep, dtype=np.int64)])
    moved = np.stack([spans[:, 0], place[spans[:, 1]], place[spans[:, 2]]], axis=1)
    return canonical(moved[moved[:, 1] < moved[:, 2]])


def shared(spans: Ints, columns: int) -> tuple[Ints, Ints]:
    """Equal columns made one: (spans, the new column of each old one, or -1 where it is never in use)."""
    spans = canonical(spans)
    place = np.full(columns, -1, dtype=np.int64)
    used, first = np.unique(spans[:, 0], return_index=True)
    known: dict[bytes, int] = {}
    stops = np.append(first[1:], len(spans))[: len(first)]
    intervals = np.ascontiguousarray(spans[:, 1:])
    kept = np.zeros(len(spans), dtype=bool)
    for column, start, stop in zip(used.tolist(), first.tolist(), stops.tolist(), strict=True):
        key = intervals[start:stop].tobytes()
        if key not in known:
            known[key] = len(known)
            kept[start:stop] = True
        place[column] = known[key]
    result = spans[kept]
    result[:, 0] = place[result[:, 0]]
    return result, place


def uncovered(spans: Ints, base: Ints) -> Bools:
    """Which times to keep: those that no neighbour among the kept ones covers.

    A time is covered by a neighbour with at least its count in every column and at least its ``base``: the peak is then not at
    that time alone. Of an interval graph the times left are those of its maximal cliques: something starts and something
    stops right after.
    """
    keep = np.ones(len(base), dtype=bool)
    left = canonical(spans)
    while True:
        place = np.flatnonzero(keep)
        own = base[place]
        for ahead in (True, False):
            covered = np.ones(len(place), dtype=bool)
            if ahead:  # nothing stops before the next time
                covered[left[:, 2] - 1] = False
                covered[:-1] &= own[:-1] <= own[1:]
                covered[-1:] = False
            else:  # nothing starts since the time before
                covered[left[:, 1]] = False
                covered[1:] &= own[1:] <= own[:-1]
                covered[:1] = False
            if covered.any():
                keep[place[covered]] = False
                left = at_times(left, ~covered)
                break
        else:
            return keep


def between(spans: Ints, times: int) -> Bools:
    """Which times to keep where layers repeat: a time whose use is at most the mean of those one period before and after goes.

    Exact: if such a time has the largest use of all, so have both of the others; following the later one ends at a kept
    time. Periods are the commonest distances between times at which the same columns are in use.
    """
    keep = np.ones(times, dtype=bool)
    spans = canonical(spans)
    for period in _periods(spans, times):
        if 2 * period >= times:
            continue
        doubled = spans[np.repeat(np.arange(len(spans)), 2)]
        earlier, later = spans + np.array([0, period, period]), spans - np.array([0, period, period])
        parts = [(doubled, 1), (earlier, -1), (later, -1)]
        columns = np.concatenate([part[:, 0] for part, _ in parts for _ in "ab"])
        at = np.concatenate([part[:, end] for part, _ in parts for end in (1, 2)])
        change = np.concatenate([np.full(len(part), sign * way, dtype=np.int64) for part, sign in parts for way in (1, -1)])
        above = _positive(columns, at, change)
        above = np.clip(above[:, 1:], 0, times)
        grows = np.zeros(times + 1, dtype=np.int64)
        np.add.at(grows, above[:, 0], 1)
        np.subtract.at(grows, above[:, 1], 1)
        keep[period:-period] &= np.cumsum(grows)[period : times - period] > 0
    return keep


def _periods(spans: Ints, times: int) -> list[int]:
    """The commonest distances between times and the next one at which the same columns are in use."""
    columns = np.concatenate([spans[:, 0], spans[:, 0]])
    live = _positive(columns, np.concatenate([spans[:, 1], spans[:, 2]]), np.repeat(np.array([1, -1], dtype=np.int64), len(spans)))
    # The set of columns in use as the sum of a random number per column. Two sets that share a sum would only suggest a bad period.
    marks = np.random.default_rng(0).integers(0, 2**62, int(columns.max(initial=-1)) + 1)
    key = over_time(live, marks, times)
    order = np.argsort(key, kind="stable")
    same = key[order][1:] == key[order][:-1]
    distance, number = np.unique((order[1:] - order[:-1])[same], return_counts=True)
    return [int(p) for p in distance[np.lexsort((distance, -number))][:PERIODS]]


def _positive(columns: Ints, at: Ints, change: Ints) -> Ints:
    """Where the running sum of the changes of a column is positive, as spans; the changes of each column sum to zero."""
    if not len(columns):
        return np.zeros((0, 3), dtype=np.int64)
    order = np.lexsort((at, columns))
    columns, at, level = columns[order], at[order], np.cumsum(change[order])
    last = np.flatnonzero(np.r_[(columns[1:] != columns[:-1]) | (at[1:] != at[:-1]), True])
    columns, at, level = columns[last], at[last], level[last]
    found = np.flatnonzero(level[:-1] > 0)
    return np.stack([columns[found], at[found], at[found + 1]], axis=1)
