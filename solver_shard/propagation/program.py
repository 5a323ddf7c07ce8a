"""Propagation over a traced program: pins in, a layout for every tensor out.

A pin becomes the tensor's sharding: axes pinned ``S(d)`` cut dim d, axes pinned ``R`` stay unused, axes without a pin are open. What the
pass leaves undecided is replicated. Propagation keeps axes whole here; split an axis by hand to have its parts propagated.

>>> made = propagate_program(program, mesh, pins, "user-priority")
>>> made.layouts[t], made.undecided
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from solver_shard.annotations import AxisRef, DimSharding, MeshSpec, TensorSharding
from solver_shard.errors import InputError
from solver_shard.layout import Layout, Placement, R, S
from solver_shard.mesh import Mesh
from solver_shard.pins import Allowed
from solver_shard.program import Op as Call
from solver_shard.program import Program
from solver_shard.propagation.graph import Block, Function, Graph, Kind, Op, Traits, Value
from solver_shard.propagation.passes import Options, PassName, propagate
from solver_shard.propagation.rules import ProgramRules
from solver_shard.rulebook.build import Rulebook
from solver_shard.rulebook.rule import Rule

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
        lost: tensors where some axes of the sharding cannot be said as a layout (cut in the reversed order, or into more shards than the
            dim is long), and what was left out, for a person to read.
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
    options: Options | None = None,
) -> PropagatedProgram:
    """Run a pass over a program whose tensors are pinned.

    Raises:
        InputError: a pin that leaves several placements on an axis, or a partial one; see ``passes.propagate`` for the rest.
    """
    rulebook = rulebook or Rulebook()
    given = options or Options()
    chosen = Options(conservative=True, strategy=given.strategy, run_op_priority=given.run_op_priority)
    graph = program_graph(program, mesh, pins, rulebook)
    made = propagate(graph, name, ProgramRules(program, rulebook), chosen).graph
    layouts, lost = [], {}
    for t, value in enumerate(made.values):
        sharding = _final(made, t, program) or value.sharding
        layout, left_out = _layout(sharding, program.tensors[t].shape, mesh)
        layouts.append(layout)
        if left_out:
            lost[t] = left_out
    decided = tuple(t in pins or any(p != R for p in layout) for t, layout in enumerate(layouts))
    return PropagatedProgram(layouts=tuple(layouts), decided=decided, lost=lost)


def program_graph(program: Program, mesh: Mesh, pins: Mapping[int, Allowed], rulebook: Rulebook) -> Graph:
    """The program as a graph, op by op at the same positions; sources are arguments, outputs and gradients are returned."""
    shardings = {t: _pinned(allowed, program.tensors[t].name, len(program.tensors[t].shape), mesh) for t, allowed in pins.items()}
    values = tuple(
        Value(name=tensor.name, shape=tensor.shape, dtype=tensor.dtype, sharding=shardings.get(t))
        for t, tensor in enumerate(program.tensors)
    )
    # the first sharding of one of an op's results gives the others open ones
    values = _opened(program, values)
    ops = tuple(_op(call, rulebook.rule(program, i)) for i, call in enumerate(program.ops))
    returned = (*program.outputs, *program.gradients.values())
    end = Op(name="return", operands=returned, kind=Kind.RETURN)
    body = Block(arguments=tuple(program.sources()), ops=tuple(range(len(ops) + 1)))
    main = Function(name="main", body=body, result_shardings=tuple(shardings.get(t) for t in returned))
    spec = MeshSpec(axes=tuple((axis.name, axis.size) for axis in mesh.axes))
    return Graph(values=values, ops=(*ops, end), functions=(main,), meshes={MESH: spec})


def _opened(program: Program, values: tuple[Value, ...]) -> tuple[Value, ...]:
    found = list(values)
    for call in program.ops:
        if any(found[t].sharding for t in call.results):
            for t in call.results:
                if found[t].sharding is None:
                    dims = (DimSharding(open=True),) * len(found[t].shape or ())
                    value = found[t]
                    found[t] = Value(name=value.name, shape=value.shape, dtype=value.dtype, sharding=TensorSharding(mesh=MESH, dims=dims))
    return tuple(found)


def _op(call: Call, rule: Rule) -> Op:
    traits = Traits.NONE
    if rule.family in _POINTWISE:
        traits |= Traits.ELEMENTWISE
    elif call.name in _BROADCASTS:
        traits |= Traits.BROADCAST
    elif rule.view or call.name in _PASSES:
        traits |= Traits.PASS
    return Op(name=call.name, operands=call.operands, results=call.results, traits=traits)


def _pinned(allowed: Allowed, name: str, rank: int, mesh: Mesh) -> TensorSharding:
    """The sharding that a pin asks for."""
    cut: list[list[AxisRef]] = [[] for _ in range(rank)]
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
            cut[placement.dim].append(ref)
        else:
            replicated.append(ref)
    return TensorSharding(mesh=MESH, dims=tuple(DimSharding(tuple(axes), True) for axes in cut), replicated=tuple(replicated))


def _final(graph: Graph, t: int, program: Program) -> TensorSharding | None:
    """What is said of a tensor that is returned."""
    returned = (*program.outputs, *program.gradients.values())
    return graph.functions[0].result_shardings[returned.index(t)] if t in returned else None


def _layout(sharding: TensorSharding | None, shape: tuple[int, ...], mesh: Mesh) -> tuple[Layout, str]:
    """A sharding as a layout, and what of it a layout cannot say."""
    placements: list[Placement] = [R] * len(mesh.axes)
    left_out = []
    for d, dim in enumerate(sharding.dims if sharding else ()):
        last, shards = -1, 1
        for k, ref in enumerate(dim.axes):
            axis = mesh.index(ref.name)
            if axis < last or shape[d] < shards * ref.size:
                left_out += [f"S({d}) on {other.name}" for other in dim.axes[k:]]
                break
            placements[axis], last, shards = S(d), axis, shards * ref.size
    return Layout(placements), ", ".join(left_out)
