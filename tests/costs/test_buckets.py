"""Tensors that share a launch: who is in a bucket, and what its members pay."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered import agrees, lowered, random_assignment
from programs import trained_mlp

from solver_shard.costs.cluster import PRESETS, load_cluster
from solver_shard.costs.collectives import KINDS, Collectives
from solver_shard.costs.model import CostModel
from solver_shard.costs.schedule import Paid, bucket_sizes, unit_of, unshared_ns
from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.mesh import Mesh
from solver_shard.program import Op, Phase, Program, Ref, Role, Tensor


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("transformer.h.11.attn.c_attn.bias", "transformer.h.11"),
        ("model.layers.0.block_sparse_moe.experts.3.w1.weight", "model.layers.0"),
        ("model.embed_tokens.weight", ""),
        ("0.weight", "0"),
        ("weight", ""),
        ("layers.0", ""),
    ],
)
def test_a_unit_is_the_block_of_a_numbered_stack(name: str, unit: str) -> None:
    assert unit_of(name) == unit


def _two_blocks() -> Program:
    names = ("blocks.0.a", "blocks.0.b", "blocks.0.c", "blocks.1.a", "blocks.1.b", "head")
    parameters = [
        Tensor(name=name, shape=(4,), dtype="f32" if name == "blocks.0.c" else "bf16", role=Role.PARAMETER, trainable=True)
        for name in names
    ]
    gradients = [Tensor(name=f"grad({p.name})", shape=(4,), dtype=p.dtype, role=Role.GRADIENT) for p in parameters]
    ops = tuple(
        Op(name="aten.neg.default", operands=(i,), results=(6 + i,), attributes={"self": Ref(0)}, phase=Phase.BACKWARD) for i in range(6)
    )
    return Program(name="blocks", tensors=(*parameters, *gradients), ops=ops, outputs=(), gradients={i: 6 + i for i in range(6)})


def test_members_are_of_one_unit_dtype_and_purpose() -> None:
    moves = [(t, "forward") for t in (0, 1, 2, 3, 5)] + [(0, "backward"), (0, "output"), (0, "forward")]
    sizes = bucket_sizes(_two_blocks(), [*moves, *((t, "optimizer") for t in range(6, 12)), *((t, "update") for t in range(6))])
    assert {t: sizes[t, "forward"] for t in (0, 1, 2, 3, 5)} == {0: 2, 1: 2, 2: 1, 3: 1, 5: 1}
    assert sizes[0, "backward"] == 1
    assert [sizes[t, "optimizer"] for t in range(6, 12)] == [2, 2, 1, 2, 2, 1]
    assert [sizes[t, "update"] for t in range(6)] == [2, 2, 1, 2, 2, 1]
    assert (0, "output") not in sizes


def test_activations_have_launches_of_their_own() -> None:
    program = trained_mlp(12, 8, 20, 2)
    moves = [(t, "forward") for t in range(len(program.tensors))]
    shared = bucket_sizes(program, moves)
    assert {t for t, _ in shared} == {t for t, tensor in enumerate(program.tensors) if tensor.role is Role.PARAMETER}


def test_plans_say_who_shares_and_pay_less_for_it() -> None:
    case = lowered(trained_mlp(12, 8, 20, 2), "2,2", cluster="ethernet")
    shared = 0
    for seed in range(6):
        plan = case.plan(random_assignment(case.graph, seed))
        for reshard in plan.reshards:
            tensor = plan.tensors[reshard.tensor]
            together = tensor.role == "parameter" or reshard.purpose == "optimizer"
            first = tensor.name == "0.down" and reshard.purpose == "backward"  # the first layer's input needs no gradient: 0.up rests
            assert reshard.bucket == (2 if together and not first else 1), (tensor.name, reshard.purpose)
            alone = case.costs.transitions(tensor.shape, tensor.dtype, orders=together).path(reshard.source, reshard.layout)
            if reshard.bucket > 1 and any(step.nbytes for step in reshard.steps):
                assert sum(step.nanoseconds for step in reshard.steps) < sum(step.nanoseconds for step in alone)
                shared += 1
    assert shared


def _paid(launch: str, kind: str, axes: tuple[int, ...], nbytes: int, times: Collectives, bucket: int) -> Paid:
    one = int(times.times(kind, axes, np.array([nbytes]), bucket)[0])
    return Paid(launch=launch, kind=kind, axes=axes, nbytes=nbytes, nanoseconds=one)


def test_a_block_of_mixed_collectives_lacks_a_launch_for_every_collective_but_one() -> None:
    times = Collectives(Mesh.parse("dp=16,tp=8"), load_cluster("h100"))
    big, small = 2**30, 2**12
    alike = [_paid("a", "reduce_scatter", (0,), big, times, 4) for _ in range(4)]
    assert unshared_ns(alike, times.nanoseconds) == 0
    launch = times.nanoseconds("all_reduce", (0,), 0)
    norms = [_paid("b", "all_reduce", (0,), small, times, 4) for _ in range(2)]
    scatters = alike[:2]
    mixed = unshared_ns([*scatters, *norms], times.nanoseconds)
    paid = sum(step.nanoseconds for step in (*scatters, *norms))
    whole = times.nanoseconds("reduce_scatter", (0,), 2 * big) + times.nanoseconds("all_reduce", (0,), 2 * small)
    assert mixed == whole - paid
    assert mixed > launch / 2
    alone = _paid("a", "all_gather", (1,), small, times, 8)
    assert unshared_ns([alone], times.nanoseconds) == times.nanoseconds("all_gather", (1,), small) - alone.nanoseconds > 0


def test_price_and_what_it_leaves_out_cover_the_launches_of_the_collectives_table() -> None:
    case = lowered(trained_mlp(12, 8, 20, 2), "2,2", cluster="ethernet")
    mixed = 0
    for seed in range(12):
        plan = agrees(case, random_assignment(case.graph, seed))
        launches: dict[tuple[str, str, str, tuple[str, ...], int], list[int]] = {}
        paid = 0
        names = {g: name for name, g in plan.gradients.items()}
        for reshard in (reshard for reshard in plan.reshards if reshard.bucket > 1):
            for k, step in enumerate(reshard.steps):
                if step.nbytes:
                    unit = unit_of(names.get(reshard.tensor, plan.tensors[reshard.tensor].name))
                    launches.setdefault((reshard.purpose, unit, step.kind, step.axes, k), []).append(step.nbytes)
                    paid += step.nanoseconds
        axes = plan.mesh.names
        whole = sum(case.costs.collective_ns(kind, tuple(map(axes.index, a)), sum(n)) for (_, _, kind, a, _), n in launches.items())
        assert paid + plan.costs.unshared_ns >= whole
        moved = [r for r in plan.reshards if r.bucket == 1 and (plan.tensors[r.tensor].role == "parameter" or r.purpose == "optimizer")]
        alone = sum(step.nbytes > 0 for reshard in moved for step in reshard.steps)
        assert _shown(str(plan)) == len(launches) + alone
        if plan.costs.unshared_ns:
            mixed += 1
            assert "of launches, as parameters of one block move by different collectives" in str(plan)
    assert mixed


def _shown(report: str) -> int:
    """Launches of gathers, reductions and updates that a report's table of collectives shows."""
    rows = [
        line.split()
        for line in report.partition("\nTime")[0].splitlines()
        if re.match(r"  (parameter gathers|gradient reductions|parameter updates) ", line)
    ]
    return sum(int(row[5]) for row in rows)


