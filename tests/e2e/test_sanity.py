"""What anyone in the field would check first: the solver finds the plans that everybody knows."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from solver_shard.api import optimize
from solver_shard.costs.cluster import Cluster, load_cluster
from solver_shard.mesh import Mesh
from solver_shard.plan.plan import Plan

TOKENS, WIDTH, HIDDEN = 64, 1024, 4096


class Mlp(nn.Module):
    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(HIDDEN, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.relu(up(x)))
        return x


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.q_proj = nn.Linear(WIDTH, heads * dim, bias=False)
        self.k_proj = nn.Linear(WIDTH, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(WIDTH, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        q = self.q_proj(x).view(batch, seq, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, seq, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, seq, self.kv_heads, self.dim).transpose(1, 2)
        repeats = self.heads // self.kv_heads
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, seq, self.heads * self.dim))


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q(x), self.k(x), self.v(x)


def collectives(plan: Plan) -> Counter[str]:
    return Counter(step.kind for reshard in plan.reshards for step in reshard.steps if step.kind != "slice")


def meta(module: type[nn.Module], *args: int) -> nn.Module:
    with torch.device("meta"):
        return module(*args)


def hidden_states(batch: int = 4, seq: int = TOKENS // 4) -> dict[str, torch.Tensor]:
    return {"x": torch.empty(batch, seq, WIDTH, device="meta")}


def ops_named(plan: Plan, part: str) -> list[int]:
    return [i for i, op in enumerate(plan.ops) if part in op.name]


def test_mlp_with_sharded_weights_is_column_then_row_with_one_all_reduce() -> None:
    plan = optimize(
        meta(Mlp), hidden_states(), mesh="tp=8", cluster="h100", forward_only=True,
        pins=["x=R", "output=R", "up.*.weight=S(*)", "down.*.weight=S(*)"],
    )  # fmt: skip
    assert str(plan.layouts["up.0.weight"]) == "S(0)"
    assert str(plan.layouts["down.0.weight"]) == "S(1)"
    assert collectives(plan) == {"all_reduce": 1}
    (reduced,) = (r.tensor for r in plan.reshards if any(step.kind == "all_reduce" for step in r.steps))
    down, total = ops_named(plan, "einsum")[-1], ops_named(plan, "add")[-1]
    assert reduced in (*plan.ops[down].results, *plan.ops[total].results), (
        "the sum is reduced before or after the residual, not between the two"
    )


@pytest.mark.parametrize("kv_heads", [8, 16])
def test_attention_with_sharded_weights_cuts_whole_heads_with_one_all_reduce(kv_heads: int) -> None:
    plan = optimize(
        meta(Attention, 16, kv_heads, 64), hidden_states(), mesh="tp=8", cluster="h100", forward_only=True,
        pins=["x=R", "output=R", "*_proj.weight=S(*)"],
    )  # fmt: skip
    assert [str(plan.layouts[f"{name}_proj.weight"]) for name in "qkvo"] == ["S(0)", "S(0)", "S(0)", "S(1)"]
    (attention,) = ops_named(plan, "attention")
    assert {str(layout) for layout in plan.ops[attention].operand_layouts} == {"S(1)"}
    assert collectives(plan) == {"all_reduce": 1}


def test_two_key_value_heads_are_never_cut_by_eight() -> None:
    plan = optimize(
        meta(Attention, 16, 2, 64), hidden_states(), mesh="tp=8", cluster="h100", forward_only=True,
        pins=["x=R", "output=R", "*_proj.weight=S(*)"],
    )  # fmt: skip
    (attention,) = ops_named(plan, "attention")
    heads = {t: plan.tensors[t].shape for t in plan.ops[attention].operands}
    for op in plan.ops:
        for t, layout in [*zip(op.operands, op.operand_layouts, strict=True), *zip(op.results, op.result_layouts, strict=True)]:
            shape = plan.tensors[t].shape
            if len(shape) == 4 and 2 in shape[1:3]:  # a tensor with the two key-value heads as a dim of their own
                dim = shape.index(2, 1)
                shards = math.prod(size for p, size in zip(layout, plan.mesh.shape, strict=True) if p == dim)
                assert shards in (1, 2), f"{op.name} cuts the 2 heads of {shape} into {shards}: {layout}"
                assert 3 not in layout, f"{op.name} cuts inside a head of {shape}: {layout}"
    assert heads


def test_three_projections_share_one_all_gather() -> None:
    plan = optimize(
        meta(Projections), hidden_states(), mesh="tp=8", cluster="h100", forward_only=True,
        pins=["x=S(1)", "*.weight=S(0)", "output*=S(2)"],
    )  # fmt: skip
    assert collectives(plan) == {"all_gather": 1}
    gather = next(r for r in plan.reshards if r.steps)
    assert plan.tensors[gather.tensor].name == "x"
    assert len(gather.readers) == 3


def test_memory_below_the_weights_shards_state_over_data_and_gathers_per_layer() -> None:
    layers = 6
    inputs = {"x": torch.empty(256, 64, WIDTH, device="meta")}
    weights = layers * 2 * WIDTH * HIDDEN * 4
    plan = optimize(
        meta(Mlp, layers), inputs, mesh="dp=32", cluster="h100", loss_fn=lambda y: y.square().mean(), memory=int(weights * 0.9), reserve=0,
        pins=["x=S(0)"], optimizer="adamw",
    )  # fmt: skip
    names = [f"{kind}.{k}.weight" for kind in ("up", "down") for k in range(layers)]
    assert all(plan.layouts[name].shards((32,)) == 32 for name in names)
    assert all(plan.layouts[f"grad({name})"] == plan.layouts[name] for name in names)
    gathered = {plan.tensors[r.tensor].name for r in plan.reshards if any(s.kind == "all_gather" for s in r.steps)}
    assert set(names) <= gathered
    forward = [r for r in plan.reshards if r.purpose == "forward" and plan.tensors[r.tensor].name in names and r.copy]
    assert len(forward) == len(names)
    assert all(r.stop - r.start < len(plan.ops) // 2 for r in forward)


def mlp_plan(mesh: str, cluster: str | Cluster = "h100", memory: int = 1 << 40) -> Plan:
    inputs = {"x": torch.empty(64, 32, WIDTH, device="meta")}
    return optimize(
        meta(Mlp, 2),
        inputs,
        mesh=mesh,
        cluster=cluster,
        memory=memory,
        reserve=0,
        loss_fn=lambda y: y.square().mean(),
        gap=0.0,
        time_limit=120,
    )


def test_at_proven_optima_a_looser_limit_never_costs_more() -> None:
    free = mlp_plan("dp=2,tp=4")
    assert free.certificate.status == "optimal"
    before = None
    for part in (1.0, 0.97, 0.9):
        plan = mlp_plan("dp=2,tp=4", memory=int(free.memory.peak * part))
        assert plan.certificate.status == "optimal"
        assert plan.memory.peak <= free.memory.peak * part
        assert before is None or plan.certificate.objective >= before
        before = plan.certificate.objective


def test_at_proven_optima_a_slower_link_never_costs_less() -> None:
    cluster = load_cluster("h100")
    before = 0
    for factor in (1.0, 0.5, 0.1):
        levels = tuple(dataclasses.replace(level, bandwidth=level.bandwidth * factor) for level in cluster.levels)
        plan = mlp_plan("dp=2,tp=4", cluster=dataclasses.replace(cluster, levels=levels))
        assert plan.certificate.status == "optimal"
        assert plan.certificate.objective >= before
        before = plan.certificate.objective


def test_an_axis_of_size_one_changes_nothing() -> None:
    one, two = mlp_plan("dp=2,tp=4"), mlp_plan("dp=2,extra=1,tp=4")
    assert one.certificate.objective == two.certificate.objective
    assert one.certificate.status == two.certificate.status == "optimal"
    assert Mesh.parse("dp=2,extra=1,tp=4").size == 8
