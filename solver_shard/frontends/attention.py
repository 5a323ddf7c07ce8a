"""Attention with dropout, or with values narrower than its keys, as the fused op that a GPU runs.

On the CPU, torch has no fused attention for these and falls back to scores of [batch, heads, query, key] elements, which an accelerator
never stores. While a model is traced, such calls become the fused op, dropout as its argument. Narrower values (latent attention: keys
of 192, values of 128 elements per head) are filled up with zeros, whose results are dropped, as FlashAttention's callers do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class FusedAttention(TorchFunctionMode):  # type: ignore[misc]  # torch is not checked
    """While active, scaled_dot_product_attention is one op where its operands allow it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ATTENTION:
            fused = _fused(*args, **kwargs)
            if fused is not None:
                return fused
        return func(*args, **kwargs)


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """The fused call, or None where torch makes it by itself or the fused op does not take these operands."""
    if not (query.ndim == key.ndim == value.ndim == 4) or query.shape[-1] < value.shape[-1]:
        return None
    missing = query.shape[-1] - value.shape[-1]
    if missing:
        padded = torch.nn.functional.pad(value, (0, missing))
        found = _fused(query, key, padded, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if found is None:
            found = _ATTENTION(query, key, padded, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return found[..., : value.shape[-1]]
    if dropout_p == 0.0:
        return None
    if attn_mask is not None:
        if attn_mask.requires_grad or attn_mask.ndim not in (2, 4):
            return None
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), float("-inf"))
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    result = _FUSED(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    attended: torch.Tensor = result[0]
    return attended
