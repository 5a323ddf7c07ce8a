"""A layered drawing of a directed acyclic graph, top to bottom: layers, order within them, places, and the lines' turning points.

The steps are those of Sugiyama, Tagawa and Toda (1981): longest-path layers, one dummy per layer that a line passes, orders by
barycentres in alternating sweeps; then every layer is placed by least squares under its order (isotonic regression by pooling adjacent
violators), which keeps lines straight where there is room. Deterministic: ties keep the order given.

>>> drawn = draw([Box(40, 20), Box(40, 20)], [(0, 1)])
>>> drawn.places
((20.0, 10.0), (20.0, 52.0))
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

SWEEPS = 12
"""Passes down and up that order the layers, and as many that place them."""


@dataclass(frozen=True, slots=True)
class Box:
    """Size of a node, in the drawing's units."""

    width: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Where everything is.

    Attributes:
        width, height: of the whole.
        places: per node, its centre.
        lines: per edge, points from the bottom of its start to the top of its end.
    """

    width: float
    height: float
    places: tuple[tuple[float, float], ...]
    lines: tuple[tuple[tuple[float, float], ...], ...]


def draw(boxes: Sequence[Box], edges: Sequence[tuple[int, int]], *, gap: float = 14, rise: float = 18) -> Drawing:
    """Lay the graph out.

    Args:
        boxes: one per node.
        edges: (from, to) pairs; together without a cycle.
        gap: least distance of neighbours in a layer.
        rise: distance between layers.
    """
    layers = _layers(len(boxes), edges)
    sizes = list(boxes)
    levels = list(layers)
    chains: list[list[int]] = []
    for start, end in edges:
        chain = [start]
        for level in range(layers[start] + 1, layers[end]):
            chain.append(len(sizes))
            sizes.append(Box(6, 0))
            levels.append(level)
        chains.append([*chain, end])
    above: list[list[int]] = [[] for _ in sizes]
    below: list[list[int]] = [[] for _ in sizes]
    for chain in chains:
        for a, b in itertools.pairwise(chain):
            below[a].append(b)
            above[b].append(a)
    rows: list[list[int]] = [[] for _ in range(max(levels, default=-1) + 1)]
    for node, level in enumerate(levels):
        rows[level].append(node)
    rows = _ordered(rows, above, below)
    x = _placed(rows, above, below, sizes, gap, [chain[1:-1] for chain in chains if len(chain) > 3])
    y = [0.0] * len(sizes)
    spans = []
    top = 0.0
    for row in rows:
        tallest = max(sizes[node].height for node in row)
        for node in row:
            y[node] = top + tallest / 2
        spans.append((round(top, 1), round(top + tallest, 1)))
        top += tallest + rise
    lines = []
    for chain in chains:
        first, last = chain[0], chain[-1]
        # a line that passes a layer goes straight down beside its boxes
        points = [(x[first], y[first] + sizes[first].height / 2), *((x[n], edge) for n in chain[1:-1] for edge in spans[levels[n]])]
        lines.append((*points, (x[last], y[last] - sizes[last].height / 2)))
    width = max((x[n] + sizes[n].width / 2 for n in range(len(sizes))), default=0.0)
    return Drawing(
        width=width, height=max(top - rise, 0.0), places=tuple(zip(x[: len(boxes)], y[: len(boxes)], strict=True)), lines=tuple(lines)
    )


def _layers(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Longest path from the sources; then sources move down to just above their first reader."""
    successors: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for a, b in edges:
        successors[a].append(b)
        waiting[b] += 1
    level = [0] * count
    sources = [n for n in range(count) if not waiting[n]]
    ready = list(sources)
    for node in ready:
        for after in successors[node]:
            level[after] = max(level[after], level[node] + 1)
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    if len(ready) < count:
        raise ValueError("the graph has a cycle, and no layers")
    for node in sources:
        level[node] = min((level[after] - 1 for after in successors[node]), default=0)
    least = min(level, default=0)
    used = {value: k for k, value in enumerate(sorted(set(level)))}
    return [used[value] for value in level] if least >= 0 else level


