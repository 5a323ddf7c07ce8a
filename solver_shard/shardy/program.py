"""Propagation over a traced program: pins in, a layout for every tensor out; its rules as those of the passes.

A pin becomes the tensor's sharding: axes pinned ``S(d)`` cut dim d, axes pinned ``R`` stay unused, axes without a pin are open. What the
pass leaves undecided is replicated. Propagation keeps axes whole here; split an axis by hand to have its parts propagated.

>>> made = propagate_program(program, mesh, pins, "user-priority")
>>> made.layouts[t], made.undecided
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from solver_shard.costs.layouts import is_legal
from solver_shard.errors import InputError
from solver_shard.graph.liveness import either_order
from solver_shard.graph.pins import Allowed
from solver_shard.layout import Layout, R, S, strided
from solver_shard.mesh import Mesh
from solver_shard.program import Op, Program
from solver_shard.rules.rule import Rule
from solver_shard.rules.rulebook import Rulebook
from solver_shard.shardy.graph import Block, Function, GraphOp, GraphValue, OpKind, PropagationGraph, ShardingRule, Traits
from solver_shard.shardy.passes import PassName, PropagationOptions, propagate
from solver_shard.shardy.sharding import AxisRef, DimSharding, MeshSpec, TensorSharding

MESH = "mesh"
_POINTWISE = ("pointwise", "cast")
_PASSES = ("aten.permute.default", "aten.transpose.int", "aten.t.default")
_BROADCASTS = ("aten.expand.default",)


@dataclass(frozen=True, slots=True, kw_only=True)
class PropagatedProgram:
    """What propagation says of a program.

    Attributes:
        layouts: of every tensor, by position.
        decided: per tensor, whether propagation or a pin says anything of it.
        lost: tensors where some axes of the sharding cannot be had (an activation cut in another order than the mesh's, a dim cut into
            more shards than it is long), and what was left out, for a person to read.
    """

    layouts: tuple[Layout, ...]
    decided: tuple[bool, ...]
    lost: Mapping[int, str]


def propagate_program(
    program: Program,
    mesh: Mesh,
    pins: Mapping[int, Allowed],
    name: PassName,
    rulebook: Rulebook | None = None,
    options: PropagationOptions | None = None,
) -> PropagatedProgram:
    """Run a pass over a program whose tensors are pinned.

    Raises:
        InputError: a pin that leaves several placements on an axis, or a partial one; see ``passes.propagate`` for the rest.
    """
    rulebook = rulebook or Rulebook()
    given = options or PropagationOptions()
    chosen = PropagationOptions(conservative=True, strategy=given.strategy, run_op_priority=given.run_op_priority)
    graph = program_graph(program, mesh, pins, rulebook)
    made = propagate(graph, name, ProgramRules(program, rulebook), chosen).graph
    layouts, lost, either = [], {}, either_order(program)
    for t, value in enumerate(made.values):
        sharding = _final(made, t, program) or value.sharding
        layout, left_out = _layout(sharding, program.tensors[t].shape, mesh, strides=t in either)
        layouts.append(layout)
        if left_out:
            lost[t] = left_out
    decided = tuple(t in pins or any(p != R for p in layout) for t, layout in enumerate(layouts))
    return PropagatedProgram(layouts=tuple(layouts), decided=decided, lost=lost)


def program_graph(program: Program, mesh: Mesh, pins: Mapping[int, Allowed], rulebook: Rulebook) -> PropagationGraph:
    """The program as a graph, op by op at the same positions; sources are arguments, outputs and gradients are returned."""
    shardings = {t: _pinned(allowed, program.tensors[t].name, len(program.tensors[t].shape), mesh) for t, allowed in pins.items()}
    values = tuple(
        GraphValue(name=tensor.name, shape=tensor.shape, dtype=tensor.dtype, sharding=shardings.get(t))
        for t, tensor in enumerate(program.tensors)
    )
    # the first sharding of one of an op's results gives the others open ones
    values = _opened(program, values)
    ops = tuple(_op(call, rulebook.rule(program, i)) for i, call in enumerate(program.ops))
    returned = (*program.outputs, *program.gradients.values())
    end = GraphOp(name="return", operands=returned, kind=OpKind.RETURN)
    body = Block(arguments=tuple(program.sources()), ops=tuple(range(len(ops) + 1)))
    main = Function(name="main", body=body, result_shardings=tuple(shardings.get(t) for t in returned))
    spec = MeshSpec(axes=tuple((axis.name, axis.size) for axis in mesh.axes))
    return PropagationGraph(values=values, ops=(*ops, end), functions=(main,), meshes={MESH: spec})


def _opened(program: Program, values: tuple[GraphValue, ...]) -> tuple[GraphValue, ...]:
    found = list(values)
    for call in program.ops:
        if any(found[t].sharding for t in call.results):
            for t in call.results:
                if found[t].sharding is None:
                    dims = (DimSharding(open=True),) * len(found[t].shape or ())
                    value = found[t]
                    found[t] = GraphValue(
                        name=value.name, shape=value.shape, dtype=value.dtype, sharding=TensorSharding(mesh=MESH, dims=dims)
                    )
    return tuple(found)


def _op(call: Op, rule: Rule) -> GraphOp:
    traits = Traits.NONE
    if rule.family in _POINTWISE:
        traits |= Traits.ELEMENTWISE
    elif call.name in _BROADCASTS:
        traits |= Traits.BROADCAST
    elif rule.view or call.name in _PASSES:
        traits |= Traits.PASS
    return GraphOp(name=call.name, operands=call.operands, results=call.results, traits=traits)


def _pinned(allowed: Allowed, name: str, rank: int, mesh: Mesh) -> TensorSharding:
    """The sharding that a pin asks for."""
    cut: list[list[AxisRef]] = [[] for _ in range(rank)]
    late: list[list[AxisRef]] = [[] for _ in range(rank)]
    replicated = []
    for axis, left in zip(mesh.axes, allowed.axes, strict=True):
        if left is None or axis.size == 1:
            continue
        if len(left) != 1 or next(iter(left)).is_partial:
            choices = ", ".join(sorted(map(str, left)))
            raise InputError(
                f"the pin {allowed.pins[-1]!r} leaves {name!r} {choices} on {axis.name}; propagation starts from one placement, R or "
                "S(dim); name it, or leave the axis out"
            )
        (placement,) = left
        ref = AxisRef(axis.name, 1, axis.size)
        if placement.is_shard:
            (late if placement.is_strided else cut)[placement.dim].append(ref)
        else:
            replicated.append(ref)
    return TensorSharding(
        mesh=MESH,
        dims=tuple(DimSharding((*first, *then), True) for first, then in zip(cut, late, strict=True)),
        replicated=tuple(replicated),
    )


def _final(graph: PropagationGraph, t: int, program: Program) -> TensorSharding | None:
    """What is said of a tensor that is returned."""
    returned = (*program.outputs, *program.gradients.values())
    return graph.functions[0].result_shardings[returned.index(t)] if t in returned else None


def _layout(sharding: TensorSharding | None, shape: tuple[int, ...], mesh: Mesh, *, strides: bool) -> tuple[Layout, str]:
    """A sharding as a layout, and what of it a layout cannot say; ``strides``: a dim may be cut in another order than the mesh's."""
    layout = Layout.replicated(len(mesh.axes))
    left_out: list[str] = []
    for d, dim in enumerate(sharding.dims if sharding else ()):
        axes = [mesh.index(ref.name) for ref in dim.axes]
        kept = next(k for k in range(len(axes), -1, -1) if k == 0 or _cut(layout, d, axes[:k], shape, mesh, strides) is not None)
        layout = _cut(layout, d, axes[:kept], shape, mesh, strides) or layout
        left_out += [f"S({d}) on {mesh.names[axis]}" for axis in axes[kept:]]
    return layout, ", ".join(left_out)


