"""Small models of what practitioners meet that was dear, did not fit or was not expressible: time, peak and collectives, before and now.

    python experiments/practitioners.py [WORD ...] [--json now.json] [--before before.json] [--markdown experiments/practitioners.md]

Every row is one function: a model and its inputs, at full size on the meta device, or small with values. The full one is planned, the small
one planned on four devices and verified (numbers and collectives, all devices simulated). ``--before`` has the rows of an older version:
what ``--json`` wrote when this script ran with that version's package on its path.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

import solver_shard
from solver_shard import SolverShardError


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is planned: ``make(small)`` gives the model and its inputs."""

    name: str
    make: Callable[[bool], tuple[nn.Module, dict[str, torch.Tensor]]]
    mesh: str = "d=8"
    options: dict[str, Any] = field(default_factory=dict)


CASES: list[Case] = []

Made = tuple[nn.Module, dict[str, torch.Tensor]]


def case(name: str, mesh: str = "d=8", **options: Any) -> Callable[[Callable[[bool], Made]], Callable[[bool], Made]]:
    """A row of the table."""

    def add(make: Callable[[bool], Made]) -> Callable[[bool], Made]:
        CASES.append(Case(name=name, make=make, mesh=mesh, options=options))
        return make

    return add


# Caches that a decode step writes into.


class Decode(nn.Module):
    """Attention of one new token over a cache, which is a buffer or an input."""

    def __init__(self, write: Callable[..., None], batch: int, heads: int, length: int, dim: int, *, given: bool) -> None:
        super().__init__()
        self.write, self.heads, self.dim = write, heads, dim
        self.q, self.k, self.v, self.o = (nn.Linear(heads * dim, heads * dim, bias=False) for _ in range(4))
        if not given:
            self.register_buffer("keys", torch.zeros(batch, heads, length, dim))
            self.register_buffer("values", torch.zeros(batch, heads, length, dim))

    def forward(self, x: torch.Tensor, at: torch.Tensor, keys: Any = None, values: Any = None) -> torch.Tensor:
        keys = self.keys if keys is None else keys
        values = self.values if values is None else values
        q, k, v = (m(x).reshape(len(x), 1, self.heads, self.dim).transpose(1, 2) for m in (self.q, self.k, self.v))
        self.write(keys, at, k)
        self.write(values, at, v)
        scores = (q @ keys.transpose(-1, -2) / self.dim**0.5).softmax(-1)
        return self.o((scores @ values).transpose(1, 2).reshape(len(x), 1, -1))


def by_index_copy(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> None:
    cache.index_copy_(2, at, new)


def by_index_put(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> None:
    cache[:, :, at] = new


def decode(write: Callable[..., None], small: bool, *, given: bool) -> Made:
    batch, heads, length, dim = (4, 4, 8, 8) if small else (32, 16, 4096, 128)
    inputs = {"x": torch.randn(batch, 1, heads * dim), "at": torch.tensor([5])}
    if given:
        inputs |= {name: torch.randn(batch, heads, length, dim) for name in ("keys", "values")}
    return Decode(write, batch, heads, length, dim, given=given).eval(), inputs


@case("static cache, a buffer, by index_put", forward_only=True)
def cache_put(small: bool) -> Made:
    return decode(by_index_put, small, given=False)


@case("static cache, a buffer, by index_copy", forward_only=True)
def cache_copy(small: bool) -> Made:
    return decode(by_index_copy, small, given=False)


@case("static cache, an input, by index_copy", forward_only=True)
def cache_given(small: bool) -> Made:
    return decode(by_index_copy, small, given=True)


# Losses of wide outputs.


class Loss(nn.Module):
    """A loss between a linear layer's outputs and targets."""

    def __init__(self, loss: Callable[..., torch.Tensor], hidden: int, width: int) -> None:
        super().__init__()
        self.loss, self.head = loss, nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(x), y)


def wide_loss(loss: Callable[..., torch.Tensor], small: bool) -> Made:
    rows, hidden, width = (8, 16, 24) if small else (8192, 1024, 65536)
    return Loss(loss, hidden, width), {"x": torch.randn(rows, hidden), "y": torch.rand(rows, width)}


@case("mse_loss of [8192, 65536]")
def mse(small: bool) -> Made:
    return wide_loss(F.mse_loss, small)


@case("smooth_l1_loss of [8192, 65536]")
def smooth(small: bool) -> Made:
    return wide_loss(F.smooth_l1_loss, small)


@case("huber_loss of [8192, 65536]")
def huber(small: bool) -> Made:
    return wide_loss(F.huber_loss, small)


@case("soft_margin_loss of [8192, 65536]")
def soft_margin(small: bool) -> Made:
    return wide_loss(F.soft_margin_loss, small)


@case("binary_cross_entropy_with_logits of [8192, 65536]")
def binary(small: bool) -> Made:
    return wide_loss(F.binary_cross_entropy_with_logits, small)


@case("l1_loss of [8192, 65536]")
def absolute(small: bool) -> Made:
    return wide_loss(F.l1_loss, small)


class Preference(nn.Module):
    """Log-probabilities of the tokens of a chosen and a rejected answer (DPO without its reference)."""

    def __init__(self, hidden: int, words: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden, words, bias=False)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        found = self.head(x).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1).sum(-1)
        chosen, rejected = found.chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


