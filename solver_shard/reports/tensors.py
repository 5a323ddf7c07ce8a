"""What the page says about each tensor: layouts, the op that makes it, every move around it. Copies of repeated layers share an entry.

>>> entries, entry_of = tensor_entries(plan)
>>> entries[entry_of[17]]["name"], entries[entry_of[17]]["count"]
('model.layers.{0..31}.self_attn.q_proj.weight', 32)
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from typing import Any

from solver_shard.analysis.explanation import Show, readers_text, step_purpose
from solver_shard.layout import Layout, Placement
from solver_shard.mesh import Mesh
from solver_shard.plan.index import PlanIndex
from solver_shard.plan.plan import Plan, PlannedOp, Reshard, SavedTensor
from solver_shard.plan.summary import local_nbytes
from solver_shard.program import DTYPE_BYTES
from solver_shard.text import fold_members, template

_LAST = re.compile(r"\.([0-9]+)\Z")

PURPOSE_TITLES = {
    "forward": "Forward",
    "backward": "Backward",
    "accumulate": "Into the accumulator",
    "optimizer": "To the update",
    "update": "After the update",
    "output": "Returned",
}

KIND_TITLES = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
    "slice": "slice",
}


def tensor_entries(plan: Plan) -> tuple[list[dict[str, Any]], list[int]]:
    """Entries in the plan's order, and per tensor of the plan the position of its entry.

    Tensors share one where they differ in numbers of their names alone: shape, layouts, the op that makes them, every move and
    what is kept of them agree.
    """
    index = PlanIndex(plan)
    keys: list[tuple[str, Hashable]] = [(tensor.name, _key(index, t)) for t, tensor in enumerate(plan.tensors)]
    entries: list[dict[str, Any]] = []
    entry_of = [0] * len(plan.tensors)
    folded = sorted(fold_members(keys), key=lambda item: index.positions[item[2][0]])
    for name, _, members in folded:
        for member in members:
            entry_of[index.positions[member]] = len(entries)
        entries.append({"id": len(entries), "name": name, "count": len(members), "members": members})
    pictures: dict[Hashable, dict[str, Any]] = {}
    for entry in entries:
        t = index.positions[entry["members"][0]]
        entry.update(_entry(index, t, entry_of, folds=entry["count"] > 1))
        tensor = plan.tensors[t]
        where = (tensor.layout, tensor.shape)
        if where not in pictures:
            pictures[where] = {**picture(tensor.layout, tensor.shape, plan.mesh), "id": len(pictures)}
        entry["picture"] = pictures[where]
    return entries, entry_of


def _key(index: PlanIndex, t: int) -> Hashable:
    """All that an entry says, with the numbers in module paths out of it."""
    plan, tensor = index.plan, index.plan.tensors[t]
    last = _LAST.search(tensor.name)
    made: Hashable = None
    if t in index.makers:
        op = plan.ops[index.makers[t]]
        made = (op.name, template(op.module), op.phase, op.strategy, op.nanoseconds, op.implementation, op.collectives, op.recompute)
    moves = tuple(
        (r.purpose, r.family, r.source, r.layout, r.copy, r.steps, r.bucket, r.nanoseconds, r.nbytes, readers_text(plan, r, template))
        for r in index.reshards.get(t, ())
    )
    kept = tuple((h.layout, h.nbytes, h.reshard is None) for h in index.saved.get(t, ()))
    # a number at the end counts the results of one module: x.mul.1 and x.mul.2 are not copies of each other
    return (last[1] if last else None, tensor.shape, tensor.dtype, tensor.role, tensor.layout, tensor.state, made, moves, kept)


def _entry(index: PlanIndex, t: int, entry_of: Sequence[int], *, folds: bool) -> dict[str, Any]:
    plan, tensor = index.plan, index.plan.tensors[t]
    show: Show = template if folds else str
    made = None
    if t in index.makers:
        op = plan.ops[index.makers[t]]
        made = {
            "op": op.name,
            "module": show(op.module) or "the model",
            "phase": op.phase,
            "again": op.recompute,
            "strategy": list(zip(plan.mesh.names, op.strategy, strict=True)),
            "reads": [
                {"entry": entry_of[operand], "chips": chips(layout, plan.mesh)}
                for operand, layout in zip(op.operands, op.operand_layouts, strict=True)
            ],
            "layout": chips(index.layout(t), plan.mesh),
            "ns": op.nanoseconds,
            "source": op.source,
            "implementation": op.implementation,
            "inside": [
                {
                    "kind": c.kind,
                    "title": title(c.kind),
                    "axes": ", ".join(plan.mesh.joined(c.axes)),
                    "bytes": c.nbytes,
                    "ns": c.nanoseconds,
                }
                for c in op.collectives
            ],
        }
    return {
        "tensor": t,
        "role": tensor.role,
        "trainable": tensor.trainable,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "chips": chips(tensor.layout, plan.mesh),
        "layout": str(tensor.layout),
        "local": list(tensor.layout.local_shape(tensor.shape, plan.mesh.shape)),
        "bytes": local_nbytes(plan, tensor.shape, tensor.dtype, tensor.layout),
        "whole_bytes": _whole(plan, t),
        "state": chips(tensor.state, plan.mesh) if tensor.state is not None and tensor.state != tensor.layout else None,
        "made": made,
        "moves": [_move(plan, r, show) for r in index.reshards.get(t, ()) if r.copy or r.purpose != "update"],
        "kept": [_kept(plan, hold) for hold in index.saved.get(t, ()) if hold.nbytes],
        "gradient": None if t not in index.gradients else entry_of[index.gradients[t]],
        "parameter": None if t not in index.parameters else entry_of[index.parameters[t]],
    }


def _whole(plan: Plan, t: int) -> int:
    return math.prod(plan.tensors[t].shape) * DTYPE_BYTES[plan.tensors[t].dtype]


def _move(plan: Plan, reshard: Reshard, show: Show) -> dict[str, Any]:
    """A reshard as the page tells it."""
    return {
        "purpose": reshard.purpose,
        "title": PURPOSE_TITLES[reshard.purpose],
        "family": reshard.family,
        "source": chips(reshard.source, plan.mesh),
        "layout": chips(reshard.layout, plan.mesh),
        "copied": reshard.copy,
        "same": reshard.source == reshard.layout,
        "steps": [
            {
                "kind": step.kind,
                "title": title(step.kind),
                "axes": ", ".join(plan.mesh.joined(step.axes)),
                "bytes": step.nbytes,
                "ns": step.nanoseconds,
                "text": step_purpose(plan, reshard, step, show),
            }
            for step in reshard.steps
        ],
        "runs": plan.runs(reshard),
        "ns": reshard.nanoseconds,
        "bytes": reshard.nbytes,
        "bucket": reshard.bucket,
        "readers": readers_text(plan, reshard, show),
    }


def _kept(plan: Plan, hold: SavedTensor) -> dict[str, Any]:
    copied = "as produced" if hold.reshard is None else f"the copy made for forward {plan.reshards[hold.reshard].family}"
    return {"chips": chips(hold.layout, plan.mesh), "how": copied, "bytes": hold.nbytes}


def title(kind: str) -> str:
    """A collective's name in text."""
    return KIND_TITLES.get(kind, kind)


