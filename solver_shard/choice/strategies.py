"""All strategies of one op instance on a mesh: the product over mesh axes of its rule's single-axis strategies.

On inner sub-axes a strategy may also cut a minor factor (see ``Rule.minor_strategies``), where the axes to the left have
single units of what lies above it.

Only what cannot be executed is dropped: a factor cut into more shards than its rule allows, a dim smaller than its
shard count, two reductions pending on one tensor that do not commute (max with sum), two different implementations.
And operands that no maker can leave partial are not all read partial (``_reachable``): they would be whole on one device and
zeros on the others. Whole everywhere they have as many bytes, the op takes as long, and what it makes is whole, which any
reader takes for partial by a free move. So neither time nor memory can gain.
Collectives inside an implementation run over all axes that choose it, as one group. Everything is held in arrays with
one row per strategy, because a three-axis mesh gives a few hundred of them to every op.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver_shard.choice.graph import Ints
from solver_shard.costs.layouts import local_numels
from solver_shard.layout import Layout, P, Placement
from solver_shard.program import DTYPE_BYTES, Tensor
from solver_shard.rulebook.rule import AxisStrategy, Rule

_PLACEMENTS = {int(p): p for p in [Placement(d) for d in range(-5, 64)]}
_COMMUTING = (int(P("sum")), int(P("avg")))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutColumn:
    """The layout of one operand or result under every strategy: distinct layouts, and which one each strategy has."""

    layouts: tuple[Layout, ...]
    chosen: Ints
    nbytes: Ints
    """Local bytes (largest shard) per distinct layout."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InsideColumn:
    """One collective of an implementation over one set of axes: the strategies that need it, and their bytes per device."""

    implementation: str
    kind: str
    axes: tuple[int, ...]
    strategies: Ints
    nbytes: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpStrategies:
    """Strategies of an op instance; ``axis_choice[k, a]`` is the single-axis strategy of axis a under strategy k."""

    rule: Rule
    single: tuple[AxisStrategy, ...]
    axis_choice: Ints
    operands: tuple[LayoutColumn, ...]
    results: tuple[LayoutColumn, ...]
    work: NDArray[np.float64]
    """Largest share of the op's work that one device does, per strategy (1 when nothing is cut)."""
    inside: tuple[InsideColumn, ...] = ()
    """Collectives of the implementations, in the order in which an op runs them."""

    def names(self, strategy: int) -> tuple[str, ...]:
        """Name of the single-axis strategy on every mesh axis."""
        return tuple(self.single[c].name for c in self.axis_choice[strategy])

    def implementation(self, strategy: int) -> str:
        """Name of the implementation that the strategy runs; empty for none."""
        return next((way.name for c in self.axis_choice[strategy] if (way := self.single[c].implementation)), "")

    def collectives(self, strategy: int) -> tuple[tuple[str, tuple[int, ...], int], ...]:
        """Kind, axes and bytes per device of every collective inside the op under one strategy, in order."""
        found = []
        for column in self.inside:
            for at in np.flatnonzero(column.strategies == strategy):
                found.append((column.kind, column.axes, int(column.nbytes[at])))
        return tuple(found)

    def collective_nanoseconds(self, times: Callable[[str, tuple[int, ...], Ints], Ints]) -> Ints:
        """Time of the collectives inside the op, per strategy; ``times`` prices many sizes of one collective."""
        total = np.zeros(len(self.axis_choice), dtype=np.int64)
        for column in self.inside:
            total[column.strategies] += times(column.kind, column.axes, column.nbytes)
        return total


