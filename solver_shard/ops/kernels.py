"""Kernels written out as plain torch ops: attention, and the products and counts of a mixture of experts.

**Attention** as products and a softmax, for devices that lack the kernel of the traced op (which is the CPU's), and with dropout, for which
the CPU has no kernel.

>>> out, sums = forward(query, key, value, mask=None, causal=True, scale=None)                                   # doctest: +SKIP
>>> dquery, dkey, dvalue = backward(gradient, query, key, value, out, sums, mask=None, causal=True, scale=None)  # doctest: +SKIP

Heads by sequence: ``[batch, heads, queries, width]``; ``sums`` are the logarithms of the softmax's denominators, ``[batch, heads,
queries]``, f32 or wider, as the kernel returns them. The matrix of scores is made whole, which flash kernels avoid (Dao et al.,
arXiv:2205.14135, whose backward pass this is, without the tiles).

**Embedding bags**: torch's kernels leave their further results (the bag of each index, sizes of bags) in shapes and with values that
depend on the dtype and the device, and read them in the backward pass; here they follow from the offsets.

**Experts**: rows are sorted by expert inside each sequence.

>>> rows, weights = torch.ones(1, 3, 2), torch.stack([torch.eye(2), 2 * torch.eye(2)])
>>> row_products(rows, weights, torch.tensor([[1, 3]]))[0, :, 0].tolist()
[1.0, 2.0, 2.0]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Own = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Which of some positions are a device's own, and where in its part; see ``ops.implementations``."""

SUM, MEAN, MAX = range(3)
"""Modes of an embedding bag."""


def bags_of(a: Mapping[str, Any], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bag of every index of an embedding bag, and how many indices each of the ``count`` bags counts, padding left out."""
    indices = a["indices"]
    places = torch.arange(len(indices), dtype=a["offsets"].dtype, device=indices.device)
    bag = torch.searchsorted(a["offsets"][:count].contiguous(), places, right=True) - 1
    sizes = torch.zeros(count, dtype=torch.int64, device=indices.device).index_add(0, bag, (indices != a["padding_idx"]).long())
    return bag, sizes


def bag_results(a: Mapping[str, Any], count: int, shapes: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
    """The further results of a sum or mean of bags: the bag of every index, the sizes of bags, and what only a maximum has."""
    bag, sizes = bags_of(a, count)
    return fitted(bag, shapes[1]), sizes.to(a["offsets"].dtype), sizes.new_zeros(tuple(shapes[3]))


def fitted(found: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A result that torch's kernels leave empty in some cases, in the shape that the trace has for it."""
    return found if tuple(found.shape) == tuple(shape) else found.new_zeros(tuple(shape))


def embedding_bag(a: Mapping[str, Any], count: int, own: Own | None = None, length: int = 0) -> torch.Tensor:
    """Sums or means of the rows of each of the ``count`` bags, or of the ``length`` of them that are a device's own; ``[bags, width]``."""
    weight, indices, scale = a["weight"], a["indices"], a.get("per_sample_weights")
    bag, sizes = bags_of(a, count)
    left_out, at = indices == a["padding_idx"], bag
    if own is not None:
        here, at = own(bag)
        left_out = left_out | ~here
    if own is not None and not length:
        return weight.new_zeros((0, weight.shape[1]))
    rows = weight[indices].masked_fill(left_out.unsqueeze(-1), 0)
    rows = rows if scale is None else rows * scale.unsqueeze(-1)
    rows = rows if a["mode"] == SUM else rows / sizes[bag].clamp(min=1).unsqueeze(-1).to(rows.dtype)
    return weight.new_zeros((count if own is None else length, weight.shape[1])).index_add(0, at, rows)


def embedding_bag_backward(a: Mapping[str, Any], count: int, own: Own | None = None) -> torch.Tensor:
    """The gradient of the table of ``embedding_bag``, from that of all ``count`` bags or of a device's ``own``."""
    gradient, indices, scale = a["grad"], a["indices"], a.get("per_sample_weights")
    bag, sizes = bags_of(a, count)
    if a["scale_grad_by_freq"]:
        scale = 1.0 / torch.bincount(indices, minlength=a["num_weights"])[indices].to(gradient.dtype)
    left_out = indices == a["padding_idx"]
    at = bag
    if own is not None:
        here, at = own(bag)
        left_out = left_out | ~here
    table = gradient.new_zeros((a["num_weights"], gradient.shape[1]))
    if not gradient.shape[0]:
        return table
    rows = gradient[at].masked_fill(left_out.unsqueeze(-1), 0)
    rows = rows if scale is None else rows * scale.unsqueeze(-1)
    rows = rows if a["mode"] == SUM else rows / sizes[bag].clamp(min=1).unsqueeze(-1).to(rows.dtype)
    return table.index_add(0, indices, rows)


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


def row_products(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, first: int = 0) -> torch.Tensor:
    """``rows[b, n, k]`` by the weights of their experts ``[e, k, m]``, the first of which is ``first``; rows of other experts give 0.

    Args:
        ends: ``[b, experts]``, where the rows of each expert end in a sequence.
    """
    made = rows.new_zeros((*rows.shape[:2], weights.shape[2]))
    for b, edges in enumerate(_edges(ends)):
        for e in range(weights.shape[0]):
            start, stop = edges[first + e], edges[first + e + 1]
            made[b, start:stop] = rows[b, start:stop] @ weights[e]
    return made


def weight_products(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, first: int = 0, count: int | None = None) -> torch.Tensor:
    """``left[b, n, k]`` by ``right[b, n, m]``, summed over the rows of each of ``count`` experts from ``first``: ``[count, k, m]``."""
    number = ends.shape[1] if count is None else count
    wide = torch.float64 if left.dtype == torch.float64 else torch.float32
    made = left.new_zeros((number, left.shape[2], right.shape[2]), dtype=wide)
    for b, edges in enumerate(_edges(ends)):
        for e in range(number):
            start, stop = edges[first + e], edges[first + e + 1]
            made[e] += left[b, start:stop].to(wide).T @ right[b, start:stop].to(wide)
    return made.to(left.dtype)


def take(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``source[b, m, ...]`` by ``index[b, n]`` -> ``[b, n, ...]``."""
    return source[torch.arange(source.shape[0], device=source.device).unsqueeze(-1), index]


def count(numbers: torch.Tensor, bins: int) -> torch.Tensor:
    """How often every number below ``bins`` is in each row of ``numbers[b, n]`` -> ``[b, bins]``, of the same dtype."""
    return (numbers.unsqueeze(-1) == torch.arange(bins, device=numbers.device)).sum(1).to(numbers.dtype)


def _edges(ends: torch.Tensor) -> list[list[int]]:
    return [[0, *row] for row in ends.tolist()]
