"""The rule of one op instance: which mesh-axis strategies it has.

A rule maps every dim of every operand and result to factors, like einsum indices. From it, the strategies that one
mesh axis may use are read off: cut one factor (``S`` where a tensor has it; a result that lacks a reduction factor
becomes partial), pass a pending reduction through a linear op, or replicate everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from solver_shard.layout import P, Placement, R, S

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
class AxisStrategy:
    """What one mesh axis does to an op: a placement per operand and per result; ``factor`` is the cut one, if any."""

    name: str
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    factor: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one op instance (name, shapes, attributes) may be sharded.

    Attributes:
        operands, results: factor positions per dim of each tensor.
        linear: operand sets that may be partial together.
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
    flops: int = 0
    matmul: bool = False
    view: bool = False
    reads: tuple[bool, ...] = field(default=())
    alike: tuple[int, ...] = ()
    source: str = "table"
    family: str = ""

    def strategies(self) -> tuple[AxisStrategy, ...]:
        """All single-axis strategies, replicate first, then factors in order, then linear sets.

        A factor is cut only where it is the major one (factors of size 1 aside) of every dim that holds it.
        """
        operands, results = self.operands, self.results
        found = [AxisStrategy(name="R", operands=(R,) * len(operands), results=(R,) * len(results))]
        for index, factor in enumerate(self.factors):
            if not factor.cut or factor.size < 2:
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
        return tuple(found)

    def _cut(self, dims: Dims, index: int) -> Placement | None:
        """Where the factor sits: S(dim), R when absent, None when it is not the major factor of its dim."""
        for dim, held in enumerate(dims):
            if index in held:
                major = next(f for f in held if self.factors[f].size > 1)
                return S(dim) if major == index else None
        return R
