"""Placements of one view of a tensor as a layout of another: every device must hold the same elements by both."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from solver_shard.baselines.dtensor_greedy import roots, through
from solver_shard.layout import Layout, NamedPartial, P, Placement, Placements, R, S, strided
from solver_shard.mesh import Mesh
from solver_shard.program import Op, Program, Ref, Role, Tensor
from solver_shard.tracing.clean import dims as D

Held = dict[tuple[int, ...], set[int]]


def seen(base: NDArray[np.int64], dims: D.Dims) -> NDArray[np.int64]:
    """The elements of a base, laid out as a view of it."""
    atoms = [atom for group in dims for atom in group]
    found = np.zeros([atom[2] for atom in atoms], dtype=np.int64)
    for place in itertools.product(*(range(atom[2]) for atom in atoms)):
        at = [0] * base.ndim
        for i, (dim, stride, _) in zip(place, atoms, strict=True):
            if dim != D.BROADCAST:
                at[dim] += i * stride
        found[place] = base[tuple(at)]
    return found.reshape(D.shape(dims))


def held(array: NDArray[np.int64], kinds: Placements, mesh: Mesh) -> Held:
    """What every device holds: axes cut one after the other, left to right, a strided one each of its pieces."""
    found: Held = {}
    for device in np.ndindex(*mesh.shape):
        part = array
        for kind, at, parts in zip(kinds, device, mesh.shape, strict=True):
            if not kind.is_shard:
                continue
            pieces = np.array_split(part, kind.split, axis=kind.dim) if kind.split else [part]
            part = np.concatenate([chunk(piece, at, parts, kind.dim) for piece in pieces], axis=kind.dim)
        found[device] = set(part.reshape(-1).tolist())
    return found


def chunk(piece: NDArray[np.int64], at: int, parts: int, dim: int) -> NDArray[np.int64]:
    """Shards as torch.chunk makes them: the first ones are full."""
    size = -(-piece.shape[dim] // parts)
    return piece.take(range(min(at * size, piece.shape[dim]), min((at + 1) * size, piece.shape[dim])), axis=dim)


def random_view(rng: random.Random, shape: tuple[int, ...]) -> D.Dims:
    """Dims parted, permuted and merged again."""
    dims = D.identity(shape)
    parted = [n for size in shape for n in rng.choice([(size,), *((k, size // k) for k in (2, 4) if size % k == 0 and size > k)])]
    found = D.reshape(dims, parted)
    assert found is not None
    order = list(range(len(parted)))
    if rng.random() < 0.5:
        rng.shuffle(order)
    found, sizes = D.permute(found, order), [parted[i] for i in order]
    merged = [sizes[0]]
    for n in sizes[1:]:
        if rng.random() < 0.4:
            merged[-1] *= n
        else:
            merged.append(n)
    found = D.reshape(found, merged)
    assert found is not None
    return found


@pytest.mark.parametrize("mesh", ["2", "4", "2,2", "2,3", "4,2"])
def test_every_device_holds_the_same_elements_by_both_views(mesh: str) -> None:
    rng, on, said = random.Random(0), Mesh.parse(mesh), 0
    for _ in range(400):
        shape = tuple(rng.choice([1, 2, 3, 4, 6, 8]) for _ in range(rng.randint(1, 3)))
        base = np.arange(np.prod(shape)).reshape(shape)
        one, two = random_view(rng, shape), rng.choice([D.identity(shape), random_view(rng, shape)])
        array = seen(base, one)
        choices: list[Placement] = [
            R,
            P("sum"),
            *(S(d) for d in range(array.ndim)),
            *(strided(d, k) for d in range(array.ndim) for k in (2, 4)),
        ]
        kinds = tuple(rng.choice(choices) for _ in on.shape)
        layout = through(kinds, one, two, on.shape)
        if layout is None:
            continue
        said += any(kind.is_shard for kind in kinds)
        assert [p if p.is_partial else None for p in layout] == [k if k.is_partial else None for k in kinds]
        if not any(p.is_strided for p in layout):
            assert held(array, kinds, on) == held(seen(base, two), tuple(layout), on), (shape, one, two, kinds, layout)
    assert said > 20


@pytest.mark.parametrize(
    ("kinds", "raw", "shape", "wanted"),
    [
        ((S(0), R), (32, 8), (32, 8), "S(0)R"),
        ((S(0), P("sum")), (32, 8), (4, 8, 8), "S(0)P(sum)"),
        ((strided(0, 4), R), (32, 8), (4, 8, 8), "S(1)R"),
        ((S(1), R), (32, 8), (4, 8, 8), "S(2)R"),
        ((S(0), S(0)), (32, 8), (2, 16, 8), "S(0)S(1)"),
        ((strided(0, 2), R), (32, 8), (4, 8, 8), None),
        ((S(0), R), (8, 32), (4, 2, 32), "S(0)R"),
        ((S(0), R), (6, 32), (3, 2, 32), None),
        ((NamedPartial("mask"), R), (32, 8), (4, 8, 8), None),
    ],
)
def test_merged_dims_are_told_apart(kinds: Placements, raw: tuple[int, ...], shape: tuple[int, ...], wanted: str | None) -> None:
    view = D.reshape(D.identity(shape), raw)
    assert view is not None
    assert through(kinds, view, D.identity(shape), (2, 2)) == (None if wanted is None else Layout.parse(wanted))


def test_parameters_keep_the_order_of_their_axes() -> None:
    whole = D.identity((8, 8))
    assert through((strided(0, 2), S(0)), whole, whole, (2, 2)) == Layout.parse("_S(0)S(0)")


def test_a_cut_of_an_expanded_dim_leaves_what_it_shows_whole() -> None:
    assert through((S(0), S(1)), D.expand(D.identity((1, 8)), (4, 8)), D.identity((1, 8)), (2, 2)) == Layout.parse("RS(1)")


def test_views_of_views_are_views_of_the_first_tensor() -> None:
    tensors = tuple(Tensor(name=n, shape=s, dtype="f32", role=r) for n, s, r in [
        ("x", (4, 8, 16), Role.INPUT), ("v", (4, 8, 2, 8), Role.ACTIVATION), ("p", (4, 2, 8, 8), Role.OUTPUT)])  # fmt: skip
    ops = (
        Op(name="aten.view.default", operands=(0,), results=(1,), attributes={"self": Ref(0), "size": (4, 8, 2, 8)}),
        Op(name="aten.permute.default", operands=(1,), results=(2,), attributes={"self": Ref(0), "dims": (0, 2, 1, 3)}),
    )
    found = roots(Program(name="heads", tensors=tensors, ops=ops, outputs=(2,)))
    assert found[2] == (0, (((0, 1, 4),), ((2, 8, 2),), ((1, 1, 8),), ((2, 1, 8),)))