def op_strategies(
    rule: Rule,
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
    mesh_shape: Sequence[int],
    pending: Sequence[frozenset[str]],
    inner: Collection[int] = (),
) -> OpStrategies:
    """Expand a rule to the mesh; axes of size 1 only replicate, so that they change nothing.

    ``pending`` has the reductions that each operand's producer can leave open. A linear set is of use only where one of
    its operands can be partial; the others may become so by a free move. ``inner`` has the positions of the axes that may
    cut minor factors.
    """
    plain = tuple(s for s in rule.strategies() if _reachable(s, pending))
    single = (*plain, *(rule.minor_strategies() if inner else ()))
    options = [range(len(single) if a in inner else len(plain)) if size > 1 else range(1) for a, size in enumerate(mesh_shape)]
    choice = np.array(list(itertools.product(*options)), dtype=np.int64).reshape(-1, len(mesh_shape))
    sizes = np.array(mesh_shape, dtype=np.int64)
    keep = np.ones(len(choice), dtype=bool)
    work = np.ones(len(choice))
    factor_of = np.array([-1 if s.factor is None else s.factor for s in single])
    cuts = np.ones((len(rule.factors), len(choice)), dtype=np.int64)
    for index, factor in enumerate(rule.factors):
        shards = cuts[index] = np.where(factor_of[choice] == index, sizes, 1).prod(axis=1)
        for count in np.unique(shards):
            here = shards == count
            keep[here] &= factor.legal(int(count))
            work[here] *= rule.share(index, int(count))
    for number, strategy in enumerate(single[len(plain) :], start=len(plain)):
        for a, above in itertools.product(inner, strategy.after):
            before = np.where(factor_of[choice[:, :a]] == above, sizes[:a], 1).prod(axis=1)
            keep &= (choice[:, a] != number) | (before == rule.factors[above].size)
    ways = {way.name: number for number, way in enumerate(rule.implementations)}
    way_of = np.array([-1 if s.implementation is None else ways[s.implementation.name] for s in single])[choice]
    keep &= ((way_of < 0) | (way_of == way_of.max(axis=1, initial=-1, keepdims=True))).all(axis=1)
    columns = []
    for tensors, pick in ((operands, "operands"), (results, "results")):
        for j, tensor in enumerate(tensors):
            codes = np.array([getattr(s, pick)[j] for s in single], dtype=np.int64)[choice]
            keep &= _executable(codes, tensor.shape, sizes)
            columns.append((tensor, codes))
    choice, work = choice[keep], work[keep]
    made = [_column(tensor, codes[keep], mesh_shape) for tensor, codes in columns]
    return OpStrategies(
        rule=rule,
        single=single,
        axis_choice=choice,
        operands=tuple(made[: len(operands)]),
        results=tuple(made[len(operands) :]),
        work=work,
        inside=_inside(rule, way_of[keep], cuts[:, keep]),
    )


def _inside(rule: Rule, way_of: Ints, cuts: Ints) -> tuple[InsideColumn, ...]:
    """The collectives of every implementation by the axes that run it; ``way_of[k, a]`` is its number or -1."""
    found = []
    for number, way in enumerate(rule.implementations):
        for pattern in np.unique(way_of == number, axis=0) if way.collectives else ():
            here = np.flatnonzero(((way_of == number) == pattern).all(axis=1))
            if not pattern.any() or not len(here):
                continue
            for collective in way.collectives:
                nbytes = [collective.local_nbytes(rule.factors, cuts[:, k].tolist()) for k in here]
                found.append(
                    InsideColumn(
                        implementation=way.name,
                        kind=collective.kind,
                        axes=tuple(np.flatnonzero(pattern).tolist()),
                        strategies=here,
                        nbytes=np.array(nbytes, dtype=np.int64),
                    )
                )
    return tuple(found)


def _reachable(strategy: AxisStrategy, pending: Sequence[frozenset[str]]) -> bool:
    partial = [(j, p.reduction) for j, p in enumerate(strategy.operands) if p.is_partial]
    if strategy.factor is not None:
        return True  # what is added to a pending sum becomes pending by a free move
    return not partial or any(reduction in pending[j] for j, reduction in partial)


def _executable(codes: Ints, shape: Sequence[int], sizes: Ints) -> NDArray[np.bool_]:
    fine = np.ones(len(codes), dtype=bool)
    for dim, size in enumerate(shape):
        shards = np.where(codes == dim, sizes, 1).prod(axis=1)
        fine &= (shards == 1) | (shards <= size)
    partial = codes <= int(P("sum"))
    for code in {int(c) for c in np.unique(codes[partial])} - set(_COMMUTING):
        fine &= ~((codes == code).any(axis=1) & (partial & (codes != code)).any(axis=1))
    return fine


def _column(tensor: Tensor, codes: Ints, mesh_shape: Sequence[int]) -> LayoutColumn:
    rows, inverse = np.unique(codes, axis=0, return_inverse=True)
    layouts = tuple(Layout(_PLACEMENTS[c] for c in row) for row in rows.tolist())
    sizes = local_numels(tensor.shape, mesh_shape, layouts) * DTYPE_BYTES[tensor.dtype]
    return LayoutColumn(layouts=layouts, chosen=inverse.reshape(-1).astype(np.int64), nbytes=sizes)
