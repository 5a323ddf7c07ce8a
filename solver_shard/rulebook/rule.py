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

from solver_shard.layout import P, Placement, R, S
from solver_shard.program import DTYPE_BYTES

Dims = tuple[tuple[int, ...], ...]
"""Per tensor dim, the positions of its factors in ``Rule.factors``, major to minor; () for a dim of size 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """An index of the rule.

    Attributes:
        size: how many units can be told apart; a dim may hold several elements per unit (whole attention heads).
        even: only shard counts that divide ``size`` are legal; otherwise any count up to ``size``.
        cut: whether a mesh axis may cut it at all (False: the op must see it whole).
        reduction: what a result that lacks this factor becomes when it is cut (sum, avg, max, min); None when every
            result holds it, or when a result lacking it makes the cut illegal.
    """

    name: str
    size: int
    even: bool = False
    cut: bool = True
    reduction: str | None = None

    def legal(self, shards: int) -> bool:
        """Whether the factor can be cut into this many shards."""
        if shards == 1:
            return True
        return self.cut and (self.size % shards == 0 if self.even else self.size >= shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Operands that may be partial together: the results are then partial too, in the same reduction."""

    operands: tuple[int, ...]
    reductions: tuple[str, ...] = ("sum",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
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
    collectives: tuple[Inside, ...] = ()
    share: Literal["even", "triangle", "whole"] = "even"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisStrategy:
    """What one mesh axis does to an op: a placement per operand and per result; ``factor`` is the cut one, if any."""

    name: str
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    factor: int | None = None
    implementation: Implementation | None = None


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
        reads: per operand, whether its bytes are read (False: only its shape or dtype is used).
        alike: results that every device computes alike whatever is cut (random seeds, empty placeholders).
        source: ``table`` (row in rules/), ``family``, or ``fallback`` (no rule: everything replicated).
        family: the name of the rule family or ``einsum`` notation; consumers are grouped by it.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    linear: tuple[Linear, ...] = ()
    implementations: tuple[Implementation, ...] = ()
    flops: int = 0
    matmul: bool = False
    view: bool = False
    reads: tuple[bool, ...] = field(default=())
    alike: tuple[int, ...] = ()
    source: str = "table"
    family: str = ""

    def strategies(self) -> tuple[AxisStrategy, ...]:
        """All single-axis strategies, replicate first, then factors in order, then linear sets, then implementations.

        A factor is cut only where it is the major one (factors of size 1 aside) of every dim that holds it.
        """
        operands, results = self.operands, self.results
        special = {implementation.factor for implementation in self.implementations}
        found = [AxisStrategy(name="R", operands=(R,) * len(operands), results=(R,) * len(results))]
        for index, factor in enumerate(self.factors):
            if not factor.cut or factor.size < 2 or index in special:
                continue
            places = [self._cut(dims, index) for dims in (*operands, *results)]
            if any(place is None for place in places):
                continue
            ins = tuple(p for p in places[: len(operands)] if p is not None)
            outs = []
            for position, place in enumerate(places[len(operands) :]):
                if place == R and position not in self.alike:
                    if factor.reduction is None:
                        break
                    place = P(factor.reduction)
                outs.append(place)
            else:
                found.append(AxisStrategy(name=factor.name, operands=ins, results=tuple(p for p in outs if p is not None), factor=index))
        for linear in self.linear:
            for reduction in linear.reductions:
                ins = tuple(P(reduction) if i in linear.operands else R for i in range(len(operands)))
                name = f"P({reduction}):{','.join(map(str, linear.operands))}"
                found.append(AxisStrategy(name=name, operands=ins, results=(P(reduction),) * len(results)))
        for way in self.implementations:
            found.append(AxisStrategy(name=way.name, operands=way.operands, results=way.results, factor=way.factor, implementation=way))
        return tuple(found)

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

    def _cut(self, dims: Dims, index: int) -> Placement | None:
        """Where the factor sits: S(dim), R when absent, None when it is not the major factor of its dim."""
        for dim, held in enumerate(dims):
            if index in held:
                major = next(f for f in held if self.factors[f].size > 1)
                return S(dim) if major == index else None
        return R
