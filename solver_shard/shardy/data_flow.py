"""What data-flow edges connect: the values that must be sharded alike where control flow hands one on; edges put on and taken off.

An edge op sits on its owner, one of the targets. Its sources are read and written where they are; all targets share the edge's
own sharding. Inside a manual computation an edge's sharding leaves out the manual axes, outside it begins with them.

    while                   sources: the initial value, what the body returns; targets: the result (owner), both block arguments
    case                    sources: what each branch returns; target: the result
    optimization_barrier    source: the operand; target: the result
    manual computation,     source: the operand; target: the block argument
    named computation       source: what the body returns; target: the result
    function                sources: that operand of every call; target: the argument
    call                    source: what the callee returns; target: the call's result
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from solver_shard.errors import InputError
from solver_shard.shardy.graph import Block, GraphOp, GraphValue, OpKind, PropagationGraph, Traits
from solver_shard.shardy.sharding import AxisRef, DimSharding, MeshSpec, TensorSharding, prefix_without_overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeFlow:
    """What one edge connects.

    Attributes:
        sources: values, in order.
        targets: values that read and write the edge's sharding, the owner among them; none of a function's edge, whose owner is read by
            nothing else.
        others: the targets that are not the owner.
        uses: the (op, operand position) through which the sources reach the edge.
        manual: the manual axes that the edge crosses.
        inward: whether the edge goes into the manual computation (its own sharding leaves the manual axes out).
        outer: the sharding that the manual computation declares for this value, on the outside.
        order: the axes of its mesh.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    uses: tuple[tuple[int, int], ...] = ()
    manual: tuple[str, ...] = ()
    inward: bool = False
    outer: TensorSharding | None = None
    order: tuple[str, ...] = ()

    def seen(self, sharding: TensorSharding | None) -> TensorSharding | None:
        """The edge's sharding as a step sees it, to compare with the sources."""
        if not self.manual or sharding is None:
            return sharding
        if not self.inward:
            return without_manual(sharding, self.manual)
        return sharding if self.outer is None else with_manual(self.outer, sharding, self.manual, self.order)

    def stored(self, sharding: TensorSharding) -> TensorSharding:
        """What the edge keeps of a sharding that a step gave it."""
        if not self.manual:
            return sharding
        if self.inward:
            return without_manual(sharding, self.manual)
        return sharding if self.outer is None else with_manual(self.outer, sharding, self.manual, self.order)


def edge_flows(graph: PropagationGraph, maker: Sequence[int]) -> dict[int, EdgeFlow]:
    """What every edge op of the graph connects; ``maker`` is the op that defines a value, or that holds its block.

    Raises:
        InputError: an edge on a value that no control flow hands on.
    """
    flows: dict[int, EdgeFlow] = {}
    functions = {function.name: function for function in graph.functions}
    calls: dict[str, list[int]] = {}
    for i in _calls(graph):
        callee = graph.ops[i].callee
        if callee is not None:
            calls.setdefault(callee, []).append(i)
    for i in graph.walk():
        edge = graph.ops[i]
        owner = edge.operands[0] if edge.operands else -1
        if edge.kind is OpKind.EDGE:
            if maker[owner] < 0:
                raise _misplaced(graph, edge)
            flows[i] = _region_flow(graph, edge, maker[owner], owner)
        elif edge.kind is OpKind.FUNC_EDGE:
            if maker[owner] < 0:
                name, index = next((f.name, f.body.arguments.index(owner)) for f in graph.functions if owner in f.body.arguments)
                flows[i] = EdgeFlow(sources=tuple(graph.ops[call].operands[index] for call in calls.get(name, ())))
            else:
                call = graph.ops[maker[owner]]
                if call.kind is not OpKind.CALL or call.callee not in functions:
                    raise _misplaced(graph, edge)
                index = call.results.index(owner)
                end = functions[call.callee].body.ops[-1]
                flows[i] = EdgeFlow(sources=(graph.ops[end].operands[index],))
    return flows