def _ordered(rows: list[list[int]], above: Sequence[Sequence[int]], below: Sequence[Sequence[int]]) -> list[list[int]]:
    """The order with the fewest crossings that alternating sweeps come by."""
    best, least = [list(row) for row in rows], _crossings(rows, below)
    current = [list(row) for row in rows]
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for level in range(1, len(current)) if down else range(len(current) - 2, -1, -1):
            fixed = {node: k for k, node in enumerate(current[level - 1 if down else level + 1])}
            near = above if down else below
            at = {node: k for k, node in enumerate(current[level])}
            centre = {n: sum(fixed[m] for m in near[n]) / len(near[n]) if near[n] else at[n] * len(fixed) / len(at) for n in current[level]}
            current[level].sort(key=lambda n, centre=centre, at=at: (centre[n], at[n]))  # type: ignore[misc]  # defaults bind the loop's values
        found = _crossings(current, below)
        if found < least:
            best, least = [list(row) for row in current], found
    return best


def _crossings(rows: Sequence[Sequence[int]], below: Sequence[Sequence[int]]) -> int:
    total = 0
    for row, after in itertools.pairwise(rows):
        at = {node: k for k, node in enumerate(after)}
        ends = [sorted(at[m] for m in below[n]) for n in row]
        total += sum(a > b for i, left in enumerate(ends) for right in ends[i + 1 :] for a in left for b in right)
    return total


def _placed(
    rows: Sequence[Sequence[int]],
    above: Sequence[Sequence[int]],
    below: Sequence[Sequence[int]],
    sizes: Sequence[Box],
    gap: float,
    passing: Sequence[Sequence[int]],
) -> list[float]:
    """Centres: each row as near to the mean of its neighbours as its order and the gaps allow; at last, lines that pass layers straight."""
    x = [0.0] * len(sizes)
    for row in rows:
        edge = 0.0
        for node in row:
            x[node] = edge + sizes[node].width / 2
            edge += sizes[node].width + gap
        for node in row:
            x[node] -= edge / 2
    for sweep in range(2 * SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = []
            for node in row:
                near = [*above[node], *below[node]] if sweep >= SWEEPS else above[node] if sweep % 2 == 0 else below[node]
                # lines that pass a layer weigh more, so that they run straight
                wanted.append((sum(x[m] for m in near) / len(near) if near else x[node], 16.0 if not sizes[node].height else 1.0))
            _settle(row, wanted, x, sizes, gap)
    first, last = {row[0] for row in rows}, {row[-1] for row in rows}
    straight: dict[int, float] = {}
    for chain in passing:
        at = sorted(x[n] for n in chain)
        aim = at[-1] if last.issuperset(chain) else at[0] if first.issuperset(chain) else at[len(at) // 2]
        straight.update(dict.fromkeys(chain, aim))
    for row in rows:
        _settle(row, [(straight.get(n, x[n]), 100.0 if n in straight else 1.0) for n in row], x, sizes, gap)
    left = min((x[n] - sizes[n].width / 2 for n in range(len(sizes))), default=0.0)
    return [round(value - left, 1) for value in x]


def _settle(row: Sequence[int], wanted: Sequence[tuple[float, float]], x: list[float], sizes: Sequence[Box], gap: float) -> None:
    """Put a row's nodes as near to the wanted (centre, weight) pairs as their order and the gaps allow."""
    offsets = [0.0]
    for a, b in itertools.pairwise(row):
        offsets.append(offsets[-1] + (sizes[a].width + sizes[b].width) / 2 + gap)
    found = isotonic([(w - offset, weight) for (w, weight), offset in zip(wanted, offsets, strict=True)])
    for node, value, offset in zip(row, found, offsets, strict=True):
        x[node] = value + offset


def isotonic(values: Sequence[tuple[float, float]]) -> list[float]:
    """The non-decreasing sequence nearest to (value, weight) pairs by least squares, by pooling adjacent violators.

    >>> isotonic([(1, 1), (3, 1), (2, 1)])
    [1.0, 2.5, 2.5]
    """
    blocks: list[tuple[float, float, int]] = []
    for value, weight in values:
        blocks.append((float(value), weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, wa, na), (b, wb, nb) = blocks[-2:]
            blocks[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    return [value for value, _, count in blocks for _ in range(count)]
