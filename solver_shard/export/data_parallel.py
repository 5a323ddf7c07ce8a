"""What ``fully_shard`` and ``replicate`` can say of a plan: which axes cut parameters, by which dim, and what stays gathered.

>>> found = read_data_parallel(plan, eager)
>>> found.shard_axes, found.dims["model.layers.0.mlp.down_proj.weight"], found.keeps["lm_head.weight"]
(('dp',), 0, True)

FSDP2 cuts every parameter by one dim over all its axes, after the tensor axis has cut it (so the two may share a dim, in the order that
``_S(d)S(d)`` says on ``dp,tp``). The optimizer's states lie as the parameters do. A module's parameters are gathered for forward, and are
then either kept until backward or freed and gathered again. Gradients are averaged over the processes of the axes, which is
the gradient of the whole batch where the loss is a mean over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from solver_shard.export.eager import Eager, owner
from solver_shard.export.exported import Dropped
from solver_shard.layout import Layout
from solver_shard.names import fold_names
from solver_shard.plan.plan import Plan
from solver_shard.plan.report import local_nbytes
from solver_shard.units import format_bytes

_MEANS = ("aten.mean.default", "aten.mean.dim")
_WEIGHTED = ("shard.nll_loss_forward", "aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """How parameters lie on the data axes.

    Attributes:
        replicate_axes, shard_axes: data axes on which parameters are whole, and cut; in mesh order.
        dims: parameter to the dim that the shard axes cut.
        keeps: parameter to whether its gathered form is kept from forward to backward.
        dropped, notes: as in ``Exported``.
    """

    replicate_axes: tuple[str, ...]
    shard_axes: tuple[str, ...]
    dims: Mapping[str, int]
    keeps: Mapping[str, bool]
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]


def read_data_parallel(plan: Plan, eager: Eager) -> DataParallel:
    """Read how a plan stores and gathers its parameters along the data axes of its eager form."""
    positions = [plan.mesh.index(name) for name in eager.data_axes]
    parameters = [t for t, tensor in enumerate(plan.tensors) if tensor.role == "parameter"]
    shard = [a for a in positions if _mostly_cut(plan, parameters, a)]
    dropped: list[Dropped] = []
    notes: list[str] = []
    dims = {plan.tensors[t].name: _dim(plan, eager, t, shard, positions, dropped) for t in parameters}
    keeps = _keeps(plan, parameters, notes) if shard else {}
    for t in parameters:
        tensor = plan.tensors[t]
        if tensor.state is not None and tensor.state != tensor.layout:
            dropped.append(
                Dropped(
                    tensors=(tensor.name,),
                    what=f"optimizer state {tensor.state} beside a parameter {tensor.layout}",
                    why="the state that an optimizer makes lies as its parameter does",
                )
            )
    if plan.options.microbatches > 1:
        dropped.append(
            Dropped(
                tensors=tuple(plan.gradients)[:1],
                what=f"gradients of {plan.options.microbatches} microbatches accumulated",
                why="accumulation is the training loop's in this form",
            )
        )
    if positions and not plan.options.forward_only:
        _check_mean(plan, dropped, notes)
    return DataParallel(
        replicate_axes=tuple(plan.mesh.names[a] for a in positions if a not in shard),
        shard_axes=tuple(plan.mesh.names[a] for a in shard),
        dims=dims,
        keeps=keeps,
        dropped=tuple(dropped),
        notes=tuple(notes),
    )


def _mostly_cut(plan: Plan, parameters: list[int], a: int) -> bool:
    """Whether at least half of the parameters' elements are cut by an axis."""
    total = cut = 0
    for t in parameters:
        tensor = plan.tensors[t]
        elements = 1
        for size in tensor.shape:
            elements *= size
        total += elements
        cut += elements if tensor.layout[a].is_shard else 0
    return 2 * cut >= total > 0


