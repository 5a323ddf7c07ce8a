"""Prove a rule right on numbers: run an op on shards for every strategy of its rule and compare with the whole op.

    failures = verify(op, [x, w], rule, execute, mesh_shape=(2,))
    assert not failures, failures[0]

Operands are distributed as each strategy asks (a pending sum is split into random parts), the op runs once per device,
and the results are put together again by their placements. Named implementations run with their collectives inside. Whatever
differs from the unsharded results is a failure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from solver_shard.errors import InternalError, SolverShardError
from solver_shard.export.implementations import FREE, Part, free, perform
from solver_shard.layout import Layout, Placement, R, S
from solver_shard.program import Op
from solver_shard.rulebook.rule import AxisStrategy, Rule

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
