"""The cost model of one mesh on one cluster: everything that the lowering and the evaluator ask a price for.

>>> from solver_shard.costs.cluster import load_cluster
>>> model = CostModel(Mesh.parse("dp=2,tp=4"), load_cluster("h100"))
>>> model.local_bytes((4096, 4096), "bf16", [Layout.parse("RR"), Layout.parse("S(0)S(1)")])
array([33554432,  4194304])
>>> table = model.transitions((4096, 4096), "bf16", ("sum",))
>>> [step.kind for step in table.path(Layout.parse("P(sum)P(sum)"), Layout.parse("RR"))]
['all_reduce']
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from solver_shard.costs.cluster import Cluster
from solver_shard.costs.collectives import Collectives
from solver_shard.costs.compute import roofline_ns
from solver_shard.costs.kernels import Kernel
from solver_shard.costs.layouts import legal_layouts, local_numels
from solver_shard.costs.transitions import TransitionTable, build_table
from solver_shard.errors import InputError
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.program import DTYPE_BYTES

Ints = NDArray[np.int64]


class CostModel:
    """Prices in nanoseconds and sizes in bytes, with caches.

    Attributes:
        mesh, cluster: what is priced.
        overlap: 0 to 1, the part of parameter gathers and gradient reductions that hides behind compute.
    """

    def __init__(self, mesh: Mesh, cluster: Cluster, overlap: float = 0.0) -> None:
        if isinstance(overlap, bool) or not isinstance(overlap, int | float) or not 0.0 <= overlap <= 1.0:
            raise InputError(f"overlap {overlap!r} is not legal; legal: a number from 0 (all communication exposed) to 1 (all hidden)")
        self.mesh, self.cluster, self.overlap = mesh, cluster, float(overlap)
        self.collectives = Collectives(mesh, cluster)
        self._tables: dict[tuple[tuple[int, ...], int, tuple[str, ...], int, bool], TransitionTable] = {}
        self._layouts: dict[tuple[tuple[int, ...], tuple[str, ...], bool], tuple[Layout, ...]] = {}

    def collective_ns(self, kind: str, axes: tuple[int, ...], nbytes: int) -> int:
        """Time of one collective over the axes flattened into one group; the bytes are those of one device.

        ``kind`` is all_gather (bytes of the gathered output), reduce_scatter (of the input), all_reduce (of the
        buffer) or all_to_all (of the buffer). Formulas: ``solver_shard.costs.collectives``.
        """
        return self.collectives.nanoseconds(kind, axes, nbytes)

    def compute_ns(self, flops: ArrayLike, nbytes: ArrayLike, dtype: str, kernel: Kernel = "streaming") -> Ints:
        """Roofline time on one device, elementwise over the broadcast arrays, rounded up: int64. ``kernel``: see ``kernels``."""
        return roofline_ns(self.cluster.device, flops, nbytes, dtype, kernel)

    def layouts(self, shape: Sequence[int], reductions: Sequence[str] = ("sum",), orders: bool = False) -> tuple[Layout, ...]:
        """Legal layouts of a tensor, replicated first (cached); see ``legal_layouts``. ``orders``: strided ones too."""
        key = (tuple(shape), tuple(reductions), orders)
        if key not in self._layouts:
            self._layouts[key] = legal_layouts(key[0], self.mesh.shape, key[1], self.mesh.wholes if orders else None)
        return self._layouts[key]

    def transitions(
        self, shape: Sequence[int], dtype: str, reductions: Sequence[str] = ("sum",), bucket: int = 1, orders: bool = False
    ) -> TransitionTable:
        """The transition table of a tensor that shares its launches with ``bucket`` - 1 others (see ``buckets``).

        ``orders``: with strided layouts, as parameters and their gradients may have. Cached by shape, element size, reductions,
        bucket and orders; each table obeys the triangle inequality.
        """
        key = (tuple(shape), DTYPE_BYTES[dtype], tuple(reductions), bucket, orders)
        if key not in self._tables:
            self._tables[key] = build_table(*key[:3], self.collectives, bucket, orders)
        return self._tables[key]

    def local_bytes(self, shape: Sequence[int], dtype: str, layouts: Sequence[Layout]) -> Ints:
        """Bytes that the fullest device holds, per layout: int64[len(layouts)]."""
        return local_numels(shape, self.mesh.shape, layouts) * DTYPE_BYTES[dtype]