def _dim(plan: Plan, eager: Eager, t: int, shard: list[int], positions: list[int], dropped: list[Dropped]) -> int:
    """The dim by which the shard axes cut a parameter; what differs from what FSDP2 does is dropped."""
    tensor = plan.tensors[t]
    where = ", ".join(plan.mesh.names[a] for a in shard)
    for a in positions:
        placement = tensor.layout[a]
        if a not in shard and placement.is_shard:
            dropped.append(
                Dropped(
                    tensors=(tensor.name,),
                    what=f"cut by {plan.mesh.names[a]}",
                    why=f"most parameters are whole on {plan.mesh.names[a]}, and the form replicates all of them there",
                )
            )
    cut = [tensor.layout[a] for a in shard]
    wanted = list(dict.fromkeys(p.dim for p in cut if p.is_shard))
    if shard and (len(wanted) != 1 or not all(p.is_shard for p in cut)):
        dropped.append(
            Dropped(
                tensors=(tensor.name,),
                what=f"{''.join(map(str, cut))} on {where}",
                why=f"fully_shard cuts every parameter of the model by one dim over {where}",
            )
        )
        return 0
    if not shard:
        return 0
    (dim,) = wanted
    tensor_axis = [] if eager.tensor_axis is None else [plan.mesh.index(eager.tensor_axis)]
    first = [a for a in tensor_axis if tensor.layout[a].is_shard and tensor.layout[a].dim == dim]
    if list(tensor.layout.order(dim)) != first + shard:
        names = [plan.mesh.names[a] for a in tensor.layout.order(dim)]
        dropped.append(
            Dropped(
                tensors=(tensor.name,),
                what=f"dim {dim} cut by {' then '.join(names)}",
                why="fully_shard cuts a dim after the tensor axis has, and by its own axes from left to right",
            )
        )
    shards = 1
    for a in shard:
        shards *= plan.mesh.shape[a]
    local = tensor.shape[dim]
    for a in first:
        local = -(-local // plan.mesh.shape[a])
    if local % shards and (dim or first or len(shard) > 1):
        dropped.append(
            Dropped(
                tensors=(tensor.name,),
                what=f"dim {dim} of {local} rows cut into {shards} unequal shards",
                why="fully_shard cuts only dim 0 so",
            )
        )
        return 0
    return dim


def _keeps(plan: Plan, parameters: list[int], notes: list[str]) -> dict[str, bool]:
    held = {hold.tensor for hold in plan.holds if hold.reshard is not None}
    again = {reshard.tensor for reshard in plan.reshards if reshard.purpose == "backward"}
    keeps, idle = {}, []
    for t in parameters:
        tensor = plan.tensors[t]
        keeps[tensor.name] = t in held or t not in again
        if t not in held and t not in again and not plan.options.forward_only:
            idle.append(t)
    if idle:
        nbytes = sum(local_nbytes(plan, plan.tensors[t].shape, plan.tensors[t].dtype, _gathered(plan, t)) for t in idle)
        names = ", ".join(fold_names(plan.tensors[t].name for t in idle)[:4])
        notes.append(
            f"{names}: gathered for forward only in the plan, and kept until backward by fully_shard, {format_bytes(nbytes)} of memory more"
        )
    return keeps


def _gathered(plan: Plan, t: int) -> Layout:
    for reshard in plan.reshards:
        if reshard.tensor == t and reshard.purpose == "forward":
            return reshard.layout
    return plan.tensors[t].layout


def _check_mean(plan: Plan, dropped: list[Dropped], notes: list[str]) -> None:
    """The loss must be known as a mean over the batch, as the gradients of its parts are averaged."""
    made = {t: op for op in plan.ops if op.phase == "forward" for t in op.results}
    loss = plan.outputs[0] if plan.outputs else None
    todo, seen = [loss] if loss is not None else [], set()
    wrong: list[str] = []
    while todo:
        t = todo.pop()
        if t in seen or t not in made:
            continue
        seen.add(t)
        op = made[t]
        if all(all(size == 1 for size in plan.tensors[x].shape) for x in op.operands):
            todo += op.operands
        elif op.name not in (*_MEANS, *_WEIGHTED) and not any(p.is_partial and p.reduction == "avg" for p in op.result_layouts[0]):
            wrong.append(f"{plan.tensors[t].name} by {op.name}")
        elif op.name in _WEIGHTED and not any(op.results[1] in other.operands for other in made.values()):
            wrong.append(f"{plan.tensors[t].name} by {op.name}, without a division by the number of labels")
    if wrong and loss is not None:
        dropped.append(
            Dropped(
                tensors=(plan.tensors[loss].name,),
                what=f"computed from {', '.join(wrong)}",
                why="the form averages gradients over processes, which is right for a loss that is a mean over the batch",
            )
        )
    notes.append(
        "the loss of each process is the mean over its own part of the batch, and gradients are averaged: the same as the plan's where all "
        "parts have as many labels that count"
    )


def wrap_order(paths: Mapping[str, bool]) -> list[str]:
    """Module paths, inner ones first."""
    return sorted(paths, key=lambda path: (-path.count(".") if path else 1, path))


def wrapped(plan: Plan, keeps: Mapping[str, bool]) -> dict[str, bool]:
    """Module to wrap (empty for the whole model) to whether its gathered parameters are freed after forward.

    A repeated block is one module; where its parameters differ, those with the rarer choice are wrapped by their own modules.
    Parameters that several modules use go with the whole model.
    """
    users: dict[str, set[str]] = {}
    for op in plan.ops:
        if op.phase == "forward":
            for t in op.operands:
                if plan.tensors[t].role == "parameter":
                    users.setdefault(plan.tensors[t].name, set()).add(op.module)
    blocks: dict[str, list[str]] = {}
    for name in keeps:
        shared = len(users.get(name, ())) > 1 and not all(u == owner(name) or u.startswith(f"{owner(name)}.") for u in users[name])
        blocks.setdefault("" if shared else _block(name), []).append(name)
    found: dict[str, bool] = {}
    for block, names in blocks.items():
        kept = [name for name in names if keeps[name]]
        common = 2 * len(kept) > len(names)
        found[block] = not common
        for name in names:
            if keeps[name] != common and owner(name) != block and block:
                found.setdefault(owner(name), not keeps[name])
    found.setdefault("", False)
    return found


def _block(name: str) -> str:
    """The repeated block that a parameter is in, else its own module."""
    parts = owner(name).split(".")
    for k, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: k + 1])
    return owner(name)
