"""The main job in one call: a model, a mesh, a cluster and a memory limit in, a proven plan out.

>>> plan = optimize("gpt2", batch=16, seq=1024, mesh="8", cluster="h100")
>>> print(plan)                                                             # the report
>>> plan.save("plan.json")
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import math
import numbers
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from solver_shard import __version__
from solver_shard.errors import InfeasibleError, InputError, SolverShardError
from solver_shard.mesh import Mesh, parse_split
from solver_shard.program import Program
from solver_shard.source import DEFAULT_DTYPE, is_entry_point, traced_of
from solver_shard.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch

    from solver_shard.baselines.propagated import Propagation
    from solver_shard.choice.nodes import Lowering
    from solver_shard.choice.transients import Transients
    from solver_shard.costs.cluster import Cluster
    from solver_shard.costs.model import CostModel
    from solver_shard.frontends.clean import Traced
    from solver_shard.plan.plan import Certificate, MemoryTimeline, Options, Plan, Provenance
    from solver_shard.rulebook.build import Rulebook
    from solver_shard.solve.solution import Event, Solution, WarmStart

DEFAULT_MEMORY_FRACTION = 0.9
"""Of the device's memory, where no limit is given; the rest is for what no tensor may have."""

Progress = Callable[[str], None]
"""Called with a short line whenever a stage starts or the solver gets further."""

