"""Kernels written out as plain torch ops: attention, and the products and counts of a mixture of experts.

**Attention** as products and a softmax, for devices that lack the kernel of the traced op (which is the CPU's), and for all that the CPU
has no kernel of: dropout, values of another width than keys, learned masks, functions of scores (:mod:`solver_shard.tracing.attention`).

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

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from solver_shard.tracing.attention import ATTENTION, ATTENTION_BACKWARD, read_function

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


FORWARD = ("aten._scaled_dot_product_flash_attention_for_cpu.default", ATTENTION)
BACKWARD = ("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", ATTENTION_BACKWARD)
"""The ops that a trace has of attention, and of its backward pass."""

Modify = Callable[..., torch.Tensor]
"""Scores, and tensors that the functions of scores read -> scores."""


def run(a: Mapping[str, Any], keep: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Attention, or its backward pass, from the op's arguments by name.

    Args:
        a: with ``start``, the position of the first query, where these are cut.
        keep: which weights dropout leaves, where there is dropout: ``[batch, heads, queries, keys]``.
    """
    buffers = tuple(a.get("buffers") or ())
    options: dict[str, Any] = {"mask": a.get("attn_mask"), "scale": a.get("scale"), "buffers": buffers, "modify": _modify(a)}
    p = float(a["dropout_p"])
    left = None if keep is None else keep * (1.0 / (1.0 - p) if p < 1.0 else 0.0)
    if "grad_out" not in a:
        return forward(a["query"], a["key"], a["value"], left=left, causal=a["is_causal"], start=a.get("start", 0), **options)
    found = backward(
        a["grad_out"], a["query"], a["key"], a["value"], a["out"], a["logsumexp"], left=left, causal=a["is_causal"],
        start=a.get("start", 0), slope=a.get("grad_logsumexp"), wanted=tuple(a.get("wanted") or ()), **options,
    )  # fmt: skip
    return found


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    left: torch.Tensor | None = None,
    start: int = 0,
    buffers: Sequence[torch.Tensor] = (),
    modify: Modify | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attended values, and the logarithms of the sums that they are normalised by; a query that sees no key gets zeros.

    Args:
        key, value: of as many heads as queries have, or of one for each group of them.
        left: by what dropout multiplies the weights.
        start: position of the first query.
        modify: a function of scores, and what it reads.
    """
    scores = _masked(_raw(query, key, scale), mask, causal, start)
    scores = scores if modify is None else modify(scores, *buffers)
    sums = torch.logsumexp(scores, -1)
    weights = _weights(scores, sums)
    weights = weights if left is None else weights * left
    return (weights @ _repeated(value, query).to(weights.dtype)).to(query.dtype), sums


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
    start: int = 0,
    slope: torch.Tensor | None = None,
    wanted: Sequence[bool] = (),
    buffers: Sequence[torch.Tensor] = (),
    modify: Modify | None = None,
) -> tuple[torch.Tensor, ...]:
    """The gradients of query, key and value; then those that are ``wanted`` of the mask and of what the functions of scores read.

    Args:
        slope: the gradient of the logarithms.
    """
    learned = [buffer.detach().requires_grad_() if asked else buffer for buffer, asked in zip(buffers, wanted[1:], strict=False)]
    raw = _masked(_raw(query, key, scale), mask, causal, start).requires_grad_(modify is not None)
    with torch.enable_grad():
        scores = raw if modify is None else modify(raw, *(learned or buffers))
    weights = _weights(scores.detach(), sums)
    wide = gradient.to(weights.dtype)
    along = (wide * out.to(weights.dtype)).sum(-1, keepdim=True)
    along = along if slope is None else along - slope.to(weights.dtype).unsqueeze(-1)
    towards = wide @ _repeated(value, query).to(weights.dtype).mT
    slopes = weights * ((towards if left is None else towards * left) - along)
    of = [buffer for buffer in learned if buffer.requires_grad]
    extra: list[torch.Tensor] = []
    if modify is not None:
        slopes, *extra = torch.autograd.grad(scores, [raw, *of], slopes, materialize_grads=True)
    made = [
        slopes @ _repeated(key, query).to(weights.dtype) * _scale(query, scale),
        _merged(slopes.mT @ query.to(weights.dtype), key) * _scale(query, scale),
        _merged((weights if left is None else weights * left).mT @ wide, value),
    ]
    found = [made[0].to(query.dtype), made[1].to(key.dtype), made[2].to(value.dtype)]
    if mask is not None and wanted and wanted[0]:
        found.append(slopes.sum_to_size(mask.shape).to(mask.dtype))
    return (*found, *(grad.to(buffer.dtype) for grad, buffer in zip(extra, of, strict=True)))


def _raw(query: torch.Tensor, key: torch.Tensor, scale: float | None) -> torch.Tensor:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.to(wide) @ _repeated(key, query).to(wide).mT * _scale(query, scale)


def _masked(scores: torch.Tensor, mask: torch.Tensor | None, causal: bool, start: int) -> torch.Tensor:
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1 + start)
        scores = scores.masked_fill(ahead, float("-inf"))
    return scores


def _weights(scores: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    return (scores - sums.masked_fill(sums == float("-inf"), 0.0).unsqueeze(-1)).exp()


def _repeated(heads: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values with a head for every one of the queries."""
    count = query.shape[1] // max(heads.shape[1], 1)
    return heads if count == 1 else heads.repeat_interleave(count, 1)


