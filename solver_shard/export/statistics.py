"""Reductions along a cut dim that no pending sum or maximum can say, from small statistics of every row.

Each runs as the implementations in ``export/implementations.py`` do: a generator that yields what is to be all-reduced.

    log-sum-exp          maximum, then sum of exponentials                       class-statistics
    variance, deviation  sum, then squares around the mean                       moment-statistics
    norm of order 2      sum of squares                                          square-statistics
    maximum and where    maximum, then the first position that has it            extreme-statistics
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch

from solver_shard.program import Op

if TYPE_CHECKING:
    from solver_shard.export.implementations import Part

Results = tuple[torch.Tensor, ...]
Running = Generator[tuple[str, torch.Tensor], torch.Tensor, Results]


def log_sum_exp(_op: Op, a: dict[str, Any], _part: Part) -> Running:
    """The maximum keeps the exponentials in range, as in a softmax."""
    x, dim = a["self"], _dim(a)
    wide = x.to(_wide(x))
    bottom = wide.new_full([1 if d == dim else n for d, n in enumerate(x.shape)], float("-inf"))
    top = yield "max", torch.cat([wide, bottom], dim).amax(dim, keepdim=True)
    shift = top.masked_fill(top.isinf(), 0)
    total = yield "sum", (wide - shift).exp().sum(dim, keepdim=True)
    result = total.log() + shift
    return ((result if a.get("keepdim") else result.squeeze(dim)).to(x.dtype),)


def moments(op: Op, a: dict[str, Any], part: Part) -> Running:
    """The mean first, then the squares around it: sums of plain squares lose the variance of numbers far from zero."""
    x, dim = a["self"], _dim(a)
    wide = x.to(_wide(x))
    mean = (yield "sum", wide.sum(dim, keepdim=True)) / part.size
    squares = yield "sum", (wide - mean).square().sum(dim, keepdim=True)
    correction = a.get("correction", 1 if a.get("unbiased", True) else 0)
    found = squares / max(part.size - (1 if correction is None else correction), 0)
    found = found.sqrt() if ".std" in op.name else found
    made = (found, mean) if "var_mean" in op.name else (found,)
    return tuple((t if a.get("keepdim") else t.squeeze(dim)).to(x.dtype) for t in made)


def root_of_squares(_op: Op, a: dict[str, Any], _part: Part) -> Running:
    """Of one dim, or of several."""
    x, dims = a["self"], _dims(a)
    total = yield "sum", x.to(_wide(x)).square().sum(dims, keepdim=True)
    result = total.sqrt()
    return ((result if a.get("keepdim") else result.squeeze(dims)).to(x.dtype),)


def extreme(op: Op, a: dict[str, Any], part: Part) -> Running:
    """The largest (or smallest) value of every row, and the first position that has it; positions win as smaller numbers do."""
    x, dim = a["self"], _dim(a)
    sign = -1 if "min" in op.name else 1
    shape = [1 if d == dim else n for d, n in enumerate(x.shape)]
    lowest = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min + 1
    best = yield "max", torch.cat([sign * x, x.new_full(shape, lowest)], dim).amax(dim, keepdim=True)
    position = torch.arange(part.start, part.start + x.shape[dim]).reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    here = torch.where(sign * x == best, -position, -part.size)
    none = torch.full(shape, -part.size)
    where = -(yield "max", torch.cat([here, none], dim).amax(dim, keepdim=True))
    made = (where,) if "arg" in op.name else (sign * best, where)
    return tuple(t if a.get("keepdim") else t.squeeze(dim) for t in made)


def _dim(a: dict[str, Any]) -> int:
    """The one dim, from the front."""
    dim = a["dim"][0] if isinstance(a["dim"], tuple | list) else a["dim"]
    return int(dim) % int(a["self"].ndim)


def _dims(a: dict[str, Any]) -> tuple[int, ...]:
    """The reduced dims, from the front."""
    rank, dim = a["self"].ndim, a.get("dim")
    return tuple(d % rank for d in dim) if dim else tuple(range(rank))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
