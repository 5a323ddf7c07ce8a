"""Layouts as chips, and what a collective does in words: the same everywhere in the page.

>>> chips(Layout.parse("S(0)R"), Mesh.parse("dp=32,tp=8"))
[{'axis': 'dp', 'text': 'S(0)', 'kind': 's0'}, {'axis': 'tp', 'text': 'R', 'kind': 'r'}]
"""

from __future__ import annotations

from typing import Any

from solver_shard.layout import Layout, Placement
from solver_shard.mesh import Mesh
from solver_shard.plan.plan import Step

COLOURED_DIMS = 6
"""Dims with a colour of their own; later ones begin again, the text in the chip still tells them apart."""


def chips(layout: Layout, mesh: Mesh) -> list[dict[str, str]]:
    """One chip per mesh axis: axis, text and kind (``r``, ``s0``..., ``p``; a strided shard has its dim's)."""
    return [{"axis": axis, "text": str(p), "kind": kind_of(p)} for axis, p in zip(mesh.names, layout, strict=False)]


def kind_of(placement: Placement) -> str:
    """The class of a chip."""
    if placement.is_shard:
        return f"s{placement.dim % COLOURED_DIMS}"
    return "r" if placement.is_replicate else "p"


def step_text(step: Step, mesh: Mesh) -> str:
    """What a step of a transition does, as a sentence without its subject.

    >>> step_text(plan.reshards[0].steps[0], plan.mesh)
    'puts the pieces along tp together: S(1)S(1) -> S(1)R, whole over tp then'
    """
    axes = ", ".join(mesh.joined(step.axes))
    moved = [
        (before, after) for name, before, after in zip(mesh.names, step.before, step.after, strict=False) if name in step.axes
    ]
    cut = sorted({f"dim {after.dim}" for _, after in moved if after.is_shard})
    was = sorted({f"dim {before.dim}" for before, _ in moved if before.is_shard})
    if step.kind == "all_gather":
        return f"puts the pieces of {' and '.join(was) or 'the tensor'} along {axes} together; then every device there has the whole"
    if step.kind == "reduce_scatter":
        return f"adds the partial sums along {axes}; each device keeps its piece of {' and '.join(cut) or 'the result'}"
    if step.kind == "all_reduce":
        return f"adds the partial sums along {axes}; every device has the whole result"
    if step.kind == "all_to_all":
        return f"moves the cut along {axes} from {' and '.join(was) or 'one dim'} to {' and '.join(cut) or 'another'}"
    if step.kind == "slice":
        return f"each device keeps its piece along {axes}; nothing is sent"
    return f"along {axes}"
