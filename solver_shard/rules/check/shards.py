"""Prove a rule right on numbers: run an op on shards for every strategy of its rule and compare with the whole op.

    failures = verify(op, [x, w], rule, execute, mesh_shape=(2,))
    assert not failures, failures[0]

Operands are distributed as each strategy asks (a pending sum is split into random parts), the op runs once per device,
and the results are put together again by their placements. Named implementations run with their collectives inside. Whatever
differs from the unsharded results is a failure.

What runs an op is torch's own CPU kernel (``run_local``), or a stand-in where there is none or where it trusts its input: attention kernels
of GPUs are written out as products and exponentials, with the same arguments and results; kernels that read or write where an index or a
size tells them to, without looking, are asked only what fits, for a check tries all kinds of shards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from solver_shard.errors import InternalError, SolverShardError
from solver_shard.layout import Layout, Placement, R, S
from solver_shard.ops.implementations import FREE, Part, free, perform
from solver_shard.ops.run import SIZED, Shapes, arguments_of, groups_of, registered, results_of
from solver_shard.program import Op
from solver_shard.rules.rule import AxisStrategy, Rule
from solver_shard.tracing.attention import ATTENTION, ATTENTION_BACKWARD

Execute = Callable[[Op, Sequence[torch.Tensor], Sequence[Sequence[int]]], Sequence[torch.Tensor]]
"""Runs an op on given tensors: ``execute(op, operands, result_shapes)``."""

_EXACT = (torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 2e-4,
    torch.bfloat16: 6e-2,
    torch.float16: 1e-2,
    torch.complex128: 1e-9,
    torch.complex64: 2e-4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A strategy whose numbers are wrong."""

    op: str
    strategy: str
    mesh_shape: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        return f"{self.op}, strategy {self.strategy} on mesh {self.mesh_shape}: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Outcome: how many strategies ran, and those that failed."""

    strategies: int
    failures: tuple[Failure, ...]


def verify(
    op: Op,
    operands: Sequence[torch.Tensor],
    rule: Rule,
    execute: Execute,
    *,
    result_shapes: Sequence[tuple[int, ...]],
    mesh_shape: Sequence[int] = (2,),
    minor: bool = False,
    seed: int = 0,
) -> Checked:
    """Run every strategy of the rule on a mesh; one axis per entry of ``mesh_shape``; ``minor``: only those with a minor cut."""
    generator = torch.Generator().manual_seed(seed)
    sizes = tuple(mesh_shape)
    whole = tuple(execute(op, list(operands), tuple(result_shapes)))
    count, failures = 0, []
    shapes = [tuple(t.shape) for t in operands]
    for combination in legal_strategies(rule, shapes, result_shapes, sizes, minor=minor):
        count += 1
        name = " x ".join(s.name for s in combination)
        try:
            what = _difference(op, operands, whole, rule, combination, sizes, execute, generator)
        except (RuntimeError, IndexError, ValueError, TypeError, SolverShardError) as error:
            what = f"the op does not run on its shards: {error}"
        if what is not None:
            failures.append(Failure(op=op.name, strategy=name, mesh_shape=sizes, what=what))
    return Checked(strategies=count, failures=tuple(failures))


def legal_strategies(
    rule: Rule,
    operands: Sequence[tuple[int, ...]],
    results: Sequence[tuple[int, ...]],
    mesh_shape: Sequence[int],
    *,
    minor: bool = False,
) -> Iterator[tuple[AxisStrategy, ...]]:
    """Every choice of one strategy per axis that can be executed: factors and dims are large enough, reductions commute.

    ``minor`` gives those in which some axis cuts a minor factor, and no others.
    """
    options = (*rule.strategies(), *(rule.minor_strategies() if minor else ()))
    for combination in itertools.product(options, repeat=len(mesh_shape)):
        if any(s.after for s in combination) != minor or not rule.complete(combination, mesh_shape):
            continue
        cuts: dict[int, int] = {}
        for strategy, size in zip(combination, mesh_shape, strict=True):
            if strategy.factor is not None:
                cuts[strategy.factor] = cuts.get(strategy.factor, 1) * size
        if not all(rule.factors[f].legal(shards) for f, shards in cuts.items()):
            continue
        if len({s.implementation.name for s in combination if s.implementation is not None}) > 1:
            continue
        layouts = [Layout(s.operands[i] for s in combination) for i in range(len(operands))]
        layouts += [Layout(s.results[i] for s in combination) for i in range(len(results))]
        if all(_executable(layout, shape, mesh_shape) for layout, shape in zip(layouts, (*operands, *results), strict=True)):
            yield combination


def _executable(layout: Layout, shape: Sequence[int], mesh_shape: Sequence[int]) -> bool:
    reductions = {p.reduction for p in layout if p.is_partial}
    if len(reductions) > 1 and not reductions <= {"sum", "avg"}:
        return False
    counts = [math.prod(n for p, n in zip(layout, mesh_shape, strict=True) if p == d) for d in range(len(shape))]
    return all(n == 1 or size >= n for size, n in zip(shape, counts, strict=True))


