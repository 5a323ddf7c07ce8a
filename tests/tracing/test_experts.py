"""Mixtures of experts are cleaned so that every sequence sorts its own tokens, and only where nothing sees the order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from traced_models import values_of

from solver_shard.ops.run import run
from solver_shard.program import Program
from solver_shard.tracing.torch import trace

Picked = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Experts(nn.Module):
    """Rows are sorted by expert, go through ``inside``, and come back."""

    def __init__(self, after: Callable[[Picked], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.after = after

    def forward(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        flat = experts.reshape(-1)
        order = torch.argsort(flat)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0])
        rows = (x @ self.weight).reshape(-1, 6)[order // experts.shape[2]]
        return self.after((rows, order, inverse))


def names(program: Program) -> Counter[str]:
    return Counter(op.name for op in program.ops)


def traced(after: Callable[[Picked], torch.Tensor], shape: tuple[int, int, int] = (3, 4, 2)) -> Counter[str]:
    """Ops of the step, which must give the model's numbers."""
    torch.manual_seed(0)
    model = Experts(after)
    inputs = {"x": torch.randn(*shape[:2], 6), "experts": torch.randint(4, shape)}
    program = trace(model, inputs, name="experts")
    made = run(program, values_of(program, model, inputs))
    loss = model(**inputs)
    loss.backward()
    torch.testing.assert_close(made[program.outputs[0]], loss.detach())
    (gradient,) = program.gradients.values()
    torch.testing.assert_close(made[gradient], model.weight.grad, rtol=1e-4, atol=1e-4)
    return names(program)


SOUND: dict[str, Callable[[Picked], torch.Tensor]] = {
    "rows come back": lambda p: (p[0].relu()[p[2]] * torch.arange(p[1].shape[0]).unsqueeze(-1)).sum(),
    "scaled by a row": lambda p: ((p[0] * torch.linspace(0, 1, 6)).softmax(-1)[p[2]] ** 2)[1:].sum(),
    "columns apart and together": lambda p: torch.cat([part.tanh() for part in p[0].split(3, 1)], 1)[p[2]].cumsum(0).sum(),
}
SEEN: dict[str, Callable[[Picked], torch.Tensor]] = {
    "by a sum over rows up to each": lambda p: p[0].cumsum(0).pow(2).sum(),
    "by other rows": lambda p: (p[0] * torch.arange(p[1].shape[0]).unsqueeze(-1)).sum(),
    "by a cut of the rows": lambda p: p[0][:5].sum(),
    "as a number": lambda p: (p[1] * 1.0 * p[0].sum()).cumsum(0)[3],
}


@pytest.mark.parametrize("name", SOUND)
def test_tokens_are_sorted_inside_each_sequence(name: str) -> None:
    found = traced(SOUND[name])
    assert found["shard.take.default"] >= 3
    assert not found["aten.index.Tensor"] + found["aten.index_put.default"]


@pytest.mark.parametrize("name", SEEN)
def test_where_something_sees_the_order_the_step_stays_as_it_is(name: str) -> None:
    found = traced(SEEN[name])
    assert not found["shard.take.default"]
    assert found["aten.index.Tensor"]


def test_one_sequence_is_one_list_of_rows() -> None:
    assert traced(SOUND["rows come back"], (1, 5, 2))["shard.take.default"] >= 3


def mixtral(dtype: torch.dtype, batch: int = 4) -> Program:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(config).to(dtype)
        ids = torch.zeros(batch, 8, dtype=torch.long)
    return trace(model, {"input_ids": ids, "labels": ids}, name="mixtral")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixtral_keeps_its_batch_apart_from_the_router_to_the_sum_over_experts(dtype: torch.dtype) -> None:
    program = mixtral(dtype)
    found = names(program)
    assert (found["shard.grouped_mm.default"], found["shard.grouped_mm_weights.default"]) == (2 * 4, 2 * 2)
    assert not [name for name in found if "fallback" in name or "aten._grouped_mm" in name or "index_put" in name]
    inner = {program.tensors[t].shape for op in program.ops if op.module.endswith((".gate", ".experts", ".act_fn")) for t in op.results}
    weights = {(4, 32), (4, 96, 32), (4, 32, 96), (4, 32, 48), (4, 48, 32)}
    assert {shape[0] for shape in inner - weights} == {4}
