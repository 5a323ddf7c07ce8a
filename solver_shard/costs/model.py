"""The cost model of one mesh on one cluster: everything that the lowering and the evaluator ask a price for; the roofline, and overlap.

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
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from solver_shard.costs.cluster import Cluster, Device, Kernel
from solver_shard.costs.collectives import MAX_NANOSECONDS, Collectives
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
        """Roofline time on one device, elementwise over the broadcast arrays, rounded up: int64. ``kernel``: ``Rule.kernel``."""
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
        """The transition table of a tensor that shares its launches with ``bucket`` - 1 others (see ``schedule``).

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


def roofline_ns(device: Device, flops: ArrayLike, nbytes: ArrayLike, dtype: str, kernel: Kernel) -> NDArray[np.int64]:
    """Nanoseconds, rounded up, of ``flops`` operations on ``dtype`` operands that move ``nbytes`` bytes of device memory.

    How long an op computes: the roofline, the slower of the arithmetic units and the memory.

    >>> from solver_shard.costs.cluster import load_cluster
    >>> device = load_cluster("h100").device
    >>> roofline_ns(device, 2 * 8192**3, 3 * 2 * 8192**2, "bf16", "matmul")  # a large matrix product: arithmetic
    array(1587560)
    >>> roofline_ns(device, 2**26, 3 * 2 * 2**26, "bf16", "streaming")  # an addition: memory
    array(133550)

    Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (CACM 52(4), 2009), with the peaks
    scaled by the cluster's efficiencies for the op's kind of kernel (``Rule.kernel``): matrix products and attention by what
    their kernels reach of the matrix units, reductions (sums, norms, softmax, losses) by what theirs reach of the memory
    bandwidth, all else by what streaming kernels reach. Kernel launches are taken as hidden.

    Arguments broadcast; the result is int64 of the common shape, at most ``MAX_NANOSECONDS`` (13 days).
    """
    arithmetic = np.asarray(flops, dtype=np.float64) * (1e9 / device.flops(dtype, kernel))
    memory = np.asarray(nbytes, dtype=np.float64) * (1e9 / device.bandwidth(kernel))
    return np.asarray(np.minimum(np.ceil(np.maximum(arithmetic, memory)), MAX_NANOSECONDS), dtype=np.int64)


# How much of a collective's time stays exposed when part of it runs beside compute.

Time = TypeVar("Time", int, NDArray[np.int64])
_PARTS = 1_000_000


def exposed(nanoseconds: Time, overlap: float) -> Time:
    """Nanoseconds that are left when ``overlap`` (0 to 1) of them is hidden; rounded up, so never less than the exact value.

    >>> exposed(1000, 0.25), exposed(7, 0.5), exposed(7, 1.0)
    (750, 4, 0)
    """
    left = _PARTS - round(overlap * _PARTS)
    return -(-nanoseconds * left // _PARTS)
