"""What models of every kind of attention plan to: step time, peak memory and collectives, one row a model.

    python experiments/attention.py [ROW ...] [--markdown experiments/attention.md] [--label after]

A row is one function below: it makes a model at published sizes, on fake tensors, and plans it. Rows are kept in a file under the label
that is given, so that the same rows of two versions of the library stand side by side: run it with the older one on the path, too
(``--label before``). What an older version refuses is said in its row.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from solver_shard import Plan, SolverShardError, optimize, trace

FOLDER = Path(__file__).resolve().parent
BATCH, SEQ = 16, 4096


def planned(model: nn.Module, inputs: dict[str, Any], *, name: str, mesh: str, memory: str = "74GiB", **options: Any) -> Plan:
    """The plan of a training step whose loss is the sum of what the model returns, in bf16 on H100."""
    program = trace(model, inputs, name=name, loss_fn=lambda y: y.float().sum())
    return optimize(program, mesh=mesh, cluster="h100", memory=memory, time_limit=60, workers=1, **options)


def columns(plan: Plan) -> dict[str, Any]:
    """What a row says of a plan."""
    moves: Counter[str] = Counter()
    for reshard in plan.reshards:
        moves.update(step.kind for step in reshard.steps)
    attention = [op for op in plan.ops if any(word in op.name for word in ("attention", "softmax"))]
    return {
        "time_us": round(plan.costs.total_ns / 1e3, 1),
        "peak_gib": round(plan.memory.peak / 2**30, 3),
        "collectives": ", ".join(f"{count} {kind}" for kind, count in sorted(moves.items())) or "none",
        "attention_us": round(sum(op.nanoseconds for op in attention) / 1e3, 1),
        "gap": f"{plan.certificate.gap:.2%}",
    }


# Attention.


class Attention(nn.Module):
    """Projections around one call of attention: ``attend(query, key, value)``, heads by sequence."""

    def __init__(self, attend: Callable[..., torch.Tensor], *, heads: int, kv: int, keys: int, values: int, hidden: int = 4096) -> None:
        super().__init__()
        self.heads, self.kv, self.attend = heads, kv, attend
        sizes = (heads * keys, kv * keys, kv * values)
        self.q, self.k, self.v = (nn.Linear(hidden, size, bias=False) for size in sizes)
        self.o = nn.Linear(heads * values, hidden, bias=False)
        self.bias = nn.Parameter(torch.empty(1, heads, SEQ, SEQ)) if getattr(attend, "learned", False) else None

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        parts = ((self.q, self.heads), (self.k, self.kv), (self.v, self.kv))
        q, k, v = (layer(x).unflatten(-1, (count, -1)).transpose(1, 2) for layer, count in parts)
        return x + self.o(self.attend(self, q, k, v, words).transpose(1, 2).flatten(2))


def attention_row(attend: Callable[..., torch.Tensor], *, mesh: str = "dp=2,tp=4", **sizes: int) -> Plan:
    with torch.device("meta"):
        model = Attention(attend, **sizes).bfloat16()
        x = torch.empty(BATCH, SEQ, sizes.get("hidden", 4096), dtype=torch.bfloat16)
        words = torch.empty(BATCH, SEQ, dtype=torch.int64)
    return planned(model, {"x": x, "words": words}, name="attention", mesh=mesh)


def latent_attention() -> Plan:
    """Latent attention of DeepSeek-V3's sizes: 128 heads, 192 wide for queries and keys, 128 for values."""

    def attend(_model: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _words: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention_row(attend, heads=128, kv=128, keys=192, values=128, hidden=7168)


def learned_mask() -> Plan:
    """A learned bias of every head and pair of words, as relative positions give it (32 heads of 128)."""

    def attend(model: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _words: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=model.bias)

    attend.learned = True  # type: ignore[attr-defined]
    return attention_row(attend, heads=32, kv=32, keys=128, values=128)


def packed_documents() -> Plan:
    """``flex_attention`` of packed documents, as torchtitan's Llama 3 calls it (32 heads, 8 of keys and values)."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

    def attend(_model: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        number = (words == 0).cumsum(1)
        mask = and_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: number[b, q] == number[b, kv])
        blocks = create_block_mask(mask, len(q), None, SEQ, SEQ, device=q.device)
        made: torch.Tensor = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
        return made

    return attention_row(attend, heads=32, kv=8, keys=128, values=128)


def _windowed(window: int, cap: float | None) -> Plan:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def attend(_model: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _words: torch.Tensor) -> torch.Tensor:
        blocks = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < window), None, None, SEQ, SEQ, device=q.device)
        score = None if cap is None else lambda score, *_: cap * torch.tanh(score / cap)
        made: torch.Tensor = flex_attention(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=True)
        return made

    return attention_row(attend, heads=32, kv=8, keys=128, values=128)


def sliding_window() -> Plan:
    """The same in a causal window of 512 of 4,096 words with a soft cap: an eighth of the pairs."""
    return _windowed(512, 50.0)


def _config(config: dict[str, Any], mesh: str, *, batch: int = BATCH, seq: int = SEQ) -> Plan:
    from solver_shard.tracing.huggingface import load

    model, inputs, name = load(config, batch=batch, seq=seq, dtype="bf16")
    program = trace(model, inputs, name=name)
    return optimize(program, mesh=mesh, cluster="h100", memory="74GiB", time_limit=60, workers=1)


def gpt_oss() -> Plan:
    """Two layers of gpt-oss-20b: attention sinks, windows of 128 words in every other layer."""
    return _config({"model_type": "gpt_oss", "num_hidden_layers": 2, "num_local_experts": 32, "attention_dropout": 0.0}, "dp=4,tp=2")


def gemma2() -> Plan:
    """Two layers of Gemma-2-9B: soft caps of 50, windows of 4,096 words in every other layer."""
    sizes = {"hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256}
    return _config({"model_type": "gemma2", "num_hidden_layers": 2, "vocab_size": 256000, **sizes}, "dp=4,tp=2", seq=8192, batch=8)


ROWS: dict[str, Callable[[], Plan]] = {
    function.__name__: function for function in (latent_attention, learned_mask, packed_documents, sliding_window, gpt_oss, gemma2)
}


# The record.


def study(name: str) -> dict[str, Any]:
    start = time.process_time()
    try:
        found = columns(ROWS[name]())
    except SolverShardError as error:
        found = {"refused": " ".join(str(error).split())[:240]}
    return {"row": name, **found, "cpu_s": round(time.process_time() - start, 1)}


def markdown(kept: list[dict[str, Any]]) -> str:
    """One line a row and label."""
    latest = {(row["row"], row["label"]): row for row in kept}
    lines = [
        str(__doc__).split("\n\n")[0],
        "",
        f"torch {torch.__version__}; made by `python experiments/attention.py`, which says what each model is. All in bf16 on H100.",
        "",
        "| model | version | step | attention | peak | collectives | gap |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, function in ROWS.items():
        for label in dict.fromkeys(row["label"] for row in kept):
            row = latest.get((name, label))
            if row is None:
                continue
            what = str(function.__doc__).split(":")[0].rstrip(".")
            if "refused" in row:
                cells = [what, label, "does not plan: " + row["refused"].replace("|", "/"), *("-",) * 4]
            else:
                times = [f"{row[key] / 1e3:.2f} ms" for key in ("time_us", "attention_us")]
                cells = [what, label, *times, f"{row['peak_gib']:.2f} GiB", row["collectives"], row["gap"]]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", nargs="*", help="default: all")
    parser.add_argument("--results", type=Path, default=FOLDER / "attention.jsonl")
    parser.add_argument("--label", default="after", help="which version of the library this is")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    options = parser.parse_args()
    for name in options.row or ROWS:
        row = study(name) | {"label": options.label}
        print(json.dumps(row), flush=True)
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    kept = [json.loads(line) for line in options.results.read_text(encoding="utf-8").splitlines()]
    if options.markdown:
        options.markdown.write_text(markdown(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
