"""Draws depend on seed, step, op and place, and on nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from solver_shard.errors import InputError
from solver_shard.export.random import Unsharded, check_drawn, draw, key_of, uniform
from solver_shard.export.shards import Box, boxes
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.program import Op, Ref

SHAPE = (7, 4, 5)
KEY = key_of(1, 2, 3)
WHOLE = Box((0, 0, 0), SHAPE)
OPS = {
    "native_dropout.default": {"input": Ref(0), "p": 0.3, "train": True},
    "bernoulli.p": {"self": Ref(0), "p": 0.3},
    "rand_like.default": {"self": Ref(0)},
    "randn_like.default": {"self": Ref(0)},
    "uniform.default": {"self": Ref(0), "from": -1.0, "to": 3.0},
    "randint_like.default": {"self": Ref(0), "high": 9},
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("layout", ["S(0)S(1)", "S(2)R", "_S(0)S(0)"])
def test_a_shard_draws_its_part_of_the_whole(name: str, layout: str) -> None:
    op = Op(name=f"aten.{name}", operands=(0,), results=(1,), attributes=OPS[name])
    x = torch.randn(SHAPE)
    whole = draw(op, (x,), key=KEY, box=WHOLE, shape=SHAPE, dtype=torch.float32)
    for box in boxes(Layout.parse(layout), SHAPE, Mesh.parse("2,2")):
        here = box.inside(WHOLE)
        for found, value in zip(draw(op, (x[here],), key=KEY, box=box, shape=SHAPE, dtype=torch.float32), whole, strict=True):
            assert torch.equal(found, value[here])


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
    op = Op(name="aten.randn_like.default", operands=(0,), results=(1,), attributes={"self": Ref(0)})
    (made,) = draw(op, (torch.empty(shape),), key=KEY, box=Box((0, 0), shape), shape=shape, dtype=torch.float32)
    assert abs(float(made.mean())) < 0.01
    assert abs(float(made.std()) - 1) < 0.01
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


def test_draws_that_need_the_whole_are_refused() -> None:
    with pytest.raises(InputError, match=r"random op aten.randperm.default \(model\) cannot be drawn shard by shard"):
        check_drawn(Op(name="aten.randperm.default", operands=(), results=(0,), attributes={"n": 4}))
