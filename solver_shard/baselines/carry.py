"""From DTensor's walk over the raw ops to a plan: every op of the cleaned program runs as DTensor would run the raw op it stands for.

The raw node that computes a tensor of the cleaned program tells its layout; the layouts in which it reads its arguments tell those of the
op's operands. Where raw values are other forms of these tensors (DTensor sees ``[batch * sequence, width]`` around a matrix product,
heads apart or merged), :mod:`solver_shard.baselines.views` says what a cut of the one is on the other. An op keeps the strategies of the
choice graph whose results have exactly these layouts and whose operands do too, or follow from them by a local cut. A product with a bias
is two ops here; the product is laid out as their sum, for DTensor adds the bias locally. A view is laid out as what it hands on.

What cannot be said so is left to the solver and listed: cuts that fall across dims, reductions of DTensor's own kind, strategies that the
choice graph does not have. Sources are stored as pinned, all others replicated. The solver completes the plan at the least cost:
copies that several ops read are made once, where DTensor makes them for each op, so the plan's price is a lower bound of DTensor's, and
``Walk.nanoseconds`` has the collectives of each op.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from solver_shard.baselines.dtensor_greedy import Walk, walk
from solver_shard.baselines.masks import Masks, deciding, left_over, narrowed
from solver_shard.baselines.views import is_view, rooted, roots, through
from solver_shard.choice.nodes import Lowering
from solver_shard.costs.model import CostModel
from solver_shard.expand.call import Kinds, kinds_of
from solver_shard.frontends import dims as D
from solver_shard.frontends.clean import Traced
from solver_shard.frontends.raw import Use, uses
from solver_shard.layout import Layout, R
from solver_shard.mesh import Mesh
from solver_shard.program import Program
from solver_shard.rulebook.build import Rulebook

if TYPE_CHECKING:
    from solver_shard.choice.strategies import LayoutColumn
    from solver_shard.costs.cluster import Cluster
    from solver_shard.plan.plan import Options, Plan

NAME = "dtensor-greedy"
_BIASED = ("aten.addmm.default", "aten.baddbmm.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What DTensor's decisions say of the cleaned program.

    Attributes:
        stored: tensor position to layout, of sources.
        made: tensor position to the layout in which its op makes it.
        read: op position and operand to the layout in which it is read.
    """

    stored: Mapping[int, Layout]
    made: Mapping[int, Layout]
    read: Mapping[tuple[int, int], Layout]


def dtensor_greedy_plan(
    traced: Traced,
    *,
    mesh: Mesh,
    cluster: Cluster,
    options: Options,
    pins: Mapping[str, Layout],
    devices_per_host: int = 8,
    source: str = "",
    command: str | None = None,
) -> tuple[Plan, Walk]:
    """The plan that keeps what DTensor decides from these pins, and the walk that says so.

    ``Plan.options.propagation`` names the ops that are left to the solver; pins of the options are only recorded. ``source`` and
    ``command`` are for ``Plan.provenance``.

    Raises:
        InputError: a pin that cannot be.
        InfeasibleError: the plan does not fit the memory limit of the options.
    """
    from solver_shard.api import plan_program

    found = walk(traced.raw, mesh, pins, devices_per_host=devices_per_host)

    def decide(lowering: Lowering, costs: CostModel, rulebook: Rulebook) -> tuple[Lowering, str]:
        masks, missing = dtensor_masks(lowering, carry(lowering.program, traced, found, pins))
        return narrowed(lowering, masks), NAME + left_over(lowering.program, missing)

    # axes are not split: DTensor knows no parts of an axis
    asked = dataclasses.replace(options, tied=False, pins=(), split="off")
    plan = plan_program(traced.program, mesh=mesh, cluster=cluster, options=asked, narrow=decide, source=source, command=command)
    return dataclasses.replace(plan, options=dataclasses.replace(plan.options, pins=options.pins)), found


def dtensor_masks(lowering: Lowering, carried: Carried, nodes: Collection[int] | None = None) -> tuple[Masks, tuple[int, ...]]:
    """Per node of a source or an op, the strategies that do what DTensor does; and the ops of which that cannot be said."""
    return deciding(lowering, carried.stored, lambda i: _agreeing(lowering, i, carried), nodes)


def _agreeing(lowering: Lowering, position: int, carried: Carried) -> NDArray[np.bool_]:
    """The strategies of an op that do what DTensor does; none where that cannot be said."""
    op, column = lowering.program.ops[position], lowering.strategies[position]
    keep = np.ones(len(column.axis_choice), dtype=np.bool_)
    for held, t in zip(column.results, op.results, strict=True):
        if t not in carried.made:
            return ~keep
        keep &= _has(held, carried.made[t], local=False)
    equal, near = keep.copy(), keep
    for j, held in enumerate(column.operands):
        if (position, j) in carried.read:
            equal &= _has(held, carried.read[position, j], local=False)
            near = near & _has(held, carried.read[position, j], local=True)
    return equal if equal.any() else near


def _has(held: LayoutColumn, wanted: Layout, *, local: bool) -> NDArray[np.bool_]:
    """Whether the layout of a column is this one, under every strategy; or, if ``local``, what each device can make of it by itself."""
    alike = [all(p == q or (local and q == R) for p, q in zip(layout, wanted, strict=True)) for layout in held.layouts]
    found: NDArray[np.bool_] = np.array(alike, dtype=np.bool_)[held.chosen]
    return found


def carry(program: Program, traced: Traced, found: Walk, pins: Mapping[str, Layout]) -> Carried:
    """Bring what the walk says of raw values to the tensors of a program: the traced one, or that with places for pinned activations."""
    return _Carrier(program, traced, found, pins).run()