def _cut(layout: Layout, dim: int, axes: Sequence[int], shape: tuple[int, ...], mesh: Mesh, strides: bool) -> Layout | None:
    """The layout with a dim cut by these axes, major to minor; None where that cannot be said or executed."""
    run = next((k for k in range(1, len(axes)) if axes[k] < axes[k - 1]), len(axes))
    placements = list(layout)
    for k, axis in enumerate(axes):
        placements[axis] = S(dim) if k < run else strided(dim)
    made = Layout(placements)
    legal = made.order(dim) == tuple(axes) and is_legal(made, shape, mesh.shape, mesh.wholes if strides else None)
    return made if legal else None


def sharding_rule(rule: Rule) -> ShardingRule | None:
    """The factors of a rule with their types; None where the op has no rule to propagation.

    A rulebook's rule as propagation uses it: one rule format serves the solver and the passes.

    Every factor that the solver may cut carries shardings. What the op must see whole blocks them, and so do factors that only a named
    implementation can cut (it needs collectives inside, which propagation does not know of).

    A dim without factors gets one of its own, of size 1, operands first.
    """
    if not rule.propagates:
        return None
    sizes = [factor.size for factor in rule.factors]

    def fill(dims: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        filled = []
        for held in dims:
            wide = tuple(f for f in held if sizes[f] != 1) or held[:1]  # of several factors none has size 1
            if not wide:
                wide = (len(sizes),)
                sizes.append(1)
            filled.append(wide)
        return tuple(filled)

    operands = tuple(map(fill, rule.operands))
    results = tuple(map(fill, rule.results))
    kinds, blocked = _kinds(rule)

    def of(kind: str) -> tuple[int, ...]:
        return tuple(i for i, found in kinds.items() if found == kind)

    return _compact(
        ShardingRule(
            sizes=tuple(sizes),
            operands=operands,
            results=results,
            reduction=of("reduction"),
            need_replication=of("need_replication"),
            permutation=of("permutation"),
            blocked=blocked,
        )
    )


def _kinds(rule: Rule) -> tuple[Mapping[int, str], tuple[int, ...]]:
    """The type of every factor, and those that are blocked; rows of ATen ops leave both to what the solver may do."""
    special = {way.factor for way in rule.implementations}
    kinds: dict[int, str] = {}
    blocked = []
    for i, factor in enumerate(rule.factors):
        kinds[i] = factor.kind
        whole = factor.kind == "pass_through" and (not factor.cut or i in special)
        if whole:
            kinds[i] = "need_replication"
        elif factor.kind == "pass_through" and factor.reduction and any(all(i not in held for held in dims) for dims in rule.results):
            kinds[i] = "reduction"
        if factor.blocked or whole:
            blocked.append(i)
    return kinds, tuple(blocked)


def _compact(rule: ShardingRule) -> ShardingRule:
    """The rule without factors that no tensor holds."""
    used = sorted({f for dims in (*rule.operands, *rule.results) for held in dims for f in held})
    if len(used) == len(rule.sizes):
        return rule
    place = {f: i for i, f in enumerate(used)}

    def moved(factors: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(place[f] for f in factors if f in place)

    return ShardingRule(
        sizes=tuple(rule.sizes[f] for f in used),
        operands=tuple(tuple(map(moved, dims)) for dims in rule.operands),
        results=tuple(tuple(map(moved, dims)) for dims in rule.results),
        reduction=moved(rule.reduction),
        need_replication=moved(rule.need_replication),
        permutation=moved(rule.permutation),
        blocked=moved(rule.blocked),
        custom=rule.custom,
    )


class ProgramRules:
    """The registry of a traced program's ops; the graph's first ops are the program's (see ``program.program_graph``)."""

    def __init__(self, program: Program, rulebook: Rulebook) -> None:
        self._program = program
        self._rulebook = rulebook
        self._known: dict[int, ShardingRule | None] = {}

    def __call__(self, graph: PropagationGraph, op: int, *, conservative: bool) -> ShardingRule | None:
        """The rule of an op; None where it has none."""
        if op >= len(self._program.ops):
            return None
        rule = self._rulebook.rule(self._program, op)
        if id(rule) not in self._known:
            self._known[id(rule)] = sharding_rule(rule)
        return self._known[id(rule)]
