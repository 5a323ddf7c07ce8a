"""What a greedy executor does with a model by itself: from what the user calls a model to the plan of a baseline.

>>> plan, walk = greedy_plan("gpt2", mesh="dp=4,tp=2", name="dtensor-greedy", pins=["input_ids=S(0),R"], batch=16, seq=1024)
>>> print(plan, walk_report(walk, plan.cluster), sep="\\n\\n")
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from solver_shard.baselines import left_over
from solver_shard.baselines.dijkstra_greedy import decide
from solver_shard.baselines.dtensor_greedy import NAME, Collective, Walk, carry, dtensor_masks, walk
from solver_shard.baselines.propagated import Propagation
from solver_shard.costs.collectives import Collectives
from solver_shard.errors import InputError
from solver_shard.graph.build import Lowered
from solver_shard.graph.choice_graph import Masks
from solver_shard.graph.pins import Allowed, parse_pin, resolve_pins
from solver_shard.layout import Layout, R
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.program import Program
from solver_shard.shardy.passes import PassName, PropagationOptions
from solver_shard.text import fold_items, format_bytes, format_ns, table, text_of
from solver_shard.tracing.clean import TracedProgram
from solver_shard.tracing.load import DEFAULT_DTYPE, is_entry_point, traced_of

if TYPE_CHECKING:
    from solver_shard.costs.cluster import Cluster
    from solver_shard.plan.plan import Plan


NO_LIMIT = 2**50


def propagated_plan(
    model: Any,
    *,
    mesh: str,
    name: PassName,
    pins: Sequence[str] = (),
    options: PropagationOptions | None = None,
    cluster: str = "h100",
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    forward_only: bool = False,
    optimizer: str = "adamw",
    split: str | bool = True,
    command: str | None = None,
    progress: Any = None,
) -> Plan:
    """Trace a model, propagate its pins, and price the plan that follows, whether it fits into a device or not.

    Args:
        model, mesh, pins, cluster, batch, seq, dtype, forward_only, optimizer, split: as in ``solver_shard.optimize``.
        name: basic, aggressive, op-priority or user-priority.
        options: strategy and levels of the pass.

    Raises:
        InputError: an argument is not usable; the message says what is legal.
        TraceError: the model cannot be traced.
    """
    from solver_shard.api import optimize

    propagation = Propagation(name=name, options=options or PropagationOptions())
    plan = optimize(
        model,
        mesh=mesh,
        pins=pins,
        cluster=cluster,
        memory=NO_LIMIT,
        reserve=0,
        batch=batch,
        seq=seq,
        dtype=dtype,
        forward_only=forward_only,
        optimizer=optimizer,
        split=split,
        tied=False,
        propagation=propagation,
        command=command,
        progress=progress,
    )
    return limited_to_itself(plan)


def limited_to_itself(plan: Plan) -> Plan:
    """A plan that was made without a limit, as one whose limit is the device's memory, or its own peak where that is more."""
    limit = max(plan.cluster.device.memory, plan.memory.peak)
    return dataclasses.replace(
        plan,
        options=dataclasses.replace(plan.options, memory_limit=limit),
        memory=dataclasses.replace(plan.memory, limit=limit),
    )


def dijkstra_greedy_plan(
    program: Program, *, mesh: Mesh, cluster: Cluster, options: Options, source: str = "", command: str | None = None
) -> Plan:
    """The plan of the walk, priced as all plans are; ``Plan.options.propagation`` names what was left to the solver.

    ``source`` and ``command`` are for ``Plan.provenance``.

    Raises:
        InfeasibleError: it does not fit the memory limit of the options.
    """
    from solver_shard.pipeline import plan_program

    asked = dataclasses.replace(options, tied=False)
    return plan_program(program, mesh=mesh, cluster=cluster, options=asked, baseline=decide, source=source, command=command)


def dtensor_greedy_plan(
    traced: TracedProgram,
    *,
    mesh: Mesh,
    cluster: Cluster,
    options: Options,
    pins: Mapping[str, Layout],
    devices_per_host: int = 8,
    source: str = "",
    command: str | None = None,
) -> tuple[Plan, Walk]:
    """The plan that keeps what DTensor decides from these pins, and the walk that says so.

    ``Plan.options.propagation`` names the ops that are left to the solver; pins of the options are only recorded. ``source`` and
    ``command`` are for ``Plan.provenance``.

    Raises:
        InputError: a pin that cannot be.
        InfeasibleError: the plan does not fit the memory limit of the options.
    """
    from solver_shard.pipeline import plan_program

    found = walk(traced.raw, mesh, pins, devices_per_host=devices_per_host)

    def decide(lowered: Lowered) -> tuple[Masks, str]:
        masks, missing = dtensor_masks(lowered.lowering, carry(lowered.program, traced, found, pins))
        return masks, NAME + left_over(lowered.program, missing)

    # axes are not split: DTensor knows no parts of an axis
    asked = dataclasses.replace(options, tied=False, pins=(), split="off")
    plan = plan_program(traced.program, mesh=mesh, cluster=cluster, options=asked, baseline=decide, source=source, command=command)
    return dataclasses.replace(plan, options=dataclasses.replace(plan.options, pins=options.pins)), found


GreedyName = Literal["dtensor-greedy", "dijkstra-greedy"]

