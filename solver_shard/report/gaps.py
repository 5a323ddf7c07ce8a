"""Free time in a row of a timeline, given away piece by piece: the first there is after a moment, or the last before one.

>>> gaps = Gaps([(0, 10), (20, 30)])
>>> gaps.latest(5, 24, 7)
[(7, 10), (20, 24)]
>>> gaps.first(0, 30, 100)
[(0, 7), (24, 30)]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

Span = tuple[int, int]


def merged(spans: Iterable[Span]) -> list[Span]:
    """Spans in order, those that touch as one."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


class Gaps:
    """Spans that are free until they are taken; in order, apart from each other."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []
        for start, stop in spans:
            self.starts.append(start)
            self.stops.append(stop)

    def first(self, low: int, high: int, need: int) -> list[Span]:
        """Take the first free time between two moments, as much as is needed or there is; in order."""
        found: list[Span] = []
        k = bisect_right(self.stops, low)
        while need > 0 and k < len(self.starts) and self.starts[k] < high:
            start = max(self.starts[k], low)
            stop = min(self.stops[k], high, start + need)
            found.append((start, stop))
            need -= stop - start
            k += self._take(k, start, stop)
        return found

    def latest(self, low: int, high: int, need: int) -> list[Span]:
        """Take the last free time between two moments, as much as is needed or there is; in order."""
        found: list[Span] = []
        k = bisect_left(self.starts, high) - 1
        while need > 0 and k >= 0 and self.stops[k] > low:
            stop = min(self.stops[k], high)
            start = max(self.starts[k], low, stop - need)
            found.append((start, stop))
            need -= stop - start
            self._take(k, start, stop)
            k -= 1
        return found[::-1]

    def _take(self, k: int, start: int, stop: int) -> int:
        """Take a part of the span at ``k``; how many spans are left there up to the part's end."""
        left = [(a, b) for a, b in ((self.starts[k], start), (stop, self.stops[k])) if a < b]
        self.starts[k : k + 1] = [a for a, _ in left]
        self.stops[k : k + 1] = [b for _, b in left]
        return sum(b <= start for _, b in left)
