"""How long a collective takes: latency and bandwidth per link level, ring or tree, hierarchical across levels.

>>> from solver_shard.costs.cluster import load_cluster
>>> from solver_shard.mesh import Mesh
>>> times = Collectives(Mesh.parse("dp=32,tp=8"), load_cluster("h100"))
>>> times.nanoseconds("all_reduce", (1,), 2**30)  # inside a node
5125472
>>> times.nanoseconds("all_reduce", (0,), 2**30)  # one device of each of 32 nodes
46485151
>>> times.spans((0, 1))  # both axes as one group: 8 devices inside each node, then 32 nodes with an eighth of the bytes
(Span(peers=8, part=1), Span(peers=32, part=8))
>>> dict(zip(times.lanes, times.lane_times("all_gather", (0, 1), np.array(2**30)).tolist()))
{'NVLink 4': 2559436, 'InfiniBand NDR': 3002617}

**Bytes** are those of one device: all_gather, the gathered output; reduce_scatter, the input; all_reduce, the buffer;
all_to_all, the buffer that is exchanged.

**One level.** n peers, B bytes, w bytes per second and direction, a nanoseconds per hop:

    all_gather, reduce_scatter   ring    (n-1)·a + B·(n-1)/n / w          tree   log2(n)·a + B / w
    all_reduce                   ring  2·(n-1)·a + 2·B·(n-1)/n / w        tree 2·log2(n)·a + 2·B / w
    all_to_all                   direct  (n-1)·a + B·(n-1)/n / w          Bruck  log2(n)·(a + B/2 / w)

log2 is rounded up, and the faster of the two counts. Rings and recursive doubling are those of Thakur, Rabenseifner and
Gropp, "Optimization of Collective Communication Operations in MPICH" (IJHPCA 19(1), 2005); the tree all-reduce is the
double binary tree of Sanders, Speck and Träff (Parallel Computing 35(12), 2009), which NCCL uses since 2.4; the
logarithmic all-gather and reduce-scatter are NCCL's PAT (2.23). Trees pay B instead of B·(n-1)/n because their halves
do not overlap perfectly. All-to-all in log2(n) rounds is Bruck et al. (IEEE TPDS 8(11), 1997).

On a torus every mesh axis is a ring whose links carry both directions at once (that is the level's bandwidth): rings
need n/2 hops, trees do not exist, and an all-to-all moves every byte n/4 hops on average, so it takes
(n/2)·a + B·max((n-1)/n, n/4) / w ("How to Scale Your Model", Google DeepMind 2025, chapter 3: sharded matrices). Several
axes work one after the other, the rightmost as the innermost; that they could use their links at once is not counted.
Parts of a split axis lie on its one ring. All of them together are that ring. The inner parts alone are stretches of it,
without the link that closes the ring: twice the hops, and half of every link; the outer parts alone leap over the k devices
of the inner ones, in k groups that share the links: k times the hops, 1/k of every link.

**Several levels.** A group that spans blocks works level by level, all devices of a block in parallel, each on its own
links and on its own part of the data: with k peers inside a block, reduce_scatter runs inside (B bytes), then across (B/k);
all_gather in the reverse order; all_reduce is reduce_scatter inside, all_reduce across, all_gather inside; all_to_all
runs inside and then across, on all B bytes. The phases do not overlap, which is an upper bound: NCCL pipelines them. The
launch is paid once per collective. (An all-reduce of 4 GiB on 32 H100 in 4 nodes is measured at 320 GB/s of bus bandwidth,
github.com/NVIDIA/nccl/issues/1221; it comes to 217 GB/s here.)

**Lanes.** Each link level is a lane, and on a torus each mesh axis is one: collectives on different lanes can run at once. One over
several lanes takes from each the time of its phases there (``lane_times``); see ``costs.schedule``.

The result is rounded up to whole nanoseconds. It never decreases when bytes, latency or the launch grow or when a link
gets slower. A group of one device takes no time. More than ``MAX_NANOSECONDS`` (13 days) counts as that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from solver_shard.costs.cluster import Cluster, Level
from solver_shard.errors import InternalError
from solver_shard.mesh import Mesh

MAX_NANOSECONDS = 2**50

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Span:
    """What a group of devices does at one link level.

    Attributes:
        peers: how many blocks of the level below (devices, at the innermost level) exchange data; 1 where none do.
        part: devices of the group in each of these blocks; each carries 1/part of the data.
    """

    peers: int
    part: int


class Collectives:
    """Times of collectives over mesh axes; one object per mesh and cluster."""

    def __init__(self, mesh: Mesh, cluster: Cluster) -> None:
        self.mesh, self.cluster = mesh, cluster
        self._spans: dict[tuple[int, ...], tuple[Span, ...]] = {}

    def nanoseconds(self, kind: str, axes: Sequence[int], nbytes: int) -> int:
        """Time of one collective over the axes, flattened into one group; 0 when the group is one device."""
        return int(self.times(kind, axes, np.array([nbytes], dtype=np.int64))[0])

    def times(self, kind: str, axes: Sequence[int], nbytes: Ints, bucket: int = 1) -> Ints:
        """``nanoseconds`` for many sizes at once: int64, same shape as ``nbytes``.

        ``bucket``: how many tensors share the launch and the latency; each pays its part of them (see ``schedule``).
        """
        if kind not in KINDS:
            raise InternalError(f"unknown collective {kind!r}; legal: {', '.join(KINDS)}")
        total = np.full(nbytes.shape, self.cluster.launch_ns / bucket, dtype=np.float64)
        phases = list(self._phases(kind, axes, nbytes, bucket))
        for _, time in phases:
            total += time
        return _whole(total) if phases else np.zeros(nbytes.shape, dtype=np.int64)

    def lane_times(self, kind: str, axes: Sequence[int], nbytes: Ints, bucket: int = 1) -> Ints:
        """What one collective takes of each lane, without its launch: int64[lanes, *shape of ``nbytes``], at most ``times`` each."""
        loads = np.zeros((len(self.lanes), *nbytes.shape), dtype=np.float64)
        for lanes, time in self._phases(kind, axes, nbytes, bucket):
            loads[list(lanes)] += time
        return _whole(loads)

    def launch_ns(self, bucket: int = 1) -> int:
        """What a collective pays of the launch that ``bucket`` tensors share."""
        return math.ceil(self.cluster.launch_ns / bucket)

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """What collectives of this mesh can use at once, by name: the link levels, innermost first, and of a torus each mesh axis."""
        names = [name for (name, _) in self._lanes]
        return tuple(name if names.index(name) == k else f"{name} ({k + 1})" for k, name in enumerate(names))

    @cached_property
    def _lanes(self) -> dict[tuple[str, tuple[int, str]], int]:
        """Name, level and axis of each lane (no axis: a switch) to its position."""
        every = range(len(self.mesh.axes))
        found: list[tuple[str, tuple[int, str]]] = []
        for number, (span, level) in enumerate(zip(self.spans(every), self.cluster.levels, strict=True)):
            if span.peers > 1 and level.topology == "torus":
                names = [self._axis(parts[0]) for parts in self._by_axis(every) if self.spans(parts)[number].peers > 1]
                found += [(f"{level.name} {name}", (number, name)) for name in names]
            elif span.peers > 1:
                found.append((level.name, (number, "")))
        return {lane: k for k, lane in enumerate(found)}

    def _phases(self, kind: str, axes: Sequence[int], nbytes: Ints, bucket: int) -> Iterator[tuple[tuple[int, ...], Floats]]:
        """What a collective does one after the other: the lanes that it uses, and its nanoseconds there, a part of the latency included."""
        position = {place: k for (_, place), k in self._lanes.items()}
        size = nbytes.astype(np.float64)
        for number, (span, whole) in enumerate(zip(self.spans(axes), self.cluster.levels, strict=True)):
            if span.peers == 1:
                continue
            level = dataclasses.replace(whole, latency_ns=whole.latency_ns / bucket)
            part = 1 if kind == "all_to_all" else span.part
            torus = level.topology == "torus"
            for peers, leap, names in self._rings(axes, number, span) if torus else ((span.peers, 1, ("",)),):
                lanes = tuple(position[number, name] for name in names if (number, name) in position)
                yield lanes, leap * level_time(kind, peers, size / part, level)
                part *= 1 if kind == "all_to_all" else peers

    def _rings(self, axes: Sequence[int], level: int, span: Span) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
        """Sizes of the rings of a group on a torus, innermost first, how much longer each takes than a ring of its own, and its axis.

        One flat ring over all the axes where blocks cut them unevenly.
        """
        parts = list(reversed(self._by_axis(axes)))
        rings = [(self.spans(part)[level].peers, self._leap(part), (self._axis(part[0]),)) for part in parts]
        if math.prod(peers for peers, _, _ in rings) != span.peers:
            return ((span.peers, 1, tuple(self._axis(part[0]) for part in parts)),)
        return tuple(ring for ring in rings if ring[0] > 1)

    def _axis(self, a: int) -> str:
        """The name of a mesh axis, or of the one that it is a part of."""
        return self.mesh.axes[a].parent or self.mesh.axes[a].name

    def _by_axis(self, axes: Sequence[int]) -> list[tuple[int, ...]]:
        """The axes of a group, parts of one axis together."""
        found: dict[str, list[int]] = {}
        for a in sorted(set(axes)):
            found.setdefault(self._axis(a), []).append(a)
        return [tuple(parts) for parts in found.values()]

    def _leap(self, parts: tuple[int, ...]) -> int:
        parent = self.mesh.axes[parts[0]].parent
        whole = self.mesh.positions(parent) if parent is not None else parts
        shape = self.mesh.shape
        within = math.prod(shape[a] for a in whole if a > parts[-1])  # devices between neighbours of the group
        live = [a for a in whole if shape[a] > 1]
        return within if within > 1 else 2 if any(a not in parts for a in live) else 1

    def spans(self, axes: Sequence[int]) -> tuple[Span, ...]:
        """The group's shape at every link level, innermost first; the worst group where blocks cut groups unevenly."""
        key = tuple(sorted(set(axes)))
        if key not in self._spans:
            self._spans[key] = _spans(self.mesh, key, [level.size for level in self.cluster.levels])
        return self._spans[key]