@case("DPO: log-probabilities by gather, 128k words, tp=8", mesh="tp=8")
def preference(small: bool) -> Made:
    batch, length, hidden, words = (4, 6, 16, 24) if small else (4, 2048, 4096, 128256)
    dtype = torch.float32 if small else torch.bfloat16
    tokens = torch.randint(words, (batch, length))
    return Preference(hidden, words).to(dtype), {"x": torch.randn(batch, length, hidden, dtype=dtype), "tokens": tokens}


# Recommenders, vision and language, graphs, distances.


class Bags(nn.Module):
    """Sums of the rows of several tables, and a layer over them."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.top = nn.Linear(tables * width, 1)

    def forward(self, indices: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = torch.cat([table(indices[k]) for k, table in enumerate(self.tables)], -1)
        return F.binary_cross_entropy_with_logits(self.top(found).squeeze(-1), y)


@case("embedding bags, 4 tables of 10M rows", optimizer="sgd")
def bags(small: bool) -> Made:
    tables, rows, width, batch, each = (2, 40, 8, 8, 3) if small else (4, 10_000_000, 128, 16384, 16)
    return Bags(tables, rows, width), {"indices": torch.randint(rows, (tables, batch, each)), "y": torch.rand(batch)}


class Vision(nn.Module):
    """Image features in place of the tokens that stand for them, then a layer."""

    def __init__(self, words: int, hidden: int) -> None:
        super().__init__()
        self.tokens, self.project, self.up = nn.Embedding(words, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 4 * hidden)

    def forward(self, ids: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        mask = (ids == 3).unsqueeze(-1).expand_as(x)
        return self.up(x.masked_scatter(mask, self.project(image))).square().mean()


@case("vision and language: masked_scatter of image features")
def vision(small: bool) -> Made:
    words, hidden, batch, length, rows = (32, 16, 4, 6, 24) if small else (32000, 4096, 16, 2048, 9216)
    return Vision(words, hidden), {"ids": torch.randint(8, (batch, length)), "image": torch.randn(rows, hidden)}


class Messages(nn.Module):
    """Means over the edges that end in a node."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        sent = self.message(x).index_select(0, source)
        index = target.unsqueeze(-1).expand_as(sent)
        mean = torch.zeros_like(x).scatter_reduce(0, index, sent, "mean", include_self=False)
        return self.update(mean).square().mean()


@case("graph: means of messages by scatter_reduce")
def graph(small: bool) -> Made:
    nodes, edges, hidden = (12, 40, 8) if small else (100_000, 2_000_000, 256)
    return Messages(hidden), {
        "x": torch.randn(nodes, hidden),
        "source": torch.randint(nodes, (edges,)),
        "target": torch.randint(nodes, (edges,)),
    }


