"""Aligned plain-text tables."""

from __future__ import annotations

from collections.abc import Sequence

from solver_shard.errors import printable


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: int = 2, header: bool = False) -> list[str]:
    """Lines with aligned columns, two blanks apart.

    >>> table([("kind", "count"), ("all_gather", "12")], right=(1,), header=True)
    ['  kind        count', '  ----------  -----', '  all_gather     12']

    Args:
        rows: equally long rows of cells, which are escaped.
        right: columns to align on the right.
        indent: blanks before each line.
        header: the first row is a header, to be underlined.
    """
    if not rows:
        return []
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for i, row in enumerate(rows):
        cells = [cell.rjust(width) if k in right else cell.ljust(width) for k, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append((" " * indent + "  ".join(cells)).rstrip())
        if header and i == 0:
            lines.append(" " * indent + "  ".join("-" * width for width in widths))
    return lines


def shorten(names: Sequence[str], width: int) -> str:
    """As many of the names as fit into the width, at least one, and how many more there are."""
    shown = 1
    while shown < len(names) and len(", ".join(names[: shown + 1])) <= width:
        shown += 1
    return ", ".join(names[:shown]) + (f", +{len(names) - shown} more" if len(names) > shown else "")