@given(st.sampled_from(KINDS), st.sampled_from(PRESETS), st.integers(1, 40), st.integers(0, 2**32), st.sampled_from([(0,), (1,), (0, 1)]))
def test_equal_members_together_pay_for_the_collective_that_moves_them_all(
    kind: str, cluster: str, bucket: int, nbytes: int, axes: tuple[int, ...]
) -> None:
    times = Collectives(Mesh.parse("dp=16,tp=8"), load_cluster(cluster))
    one = int(times.times(kind, axes, np.array([nbytes]), bucket)[0])
    whole = times.nanoseconds(kind, axes, bucket * nbytes)
    assert whole - 1 <= bucket * one <= whole + bucket  # both are rounded up


@settings(max_examples=20)
@given(
    st.sampled_from(["2,4", "3,2", "2,2,2"]),
    st.sampled_from([(24,), (16, 24), (8, 6, 12)]),
    st.integers(2, 150),
    st.sampled_from(PRESETS),
    st.booleans(),
)
def test_every_table_obeys_the_triangle_inequality_and_is_cheaper_in_larger_buckets(
    mesh: str, shape: tuple[int, ...], bucket: int, cluster: str, orders: bool
) -> None:
    model = CostModel(Mesh.parse(mesh), load_cluster(cluster))
    table = model.transitions(shape, "bf16", ("sum",), bucket, orders)
    costs = np.minimum(table.costs, FORBIDDEN)
    for middle in range(len(table.layouts)):
        assert (costs <= costs[:, middle, None] + costs[None, middle, :]).all()
    assert (costs <= model.transitions(shape, "bf16", orders=orders).costs).all()
    assert table is model.transitions(shape, "bf16", ("sum",), bucket, orders)
    for src, dst in ((0, -1), (-1, 0)):
        a, b = table.layouts[src], table.layouts[dst]
        if costs[src, dst] < FORBIDDEN:
            assert costs[src, dst] == sum(step.nanoseconds for step in table.path(a, b))