class Distances(nn.Module):
    """A contrastive loss of distances between all pairs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.relu(1 - torch.cdist(self.embed(x), self.embed(y))).mean()


@case("distances of all pairs by cdist")
def distances(small: bool) -> Made:
    rows, width = (12, 8) if small else (16384, 256)
    return Distances(width), {"x": torch.randn(rows, width), "y": torch.randn(rows, width)}


class Buckets(nn.Module):
    """Numbers by the embedding of their bucket."""

    def __init__(self, steps: int, width: int) -> None:
        super().__init__()
        self.register_buffer("steps", torch.linspace(-3, 3, steps))
        self.rows, self.top = nn.Embedding(steps + 1, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.rows(torch.searchsorted(self.steps, x))).square().mean()


@case("numbers in buckets by searchsorted")
def buckets(small: bool) -> Made:
    steps, width, rows = (9, 8, 12) if small else (4096, 64, 8_388_608)
    return Buckets(steps, width), {"x": torch.randn(rows)}


class Frames(nn.Module):
    """Overlapping windows of a signal, and a filter bank over them."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.size, self.filters = size, nn.Linear(size, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.filters(x.unfold(1, self.size, self.size // 2)).square().mean()


@case("frames of a signal by unfold")
def frames(small: bool) -> Made:
    batch, length, size, width = (8, 40, 8, 8) if small else (256, 480_000, 400, 512)
    return Frames(size, width), {"x": torch.randn(batch, length)}


