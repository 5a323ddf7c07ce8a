"""What one device holds while a transition runs, beside the tensor that it starts from and the one that it ends with.

>>> packed, received = buffers(*map(np.array, ([1], [[8, 4]], [[8, 16]], [-1], [1], [4], [512])))
>>> int(packed[0]), int(received[0])  # of f32[8, 4] per device, gathered to f32[8, 16]: pieces of columns arrive one after the other
(0, 512)

A collective is called with one flat buffer and fills another, in which the pieces of the devices lie one after the other, each padded to
the longest. Where pieces are **rows** of equal length, that is how the tensor lies: they are sent from where they are, and are in place
where they arrive. Where a dim before the cut one is longer than 1, or the pieces are uneven, there is a buffer beside the tensor, as large
as the call's ``nbytes``:

- what a reduce_scatter or an all_to_all sends is **packed** first, in pieces along the dim that it cuts;
- what an all_gather or an all_to_all has **received** is put in place by a copy, along the dim that it joins.

An all_reduce is called with the tensor itself, and a slice with nothing. Sizes are those of the device with the fullest shards. That
rows of a tensor that lies in other strides (a transposed product) must be packed too is not counted.

The steps of a transition run one after the other, and each holds, moment after moment: what it reads and what it packs; what it sends and
what it receives; what it has received and what it makes. What a step in the middle reads is gone when it is packed. This is what an
applied plan does (:mod:`solver_shard.export.exchange`, held to it by tests); DTensor's ``redistribute`` needs as much for a step (torch
2.13, ``_functional_collectives.py``: ``_maybe_view_chunk_cat`` after a gather, ``_chunk_or_narrow_cat`` before a reduce-scatter).

Memory counts source and destination for the whole transition, as tensors of their own. ``intermediates`` is what comes on top: the bytes of
the fullest moment, without those of the source, less those of the destination. New values of a parameter are brought to a tensor beside the
old ones, which then take them over: ``update_held`` counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

KINDS = ("slice", "all_gather", "reduce_scatter", "all_reduce", "all_to_all")
"""Of steps; arrays have positions in here."""


class Staged(Protocol):
    """A step: bytes of its buffers, 0 where it needs none, and of what it makes."""

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
