"""Plans as files: read as data only, with a message for whatever is wrong; written whole or not at all.

>>> save_plan(plan, "plan.json")
>>> load_plan("plan.json") == plan
True
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from solver_shard.arguments import checked
from solver_shard.codec import decode, encode, json_schema
from solver_shard.costs.cluster import check_cluster
from solver_shard.costs.layouts import free_move
from solver_shard.costs.memory import optimizer_state
from solver_shard.costs.model import exposed
from solver_shard.errors import InputError
from solver_shard.files import read_json, read_text, write_whole
from solver_shard.layout import Layout
from solver_shard.plan.plan import LOCAL, MOST_HOLDERS, SCHEMA_VERSION, Plan
from solver_shard.program import DTYPE_BYTES, IDENTITY
from solver_shard.solve.solution import objective_value, relative_gap
from solver_shard.text import check_lengths, check_patterns

MAX_PLAN_BYTES = 256 * 2**20
SCHEMA_ID = "urn:solver-shard:plan:1"


@checked
def load_plan(path: Plan | str | os.PathLike[str]) -> Plan:
    """Read a plan file.

    >>> plan = load_plan("plan.json")  # doctest: +SKIP

    Args:
        path: of a file that ``solve -o`` or ``Plan.save`` wrote; it is read as data only. A plan comes back as it is: whatever takes a
            plan takes its file, too.

    Returns:
        The plan, whose parts and figures agree with each other.

    Raises:
        InputError: no such file, too large, not JSON, not a plan, another schema version, or a part that does not fit.
    """
    if isinstance(path, Plan):
        return path
    path = Path(path)
    try:
        text = read_text(path, MAX_PLAN_BYTES)
    except OSError as error:
        name = "plan.json" if os.path.isdir(path) else path.name
        raise InputError(
            f"cannot read plan {str(path)!r}: {error.strerror or error}; 'solver-shard solve ... -o {name}' writes one"
        ) from None
    except ValueError:  # neither UTF-8 nor, with a null byte, a path
        raise InputError(f"{str(path)!r} is not text, so not a plan; 'solver-shard solve ... -o plan.json' writes one") from None
    try:
        return plan_from_json(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def plan_from_json(text: str) -> Plan:
    """Read a plan from JSON text; InputError says what does not fit, and where."""
    try:
        data = read_json(text)
    except ValueError as error:
        raise InputError(f"not a plan: not JSON ({error}); write one with 'solver-shard solve ... -o plan.json'") from None
    if not isinstance(data, dict) or "schema_version" not in data:
        raise InputError("not a plan: it has no schema_version; write one with 'solver-shard solve ... -o plan.json'")
    version = data["schema_version"]
    if type(version) is not int or version != SCHEMA_VERSION:
        raise InputError(
            f"plan schema version {version!r:.40} is not known; this solver-shard reads version {SCHEMA_VERSION}: "
            "solve again, or use the release that wrote it"
        )
    try:
        plan: Plan = decode(Plan, data)
        check_plan(plan)
        check_figures(plan)
    except InputError as error:
        raise InputError(f"not a valid plan: {error}") from None
    return plan


def plan_to_json(plan: Plan) -> str:
    """Compact JSON text, with a line for each top-level part and each op, tensor and reshard, so that diffs can be read."""
    parts = []
    for key, value in encode(plan).items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            body = "[\n" + ",\n".join(_dump(item) for item in value) + "\n]"
        else:
            body = _dump(value)
        parts.append(f"{_dump(key)}:{body}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


@checked
def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan to ``path``: a temporary file in the same folder, then renamed over it.

    >>> save_plan(plan, "plan.json")  # doctest: +SKIP

    Args:
        plan: what ``optimize`` returned.
        path: of the file, JSON by the schema of ``plan_schema``.

    Raises:
        InputError: the folder does not exist or cannot be written.
    """
    write_whole(path, plan_to_json(plan))


def plan_schema() -> dict[str, Any]:
    """The published JSON Schema; ``schema.json`` beside this file holds the same."""
    return json_schema(Plan, title="solver-shard plan", identifier=SCHEMA_ID)


