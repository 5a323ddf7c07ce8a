"""Whether the figures of a plan agree with each other: totals with their parts, the peak with the timeline, the proof with the price.

>>> check_figures(plan_from_json(text))  # reading a plan has done it

A plan file may come from anywhere, and what it says is shown, drawn and compared as it stands. So whatever can be added up again without
the model is, and a file in which a figure was changed by hand is refused with the figure's name. Whether the decisions are legal and the
prices are those of the cost model, only the evaluator can say, which has the model (:func:`solver_shard.plan.legal.evaluated`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from solver_shard.costs.layouts import free_move
from solver_shard.costs.overlap import exposed
from solver_shard.errors import InputError
from solver_shard.layout import Layout
from solver_shard.plan.plan import LOCAL, MOST_HOLDERS, Plan
from solver_shard.solve.solution import objective_value, relative_gap

Figure = tuple[str, Any, Any]
"""Its name in the file, what the file says, and what the rest of the file gives."""


def check_figures(plan: Plan) -> None:
    """InputError names the first figure that does not fit the others."""
    _check(itertools.chain(_moves(plan), _layouts(plan), _overlap(plan), _costs(plan), _memory(plan), _proof(plan)))


def check_times(plan: Plan) -> None:
    """The same of the times and of what moves, whatever an overlap hides of it."""
    _check(itertools.chain(_moves(plan), _costs(plan)))


def _check(figures: Iterable[Figure]) -> None:
    for name, said, found in figures:
        if said != found:
            shown = [str(x) if isinstance(x, Layout) else repr(x) for x in (said, found)]
            raise InputError(
                f"{name}: the file says {shown[0]:.60}, and its other figures give {shown[1]:.60}: it was changed after it was written; "
                "take it as solve wrote it, or solve again"
            )


def _moves(plan: Plan) -> Iterator[Figure]:
    """No time or size is below zero, moves lead from where they start to where they end, and an operand comes from one place."""
    for i, op in enumerate(plan.ops):
        for name, value in (("nanoseconds", op.nanoseconds), *_inside(op.collectives)):
            yield f"ops[{i}].{name}", value, max(value, 0)
    for name, value in _inside(() if plan.clip is None else (plan.clip,), "clip"):
        yield name, value, max(value, 0)
    came: set[tuple[int, int]] = set()
    for i, reshard in enumerate(plan.reshards):
        where, own = f"reshards[{i}]", tuple(reshard.readers)
        for name, value in (("traffic_ns", reshard.traffic_ns), ("nbytes", reshard.nbytes), *_inside(reshard.steps, "steps")):
            yield f"{where}.{name}", value, max(value, 0)
        for k, step in enumerate(reshard.steps):
            if step.kind in LOCAL:
                yield f"{where}.steps[{k}].nanoseconds", step.nanoseconds, 0
        full = sum(step.nanoseconds for step in reshard.steps)
        yield f"{where}.nanoseconds", reshard.nanoseconds, min(max(reshard.nanoseconds, 0), full)
        yield f"{where}.bucket", reshard.bucket, max(reshard.bucket, 1)
        yield f"{where}.stop", reshard.stop, min(max(reshard.stop, reshard.start, 0), len(plan.ops) + 1)
        yield f"{where}.readers", own, tuple(reader for reader in own if plan.ops[reader[0]].operands[reader[1]] == reshard.tensor)
        yield f"{where}.readers", own, tuple(reader for reader in dict.fromkeys(own) if reader not in came)
        came.update(own)
        path = (reshard.source, *(step.after for step in reshard.steps))
        yield f"{where}.steps", tuple(step.before for step in reshard.steps), path[:-1]
        if reshard.steps:
            yield f"{where}.layout", reshard.layout, path[-1]
    for i, hold in enumerate(plan.holds):
        kept = None if hold.reshard is None else plan.reshards[hold.reshard]
        yield f"holds[{i}].nbytes", hold.nbytes, max(hold.nbytes, 0)
        if kept is not None:
            yield f"holds[{i}].reshard", (hold.tensor, hold.layout), (kept.tensor, kept.layout)


def _layouts(plan: Plan) -> Iterator[Figure]:
    """A tensor starts from where it is made, kept or stored, and ends where its readers take it."""
    made = {t: layout for op in plan.ops for t, layout in zip(op.results, op.result_layouts, strict=True)}
    kept = {hold.tensor: hold.layout for hold in plan.holds}
    handed = {(r.tensor, str(r.purpose)): r.layout for r in plan.reshards}
    for t, tensor in enumerate(plan.tensors):
        ends = [
            made.get(t, tensor.layout),
            *(handed[t, purpose] for purpose in ("optimizer", "output") if t in made and (t, purpose) in handed),
        ]
        yield f"tensors[{t}].layout", tensor.layout, _one_of(tensor.layout, ends)
    for i, reshard in enumerate(plan.reshards):
        t, tensor = reshard.tensor, plan.tensors[reshard.tensor]
        starts = [made.get(t, tensor.layout), *([kept[t]] if t in kept and reshard.purpose != "forward" else [])]
        if reshard.purpose == "optimizer" and (t, "accumulate") in handed:
            starts = [handed[t, "accumulate"]]
        if reshard.purpose == "update":
            starts = [tensor.state] if tensor.state is not None else []
        yield f"reshards[{i}].source", reshard.source, _one_of(reshard.source, starts)
        for op, k in reshard.readers:
            read = plan.ops[op].operand_layouts[k]
            yield f"ops[{op}].operand_layouts[{k}]", read, read if free_move(reshard.layout, read) else reshard.layout


def _one_of(said: Layout, legal: Sequence[Layout]) -> Layout | None:
    return said if said in legal else legal[0] if legal else None


def _inside(moves: Any, name: str = "collectives") -> Iterator[tuple[str, int]]:
    for k, move in enumerate(moves):
        yield f"{name}[{k}].nbytes", move.nbytes
        yield f"{name}[{k}].nanoseconds", move.nanoseconds


def _costs(plan: Plan) -> Iterator[Figure]:
    costs, count = plan.costs, plan.options.microbatches
    runs, collectives = [(plan.runs(reshard), reshard) for reshard in plan.reshards], plan.collectives()
    by_kind: dict[str, int] = {}
    for c in collectives:
        by_kind[c.kind] = by_kind.get(c.kind, 0) + c.runs * c.nanoseconds
    compute = count * sum(op.nanoseconds for op in plan.ops) + sum(n * reshard.traffic_ns for n, reshard in runs)
    communication = sum(n * reshard.nanoseconds for n, reshard in runs)
    communication += sum(c.runs * c.nanoseconds for c in collectives if c.reshard is None)
    yield "costs.by_kind_ns", _without_zeros(costs.by_kind_ns), _without_zeros(by_kind)
    yield "costs.compute_ns", costs.compute_ns, compute
    yield "costs.update_ns", costs.update_ns, max(costs.update_ns, 0)
    yield "costs.communication_ns", costs.communication_ns, communication
    yield "costs.hidden_ns", costs.hidden_ns, sum(by_kind.values()) - communication
    yield "costs.unshared_ns", costs.unshared_ns, max(costs.unshared_ns, 0)
    yield "costs.total_ns", costs.total_ns, compute + costs.update_ns + communication


def _without_zeros(by_kind: Mapping[str, int]) -> dict[str, int]:
    return {kind: by_kind[kind] for kind in sorted(by_kind) if by_kind[kind]}


def _overlap(plan: Plan) -> Iterator[Figure]:
    """What the overlap leaves of the steps of a reshard."""
    for i, reshard in enumerate(plan.reshards):
        full = sum(step.nanoseconds for step in reshard.steps)
        hideable = plan.tensors[reshard.tensor].role == "parameter" or reshard.purpose in ("accumulate", "optimizer")
        yield f"reshards[{i}].nanoseconds", reshard.nanoseconds, exposed(full, plan.options.overlap) if hideable else full


def _memory(plan: Plan) -> Iterator[Figure]:
    memory, ops = plan.memory, plan.ops
    yield "memory.limit", memory.limit, plan.options.usable_memory
    yield "memory.times", memory.times, tuple(sorted({0, *(t for t in memory.times if 0 <= t <= len(ops))}))
    rows = list(zip(*memory.series.values(), strict=True))
    totals = [sum(row) for row in rows] or [0]
    fullest = totals.index(max(totals))
    for name, values in memory.series.items():
        yield f"memory.series.{name}", min(values, default=0), max(min(values, default=0), 0)
    yield "memory.peak", memory.peak, totals[fullest]
    if not rows:
        return
    time = memory.times[fullest]
    op = ops[time] if time < len(ops) else None
    yield "memory.peak_time", memory.peak_time, time
    yield "memory.peak_op", memory.peak_op, f"{op.module or 'model'}: {op.name} ({op.phase})" if op else "optimizer"
    yield "memory.at_peak", dict(memory.at_peak), dict(zip(memory.series, rows[fullest], strict=True))
    if 0 < len(memory.holders) < MOST_HOLDERS:
        held = dict.fromkeys(memory.at_peak, 0)
        for holder in memory.holders:
            held[holder.category] = held.get(holder.category, 0) + holder.nbytes
        yield "memory.holders", held, dict(memory.at_peak)


def _proof(plan: Plan) -> Iterator[Figure]:
    proof, options = plan.certificate, plan.options
    objective = objective_value(options.objective, options.memory_weight, plan.costs.total_ns, plan.memory.peak)
    yield "costs.objective", plan.costs.objective, objective
    yield "certificate.objective", proof.objective, objective
    yield "certificate.bound", proof.bound, min(proof.bound, objective)
    yield "certificate.gap", proof.gap, relative_gap(objective, proof.bound)
    yield "certificate.status", proof.status == "optimal", proof.status == "optimal" and proof.bound == objective
    if proof.history:
        last = proof.history[-1]
        yield "certificate.history", (last.objective, last.bound), (objective, proof.bound)
