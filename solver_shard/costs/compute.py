"""How long an op computes: the roofline, the slower of the arithmetic units and the memory.

>>> from solver_shard.costs.cluster import load_cluster
>>> device = load_cluster("h100").device
>>> roofline_ns(device, 2 * 8192**3, 3 * 2 * 8192**2, "bf16", "matmul")  # a large matrix product: arithmetic
array(1587560)
>>> roofline_ns(device, 2**26, 3 * 2 * 2**26, "bf16", "streaming")  # an addition: memory
array(133550)

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (CACM 52(4), 2009), with the peaks
scaled by the cluster's efficiencies for the op's kind of kernel (``kernels``): matrix products and attention by what
their kernels reach of the matrix units, reductions (sums, norms, softmax, losses) by what theirs reach of the memory
bandwidth, all else by what streaming kernels reach. Kernel launches are taken as hidden.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from solver_shard.costs.cluster import Device
from solver_shard.costs.collectives import MAX_NANOSECONDS
from solver_shard.costs.kernels import Kernel


def roofline_ns(device: Device, flops: ArrayLike, nbytes: ArrayLike, dtype: str, kernel: Kernel) -> NDArray[np.int64]:
    """Nanoseconds, rounded up, of ``flops`` operations on ``dtype`` operands that move ``nbytes`` bytes of device memory.

    Arguments broadcast; the result is int64 of the common shape, at most ``MAX_NANOSECONDS`` (13 days).
    """
    arithmetic = np.asarray(flops, dtype=np.float64) * (1e9 / device.flops(dtype, kernel))
    memory = np.asarray(nbytes, dtype=np.float64) * (1e9 / device.bandwidth(kernel))
    return np.asarray(np.minimum(np.ceil(np.maximum(arithmetic, memory)), MAX_NANOSECONDS), dtype=np.int64)
