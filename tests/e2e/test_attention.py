"""Plans of attention that no CPU kernel has give the unsharded step, however batch, heads and queries are cut."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lowered import Lowered, lowered, random_assignment
from torch import nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
from traced_models import squares

from solver_shard.api import optimize
from solver_shard.graph.nodes import OpNode
from solver_shard.verification import check
from solver_shard.verification.subject import Subject, subject_of, widened

pytestmark = pytest.mark.usefixtures("one_thread")


class Heads(nn.Module):
    """Four heads of queries of 6, two of keys, and values of 4 elements, over 8 words."""

    def __init__(self, attend: Callable[..., torch.Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(*sizes) for sizes in ((12, 24), (12, 12), (12, 8), (16, 12)))
        self.bias, self.table = nn.Parameter(torch.randn(4, 8, 8)), nn.Parameter(torch.randn(4, 16))
        self.attend, self.dropout = attend, dropout

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (n, -1)).transpose(1, 2) for layer, n in ((self.q, 4), (self.k, 2), (self.v, 2)))
        return x + self.o(self.attend(self, q, k, v, words).transpose(1, 2).flatten(2))


def latent(model: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, dropout_p=model.dropout)


def learned(model: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=model.bias, enable_gqa=True, dropout_p=model.dropout)


def packed(model: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Documents in a causal window, a soft cap, and a learned number for every distance and head."""
    number = (words == 0).cumsum(1)
    mask = and_masks(lambda b, h, q, kv: (q >= kv) & (q - kv < 6), lambda b, h, q, kv: number[b, q] == number[b, kv])
    blocks = create_block_mask(mask, len(q), None, 8, 8, device=q.device)

    def score(score: Any, _b: Any, h: Any, q: Any, kv: Any) -> Any:
        return 3 * torch.tanh((score + model.table[h, q - kv + 8]) / 3)

    made: torch.Tensor = flex_attention(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=True)
    return made


def capped(_model: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    blocks = create_block_mask(lambda b, h, q, kv: words[b, q] >= words[b, kv], len(q), None, 8, 8, device=q.device)
    made: torch.Tensor = flex_attention(q, k, v, score_mod=lambda s, b, *_: torch.tanh(s) * b, block_mask=blocks, enable_gqa=True)
    return made


MODELS = {
    "latent": lambda: Heads(latent),
    "latent, dropout": lambda: Heads(latent, 0.3),
    "learned": lambda: Heads(learned),
    "learned, dropout": lambda: Heads(learned, 0.3),
    "packed": lambda: Heads(packed),
    "capped": lambda: Heads(capped),
}


@functools.cache
def subject(name: str) -> Subject:
    torch.manual_seed(0)
    words = torch.tensor([[1, 0, 2, 3, 0, 1, 1, 0], [2, 2, 0, 2, 2, 2, 2, 2], [0, 1, 0, 1, 0, 1, 1, 1], [3, 3, 3, 3, 3, 3, 0, 3]])
    return widened(subject_of(MODELS[name](), {"x": torch.zeros(4, 8, 12), "words": words}, name=name, loss_fn=squares))


@functools.cache
def made(name: str) -> Lowered:
    return lowered(subject(name).program, "dp=2,tp=2")


PAIRS = [("latent", "cut-queries"), ("latent, dropout", "heads"), ("learned", "heads"), ("learned, dropout", "cut-queries")]


@pytest.mark.parametrize(("name", "strategy"), [*PAIRS, *(("packed", way) for way in ("batch", "heads", "cut-queries"))])
def test_random_plans_hold(name: str, strategy: str) -> None:
    case, fixed = made(name), {}
    for i, op in enumerate(case.program.ops):
        if "attention" in op.name:
            column = case.lowering.strategies[i]
            options = [k for k in range(len(column.axis_choice)) if strategy in column.names(k)]
            fixed[case.lowering.index[OpNode, i, 0]] = options[len(name) % len(options)]
    assert len(fixed) == 2
    verdict = check(case.plan(random_assignment(case.graph, len(name), fixed)), subject(name))
    assert verdict.holds, str(verdict)
    assert {d.reference for d in verdict.differences} == {"graph", "model"}


def test_functions_of_scores_are_planned_and_hold() -> None:
    plan = optimize(subject("capped").program, mesh="dp=2,tp=2", template="dp=ddp,tp=megatron", gap=0.05)
    assert [op.strategy for op in plan.ops if "attention" in op.name] == [("batch", "heads")] * 2
    assert check(plan, subject("capped")).holds
