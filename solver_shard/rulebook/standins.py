"""What runs an op in the numeric checks: torch's own CPU kernel, or a stand-in where there is none or where it trusts its input.

Attention kernels of GPUs are written out as products and exponentials, with the same arguments and results. Kernels that read
or write where an index or a size tells them to, without looking, are asked only what fits: a check tries all kinds of shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from solver_shard.export.interpret import SIZED, Shapes, arguments_of, groups_of, registered, results_of
from solver_shard.program import Op

Arguments = Mapping[str, Any]


def run_whole(op: Op, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Results of the unsharded call, with the sizes that its arguments say."""
    arguments = arguments_of(op, operands)
    if op.name in SIZED:
        found = registered(op.name, arguments)
        return tuple(found) if isinstance(found, tuple | list) else (found,)
    return run_local(op, operands, [_unsized(op, operands)] * 8)


def run_local(op: Op, operands: Sequence[torch.Tensor], shapes: Shapes) -> tuple[torch.Tensor, ...]:
    """Results on one device's shards, where sized ops make results of these shapes; RuntimeError where shards do not fit."""
    arguments = arguments_of(op, operands)
    guard = _GUARDS.get(op.name)
    if guard is not None and not guard(arguments):
        raise RuntimeError("the shapes do not fit")
    if op.name.split(".")[1] in _LOUD and not operands[0].numel():
        return tuple(operands[0].new_zeros(tuple(shape)) for shape in shapes)
    standin = _STANDINS.get(op.name)
    if standin is not None:
        return tuple(r for r in standin(arguments) if r is not None)
    return results_of(op, arguments, shapes)


