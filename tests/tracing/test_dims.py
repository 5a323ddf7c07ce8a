"""Lazy views against numpy: any chain of reshapes and permutes reads the elements that numpy's does."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver_shard.tracing.clean import dims as D


def read(base: np.ndarray, dims: D.Dims) -> np.ndarray:
    """The view's elements, by the meaning of its atoms."""
    strides = [math.prod(base.shape[d + 1 :]) for d in range(base.ndim)]
    index = np.zeros((1,), dtype=np.int64)
    for group in dims:
        for dim, stride, size in group:
            step = 0 if dim == D.BROADCAST else stride * strides[dim]
            index = (index[:, None] + np.arange(size) * step).reshape(-1)
    return base.reshape(-1)[index].reshape(D.shape(dims))


shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


@settings(max_examples=200)
@given(shapes, st.data())
def test_chains_of_views_read_what_numpy_reads(shape: list[int], data: st.DataObject) -> None:
    base = np.arange(math.prod(shape)).reshape(shape)
    dims, array = D.identity(shape), base
    for _ in range(5):
        kind = data.draw(st.sampled_from(["merge", "split", "permute", "unit", "expand"]))
        if kind == "permute":
            order = data.draw(st.permutations(range(array.ndim)))
            dims, array = D.permute(dims, order), array.transpose(order)
            continue
        sizes = list(array.shape)
        at = data.draw(st.integers(0, len(sizes) - 1))
        if kind == "merge" and at + 1 < len(sizes):
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
        elif kind == "split":
            part = data.draw(st.sampled_from([n for n in range(1, sizes[at] + 1) if sizes[at] % n == 0]))
            sizes[at : at + 1] = [part, sizes[at] // part]
        elif kind == "unit":
            sizes.insert(at, 1)
        elif kind == "expand":
            dims, array = D.expand(dims, (2, *sizes)), np.broadcast_to(array, (2, *sizes))
            continue
        found = D.reshape(dims, sizes)
        if found is None:
            return
        dims, array = found, array.reshape(sizes)
        assert D.shape(dims) == array.shape
    np.testing.assert_array_equal(read(base, dims), array)


@pytest.mark.parametrize(
    ("shape", "chain"),
    [
        ((4, 16, 64), [(64, 64), (4, 16, 64)]),
        ((4, 16, 64), [(4, 16, 4, 16), (4, 16, 64)]),
        ((1, 16, 8), [(16, 8), (1, 16, 8)]),
        ((4, 1, 6), [(24,), (2, 12), (4, 1, 6)]),
    ],
)
def test_flattening_and_splitting_again_is_nothing(shape: tuple[int, ...], chain: list[tuple[int, ...]]) -> None:
    dims: D.Dims | None = D.identity(shape)
    for sizes in chain:
        assert dims is not None
        dims = D.reshape(dims, sizes)
    assert dims == D.identity(shape)


def test_a_size_that_cuts_across_dims_is_refused() -> None:
    assert D.reshape(D.identity((4, 6)), (3, 8)) is None


def test_repeat_reads_a_dim_over_again() -> None:
    base = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(read(base, D.repeat(D.identity((2, 3)), (2, 1, 2))), np.tile(base, (2, 1, 2)))