def _whole(nanoseconds: Floats) -> Ints:
    return np.minimum(np.ceil(nanoseconds), MAX_NANOSECONDS).astype(np.int64)


def level_time(kind: str, peers: int, nbytes: Floats, level: Level) -> Floats:
    """Nanoseconds of one phase inside one level, without the launch; the module's formulas."""
    share, hops = (peers - 1) / peers, peers - 1
    rounds = (peers - 1).bit_length()
    latency, wire = level.latency_ns, nbytes * (1e9 / level.bandwidth)
    if level.topology == "torus":
        hops = peers // 2
        if kind == "all_to_all":
            return hops * latency + max(share, peers / 4) * wire
        return (2.0 if kind == "all_reduce" else 1.0) * (hops * latency + share * wire)
    if kind == "all_to_all":
        return np.minimum(hops * latency + share * wire, rounds * (latency + wire / 2))
    one_way = np.minimum(hops * latency + share * wire, rounds * latency + wire)
    return 2.0 * one_way if kind == "all_reduce" else one_way


def _spans(mesh: Mesh, axes: tuple[int, ...], blocks: Sequence[int | None]) -> tuple[Span, ...]:
    """Count, for every group, the blocks it touches: regular meshes give the same numbers for every group."""
    devices = np.arange(mesh.size, dtype=np.int64)
    group = devices.copy()
    for axis in axes:  # a group is named by its first device
        stride = mesh.stride(axis)
        group -= (devices // stride) % mesh.shape[axis] * stride
    inner = devices  # blocks of the level below
    spans = []
    for size in blocks:
        outer = np.zeros_like(devices) if size is None else devices // size
        touched, members = np.unique(group * mesh.size + inner, return_counts=True)
        # inner blocks nest in outer ones, so the first device of each (group, inner block) tells its outer block
        first = np.zeros(len(touched), dtype=np.int64)
        first[np.searchsorted(touched, group * mesh.size + inner)] = outer
        peers = np.unique(touched // mesh.size * mesh.size + first, return_counts=True)[1]
        spans.append(Span(int(peers.max()), int(members.min())))
        inner = outer
    return tuple(spans)