def _calls(graph: PropagationGraph) -> list[int]:
    """All calls in the order in which the reference finds them: a block's own, then those of its ops' regions, last region first.

    Functions are taken in order. It matters where equal meshes have two names: a function's edge takes that of its first caller.
    """
    found = []
    for function in graph.functions:
        stack = [function.body]
        while stack:
            for i in stack.pop().ops:
                if graph.ops[i].kind is OpKind.CALL:
                    found.append(i)
                stack.extend(graph.ops[i].regions)
    return found


def _region_flow(graph: PropagationGraph, edge: GraphOp, holder: int, owner: int) -> EdgeFlow:
    op = graph.ops[holder]
    if owner not in op.results:
        if op.kind not in (OpKind.MANUAL, OpKind.NAMED):
            raise _misplaced(graph, edge)
        index = op.regions[0].arguments.index(owner)
        outer = op.in_shardings[index] if op.in_shardings and op.kind is OpKind.MANUAL else None
        order = axis_order(graph, outer)
        return EdgeFlow(sources=(op.operands[index],), targets=(owner,), manual=op.manual_axes, inward=True, outer=outer, order=order)
    index = op.results.index(owner)
    ends = [block.ops[-1] for block in op.regions]
    if op.kind is OpKind.WHILE:
        others = tuple(block.arguments[index] for block in op.regions)
        both = ((holder, index), (ends[1], index))
        sources = tuple(graph.ops[i].operands[k] for i, k in both)
        return EdgeFlow(sources=sources, targets=(owner, *others), others=others, uses=both)
    if op.kind is OpKind.CASE:
        uses = tuple((end, index) for end in ends)
        return EdgeFlow(sources=tuple(graph.ops[i].operands[k] for i, k in uses), targets=(owner,), uses=uses)
    if op.kind is OpKind.OPT_BARRIER:
        return EdgeFlow(sources=(op.operands[index],), targets=(owner,), uses=((holder, index),))
    if op.kind in (OpKind.MANUAL, OpKind.NAMED):
        outer = graph.values[owner].sharding if op.kind is OpKind.MANUAL else None
        source, order = graph.ops[ends[0]].operands[index], axis_order(graph, outer)
        return EdgeFlow(sources=(source,), targets=(owner,), uses=((ends[0], index),), manual=op.manual_axes, outer=outer, order=order)
    raise _misplaced(graph, edge)


def axis_order(graph: PropagationGraph, sharding: TensorSharding | None) -> tuple[str, ...]:
    """The names of the axes of a sharding's mesh, in order."""
    if sharding is None:
        return ()
    mesh = graph.meshes[sharding.mesh] if isinstance(sharding.mesh, str) else sharding.mesh
    return tuple(name for name, _ in mesh.axes)


def _misplaced(graph: PropagationGraph, edge: GraphOp) -> InputError:
    value = graph.values[edge.operands[0]].name if edge.operands else "nothing"
    return InputError(
        f"{edge.name} on {value}: this value is not handed on by control flow; legal are results of while, case, optimization_barrier, "
        "manual and named computations, and block arguments of the last two; drop the edge"
    )


def _free_from(axes: Sequence[AxisRef], manual: Sequence[str]) -> int:
    """Where the free axes of a dim begin. Its manual axes come first; where they do not, the reference's binary search decides."""
    first, length = 0, len(axes)
    while length:
        half = length // 2
        if axes[first + half].name in manual:
            first, length = first + half + 1, length - half - 1
        else:
            length = half
    return first


def without_manual(sharding: TensorSharding, manual: Sequence[str]) -> TensorSharding:
    """The sharding as the inside of a manual computation sees it."""
    return TensorSharding(
        mesh=sharding.mesh,
        dims=tuple(DimSharding(dim.axes[_free_from(dim.axes, manual) :], dim.open, dim.priority) for dim in sharding.dims),
        replicated=tuple(axis for axis in sharding.replicated if axis.name not in manual),
        unreduced=tuple(axis for axis in sharding.unreduced if axis.name not in manual),
        reduction=sharding.reduction,
    )


