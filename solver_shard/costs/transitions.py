"""What it costs to take a tensor from one layout to another: shortest paths over steps of one collective each, and their buffers.

>>> from solver_shard.costs.cluster import load_cluster
>>> from solver_shard.mesh import Mesh
>>> collectives = Collectives(Mesh.parse("dp=4,tp=8"), load_cluster("h100"))
>>> table = build_table((4096, 4096), 2, ("sum",), collectives)
>>> for step in table.path(Layout.parse("P(sum)P(sum)"), Layout.parse("S(0)R")):
...     print(step.kind, step.axes, step.before, "->", step.after, step.nbytes)
reduce_scatter (0, 1) P(sum)P(sum) -> S(0)S(0) 33554432
all_gather (1,) S(0)S(0) -> S(0)R 8388608

**Steps.** One collective over a set of mesh axes, flattened to one group, on which ``before`` has one placement and
``after`` another:

    S(d) → R      all_gather           P(op) → R      all_reduce
    S(d) → S(e)   all_to_all           P(op) → S(d)   reduce_scatter
    R → S(d)      slice (local, free)

S(d) stands for _S(d) as well. All else is impossible in one step; S → P and R → P in any number (a consumer may take R as P, see
``layouts.free_move``).

**Order.** A step may cut or join dim d along its axes only if no axis outside the step is minor to one of them in the order of d
(see ``solver_shard.layout``): otherwise rows would change hands. So on dp,tp the gather over dp starts from _S(0)S(0), where dp is
the minor axis, and not from S(0)S(0). No step permutes the order; paths over gathers, slices and exchanges do.

**Bytes** are those that the collective is called with, padded as torch pads uneven shards: the step's group size times
the largest piece that one device sends to another (all_reduce: the local buffer).

**Costs.** Each step is rounded up to whole nanoseconds first; the table then holds exact shortest paths (Floyd 1962,
Warshall 1962) and obeys the triangle inequality exactly. Among paths of equal cost the one with the fewest steps is
taken, then the one through the earliest layouts of the table.

**What is no choice.** A transition takes the fastest way. One that takes longer may need smaller intermediates (a gather of columns has
a buffer beside the tensor; an exchange to rows and then a gather of rows has less), and nothing keeps it from being of use where memory
is short. What an op makes may still go such a way: its relay (:mod:`solver_shard.program`) is a station on it, and each leg takes its
own fastest way. Parameters, inputs, gradients and new values have no relays: a bound is of plans in which these go the fastest way. No pin
and no template takes another one.

**Memory.** Before the first step a device holds the source, after the last one the destination; both are counted with their
tensors. What it holds beside them in between are **intermediates**: what the steps but the last have made, and the buffers
of collectives whose pieces are no rows (:mod:`solver_shard.costs.transitions`). ``intermediates`` has the bytes of the fullest moment.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from solver_shard.costs.collectives import Collectives
from solver_shard.costs.layouts import codes_of, legal_layouts, local_sizes
from solver_shard.costs.schedule import contention_ns
from solver_shard.errors import InputError, InternalError
from solver_shard.layout import STRIDED, Layout, P, R
from solver_shard.mesh import MAX_AXIS_NAME, Axis, Mesh

FORBIDDEN = 10**18
"""A cost that the solver never pays (the IOPDDL format's infinity)."""


Ints = NDArray[np.int64]

KINDS = ("slice", "all_gather", "reduce_scatter", "all_reduce", "all_to_all")
"""Of steps; arrays have positions in here."""


class Staged(Protocol):
    """A step: bytes of its buffers, 0 where it needs none, and of what it makes.

    What one device holds while a transition runs, beside the tensor that it starts from and the one that it ends with.

    >>> packed, received = buffers(*map(np.array, ([1], [[8, 4]], [[8, 16]], [-1], [1], [4], [512])))
    >>> int(packed[0]), int(received[0])  # of f32[8, 4] per device, gathered to f32[8, 16]: pieces of columns arrive one after the other
    (0, 512)

    A collective is called with one flat buffer and fills another, in which the pieces of the devices lie one after the other, each padded
    to the longest. Where pieces are **rows** of equal length, that is how the tensor lies: they are sent from where they are, and are in
    place where they arrive. Where a dim before the cut one is longer than 1, or the pieces are uneven, there is a buffer beside the tensor,
    as large as the call's ``nbytes``:

    - what a reduce_scatter or an all_to_all sends is **packed** first, in pieces along the dim that it cuts;
    - what an all_gather or an all_to_all has **received** is put in place by a copy, along the dim that it joins.

    An all_reduce is called with the tensor itself, and a slice with nothing. Sizes are those of the device with the fullest shards. That
    rows of a tensor that lies in other strides (a transposed product) must be packed too is not counted.

    The steps of a transition run one after the other, and each holds, moment after moment: what it reads and what it packs; what it sends
    and what it receives; what it has received and what it makes. What a step in the middle reads is gone when it is packed. This is what an
    applied plan does (:mod:`solver_shard.runtime.collectives`, held to it by tests); DTensor's ``redistribute`` needs as much for a step
    (torch 2.13, ``_functional_collectives.py``: ``_maybe_view_chunk_cat`` after a gather, ``_chunk_or_narrow_cat`` before a
    reduce-scatter).

    Memory counts source and destination for the whole transition, as tensors of their own. ``intermediates`` is what comes on top: the
    bytes of the fullest moment, without those of the source, less those of the destination. New values of a parameter are brought to a
    tensor beside the old ones, which then take them over: ``update_held`` counts it.
    """

    @property
    def packed(self) -> int: ...
    @property
    def received(self) -> int: ...
    @property
    def made(self) -> int: ...


def buffers(kinds: Ints, before: Ints, after: Ints, cut: Ints, joined: Ints, group: Ints, nbytes: Ints) -> tuple[Ints, Ints]:
    """Bytes that each of E steps packs, and that it puts in place out of what it has received; 0 where it needs no buffer.

    Args:
        kinds: int64[E], positions in ``KINDS``.
        before, after: int64[E, dims], sizes of the local tensor.
        cut, joined: int64[E], the dims that a step cuts and joins; anything where there is none.
        group: int64[E], number of devices.
        nbytes: int64[E], that the collective is called with.
    """
    packs = np.isin(kinds, (KINDS.index("reduce_scatter"), KINDS.index("all_to_all"))) & ~_rows(before, after, cut, group)
    places = np.isin(kinds, (KINDS.index("all_gather"), KINDS.index("all_to_all"))) & ~_rows(after, before, joined, group)
    return np.where(packs, nbytes, 0), np.where(places, nbytes, 0)


def _rows(whole: Ints, piece: Ints, dim: Ints, count: Ints) -> NDArray[np.bool_]:
    """Whether so many equal pieces along a dim, one after the other, are the whole."""
    dims, each = whole.shape[1], np.arange(len(whole))
    if not dims:
        return np.ones(len(whole), dtype=np.bool_)
    at = np.clip(dim, 0, dims - 1)
    before = np.where(np.arange(dims) < at[:, None], whole, 1).prod(axis=1)
    rows: NDArray[np.bool_] = (whole[each, at] == count * piece[each, at]) & (before == 1)
    return rows


def fullest(reads: Ints, packed: Ints, received: Ints, made: Ints) -> Ints:
    """Bytes of the fullest moment of one step; ``reads``: of what it reads, 0 where that is the source of the transition."""
    sent = np.where(packed > 0, packed, reads)
    call = sent + np.where(received > 0, received, made)
    moments: Ints = np.maximum(np.maximum(reads + packed, call), received + made)
    return moments


def intermediates(steps: Sequence[Staged], converted: int = 0) -> int:
    """Bytes of the intermediates of one transition; 0 for none.

    Args:
        converted: bytes of the source in another dtype, where it is converted before the first step; else 0.
    """
    if not steps:
        return 0
    packed, received, made = (np.array(row, dtype=np.int64) for row in zip(*((s.packed, s.received, s.made) for s in steps), strict=True))
    return int(fullest(np.array([converted, *made[:-1]], dtype=np.int64), packed, received, made).max() - made[-1])


def update_held(path: Sequence[Staged], cast: int, turn: int) -> int:
    """Bytes that the update of one parameter holds beside the parameter and its state.

    Args:
        path: the way of the new values from the state's layout to the parameter's; empty where they are the same.
        cast: bytes of the new values in the state's layout, where they are cast from a master copy first; else 0.
        turn: bytes of the optimizer's step that are there for this parameter alone.
    """
    moved = intermediates(path, cast) + path[-1].made if path else cast
    return max(turn, moved)


def beyond(turns: Sequence[tuple[int, int, int, int]], results: int) -> list[int]:
    """Bytes that each of the transitions before one op holds beyond what is counted at the op's time; 0 where it holds no more.

    Counted there are all copies, and what the op makes; while a transition runs, the copies of later ones and the results are not there.
    What it and later ones start from is, though it may be gone when the op runs.

    >>> beyond([(0, 100, 40, 0), (1, 100, 30, 10)], results=20)
    [60, 90]

    Args:
        turns: the operand of the op for which each runs, bytes of its intermediates, of its copy, and of what goes with it.
        results: bytes of what the op makes.
    """
    found = []
    for turn, held, _, goes in turns:
        there = held + goes + sum(left - copy for other, _, copy, left in turns if other > turn)
        found.append(max(0, there - results))
    return found


MAX_LAYOUTS = 3000
"""Tables grow with the square and their time with the cube: 1,000 layouts take some seconds."""

WAYS = 512
"""Sets of layouts whose steps are remembered: a mesh has one for every number of dims, and more where dims are too short to be cut."""

_SUM = int(P("sum"))
"""Codes from here down are partial."""
_STEP = 64
"""Costs are multiplied by this and each step adds one, so that fewer steps win among equal costs."""
_FAR = np.int64(2**61)
"""No path; twice it still fits 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionStep:
    """One collective of a transition (or a free local slice).

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce, all_to_all or slice.
        axes: mesh axes, flattened to one group in this order.
        nbytes: bytes of one device that the collective is called with, see ``collectives``; 0 for a slice.
        before, after: layouts around the step.
        packed, received: bytes of the buffers that are sent, and of what arrives, where these are not the tensor itself; else 0.
        made: bytes of the tensor after the step.
    """

    kind: str
    axes: tuple[int, ...]
    nbytes: int
    nanoseconds: int
    before: Layout
    after: Layout
    packed: int
    received: int
    made: int


class TransitionTable:
    """All transitions of tensors of one shape and element size.

    Attributes:
        layouts: n legal layouts, in the order of ``legal_layouts``.
        index: position of a layout in ``layouts``.
        costs: int64[n, n], nanoseconds from row to column; ``FORBIDDEN`` where there is no path; 0 on the diagonal.
        nbytes: int64[n], what the fullest device holds.
    """

    __slots__ = ("_bucket", "_collectives", "_intermediates", "_loads", "_ranked", "_steps", "costs", "index", "layouts", "nbytes")

    def __init__(self, layouts: tuple[Layout, ...], nbytes: Ints, steps: _StepTables, collectives: Collectives, bucket: int) -> None:
        self._collectives, self._bucket = collectives, bucket
        self._loads: Ints | None = None
        self.layouts = layouts
        self.index = {layout: i for i, layout in enumerate(layouts)}
        self.nbytes = nbytes
        self._steps = steps
        self._ranked = _shortest(steps)
        self._intermediates: tuple[Ints, Ints] | None = None
        self.costs = np.where(self._ranked >= _FAR, FORBIDDEN, self._ranked // _STEP)

    def costs_between(self, srcs: Sequence[Layout], dsts: Sequence[Layout]) -> Ints:
        """Nanoseconds from each source to each destination: int64[len(srcs), len(dsts)]."""
        rows, columns = self.positions(srcs), self.positions(dsts)
        return np.asarray(self.costs[rows[:, None], columns[None, :]])

    def positions(self, layouts: Sequence[Layout]) -> Ints:
        """Positions of the layouts in this table; InternalError for one that is not legal here."""
        try:
            return np.fromiter((self.index[layout] for layout in layouts), dtype=np.int64, count=len(layouts))
        except KeyError as error:
            raise InternalError(f"layout {error.args[0]} is not among the {len(self.layouts)} legal ones of this tensor") from None

    def intermediates(self, converted: bool = False) -> Ints:
        """Largest bytes of intermediates on each path, int64[n, n]: 0 where a path has no step, and where there is none.

        Where the source is ``converted`` to another dtype before the first step, it is an intermediate too.
        """
        if self._intermediates is None:
            self._intermediates = _intermediates(self._ranked, self._steps, self.nbytes)
        return self._intermediates[int(converted)]

    def loads_between(self, srcs: Sequence[Layout], dsts: Sequence[Layout]) -> Ints:
        """What each transition takes from compute that it runs beside, and then of each lane: int64[1 + lanes, srcs, dsts].

        0 where there is no path. See ``schedule``.
        """
        if self._loads is None:
            self._loads = _along(self._ranked, self._steps, _step_loads(self._steps, self._collectives, self._bucket))
        rows, columns = self.positions(srcs), self.positions(dsts)
        return self._loads[:, rows[:, None], columns[None, :]]

    def path(self, src: Layout, dst: Layout) -> tuple[TransitionStep, ...]:
        """The steps of the cheapest way, () when equal; InternalError where there is none."""
        at, goal = self.positions((src, dst))
        if self._ranked[at, goal] >= _FAR:
            raise InternalError(f"there is no transition from {src} to {dst}")
        ways, path = self._steps.ways, []
        while at != goal:
            first, last = ways.rows[at], ways.rows[at + 1]
            onward = self._steps.weights[first:last] + self._ranked[ways.after[first:last], goal]
            # the steps of a row are sorted by destination: the first hit is the earliest layout
            step = first + int(np.flatnonzero(onward == self._ranked[at, goal])[0])
            to = int(ways.after[step])
            path.append(
                TransitionStep(
                    kind=KINDS[ways.kinds[step]],
                    axes=ways.axis_sets[ways.sets[step]],
                    nbytes=int(self._steps.nbytes[step]),
                    nanoseconds=int(self._steps.weights[step] // _STEP),
                    before=self.layouts[at],
                    after=self.layouts[to],
                    packed=int(self._steps.packed[step]),
                    received=int(self._steps.received[step]),
                    made=int(self.nbytes[to]),
                )
            )
            at = to
        return tuple(path)


def build_table(
    shape: Sequence[int], itemsize: int, reductions: Sequence[str], collectives: Collectives, bucket: int = 1, orders: bool = False
) -> TransitionTable:
    """The transition table of a tensor with this global shape and this many bytes per element.

    ``bucket``: how many tensors share the launch and latency of every step (see ``schedule``). ``orders``: with the layouts in
    which several axes cut one dim in another order than from left to right.

    Raises:
        InputError: the mesh has so many axes that the tensor has more than ``MAX_LAYOUTS`` layouts.
    """
    mesh_shape = collectives.mesh.shape
    layouts = legal_layouts(shape, mesh_shape, reductions, collectives.mesh.wholes if orders else None)
    if len(layouts) > MAX_LAYOUTS:
        joined = _joined(shape, reductions, collectives, orders)
        raise InputError(
            f"a tensor of shape {tuple(shape)} has {len(layouts):,} layouts on mesh {collectives.mesh}, and {MAX_LAYOUTS:,} are the most "
            f"that are searched: four axes where tensors have up to five dims. Give axes that lie side by side as one, as in {joined}: a "
            "cut over all of them costs the same, only cuts over a part of them are no longer tried, and the plan runs on a device mesh "
            "of all axes"
        )
    sizes = local_sizes(shape, mesh_shape, codes_of(layouts))
    steps = _priced(_ways(layouts, mesh_shape, len(shape)), sizes, itemsize, collectives, bucket)
    return TransitionTable(layouts, sizes.prod(axis=1) * itemsize, steps, collectives, bucket)


def _joined(shape: Sequence[int], reductions: Sequence[str], collectives: Collectives, orders: bool) -> Mesh:
    """The mesh with as few axes joined as it takes: the two neighbours that use the fewest link levels together, innermost first."""
    mesh = collectives.mesh.whole
    while len(mesh.axes) > 1:
        times = Collectives(mesh, collectives.cluster)

        def levels(k: int, times: Collectives = times) -> tuple[int, int]:
            return sum(span.peers > 1 for span in times.spans((k, k + 1))), -k

        k = min(range(len(mesh.axes) - 1), key=levels)
        left, right = mesh.axes[k], mesh.axes[k + 1]
        both = Axis(name=f"{left.name}_{right.name}"[:MAX_AXIS_NAME], size=left.size * right.size)
        mesh = Mesh(axes=(*mesh.axes[:k], both, *mesh.axes[k + 2 :]))
        if len(legal_layouts(shape, mesh.shape, reductions, mesh.wholes if orders else None)) <= MAX_LAYOUTS:
            break
    return mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ways:
    """What of the steps between layouts is the same for tensors of all sizes: E steps sorted by (before, after).

    before, after, kinds, sets, group, cut, joined: int64[E]; group is the number of devices, cut and joined the dims that a step cuts and
    joins. ``calls`` has the positions of every collective's steps, by kind and axes. ``order`` and ``place`` sort the layouts, those with
    most pending reductions first, and undo that; ``firsts`` and ``ends``: in that order, the layouts with as many.
    """

    axis_sets: tuple[tuple[int, ...], ...]
    rows: Ints
    before: Ints
    after: Ints
    kinds: Ints
    sets: Ints
    group: Ints
    cut: Ints
    joined: Ints
    calls: tuple[tuple[str, tuple[int, ...], Ints], ...]
    order: Ints
    place: Ints
    firsts: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepTables:
    """E steps sorted by (before, after), at most one for each pair: their ways, and nbytes, weights, packed, received: int64[E]."""

    ways: _Ways
    nbytes: Ints
    weights: Ints
    packed: Ints
    received: Ints


@functools.lru_cache(maxsize=WAYS)
def _ways(layouts: tuple[Layout, ...], mesh_shape: tuple[int, ...], dims: int) -> _Ways:
    """All one-collective steps between the layouts of tensors with so many dims."""
    codes, count = codes_of(layouts), len(layouts)
    live = [axis for axis, size in enumerate(mesh_shape) if size > 1]
    axis_sets = tuple(itertools.chain.from_iterable(itertools.combinations(live, k) for k in range(1, len(live) + 1)))
    # Layouts as one number each; shifting a placement on some axes is then an addition.
    low = int(codes.min(initial=0))
    strided = int(codes.max(initial=0)) >= STRIDED
    dense = np.where(codes >= STRIDED, codes - STRIDED + dims, codes)  # R is -1, S(d) is d, _S(d) is dims + d
    base = (2 if strided else 1) * dims - low + 1
    radix = np.array([base ** (len(mesh_shape) - 1 - a) for a in range(len(mesh_shape))], dtype=np.int64)
    keys = (dense - low) @ radix
    sort = np.argsort(keys)
    ordered = keys[sort]
    found: list[tuple[Ints, ...]] = [(np.empty(0, dtype=np.int64),) * 7]
    for number, axes in enumerate(axis_sets):
        columns = dense[:, axes]
        uniform = np.flatnonzero((columns == columns[:, :1]).all(axis=1))
        fixed = _cut_after(dense, axes, dims)
        shift = int(radix[list(axes)].sum())
        group = int(np.prod([mesh_shape[a] for a in axes]))
        own = columns[uniform, 0]
        for target in range(-1, 2 * dims if strided else dims):
            before = uniform[own != target]
            was = dense[before, axes[0]]
            # in dims that the step cuts or joins, no other axis may be minor to it
            if target >= 0:
                before, was = before[~fixed[before, target]], was[~fixed[before, target]]
            joined = was >= 0
            blocked = np.zeros(len(before), dtype=np.bool_)
            blocked[joined] = fixed[before[joined], was[joined]]
            before, was = before[~blocked], was[~blocked]
            wanted = keys[before] + (target - was) * shift
            where = np.minimum(np.searchsorted(ordered, wanted), count - 1)
            legal = ordered[where] == wanted
            before, was, after = before[legal], was[legal], sort[where[legal]]
            joins, cuts = np.where(was >= 0, 1, 3), np.where(was >= 0, 4, np.where(was == R, 0, 2))
            kinds = joins if target == R else cuts
            dim = max(dims, 1)  # a strided cut is one of the same dim
            rest = (np.full_like(before, x) for x in (number, group, target % dim))
            found.append((before, after, kinds, *rest, was % dim))
    columns_of = [np.concatenate(parts).astype(np.int64) for parts in zip(*found, strict=True)]
    arrange = np.lexsort((columns_of[1], columns_of[0]))
    before, after, kinds, sets, groups, cut, joined = (column[arrange] for column in columns_of)
    calls = [
        (KINDS[kind], axes, np.flatnonzero((sets == number) & (kinds == kind)))
        for number, axes in enumerate(axis_sets)
        for kind in range(1, len(KINDS))
    ]
    partials = (codes <= _SUM).sum(axis=1)
    order = np.argsort(-partials, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(count)
    fewer = -partials[order]
    return _Ways(
        axis_sets=axis_sets,
        rows=np.searchsorted(before, np.arange(count + 1)),
        before=before,
        after=after,
        kinds=kinds,
        sets=sets,
        group=groups,
        cut=cut,
        joined=joined,
        calls=tuple(call for call in calls if len(call[2])),
        order=order,
        place=place,
        firsts=tuple(np.searchsorted(fewer, fewer, side="left").tolist()),
        ends=tuple(np.searchsorted(fewer, fewer, side="right").tolist()),
    )


def _priced(ways: _Ways, sizes: Ints, itemsize: int, collectives: Collectives, bucket: int) -> _StepTables:
    """The steps with bytes and weights (cost times _STEP plus one) for local tensors of these sizes, int64[n, dims]."""
    numel, before, after, kinds = sizes.prod(axis=1), ways.before, ways.after, ways.kinds
    elements = np.where(kinds == KINDS.index("all_reduce"), numel[before], ways.group * numel[before])
    if sizes.shape[1]:
        # the piece that one device sends: cut along the old and the new dim
        piece = numel[before] // np.maximum(sizes[before, ways.cut], 1) * sizes[after, ways.cut]
        pieces = (kinds == KINDS.index("reduce_scatter")) | (kinds == KINDS.index("all_to_all"))
        elements = np.where(pieces, ways.group * piece, elements)
    nbytes = np.where(kinds == KINDS.index("slice"), 0, elements) * itemsize
    packed, received = buffers(kinds, sizes[before], sizes[after], ways.cut, ways.joined, ways.group, nbytes)
    weights = np.ones(len(before), dtype=np.int64)
    for kind, axes, mine in ways.calls:
        weights[mine] += collectives.times(kind, axes, nbytes[mine], bucket) * _STEP
    return _StepTables(ways=ways, nbytes=nbytes, weights=weights, packed=packed, received=received)


def _cut_after(dense: Ints, axes: Sequence[int], dims: int) -> NDArray[np.bool_]:
    """Per layout and dense code (S(d), then _S(d)): whether an axis outside ``axes`` is minor to one of them, if they have the code."""
    fixed = np.zeros((len(dense), 2 * dims), dtype=np.bool_)
    for other in range(dense.shape[1]):
        if other not in axes:
            for dim in range(dims):
                late = dense[:, other] == dims + dim
                fixed[:, dim] |= late
                if other > axes[0]:
                    fixed[:, dim] |= dense[:, other] == dim
                    fixed[:, dims + dim] |= late
    return fixed


def _first_steps(ranked: Ints, steps: _StepTables) -> tuple[Ints, Ints]:
    """The first step of each path, and the number of its steps."""
    count = len(ranked)
    onward = np.zeros((count, count), dtype=np.int64)
    for at in range(count):
        first, last = steps.ways.rows[at], steps.ways.rows[at + 1]
        if first < last:
            ways = steps.weights[first:last, None] + ranked[steps.ways.after[first:last]]
            onward[at] = first + np.argmax(ways == ranked[at], axis=0)
    return onward, np.where(ranked < _FAR, ranked % _STEP, 0)


def _along(ranked: Ints, steps: _StepTables, values: Ints) -> Ints:
    """Sums over the steps of every path of K values of each, int64[K, E]: int64[K, n, n]."""
    onward, lengths = _first_steps(ranked, steps)
    found = np.zeros((len(values), *ranked.shape), dtype=np.int64)
    for length in range(1, int(lengths.max(initial=0)) + 1):
        rows, goals = np.nonzero(lengths == length)
        step = onward[rows, goals]
        found[:, rows, goals] = values[:, step] + found[:, steps.ways.after[step], goals]
    return found


def _step_loads(steps: _StepTables, collectives: Collectives, bucket: int) -> Ints:
    """What each step takes from compute beside it, and of each lane: int64[1 + lanes, E]."""
    found = np.zeros((1 + len(collectives.lanes), len(steps.ways.before)), dtype=np.int64)
    for kind, axes, mine in steps.ways.calls:
        nanoseconds = steps.weights[mine] // _STEP
        found[0, mine] = contention_ns(nanoseconds, collectives.launch_ns(bucket), collectives.cluster.kappa)
        found[1:, mine] = collectives.lane_times(kind, axes, steps.nbytes[mine], bucket)
    return found


def _intermediates(ranked: Ints, steps: _StepTables, nbytes: Ints) -> tuple[Ints, Ints]:
    """Bytes of the intermediates of every path, see ``staging``; and with its first layout as one of them."""
    count = len(ranked)
    onward, lengths = _first_steps(ranked, steps)
    made = nbytes[steps.ways.after]
    of_source = fullest(np.zeros_like(made), steps.packed, steps.received, made)
    of_station = fullest(nbytes[steps.ways.before], steps.packed, steps.received, made)
    # the fullest moment from a layout on, where the tensor there is the source, and where it is an intermediate
    found = np.zeros((count, count), dtype=np.int64)
    held = np.zeros((count, count), dtype=np.int64)
    for length in range(1, int(lengths.max(initial=0)) + 1):
        rows, goals = np.nonzero(lengths == length)
        step = onward[rows, goals]
        rest = held[steps.ways.after[step], goals]
        found[rows, goals] = np.maximum(of_source[step], rest)
        held[rows, goals] = np.maximum(of_station[step], rest)
    moves = lengths > 0
    return np.where(moves, found - nbytes, 0), np.where(moves, held - nbytes, 0)


def _shortest(steps: _StepTables) -> Ints:
    """All-pairs shortest paths by Floyd and Warshall, one vectorised pass per intermediate layout.

    No step adds a pending reduction, so a layout is a station only on ways from layouts that have at least as many, to layouts that
    have at most as many. Sorted by that number, both are slices.
    """
    ways = steps.ways
    count, place = len(ways.order), ways.place
    ranked = np.full((count, count), _FAR, dtype=np.int64)
    ranked[place[ways.before], place[ways.after]] = steps.weights
    np.fill_diagonal(ranked, 0)
    for middle, (first, end) in enumerate(zip(ways.firsts, ways.ends, strict=True)):
        block = ranked[:end, first:]
        np.minimum(block, ranked[:end, middle, None] + ranked[None, middle, first:], out=block)
    np.minimum(ranked, _FAR, out=ranked)
    return np.asarray(ranked[place[:, None], place[None, :]])