MAX_MEMORY_WEIGHT = 10**9
MAX_MICROBATCHES = 4096


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
    command: str | None = None,
    progress: Progress | None = None,
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
            the parameters updated once (see :mod:`solver_shard.choice.accumulate`). A preset or config is traced with ``batch`` /
            ``microbatches`` sequences; the inputs of a module or an entry point, and a Program, are those of one microbatch.
        optimizer: adamw, sgd or none.
        master_weights: parameters of 16 bits or less have an f32 copy that the optimizer steps.
        state_bytes: of optimizer state per parameter element, where it is not the optimizer's own: 2 for 8-bit AdamW.
        reduce_dtype: f32, bf16 or f16, in which gradients are reduced, accumulated and held until the update; default their own.
        clip: whether gradients are clipped to a norm before the update, as ``torch.nn.utils.clip_grad_norm_`` does; the norm itself
            does not matter to the plan.
        pins: layouts to fix, ``"PATTERN=S(0),R"`` (see :mod:`solver_shard.pins`).
        split: mesh axes to split into sub-axes, outermost first, as ``"tp=8x2"`` or ``{"tp": (8, 2)}``; by default at most one axis,
            where the model has fewer heads than it has devices (see :mod:`solver_shard.choice.subaxes`); False for none.
        template: plan only what experts write, as ``"dp=zero3,tp=megatron"`` (see :mod:`solver_shard.baselines.restrict`).
        rules: rules files of your own, for custom ops or in place of shipped rows; a later file's row replaces an earlier one's
            (see :mod:`solver_shard.rulebook.table`).
        conservative: allow only equal shards, and no cut inside a dim that a view merges or splits.
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
        command: what to record as the plan's origin; default: a call of this function.
        progress: called with a line of text when a stage starts.

    Raises:
        InputError: an argument is not usable; the message says what is legal.
        TraceError: the model cannot be traced.
        RuleError: a rules file is not legal, or a row does not fit its op; the message names file, row and fix.
        InfeasibleError: no plan fits the limit or the pins.
    """
    from solver_shard.plan.plan import Options
    from solver_shard.rulebook.table import load_table, read_rules

    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    clock = _Clock(progress=progress)
    axes = mesh if isinstance(mesh, Mesh) else Mesh.parse(str(mesh))
    axes, splitting = _split(axes, split)
    _check_numbers(
        overlap=overlap, objective=objective, memory_weight=memory_weight, gap=gap, time_limit=time_limit, work_limit=work_limit, seed=seed
    )
    if dtype is None and isinstance(model, str) and not is_entry_point(model):
        dtype = DEFAULT_DTYPE
    where = _cluster(cluster)
    limit = parse_bytes(memory) if memory is not None else math.floor(where.device.memory * DEFAULT_MEMORY_FRACTION)
    kept = parse_bytes(reserve, least=0) if reserve is not None else where.device.reserve if memory is not None else 0
    _check_reserve(limit, kept, where)
    _check_pins(pins, axes)
    if template is not None:
        from solver_shard.baselines.restrict import parse_template

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
        microbatches=_check_microbatches(microbatches, batch, forward_only=bool(forward_only)),
        optimizer=optimizer,
        master_weights=bool(master_weights),
        state_bytes=state_bytes,
        reduce_dtype=reduce_dtype,
        clip=_yes_or_no("clip", clip),
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
        propagation=None if propagation is None else str(propagation),
        tied=bool(tied),
        gap=float(gap),
        time_limit=float(time_limit),
        work_limit=None if work_limit is None else float(work_limit),
        seed=int(seed),
    )
    _check_optimizer(options)
    with clock.stage("trace", "tracing the model"):
        program, traced, source = traced_of(
            model,
            inputs,
            batch=_part(batch, options.microbatches),
            seq=seq,
            dtype=dtype,
            loss_fn=loss_fn,
            forward_only=forward_only,
            checkpoint=checkpoint,
        )
        source += f", {options.microbatches} microbatches" if options.microbatches > 1 else ""
    return plan_program(
        program,
        mesh=axes,
        cluster=where,
        options=options,
        source=source,
        command=command,
        clock=clock,
        propagation=propagation,
        traced=traced,
    )


def plan_program(
    program: Program,
    *,
    mesh: Mesh,
    cluster: Cluster,
    options: Options,
    source: str = "",
    command: str | None = None,
    clock: _Clock | None = None,
    propagation: Propagation | None = None,
    narrow: Callable[[Lowering, CostModel, Rulebook], tuple[Lowering, str]] | None = None,
    traced: Traced | None = None,
) -> Plan:
    """From a traced program to a plan: sub-axes, rules, costs, choice graph, hints, solver, plan.

    ``narrow``: leaves of the choice graph only what a baseline decides, and says what ``Options.propagation`` records.
    ``traced``: the trace that the program was cleaned from; without it there is no hint of what DTensor would do.
    """
    from solver_shard.baselines.hints import hints, middles
    from solver_shard.baselines.restrict import parse_template, restriction
    from solver_shard.baselines.templates import warm_starts
    from solver_shard.choice.lower import lower
    from solver_shard.choice.structure import node_classes
    from solver_shard.choice.transients import Transients
    from solver_shard.constraints import constrain
    from solver_shard.costs.model import CostModel
    from solver_shard.pins import parse_pin, resolve_pins
    from solver_shard.plan.decode import decode
    from solver_shard.plan.plan import Plan
    from solver_shard.rulebook.table import check_ops

    clock = clock or _Clock()
    state = options.optimizer_state()
    rulebook = options.rulebook()
    check_ops(rulebook.table, known=frozenset(op.name for op in program.ops))
    mesh = _refined(program, rulebook, mesh, options)
    program, pinned = constrain(program, resolve_pins([parse_pin(text, mesh) for text in options.pins], program, mesh))
    templates = parse_template(options.template, mesh) if options.template else None
    narrowed = restriction(program, mesh, templates, accumulates=options.microbatches > 1) if templates else None
    with clock.stage("lower", f"pricing {len(program.ops)} ops on {mesh}"):
        costs = CostModel(mesh, cluster, overlap=options.overlap)
        lowering = lower(
            program,
            rulebook,
            costs,
            optimizer_state=state,
            pins={t: allowed.allows for t, allowed in pinned.items()},
            restriction=narrowed,
            limit=options.usable_memory,
            fusion=options.fusion,
            microbatches=options.microbatches,
        )
    if propagation is not None:
        from solver_shard.baselines.propagated import narrow_to
        from solver_shard.propagation.program import propagate_program

        with clock.stage("propagate", f"propagating the shardings of {len(pinned)} tensors"):
            made = propagate_program(program, mesh, pinned, propagation.name, rulebook, propagation.options)
            lowering = narrow_to(lowering, made.layouts)
            options = dataclasses.replace(options, propagation=propagation.record(program, made.lost))
    if narrow is not None:
        with clock.stage("decide", f"deciding {len(program.ops)} ops one by one"):
            lowering, said = narrow(lowering, costs, rulebook)
            options = dataclasses.replace(options, propagation=said)
    with clock.stage("hints", "deciding op by op, as greedy executors do"):
        free = propagation is None and narrow is None and templates is None
        problem = Transients(lowering, costs, node_classes(lowering) if options.tied else None)
        others = hints(lowering, costs, rulebook, pinned, traced, middles(problem.folded)) if free else {}
        starts = warm_starts(lowering, problem.folded, mesh, others)
    with clock.stage("solve", f"solving {lowering.graph.size} choices"):
        solution, baseline = _solve(problem, starts, options, clock, complete=free)
    kind: Literal["tied", "free"] = "free" if problem.folded is None else "tied"
    with clock.stage("plan", "writing down the plan"):
        if solution.assignment is None:
            raise _infeasible(program, options, solution, kind, None)
        parts = decode(
            lowering,
            solution.assignment,
            costs,
            state,
            limit=options.usable_memory,
            objective=options.objective,
            memory_weight=options.memory_weight,
        )
        if not solution.feasible:
            raise _infeasible(program, options, solution, kind, parts.memory)
    return Plan(
        name=program.name,
        mesh=mesh,
        cluster=cluster,
        options=options,
        tensors=parts.tensors,
        ops=parts.ops,
        outputs=program.outputs,
        gradients={program.tensors[p].name: g for p, g in program.gradients.items()},
        reshards=parts.reshards,
        holds=parts.holds,
        clip=parts.clip,
        memory=parts.memory,
        costs=parts.costs,
        certificate=_certificate(solution, kind, clock, baseline),
        provenance=_provenance(source, command or f"solver_shard.optimize({program.name!r}, mesh={str(mesh)!r}, ...)"),
    )


def _split(mesh: Mesh, split: Mapping[str, Sequence[int]] | str | bool) -> tuple[Mesh, str]:
    """The mesh with what the user asks to split, and what ``Options.split`` records."""
    if isinstance(split, bool):
        return mesh, "auto" if split else "off"
    if not isinstance(split, str) and not (isinstance(split, Mapping) and all(isinstance(parts, Sequence) for parts in split.values())):
        raise InputError(f"split {split!r} is not legal; write it as 'tp=8x2' or {{'tp': (8, 2)}}, or give False for none")
    sizes = parse_split(split) if isinstance(split, str) else {name: tuple(parts) for name, parts in split.items()}
    return mesh.split(sizes), ",".join(f"{name}={'x'.join(map(str, parts))}" for name, parts in sizes.items()) or "off"


def _refined(program: Program, rulebook: Rulebook, mesh: Mesh, options: Options) -> Mesh:
    """The mesh with an axis split where the model's heads ask for it, unless the user decides; of a template, its tensor parallel axes."""
    from solver_shard.baselines.restrict import parse_template, tensor_axes
    from solver_shard.choice.subaxes import split_where_needed

    if options.split != "auto" or options.conservative or mesh.whole != mesh:
        return mesh
    axes = tensor_axes(parse_template(options.template, mesh)) if options.template else None
    return split_where_needed(program, rulebook, mesh, axes)


