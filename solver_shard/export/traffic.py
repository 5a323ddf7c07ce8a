"""The collectives that an eager form issues along its tensor axis, held against those of the plan.

>>> dropped, notes = compare(plan, eager, shared=True)

What a module at its border does in forward follows from how its tensors lie and are read; what it does in backward is the transpose:

    forward                          backward
    input R as it is, columns        partial gradient of the input: all-reduce (reduce-scatter where the input was gathered from a cut dim)
    input cut as it is, rows         nothing
    input R cut to rows              all-gather
    output P -> R  all-reduce        nothing
    output P -> S  reduce-scatter    all-gather
    output S -> R  all-gather        nothing (its own part is taken)

Collectives are compared by phase, kind and bytes per device. Where the form issues more than the plan, the plan is not expressed;
where it issues fewer, one collective serves what the plan moves in several equal copies, and that is noted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from solver_shard.export.eager import Eager, Parallel
from solver_shard.export.early import reduced_early
from solver_shard.export.exported import Dropped
from solver_shard.layout import Layout, P, Placement, R
from solver_shard.names import fold_names
from solver_shard.plan.plan import Plan
from solver_shard.program import DTYPE_BYTES
from solver_shard.units import format_bytes


class Move(NamedTuple):
    """One collective along the tensor axis: kinds and bytes as in ``plan.Step``."""

    phase: str
    kind: str
    nbytes: int


def move_of(before: Placement, after: Placement) -> str:
    """The collective that takes a tensor from one placement of the axis to another; empty where no device needs another's part.

    >>> move_of(P("sum"), R), move_of(R, S(0))
    ('all_reduce', '')
    """
    if before in (after, R):
        return ""
    if before.is_partial:
        return "all_reduce" if after == R else "reduce_scatter"
    return "all_gather" if after == R else "all_to_all"


def implied(plan: Plan, eager: Eager, *, shared: bool | Collection[int]) -> dict[Move, list[str]]:
    """The collectives of the form, each with the modules that issue it.

    Args:
        shared: whether modules that read one tensor alike lay it out once (else each does it for itself), or the groups that do.
    """
    found: dict[Move, list[str]] = {}
    done: set[tuple[int, int]] = set()
    training = not plan.options.forward_only
    for module in eager.modules:
        entered = (module.group, int(module.read)) in done and (shared if isinstance(shared, bool) else module.group in shared)
        done.add((module.group, int(module.read)))
        if not entered:
            for phase, before, after in _entries(module, training):
                _add(found, plan, eager, phase, before, after, module.source, module.path)
        for phase, before, after in _exits(module, training):
            _add(found, plan, eager, phase, before, after, module.result, module.path)
    return found


def planned(plan: Plan, axis: str) -> dict[Move, list[str]]:
    """The plan's collectives along an axis between ops, and inside them, with the tensors that they move; not those of parameters."""
    found: dict[Move, list[str]] = {}
    for c in plan.collectives():
        if axis not in c.axes:
            continue
        if c.reshard is not None:
            reshard = plan.reshards[c.reshard]
            phase, t = "backward" if reshard.purpose == "backward" else "forward", reshard.tensor
            if plan.tensors[t].role == "parameter" or reshard.purpose in ("optimizer", "update", "accumulate"):
                continue
        elif c.op is not None:
            phase, t = plan.ops[c.op].phase, plan.ops[c.op].results[0]
        else:
            continue
        found.setdefault(Move(phase, c.kind, c.nbytes), []).append(plan.tensors[t].name)
    return found


def compare(plan: Plan, eager: Eager, *, shared: bool | Collection[int]) -> tuple[list[Dropped], list[str]]:
    """What the form issues beyond the plan's collectives, and notes on what it saves."""
    if eager.tensor_axis is None:
        return [], []
    axis = eager.tensor_axis
    form, wanted = implied(plan, eager, shared=shared), planned(plan, axis)
    dropped, notes = [], []
    position = plan.mesh.index(axis)
    if reduced_early(plan, position) is not plan:
        notes.append(f"partial sums over {axis} are reduced before they are added to a residual, not after, by as many collectives")
    for t in plan.outputs:
        output = plan.tensors[t]
        if any(m.result == t and not m.given.is_replicate for m in eager.modules):
            notes.append(f"{output.name} is {output.layout[position]} on {axis}: each process returns its part of it")
    for move in dict.fromkeys((*form, *wanted)):
        mine, theirs = form.get(move, []), wanted.get(move, [])
        size = format_bytes(move.nbytes)
        if len(mine) > len(theirs):
            dropped.append(
                Dropped(
                    tensors=tuple(dict.fromkeys(mine)),
                    what=f"{len(theirs)} {move.kind} of {size} over {axis} in the {move.phase} pass",
                    why=f"the form issues {len(mine)}{', as every such module moves its tensors by itself' if theirs else ''}",
                )
            )
        elif len(mine) < len(theirs):
            names = ", ".join(fold_names(dict.fromkeys(theirs))[:4])
            notes.append(
                f"{len(theirs)} {move.kind} of {size} over {axis} in the {move.phase} pass of the plan ({names}), {len(mine)} in this form"
            )
    return dropped, notes


def _entries(module: Parallel, training: bool) -> Iterator[tuple[str, Placement, Placement]]:
    yield "forward", module.arrives, module.read
    if training and module.gradient:
        partial = module.kind == "linear" and module.cut == "columns"
        yield "backward", P("sum") if partial else module.read, module.arrives


def _exits(module: Parallel, training: bool) -> Iterator[tuple[str, Placement, Placement]]:
    yield "forward", module.made, module.given
    if training:
        # the gradient of a partial tensor is whole on every device
        yield "backward", module.given, R if module.made.is_partial else module.made


def _add(
    found: dict[Move, list[str]], plan: Plan, eager: Eager, phase: str, before: Placement, after: Placement, t: int, path: str
) -> None:
    kind = move_of(before, after)
    if kind:
        axis = plan.mesh.names.index(str(eager.tensor_axis))
        found.setdefault(Move(phase, kind, _nbytes(plan, t, axis, before if kind == "all_to_all" else R)), []).append(path)


def _nbytes(plan: Plan, t: int, axis: int, placement: Placement) -> int:
    """Bytes per device of a tensor that has this placement on the axis."""
    tensor = plan.tensors[t]
    layout = list(tensor.layout)
    for op in plan.ops:
        if t in op.results:
            layout = list(op.result_layouts[op.results.index(t)])
            break
    layout[axis] = placement
    size = DTYPE_BYTES[tensor.dtype]
    for n in Layout(layout).local_shape(tensor.shape, plan.mesh.shape):
        size *= n
    return size
