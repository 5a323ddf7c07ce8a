"""What a plan says about the tensors that a pattern matches: layouts, producers, and every reshard around them.

>>> print(lookup(plan, "*.q_proj.weight"))
model.layers.{0..31}.self_attn.q_proj.weight  bf16[4096, 4096]| S(0)S(1)  (parameter, 128 KiB per device) x32
  forward   matmul: S(0)S(1) -> RS(1)  all_gather dp 4.00 MiB, 112 us
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from solver_shard.errors import InputError, printable
from solver_shard.modules import module_outputs
from solver_shard.names import fold_items, matching, suggestion, template, text_of
from solver_shard.plan.codec import encode
from solver_shard.plan.plan import Hold, Plan, Reshard
from solver_shard.plan.report import local_nbytes, sub_axes
from solver_shard.units import format_bytes, format_ns


def find(plan: Plan, pattern: str) -> list[int]:
    """Positions of the tensors that a glob matches: by name, else by module (its parameters, buffers and outputs).

    Raises:
        InputError: nothing matches; the closest names are given.
    """
    names = [tensor.name for tensor in plan.tensors]
    found = matching(pattern, names)
    if found:
        return found
    outputs = module_outputs([op for op in plan.ops if op.phase == "forward"], plan.outputs)
    held: dict[str, list[int]] = {}
    for t, tensor in enumerate(plan.tensors):
        if tensor.role in ("parameter", "buffer"):
            parts = tensor.name.split(".")
            for depth in range(1, len(parts)):
                held.setdefault(".".join(parts[:depth]), []).append(t)
    paths = sorted({*outputs, *held})
    modules = [paths[i] for i in matching(pattern.removesuffix(":out"), paths)]
    found = sorted({t for path in modules for t in (*outputs.get(path, ()), *(held.get(path, ()) if not pattern.endswith(":out") else ()))})
    if not found:
        raise InputError(f"no tensor or module of this plan is called {pattern!r}; {suggestion(pattern, [*names, *paths], plan.ties)}")
    return found


def lookup(plan: Plan, pattern: str) -> str:
    """Text about the matching tensors; those that differ only in numbers share one entry."""
    around = _around(plan)
    found = {plan.tensors[t].name: t for t in find(plan, pattern)}
    entries = [(name, _entry(plan, t, around, template)) for name, t in found.items()]
    blocks = []
    for name, lines, count in fold_items(entries):
        head, *rest = lines if count > 1 else _entry(plan, found[name], around, str)
        blocks.append(text_of([f"{name}  {head}{f' x{count}' if count > 1 else ''}", *rest]))
    legend = [sub_axes(plan)] if plan.mesh.splits else []
    return "\n".join([*map(printable, legend), *blocks])


def lookup_json(plan: Plan, pattern: str) -> str:
    """The same as JSON: one object per tensor, nothing folded."""
    around = _around(plan)
    found: list[dict[str, Any]] = []
    for t in find(plan, pattern):
        tensor = plan.tensors[t]
        op = around.producers.get(t)
        found.append(
            {
                **encode(tensor),
                "local_shape": list(tensor.layout.local_shape(tensor.shape, plan.mesh.shape)),
                "producer": None if op is None else {"op": op, "name": plan.ops[op].name, "module": plan.ops[op].module},
                "reshards": [encode(reshard) for reshard in around.reshards.get(t, ())],
                "holds": [encode(hold) for hold in around.holds.get(t, ())],
            }
        )
    return json.dumps(found, indent=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """By tensor: the op that makes it, its reshards, and what is held of it."""

    producers: dict[int, int]
    reshards: dict[int, list[Reshard]]
    holds: dict[int, list[Hold]]


def _around(plan: Plan) -> _Around:
    reshards: dict[int, list[Reshard]] = {}
    for reshard in plan.reshards:
        reshards.setdefault(reshard.tensor, []).append(reshard)
    holds: dict[int, list[Hold]] = {}
    for hold in plan.holds:
        holds.setdefault(hold.tensor, []).append(hold)
    producers = {t: i for i, op in enumerate(plan.ops) for t in op.results}
    return _Around(producers=producers, reshards=reshards, holds=holds)


def _entry(plan: Plan, t: int, around: _Around, show: Callable[[str], str]) -> tuple[str, ...]:
    """Lines about one tensor without its name and without positions, so that copies of a layer can be folded.

    ``show`` turns module paths into text: ``template`` where entries are to be folded.
    """
    tensor = plan.tensors[t]
    local = format_bytes(local_nbytes(plan, tensor.shape, tensor.dtype, tensor.layout))
    state = f", optimizer state {tensor.state}" if tensor.state not in (None, tensor.layout) else ""
    lines = [f"{tensor.layout.format(tensor.shape, tensor.dtype)}  ({tensor.role}, {local} per device{state})"]
    if t in around.producers:
        op = plan.ops[around.producers[t]]
        chosen = ", ".join(f"{axis}: {name}" for axis, name in zip(plan.mesh.names, op.strategy, strict=True))
        lines.append(
            f"  made by {op.name} in {show(op.module) or 'the model'} ({op.phase}), strategy {chosen}, {format_ns(op.nanoseconds)}"
        )
    for reshard in around.reshards.get(t, ()):
        if reshard.purpose == "update" and not reshard.copy:
            continue
        readers = sorted({f"{plan.ops[i].name} in {show(plan.ops[i].module) or 'the model'}" for i, _ in reshard.readers})
        family = "" if reshard.family == reshard.purpose else f"{reshard.family}: "
        line = f"  {reshard.purpose:<9} {family}{_move(plan, reshard)}"
        line += f", in each of {plan.runs(reshard)} microbatches" if plan.runs(reshard) > 1 and reshard.copy else ""
        lines.append(
            line + (f"; for {', '.join(readers[:3])}{f', +{len(readers) - 3} more' if len(readers) > 3 else ''}" if readers else "")
        )
    for hold in around.holds.get(t, ()):
        if hold.nbytes:
            copied = "as produced" if hold.reshard is None else f"the copy for forward {plan.reshards[hold.reshard].family}"
            lines.append(f"  kept      {hold.layout}, {copied}, until the backward pass or the end ({format_bytes(hold.nbytes)})")
    return tuple(lines)


def _move(plan: Plan, reshard: Reshard) -> str:
    if not reshard.copy:
        return f"{reshard.layout} as it is"
    steps = ", ".join(
        f"{step.kind} {','.join(plan.mesh.joined(step.axes))} {format_bytes(step.nbytes)}, {format_ns(step.nanoseconds)}"
        for step in reshard.steps
    )
    copied = f" ({format_bytes(reshard.nbytes)} copy)" if reshard.nbytes else ""
    return f"{reshard.source} -> {reshard.layout}  {steps or 'local'}{copied}"