def _solve(
    problem: Transients, starts: tuple[WarmStart, ...], options: Options, clock: _Clock, *, complete: bool
) -> tuple[Solution, str | None]:
    """Solve tied, where repeated layers share decisions, or free; the assignment is always of the free graph.

    ``complete``: where the solver stops without a proof, hold what it has against every baseline. The second value then names the
    baseline whose plan it is, if it is one's.
    """
    from solver_shard.baselines.fallback import OVERTIME, with_baselines
    from solver_shard.solve.rounds import solve_in_rounds

    graph, started = problem.graph, time.perf_counter()
    solution = solve_in_rounds(
        problem,
        objective=options.objective,
        memory_weight=options.memory_weight,
        gap=options.gap,
        time_limit=options.time_limit,
        work_limit=options.work_limit,
        seed=options.seed,
        warm_starts=starts,
        progress=clock.solver_event,
    )
    if not complete:
        return solution, None
    return with_baselines(
        solution,
        problem,
        graph,
        starts,
        objective=options.objective,
        memory_weight=options.memory_weight,
        seed=options.seed,
        seconds=options.time_limit * (1 + OVERTIME) - (time.perf_counter() - started),
    )


def _infeasible(
    program: Program, options: Options, solution: Solution, problem: Literal["tied", "free"], memory: MemoryTimeline | None
) -> SolverShardError:
    """The error for a limit that cannot be kept, or was not within the time given; or for a time too short to find anything."""
    from solver_shard.plan.report import largest_holders
    from solver_shard.solve.solution import Status

    limit = f"{format_bytes(options.usable_memory)} per device"
    if options.reserve:
        limit += f" ({format_bytes(options.memory_limit)} less the reserve of {format_bytes(options.reserve)})"
    given, longer = f"{options.time_limit:g} s", "--time-limit"
    if options.work_limit is not None:
        given, longer = f"{given} and {options.work_limit:g} work units", "--work-limit and --time-limit"
    if solution.assignment is None and solution.status is Status.UNKNOWN:
        return SolverShardError(
            f"no plan of {program.name} was found within {given}, which does not prove that there is none; give more {longer}"
        )
    proven, tied = solution.status is Status.INFEASIBLE, problem == "tied"
    pins = ", ".join(map(repr, options.pins))
    if solution.assignment is None and proven and (options.pins or options.template) and solution.peak_bound <= options.usable_memory:
        asked, ways = [f"keeps the pins {pins}"] if options.pins else [], ["drop or loosen a pin"] if options.pins else []
        if options.template:
            asked.append(
                f"is of the template {options.template!r}, whose layouts and transitions may not carry through all ops of this model,"
            )
            ways.append("use another template or none")
        return InfeasibleError(
            f"no plan of {program.name} {' and '.join(asked)} within {limit}; {', '.join(ways)}, or give more --memory",
            peak_bound=solution.peak_bound or None,
        )
    details: tuple[str, ...] = ()
    if memory is not None:
        held = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.at_peak.items() if size)
        details = (
            f"at that peak, during {memory.peak_op}, a device holds {held}; the largest are",
            *(f"  {text}" for text in largest_holders(memory, 8)),
        )
    found = (
        f"the smallest peak found is {format_bytes(solution.peak)} ({solution.peak} bytes)"
        if solution.peak is not None
        else "no peak was reached"
    )
    bound = f", and no {'tied ' if tied else ''}plan needs less than {format_bytes(solution.peak_bound)}" if solution.peak_bound else ""
    enough = "at least the peak found" + (" and the reserve together" if options.reserve else "")
    enough += " (less, down to the bound, may do)" if solution.peak_bound and solution.peak != solution.peak_bound else ""
    smaller = "a smaller batch" if options.forward_only else "a smaller batch or more --microbatches"
    hint = f"give {f'--memory {enough}' if solution.peak is not None else 'more --memory'}, a larger mesh, or {smaller}" + (
        "; --free may need less" if tied else ""
    )
    if pins:
        hint += f"; or drop or loosen a pin ({pins})"
    what = f"no plan of {program.name} fits" if proven else f"no plan of {program.name} was found that fits"
    return InfeasibleError(
        f"{what} into {limit}: {found}{bound}; {hint}" + ("" if proven else f", or more {longer}"),
        achieved_peak=solution.peak,
        peak_bound=solution.peak_bound or None,
        details=details,
    )


