"""Ops of a mixture of experts on real tensors: rows sorted by expert inside each sequence.

>>> rows, weights = torch.ones(1, 3, 2), torch.stack([torch.eye(2), 2 * torch.eye(2)])
>>> row_products(rows, weights, torch.tensor([[1, 3]]))[0, :, 0].tolist()
[1.0, 2.0, 2.0]
"""

from __future__ import annotations

import torch


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
