"""All strategies of one op instance on a mesh, their prices, and which tensors between ops are fused away.

The strategies are the product over mesh axes of the rule's single-axis strategies.

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

from solver_shard.costs.layouts import local_numels
from solver_shard.costs.model import CostModel
from solver_shard.graph.choice_graph import Ints
from solver_shard.layout import Layout, P, Placement
from solver_shard.program import DTYPE_BYTES, Program, Tensor, places
from solver_shard.rules.rule import AxisStrategy, Rule

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


def op_nanoseconds(
    program: Program, i: int, column: OpStrategies, costs: CostModel, fused: frozenset[int] = frozenset(), inside: bool = False
) -> Ints:
    """Roofline time of an op and the collectives inside it, under each of its strategies; views take none.

    Tensors that are ``fused`` are neither written nor read. An op that works ``inside`` its operand 0 (``program.in_place``) moves what it
    writes there, and no more of that operand and of its result.
    """
    rule = column.rule
    if rule.view:
        return np.zeros(len(column.work), dtype=np.int64)
    nbytes = np.zeros(len(column.work), dtype=np.int64)
    op = program.ops[i]
    inside = inside and rule.window > 0
    if inside:
        nbytes += np.rint(rule.window * column.work).astype(np.int64) * DTYPE_BYTES[program.tensors[op.results[0]].dtype]
    for j, operand in enumerate(column.operands):
        if rule.needs(j) and op.operands[j] not in fused and not (inside and j == 0):
            nbytes += operand.nbytes[operand.chosen]
    for j, result in enumerate(column.results):
        if op.results[j] not in fused and not (inside and j == 0):
            nbytes += result.nbytes[result.chosen]
    computing = costs.compute_ns(rule.flops * column.work, nbytes, compute_dtype(program, i), rule.kernel)
    return computing + column.collective_nanoseconds(costs.collectives.times)


def spill_nanoseconds(dtype: str, written: Ints, read: Ints, costs: CostModel) -> Ints:
    """What a copy of a fused tensor costs besides its collectives: the maker writes it after all, the reader reads it back."""
    return costs.compute_ns(0, written, dtype) + costs.compute_ns(0, read, dtype)


def compute_dtype(program: Program, i: int) -> str:
    """Dtype an op computes in: its first floating-point operand's, else its first result's."""
    op = program.ops[i]
    dtypes = [program.tensors[t].dtype for t in (*op.operands, *op.results)]
    return next((d for d in dtypes if d[0] in "fb" and d != "bool"), dtypes[0])


FUSED_FAMILIES = frozenset({"pointwise", "cast"})


def fused_tensors(program: Program, rules: Sequence[Rule]) -> frozenset[int]:
    """Which intermediate tensors of pointwise chains a fusing compiler never writes to memory; ``rules`` has one rule per op.

    Where 5 = gelu(4) is read by a dropout of the same shape alone:

    >>> fused_tensors(program, rules)  # doctest: +SKIP
    frozenset({5})

    A tensor is fused where a pointwise op or a cast makes it, one pointwise op or cast reads it, once, in the same phase and to
    a result of the same shape, and nothing else needs it (no backward pass, no output, no gradient). So every link of a chain is
    decided by the program alone, and the prices of ops stay separate: the maker does not write the tensor, the reader does not
    read it. The place of a pin or a relay between them (:mod:`solver_shard.program`) makes no difference: it hands on what it
    got. What torch.compile's Inductor fuses beyond this is not counted: prologues and epilogues of matrix products and
    reductions, several readers in one kernel, tensors that are written but not read back.

    **Price.** Each op takes the longer of its operations and of the bytes that it still moves, so a chain costs at least what one
    fused kernel would. Where a reshard changes the layout between maker and reader there is a collective between the two, no kernel
    can hold both, and the copy pays for writing the tensor and reading it back (``Reshard.traffic_ns``).

    **Memory** is not changed: a fused tensor still counts its bytes, so the peak is an upper bound.
    """
    pointwise = [rule.family in FUSED_FAMILIES for rule in rules]
    needed = {*program.outputs, *program.gradients.values()}
    producers, readers, handing = program.producers(), program.readers(), places(program)
    found: set[int] = set()
    for t in readers:
        if t not in producers or not pointwise[producers[t][0]]:
            continue
        chain = [t]  # the tensor, and what places hand on of it
        while chain[-1] in handing:
            chain += program.ops[handing[chain[-1]]].results
        reading = [i for i, j in readers.get(chain[-1], ()) if rules[i].needs(j)]
        if needed.intersection(chain) or len(reading) != 1:
            continue
        maker, reader = producers[t][0], reading[0]
        if not pointwise[reader] or program.ops[maker].phase is not program.ops[reader].phase:
            continue
        if program.tensors[t].shape == program.tensors[program.ops[reader].results[0]].shape:
            found.update(chain)
    return frozenset(found)