def _certificate(solution: Solution, problem: Literal["tied", "free"], clock: _Clock, baseline: str | None) -> Certificate:
    from solver_shard.plan.plan import Certificate

    assert solution.objective is not None, "a feasible solution has an objective"
    assert solution.bound is not None, "a feasible solution has a bound"
    stages = {**clock.seconds, **{f"solve: {stage.name}": round(stage.seconds, 3) for stage in solution.stages}}
    status = solution.status.value
    assert status in ("optimal", "gap", "feasible")
    return Certificate(
        objective=solution.objective,
        bound=solution.bound,
        gap=solution.gap or 0.0,
        status=status,  # type: ignore[arg-type]  # narrowed by the assertion above, which mypy does not follow for enums
        problem=problem,
        baseline=baseline,
        seed=solution.seed,
        work=solution.work,
        stages=stages,
        versions=_versions("ortools", "numpy"),
    )


def _provenance(source: str, command: str) -> Provenance:
    from solver_shard.plan.plan import Provenance

    return Provenance(
        tool=f"solver-shard {__version__}",
        versions=_versions("torch", "transformers", "ortools", "numpy"),
        command=command,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        source=source,
    )


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cluster(cluster: str | os.PathLike[str] | Cluster) -> Cluster:
    from solver_shard.costs.cluster import Cluster, load_cluster

    if isinstance(cluster, str | os.PathLike):
        return load_cluster(os.fspath(cluster))
    if not isinstance(cluster, Cluster):
        raise InputError(f"a cluster of type {type(cluster).__name__} was given; give a preset's name, a TOML file or a Cluster")
    return cluster