def with_manual(outer: TensorSharding, inner: TensorSharding, manual: Sequence[str], order: Sequence[str]) -> TensorSharding:
    """The inner sharding on the outside: what the outer one does with the manual axes, and then what the inner one does.

    InputError where the inner one cuts by an axis that the outer one keeps replicated: only a sharding group can give it that.
    """
    taken = [axis for dim in inner.dims for axis in dim.axes]
    for axis in outer.replicated:
        if axis.name not in manual and any(prefix_without_overlap(axis, other) != axis for other in taken):
            raise InputError(
                f'a sharding group cuts the result of a manual computation by axis "{axis.name}", which its out_shardings keep replicated; '
                "drop the axis from replicated, or take the result out of the group"
            )

    def joined(mine: Sequence[AxisRef], new: Sequence[AxisRef]) -> tuple[AxisRef, ...]:
        kept = [axis for axis in mine if axis.name in manual]
        return tuple(sorted((*kept, *new), key=lambda axis: (order.index(axis.name), axis.pre)))

    return TensorSharding(
        mesh=outer.mesh,
        dims=tuple(
            DimSharding((*mine.axes[: _free_from(mine.axes, manual)], *new.axes), new.open)
            for mine, new in zip(outer.dims, inner.dims, strict=True)
        ),
        replicated=joined(outer.replicated, inner.replicated),
        unreduced=joined(outer.unreduced, inner.unreduced),
        reduction=inner.reduction if inner.unreduced else outer.reduction,
    )


_RESULTS = (OpKind.WHILE, OpKind.CASE, OpKind.OPT_BARRIER, OpKind.MANUAL, OpKind.NAMED)
_ARGUMENTS = (OpKind.MANUAL, OpKind.NAMED)


def add_edges(graph: PropagationGraph) -> PropagationGraph:
    """The graph with an edge on every tensor that control flow hands on, where there is none yet; edges take over the uses.

    Data-flow edges put on what control flow hands on, and taken off again with their shardings.

    Without edges nothing flows through while, case, optimization barriers, manual and named computations. Modules as they are written
    have none: they are added before a pass and sunk after it.

        sink_edges(propagate(add_edges(graph), "user-priority", registry).graph)

    An edge starts with its owner's sharding. Positions are kept: edges and their results are appended.
    """
    return _Adder(graph).run()


def sink_edges(graph: PropagationGraph) -> PropagationGraph:
    """The graph without its edges, whose shardings their owners have; positions are kept."""
    owners = {op.results[0]: op.operands[0] for i in graph.walk() if (op := graph.ops[i]).kind is OpKind.EDGE}
    values, ops = list(graph.values), list(graph.ops)
    for i in graph.walk():
        op = ops[i]
        changes: dict[str, object] = {}
        if op.kind in _RESULTS:
            given = {owners[e]: values[e].sharding for e in owners if owners[e] in op.results}
            _give_results(values, op.results, given)
        if op.kind in _ARGUMENTS:
            arguments = op.regions[0].arguments
            given = {owners[e]: values[e].sharding for e in owners if owners[e] in arguments}
            changes["in_shardings"] = _in_shardings(graph, op, given)
        if any(v in owners for v in op.operands) and op.kind is not OpKind.EDGE:
            changes["operands"] = tuple(owners.get(v, v) for v in op.operands)
        if op.regions:
            changes["regions"] = tuple(_without_edges(graph, block) for block in op.regions)
        if changes:
            ops[i] = dataclasses.replace(op, **changes)  # type: ignore[arg-type]  # names of fields
    functions = tuple(dataclasses.replace(f, body=_without_edges(graph, f.body)) for f in graph.functions)
    return dataclasses.replace(graph, values=tuple(values), ops=tuple(ops), functions=functions)


