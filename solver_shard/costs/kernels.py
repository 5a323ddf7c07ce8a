"""What kind of kernel runs an op: kinds reach different parts of a device's peaks.

>>> from solver_shard.rulebook.rule import Rule
>>> kernel_of(Rule(factors=(), operands=(), results=(), matmul=True, family="einsum"))
'matmul'

matmul: matrix products and convolutions. attention: fused attention, forward and backward. reduction: kernels that go over
a dim as a whole (sums, norms, softmax, losses). streaming: all others, which read and write every element once.
"""

from __future__ import annotations

from typing import Literal

from solver_shard.rulebook.rule import Rule

Kernel = Literal["matmul", "attention", "streaming", "reduction"]

_ATTENTION = frozenset({"sdpa", "sdpa_backward"})
_NORMS = frozenset({"batch_norm", "batch_norm_backward", "layer_norm", "layer_norm_backward"})
_LOSSES = frozenset({"nll_loss", "nll_loss_backward", "nll_sums"})
_REDUCTION = frozenset({"along", "count", "histogram", "reduce"}) | _NORMS | _LOSSES


def kernel_of(rule: Rule) -> Kernel:
    """The kind of an op, by its rule: by family, and by whether its operations run on the matrix units."""
    if rule.family in _ATTENTION:
        return "attention"
    return "matmul" if rule.matmul else "reduction" if rule.family in _REDUCTION else "streaming"
