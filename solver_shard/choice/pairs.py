"""Nodes that know what two other nodes decide together: the pairs of their strategies that mean the same, as few as simple rows allow.

A cost or usage of a choice graph belongs to one node, but what a transition needs depends on where it starts and where it ends. So a
node is added whose strategies are **cells**: a set of strategies of the first node times a set of the second one's, on all pairs of
which some number is the same. Its tables to the two nodes forbid all that is outside of the sets. The cells cover every pair once, so
whatever the two nodes choose leaves the new one exactly one strategy, and the graph stays as it was but for that number.

>>> cells = cells_of(np.array([[0, 0, 5], [0, 0, 5], [7, 0, 5]]))
>>> [(value, rows.tolist(), columns.tolist()) for value, rows, columns in cells.listed()]
[(0, [0, 1], [0, 1]), (5, [0, 1, 2], [2]), (0, [2], [1]), (7, [2], [0])]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from solver_shard.choice.graph import FORBIDDEN, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """K cells: ``values`` int64[K]; ``rows`` int64[n, K] and ``columns`` int64[m, K] are the tables, 0 or FORBIDDEN."""

    values: Ints
    rows: Ints
    columns: Ints

    def listed(self) -> Iterator[tuple[int, Ints, Ints]]:
        """Value, rows and columns of every cell."""
        for k, value in enumerate(self.values.tolist()):
            yield value, np.flatnonzero(self.rows[:, k] == 0), np.flatnonzero(self.columns[:, k] == 0)


def cells_of(numbers: Ints) -> Cells:
    """Cells that cover int64[n, m] once, from its distinct rows or from its distinct columns, whichever gives fewer."""
    by_row, by_column = _by_row(numbers), _by_row(numbers.T)
    if len(by_row[0]) <= len(by_column[0]):
        values, rows, columns = by_row
    else:
        values, columns, rows = by_column
    return Cells(values=values, rows=np.where(rows, 0, FORBIDDEN).T, columns=np.where(columns, 0, FORBIDDEN).T)


def _by_row(numbers: Ints) -> tuple[Ints, np.ndarray, np.ndarray]:
    """Per cell the value, the rows and the columns: each row is cut by value, equal parts of several rows are one cell."""
    known: dict[tuple[int, bytes], int] = {}
    values: list[int] = []
    rows: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    for r, row in enumerate(numbers):
        for value in np.unique(row).tolist():
            mask = row == value
            key = (value, mask.tobytes())
            if key not in known:
                known[key] = len(values)
                values.append(value)
                columns.append(mask)
                rows.append(np.zeros(len(numbers), dtype=bool))
            rows[known[key]][r] = True
    return np.array(values, dtype=np.int64), np.array(rows), np.array(columns)
