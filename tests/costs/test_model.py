"""Roofline, optimizer memory, and the model that holds all prices together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solver_shard.costs.cluster import Cluster, Device, Efficiency, Kernel, Level, load_cluster
from solver_shard.costs.memory import OPTIMIZERS, optimizer_state
from solver_shard.costs.model import CostModel
from solver_shard.errors import InputError
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.program import DTYPE_BYTES

# 1 byte, 2 vector operations and 8 bf16 matrix operations per nanosecond
DEVICE = Device(
    name="test",
    memory=2**30,
    memory_bandwidth=1e9,
    vector_flops=2e9,
    matmul_flops={"bf16": 8e9},
    efficiency=Efficiency(attention=0.5, reduction=0.5),
)
CLUSTER = Cluster(
    name="test", title="test", device=DEVICE, levels=(Level(name="link", size=None, bandwidth=1e9, latency_ns=0.0),), launch_ns=0.0
)


@pytest.mark.parametrize(
    ("flops", "nbytes", "dtype", "kernel", "expected"),
    [
        (800, 10, "bf16", "matmul", 100),
        (801, 10, "bf16", "matmul", 101),
        (800, 10, "bf16", "streaming", 400),
        (800, 10, "f32", "matmul", 400),
        (800, 1000, "bf16", "matmul", 1000),
        (0, 0, "bf16", "streaming", 0),
        (1, 0, "bf16", "matmul", 1),
        (800, 10, "bf16", "attention", 200),
        (800, 1000, "bf16", "attention", 1000),
        (800, 1000, "bf16", "reduction", 2000),
    ],
)
def test_roofline(flops: int, nbytes: int, dtype: str, kernel: Kernel, expected: int) -> None:
    assert CostModel(Mesh.parse("2"), CLUSTER).compute_ns(flops, nbytes, dtype, kernel) == expected


def test_roofline_broadcasts() -> None:
    times = CostModel(Mesh.parse("2"), CLUSTER).compute_ns(np.array([[8.0], [80.0]]), np.array([0, 5, 50]), "bf16", "matmul")
    assert times.dtype == np.int64
    assert times.tolist() == [[1, 5, 50], [10, 10, 50]]


@given(st.lists(st.tuples(st.integers(0, 2**60), st.integers(0, 2**50)), min_size=1, max_size=5), st.integers(0, 2**50))
def test_more_work_never_takes_less_time(work: list[tuple[int, int]], more: int) -> None:
    flops, nbytes = np.array(work, dtype=np.int64).T
    model = CostModel(Mesh.parse("2"), load_cluster("h100"))
    assert (model.compute_ns(flops + more, nbytes, "bf16", "matmul") >= model.compute_ns(flops, nbytes, "bf16", "matmul")).all()
    assert (model.compute_ns(flops, nbytes + more, "bf16", "matmul") >= model.compute_ns(flops, nbytes, "bf16", "matmul")).all()


def test_local_bytes_follow_the_fullest_device() -> None:
    model = CostModel(Mesh.parse("2,4"), CLUSTER)
    layouts = [Layout.parse(x) for x in ("RR", "S(0)R", "RS(0)", "S(0)S(0)", "P(sum)S(1)")]
    assert model.local_bytes((10, 6), "bf16", layouts).tolist() == [120, 60, 36, 24, 40]


@pytest.mark.parametrize("overlap", [-0.1, 1.1, float("nan"), True, "0.5"])
def test_overlap_is_a_part(overlap: object) -> None:
    with pytest.raises(InputError, match="legal: a number from 0"):
        CostModel(Mesh.parse("2"), CLUSTER, overlap)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "dtype", "master", "override", "gradient", "state", "copy", "update"),
    [
        ("adamw", "bf16", True, None, 2, 8, 4, 2 + 16 + 8 + 2),
        ("adamw", "f16", True, None, 2, 8, 4, 28),
        ("adamw", "bf16", False, None, 2, 4, 0, 2 + 8 + 4),
        ("adamw", "f32", True, None, 4, 8, 0, 4 + 16 + 8),
        ("adamw", "f64", True, None, 8, 16, 0, 8 + 32 + 16),
        ("adamw", "bf16", True, 2, 2, 2, 4, 2 + 4 + 8 + 2),
        ("sgd", "f32", True, None, 4, 0, 0, 4 + 8),
        ("sgd", "bf16", True, None, 2, 0, 4, 2 + 8 + 2),
        ("none", "bf16", True, None, 2, 0, 0, 0),
        ("none", "bf16", True, 8, 2, 0, 0, 0),
    ],
)
def test_optimizer_bytes_per_element(
    name: str, dtype: str, master: bool, override: int | None, gradient: int, state: int, copy: int, update: int
) -> None:
    found = optimizer_state(name, master_weights=master, state_bytes=override)
    assert (found.gradient_bytes(dtype), found.state_bytes(dtype), found.master_bytes(dtype)) == (gradient, state, copy)
    assert found.resident_bytes(dtype) == state + copy
    assert found.update_bytes(dtype) == update


@pytest.mark.parametrize(
    ("name", "dtype", "reduce_dtype", "clip", "gradient", "update", "norm"),
    [
        ("adamw", "bf16", "f32", False, 4, 4 + 16 + 8 + 2, 0),
        ("adamw", "bf16", None, True, 2, 3 * 2 + 16 + 8 + 2, 2),
        ("adamw", "bf16", "f32", True, 4, 3 * 4 + 16 + 8 + 2, 4),
        ("sgd", "f32", "bf16", True, 2, 3 * 2 + 8, 2),
        ("none", "bf16", "f32", False, 4, 0, 0),
    ],
)
def test_reduced_and_clipped_gradients_per_element(
    name: str, dtype: str, reduce_dtype: str | None, clip: bool, gradient: int, update: int, norm: int
) -> None:
    """What is kept beside gradients does not change: f32 master weights and moments are there already."""
    found, plain = optimizer_state(name, reduce_dtype=reduce_dtype, clip=clip), optimizer_state(name)
    assert (found.gradient_bytes(dtype), found.update_bytes(dtype), found.norm_bytes(dtype)) == (gradient, update, norm)
    assert found.resident_bytes(dtype) == plain.resident_bytes(dtype)


def test_reduce_dtypes_and_clipping_are_checked() -> None:
    with pytest.raises(InputError, match=r"gradients cannot be reduced in 'f64'; legal: f32, bf16, f16"):
        optimizer_state("adamw", reduce_dtype="f64")
    with pytest.raises(InputError, match="clipping to a gradient norm was asked without an optimizer"):
        optimizer_state("none", clip=True)


def test_every_optimizer_prices_every_dtype() -> None:
    for name in OPTIMIZERS:
        for dtype in DTYPE_BYTES:
            state = optimizer_state(name)
            assert state.update_bytes(dtype) >= 0
            assert isinstance(state.resident_bytes(dtype), int)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adam", "unknown optimizer 'adam'; legal: adamw, adamw-fused, adamw-forloop, sgd, none; did you mean 'adamw'"),
        ("shampoo", "unknown optimizer 'shampoo'; legal: adamw, adamw-fused, adamw-forloop, sgd, none; for another one"),
    ],
)
def test_unknown_optimizers(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        optimizer_state(name)


@pytest.mark.parametrize("state_bytes", [-1, 5000, 1.5, True])
def test_state_bytes_are_checked(state_bytes: object) -> None:
    with pytest.raises(InputError, match="legal: a whole number from 0 to 1024"):
        optimizer_state("adamw", state_bytes=state_bytes)  # type: ignore[arg-type]