class _Adder:
    def __init__(self, graph: PropagationGraph) -> None:
        self.graph = graph
        self.values = list(graph.values)
        self.ops = list(graph.ops)
        self.edge_of: dict[int, int] = {}
        """Owner to the edge's result."""

    def run(self) -> PropagationGraph:
        graph = self.graph
        order = graph.walk()
        held = {graph.ops[i].operands[0] for i in order if graph.ops[i].kind is OpKind.EDGE}
        for i in order:
            op = graph.ops[i]
            if op.kind in _RESULTS:
                for value in op.results:
                    if value not in held:
                        self._add(value, graph.values[value].sharding)
            if op.kind in _ARGUMENTS:
                for k, value in enumerate(op.regions[0].arguments):
                    if value not in held:
                        outer = op.in_shardings[k] if op.in_shardings else None
                        self._add(value, without_manual(outer, op.manual_axes) if outer is not None else None)
        for i in reversed(order):  # what a region holds comes before the op that it is a part of
            op = self.ops[i]
            changes: dict[str, object] = {}
            if any(v in self.edge_of for v in op.operands):
                changes["operands"] = tuple(self.edge_of.get(v, v) for v in op.operands)
            if op.regions:
                regions = tuple(map(self._block, op.regions))
                changes["regions"] = regions
                if not all(self.ops[j].traits & Traits.PURE for block in regions for j in block.ops[:-1]):
                    changes["traits"] = op.traits & ~Traits.PURE  # edges are never dead, nor is what holds them
            if changes:
                self.ops[i] = dataclasses.replace(op, **changes)  # type: ignore[arg-type]  # names of fields
        functions = tuple(dataclasses.replace(f, body=self._block(f.body)) for f in graph.functions)
        return dataclasses.replace(graph, values=tuple(self.values), ops=tuple(self.ops), functions=functions)

    def _add(self, owner: int, sharding: TensorSharding | None) -> None:
        value = self.graph.values[owner]
        if value.shape is None:
            return
        self.edge_of[owner] = len(self.values)
        self.ops.append(
            GraphOp(name="sdy.data_flow_edge", operands=(owner,), results=(len(self.values),), kind=OpKind.EDGE, traits=Traits.PASS)
        )
        self.values.append(GraphValue(name=f"{value.name}:edge", shape=value.shape, dtype=value.dtype, sharding=sharding))

    def _block(self, block: Block) -> Block:
        """The block with the new edges of its arguments first, and those of an op's results right after the op."""
        first = len(self.graph.ops) - len(self.graph.values)  # an edge and its result were appended together
        ops = [self.edge_of[v] + first for v in block.arguments if v in self.edge_of]
        for i in block.ops:
            ops.append(i)
            ops.extend(self.edge_of[v] + first for v in self.graph.ops[i].results if v in self.edge_of)
        return Block(arguments=block.arguments, ops=tuple(ops))


def _without_edges(graph: PropagationGraph, block: Block) -> Block:
    return Block(arguments=block.arguments, ops=tuple(i for i in block.ops if graph.ops[i].kind is not OpKind.EDGE))


def _give_results(values: list[GraphValue], results: Sequence[int], given: dict[int, TensorSharding | None]) -> None:
    """Set shardings of an op's results; where it had none, results that get none now are open."""
    said = {v: sharding for v in results if (sharding := given.get(v)) is not None}
    if not said:
        return
    mesh = next(iter(said.values())).mesh
    for v in results:
        sharding = said.get(v) or values[v].sharding or _open(values[v], mesh)
        values[v] = dataclasses.replace(values[v], sharding=sharding)


def _in_shardings(graph: PropagationGraph, op: GraphOp, given: dict[int, TensorSharding | None]) -> tuple[TensorSharding, ...] | None:
    """The shardings that a computation declares of its operands, with what its arguments' edges say."""
    arguments = op.regions[0].arguments
    said = {v: sharding for v in arguments if (sharding := given.get(v)) is not None}
    if not said:
        return op.in_shardings
    mesh = next(iter(said.values())).mesh
    made = []
    for k, v in enumerate(arguments):
        outer = op.in_shardings[k] if op.in_shardings else None
        inner = said.get(v)
        if inner is None:
            made.append(outer or _open(graph.values[op.operands[k]], mesh))
        elif op.kind is OpKind.MANUAL and outer is not None:
            made.append(with_manual(outer, inner, op.manual_axes, axis_order(graph, outer)))
        else:
            made.append(inner)
    return tuple(made)


def _open(value: GraphValue, mesh: str | MeshSpec) -> TensorSharding:
    return TensorSharding(mesh=mesh, dims=(DimSharding(open=True),) * len(value.shape or ()))
