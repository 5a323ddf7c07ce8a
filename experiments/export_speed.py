"""How long a step of an applied plan takes beside the plain module's, on one process.

    python experiments/export_speed.py --markdown experiments/export_speed.md

A GPT of two layers, forward and backward, in one process that is the whole mesh, so that what is measured is the runtime's own
work: both run the same kernels. Time is that of the processor in this process, and steps alternate, so that what else the machine
does hardly counts; the ratio of the medians does. Any plan does, for on one device every tensor is whole.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from solver_shard import apply, optimize
from solver_shard.runtime.apply import runtime_of


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = (t.view(b, s, self.heads, w // self.heads).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Two layers, a tied head, cross entropy."""

    def __init__(self, vocab: int, width: int, heads: int, seq: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


SIZES = {"tiny": (256, 64, 4, 32, 2), "small": (512, 128, 4, 64, 4), "medium": (2048, 256, 8, 128, 8)}
"""Vocabulary, width, heads, tokens and sequences."""


def measured(size: str, rounds: int) -> tuple[str, float]:
    """A row of the table, and the ratio."""
    vocab, width, heads, seq, batch = SIZES[size]
    torch.manual_seed(0)
    model = GPT(vocab, width, heads, seq)
    ids = torch.randint(0, vocab, (batch, seq))
    inputs = {"ids": ids, "labels": ids.clone()}
    start = time.perf_counter()
    plan = optimize(model, inputs, mesh="dp=1", time_limit=20)
    planned = time.perf_counter()
    sharded = apply(model, plan, dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
    applied = time.perf_counter() - planned
    step = runtime_of(sharded).step
    times: dict[str, list[float]] = {"plain": [], "applied": []}
    runs = {"plain": model, "applied": sharded}
    for k in range(rounds + 3):
        for name, module in runs.items():
            module.zero_grad()
            begin = time.process_time()
            module(**inputs).backward()
            if k >= 3:
                times[name].append(time.process_time() - begin)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(sharded.get_parameter(name).grad.full_tensor(), parameter.grad, rtol=1e-3, atol=1e-5)
    plain, ours = (statistics.median(times[name]) * 1e3 for name in runs)
    instructions = len(step.ahead) + len(step.back)
    print(f"{size}: plan {planned - start:.1f} s, apply {applied:.1f} s", flush=True)
    return f"| {size} | {len(plan.ops)} | {instructions} | {plain:.2f} | {ours:.2f} | {ours / plain:.2f} |", ours / plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help=", ".join(SIZES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = [measured(size, options.rounds) for size in options.sizes or SIZES]
    dist.destroy_process_group()
    text = "\n".join(
        ["| GPT | ops | instructions | plain ms | applied ms | ratio |", "|---|---|---|---|---|---|", *(row for row, _ in rows)]
    )
    print(text)
    if options.markdown:
        options.markdown.write_text(
            "# A step of an applied plan beside the plain module's\n\nBy `python experiments/export_speed.py --markdown "
            "experiments/export_speed.md`: forward and backward on one process and thread, medians of "
            f"the processor time of {options.rounds} steps taken in turn.\n\n{text}\n"
        )


if __name__ == "__main__":
    main()