def short_op(name: str) -> str:
    """``aten.einsum.default`` as ``einsum``; names from elsewhere as they are.

    >>> short_op("aten._scaled_dot_product_flash_attention_for_cpu.default")
    'attention'
    """
    parts = name.split(".")
    base = parts[1] if len(parts) > 2 and parts[0] in ("aten", "shard", "prims") else name
    if "attention" in base:
        return "attention backward" if base.endswith("_backward") else "attention"
    return base.strip("_") or name


def summary(ops: Sequence[PlannedOp], count: int = 3) -> str:
    """The ops that take most time by their short names, each once."""
    spent: dict[str, int] = {}
    for op in ops:
        spent[short_op(op.name)] = spent.get(short_op(op.name), 0) + op.nanoseconds
    names = sorted(spent, key=lambda name: -spent[name])
    return ", ".join(names[:count]) + (f" +{len(names) - count}" if len(names) > count else "")


# Layouts as chips: the same everywhere in the page.
#
# >>> chips(Layout.parse("S(0)R"), Mesh.parse("dp=32,tp=8"))
# [{'axis': 'dp', 'text': 'S(0)', 'kind': 's0'}, {'axis': 'tp', 'text': 'R', 'kind': 'r'}]

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


# How a tensor is cut, as a picture: the face of two of its dims, with the lines that the mesh axes cut.
#
# >>> picture(Layout.parse("S(0)S(1)"), (8192, 4096), Mesh.parse("dp=32,tp=8"))["caption"]
# 'cut into 32 x 8 pieces of 256 x 512, one on each device'
#
# A dim that many devices cut is drawn with its first lines and its last ones, and the label says how many there are.

MAX_DRAWN = 12
"""Pieces of one dim that are drawn as they are; beyond, some of them with a gap."""

WIDTH, HEIGHT = 172, 112
"""Of the largest face, in the picture's units."""