def _unsized(op: Op, operands: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The shape of a result that is as large as an argument says."""
    arguments = arguments_of(op, operands)
    if op.name == "aten.embedding_dense_backward.default":
        return (arguments["num_weights"], operands[0].shape[-1])
    return ()


# Attention, written out.


def _attention(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp ``[b, h, q]``."""
    query, key, value = a["query"], *_repeated(a)
    scores = _scores(a, query, key)
    total = scores.logsumexp(-1)
    return (scores - total.unsqueeze(-1)).exp() @ value, total


def _attention_gradients(a: Arguments) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key, value and mask, from the saved output and log-sum-exp."""
    gradient, query, key, value = a.get("grad_out", a.get("grad_out_")), a["query"], *_repeated(a)
    total = a["logsumexp"] if "logsumexp" in a else a["log_sumexp"]
    weight = (_scores(a, query, key) - total[..., : query.shape[2]].unsqueeze(-1)).exp()
    inner = weight * (gradient @ value.transpose(-1, -2) - (gradient * a["out"]).sum(-1, keepdim=True))
    scale = _scale(a, query)
    groups = query.shape[1] // a["key"].shape[1]

    def merged(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, groups)).sum(2)

    made = (inner @ key * scale, merged(inner.transpose(-1, -2) @ query * scale), merged(weight.transpose(-1, -2) @ gradient))
    mask = next((a[name] for name in ("attn_mask", "attn_bias") if a.get(name) is not None), None)
    return (*made, inner if mask is None else inner.sum_to_size(mask.shape))


def _repeated(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    groups = a["query"].shape[1] // a["key"].shape[1]
    return a["key"].repeat_interleave(groups, 1), a["value"].repeat_interleave(groups, 1)


def _scale(a: Arguments, query: torch.Tensor) -> float:
    return float(a["scale"]) if a.get("scale") is not None else 1 / math.sqrt(query.shape[-1])


def _scores(a: Arguments, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    scores = query @ key.transpose(-1, -2) * _scale(a, query)
    mask = next((a[name] for name in ("attn_mask", "attn_bias") if a.get(name) is not None), None)
    if mask is not None:
        scores = scores + mask.expand(scores.shape)
    if a.get("is_causal"):
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
    return scores


def _seeds(count: int) -> list[torch.Tensor]:
    return [torch.zeros((), dtype=torch.int64) for _ in range(count)]


def _flash(a: Arguments) -> Sequence[Any]:
    """output, logsumexp, cum_seq_q, cum_seq_k, rng_state, unused, debug mask; lengths are numbers."""
    empty = torch.zeros(0)
    return (*_attention(a), empty, empty, *_seeds(2), empty)


def _fused(a: Arguments) -> Sequence[Any]:
    empty = torch.zeros(0)
    return (*_attention(a), empty, empty, *_seeds(2), empty)


def _efficient(a: Arguments) -> Sequence[Any]:
    return (*_attention(a), *_seeds(2))


def _wanted(a: Arguments) -> Sequence[Any]:
    return [made if on else None for made, on in zip(_attention_gradients(a), a["grad_input_mask"], strict=True)]


def _heads_fit(a: Arguments) -> bool:
    """Batches are equal, heads come in whole groups, keys and values belong together, all else is as large as the query says."""
    q, k, v = (tuple(a[name].shape) for name in ("query", "key", "value"))
    fits = q[0] == k[0] == v[0] and k[1] == v[1] > 0 and q[1] % k[1] == 0 and k[2] == v[2] and q[3] == k[3]
    for name in ("attn_mask", "attn_bias"):
        mask = a.get(name)
        if mask is not None:
            full = (q[0], q[1], q[2], k[2])
            fits = fits and mask.ndim <= 4 and all(m in (1, n) for m, n in zip(mask.shape[::-1], full[::-1], strict=False))
    for name in ("grad_out", "grad_out_", "out"):
        if a.get(name) is not None:
            fits = fits and tuple(a[name].shape) == (*q[:3], v[3])
    for name in ("logsumexp", "log_sumexp"):
        if a.get(name) is not None:
            fits = fits and tuple(a[name].shape[:2]) == q[:2] and a[name].shape[2] >= q[2]
    return bool(fits)


# Kernels that do not look.


def _channels_fit(a: Arguments) -> bool:
    channels = a["input"].shape[1]
    names = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd")
    return all(a[n].numel() in (0, channels) for n in names if a.get(n) is not None) and _same(a, "grad_out", "input")


def _rows_fit(a: Arguments) -> bool:
    """Statistics of a norm have one value per row."""
    rows = tuple(a["input"].shape[: a["input"].ndim - len(a["normalized_shape"])])
    known = [a[n] for n in ("mean", "rstd") if a.get(n) is not None]
    whole = tuple(a["input"].shape[len(rows) :]) == tuple(a["normalized_shape"])
    vectors = [a[n] for n in ("weight", "bias") if a.get(n) is not None]
    fits = whole and all(tuple(v.shape) == tuple(a["normalized_shape"]) for v in vectors)
    return fits and all(tuple(x.shape[: len(rows)]) == rows for x in known) and _same(a, "grad_out", "input")


def _same(a: Arguments, one: str, other: str) -> bool:
    return a.get(one) is None or a.get(other) is None or a[one].shape == a[other].shape


def _gradient_fits(a: Arguments) -> bool:
    """The incoming gradient has the shape of what the convolution would give."""
    names = ("stride", "padding", "dilation", "transposed", "output_padding")
    image, kernel = a["input"].to("meta"), a["weight"].to("meta")
    made = torch.ops.aten.convolution.default(image, kernel, None, *(a[n] for n in names), groups_of(a))
    return bool(made.shape == a["grad_output"].shape)


def _pool_fits(a: Arguments) -> bool:
    space = math.prod(a["self"].shape[2:])
    lead = a["self"].shape[:2] == a["grad_output"].shape[:2]
    return bool(lead) and _same(a, "grad_output", "indices") and ("indices" not in a or _within(a["indices"], space))


def _within(index: torch.Tensor, size: int) -> bool:
    return not index.numel() or (int(index.amin()) >= 0 and int(index.amax()) < size)


def _vocabulary_fits(a: Arguments) -> bool:
    return _within(a["indices"], a["num_weights"]) and a["grad_output"].shape[:-1] == a["indices"].shape


def _labels_fit(a: Arguments) -> bool:
    known = a["target"][a["target"] != a["ignore_index"]]
    scores, weight = a["self"], a.get("weight")
    at = min(1, scores.ndim - 1)  # of the classes, whether images follow or not
    rows, classes = (*scores.shape[:at], *scores.shape[at + 1 :]), scores.shape[at : at + 1]
    gradient = tuple(a["grad_output"].shape) if "grad_output" in a else ()
    fits = tuple(a["target"].shape) == rows and (gradient in ((), rows)) and (gradient == () or a["reduction"] == 0)
    return bool(fits and _within(known, classes[0]) and (weight is None or weight.shape == classes))


def _ends_fit(a: Arguments) -> bool:
    """Rows that ``offs`` divides are all there, and so are the experts."""
    ends, left, right = a.get("offs"), a["self"], a["mat2"]
    if ends is None:
        return bool(left.ndim == right.ndim == 3 and left.shape[0] == right.shape[0] and left.shape[2] == right.shape[1])
    rows = left.shape[-1] if left.ndim == right.ndim == 2 else left.shape[-2] if left.ndim <= right.ndim else right.shape[-1]
    experts = [x.shape[0] for x in (left, right) if x.ndim == 3 and ends.ndim == 1]
    if not bool((ends.diff(dim=-1) >= 0).all()) or int(ends.amin()) < 0:
        return False
    fits = int(ends[..., -1].max()) == int(ends[..., -1].min()) == rows and all(e == ends.shape[0] for e in experts)
    return fits and (left.ndim != 3 or right.ndim != 3 or left.shape[0] == right.shape[0] or ends.ndim == 1)


# A norm whose backward pass the CPU has as a composition only.


def _rms_norm_gradients(a: Arguments) -> list[torch.Tensor | None]:
    x, rstd, gradient = a["input"], a["rstd"], a["grad_out"]
    rows, normal = x.ndim - len(a["normalized_shape"]), x * rstd
    scaled = gradient if a["weight"] is None else gradient * a["weight"]
    dims = tuple(range(rows, x.ndim))
    size = math.prod(a["normalized_shape"])
    made = [(scaled - normal * (scaled * normal).sum(dims, keepdim=True) / size) * rstd, (gradient * normal).sum(tuple(range(rows)))]
    return [x if on else None for x, on in zip(made, a["output_mask"], strict=True)]


_LOUD = ("var", "std", "var_mean")
"""Ops that write a warning to the terminal about rows that are not there."""
_MATH = "aten._scaled_dot_product"
_STANDINS: Mapping[str, Callable[[Arguments], Sequence[Any]]] = {
    f"{_MATH}_flash_attention.default": _flash,
    f"{_MATH}_cudnn_attention.default": _flash,
    f"{_MATH}_fused_attention_overrideable.default": _fused,
    f"{_MATH}_efficient_attention.default": _efficient,
    f"{_MATH}_flash_attention_backward.default": lambda a: _attention_gradients(a)[:3],
    f"{_MATH}_cudnn_attention_backward.default": lambda a: _attention_gradients(a)[:3],
    f"{_MATH}_efficient_attention_backward.default": _wanted,
    f"{_MATH}_fused_attention_overrideable_backward.default": _wanted,
    "aten._fused_rms_norm_backward.default": _rms_norm_gradients,
}
NO_KERNEL = frozenset(_STANDINS)
"""Ops that the CPU cannot run: these are checked by a stand-in that computes what they do."""
_NORMS = ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward")
_BATCH_NORMS = ("_native_batch_norm_legit_functional.default", "_native_batch_norm_legit.no_stats")
_OPTIMIZERS = ("adam", "adamw", "sgd", "adagrad")


def _elements_fit(a: Arguments) -> bool:
    """Lists of an optimizer: the tensors of one parameter have its shape, step counts none."""
    shape = a["self"][0].shape
    lists = [value for name, value in a.items() if isinstance(value, list) and name != "state_steps"]
    return all(x.shape == shape for tensors in lists for x in tensors)


def _group_norm_fits(a: Arguments) -> bool:
    image, groups = a["input"].shape, a["group"] * a["input"].shape[1] // max(a["C"], 1)
    vectors = [a[name].shape for name in ("weight", "bias") if a.get(name) is not None]
    statistics = [a[name].shape for name in ("mean", "rstd") if name in a]
    whole = groups > 0 and image[1] % groups == 0
    alike = "grad_out" not in a or a["grad_out"].shape == image
    return whole and alike and all(v == (image[1],) for v in vectors) and all(s == (image[0], groups) for s in statistics)


def _squares_fit(a: Arguments) -> bool:
    return bool(a["A"].shape[:-2] == a["self"].shape[:-2] and a["A"].shape[-2] == a["A"].shape[-1] == a["self"].shape[-2])


def _pivots_fit(a: Arguments) -> bool:
    data, pivots = a["LU_data"], a["LU_pivots"]
    within = not pivots.numel() or bool(pivots.min() >= 1 and pivots.max() <= data.shape[-2])
    return within and pivots.shape == (*data.shape[:-2], min(data.shape[-2:]))


_GUARDS: Mapping[str, Callable[[Arguments], bool]] = {
    **{name: _heads_fit for name in _STANDINS if name.startswith(_MATH)},
    f"{_MATH}_flash_attention_for_cpu.default": _heads_fit,
    f"{_MATH}_flash_attention_for_cpu_backward.default": _heads_fit,
    f"{_MATH}_attention_math.default": _heads_fit,
    **{f"aten.{name}.default": _rows_fit for name in _NORMS},
    **{f"aten.{name}": _channels_fit for name in (*_BATCH_NORMS, "_native_batch_norm_legit_no_training.default")},
    "aten.native_batch_norm_backward.default": _channels_fit,
    "aten.convolution_backward.default": _gradient_fits,
    "aten.max_pool2d_with_indices_backward.default": _pool_fits,
    "aten.avg_pool2d_backward.default": _pool_fits,
    "aten._adaptive_avg_pool2d_backward.default": _pool_fits,
    "aten._grouped_mm.default": _ends_fit,
    **{f"aten._fused_{name}.{kind}": _elements_fit for name in _OPTIMIZERS for kind in ("default", "tensor_lr")},
    "aten.native_group_norm.default": _group_norm_fits,
    "aten.native_group_norm_backward.default": _group_norm_fits,
    "aten._cholesky_solve_helper.default": _squares_fit,
    "aten.lu_unpack.default": _pivots_fit,
    "aten.nll_loss_forward.default": _labels_fit,
    "aten.nll_loss_backward.default": _labels_fit,
    "aten.nll_loss2d_forward.default": _labels_fit,
    "aten.nll_loss2d_backward.default": _labels_fit,
    "aten.embedding_dense_backward.default": _vocabulary_fits,
}
