"""The walk against DTensor itself, and cases where deciding op by op is dearer than the solver's plan."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from dtensor_models import HIDDEN, MODELS, WIDTH, inputs_of, random_pins, really, seen_on_cpu
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from solver_shard.baselines.dtensor_greedy import Walk, walk
from solver_shard.costs.cluster import load_cluster
from solver_shard.costs.collectives import Collectives
from solver_shard.errors import InputError
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.pipeline import plan_program
from solver_shard.plan.plan import Plan
from solver_shard.tracing.clean import clean
from solver_shard.tracing.joint_graph import RawGraph
from solver_shard.tracing.torch import trace_raw

pytestmark = pytest.mark.usefixtures("one_thread")


def squares(output: torch.Tensor) -> torch.Tensor:
    return (output**2).mean()


@pytest.fixture(params=["4", "2,2"])
def devices(request: pytest.FixtureRequest) -> Iterator[tuple[Mesh, DeviceMesh]]:
    mesh = Mesh.parse(request.param)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.size)
    yield mesh, DeviceMesh("cpu", torch.arange(mesh.size).reshape(mesh.shape))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning")  # autograd and DTensor's own
@pytest.mark.parametrize("name", ["mlp", "attention", "gpt2", "llama"])
def test_the_walk_predicts_the_collectives_that_dtensor_issues(name: str, devices: tuple[Mesh, DeviceMesh]) -> None:
    # a few of the pin sets of experiments/dtensor_greedy.py, which has ten for each model and mesh
    mesh, on = devices
    raw = trace_raw(MODELS[name](), inputs_of(MODELS[name]()), name=name, loss_fn=squares)
    rng, compared = random.Random(1), 0
    while compared < (2 if len(mesh.axes) == 1 else 1):
        pins = random_pins(raw, mesh, rng)
        found = walk(raw, mesh, pins, devices_per_host=1)
        if found.unsupported:
            continue
        model = MODELS[name]()
        issued, counted = really(model, inputs_of(model), mesh, pins, on)
        assert Counter(issued) == seen_on_cpu(found.collectives, mesh)
        # CommDebugMode counts the same calls; it knows neither axes nor bytes
        assert Counter(c.kind for c in issued) == counted
        assert issued
        compared += 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_where_dtensor_raises_the_walk_reports_the_op(devices: tuple[Mesh, DeviceMesh]) -> None:
    mesh, on = devices
    model = MODELS["sdpa"]()
    raw = trace_raw(model, inputs_of(model), name="sdpa", loss_fn=squares)
    found = walk(raw, mesh, {}, devices_per_host=1)
    first = found.unsupported[0]
    with pytest.raises(NotImplementedError, match=f"Operator {first.op} does not have a sharding strategy"):
        really(model, inputs_of(model), mesh, {}, on)
    assert "does not have a sharding strategy" in first.unsupported


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"up.wieght": "R"}, "'up.wieght' is pinned, but 'mlp' has no such parameter or input"),
        ({"up.weight": "P"}, r"pinned to P\(sum\); parameters and inputs are R or S"),
        ({"up.weight": "RR"}, "on each of the axes of d0=4"),
    ],
)
def test_a_pin_that_cannot_be_is_an_error(pins: dict[str, str], message: str) -> None:
    model = MODELS["mlp"]()
    raw = trace_raw(model, inputs_of(model), name="mlp", loss_fn=squares)
    with pytest.raises(InputError, match=message):
        walk(raw, Mesh.parse("4"), {name: Layout.parse(text) for name, text in pins.items()})


class Projections(nn.Module):
    """Three projections of one activation."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.q(x)) + torch.relu(self.k(x)) + torch.relu(self.v(x))


class Chain(nn.Module):
    """relu(x W1) W2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(WIDTH, HIDDEN)), nn.Parameter(torch.randn(HIDDEN, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.first) @ self.second


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Loss(nn.Module):
    """Cross entropy of logits from a head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(x), labels)


def both(
    make: Callable[[], nn.Module], inputs: dict[str, torch.Tensor], mesh: str, pins: dict[str, str]
) -> tuple[Walk, int, Plan, RawGraph]:
    """The walk with its price, and the solver's plan under the same pins."""
    on, cluster = Mesh.parse(mesh), load_cluster("h100")
    raw = trace_raw(make(), inputs, name="case", forward_only=True)
    found = walk(raw, on, {name: Layout.parse(text) for name, text in pins.items()})
    options = Options(
        memory_limit=2**30,
        forward_only=True,
        optimizer="none",
        pins=tuple(f"{n}={','.join(map(str, Layout.parse(t)))}" for n, t in pins.items()),
    )
    plan = plan_program(clean(raw), mesh=on, cluster=cluster, options=options)
    return found, found.nanoseconds(Collectives(on, cluster)), plan, raw


def test_three_projections_of_a_cut_sequence_gather_it_three_times() -> None:
    pins = {"x": "S(1)", **{f"{name}.weight": "S(0)" for name in "qkv"}}
    found, price, plan, _ = both(Projections, {"x": torch.randn(8, 64, WIDTH)}, "4", pins)
    assert [c.kind for c in found.collectives[:3]] == ["all_gather"] * 3
    assert plan.costs.communication_ns * 2 < price


def test_a_pending_sum_before_a_relu_is_reduced_in_full() -> None:
    pins = {"x": "S(1)", "first": "S(0)", "second": "R"}
    found, price, plan, _ = both(Chain, {"x": torch.randn(64, WIDTH)}, "4", pins)
    assert [c.kind for c in found.collectives] == ["all_reduce"]
    assert plan.costs.communication_ns < price


def test_two_cut_matrices_on_two_axes_need_one_gather_each() -> None:
    # torch 2.13 finds that by itself: the greedy path of [S(0), S(1)] to [S(0), R] and to [R, S(1)] is a single gather
    found, price, plan, _ = both(Product, {"x": torch.randn(64, WIDTH)}, "2,4", {"x": "S(0)S(1)", "weight": "S(0)S(1)"})
    assert [(c.kind, c.axis) for c in found.collectives] == [("all_gather", 1), ("all_gather", 0)]
    assert plan.costs.communication_ns <= price


def test_logits_cut_by_vocabulary_are_gathered_for_the_loss() -> None:
    inputs = {"x": torch.randn(64, WIDTH), "labels": torch.zeros(64, dtype=torch.int64)}
    found, price, plan, _ = both(Loss, inputs, "4", {"head.weight": "S(0)"})
    assert ("all_gather", "d0") in found.counts
    assert plan.costs.communication_ns <= price
