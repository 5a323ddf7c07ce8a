"""DTensor's own cost formulas, so that its choices can be followed and its search be compared with ours on equal terms.

>>> from solver_shard.layout import Layout
>>> costs = DTensorCosts(mesh_shape=(2, 4), devices_per_host=4)
>>> [(move.axis, str(move.before), str(move.after)) for move in greedy_path(Layout.parse("S(0)S(0)"), Layout.parse("RS(0)"))]
[(1, 'S(0)', 'R'), (0, 'S(0)', 'R'), (1, 'R', 'S(0)')]
>>> round(costs.redistribute((1024, 1024), 4, Layout.parse("S(0)S(0)"), Layout.parse("RS(0)")), 1)
135.6

**Source**: torch 2.13, ``torch/distributed/tensor/_collective_utils.py`` (``MeshTopoInfo``, ``_compute_placement_transition_cost``,
``redistribute_cost``) and ``_redistribute.py`` (``generate_greedy_transform_infos``). Times are microseconds, buffers are
"gigabytes", in fact bytes / 1024³. With n devices on the axis, h = n - 1 hops, latency l and bandwidth w:

    S(d) → R         all-gather       6.6 + h·l + 10⁶·(B·n)·h/n / w        B afterwards n times as large
    P    → S(d)      reduce-scatter   6.6 + h·l + 10⁶·B·h/n / w            B afterwards 1/n
    P    → R         all-reduce       6.6 + 2h·l + 10⁶·B·2h/n / w
    S(d) → S(e)      "all-to-all"     the formula of an all-gather of B, plus 1
    R    → S(d), P   local            0                                     B afterwards 1/n for S(d)
    S(d) → P, P → another P           impossible

An axis lies inside a host (87.7 GB/s, 0.6 µs) while the product of the sizes of it and of all axes to its right does not
exceed the host's devices; otherwise it crosses hosts (0.22 of the bandwidth, 2.7 µs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from solver_shard.layout import Placement, R

GIB = 1024**3
_BASE = 6.6
_INSIDE_BANDWIDTH, _INSIDE_LATENCY = 87.7, 0.6
_OUTSIDE_FACTOR, _OUTSIDE_LATENCY = 0.22, 2.7


@dataclass(frozen=True, slots=True)
class AxisMove:
    """One axis goes from one placement to another."""

    axis: int
    before: Placement
    after: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class DTensorCosts:
    """DTensor's model of a mesh.

    Attributes:
        mesh_shape: sizes of the axes, outermost first.
        devices_per_host: on a CPU torch takes 1, so that every axis crosses hosts.
        bandwidth, latency: per axis, GB/s and microseconds per hop; derived.
    """

    mesh_shape: tuple[int, ...]
    devices_per_host: int
    bandwidth: tuple[float, ...] = field(init=False)
    latency: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        spans = [math.prod(self.mesh_shape[a:]) for a in range(len(self.mesh_shape))]
        outside = [span > self.devices_per_host for span in spans]
        object.__setattr__(self, "bandwidth", tuple(_INSIDE_BANDWIDTH * _OUTSIDE_FACTOR if out else _INSIDE_BANDWIDTH for out in outside))
        object.__setattr__(self, "latency", tuple(_OUTSIDE_LATENCY if out else _INSIDE_LATENCY for out in outside))

    def all_gather(self, gib: float, axis: int) -> float:
        """Microseconds; ``gib`` is the buffer after gathering."""
        return self._ring(gib, axis, self.mesh_shape[axis] - 1)

    def reduce_scatter(self, gib: float, axis: int) -> float:
        """Microseconds; ``gib`` is the buffer before."""
        return self._ring(gib, axis, self.mesh_shape[axis] - 1)

    def all_reduce(self, gib: float, axis: int) -> float:
        """Microseconds."""
        return self._ring(gib, axis, 2 * (self.mesh_shape[axis] - 1))

    def _ring(self, gib: float, axis: int, hops: int) -> float:
        return _BASE + hops * self.latency[axis] + (gib * hops / self.mesh_shape[axis]) / self.bandwidth[axis] * 1e6

    def transition(self, before: Placement, after: Placement, axis: int, gib: float) -> tuple[float, float]:
        """Microseconds of one step on one axis (infinite when impossible), and the local buffer after it."""
        if before == after:
            return 0.0, gib
        size = self.mesh_shape[axis]
        if before.is_shard:
            if after.is_replicate:
                gib *= size
                return self.all_gather(gib, axis), gib
            if after.is_shard:
                return self.all_gather(gib, axis) + 1.0, gib
            return math.inf, gib
        if before.is_partial:
            if after.is_replicate:
                return self.all_reduce(gib, axis), gib
            if after.is_shard:
                return self.reduce_scatter(gib, axis), gib / size
            return math.inf, gib
        return 0.0, gib / size if after.is_shard else gib

    def local_gib(self, shape: Sequence[int], itemsize: int, layout: Sequence[Placement]) -> float:
        """The buffer of one device: all bytes over the number of shards."""
        shards = math.prod(size for placement, size in zip(layout, self.mesh_shape, strict=True) if placement.is_shard)
        return math.prod(shape) * itemsize / shards / GIB

    def redistribute(self, shape: Sequence[int], itemsize: int, src: Sequence[Placement], dst: Sequence[Placement]) -> float:
        """Microseconds of the greedy path; infinite when a step of it is impossible."""
        return sum(cost for _, cost in self.priced_path(shape, itemsize, src, dst))

    def priced_path(
        self, shape: Sequence[int], itemsize: int, src: Sequence[Placement], dst: Sequence[Placement]
    ) -> tuple[tuple[AxisMove, float], ...]:
        """The moves of the greedy path with the microseconds of each."""
        if all(placement.is_replicate for placement in src):
            return tuple((move, 0.0) for move in greedy_path(src, dst))
        gib = self.local_gib(shape, itemsize, src)
        found = []
        for move in greedy_path(src, dst):
            cost, gib = self.transition(move.before, move.after, move.axis, gib)
            found.append((move, cost))
        return tuple(found)


def greedy_path(src: Sequence[Placement], dst: Sequence[Placement]) -> tuple[AxisMove, ...]:
    """The steps by which DTensor redistributes a tensor.

    On one axis a single step. On several, from right to left every axis goes to its target, or to R where it is to cut a dim that
    the axes to its left do not cut yet as they will in the end; then from left to right the rest. DTensor plans layouts with strided
    shards by a search over orders instead; here strided shards that change are gathered first, minor axis first, with all axes that
    cut the same dim.
    """
    now, goal = list(src), list(dst)
    moves: list[AxisMove] = []

    def move(axis: int, after: Placement) -> None:
        if now[axis] != after:
            moves.append(AxisMove(axis, now[axis], after))
            now[axis] = after

    if now == goal:
        return ()
    for dim in sorted({p.dim for p in (*now, *goal) if p.is_shard and p.is_strided}):
        axes = [a for a, p in enumerate(now) if p.is_shard and p.dim == dim]
        if all(now[a] == goal[a] for a in axes) and not any(g.is_shard and g.dim == dim for a, g in enumerate(goal) if a not in axes):
            continue
        for axis in sorted(axes, key=lambda a: (now[a].is_strided, a), reverse=True):
            move(axis, R)
    if len(now) > 1 and any(p.is_shard for p in now):
        for axis in reversed(range(len(now))):
            target = goal[axis]
            if target.is_shard and _cutters(now[:axis], target.dim) != _cutters(goal[:axis], target.dim):
                target = R
            move(axis, target)
    for axis, target in enumerate(goal):
        move(axis, target)
    return tuple(moves)


def _cutters(layout: Sequence[Placement], dim: int) -> list[int]:
    return [a for a, p in enumerate(layout) if p.is_shard and p.dim == dim]
