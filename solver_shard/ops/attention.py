"""Attention as plain products and a softmax, for devices that lack the kernel of the traced op (which is the CPU's), and with dropout,
for which the CPU has no kernel.

>>> out, sums = forward(query, key, value, mask=None, causal=True, scale=None)
>>> dquery, dkey, dvalue = backward(gradient, query, key, value, out, sums, mask=None, causal=True, scale=None)

Heads by sequence: ``[batch, heads, queries, width]``; ``sums`` are the logarithms of the softmax's denominators, ``[batch, heads,
queries]``, f32 or wider, as the kernel returns them. The matrix of scores is made whole, which flash kernels avoid (Dao et al.,
arXiv:2205.14135, whose backward pass this is, without the tiles).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

FORWARD = ("aten._scaled_dot_product_flash_attention_for_cpu.default",)
BACKWARD = ("aten._scaled_dot_product_flash_attention_for_cpu_backward.default",)
"""The ops that a trace has of attention, and of its backward pass."""


def run(a: Mapping[str, Any], keep: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Attention, or its backward pass, from the op's arguments by name.

    Args:
        keep: which weights dropout leaves, where there is dropout: ``[batch, heads, queries, keys]``.
    """
    options = {"mask": a.get("attn_mask"), "causal": a["is_causal"], "scale": a.get("scale")}
    p = float(a["dropout_p"])
    left = None if keep is None else keep * (1.0 / (1.0 - p) if p < 1.0 else 0.0)
    if "grad_out" in a:
        return backward(a["grad_out"], a["query"], a["key"], a["value"], a["out"], a["logsumexp"], left=left, **options)
    return forward(a["query"], a["key"], a["value"], left=left, **options)


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    left: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attended values, and the logarithms of the sums that they are normalised by.

    Args:
        left: by what dropout multiplies the weights.
    """
    scores = _scores(query, key, mask, causal, scale)
    sums = torch.logsumexp(scores, -1)
    weights = (scores - sums.unsqueeze(-1)).exp()
    weights = weights if left is None else weights * left
    return (weights @ value.to(weights.dtype)).to(query.dtype), sums


def backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    left: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value."""
    weights = (_scores(query, key, mask, causal, scale) - sums.unsqueeze(-1)).exp()
    wide = gradient.to(weights.dtype)
    along = (wide * out.to(weights.dtype)).sum(-1, keepdim=True)
    towards = wide @ value.to(weights.dtype).mT
    slopes = weights * ((towards if left is None else towards * left) - along) * _scale(query, scale)
    weights = weights if left is None else weights * left
    made = slopes @ key.to(weights.dtype), slopes.mT @ query.to(weights.dtype), weights.mT @ wide
    return made[0].to(query.dtype), made[1].to(key.dtype), made[2].to(value.dtype)


def _scores(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float | None) -> torch.Tensor:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = query.to(wide) @ key.to(wide).mT * _scale(query, scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.to(wide)
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
    return scores


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
