"""The rule of one op instance: which mesh-axis strategies it has.

A rule maps every dim of every operand and result to factors, like einsum indices. From it, the strategies that one
mesh axis may use are read off: cut one factor (``S`` where a tensor has it; a result that lacks a reduction factor
becomes partial), pass a pending reduction through a linear op, run a named implementation (which cuts a factor that the
op itself would have to see whole, and may need collectives inside), or replicate everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from solver_shard.costs.cluster import Kernel
from solver_shard.layout import P, Placement, R, S
from solver_shard.program import DTYPE_BYTES

FactorDims = tuple[tuple[int, ...], ...]
"""Per tensor dim, the positions of its factors in ``Rule.factors``, major to minor; may be () for a dim of size 1."""

FactorKind = Literal["pass_through", "reduction", "need_replication", "permutation"]
"""What becomes of shards of a factor: kept, partial results, gathered first, or exchanged with neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """An index of the rule.

    Attributes:
        size: how many units can be told apart; a dim may hold several elements per unit (whole attention heads).
        even: only shard counts that divide ``size`` are legal; otherwise any count up to ``size``.
        filled: no device may be left without a part (a maximum of nothing does not exist).
        cut: whether a mesh axis may cut it at all (False: the op must see it whole).
        reduction: what a result that lacks this factor becomes when it is cut (sum, avg, max, min); None when every
            result holds it, or when a result lacking it makes the cut illegal.
        addends: operands that are added to the pending sum once (a bias): they must be pending too, which is a free move from
            a replicated one.
        apart: results that do not depend on this factor: they are the same on every device when it is cut.
        kind: what it is to propagation, which carries shardings along factors of every kind.
        blocked: propagation carries no sharding along it.
    """

    name: str
    size: int
    even: bool = False
    filled: bool = False
    cut: bool = True
    reduction: str | None = None
    addends: tuple[int, ...] = ()
    apart: tuple[int, ...] = ()
    kind: FactorKind = "pass_through"
    blocked: bool = False

    def legal(self, shards: int) -> bool:
        """Whether the factor can be cut into this many shards."""
        if shards == 1:
            return True
        if self.even and self.size % shards:
            return False
        return self.cut and self.size >= shards and (not self.filled or -(-self.size // -(-self.size // shards)) == shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Operands that may be partial together: the results are then partial too.

    Attributes:
        reductions: in which the operands may be partial.
        becomes: for each of them, that of the results, where it is another: a decreasing function makes a maximum a minimum.
        fixed: results that do not depend on these operands, and stay as they are.
    """

    operands: tuple[int, ...]
    reductions: tuple[str, ...] = ("sum",)
    becomes: tuple[str, ...] = ()
    fixed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerCollective:
    """A collective inside an op, over the mesh axes that run one implementation, flattened into one group.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce or all_to_all.
        rows: positions of the factors that the buffer spans; each device has its own part of those that other axes cut.
        width: elements per row.
        dtype: of the buffer.
    """

    kind: str
    rows: tuple[int, ...]
    width: int
    dtype: str

    def local_nbytes(self, factors: Sequence[Factor], shards: Sequence[int]) -> int:
        """Bytes of the buffer on one device, where ``shards`` says into how many parts every factor is cut."""
        rows = math.prod(-(-factors[f].size // shards[f]) for f in self.rows)
        return rows * self.width * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """A way to run an op on a cut of a factor that the op by itself must see whole.

    Attributes:
        name: as plans and reports show it.
        factor: position of the factor that is cut.
        operands, results: what an axis that runs it does to every tensor.
        collectives: what happens inside, in order.
        share: how much of the op's flops the busiest device does: its ``even`` part of the factor; a band of a ``triangle``
            (causal attention: device r of n has queries [r, r + 1)·s/n, query i reads i + 1 keys, so the last device does
            1 - (n - 1)²/n² = (2n - 1)/n² of the work); or the ``whole`` (every device looks at every row).
    """

    name: str
    factor: int
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    collectives: tuple[InnerCollective, ...] = ()
    share: Literal["even", "triangle", "whole"] = "even"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisStrategy:
    """What one mesh axis does to an op: a placement per operand and per result; ``factor`` is the cut one, if any.

    ``after`` names factors that lie above it in some dim: axes to the left must have cut each of them into single units.
    """

    name: str
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    factor: int | None = None
    implementation: Implementation | None = None
    after: tuple[int, ...] = ()


_ATTENTION = frozenset({"sdpa", "sdpa_backward"})
_NORMS = frozenset({"batch_norm", "batch_norm_backward", "layer_norm", "layer_norm_backward"})
_LOSSES = frozenset({"loss", "nll_loss", "nll_loss_backward", "nll_sums"})
_REDUCTION = frozenset({"along", "count", "histogram", "reduce"}) | _NORMS | _LOSSES


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one op instance (name, shapes, attributes) may be sharded.

    Attributes:
        operands, results: factor positions per dim of each tensor.
        linear: operand sets that may be partial together.
        implementations: ways to cut factors that need more than running the op on shards; nothing else cuts these factors.
        flops: floating-point operations of the whole op (a multiply-add counts two).
        matmul: the flops run on the matrix units.
        view: results share operand 0's storage: no bytes, no time.
        window: how many elements of operand 0's the op reads and writes, where it works in the storage of that one
            (``program.in_place``); 0 where it goes over all of them.
        reads: per operand, whether its bytes are read (False: only its shape or dtype is used).
        alike: results that every device computes alike whatever is cut (random seeds, empty placeholders).
        explicit: all strategies, where they are not read off the factors (DTensor's own, those of in-place and list ops). Each may
            name a factor that no dim holds: it says how often the strategy can cut, and how the work divides.
        propagates: whether the op has a rule at all to propagation (constants, loops, unknown calls have none).
        source: ``table`` (row in rules/), ``user`` (row in a file of the user's), ``family`` (in-place, out and list ops, by the row
            of the op they follow), ``dtensor`` (strategies registered with DTensor, proven), ``unproven`` (such strategies on the
            word of whoever registered them), or ``fallback`` (no rule: all replicated).
        family: the name of the rule family or ``einsum`` notation; consumers are grouped by it.
    """

    factors: tuple[Factor, ...]
    operands: tuple[FactorDims, ...]
    results: tuple[FactorDims, ...]
    linear: tuple[Linear, ...] = ()
    implementations: tuple[Implementation, ...] = ()
    flops: int = 0
    matmul: bool = False
    view: bool = False
    window: int = 0
    reads: tuple[bool, ...] = field(default=())
    alike: tuple[int, ...] = ()
    explicit: tuple[AxisStrategy, ...] | None = None
    propagates: bool = True
    source: str = "table"
    family: str = ""

    @property
    def kernel(self) -> Kernel:
        """What kind of kernel runs the op, by family; kinds reach different parts of a device's peaks.

        >>> Rule(factors=(), operands=(), results=(), matmul=True, family="einsum").kernel
        'matmul'

        matmul: matrix products and convolutions. attention: fused attention, forward and backward. reduction: kernels that go over
        a dim as a whole (sums, norms, softmax, losses). streaming: all others, which read and write every element once.
        """
        if self.family in _ATTENTION:
            return "attention"
        return "matmul" if self.matmul else "reduction" if self.family in _REDUCTION else "streaming"

    def needs(self, operand: int) -> bool:
        """Whether the op reads the bytes of an operand; where it does not, nothing must be there but its local shape."""
        return not self.reads or self.reads[operand]

    def strategies(self) -> tuple[AxisStrategy, ...]:
        """All single-axis strategies, replicate first, then factors in order, then linear sets, then implementations.

        A factor is cut only where it is the major one (factors of size 1 aside) of every dim that holds it.
        """
        if self.explicit is not None:
            return tuple(strategy for strategy in self.explicit if not strategy.after)
        operands, results = self.operands, self.results
        found = [AxisStrategy(name="R", operands=(R,) * len(operands), results=(R,) * len(results))]
        found += [strategy for strategy in self._cuts() if not strategy.after]
        for linear in self.linear:
            for reduction, made in zip(linear.reductions, linear.becomes or linear.reductions, strict=True):
                ins = tuple(P(reduction) if i in linear.operands else R for i in range(len(operands)))
                outs = tuple(R if i in linear.fixed or i in self.alike else P(made) for i in range(len(results)))
                name = f"P({reduction}):{','.join(map(str, linear.operands))}"
                found.append(AxisStrategy(name=name, operands=ins, results=outs))
        for way in self.implementations:
            found.append(AxisStrategy(name=way.name, operands=way.operands, results=way.results, factor=way.factor, implementation=way))
        return tuple(found)

    def minor_strategies(self) -> tuple[AxisStrategy, ...]:
        """Cuts of factors that lie below others in some dim, legal once axes to the left hold single units of these.

        Attention whose 8 key-value heads serve 8 queries each: cut by 8 along ``heads`` first, then along ``group``, where
        keys and values stay whole. Meant for sub-axes: a part of an axis cuts the heads, the rest of it the groups.
        """
        return tuple(strategy for strategy in (self._cuts() if self.explicit is None else self.explicit) if strategy.after)

    def complete(self, axes: Sequence[AxisStrategy], sizes: Sequence[int]) -> bool:
        """Whether the axes, left to right, cut whatever lies above a minor cut into single units before it."""
        return all(
            math.prod(n for axis, n in zip(axes[:a], sizes[:a], strict=True) if axis.factor == above) == self.factors[above].size
            for a, strategy in enumerate(axes)
            for above in strategy.after
        )

    def _cuts(self) -> list[AxisStrategy]:
        """Cuts of one factor each, in the factors' order."""
        found = []
        special = {implementation.factor for implementation in self.implementations}
        for index, factor in enumerate(self.factors):
            if not factor.cut or factor.size < 2 or index in special:
                continue
            above = self._above(index)
            if any(f in special or not self.factors[f].cut for f in above):
                continue
            pending = R if factor.reduction is None else P(factor.reduction)
            ins = tuple(pending if i in factor.addends else place_of(dims, index) for i, dims in enumerate(self.operands))
            outs = []
            for position, dims in enumerate(self.results):
                place = place_of(dims, index)
                if place == R and position not in self.alike and position not in factor.apart:
                    if factor.reduction is None:
                        break
                    place = P(factor.reduction)
                outs.append(place)
            else:
                found.append(AxisStrategy(name=factor.name, operands=ins, results=tuple(outs), factor=index, after=above))
        return found

    def _above(self, index: int) -> tuple[int, ...]:
        """Factors that precede this one in some dim, those of size 1 aside."""
        held = [h[: h.index(index)] for dims in (*self.operands, *self.results) for h in dims if index in h]
        return tuple(sorted({f for major in held for f in major if self.factors[f].size > 1}))

    def share(self, index: int, shards: int) -> float:
        """The part of the op's flops that the busiest device does when factor ``index`` is cut into so many shards."""
        size = self.factors[index].size
        kind = next((way.share for way in self.implementations if way.factor == index), "even")
        length = -(-size // shards)
        if shards == 1 or kind == "whole":
            return 1.0
        if kind == "even":
            return length / size
        starts = range(0, size, length)
        return max(min(start + length, size) ** 2 - start**2 for start in starts) / size**2


def place_of(dims: FactorDims, index: int) -> Placement:
    """Where the factor sits: S(dim), or R when absent."""
    return next((S(d) for d, held in enumerate(dims) if index in held), R)
