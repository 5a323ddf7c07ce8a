"""The main job in one call: a model, a mesh, a cluster and a memory limit in, a proven plan out.

>>> plan = optimize("gpt2", batch=16, seq=1024, mesh="8", cluster="h100")
>>> print(plan)                                                             # the report
>>> plan.save("plan.json")

What can be asked is the table of :mod:`solver_shard.options`; :func:`read_request` reads it and checks it against mesh and cluster.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from solver_shard.arguments import Several, checked, each
from solver_shard.clock import Progress, StageClock
from solver_shard.files import RulesFile
from solver_shard.graph.pins import check_pins
from solver_shard.mesh import Mesh, parse_split
from solver_shard.options import (
    OPTIONS,
    Options,
    SolveOptions,
    check_microbatches,
    check_objective,
    check_optimizer,
    check_reserve,
    part_of,
    read_options,
    with_options,
)
from solver_shard.pipeline import plan_program
from solver_shard.program import Program
from solver_shard.tracing.load import DEFAULT_DTYPE, is_entry_point, traced_of

if TYPE_CHECKING:
    import torch

    from solver_shard.costs.cluster import Cluster
    from solver_shard.plan.plan import Plan
    from solver_shard.tracing.clean import TracedProgram


DEFAULT_MEMORY_FRACTION = 0.9
"""Of the device's memory, where no limit is given; the rest is for what no tensor may have."""


@with_options()
@checked
def optimize(
    model: str | os.PathLike[str] | torch.nn.Module | Program,
    inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    *,
    mesh: str | int | Mesh,
    cluster: str | os.PathLike[str] | Cluster = "h100",
    loss_fn: Callable[..., Any] | None = None,
    workers: int = 2,
    command: str | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    incumbent: Callable[[Plan], None] | None = None,
    **options: Unpack[SolveOptions],
) -> Plan:
    """Find the sharding of every tensor that makes one step fastest within a memory limit.

    >>> plan = optimize("gpt2", batch=16, seq=1024, mesh="dp=4,tp=2", memory="70GiB", pins=["input_ids=S(0),R"])  # doctest: +SKIP
    >>> plan.layouts["transformer.wte.weight"], plan.costs.total_ns, plan.memory.peak                            # doctest: +SKIP

    Args:
        model: a preset name, a Hugging Face ``config.json``, an entry point ``package.module:function``, a module, or a
            Program. Presets and configs need ``batch`` (and ``seq`` for language models), a module its ``inputs``.
        inputs: example tensors with the global sizes of one step, or of one microbatch of it; fake and meta tensors are fine.
        loss_fn: maps the model's output to a scalar, where the model computes no loss itself.
        command: what to record as the plan's origin; default: a call of this function.
        progress: called with a line of text when a stage starts or the solver gets further.
        stop: asked again and again while the solver runs; True ends it with the best plan so far, whose certificate then says
            ``interrupted``. Signals are left alone: a Ctrl-C raises KeyboardInterrupt as anywhere in Python.
        incumbent: called with the best plan so far, complete and with the bound of that moment, now and then while the solver runs:
            first after some seconds, then at most every ten seconds and for 2% of the time.
        OPTIONS

    Returns:
        The plan: layouts, collectives, times in nanoseconds, bytes per device, and the certificate with objective, bound and gap.

    Raises:
        InputError: an argument is not usable; the message says what is legal.
        TraceError: the model cannot be traced.
        RuleError: a rules file is not legal, or a row does not fit its op; the message names file, row and fix.
        InfeasibleError: no plan fits the limit or the pins.
        SolverShardError: no plan was found before a time limit struck, or before ``stop``.
    """
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    clock = StageClock(progress=progress, total=options.get("total_time_limit"))
    request = read_request(model, mesh=mesh, cluster=cluster, workers=workers, **options)
    with clock.stage("trace", "tracing the model"):
        program, traced, source = traced_step(model, request.options, inputs=inputs, loss_fn=loss_fn)
    return plan_program(
        program,
        mesh=request.mesh,
        cluster=request.cluster,
        options=request.options,
        source=source,
        command=command,
        clock=clock,
        workers=int(workers),
        stop=stop,
        incumbent=incumbent,
        traced=traced,
    )