def _check_pins(pins: Sequence[str], mesh: Mesh) -> None:
    """Read the pins before the model is traced, so that a slip shows at once."""
    from solver_shard.pins import parse_pin

    if isinstance(pins, str):
        raise InputError(f"pins must be a list of texts, got one text {pins!r}; write [{pins!r}]")
    if not isinstance(pins, Sequence) or not all(isinstance(text, str) for text in pins):
        raise InputError(f"pins must be a list of texts, got {pins!r}; write them as in ['lm_head.weight={mesh.names[-1]}=S(0)']")
    for text in pins:
        parse_pin(text, mesh)


def _check_reserve(limit: int, reserve: int, cluster: Cluster) -> None:
    if reserve >= limit:
        raise InputError(
            f"a reserve of {format_bytes(reserve)} leaves nothing of the memory limit of {format_bytes(limit)}; give a larger --memory, "
            f"or a smaller --reserve (the one of cluster {cluster.name} is {format_bytes(cluster.device.reserve)}; 0 for none)"
        )


def _check_optimizer(options: Options) -> None:
    """An optimizer that is known, with a state that something keeps."""
    from solver_shard.costs.memory import OPTIMIZERS, optimizer_state

    if not isinstance(options.optimizer, str):
        raise InputError(f"optimizer {options.optimizer!r} is not known; legal: {', '.join(OPTIMIZERS)}")
    optimizer_state(
        options.optimizer,
        master_weights=options.master_weights,
        state_bytes=options.state_bytes,
        reduce_dtype=options.reduce_dtype,
        clip=options.clip,
    )
    if options.forward_only and (options.clip or options.reduce_dtype is not None):
        what = "clipping" if options.clip else f"a reduce dtype of {options.reduce_dtype}"
        raise InputError(f"{what} was asked with a forward-only step, which has no gradients; drop one of the two")
    if options.state_bytes is not None and (options.forward_only or options.optimizer == "none"):
        what = "a forward-only step" if options.forward_only else "optimizer none"
        raise InputError(f"{options.state_bytes} bytes of optimizer state were asked with {what}, which keeps none; drop one of the two")