def check_plan(plan: Plan) -> None:
    """Check that the parts of a plan agree; InputError names the part that does not."""
    axes, tensors, ops = len(plan.mesh.axes), len(plan.tensors), len(plan.ops)
    for i, tensor in enumerate(plan.tensors):
        _check(
            len(tensor.layout) == axes,
            f"tensors[{i}] ({tensor.name}): layout {tensor.layout} has {len(tensor.layout)} placements, mesh {plan.mesh} has {axes} axes",
        )
        dims = len(tensor.shape)
        _check(
            tensor.state is None or (len(tensor.state) == axes and all(p.dim < dims for p in tensor.state if p.is_shard)),
            f"tensors[{i}] ({tensor.name}): state {tensor.state} does not fit {list(tensor.shape)} on mesh {plan.mesh}",
        )
        _check(
            all(p.dim < dims for p in tensor.layout if p.is_shard),
            f"tensors[{i}] ({tensor.name}): layout {tensor.layout} cuts a dim that {list(tensor.shape)} does not have",
        )
        _check(
            tensor.dtype in DTYPE_BYTES, f"tensors[{i}] ({tensor.name}): unknown dtype {tensor.dtype!r}; known are {', '.join(DTYPE_BYTES)}"
        )
        _check(all(size >= 0 for size in tensor.shape), f"tensors[{i}] ({tensor.name}): negative size in {list(tensor.shape)}")
    said = {name for op in plan.ops for name in (op.name, op.module, op.implementation, *op.strategy)}
    said |= {reshard.family for reshard in plan.reshards} | {holder.name for holder in plan.memory.holders}
    check_lengths([plan.name, *(tensor.name for tensor in plan.tensors), *sorted(said)], "a name")
    check_patterns(plan.options.pins, "options.pins")
    names = {tensor.name for tensor in plan.tensors}
    _check(len(names) == tensors, "tensors: two have one name")
    made = {t for t, tensor in enumerate(plan.tensors) if tensor.role in ("parameter", "buffer", "input")}
    for i, op in enumerate(plan.ops):
        where = f"ops[{i}] ({op.name})"
        _check(all(0 <= t < tensors for t in (*op.operands, *op.results)), f"{where}: refers to a tensor that is not there")
        _check(made.issuperset(op.operands), f"{where}: reads a tensor that no op before it makes")
        _check(made.isdisjoint(op.results) and len(set(op.results)) == len(op.results), f"{where}: makes a tensor that is there already")
        made.update(op.results)
        _check(
            len(op.operand_layouts) == len(op.operands) and len(op.result_layouts) == len(op.results),
            f"{where}: one layout per operand and result is needed",
        )
        _check(
            len(op.strategy) == axes and all(len(x) == axes for x in (*op.operand_layouts, *op.result_layouts)),
            f"{where}: one placement per mesh axis is needed",
        )
        for t, layout in zip((*op.operands, *op.results), (*op.operand_layouts, *op.result_layouts), strict=True):
            _check(_cuts(layout, plan.tensors[t].shape), f"{where}: {layout} cuts a dim that {plan.tensors[t].name} does not have")
    for i, reshard in enumerate(plan.reshards):
        where = f"reshards[{i}]"
        _check(0 <= reshard.tensor < tensors, f"{where}: refers to a tensor that is not there")
        _check(
            all(0 <= op < ops and 0 <= k < len(plan.ops[op].operands) for op, k in reshard.readers),
            f"{where}: refers to an operand that is not there",
        )
        _check(len(reshard.source) == axes and len(reshard.layout) == axes, f"{where}: one placement per mesh axis is needed")
        shape = plan.tensors[reshard.tensor].shape
        for layout in (reshard.source, reshard.layout, *(x for step in reshard.steps for x in (step.before, step.after))):
            _check(len(layout) == axes and _cuts(layout, shape), f"{where}: layout {layout} does not fit {list(shape)} on mesh {plan.mesh}")
        for step in reshard.steps:
            _check(
                set(step.axes) <= set(plan.mesh.names), f"{where}: step on {', '.join(step.axes)}, mesh has {', '.join(plan.mesh.names)}"
            )
    for i, hold in enumerate(plan.holds):
        _check(0 <= hold.tensor < tensors, f"holds[{i}]: refers to a tensor that is not there")
        _check(hold.reshard is None or 0 <= hold.reshard < len(plan.reshards), f"holds[{i}]: refers to a reshard that is not there")
        _check(len(hold.layout) == axes, f"holds[{i}]: one placement per mesh axis is needed")
    _check(
        all(0 <= t < tensors for t in (*plan.outputs, *plan.gradients.values())),
        "outputs or gradients: refer to a tensor that is not there",
    )
    _check(
        names.issuperset(plan.ties.values()) and names.isdisjoint(plan.ties),
        "ties: a name is tied to a tensor that is not there, or is one",
    )
    check_lengths(plan.ties, "a name")
    _check(set(plan.gradients) <= names, "gradients: a parameter is not among the tensors")
    _check(plan.memory.limit > 0, "memory.limit: expected at least one byte")
    _check(0 <= plan.options.reserve < plan.options.memory_limit, "options.reserve: expected at least 0 and less than memory_limit")
    _check(plan.options.microbatches >= 1, "options.microbatches: expected at least 1")
    if plan.clip is not None:
        _check(set(plan.clip.axes) <= set(plan.mesh.names), f"clip: on {', '.join(plan.clip.axes)}, mesh has {', '.join(plan.mesh.names)}")
    try:
        optimizer_state(
            plan.options.optimizer,
            master_weights=plan.options.master_weights,
            state_bytes=plan.options.state_bytes,
            reduce_dtype=plan.options.reduce_dtype,
            clip=plan.options.clip,
        )
    except InputError as error:
        raise InputError(f"options: {error}") from None
    try:
        check_cluster(plan.cluster)
    except InputError as error:
        raise InputError(f"cluster: {error}") from None
    for i, op in enumerate(plan.ops):
        for inside in op.collectives:
            _check(
                set(inside.axes) <= set(plan.mesh.names),
                f"ops[{i}] ({op.name}): a collective on {', '.join(inside.axes)}, mesh has {', '.join(plan.mesh.names)}",
            )
    handed = {t for op in plan.ops if op.name == IDENTITY for t in op.operands}
    _check(len(set(plan.relays)) == len(plan.relays) and handed.issuperset(plan.relays), "relays: one is not handed on by an identity")
    for name, values in plan.memory.series.items():
        _check(len(values) == len(plan.memory.times), f"memory.series.{name}: {len(values)} values for {len(plan.memory.times)} times")


