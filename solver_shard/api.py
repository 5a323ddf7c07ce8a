"""The main job in one call: a model, a mesh, a cluster and a memory limit in, a proven plan out.

>>> plan = optimize("gpt2", batch=16, seq=1024, mesh="8", cluster="h100")
>>> print(plan)                                                             # the report
>>> plan.save("plan.json")
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from solver_shard.clock import Progress, StageClock
from solver_shard.errors import InputError
from solver_shard.graph.pins import check_pins
from solver_shard.mesh import Mesh, parse_split
from solver_shard.options import (
    check_called,
    check_microbatches,
    check_numbers,
    check_optimizer,
    check_reserve,
    part_of,
    yes_or_no,
)
from solver_shard.pipeline import plan_program
from solver_shard.program import Program
from solver_shard.text import parse_bytes
from solver_shard.tracing.load import DEFAULT_DTYPE, is_entry_point, traced_of

if TYPE_CHECKING:
    import torch

    from solver_shard.baselines.propagated import Propagation
    from solver_shard.costs.cluster import Cluster
    from solver_shard.options import Options
    from solver_shard.plan.plan import Plan


DEFAULT_MEMORY_FRACTION = 0.9
"""Of the device's memory, where no limit is given; the rest is for what no tensor may have."""


def optimize(
    model: str | os.PathLike[str] | torch.nn.Module | Program,
    inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    *,
    mesh: str | int | Mesh,
    cluster: str | os.PathLike[str] | Cluster = "h100",
    memory: str | int | None = None,
    reserve: str | int | None = None,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    loss_fn: Callable[..., Any] | None = None,
    forward_only: bool = False,
    checkpoint: bool = False,
    microbatches: int = 1,
    optimizer: str = "adamw",
    master_weights: bool = True,
    state_bytes: int | None = None,
    reduce_dtype: str | None = None,
    clip: bool = False,
    pins: Sequence[str] = (),
    split: Mapping[str, Sequence[int]] | str | bool = True,
    template: str | None = None,
    rules: Sequence[str | os.PathLike[str]] = (),
    conservative: bool = False,
    trust_dtensor: bool = False,
    propagation: Propagation | None = None,
    overlap: float = 0.0,
    fusion: bool = False,
    objective: Literal["time", "memory"] = "time",
    memory_weight: int = 0,
    tied: bool = True,
    gap: float = 1e-4,
    time_limit: float = 60.0,
    work_limit: float | None = None,
    seed: int = 0,
    workers: int = 2,
    total_time_limit: float | None = None,
    command: str | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    incumbent: Callable[[Plan], None] | None = None,
) -> Plan:
    """Find the sharding of every tensor that makes one step fastest within a memory limit.

    Args:
        model: a preset name, a Hugging Face ``config.json``, an entry point ``package.module:function``, a module, or a
            Program. Presets and configs need ``batch`` (and ``seq`` for language models), a module its ``inputs``.
        inputs: example tensors with the global sizes of one step, or of one microbatch of it; fake and meta tensors are fine.
        mesh: axes, outermost first, the rightmost with the fastest links: ``"dp=32,tp=8"``; a number of devices is one axis.
        cluster: a preset name, a TOML file, or a Cluster.
        memory: limit per device in bytes or as text, ``"70GiB"``; default 90% of the device's memory.
        reserve: bytes or text, the part of that limit which no tensor may have (driver context, buffers of the collective library,
            fragmentation of the allocator); default the cluster's number for its device, or none beside the default limit,
            whose missing tenth is for that.
        batch, seq: global batch of a step, all its microbatches together, and tokens per sequence.
        dtype: of parameters and compute, as ``"bf16"``; default bf16 for presets and configs.
        loss_fn: maps the model's output to a scalar, where the model computes no loss itself.
        forward_only: plan inference: no backward pass, no update.
        checkpoint: of presets and configs: checkpoint every layer, whose activations are then computed again in the backward pass.
            In a module of your own, ``torch.utils.checkpoint`` regions are followed as they are.
        microbatches: parts of the batch that run forward and backward one after the other; their gradients are accumulated, then
            the parameters updated once (see :mod:`solver_shard.graph.lowering`). A preset or config is traced with ``batch`` /
            ``microbatches`` sequences; the inputs of a module or an entry point, and a Program, are those of one microbatch.
        optimizer: adamw (as torch steps it on accelerators by default), adamw-fused, adamw-forloop, sgd or none.
        master_weights: parameters of 16 bits or less have an f32 copy that the optimizer steps.
        state_bytes: of optimizer state per parameter element, where it is not the optimizer's own: 2 for 8-bit AdamW.
        reduce_dtype: f32, bf16 or f16, in which gradients are reduced, accumulated and held until the update; default their own.
        clip: whether gradients are clipped to a norm before the update, as ``torch.nn.utils.clip_grad_norm_`` does; the norm itself
            does not matter to the plan.
        pins: layouts to fix, ``"PATTERN=S(0),R"`` (see :mod:`solver_shard.graph.pins`).
        split: mesh axes to split into sub-axes, outermost first, as ``"tp=8x2"`` or ``{"tp": (8, 2)}``; by default at most one axis,
            where the model has fewer heads than it has devices (see :mod:`solver_shard.graph.sub_axes`); False for none.
        template: plan only what experts write, as ``"dp=zero3,tp=megatron"`` (see :mod:`solver_shard.graph.templates`).
        rules: rules files of your own, for custom ops or in place of shipped rows; a later file's row replaces an earlier one's
            (see :mod:`solver_shard.rules.table`).
        conservative: allow only equal shards, and no cut inside a dim that a view merges or splits.
        trust_dtensor: of ops without a row, take every strategy that torch registers with DTensor; by default only those that are
            proven on numbers (see :mod:`solver_shard.rules.registered`).
        propagation: plan what a greedy pass makes of the pins (see :mod:`solver_shard.baselines.propagated`).
        overlap: part of parameter gathers and gradient reductions hidden behind compute, 0 to 1.
        fusion: price chains of pointwise ops as a compiler runs them: what one hands to the next is neither written nor read.
        objective: time, or memory for the smallest peak.
        memory_weight: nanoseconds per MiB of peak to add to the time.
        tied: copies of a repeated layer share one decision; False searches the larger, free space.
        gap: stop when (objective - bound) / objective is at most this.
        time_limit: seconds for the solver.
        work_limit: units of solver work; the same limit and seed give the same plan.
        seed: for the solver's random choices.
        workers: processor cores that the solver may use; with a work limit the plan does not depend on it.
        total_time_limit: seconds for the whole call: what tracing and pricing leave of it bounds the solver, too.
        command: what to record as the plan's origin; default: a call of this function.
        progress: called with a line of text when a stage starts or the solver gets further.
        stop: asked again and again while the solver runs; True ends it with the best plan so far, whose certificate then says
            ``interrupted``. Signals are left alone: a Ctrl-C raises KeyboardInterrupt as anywhere in Python.
        incumbent: called with the best plan so far, complete and with the bound of that moment, now and then while the solver runs:
            first after some seconds, then at most every ten seconds and for 2% of the time.

    Raises:
        InputError: an argument is not usable; the message says what is legal.
        TraceError: the model cannot be traced.
        RuleError: a rules file is not legal, or a row does not fit its op; the message names file, row and fix.
        InfeasibleError: no plan fits the limit or the pins.
        SolverShardError: no plan was found before a time limit struck, or before ``stop``.
    """
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    clock = StageClock(progress=progress, total=total_time_limit)
    check_called(progress=progress, stop=stop, incumbent=incumbent)
    job = asked(
        model,
        mesh=mesh,
        cluster=cluster,
        memory=memory,
        reserve=reserve,
        batch=batch,
        seq=seq,
        dtype=dtype,
        forward_only=forward_only,
        checkpoint=checkpoint,
        microbatches=microbatches,
        optimizer=optimizer,
        master_weights=master_weights,
        state_bytes=state_bytes,
        reduce_dtype=reduce_dtype,
        clip=clip,
        pins=pins,
        split=split,
        template=template,
        rules=rules,
        conservative=conservative,
        trust_dtensor=trust_dtensor,
        propagation=propagation,
        overlap=overlap,
        fusion=fusion,
        objective=objective,
        memory_weight=memory_weight,
        tied=tied,
        gap=gap,
        time_limit=time_limit,
        work_limit=work_limit,
        seed=seed,
        workers=workers,
        total_time_limit=total_time_limit,
    )
    options = job.options
    with clock.stage("trace", "tracing the model"):
        program, traced, source = traced_of(
            model,
            inputs,
            batch=part_of(batch, options.microbatches),
            seq=seq,
            dtype=options.dtype,
            loss_fn=loss_fn,
            forward_only=forward_only,
            checkpoint=checkpoint,
        )
        source += f", {options.microbatches} microbatches" if options.microbatches > 1 else ""
    return plan_program(
        program,
        mesh=job.mesh,
        cluster=job.cluster,
        options=options,
        source=source,
        command=command,
        clock=clock,
        baseline=propagation,
        workers=int(workers),
        stop=stop,
        incumbent=incumbent,
        traced=traced,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a call of :func:`optimize` asks for, beside its model: ready for :func:`plan_program`."""

    mesh: Mesh
    cluster: Cluster
    options: Options


def asked(
    model: str | torch.nn.Module | Program,
    *,
    mesh: str | int | Mesh,
    cluster: str | os.PathLike[str] | Cluster,
    memory: str | int | None,
    reserve: str | int | None,
    batch: int | None,
    seq: int | None,
    dtype: str | None,
    forward_only: bool,
    checkpoint: bool,
    microbatches: int,
    optimizer: str,
    master_weights: bool,
    state_bytes: int | None,
    reduce_dtype: str | None,
    clip: bool,
    pins: Sequence[str],
    split: Mapping[str, Sequence[int]] | str | bool,
    template: str | None,
    rules: Sequence[str | os.PathLike[str]],
    conservative: bool,
    trust_dtensor: bool,
    propagation: Propagation | None,
    overlap: float,
    fusion: bool,
    objective: Literal["time", "memory"],
    memory_weight: int,
    tied: bool,
    gap: float,
    time_limit: float,
    work_limit: float | None,
    seed: int,
    workers: int,
    total_time_limit: float | None,
) -> Asked:
    """Read and check the arguments of :func:`optimize`, which has their defaults; nothing is traced.

    Raises:
        InputError, RuleError: as :func:`optimize`.
    """
    from solver_shard.options import Options
    from solver_shard.rules.table import load_table, read_rules

    axes = mesh if isinstance(mesh, Mesh) else Mesh.parse(str(mesh))
    axes, splitting = _split(axes, split)
    check_numbers(
        overlap=overlap,
        objective=objective,
        memory_weight=memory_weight,
        gap=gap,
        time_limit=time_limit,
        total_time_limit=total_time_limit,
        work_limit=work_limit,
        seed=seed,
        workers=workers,
    )
    if dtype is None and isinstance(model, str) and not is_entry_point(model):
        dtype = DEFAULT_DTYPE
    where = _cluster(cluster)
    limit = parse_bytes(memory) if memory is not None else math.floor(where.device.memory * DEFAULT_MEMORY_FRACTION)
    kept = parse_bytes(reserve, least=0) if reserve is not None else where.device.reserve if memory is not None else 0
    check_reserve(limit, kept, where)
    check_pins(pins, axes)
    if template is not None:
        from solver_shard.graph.templates import parse_template

        if not isinstance(template, str):
            raise InputError(f"template {template!r} is not legal; write it as text, as in 'dp=zero3,tp=megatron'")
        parse_template(template, axes)
    if isinstance(rules, str | os.PathLike):
        rules = (rules,)
    if not isinstance(rules, Sequence) or not all(isinstance(file, str | os.PathLike) for file in rules):
        raise InputError(f"rules must be a list of files, got {rules!r}; write them as in ['my_ops.toml']")
    files = tuple(map(read_rules, rules))
    if files:
        load_table(files)  # what is wrong with them is said before the model is traced
    options = Options(
        batch=batch,
        seq=seq,
        dtype=dtype,
        microbatches=check_microbatches(microbatches, batch, forward_only=bool(forward_only)),
        optimizer=optimizer,
        master_weights=bool(master_weights),
        state_bytes=state_bytes,
        reduce_dtype=reduce_dtype,
        clip=yes_or_no("clip", clip),
        forward_only=bool(forward_only),
        checkpoint=bool(checkpoint),
        overlap=float(overlap),
        fusion=bool(fusion),
        memory_limit=limit,
        reserve=kept,
        objective=objective,
        memory_weight=int(memory_weight),
        pins=tuple(pins),
        split=splitting,
        template=template,
        rules=files,
        conservative=bool(conservative),
        trust_dtensor=yes_or_no("trust_dtensor", trust_dtensor),
        propagation=None if propagation is None else str(propagation),
        tied=bool(tied),
        gap=float(gap),
        time_limit=float(time_limit),
        total_time_limit=None if total_time_limit is None else float(total_time_limit),
        work_limit=None if work_limit is None else float(work_limit),
        seed=int(seed),
    )
    check_optimizer(options)
    return Asked(mesh=axes, cluster=where, options=options)


def _split(mesh: Mesh, split: Mapping[str, Sequence[int]] | str | bool) -> tuple[Mesh, str]:
    """The mesh with what the user asks to split, and what ``Options.split`` records."""
    if isinstance(split, bool):
        return mesh, "auto" if split else "off"
    if not isinstance(split, str) and not (isinstance(split, Mapping) and all(isinstance(parts, Sequence) for parts in split.values())):
        raise InputError(f"split {split!r} is not legal; write it as 'tp=8x2' or {{'tp': (8, 2)}}, or give False for none")
    sizes = parse_split(split) if isinstance(split, str) else {name: tuple(parts) for name, parts in split.items()}
    return mesh.split(sizes), ",".join(f"{name}={'x'.join(map(str, parts))}" for name, parts in sizes.items()) or "off"


def _cluster(cluster: str | os.PathLike[str] | Cluster) -> Cluster:
    from solver_shard.costs.cluster import Cluster, load_cluster

    if isinstance(cluster, str | os.PathLike):
        return load_cluster(os.fspath(cluster))
    if not isinstance(cluster, Cluster):
        raise InputError(f"a cluster of type {type(cluster).__name__} was given; give a preset's name, a TOML file or a Cluster")
    return cluster