def _difference(
    op: Op,
    operands: Sequence[torch.Tensor],
    whole: Sequence[torch.Tensor],
    rule: Rule,
    combination: Sequence[AxisStrategy],
    sizes: tuple[int, ...],
    execute: Execute,
    generator: torch.Generator,
) -> str | None:
    parts = [distribute(t, [s.operands[i] for s in combination], sizes, generator) for i, t in enumerate(operands)]
    parts = [p if not rule.reads or rule.reads[i] else [_spoiled(part) for part in p] for i, p in enumerate(parts)]
    layouts = [Layout(s.results[i] for s in combination) for i in range(len(whole))]
    devices = list(itertools.product(*map(range, sizes)))
    local = [tuple(layout.local_shape(t.shape, sizes, at) for layout, t in zip(layouts, whole, strict=True)) for at in devices]
    by_device = [[p[device] for p in parts] for device in range(len(devices))]
    if any(strategy.implementation for strategy in combination):
        performed = _perform(op, rule, combination, sizes, by_device, local, [t.dtype for t in whole])
    else:
        performed = [execute(op, operands, shapes) for operands, shapes in zip(by_device, local, strict=True)]
    made: list[list[torch.Tensor]] = []
    for coordinate, shapes, outs in zip(devices, local, map(list, performed), strict=True):
        for index, (out, shape) in enumerate(zip(outs, shapes, strict=True)):
            if tuple(out.shape) != shape:
                return f"result {index} has local shape {tuple(out.shape)} on device {coordinate}, its layout {layouts[index]} says {shape}"
        made.append(outs)
    least = max(tolerance_of(t) for t in (*operands, *whole))
    for index, (layout, expected) in enumerate(zip(layouts, whole, strict=True)):
        if index in rule.alike:
            continue
        found = assemble([outs[index] for outs in made], list(layout), sizes, least)
        if found is None:
            return f"result {index} is said to be replicated, but devices disagree"
        if not close(found, expected, least):
            error = (found.double() - expected.double()).abs().max().item() if found.numel() else 0.0
            return f"result {index} as {layout} differs from the unsharded one by up to {error:.3g}"
    return None


