"""The memory side of a problem in its smallest form: constant bytes in the base, a carrier for each distinct need of a node.

    carriers, spans, base = regrouped(found, spans, base)

- The least bytes over the strategies of a node are in use whatever is chosen: they join ``base``.
- Carriers of one node with the same column add up; those with the same bytes become one, in use when any of them is. A node that
  stands for hundreds of tensors is left with a few carriers.
- Columns with the same spans are one.

The profile of every assignment stays the same, time by time.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve.problem import Carrier
from solver_shard.solve.spans import over_time, shared

Need = tuple[int, Ints, int]
"""(node, bytes per strategy, column)."""


def regrouped(found: Iterable[Need], spans: Ints, base: Ints) -> tuple[tuple[Carrier, ...], Ints, Ints]:
    """See the module; ``spans`` int64[S, 3] by column, ``base`` int64[times]. Carriers keep the order of their nodes in ``found``."""
    needs = list(found)
    columns = np.array([column for _, _, column in needs], dtype=np.int64)
    spans, place = shared(spans, 1 + int(max(spans[:, 0].max(initial=-1), columns.max(initial=-1))))
    flat, least, more = _above_least([usage for _, usage, _ in needs])
    fixed = np.zeros(len(place) + 1, dtype=np.int64)
    np.add.at(fixed, place[columns], least)  # what is never in use (-1) is added to the last and dropped
    base = base + over_time(spans, fixed[:-1], len(base))
    by_column: dict[tuple[int, int], Ints] = {}
    for (node, _, _), usage, column, counts in zip(needs, flat, place[columns].tolist(), more, strict=True):
        if counts and column >= 0:
            key = (node, column)
            by_column[key] = by_column[key] + usage if key in by_column else usage
    by_usage: dict[tuple[int, bytes], list[int]] = {}
    for (node, column), usage in by_column.items():
        by_usage.setdefault((node, usage.tobytes()), []).append(column)
    spans, place = shared(*_together(list(by_usage.values()), spans, len(place)))
    carriers: dict[tuple[int, int], Ints] = {}
    for (node, usage_bytes), column in zip(by_usage, place.tolist(), strict=True):
        usage = np.frombuffer(usage_bytes, dtype=np.int64)
        key = (node, column)
        carriers[key] = carriers[key] + usage if key in carriers else usage
    return tuple(Carrier(node=node, usage=usage, column=column) for (node, column), usage in carriers.items()), spans, base


def _above_least(usages: list[Ints]) -> tuple[list[Ints], Ints, list[bool]]:
    """Each vector less its least entry, these entries, and whether anything is left of it."""
    if not usages:
        return [], np.zeros(0, dtype=np.int64), []
    stops = np.cumsum([len(usage) for usage in usages])
    starts = np.concatenate([np.zeros(1, dtype=np.int64), stops[:-1]])
    flat = np.concatenate(usages)
    least = np.minimum.reduceat(flat, starts)
    flat = flat - np.repeat(least, stops - starts)
    more = np.maximum.reduceat(flat, starts) > 0
    return [flat[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)], least, more.tolist()


def _together(groups: list[list[int]], spans: Ints, width: int) -> tuple[Ints, int]:
    """Spans in which column i is the sum of the columns of group i, and the number of groups."""
    offsets = np.searchsorted(spans[:, 0], np.arange(width + 1))
    group = np.repeat(np.arange(len(groups)), [len(columns) for columns in groups])
    column = np.array([c for columns in groups for c in columns], dtype=np.int64)
    number = offsets[column + 1] - offsets[column]
    first = np.repeat(offsets[column] - np.cumsum(number) + number, number)
    taken = spans[first + np.arange(int(number.sum()))]
    return np.concatenate([np.repeat(group, number)[:, None], taken[:, 1:]], axis=1), len(groups)
