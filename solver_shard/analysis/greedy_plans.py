"""What a greedy executor does with a model by itself: from what the user calls a model to the plan of a baseline.

>>> plan, walk = greedy_plan("gpt2", mesh="dp=4,tp=2", name="dtensor-greedy", pins=["input_ids=S(0),R"], batch=16, seq=1024)
>>> print(plan, walk_report(walk, plan.cluster), sep="\\n\\n")
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Unpack, cast, get_args

from solver_shard.arguments import checked
from solver_shard.baselines import left_over
from solver_shard.baselines.dijkstra_greedy import decide
from solver_shard.baselines.dtensor_greedy import NAME, Walk, WalkedCollective, carry, dtensor_masks, walk
from solver_shard.baselines.propagated import Propagation
from solver_shard.clock import StageClock
from solver_shard.costs.collectives import Collectives
from solver_shard.errors import InputError
from solver_shard.graph.build import Lowered
from solver_shard.graph.choice_graph import Masks
from solver_shard.graph.pins import Allowed, parse_pin, resolve_pins
from solver_shard.layout import Layout, R
from solver_shard.mesh import Mesh
from solver_shard.options import Options, SolveOptions, with_options
from solver_shard.program import Program
from solver_shard.shardy.passes import FactorStrategy, PassName, PropagationOptions
from solver_shard.text import fold_items, format_bytes, format_ns, table, text_of
from solver_shard.tracing.clean import TracedProgram

if TYPE_CHECKING:
    import torch

    from solver_shard.costs.cluster import Cluster
    from solver_shard.plan.plan import Plan


NO_LIMIT = 2**50


GreedyName = Literal["dtensor-greedy", "dijkstra-greedy"]

MAX_UNSUPPORTED = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PropagatedPlan:
    """What greed makes of a model: a plan, and where DTensor was followed the walk with its own collectives. ``str()`` is the report."""

    plan: Plan
    walk: Walk | None = None

    def __str__(self) -> str:
        return str(self.plan) if self.walk is None else f"{self.plan}\n\n{walk_report(self.walk, self.plan.cluster)}"


@with_options("propagate")
@checked
def propagate(
    model: str | os.PathLike[str] | torch.nn.Module | Program,
    *,
    mesh: str | int | Mesh,
    which: PassName | GreedyName = "user-priority",
    strategy: FactorStrategy = "aggressive",
    conservative_propagation: bool = False,
    run_op_priority: bool = True,
    cluster: str | os.PathLike[str] | Cluster = "h100",
    command: str | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Unpack[SolveOptions],
) -> PropagatedPlan:
    """Decide a model's layouts greedily from its pins, and price the plan that follows, whether it fits into a device or not.

    >>> greedy = propagate("gpt2", mesh="dp=4,tp=2", pins=["input_ids=S(0),R"], batch=16, seq=1024)  # doctest: +SKIP
    >>> print(greedy.plan.costs.total_ns)                                                            # doctest: +SKIP

    The passes are Shardy's (:func:`solver_shard.propagate_module` runs them on StableHLO). ``dtensor-greedy`` and ``dijkstra-greedy``
    decide op by op, as DTensor does and by our costs, and what is not pinned is replicated.

    Args:
        model: as in ``solver_shard.optimize``.
        mesh: axes, outermost first: ``"dp=4,tp=2"``.
        which: basic, aggressive, op-priority or user-priority, each of which runs the ones before; dtensor-greedy or dijkstra-greedy.
        strategy: of the passes from aggressive on, how the axes of one op's factors are settled: basic, aggressive or
            basic-then-aggressive.
        conservative_propagation: the passes propagate no part of an axis, nor what could yield uneven shards.
        run_op_priority: op-priority takes five levels of ops one after the other; False takes all at once.
        cluster: what prices the plan: a preset name, a TOML file, or a Cluster.
        command: what to record as the plan's origin; default: a call of this function.
        progress: called with a line of text when a stage starts.
        OPTIONS

    Returns:
        The plan, with times in nanoseconds and bytes per device, and DTensor's walk where ``which`` is dtensor-greedy.

    Raises:
        InputError: an argument is not usable; the message says what is legal.
        TraceError: the model cannot be traced.
    """
    from solver_shard.api import read_request, traced_step
    from solver_shard.pipeline import plan_program

    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    command = command or f"solver_shard.propagate({model!r}, mesh={mesh!r}, which={which!r}, ...)"
    unlimited: SolveOptions = {**options, "memory": NO_LIMIT, "reserve": 0, "tied": False}
    clock = StageClock(progress=progress, total=options.get("total_time_limit"))
    greedy = which in get_args(GreedyName)
    if greedy:
        unlimited["split"] = False
    request = read_request(model, mesh=mesh, cluster=cluster, **unlimited)
    asked, axes, where = request.options, request.mesh, request.cluster
    with clock.stage("trace", "tracing the model"):
        program, traced, source = traced_step(model, asked)
    if not greedy:
        passes = PropagationOptions(strategy=strategy, conservative=conservative_propagation, run_op_priority=run_op_priority)
        propagation = Propagation(name=cast(PassName, which), options=passes)
        asked = dataclasses.replace(asked, propagation=str(propagation))
        plan = plan_program(
            program, mesh=axes, cluster=where, options=asked, source=source, command=command, clock=clock, baseline=propagation
        )
        return PropagatedPlan(plan=limited_to_itself(plan))
    clock.say(f"deciding {len(program.ops)} ops one by one")
    if which != NAME:
        plan = dijkstra_greedy_plan(program, mesh=axes, cluster=where, options=asked, source=source, command=command)
        return PropagatedPlan(plan=limited_to_itself(plan))
    traced = followable(traced, asked)
    stored = stored_layouts(program, resolve_pins([parse_pin(text, axes) for text in asked.pins], program, axes))
    per_host = where.levels[0].size or axes.size
    plan, walk = dtensor_greedy_plan(
        traced, mesh=axes, cluster=where, options=asked, pins=stored, devices_per_host=per_host, source=source, command=command
    )
    return PropagatedPlan(plan=limited_to_itself(plan), walk=walk)


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


def followable(traced: TracedProgram | None, options: Options) -> TracedProgram:
    """The trace that DTensor is followed through; InputError where there is none, or it is not the step as it runs."""
    if traced is None:
        raise InputError(f"{NAME} follows DTensor through the ops of a trace, which a Program has no more; give the model itself")
    if options.microbatches > 1 or options.fusion or options.conservative:
        raise InputError(f"{NAME} decides the ops of a plain step: one microbatch, unfused, with all rules")
    return traced


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

    def rows(phase: str, collectives: Sequence[WalkedCollective]) -> list[tuple[str, ...]]:
        groups: dict[tuple[str, str], list[WalkedCollective]] = {}
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


def _price(group: Sequence[WalkedCollective], times: Collectives) -> int:
    return sum(times.nanoseconds(c.kind, (c.axis,), c.nbytes) for c in group)
