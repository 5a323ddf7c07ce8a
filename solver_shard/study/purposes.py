"""What a collective is for, in words: from the reshard that it is a step of, and the layouts around it.

>>> step_purpose(plan, reshard, reshard.steps[0], str)
'gathers dim 1 (8192), cut over tp, for gate_proj and up_proj'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from solver_shard.layout import Placement
from solver_shard.names import fold_names
from solver_shard.plan.plan import Plan, Reshard, Step

MOST_READERS = 4

Show = Callable[[str], str]
"""Turns a module path into text: ``names.template`` where copies of a layer are to read alike."""


def step_purpose(plan: Plan, reshard: Reshard, step: Step, show: Show, *, again: bool = False) -> str:
    """Why a reshard has this step: what moves, and for whom; ``again``: the forward pass has moved it so before."""
    what = _moved(plan, reshard, step) + (" again" if again else "")
    if reshard.purpose == "update":
        return f"{what}: the updated values go from where the optimizer state is to where the parameter is stored"
    if reshard.purpose in ("optimizer", "accumulate"):
        place = "its accumulator" if reshard.purpose == "accumulate" else "the optimizer"
        return f"{what}: the gradient goes to {place}"
    if reshard.purpose == "output":
        return f"{what}, for what the step returns"
    return f"{what}, for {readers_text(plan, reshard, show)}"


def readers_text(plan: Plan, reshard: Reshard, show: Show) -> str:
    """The ops that read what a reshard makes, by the modules that they are in."""
    names = list(dict.fromkeys(op_label(plan, i, show) for i, _ in reshard.readers))
    if not names:
        return {"update": "the parameter", "output": "the caller"}.get(reshard.purpose, "the optimizer")
    names = fold_names(names)
    shown = names[:MOST_READERS]
    rest = len(names) - len(shown)
    if rest:
        return f"{', '.join(shown)} and {rest} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def op_label(plan: Plan, i: int, show: Show) -> str:
    """An op as people call it: ``q_proj`` for the matrix product of a module of that name, else ``add in model.layers.3``."""
    op = plan.ops[i]
    leaf, kind = op.module.rpartition(".")[2], short(op.name)
    if kind == "einsum" and leaf and not leaf.isdecimal():
        return leaf
    return f"{kind} in {show(op.module) or 'the model'}"


def short(name: str) -> str:
    """``aten.mul.Tensor`` as ``mul``, ``aten._softmax.default`` as ``softmax``."""
    parts = name.split(".")
    return (parts[1] if len(parts) > 1 else name).lstrip("_") or name


def changed_axes(plan: Plan, step: Step) -> list[tuple[str, Placement, Placement]]:
    """Axis by axis what a step does to the layout."""
    pairs = zip(plan.mesh.names, step.before, step.after, strict=True)
    return [(axis, before, after) for axis, before, after in pairs if before != after]


def _moved(plan: Plan, reshard: Reshard, step: Step) -> str:
    shape = plan.tensors[reshard.tensor].shape
    axes = " and ".join(plan.mesh.joined(step.axes))
    changes = changed_axes(plan, step)
    before, after = [x for _, x, _ in changes], [y for _, _, y in changes]
    if step.kind == "all_gather":
        return f"gathers {_dims(before, shape)}, cut over {axes}"
    if step.kind == "reduce_scatter":
        return f"adds up the partial {_sums(before)} over {axes} and leaves each device its part of {_dims(after, shape)}"
    if step.kind == "all_reduce":
        return f"adds up the partial {_sums(before)} over {axes}"
    if step.kind == "all_to_all":
        return f"moves the cut over {axes} from {_dims(before, shape)} to {_dims(after, shape)}"
    cut = " and ".join(plan.mesh.joined([axis for axis, _, y in changes if y.is_shard]))
    return f"cuts {_dims(after, shape)} over {cut or axes} without communication"


def _dims(placements: Sequence[Placement], shape: tuple[int, ...]) -> str:
    dims = sorted({p.dim for p in placements if p.is_shard})
    return " and ".join(f"dim {d} ({shape[d]})" for d in dims) or "it"


def _sums(placements: Sequence[Placement]) -> str:
    kinds = sorted({p.reduction for p in placements if p.is_partial})
    return "sums" if kinds in ([], ["sum"]) else f"results ({', '.join(kinds)})"
