"""Bytes in use over time under changes: a tree of maxima with additions to ranges, compiled.

``top`` and ``added`` have two entries per leaf, leaves from ``leaves = len(top) // 2`` on. ``top[1]`` is the peak.
Adding to a span costs the logarithm of the number of times, whatever its length.
"""

from __future__ import annotations

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve.flat import Bytes
from solver_shard.solve.jit import compiled


def build(profile: Ints) -> tuple[Ints, Ints]:
    """The tree (top, added) of a profile; times that do not exist use nothing."""
    leaves = 1
    while leaves < len(profile):
        leaves *= 2
    top = np.zeros(2 * leaves, dtype=np.int64)
    top[leaves : leaves + len(profile)] = profile
    width = leaves
    while width > 1:
        top[width // 2 : width] = np.maximum(top[width : 2 * width : 2], top[width + 1 : 2 * width : 2])
        width //= 2
    return top, np.zeros(2 * leaves, dtype=np.int64)


@compiled
def add(top: Ints, added: Ints, start: int, stop: int, amount: int) -> None:
    """Add to all times from start to stop (exclusive)."""
    leaves = len(top) // 2
    left, right = start + leaves, stop + leaves
    while left < right:
        if left & 1:
            top[left] += amount
            added[left] += amount
            left += 1
        if right & 1:
            right -= 1
            top[right] += amount
            added[right] += amount
        left >>= 1
        right >>= 1
    left, right = (start + leaves) >> 1, (stop - 1 + leaves) >> 1
    while left >= 1:
        top[left] = max(top[2 * left], top[2 * left + 1]) + added[left]
        if right != left:
            top[right] = max(top[2 * right], top[2 * right + 1]) + added[right]
        left >>= 1
        right >>= 1


@compiled
def argmax(top: Ints) -> int:
    """The first time of the peak."""
    leaves = len(top) // 2
    p = 1
    while p < leaves:
        p = 2 * p if top[2 * p] >= top[2 * p + 1] else 2 * p + 1
    return p - leaves


@compiled
def move(m: Bytes, top: Ints, added: Ints, v: int, old: int, new: int) -> None:
    """Change node v from one strategy to another; calling it with both exchanged takes that back."""
    for c in range(m.ms[v], m.ms[v + 1]):
        amount = m.usage[m.uoff[c] + new] - m.usage[m.uoff[c] + old]
        if amount != 0:
            for s in range(m.ss[c], m.ss[c + 1]):
                add(top, added, m.starts[s], m.stops[s], amount)
