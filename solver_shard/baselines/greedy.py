"""What a greedy executor does with a model by itself: from what the user calls a model to the plan of a baseline.

>>> plan, walk = greedy_plan("gpt2", mesh="dp=4,tp=2", name="dtensor-greedy", pins=["input_ids=S(0),R"], batch=16, seq=1024)
>>> print(plan, walk_report(walk, plan.cluster), sep="\\n\\n")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from solver_shard.baselines.carry import NAME, dtensor_greedy_plan
from solver_shard.baselines.dijkstra_greedy import dijkstra_greedy_plan
from solver_shard.baselines.dtensor_greedy import Collective, Walk
from solver_shard.baselines.propagated import NO_LIMIT, limited_to_itself
from solver_shard.costs.collectives import Collectives
from solver_shard.errors import InputError
from solver_shard.layout import Layout, R
from solver_shard.mesh import Mesh
from solver_shard.names import fold_items, text_of
from solver_shard.pins import Allowed, parse_pin, resolve_pins
from solver_shard.plan.plan import Options
from solver_shard.plan.table import table
from solver_shard.source import DEFAULT_DTYPE, is_entry_point, traced_of
from solver_shard.units import format_bytes, format_ns

if TYPE_CHECKING:
    from solver_shard.costs.cluster import Cluster
    from solver_shard.plan.plan import Plan
    from solver_shard.program import Program

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