class Crossed(nn.Module):
    """Attention with a mask of zeros, as T5's over what its encoder made."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.q, self.kv, self.o = heads, nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        k, v = self.kv(made).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q(x), k, v))
        bias = torch.zeros(1, self.heads, x.shape[1], made.shape[1], dtype=x.dtype, device=x.device)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.o(found.transpose(1, 2).flatten(2)).square().mean()


@case("attention over an encoder with a mask of zeros (T5), 4096 tokens, 32 heads")
def zeros(small: bool) -> Made:
    batch, length, width, heads = (4, 6, 16, 4) if small else (8, 4096, 2048, 32)
    dtype = torch.float32 if small else torch.bfloat16
    return Crossed(width, heads).to(dtype), {name: torch.randn(batch, length, width, dtype=dtype) for name in ("x", "made")}


# Attention that the CPU has no kernel of.


class Heads(nn.Module):
    """Projections around one call of attention: ``attend(model, query, key, value, words)``, heads by sequence."""

    def __init__(
        self, attend: Callable[..., torch.Tensor], hidden: int, length: int, *, heads: int, kv: int, keys: int, values: int
    ) -> None:
        super().__init__()
        self.attend, self.heads, self.kv = attend, heads, kv
        self.q, self.k, self.v = (nn.Linear(hidden, size, bias=False) for size in (heads * keys, kv * keys, kv * values))
        self.o = nn.Linear(heads * values, hidden, bias=False)
        self.bias = nn.Parameter(torch.randn(1, heads, length, length)) if attend is learned_bias else None

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        parts = ((self.q, self.heads), (self.k, self.kv), (self.v, self.kv))
        q, k, v = (layer(x).unflatten(-1, (count, -1)).transpose(1, 2) for layer, count in parts)
        return (x + self.o(self.attend(self, q, k, v, words).transpose(1, 2).flatten(2))).float().square().mean()


def latent(_: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _words: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def learned_bias(model: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _words: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=model.bias)


def packed(_: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    number, length = (words == 0).cumsum(1), q.shape[2]
    mask = and_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: number[b, q] == number[b, kv])
    blocks = create_block_mask(mask, len(q), None, length, length, device=q.device)
    made: torch.Tensor = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
    return made


def windowed(_: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _words: torch.Tensor) -> torch.Tensor:
    length = q.shape[2]
    blocks = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < length // 8), None, None, length, length, device=q.device)
    cap = 50.0
    made: torch.Tensor = flex_attention(q, k, v, score_mod=lambda s, *_: cap * torch.tanh(s / cap), block_mask=blocks, enable_gqa=True)
    return made


def attention(attend: Callable[..., torch.Tensor], small: bool, hidden: int, **sizes: int) -> Made:
    batch, length, hidden = (4, 8, 16) if small else (16, 4096, hidden)
    sizes = {"heads": 4, "kv": 4 * sizes["kv"] // sizes["heads"], "keys": 6, "values": 4} if small else sizes
    model = Heads(attend, hidden, length, **sizes)
    x = torch.randn(batch, length, hidden)
    words = torch.randint(4, (batch, length))
    return (model, {"x": x, "words": words}) if small else (model.bfloat16(), {"x": x.bfloat16(), "words": words})


@case("latent attention, 128 heads of 192 and 128")
def latent_attention(small: bool) -> Made:
    return attention(latent, small, 7168, heads=128, kv=128, keys=192, values=128)


@case("attention with a learned mask of every head, 32 heads of 128")
def masked_attention(small: bool) -> Made:
    return attention(learned_bias, small, 4096, heads=32, kv=32, keys=128, values=128)


@case("flex_attention over packed documents, 32 heads, 8 of keys")
def packed_documents(small: bool) -> Made:
    return attention(packed, small, 4096, heads=32, kv=8, keys=128, values=128)


@case("flex_attention with a soft cap in a window of 512 of 4,096 words")
def capped_window(small: bool) -> Made:
    return attention(windowed, small, 4096, heads=32, kv=8, keys=128, values=128)


def full(case: Case) -> dict[str, Any]:
    """The plan at full size."""
    with torch.device("meta"):
        model, inputs = case.make(False)
    row: dict[str, Any] = {"case": case.name, "mesh": case.mesh}
    start = time.perf_counter()
    try:
        plan = solver_shard.optimize(model, inputs, mesh=case.mesh, cluster="h100", progress=None, **case.options)
    except SolverShardError as error:
        return row | {"failed": f"{type(error).__name__}: {error}"}
    ran = [c for c in plan.collectives() if c.nbytes]
    return row | {
        "ns": plan.costs.total_ns,
        "peak": plan.memory.peak,
        "collectives": sum(c.runs for c in ran),
        "bytes": sum(c.runs * c.nbytes for c in ran),
        "fallbacks": sorted({op.name for op in plan.ops if op.source == "fallback"}),
        "seconds": round(time.perf_counter() - start, 1),
    }


def holds(case: Case) -> str:
    """What verify says of the small one on four devices, planned for the least memory, so that everything is cut."""
    torch.manual_seed(0)
    model, inputs = case.make(True)
    options = {**case.options, "objective": "memory"}
    plan = solver_shard.optimize(model, inputs, mesh="d=4", cluster="h100", progress=None, **options)
    verdict = solver_shard.verify(plan, model, inputs)
    return "holds" if verdict.holds else f"DOES NOT HOLD: {verdict.problem or verdict}"


def markdown(rows: list[dict[str, Any]], before: dict[str, dict[str, Any]]) -> str:
    """The record."""
    lines = [
        __doc__.split("\n\n")[0],
        "",
        f"torch {torch.__version__}. Made by `python experiments/practitioners.py`; before: commit a6423e8. H100s, one step. Small twins",
        "of all rows are verified on four devices.",
        "",
        "| what | mesh | before: time, peak, collectives | now: time, peak, collectives | without a rule before | verify |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        old = before.get(row["case"], {})
        lines.append(
            f"| {row['case']} | {row['mesh']} | {_figures(old)} | {_figures(row)} | {', '.join(old.get('fallbacks', [])) or 'none'} "
            f"| {row.get('verify', '')} |"
        )
    return "\n".join([*lines, ""])


def _figures(row: dict[str, Any]) -> str:
    if not row or "failed" in row:
        return str(row.get("failed", "-"))[:120].replace("|", "/")
    ms, gib = row["ns"] / 1e6, row["peak"] / 2**30
    return f"{ms:.3g} ms, {gib:.2f} GiB, {row['collectives']} of {row['bytes'] / 2**20:,.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="*", help="rows whose name has one of these words; default all")
    parser.add_argument("--json", type=Path, help="write the figures here, for a later --before")
    parser.add_argument("--before", type=Path, help="figures of an older version")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--no-verify", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for found in CASES:
        if options.word and not any(word in found.name for word in options.word):
            continue
        rows.append(full(found) | ({} if options.no_verify else {"verify": holds(found)}))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if options.markdown:
        before = json.loads(options.before.read_text(encoding="utf-8")) if options.before else []
        options.markdown.write_text(markdown(rows, {row["case"]: row for row in before}), encoding="utf-8")
    sys.exit(any(row.get("verify", "holds") != "holds" for row in rows))


if __name__ == "__main__":
    main()
