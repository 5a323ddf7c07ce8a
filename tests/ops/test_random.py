"""Draws depend on seed, step, op and place, and on nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.ops.random import Unsharded, draw, key_of, uniform
from solver_shard.ops.shards import Box, boxes

SHAPE = (7, 4, 5)
KEY = key_of(1, 2, 3)
WHOLE = Box((0, 0, 0), SHAPE)
X = torch.linspace(-1, 1, 140).reshape(SHAPE)
OPS = {
    "native_dropout.default": {"input": X, "p": 0.3, "train": True},
    "bernoulli.p": {"self": X, "p": 0.3},
    "bernoulli.Tensor": {"self": X, "p": X.abs()},
    "rand_like.default": {"self": X},
    "randn_like.default": {"self": X},
    "uniform.default": {"self": X, "from": -1.0, "to": 3.0},
    "randint_like.default": {"self": X, "high": 9},
    "random.to": {"self": X, "to": 7},
    "random.default": {"self": X},
    "normal.Tensor_Tensor": {"mean": X, "std": X.abs()},
    "normal.float_Tensor": {"mean": 0.5, "std": X.abs()},
    "exponential.default": {"self": X, "lambd": 2.0},
    "geometric.default": {"self": X, "p": 0.3},
    "cauchy.default": {"self": X, "median": 0.5, "sigma": 2.0},
    "log_normal.default": {"self": X, "mean": 0.0, "std": 0.5},
    "rrelu_with_noise_functional.default": {"self": X, "noise": X, "lower": 0.1, "upper": 0.4, "training": True},
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("layout", ["S(0)S(1)", "S(2)R", "_S(0)S(0)"])
def test_a_shard_draws_its_part_of_the_whole(name: str, layout: str) -> None:
    def drawn(box: Box) -> tuple[torch.Tensor, ...]:
        part = {k: v[box.inside(WHOLE)] if isinstance(v, torch.Tensor) else v for k, v in OPS[name].items()}
        return draw(f"aten.{name}", part, key=KEY, box=box, shape=SHAPE, dtype=torch.float32)

    whole = drawn(WHOLE)
    for box in boxes(Layout.parse(layout), SHAPE, Mesh.parse("2,2")):
        for found, value in zip(drawn(box), whole, strict=True):
            assert torch.equal(found, value[box.inside(WHOLE)])


def test_a_part_of_a_permutation_is_cut_from_the_whole() -> None:
    def drawn(start: int, length: int) -> torch.Tensor:
        box = Box((start,), (length,))
        return draw("aten.randperm.default", {"n": 1000}, key=KEY, box=box, shape=(1000,), dtype=torch.int64)[0]

    whole = drawn(0, 1000)
    assert whole.sort().values.tolist() == list(range(1000))
    assert abs(float(torch.corrcoef(torch.stack([whole.double(), torch.arange(1000).double()]))[0, 1])) < 0.1
    assert torch.equal(drawn(300, 200), whole[300:500])


@pytest.mark.parametrize(("count", "twice"), [(1, False), (3, False), (3, True)])
def test_classes_are_drawn_by_their_weights_whatever_rows_are_cut(count: int, twice: bool) -> None:
    weights = torch.tensor([0.5, 0.3, 0.2, 0.0]).expand(4000, 4)

    def drawn(start: int, rows: int) -> torch.Tensor:
        a = {"self": weights[start : start + rows], "num_samples": count, "replacement": twice}
        box = Box((start, 0), (rows, count))
        return draw("aten.multinomial.default", a, key=KEY, box=box, shape=(4000, count), dtype=torch.int64)[0]

    whole = drawn(0, 4000)
    assert torch.equal(drawn(1000, 700), whole[1000:1700])
    if count == 1 or twice:
        shares = torch.bincount(whole.flatten(), minlength=4) / whole.numel()
        torch.testing.assert_close(shares, weights[0], rtol=0, atol=0.03)
    else:
        assert whole.sort(-1).values[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "arguments", "mean"),
    [
        ("exponential.default", {"lambd": 4.0}, 0.25), ("geometric.default", {"p": 0.25}, 4.0), ("random.from", {"from": 2, "to": 7}, 4.0),
        ("log_normal.default", {"mean": 0.5, "std": 0.5}, math.exp(0.625)), ("normal_functional.default", {"mean": -1.0, "std": 2.0}, -1.0),
    ],
)  # fmt: skip
def test_distributions_have_their_means(name: str, arguments: dict[str, Any], mean: float) -> None:
    box = Box((0, 0), (300, 300))
    (made,) = draw(f"aten.{name}", {"self": torch.empty(300, 300), **arguments}, key=KEY, box=box, shape=box.length, dtype=torch.float32)
    assert bool(made.isfinite().all())
    assert abs(float(made.mean()) - mean) < 0.03


def test_numbers_are_spread_evenly_and_differ_by_key() -> None:
    shape = (400, 500)
    box = Box((0, 0), shape)
    made = [uniform(key_of(seed, step, number), box, shape) for seed, step, number in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    for numbers in made:
        counts = torch.histc(numbers, 20, 0, 1) / numbers.numel()
        assert float(numbers.min()) >= 0
        assert float(numbers.max()) < 1
        assert float((counts - 0.05).abs().max()) < 0.002  # four deviations
        rows = numbers - 0.5
        assert abs(float((rows[:-1] * rows[1:]).mean())) < 0.001
        assert abs(float((rows[:, :-1] * rows[:, 1:]).mean())) < 0.001
    for k, one in enumerate(made):
        for two in made[k + 1 :]:
            assert abs(float(((one - 0.5) * (two - 0.5)).mean())) < 0.001


def test_normal_numbers_have_their_mean_and_deviation() -> None:
    shape = (400, 500)
    for dtype in (torch.float32, torch.complex64):
        a = {"self": torch.empty(shape, dtype=dtype)}
        (made,) = draw("aten.randn_like.default", a, key=KEY, box=Box((0, 0), shape), shape=shape, dtype=dtype)
        assert abs(complex(made.mean())) < 0.01
        assert abs(float(made.abs().square().mean()) - 1) < 0.01
        assert bool(made.isfinite().all())


def test_the_plain_model_draws_the_same_under_the_same_seed_only() -> None:
    x = torch.ones(64, 64)
    with Unsharded(3):
        one = F.dropout(x, 0.5), torch.rand(4), F.dropout(x, 0.1)
    with Unsharded(3):
        two = F.dropout(x, 0.5), torch.rand(4), F.dropout(x, 0.1)
    with Unsharded(3, step=1):
        later = F.dropout(x, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[0], later)
    assert abs(float((one[0] == 0).float().mean()) - 0.5) < 0.05
    assert abs(float((one[2] == 0).float().mean()) - 0.1) < 0.05


def test_what_checkpointing_executes_again_draws_what_it_drew() -> None:
    x, w = torch.ones(20, 20), torch.ones(20, 20, requires_grad=True)
    with Unsharded(3) as random:
        first = F.dropout(x, 0.5)
        y = checkpoint(lambda a: F.dropout(a * w, 0.5), first, use_reentrant=False)
        y.sum().backward()
    assert torch.equal(w.grad != 0, y != 0)
    assert random.drawn == [(20, 20)] * 2


def test_other_draws_are_made_whole_from_the_same_seed() -> None:
    a = {"self": torch.full((6, 4), 3.0), "generator": None}
    box = Box((0, 0), (6, 4))
    one, two = (draw("aten.poisson.default", a, key=KEY, box=box, shape=(6, 4), dtype=torch.float32)[0] for _ in range(2))
    state = torch.get_rng_state()
    with Unsharded(1):
        torch.poisson(a["self"])
    assert torch.equal(one, two)
    assert torch.equal(one, one.round())
    torch.set_rng_state(state)
