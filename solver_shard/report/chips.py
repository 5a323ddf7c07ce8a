"""Layouts as chips: the same everywhere in the page.

>>> chips(Layout.parse("S(0)R"), Mesh.parse("dp=32,tp=8"))
[{'axis': 'dp', 'text': 'S(0)', 'kind': 's0'}, {'axis': 'tp', 'text': 'R', 'kind': 'r'}]
"""

from __future__ import annotations

from solver_shard.layout import Layout, Placement
from solver_shard.mesh import Mesh

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