def _perform(
    op: Op,
    rule: Rule,
    combination: Sequence[AxisStrategy],
    sizes: tuple[int, ...],
    operands: Sequence[Sequence[torch.Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    dtypes: Sequence[torch.dtype],
) -> Sequence[Sequence[torch.Tensor]]:
    """Run the implementation that the axes share, with plain sums and maxima for its collectives; they must be those of the rule."""
    way = next(s.implementation for s in combination if s.implementation is not None)
    cut = Layout(R if s.implementation is None else S(0) for s in combination)
    shards = [math.prod(n for s, n in zip(combination, sizes, strict=True) if s.factor == f) for f in range(len(rule.factors))]
    pending = [collective.local_nbytes(rule.factors, shards) for collective in way.collectives]
    size = (rule.factors[way.factor].size,)
    devices = list(itertools.product(*map(range, sizes)))
    key = [tuple(c for c, placement in zip(at, cut, strict=True) if placement == R) for at in devices]
    teams: dict[tuple[int, ...], list[int]] = {}
    for device, at in enumerate(key):
        teams.setdefault(at, []).append(device)

    def all_reduce(reduction: str, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if reduction in FREE:
            return free(reduction, buffers, list(teams.values()))
        nbytes = max(buffer.nbytes for buffer in buffers)
        if not pending or pending.pop(0) != nbytes:
            raise InternalError(f"an all-reduce of {nbytes} bytes is not in the rule")
        stacked = {at: torch.stack([buffers[device] for device in team]) for at, team in teams.items()}
        reduced = {at: b.sum(0) if reduction == "sum" else b.amax(0) for at, b in stacked.items()}
        return [reduced[at] for at in key]

    parts = [Part(start=cut.local_offset(size, sizes, at)[0], length=cut.local_shape(size, sizes, at)[0], size=size[0]) for at in devices]
    made = perform(way.name, op, operands, parts, shapes, dtypes, all_reduce)
    if pending:
        raise InternalError(f"the rule has {len(way.collectives)} collectives, {len(pending)} of them did not run")
    return made


def distribute(
    tensor: torch.Tensor, placements: Sequence[Placement], sizes: Sequence[int], generator: torch.Generator
) -> list[torch.Tensor]:
    """The local tensor of every device, in device order; uneven shards by torch.chunk's rule, later ones may be empty."""
    if not placements:
        return [tensor]
    first, size = placements[0], sizes[0]
    if first.is_shard:
        chunk = -(-tensor.shape[first.dim] // size)
        bounds = [min(chunk * r, tensor.shape[first.dim]) for r in range(size + 1)]
        # contiguous: the CPU kernel of layer norm's backward reads strided statistics as if they were not
        parts = [tensor.narrow(first.dim, a, b - a).contiguous() for a, b in itertools.pairwise(bounds)]
    elif first.is_partial:
        parts = _split(tensor, first.reduction, size, generator)
    else:
        parts = [tensor] * size
    return [local for part in parts for local in distribute(part, placements[1:], sizes[1:], generator)]


def _spoiled(part: torch.Tensor) -> torch.Tensor:
    """What stands for an operand of which only the shape is used: whatever reads it goes wrong."""
    dtype = part.dtype
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else dtype != torch.bool and torch.iinfo(dtype).min
    return torch.full_like(part, fill)


def _split(tensor: torch.Tensor, reduction: str, size: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Parts whose reduction is the tensor, uneven in sign and size, which devices hold differently."""
    if reduction in ("max", "min"):
        owner = torch.randint(size, tensor.shape, generator=generator)
        if tensor.dtype == torch.bool:
            fill = torch.full_like(tensor, reduction == "min")
            return [torch.where(owner == r, tensor, fill) for r in range(size)]
        return [torch.where(owner == r, tensor, _worse(tensor, reduction, generator)) for r in range(size)]
    if tensor.is_floating_point() or tensor.is_complex():
        kind = torch.complex128 if tensor.is_complex() else torch.float64
        parts = [(torch.randn(tensor.shape, generator=generator, dtype=kind) * (2 * r - 1)).to(tensor.dtype) for r in range(1, size)]
    else:
        parts = [torch.randint(-3, 4, tensor.shape, generator=generator).to(tensor.dtype) for _ in range(size - 1)]
    last = -sum(parts, torch.zeros_like(tensor))
    made = [tensor + part for part in (*parts, last)] if reduction == "avg" else [*parts, tensor + last]
    if tensor.is_floating_point() and not tensor.isfinite().all():
        # an infinity may be the sum of large numbers, and no number that of two infinities
        most = torch.finfo(tensor.dtype).max
        coin = torch.randint(2, tensor.shape, generator=generator).bool()
        made = [torch.where(coin & ~tensor.isfinite(), 0, part) for part in made]
        for r in (0, -1):
            made[r] = torch.where(coin & tensor.isinf(), tensor.sign() * most, made[r])
            made[r] = torch.where(coin & tensor.isnan(), float("inf") * (1 if r else -1), made[r])
    return made


def _worse(tensor: torch.Tensor, reduction: str, generator: torch.Generator) -> torch.Tensor:
    """What loses against the tensor in a maximum or minimum: sometimes by little, sometimes by more than its range."""
    sign = -1 if reduction == "max" else 1
    coin = torch.randint(2, tensor.shape, generator=generator).bool()
    if not tensor.is_floating_point():
        little = torch.randint(1, 5, tensor.shape, generator=generator)
        return tensor + sign * torch.where(coin, little, 5 * little).to(tensor.dtype)
    little = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 3 + 0.1
    little = torch.where(torch.randint(2, tensor.shape, generator=generator).bool(), little, little.ceil())
    worse = tensor + sign * torch.where(coin, little, 6 * little).to(tensor.dtype)
    if tensor.isfinite().all():
        return worse
    worse = torch.where(coin, sign * float("inf"), worse)
    return torch.where(tensor.isnan() | (tensor == -sign * float("inf")), (little - 2).to(tensor.dtype), worse)


def assemble(
    parts: Sequence[torch.Tensor], placements: Sequence[Placement], sizes: Sequence[int], tolerance: float = 1e-9
) -> torch.Tensor | None:
    """The tensor that the devices hold together; None when replicas differ by more than the tolerance."""
    if not placements:
        return parts[0]
    inner = len(parts) // sizes[0]
    held = [assemble(parts[r * inner : (r + 1) * inner], placements[1:], sizes[1:], tolerance) for r in range(sizes[0])]
    tensors = [t for t in held if t is not None]
    if len(tensors) < len(held):
        return None
    first = placements[0]
    if first.is_shard:
        return torch.cat(tensors, dim=first.dim)
    if first.is_replicate:
        return tensors[0] if all(close(t, tensors[0], tolerance) for t in tensors[1:]) else None
    stacked = torch.stack(tensors)
    if first.reduction in ("max", "min"):
        return stacked.amax(0) if first.reduction == "max" else stacked.amin(0)
    return stacked.sum(0).to(tensors[0].dtype) if first.reduction == "sum" else stacked.mean(0)


def tolerance_of(tensor: torch.Tensor) -> float:
    """Largest difference between two ways to compute such numbers."""
    return _TOLERANCE.get(tensor.dtype, 0.0) * _largest(tensor)


def _largest(tensor: torch.Tensor) -> float:
    """Largest magnitude, from 1 to 1000: random parts of a sum are of that size, and so are their rounding errors."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 1.0
    return float(tensor.abs().nan_to_num(nan=1.0, posinf=1.0).amax().clamp(1.0, 1e3))


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors are equal but for rounding; other shapes or dtypes are not."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if found.dtype in _EXACT:
        return bool(torch.equal(found, expected))
    return bool(torch.allclose(found, expected, rtol=min(tolerance, 0.1), atol=tolerance, equal_nan=True))


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
    for name in ("logsumexp", "log_sumexp", "grad_logsumexp"):
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
    **dict.fromkeys((ATTENTION, ATTENTION_BACKWARD), _heads_fit),
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