def traced_step(
    model: str | torch.nn.Module | Program, options: Options, *, inputs: Any = None, loss_fn: Callable[..., Any] | None = None
) -> tuple[Program, TracedProgram | None, str]:
    """The program of one microbatch of the step that options ask for, its trace, and where it comes from.

    Raises:
        InputError, TraceError: as :func:`optimize`.
    """
    program, traced, source = traced_of(
        model,
        inputs,
        batch=part_of(options.batch, options.microbatches),
        seq=options.seq,
        dtype=options.dtype,
        loss_fn=loss_fn,
        forward_only=options.forward_only,
        checkpoint=options.checkpoint,
    )
    return program, traced, source + (f", {options.microbatches} microbatches" if options.microbatches > 1 else "")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a call of :func:`optimize` asks for, beside its model: ready for :func:`plan_program`."""

    mesh: Mesh
    cluster: Cluster
    options: Options


def read_request(
    model: str | torch.nn.Module | Program,
    *,
    mesh: str | int | Mesh,
    cluster: str | os.PathLike[str] | Cluster = "h100",
    workers: int = 2,
    **options: Unpack[SolveOptions],
) -> Request:
    """Read and check the arguments of :func:`optimize`; nothing is traced.

    Raises:
        InputError, RuleError, TypeError: as :func:`optimize`.
    """
    from solver_shard.costs.cluster import load_cluster

    values = read_options({**options, "mesh": mesh, "cluster": cluster, "workers": workers})
    axes, values["split"] = _split(mesh if isinstance(mesh, Mesh) else Mesh.parse(str(mesh)), values["split"])
    if values["dtype"] is None and isinstance(model, str) and not is_entry_point(model):
        values["dtype"] = DEFAULT_DTYPE
    values["cluster"] = load_cluster(cluster)
    values["memory"], values["reserve"] = _memory(values["memory"], values["reserve"], values["cluster"])
    values["pins"] = each(values["pins"])
    check_pins(values["pins"], axes)
    _check_template(values["template"], axes)
    values["rules"] = _rules(values["rules"])
    asked = Options(**{entry.recorded: values[name] for name, entry in OPTIONS.items() if entry.recorded})
    check_objective(asked)
    check_microbatches(asked)
    check_optimizer(asked)
    return Request(mesh=axes, cluster=values["cluster"], options=asked)


def _split(mesh: Mesh, split: Mapping[str, Sequence[int]] | str | bool) -> tuple[Mesh, str]:
    """The mesh with what the user asks to split, and what ``Options.split`` records."""
    if isinstance(split, bool):
        return mesh, "auto" if split else "off"
    sizes = parse_split(split) if isinstance(split, str) else {name: tuple(parts) for name, parts in split.items()}
    return mesh.split(sizes), ",".join(f"{name}={'x'.join(map(str, parts))}" for name, parts in sizes.items()) or "off"


def _memory(memory: int | None, reserve: int | None, cluster: Cluster) -> tuple[int, int]:
    """Bytes of the limit and of its reserve."""
    device = cluster.device
    limit = memory if memory is not None else math.floor(device.memory * DEFAULT_MEMORY_FRACTION)
    kept = reserve if reserve is not None else device.reserve if memory is not None else 0
    check_reserve(limit, kept, cluster)
    return limit, kept


def _check_template(template: str | None, mesh: Mesh) -> None:
    from solver_shard.graph.templates import parse_template

    if template is None:
        return
    parse_template(template, mesh)


def _rules(rules: Several[str | os.PathLike[str]]) -> tuple[RulesFile, ...]:
    """The rules files, read; what is wrong with them is said before the model is traced."""
    from solver_shard.rules.table import load_table, read_rules

    files = tuple(map(read_rules, each(rules)))
    if files:
        load_table(files)
    return files