class _Carrier:
    def __init__(self, program: Program, traced: Traced, found: Walk, pins: Mapping[str, Layout]) -> None:
        self.program, self.raw, self.shape, self.pins = program, traced.raw, found.mesh.shape, pins
        self.roots = roots(program)
        self.values = tuple(tuple(None if seen is None else rooted(seen, self.roots) for seen in results) for results in traced.values)
        self.walked = {op.node: op for op in found.ops}
        self.numbers = {node.name: k for k, node in enumerate(self.raw.nodes)}
        self.first: dict[int, Use] = {}
        for k, results in enumerate(self.values):
            for j, seen in enumerate(results):
                if seen is not None:
                    self.first.setdefault(seen[0], Use(k, j))
        self.readers = program.readers()
        self._known: dict[tuple[Kinds, D.Dims, D.Dims], Layout | None] = {}

    def run(self) -> Carried:
        made: dict[int, Layout | None] = {}
        read: dict[tuple[int, int], Layout | None] = {}
        nodes = [self._node(i) for i in range(len(self.program.ops))]
        for i, op in enumerate(self.program.ops):
            for t in op.results:
                made[t] = self._view(i, t, nodes) if is_view(op) else self._made(t, nodes[i])
            read |= {(i, j): self._read(nodes[i], t) for j, t in enumerate(op.operands)} if nodes[i] is not None else {}
        twins = {(op.name, op.raw): op for op in self.program.ops if op.raw and not op.recompute}
        for op in self.program.ops:
            twin = twins.get((op.name, op.raw))
            if op.recompute and twin is not None:  # computed again as it was
                made |= {t: made[s] for t, s in zip(op.results, twin.results, strict=True)}
        whole = Layout.replicated(len(self.shape))
        return Carried(
            stored={t: self.pins.get(self.program.tensors[t].name, whole) for t in self.program.sources()},
            made={t: layout for t, layout in made.items() if layout is not None},
            read={key: layout for key, layout in read.items() if layout is not None},
        )

    def _node(self, i: int) -> int | None:
        """The raw node that an op stands for."""
        op = self.program.ops[i]
        if is_view(op):
            return None
        for t in op.results:
            if t in self.first:
                return self.first[t].node
        # the product of one with a bias, which are two ops here
        readers = self.readers.get(op.results[0], ())
        if op.name == "aten.einsum.default" and len(readers) == 1:
            total = self.program.ops[readers[0][0]]
            k = self.first[total.results[0]].node if total.name == "aten.add.Tensor" and total.results[0] in self.first else None
            if k is not None and self.raw.nodes[k].op in _BIASED:
                return k
        return None

    def _made(self, t: int, node: int | None) -> Layout | None:
        """How an op makes a tensor."""
        if node is None:
            return None
        base, result = t, self.first.get(t)
        if result is None:  # the product of one with a bias is laid out as the total is; what nothing sees, nobody says
            readers = self.readers.get(t, ())
            base = self.program.ops[readers[0][0]].results[0] if readers else t
            result = self.first.get(base)
            if result is None or result.node != node:
                return None
        seen = self.values[result.node][result.result]
        if seen is None or self.program.tensors[base].shape != self.program.tensors[t].shape:
            return None
        return self._through(self._kinds(result), seen[1], D.identity(self.program.tensors[t].shape))

    def _read(self, node: int | None, t: int) -> Layout | None:
        """How a raw node reads a tensor of the program; None where it does not say, or reads it in several ways."""
        if node is None:
            return None
        made, given = self.walked.get(self.raw.nodes[node].name), tuple(uses(tuple(self.raw.nodes[node].arguments.values())))
        base, dims = self.roots[t]
        if made is None or len(made.used) != len(given):
            return None
        found = {
            self._through(kinds, seen[1], dims)
            for use, kinds in zip(given, made.used, strict=True)
            if (seen := self.values[use.node][use.result]) is not None and seen[0] == base
        }
        return found.pop() if len(found) == 1 else None

    def _view(self, i: int, t: int, nodes: list[int | None]) -> Layout | None:
        """How a view is handed on to the ops that read it; without any, how the last raw view that it stands for is left."""
        base, dims = self.roots[t]
        found: dict[Layout | None, None] = {}
        for reader, _ in self.readers.get(t, ()):
            k = nodes[reader]
            for use in () if k is None else uses(tuple(self.raw.nodes[k].arguments.values())):
                seen = self.values[use.node][use.result]
                if seen is not None and seen[0] == base:
                    found[self._through(self._kinds(use), seen[1], dims)] = None
        if not found:
            for name in reversed(self.program.ops[i].raw):
                seen = self.values[self.numbers[name]][0]
                if seen is not None and seen[0] == base:
                    return self._through(self._kinds(Use(self.numbers[name])), seen[1], dims)
        return next(iter(found)) if len(found) == 1 else None

    def _kinds(self, use: Use) -> Kinds:
        node = self.raw.nodes[use.node]
        if node.source is not None and node.source.name in self.pins:
            return kinds_of(self.pins[node.source.name], self.shape)
        walked = self.walked.get(node.name)
        kinds = None if walked is None else walked.results[use.result]
        return (R,) * len(self.shape) if kinds is None else kinds

    def _through(self, kinds: Kinds, dims: D.Dims, wanted: D.Dims) -> Layout | None:
        key = (kinds, dims, wanted)
        if key not in self._known:
            self._known[key] = through(kinds, dims, wanted, self.shape)
        return self._known[key]