def picture(layout: Layout, shape: Sequence[int], mesh: Mesh) -> dict[str, Any]:
    """Geometry of the picture: a face of ``width`` by ``height`` with lines, labels of both dims, and a caption.

    Args:
        layout: legal for the shape (``check_plan`` holds the layouts of a plan's tensors to that).
        shape: global.

    Returns:
        width, height; rows and columns: of the dim on that side ``dim``, ``label``, ``by`` (the axes that cut it), ``lines``
        ({at, major}), ``gap`` where some are left out, and ``first``, how much the piece of device 0 takes; partial: names of the
        axes along which every device holds a part; first: that piece; caption; others: what is said of further dims.
    """
    cut = {dim: layout.order(dim) for dim in range(len(shape)) if layout.order(dim)}
    shown = sorted(sorted(cut, key=lambda dim: -_pieces(cut[dim], mesh))[:2])
    for dim in reversed(range(len(shape))):
        if len(shown) < 2 and dim not in shown:
            shown = sorted([*shown, dim])
    rows, columns = (None, *shown) if len(shown) == 1 else tuple(shown) if shown else (None, None)
    width, height = _face(shape, rows, columns)
    across, down = _cuts(columns, cut, shape, mesh, width), _cuts(rows, cut, shape, mesh, height)
    partial = [name for name, p in zip(mesh.names, layout, strict=True) if p.is_partial]
    return {
        "width": width,
        "height": height,
        "columns": across,
        "rows": down,
        "partial": partial,
        "first": {"width": across["first"], "height": down["first"]},
        "caption": _caption(layout, shape, mesh, cut, partial),
        "others": [f"dim {dim} too, by {_by(axes, mesh)}" for dim, axes in cut.items() if dim not in (rows, columns)],
    }


def _pieces(axes: Sequence[int], mesh: Mesh) -> int:
    return math.prod(mesh.shape[a] for a in axes)


def _by(axes: Sequence[int], mesh: Mesh) -> str:
    return " then ".join(f"{mesh.names[a]} {mesh.shape[a]}" for a in axes)


def _face(shape: Sequence[int], rows: int | None, columns: int | None) -> tuple[int, int]:
    """Width and height, between a square and the longest that fits, by the sizes' ratio on a log scale."""
    if rows is None or columns is None:
        return (WIDTH, 28) if columns is not None else (44, 44)
    ratio = math.log2(max(shape[columns], 1) / max(shape[rows], 1))
    lean = max(-1.0, min(1.0, ratio / 6))
    return round(WIDTH * (0.72 + 0.28 * lean)), round(HEIGHT * (0.9 - 0.1 * lean))


def _cuts(dim: int | None, cut: dict[int, tuple[int, ...]], shape: Sequence[int], mesh: Mesh, extent: int) -> dict[str, Any]:
    """Lines across one side of the face."""
    if dim is None:
        return {"dim": None, "label": "", "by": "", "lines": [], "gap": None, "first": extent}
    axes = cut.get(dim, ())
    total = _pieces(axes, mesh)
    told = {"dim": dim, "label": f"dim {dim} = {shape[dim]}", "by": f"by {_by(axes, mesh)}" if axes else ""}
    if total <= MAX_DRAWN:
        inner = _pieces(axes[1:], mesh)
        lines = [{"at": round(extent * k / total, 1), "major": k % inner == 0} for k in range(1, total)]
        return {**told, "lines": lines, "gap": None, "first": round(extent / total, 1)}
    side = extent * 0.09
    lines = [{"at": round(side * k, 1), "major": True} for k in range(1, 4)]
    lines += [{"at": round(extent - side * k, 1), "major": True} for k in (3, 2, 1)]
    return {**told, "lines": lines, "gap": [round(side * 3, 1), round(extent - side * 3, 1)], "first": round(side, 1)}


def _caption(layout: Layout, shape: Sequence[int], mesh: Mesh, cut: dict[int, tuple[int, ...]], partial: Sequence[str]) -> str:
    local = " x ".join(map(str, layout.local_shape(shape, mesh.shape))) or "a scalar"
    whole = [f"{axis.name} {axis.size}" for axis, p in zip(mesh.axes, layout, strict=True) if p.is_replicate]
    copies = math.prod(axis.size for axis, p in zip(mesh.axes, layout, strict=True) if p.is_replicate)
    uneven = any(shape[dim] % _pieces(axes, mesh) for dim, axes in cut.items())
    if not cut:
        text = "whole on every device" if not partial else "not cut"
    else:
        pieces = " x ".join(str(_pieces(axes, mesh)) for axes in cut.values())
        text = f"cut into {pieces} pieces of {'at most ' if uneven else ''}{local}"
        text += f", each on {copies} devices ({', '.join(whole)})" if copies > 1 else "" if partial else ", one on each device"
    if partial:
        reduction = next(p.reduction for p in layout if p.is_partial)
        text += f"; along {', '.join(partial)} every device holds a part, and their {reduction} is the tensor"
    return text
