"""A Llama as torch's tensor-parallel tutorial writes it, with modules that the tutorial's styles fit; small, for traces and real runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, HIDDEN, WORDS, BATCH, LENGTH, LAYERS = 16, 4, 32, 64, 8, 8, 2


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).view(BATCH, LENGTH, -1, WIDTH // HEADS).transpose(1, 2) for m in (self.wq, self.wk, self.wv))
        y = torch.softmax(q @ k.transpose(2, 3) / 2, dim=-1) @ v
        return self.wo(y.transpose(1, 2).reshape(BATCH, LENGTH, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(), Attention()
        self.ffn_norm, self.feed_forward = RMSNorm(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = RMSNorm(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.output(self.norm(x)).view(-1, WORDS), labels.view(-1))


def build() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """An entry point."""
    return Llama(), {"tokens": torch.randint(WORDS, (BATCH, LENGTH)), "labels": torch.randint(WORDS, (BATCH, LENGTH))}


TENSOR = """{
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.attention.wq": ColwiseParallel(), "layers.*.attention.wk": ColwiseParallel(), "layers.*.attention.wv": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(),
    "layers.*.feed_forward.w1": ColwiseParallel(), "layers.*.feed_forward.w3": ColwiseParallel(),
    "layers.*.feed_forward.w2": RowwiseParallel(),
    "output": ColwiseParallel(output_layouts=Replicate()),
}"""
"""The tutorial's plan for tensor parallelism."""

SEQUENCE = """{
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.attention_norm": SequenceParallel(),
    "layers.*.attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "layers.*.attention.wq": ColwiseParallel(), "layers.*.attention.wk": ColwiseParallel(), "layers.*.attention.wv": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.ffn_norm": SequenceParallel(),
    "layers.*.feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "layers.*.feed_forward.w1": ColwiseParallel(), "layers.*.feed_forward.w3": ColwiseParallel(),
    "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}"""
"""The tutorial's plan with sequence parallelism."""

APART = """{
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.attention_norm": SequenceParallel(),
    "layers.*.attention.wq": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.attention.wk": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.attention.wv": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.ffn_norm": SequenceParallel(use_local_output=True),
    "layers.*.feed_forward.w1": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.feed_forward.w3": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}"""
"""Sequence parallelism where every projection gathers for itself."""