MAX_UNSUPPORTED = 8


def greedy_plan(
    model: Any,
    *,
    mesh: str,
    name: GreedyName,
    pins: Sequence[str] = (),
    cluster: str = "h100",
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    forward_only: bool = False,
    optimizer: str = "adamw",
    command: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[Plan, Walk | None]:
    """Trace a model, decide op by op from its pins, and price the plan that follows, whether it fits into a device or not.

    What is not pinned is replicated. The second value has DTensor's own collectives, None for ``dijkstra-greedy``.

    Args:
        model, mesh, pins, cluster, batch, seq, dtype, forward_only, optimizer: as in ``solver_shard.optimize``.

    Raises:
        InputError: an argument is not usable; the message says what is legal.
        TraceError: the model cannot be traced.
    """
    from solver_shard.costs.cluster import load_cluster

    axes, where, say = Mesh.parse(mesh), load_cluster(cluster), progress or (lambda line: None)
    parsed = [parse_pin(text, axes) for text in pins]
    if dtype is None and isinstance(model, str) and not is_entry_point(model):
        dtype = DEFAULT_DTYPE
    say("tracing the model")
    program, traced, source = traced_of(model, batch=batch, seq=seq, dtype=dtype, forward_only=forward_only)
    options = Options(
        batch=batch,
        seq=seq,
        dtype=dtype,
        forward_only=forward_only,
        optimizer=optimizer,
        memory_limit=NO_LIMIT,
        pins=tuple(pins),
        split="off",
        tied=False,
    )
    command = command or f"greedy_plan({model!r}, name={name!r}, ...)"
    say(f"deciding {len(program.ops)} ops one by one")
    if name == NAME:
        if traced is None:
            raise InputError(f"{NAME} follows DTensor through the ops of a trace, which a Program has no more; give the model itself")
        stored = stored_layouts(program, resolve_pins(parsed, program, axes))
        per_host = where.levels[0].size or axes.size
        plan, walk = dtensor_greedy_plan(
            traced, mesh=axes, cluster=where, options=options, pins=stored, devices_per_host=per_host, source=source, command=command
        )
        return limited_to_itself(plan), walk
    return limited_to_itself(dijkstra_greedy_plan(program, mesh=axes, cluster=where, options=options, source=source, command=command)), None


def stored_layouts(program: Program, pinned: Mapping[int, Allowed]) -> dict[str, Layout]:
    """Pins of stored tensors as one layout each: DTensor is given these, and axes without a pin are replicated."""
    sources = set(program.sources())
    found = {}
    for t, allowed in pinned.items():
        name = program.tensors[t].name
        if t not in sources:
            raise InputError(
                f"the pin {allowed.pins[-1]!r} is of {name!r}, which the model computes; DTensor is given parameters, buffers and inputs "
                "and decides the rest; drop the pin"
            )
        if any(left is not None and len(left) != 1 for left in allowed.axes):
            raise InputError(
                f"the pin {allowed.pins[-1]!r} leaves {name!r} several placements; DTensor is given one, R or S(dim) on every axis"
            )
        found[name] = Layout(R if left is None else next(iter(left)) for left in allowed.axes)
    return found


def walk_report(walk: Walk, cluster: Cluster) -> str:
    """The collectives that DTensor runs by itself, by kind and axis, with their price under our costs; and where it raises."""
    times = Collectives(walk.mesh, cluster)

    def rows(phase: str, collectives: Sequence[Collective]) -> list[tuple[str, ...]]:
        groups: dict[tuple[str, str], list[Collective]] = {}
        for c in collectives:
            groups.setdefault((c.kind, walk.mesh.names[c.axis]), []).append(c)
        return [
            (phase, kind, axis, str(len(group)), format_bytes(sum(c.nbytes for c in group)), format_ns(_price(group, times)))
            for (kind, axis), group in groups.items()
        ]

    by_phase = Counter(op.phase for op in walk.ops)
    found = [row for phase in by_phase for row in rows(phase.value, [c for op in walk.ops if op.phase is phase for c in op.collectives])]
    found += rows("left to the user", walk.closing)
    head = ("where", "collective", "axis", "count", "bytes", "time")
    total = ("all", "", "", str(len(walk.collectives) + len(walk.closing)), "", format_ns(walk.nanoseconds(times)))
    lines = [
        "DTensor's own collectives, op by op (left to the user: gradients to their parameters' layouts, pending outputs)",
        *table([head, *found, total], right=(3, 4, 5)),
    ]
    raises = fold_items([(f"{op.module}: {op.op}".removeprefix(": "), op.unsupported) for op in walk.unsupported])
    if raises:
        lines += ["", f"DTensor raises at {len(walk.unsupported)} ops; the walk goes on as if their inputs had been replicated"]
        lines += [f"  {name}{f'  x{count}' if count > 1 else ''}: {why}" for name, why, count in raises[:MAX_UNSUPPORTED]]
        lines += [f"  and {len(raises) - MAX_UNSUPPORTED} more"] if len(raises) > MAX_UNSUPPORTED else []
    return text_of(lines)


def _price(group: Sequence[Collective], times: Collectives) -> int:
    return sum(times.nanoseconds(c.kind, (c.axis,), c.nbytes) for c in group)