def _check_microbatches(microbatches: int, batch: int | None, *, forward_only: bool) -> int:
    if not _is_number(microbatches, whole=True) or not 1 <= microbatches <= MAX_MICROBATCHES:
        raise InputError(f"microbatches {microbatches!r} is not legal; give a whole number, 1 to {MAX_MICROBATCHES}")
    if microbatches > 1 and forward_only:
        raise InputError("a forward-only step has no gradients to accumulate; plan one microbatch, and leave --microbatches out")
    if batch is not None and _is_number(batch, whole=True) and batch % microbatches:
        near = [n for n in range(1, min(batch, MAX_MICROBATCHES) + 1) if batch % n == 0]
        closest = sorted(near, key=lambda n: abs(n - microbatches))[:2]
        raise InputError(
            f"a batch of {batch} cannot be run in {microbatches} equal microbatches; give a number that divides it, as "
            f"{' or '.join(map(str, closest))}"
        )
    return int(microbatches)


def _part(batch: int | None, microbatches: int) -> int | None:
    """The batch of one microbatch; what is no number is left for the frontend to refuse."""
    return batch // microbatches if batch is not None and microbatches > 1 and _is_number(batch, whole=True) else batch


def _yes_or_no(name: str, value: object) -> bool:
    """A flag; numbers and texts would look as if they meant more."""
    if not isinstance(value, bool):
        raise InputError(f"{name}={value!r} is not legal; give True or False")
    return value


def _check_numbers(
    *, overlap: float, objective: str, memory_weight: int, gap: float, time_limit: float, work_limit: float | None, seed: int
) -> None:
    if not _is_number(overlap) or not 0 <= overlap <= 1:
        raise InputError(f"overlap {overlap!r} is not legal; it is the hidden part of parameter gathers and gradient reductions, 0 to 1")
    if objective not in ("time", "memory"):
        raise InputError(f"objective {objective!r} is not known; legal: time, memory")
    if not _is_number(memory_weight, whole=True) or not 0 <= memory_weight <= MAX_MEMORY_WEIGHT:
        raise InputError(
            f"memory weight {memory_weight!r} is not legal; it is a whole number of nanoseconds per MiB of peak, 0 to {MAX_MEMORY_WEIGHT}"
        )
    if memory_weight and objective == "memory":
        raise InputError("a memory weight only makes sense with the time objective; drop it, or use objective time")
    if not _is_number(gap) or not 0 <= gap < 1:
        raise InputError(f"gap {gap!r} is not legal; it is a part of the objective, at least 0 and less than 1, as in 0.01")
    if not _is_number(time_limit) or not 0 < time_limit < math.inf:
        raise InputError(f"time limit {time_limit!r} is not legal; give seconds, more than 0")
    if work_limit is not None and not (_is_number(work_limit) and 0 < work_limit < math.inf):
        raise InputError(f"work limit {work_limit!r} is not legal; give a number of work units, more than 0")
    if not _is_number(seed, whole=True) or not 0 <= seed < 2**31:
        raise InputError(f"seed {seed!r} is not legal; give a whole number, 0 to {2**31 - 1}")


def _is_number(value: object, *, whole: bool = False) -> bool:
    """Whether this is a number of Python or numpy; truth values are not."""
    return isinstance(value, numbers.Integral if whole else numbers.Real) and not isinstance(value, bool)


@dataclass(slots=True, kw_only=True)
class _Clock:
    """Wall seconds by stage, and the progress lines."""

    progress: Progress | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    last_event: float = 0.0

    @contextmanager
    def stage(self, name: str, line: str) -> Iterator[None]:
        self.say(line)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(time.perf_counter() - start, 3)

    def say(self, line: str) -> None:
        if self.progress is not None:
            self.progress(line)

    def solver_event(self, event: Event) -> None:
        """A line for a better plan or bound, at most one per second."""
        from solver_shard.solve.solution import relative_gap

        now = time.perf_counter()
        if event.objective is not None and event.bound is not None and now - self.last_event >= 1.0:
            self.last_event = now
            gap = relative_gap(event.objective, event.bound)
            self.say(f"solving: objective {event.objective:,}, bound {event.bound:,}, gap {gap:.2%} ({event.source})")
