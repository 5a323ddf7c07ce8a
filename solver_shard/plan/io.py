"""Plans as files: read as data only, with a message for whatever is wrong; written whole or not at all.

>>> save_plan(plan, "plan.json")
>>> load_plan("plan.json") == plan
True
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from solver_shard.constraints import IDENTITY
from solver_shard.costs.memory import optimizer_state
from solver_shard.errors import InputError
from solver_shard.files import read_json, read_text, write_whole
from solver_shard.layout import Layout
from solver_shard.names import check_lengths, check_patterns
from solver_shard.plan.codec import decode, encode, json_schema
from solver_shard.plan.figures import check_figures
from solver_shard.plan.plan import SCHEMA_VERSION, Plan
from solver_shard.program import DTYPE_BYTES

MAX_PLAN_BYTES = 256 * 2**20
SCHEMA_ID = "urn:solver-shard:plan:1"


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file.

    Raises:
        InputError: no such file, too large, not JSON, not a plan, another schema version, or a part that does not fit.
    """
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


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan to ``path``: a temporary file in the same folder, then renamed over it.

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
