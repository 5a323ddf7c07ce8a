"""What DTensor does with a model by itself: every op takes the strategy whose inputs are cheapest to redistribute, one op at a time.

The walk goes through the raw ops of a trace, forward and backward, from pinned parameters and inputs. Each op is handed to the
propagator of the DTensor that is installed, with the layouts its inputs have by then, and the collectives of the redistributions
that it asks for are noted: kind, axis and bytes. Nothing is executed, no process group and no accelerator are needed.

    raw = trace_raw(model, inputs, name="model")
    found = walk(raw, Mesh.parse("dp=2,tp=4"), {"up.weight": Layout.parse("RS(0)")}, devices_per_host=8)
    print(found.counts, found.unsupported)

What is not pinned is replicated, as are tensors that the model makes itself (masks, positions). An op that DTensor cannot shard, for
want of a strategy or because its strategy fails, is noted as unsupported: DTensor raises there. The walk goes on as if the user had
replicated the op's inputs before it, without counting that. Gradients keep the layout in which backward leaves them (often
partial); DTensor does not reduce them by itself, so what that takes is noted apart.

Source: torch 2.13, ``ShardingPropagator.propagate_op_sharding_non_cached``, ``OpDispatcher.redistribute_local_args``,
``redistribute_local_tensor``.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from solver_shard.baselines import deciding
from solver_shard.costs.collectives import Collectives
from solver_shard.errors import InputError
from solver_shard.expander.call import Operand
from solver_shard.expander.expander import overload
from solver_shard.expander.pricing import impossible, kind_of_move, local_sizes, step_bytes
from solver_shard.graph.choice_graph import Masks
from solver_shard.graph.nodes import Lowering
from solver_shard.layout import Layout, NamedPartial, Placements, R, S, dtensor_placements, strided
from solver_shard.mesh import Mesh
from solver_shard.program import Op, Phase, Program
from solver_shard.text import suggestion
from solver_shard.tracing.clean import TracedProgram
from solver_shard.tracing.clean import dims as D
from solver_shard.tracing.joint_graph import RawGraph, RawNode, Use, uses

if TYPE_CHECKING:
    from solver_shard.graph.strategies import LayoutColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkedCollective:
    """One collective that DTensor runs to redistribute an input.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce or all_to_all.
        axis: position of the mesh axis.
        nbytes: what one device calls it with (all_gather: the gathered buffer).
    """

    kind: str
    axis: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkedOp:
    """One op of the raw trace.

    Attributes:
        given: layouts of its tensor arguments before, in the order of its schema.
        used: layouts in which it reads them.
        results: layouts of its results; None where there is none.
        collectives: of all redistributions, in order.
        unsupported: why DTensor raises here; empty where it does not.
    """

    node: str
    op: str
    phase: Phase
    module: str
    given: tuple[Placements, ...]
    used: tuple[Placements, ...]
    results: tuple[Placements | None, ...]
    collectives: tuple[WalkedCollective, ...]
    unsupported: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """What DTensor does with a whole step.

    Attributes:
        ops: those with a tensor argument, in order.
        gradients: parameter name to the layouts in which backward leaves its gradient, one per use of a tied parameter.
        outputs: name to layout.
        closing: what DTensor leaves to the user: each gradient to its parameter's layout, outputs that are still partial to R.
    """

    mesh: Mesh
    ops: tuple[WalkedOp, ...]
    gradients: Mapping[str, tuple[Placements, ...]]
    outputs: Mapping[str, Placements]
    closing: tuple[WalkedCollective, ...]

    @property
    def collectives(self) -> tuple[WalkedCollective, ...]:
        """Of all ops, in order: what DTensor issues by itself."""
        return tuple(collective for op in self.ops for collective in op.collectives)

    @property
    def counts(self) -> Mapping[tuple[str, str], int]:
        """Collectives by kind and name of the axis."""
        return Counter((c.kind, self.mesh.names[c.axis]) for c in self.collectives)

    def nanoseconds(self, times: Collectives) -> int:
        """What the collectives, the closing ones with them, take under our costs, one after the other."""
        return sum(times.nanoseconds(c.kind, (c.axis,), c.nbytes) for c in (*self.collectives, *self.closing))

    @property
    def unsupported(self) -> tuple[WalkedOp, ...]:
        """The ops where DTensor raises; the first is where a step stops."""
        return tuple(op for op in self.ops if op.unsupported)


def walk(raw: RawGraph, mesh: Mesh, pins: Mapping[str, Layout], *, devices_per_host: int = 8) -> Walk:
    """Follow DTensor through a traced step.

    Args:
        pins: layouts of parameters, buffers and inputs by name; all others are replicated.
        devices_per_host: what DTensor's costs take for the speed of an axis (see ``costs.dtensor``); on a CPU it takes 1.

    Raises:
        InputError: a pin of a tensor that is not there, or a layout with partials.
    """
    sources = [node.source.name for node in raw.nodes if node.source is not None]
    for name, layout in pins.items():
        if name not in sources:
            raise InputError(f"{name!r} is pinned, but {raw.name!r} has no such parameter or input; {suggestion(name, sources, raw.ties)}")
        if len(layout) != len(mesh.axes) or any(p.is_partial for p in layout):
            raise InputError(f"{name!r} is pinned to {layout}; parameters and inputs are R or S(d) on each of the axes of {mesh}")
    with _hosts(devices_per_host):
        return _Walker(raw, mesh, pins).run()


@contextlib.contextmanager
def _hosts(devices: int) -> Iterator[None]:
    """DTensor asks the local machine how many devices a host has; the walk is about another one."""
    from torch.distributed.device_mesh import _mesh_resources
    from torch.distributed.tensor._collective_utils import MeshTopoInfo

    before = _mesh_resources.num_devices_per_host
    MeshTopoInfo.build_from_mesh.cache_clear()
    _mesh_resources.num_devices_per_host = lambda kind: devices
    try:
        yield
    finally:
        _mesh_resources.num_devices_per_host = before
        MeshTopoInfo.build_from_mesh.cache_clear()


class _Walker:
    """The specs of all values so far."""

    def __init__(self, raw: RawGraph, mesh: Mesh, pins: Mapping[str, Layout]) -> None:
        import torch
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor

        from solver_shard.tracing.joint_graph import DTYPES

        self._raw, self._mesh, self._pins = raw, mesh, pins
        self._dtypes: dict[str, Any] = {name: dtype for dtype, name in DTYPES.items()}
        self._names: dict[Any, str] = dict(DTYPES)
        self._devices = DeviceMesh("cpu", torch.arange(mesh.size).reshape(mesh.shape), _init_backend=False, _rank=0)
        self._propagator: Any = DTensor._op_dispatcher.sharding_propagator
        self._special = set(DTensor._op_dispatcher._custom_op_handlers)
        self._specs: list[tuple[Any, ...]] = []
        self._known: dict[Any, Any] = {}

    def run(self) -> Walk:
        ops = []
        for node in self._raw.nodes:
            if node.source is not None:
                layout = self._pins.get(node.source.name, Layout.replicated(len(self._mesh.axes)))
                self._specs.append((self._spec(node.source.shape, node.source.dtype, layout.to_dtensor(self._mesh.shape)),))
            elif not any(True for _ in uses(tuple(node.arguments.values()))):
                self._specs.append(tuple(self._replicated(result) for result in node.results))
            else:
                ops.append(self._op(node))
        gradients: dict[str, tuple[Placements, ...]] = {}
        closing: list[WalkedCollective] = []
        for position, use in self._raw.gradients:
            source = self._raw.nodes[position].source
            assert source is not None
            closing += self._close(use, self._specs[position][0].placements)
            gradients[source.name] = (*gradients.get(source.name, ()), self._kinds(use))
        whole = Layout.replicated(len(self._mesh.axes)).to_dtensor(self._mesh.shape)
        for _, use in self._raw.outputs:
            held = self._specs[use.node][use.result].placements
            closing += self._close(use, [r if p.is_partial() else p for p, r in zip(held, whole, strict=True)])
        return Walk(
            mesh=self._mesh,
            ops=tuple(ops),
            gradients=gradients,
            outputs={name: self._kinds(use) for name, use in self._raw.outputs},
            closing=tuple(closing),
        )

    def _close(self, use: Use, placements: Any) -> list[WalkedCollective]:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec

        spec = self._specs[use.node][use.result]
        return self._redistribute(spec, DTensorSpec(self._devices, tuple(placements), tensor_meta=spec.tensor_meta))

    def _kinds(self, use: Use) -> Placements:
        return dtensor_placements(self._specs[use.node][use.result].placements)

    def _spec(self, shape: tuple[int, ...], dtype: str, placements: Any) -> Any:
        import torch
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        strides = tuple(math.prod(max(n, 1) for n in shape[d + 1 :]) for d in range(len(shape)))
        meta = TensorMeta(torch.Size(shape), strides, self._dtypes[dtype])
        return DTensorSpec(self._devices, tuple(placements), tensor_meta=meta)

    def _replicated(self, result: tuple[tuple[int, ...], str] | None) -> Any:
        placements = Layout.replicated(len(self._mesh.axes)).to_dtensor(self._mesh.shape)
        return None if result is None else self._spec(*result, placements)

    def _laid_out(self, specs: tuple[Any, ...], node: RawNode) -> tuple[Any, ...]:
        """The specs with the strides that the results have in the trace: whether a view is possible depends on them."""
        import torch
        from torch.distributed.tensor._dtensor_spec import TensorMeta

        found = []
        for spec, result, strides in zip(specs, node.results, node.strides, strict=True):
            if spec is not None and result is not None and strides is not None:
                spec = spec.shallow_copy_with_tensor_meta(TensorMeta(torch.Size(result[0]), strides, self._dtypes[result[1]]))
            found.append(spec)
        return tuple(found)

    def _op(self, node: RawNode) -> WalkedOp:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec
        from torch.utils._pytree import tree_leaves

        op = overload(node.op)
        assert op is not None, node.op
        args, kwargs = self._arguments(node, op)
        before = [leaf for leaf in tree_leaves(args) if isinstance(leaf, DTensorSpec)]
        given = [dtensor_placements(spec.placements) for spec in before]
        collectives: list[WalkedCollective] = []
        reason, after = "", before
        try:
            if op in self._special:
                raise NotImplementedError("DTensor runs it by a handler of its own, which does not follow its strategy")
            sharding = self._propagate(op, args, kwargs)
            if sharding.needs_redistribute:
                after = [leaf for leaf in tree_leaves(sharding.redistribute_schema.args_schema) if isinstance(leaf, DTensorSpec)]
            self._check_view(op, sharding.redistribute_schema.args_schema if sharding.redistribute_schema is not None else args, after)
            for src, dst in zip(before, after, strict=True):
                collectives += self._redistribute(src, dst)
            made = sharding.output_spec
            specs = tuple(made) if isinstance(made, tuple | list) else (made,)
        except Exception as error:  # whatever its rules raise, DTensor raises as well
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            collectives, after = [], before
            specs = tuple(self._replicated(result) for result in node.results)
        self._specs.append(self._laid_out(specs, node))
        used = [dtensor_placements(spec.placements) for spec in after] if not reason else [(R,) * len(self._mesh.axes)] * len(before)
        return WalkedOp(
            node=node.name,
            op=node.op,
            phase=node.phase,
            module=node.module,
            given=tuple(given),
            used=tuple(used),
            results=tuple(None if spec is None else dtensor_placements(spec.placements) for spec in specs),
            collectives=tuple(collectives),
            unsupported=reason,
        )

    def _check_view(self, op: Any, args: Any, used: list[Any]) -> None:
        """DTensor accepts some views whose shape then does not fit the local shard; they raise when they run."""
        place = self._propagator.op_to_shape_and_stride_idx.get(op)
        if op._schema.name not in ("aten::view", "aten::_unsafe_view", "aten::reshape") or not isinstance(place, int):
            return
        meta, size = used[0].tensor_meta, [int(n) for n in args[place]]
        operand = Operand(shape=tuple(meta.shape), dtype=self._names[meta.dtype], layout=dtensor_placements(used[0].placements))
        held = local_sizes(operand, operand.layout, self._mesh.shape)
        if -1 not in size and math.prod(held) != math.prod(size):
            raise RuntimeError(f"shape {size} is invalid for a shard of {math.prod(held)} elements")

    def _propagate(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """DTensor's decision, once for every signature."""
        from torch.distributed.tensor._op_schema import OpSchema

        key = (op, repr(args), repr(kwargs), tuple(_metas(args)))
        if key not in self._known:
            self._known[key] = self._propagator.propagate_op_sharding_non_cached(OpSchema(op, args, kwargs))
        return self._known[key]

    def _arguments(self, node: RawNode, op: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in op._schema.arguments:
            default = argument.default_value if argument.has_default_value() else None
            value = self._value(node.arguments.get(argument.name, default))
            if isinstance(value, str) and value in self._dtypes:
                value = self._dtypes[value]
            if not argument.kwarg_only:
                args.append(value)
            elif value is not None and value != default:
                kwargs[argument.name] = value
        schema = op._schema.arguments
        while args and schema[len(args) - 1].has_default_value() and args[-1] == schema[len(args) - 1].default_value:
            args.pop()  # as the tracer and autograd call it
        return tuple(args), kwargs

    def _value(self, value: Any) -> Any:
        if isinstance(value, Use):
            return self._specs[value.node][value.result]
        return [self._value(item) for item in value] if isinstance(value, tuple | list) else value

    def _redistribute(self, src: Any, dst: Any) -> list[WalkedCollective]:
        """The collectives of DTensor's path, in order."""
        from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached

        if src.placements == dst.placements:
            return []
        meta = src.tensor_meta
        now = dtensor_placements(src.placements)
        found = []
        for step in _gen_transform_infos_non_cached(src, dst):
            axis = step.mesh_dim
            before, after = dtensor_placements(step.src_dst_placements)
            if impossible(before, after):
                raise RuntimeError(f"redistribute from {before} to {after} not supported")
            kind, target = kind_of_move(before, after), after
            if (before.is_shard and before.is_strided) or (after.is_shard and after.is_strided):
                target = R  # strided shards go through R, and are cut from it locally
            operand = Operand(shape=tuple(meta.shape), dtype=self._names[meta.dtype], layout=now)
            if kind not in ("slice", "partial") and self._mesh.shape[axis] > 1:
                nbytes = step_bytes(operand, now, axis, target, self._mesh.shape)
                found.append(WalkedCollective(kind=kind_of_move(before, target), axis=axis, nbytes=nbytes))
            now = (*now[:axis], after, *now[axis + 1 :])
        return found


def _metas(value: Any) -> Iterator[Any]:
    """Shapes and dtypes of all specs among the arguments: what their text does not say."""
    from torch.utils._pytree import tree_leaves

    for leaf in tree_leaves(value):
        meta = getattr(leaf, "tensor_meta", None)
        if meta is not None:
            yield meta


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


def dtensor_masks(lowering: Lowering, carried: Carried, nodes: Collection[int] | None = None) -> tuple[Masks, tuple[int, ...]]:
    """Per node of a source or an op, the strategies that do what DTensor does; and the ops of which that cannot be said.

    From DTensor's walk over the raw ops to a plan: every op of the cleaned program runs as DTensor would run the raw op it stands for.

    The raw node that computes a tensor of the cleaned program tells its layout; the layouts in which it reads its arguments tell those of
    the op's operands. Where raw values are other forms of these tensors (DTensor sees ``[batch * sequence, width]`` around a matrix
    product, heads apart or merged), :mod:`solver_shard.baselines.dtensor_greedy` says what a cut of the one is on the other. An op keeps
    the strategies of the choice graph whose results have exactly these layouts and whose operands do too, or follow from them by a local
    cut. A product with a bias is two ops here; the product is laid out as their sum, for DTensor adds the bias locally. A view is laid out
    as what it hands on.

    What cannot be said so is left to the solver and listed: cuts that fall across dims, reductions of DTensor's own kind, strategies that
    the choice graph does not have. Sources are stored as pinned, all others replicated. The solver completes the plan at the least cost:
    copies that several ops read are made once, where DTensor makes them for each op, so the plan's price is a lower bound of DTensor's, and
    ``Walk.nanoseconds`` has the collectives of each op.
    """
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


def carry(program: Program, traced: TracedProgram, found: Walk, pins: Mapping[str, Layout]) -> Carried:
    """Bring what the walk says of raw values to the tensors of a program: the traced one, or that with places for pinned activations."""
    return _Carrier(program, traced, found, pins).run()


class _Carrier:
    def __init__(self, program: Program, traced: TracedProgram, found: Walk, pins: Mapping[str, Layout]) -> None:
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
        self._known: dict[tuple[Placements, D.Dims, D.Dims], Layout | None] = {}

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

    def _kinds(self, use: Use) -> Placements:
        node = self.raw.nodes[use.node]
        if node.source is not None and node.source.name in self.pins:
            return self.pins[node.source.name].with_splits(self.shape)
        walked = self.walked.get(node.name)
        kinds = None if walked is None else walked.results[use.result]
        return (R,) * len(self.shape) if kinds is None else kinds

    def _through(self, kinds: Placements, dims: D.Dims, wanted: D.Dims) -> Layout | None:
        key = (kinds, dims, wanted)
        if key not in self._known:
            self._known[key] = through(kinds, dims, wanted, self.shape)
        return self._known[key]


Seen = tuple[int, D.Dims]
"""A tensor that an op computes or the step is given, and a view of it."""


def roots(program: Program) -> dict[int, Seen]:
    """Every tensor as a view of one that is no view; tensors whose view cuts across dims are their own."""
    found: dict[int, Seen] = {t: (t, D.identity(program.tensors[t].shape)) for t in program.sources()}
    for op in program.ops:
        for t in op.results:
            viewed = _viewed(op, found)
            found[t] = (t, D.identity(program.tensors[t].shape)) if viewed is None else viewed
    return found


def is_view(op: Op) -> bool:
    """Whether the op only shows its operand in another form."""
    return op.name in ("aten.view.default", "aten.permute.default", "aten.expand.default", "aten.alias.default")


def _viewed(op: Op, found: Mapping[int, Seen]) -> Seen | None:
    if not is_view(op):
        return None
    base, dims = found[op.operands[0]]
    if op.name == "aten.view.default":
        shaped = D.reshape(dims, op.attributes["size"])
        return None if shaped is None else (base, shaped)
    if op.name == "aten.permute.default":
        return base, D.permute(dims, op.attributes["dims"])
    return base, D.expand(dims, op.attributes["size"]) if op.name == "aten.expand.default" else dims


def rooted(seen: Seen, of: Mapping[int, Seen]) -> Seen | None:
    """A view of any tensor as a view of what that one shows; None where it cuts across dims."""
    base, dims = of[seen[0]]
    groups = []
    for group in seen[1]:
        atoms: list[D.Atom] = []
        for dim, stride, size in group:
            if dim == D.BROADCAST:
                atoms.append((dim, stride, size))
                continue
            parts = D.reshape((dims[dim],), (D.size(dims[dim]) // (stride * size), size, stride))
            if parts is None:
                return None
            atoms += parts[1]
        groups.append(tuple(atoms))
    return base, tuple(groups)


def through(kinds: Placements, dims: D.Dims, wanted: D.Dims, mesh_shape: Sequence[int]) -> Layout | None:
    """The layout of one view of a tensor, given the placements of another view of the same tensor.

    Where a raw value lies among the tensors of the cleaned program, and what its placements say of them.

    Cleaning reads tensors through lazy views (:mod:`solver_shard.tracing.clean.dims`): a raw value is a tensor of the program whose dims
    are parted, merged, permuted or expanded. So a cut of a raw dim is a cut of the part that comes first in it, and a strided shard with
    the product of the first parts as split factor is a cut of the part after them:

    >>> from solver_shard.layout import R
    >>> from solver_shard.tracing.clean.dims import identity
    >>> whole, rows_merged = identity((4, 8, 16)), (((0, 1, 4), (1, 1, 8)), ((2, 1, 16),))
    >>> through((S(0), R), rows_merged, whole, (2, 2)), through((Strided(0, 4), S(1)), rows_merged, whole, (2, 2))
    (S(0)R, S(1)S(2))

    None where no layout says it: a cut that falls across dims, a part behind others, a reduction of DTensor's own kind.
    """
    if dims == wanted:  # the orders of axes that parameters may have need no parts
        same = Layout(strided(kind.dim) if kind.is_strided else kind for kind in kinds)
        if not any(isinstance(kind, NamedPartial) for kind in kinds) and same.with_splits(mesh_shape) == kinds:
            return same
    left = {atom: atom[2] for group in dims for atom in group}
    placements = []
    for kind, parts in zip(kinds, mesh_shape, strict=True):
        if not kind.is_shard:
            if isinstance(kind, NamedPartial):
                return None
            placements.append(kind)
            continue
        atom = _cut(D.solid(dims[kind.dim]), left, kind.split or 1)
        if atom is None:
            return None
        if atom[0] == D.BROADCAST:
            if any(a[0] == D.BROADCAST for group in wanted for a in group):
                return None
            placements.append(R)  # every device reads the same element
            continue
        even = left[atom] % parts == 0
        left[atom] = left[atom] // parts if even else 0
        place = _place(atom, wanted, left)
        if place is None or (not even and not D.solid(wanted[place]) == D.solid(dims[kind.dim]) == (atom,)):
            return None
        placements.append(S(place))
    return Layout(placements)


def _cut(group: D.Group, left: Mapping[D.Atom, int], split: int) -> D.Atom | None:
    """The part of a dim that an axis cuts: the first that is not cut up yet, behind so many pieces."""
    before = 1
    for atom in group:
        if before == split and left[atom] != 1:
            return atom if left[atom] else None
        before *= left[atom]
    return None


def _place(atom: D.Atom, wanted: D.Dims, left: Mapping[D.Atom, int]) -> int | None:
    """The dim whose outermost part, but for what is cut up, is the outermost part of this atom."""
    pieces = atom[2] // left[atom] if left[atom] else 1
    for e, group in enumerate(wanted):
        for first in D.solid(group):
            if first[0] == atom[0] and first[1] * first[2] == atom[1] * atom[2]:
                return e if math.gcd(first[2], pieces) == pieces else None
            if left.get(first) != 1:
                break
    return None