def _cuts(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether a tensor has the dims that a layout cuts."""
    return all(p.dim < len(shape) for p in layout if p.is_shard)


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise InputError(problem)


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def main() -> None:
    """Write ``schema.json`` anew: ``python -m solver_shard.plan.io``."""
    target = Path(__file__).with_name("schema.json")
    target.write_text(json.dumps(plan_schema(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()


# Whether the figures of a plan agree with each other: totals with their parts, the peak with the timeline, the proof with the price.
#
# >>> check_figures(plan_from_json(text))  # reading a plan has done it
#
# A plan file may come from anywhere, and what it says is shown, drawn and compared as it stands. So whatever can be added up again without
# the model is, and a file in which a figure was changed by hand is refused with the figure's name. Whether the decisions are legal and the
# prices are those of the cost model, only the evaluator can say, which has the model (:func:`solver_shard.plan.evaluate.evaluated`).

Figure = tuple[str, Any, Any]
"""Its name in the file, what the file says, and what the rest of the file gives."""


def check_figures(plan: Plan) -> None:
    """InputError names the first figure that does not fit the others."""
    _check_figures(itertools.chain(_moves(plan), _layouts(plan), _overlap(plan), _costs(plan), _memory(plan), _proof(plan)))


def check_times(plan: Plan) -> None:
    """The same of the times and of what moves, whatever an overlap hides of it."""
    _check_figures(itertools.chain(_moves(plan), _costs(plan)))


def _check_figures(figures: Iterable[Figure]) -> None:
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
