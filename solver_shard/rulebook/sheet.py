"""What a StableHLO rule family works with: a rule to be filled in factor by factor, in an order that matters.

Propagation goes through the factors of a rule in the order in which they were made, so the order is part of the rule, as are
factors of size 1. Operands and results are spoken of by position:

    sheet = Sheet(call)
    sheet.factor(operands=(0, None), results=(0,), size=8)                       # rows: dim 0 of operand 0 and of result 0
    sheet.factor(operands=(1, 0), results=(None,), size=4, kind="reduction")     # summed
    sheet.factor(operands=(None, 1), results=(1,), size=2)                       # columns
    rule = sheet.rule(family="hlo.dot", source="table")
"""

from __future__ import annotations

from collections.abc import Sequence

from solver_shard.rulebook.draft import Call
from solver_shard.rulebook.rule import Factor, Kind, Rule


class Sheet:
    """A rule being filled in; dims that are left without a factor get one of size 1 of their own."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.factors: list[Factor] = []
        self.operands: list[list[list[int]]] = [[[] for _ in tensor.shape] for tensor in call.operands]
        self.results: list[list[list[int]]] = [[[] for _ in tensor.shape] for tensor in call.results]
        self.propagates = True

    @classmethod
    def without(cls, call: Call) -> Sheet:
        """No rule: propagation does not go through this op."""
        sheet = cls(call)
        sheet.propagates = False
        return sheet

    def shared(self, dim: int, size: int, kind: Kind = "pass_through", *, blocked: bool = False) -> None:
        """A factor of the same dim of all operands and results, scalars aside."""
        index = self._new(size, kind, None, blocked)
        for dims in (*self.operands, *self.results):
            if dims:
                dims[dim].append(index)

    def factor(
        self,
        operands: Sequence[int | None],
        results: Sequence[int | None],
        size: int,
        kind: Kind = "pass_through",
        *,
        blocked: bool = False,
        reduction: str | None = None,
    ) -> None:
        """A factor of one dim, or of none (None), of every operand and result.

        Where it has size 1, dims that have a factor already do without it.
        """
        index = self._new(size, kind, reduction, blocked)
        for tensors, places in ((self.operands, operands), (self.results, results)):
            for dims, dim in zip(tensors, places, strict=True):
                if dim is not None and not 0 <= dim < len(dims):
                    raise IndexError(f"a factor of dim {dim} of a tensor of {len(dims)} dims")
                if dim is not None and (size != 1 or not dims[dim]):
                    dims[dim].append(index)

    def private(
        self, *, operands: int | None = None, results: int | None = None, size: int, kind: Kind = "pass_through", blocked: bool = False
    ) -> None:
        """A factor of this dim of all operands, or of this dim of all results, scalars aside."""
        places = [operands if dims else None for dims in self.operands], [results if dims else None for dims in self.results]
        self.factor(*places, size, kind, blocked=blocked)

    def rule(self, *, family: str, source: str) -> Rule:
        """The finished rule."""
        for dims in (*self.operands, *self.results):
            for held in dims:
                if not held:
                    held.append(self._new(1, "pass_through", None, False))
        return Rule(
            factors=tuple(self.factors),
            operands=tuple(tuple(map(tuple, dims)) for dims in self.operands),
            results=tuple(tuple(map(tuple, dims)) for dims in self.results),
            reads=(True,) * len(self.operands),
            propagates=self.propagates,
            source=source,
            family=family,
        )

    def _new(self, size: int, kind: Kind, reduction: str | None, blocked: bool) -> int:
        index = len(self.factors)
        # Shards of the other kinds need their neighbours' elements, and partial results a reduction that layouts can name.
        cut = kind == "pass_through" or (kind == "reduction" and reduction is not None)
        self.factors.append(
            Factor(name=factor_name(index), size=size, cut=cut, reduction=reduction if cut else None, kind=kind, blocked=blocked)
        )
        return index


def factor_name(index: int) -> str:
    """The name of a factor in printed rules: i to z, then z_1, z_2, ...

    >>> [factor_name(i) for i in (0, 17, 18)]
    ['i', 'z', 'z_1']
    """
    return chr(ord("i") + index) if index < 18 else f"z_{index - 17}"
