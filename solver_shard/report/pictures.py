"""How a tensor is cut, as a picture: the face of two of its dims, with the lines that the mesh axes cut.

>>> picture(Layout.parse("S(0)S(1)"), (8192, 4096), Mesh.parse("dp=32,tp=8"))["caption"]
'cut into 32 x 8 pieces of 256 x 512, one on each device'

A dim that many devices cut is drawn with its first lines and its last ones, and the label says how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from solver_shard.layout import Layout
from solver_shard.mesh import Mesh

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
