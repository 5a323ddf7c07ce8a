"""Attention variants of other devices: their rules fit the shapes that PyTorch's meta kernels give."""

from __future__ import annotations

import pytest
import torch
from rules.cases import NAMES, case

from solver_shard.program import Tensor
from solver_shard.rules.rule import Rule
from solver_shard.rules.rulebook import build_rule
from solver_shard.rules.table import load_table

TABLE = load_table()
CAUSAL = {"dropout_p": 0.0, "is_causal": True, "scale": None}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def rule_of(name: str, **arguments: object) -> Rule:
    op = f"aten._scaled_dot_product_{name}.default"
    made = case(op, **arguments)
    found = getattr(torch.ops.aten, op.split(".")[1]).default(**arguments)
    results = [r for r in found if isinstance(r, torch.Tensor)]

    def tensor(name: str, value: torch.Tensor) -> Tensor:
        return Tensor(name=name, shape=tuple(value.shape), dtype=NAMES.get(value.dtype, "i64"))

    return build_rule(
        made.op, [tensor(f"x{i}", v) for i, v in enumerate(made.values)], [tensor(f"y{i}", r) for i, r in enumerate(results)], TABLE
    )


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("flash_attention", {"return_debug_mask": False}),
        ("efficient_attention", {"attn_bias": None, "compute_log_sumexp": True}),
        ("cudnn_attention", {"attn_bias": None, "compute_log_sumexp": True, "return_debug_mask": False}),
    ],
)
def test_forward_on_other_devices(name: str, rest: dict[str, object]) -> None:
    q, k, v = (meta(2, 4, 128, 64) for _ in range(3))
    rule = rule_of(name, query=q, key=k, value=v, **CAUSAL, **rest)
    by_name = {s.name: s for s in rule.strategies()}
    assert list(by_name) == ["R", "batch", "heads", "P(sum):2", "P(avg):2"], "queries are cut where there is code that does it"
    assert [int(p) for p in by_name["heads"].operands] == [1, 1, 1]
    assert [int(p) for p in by_name["heads"].results[:2]] == [1, 1]
    assert all(p.is_replicate for p in by_name["heads"].results[2:]), "seeds and placeholders are alike on every device"


def test_backward_on_other_devices() -> None:
    q, k, v, g, out = (meta(2, 4, 128, 64) for _ in range(5))
    seed = meta(2, dtype=torch.int64)
    rule = rule_of(
        "flash_attention_backward", grad_out=g, query=q, key=k, value=v, out=out, logsumexp=meta(2, 4, 128, dtype=torch.float32),
        cum_seq_q=None, cum_seq_k=None, max_q=128, max_k=128, philox_seed=seed, philox_offset=seed, **CAUSAL,
    )  # fmt: skip
    heads = next(s for s in rule.strategies() if s.name == "heads")
    assert [int(p) for p in heads.operands] == [1, 1, 1, 1, 1, 1, -1]
    assert [int(p) for p in heads.results] == [1, 1, 1]
    masked = rule_of(
        "efficient_attention_backward", grad_out_=g, query=q, key=k, value=v, attn_bias=meta(2, 1, 128, 128), out=out,
        logsumexp=meta(2, 4, 128, dtype=torch.float32), philox_seed=seed, philox_offset=seed,
        grad_input_mask=[True, True, True, False], **CAUSAL,
    )  # fmt: skip
    heads = next(s for s in masked.strategies() if s.name == "heads")
    assert [int(p) for p in heads.operands] == [1, 1, 1, 1, -1, 1, 1, -1]