def _merged(gradient: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """The gradient of such heads."""
    return gradient if gradient.shape[1] == heads.shape[1] else gradient.unflatten(1, (heads.shape[1], -1)).sum(2)


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _modify(a: Mapping[str, Any]) -> Modify | None:
    """The functions of scores of one call, as one; positions are those of the whole tensors."""
    if not a.get("score") and not a.get("mask"):
        return None
    query, keys = a["query"], a["key"].shape[2]
    device = query.device
    given = [a.get(name) for name in ("batches", "heads")]
    places = [torch.arange(n, device=device) if own is None else own.flatten() for own, n in zip(given, query.shape[:2], strict=True)]
    places += [torch.arange(query.shape[2], device=device) + a.get("start", 0), torch.arange(keys, device=device)]

    def modify(scores: torch.Tensor, *buffers: torch.Tensor) -> torch.Tensor:
        if not scores.numel():
            return scores
        made = over_scores(a["score"], scores, places, buffers) if a["score"] else scores
        return torch.where(over_scores(a["mask"], None, places, buffers), made, float("-inf")) if a["mask"] else made

    return modify


# Functions of scores.


def over_scores(text: str, scores: torch.Tensor | None, places: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """A function of one score at every score: ``[batch, heads, queries, keys]``.

    >>> causal = '[["aten.ge.Tensor", {"self": "%q", "other": "%kv"}]]'
    >>> over_scores(causal, None, [torch.arange(n) for n in (1, 1, 2, 3)], ()).int().tolist()
    [[[[1, 0, 0], [1, 1, 0]]]]

    Args:
        text: see :mod:`solver_shard.tracing.attention`.
        places: positions of batch, heads, queries and keys, one vector each.
    """
    steps = read_function(text)
    here = [torch.arange(len(place), device=place.device) for place in places[:2]]

    def one(*given: torch.Tensor) -> torch.Tensor:
        names = ("%b", "%h", "%q", "%kv", "%b.own", "%h.own", "%score")
        known = dict(zip(names, given, strict=False)) | {f"%x{i}": buffer for i, buffer in enumerate(buffers)}
        for i, (target, arguments) in enumerate(steps):
            known[f"%{i}"] = target(**{name: _known(value, known) for name, value in arguments.items()})
        return known[f"%{len(steps) - 1}"]

    last: tuple[int, ...] = () if scores is None else (0,)
    over: Callable[..., torch.Tensor] = one
    for dim in (3, 2, 1, 0):
        over = torch.vmap(over, in_dims=(*(0 if d == dim else None for d in (0, 1, 2, 3, 0, 1)), *last))
    return over(*places, *here, *(() if scores is None else (scores,)))


def _known(value: Any, known: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_known(item, known) for item in value]
    if isinstance(value, str) and value.startswith("%"):
        return known[value]
    return value


@functools.lru_cache(maxsize=256)
def visible(mask: str, queries: int, keys: int) -> tuple[float, ...]:
    """Which part of the keys the queries of each band of the sequence see through a mask function, on a grid of places.

    >>> causal = '[["aten.ge.Tensor", {"self": "%q", "other": "%kv"}]]'
    >>> [round(part, 2) for part in visible(causal, 4096, 4096)][::5]
    [0.03, 0.34, 0.66, 0.97]

    What depends on the values of other tensors (documents packed into one sequence) counts as seen where no other condition hides it;
    where heads differ, it is that of the first.
    """
    steps = [(target, arguments) for target, arguments in read_function(mask)]
    rows, columns = (torch.linspace(0, n - 1, min(n, _GRID)).round().long() for n in (queries, keys))
    known: dict[str, torch.Tensor | None] = {"%q": rows.unsqueeze(1), "%kv": columns, "%b": rows[:1], "%h": rows[:1]}
    for i, (target, arguments) in enumerate(steps):
        reads = [value for value in _leaves(list(arguments.values())) if isinstance(value, str) and value.startswith("%")]
        unknown = [value for value in reads if known.get(value) is None]
        if not unknown:
            known[f"%{i}"] = target(**{name: _known(value, known) for name, value in arguments.items()})
        elif len(reads) == 2 and len(unknown) == 1 and target.name() in ("aten::bitwise_and.Tensor", "aten::logical_and"):
            known[f"%{i}"] = known[next(value for value in reads if value not in unknown)]
        else:
            known[f"%{i}"] = None
    seen = known[f"%{len(steps) - 1}"]
    if seen is None:
        return (1.0,)
    shares = torch.broadcast_to(seen, (len(rows), len(columns))).double().mean(1)
    return tuple(float(band.mean()) for band in shares.chunk(min(_BANDS, len(shares))))


def _leaves(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list) else [value]


_GRID, _BANDS = 512, 16
"""Places along each side of a mask at which it is looked at, and bands of queries: 512 tell a window of 1/256 of the sequence from none."""


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
