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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from solver_shard.costs.collectives import Collectives
from solver_shard.errors import InputError
from solver_shard.expand.aten import kinds_of_spec, overload
from solver_shard.expand.call import Kinds, Operand
from solver_shard.expand.pricing import impossible, kind_of_move, local_sizes, step_bytes
from solver_shard.frontends.raw import RawGraph, RawNode, Use, uses
from solver_shard.layout import Layout, R
from solver_shard.mesh import Mesh
from solver_shard.names import suggestion
from solver_shard.program import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
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
    given: tuple[Kinds, ...]
    used: tuple[Kinds, ...]
    results: tuple[Kinds | None, ...]
    collectives: tuple[Collective, ...]
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
    gradients: Mapping[str, tuple[Kinds, ...]]
    outputs: Mapping[str, Kinds]
    closing: tuple[Collective, ...]

    @property
    def collectives(self) -> tuple[Collective, ...]:
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

        from solver_shard.frontends.export import DTYPES

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
        gradients: dict[str, tuple[Kinds, ...]] = {}
        closing: list[Collective] = []
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

    def _close(self, use: Use, placements: Any) -> list[Collective]:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec

        spec = self._specs[use.node][use.result]
        return self._redistribute(spec, DTensorSpec(self._devices, tuple(placements), tensor_meta=spec.tensor_meta))

    def _kinds(self, use: Use) -> Kinds:
        return kinds_of_spec(self._specs[use.node][use.result].placements)

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
        given = [kinds_of_spec(spec.placements) for spec in before]
        collectives: list[Collective] = []
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
        used = [kinds_of_spec(spec.placements) for spec in after] if not reason else [(R,) * len(self._mesh.axes)] * len(before)
        return WalkedOp(
            node=node.name,
            op=node.op,
            phase=node.phase,
            module=node.module,
            given=tuple(given),
            used=tuple(used),
            results=tuple(None if spec is None else kinds_of_spec(spec.placements) for spec in specs),
            collectives=tuple(collectives),
            unsupported=reason,
        )

    def _check_view(self, op: Any, args: Any, used: list[Any]) -> None:
        """DTensor accepts some views whose shape then does not fit the local shard; they raise when they run."""
        place = self._propagator.op_to_shape_and_stride_idx.get(op)
        if op._schema.name not in ("aten::view", "aten::_unsafe_view", "aten::reshape") or not isinstance(place, int):
            return
        meta, size = used[0].tensor_meta, [int(n) for n in args[place]]
        operand = Operand(shape=tuple(meta.shape), dtype=self._names[meta.dtype], layout=kinds_of_spec(used[0].placements))
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

    def _redistribute(self, src: Any, dst: Any) -> list[Collective]:
        """The collectives of DTensor's path, in order."""
        from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached

        if src.placements == dst.placements:
            return []
        meta = src.tensor_meta
        now = kinds_of_spec(src.placements)
        found = []
        for step in _gen_transform_infos_non_cached(src, dst):
            axis = step.mesh_dim
            before, after = kinds_of_spec(step.src_dst_placements)
            if impossible(before, after):
                raise RuntimeError(f"redistribute from {before} to {after} not supported")
            kind, target = kind_of_move(before, after), after
            if (before.is_shard and before.is_strided) or (after.is_shard and after.is_strided):
                target = R  # strided shards go through R, and are cut from it locally
            operand = Operand(shape=tuple(meta.shape), dtype=self._names[meta.dtype], layout=now)
            if kind not in ("slice", "partial") and self._mesh.shape[axis] > 1:
                nbytes = step_bytes(operand, now, axis, target, self._mesh.shape)
                found.append(Collective(kind=kind_of_move(before, target), axis=axis, nbytes=nbytes))
            now = (*now[:axis], after, *now[axis + 1 :])
        return found


def _metas(value: Any) -> Iterator[Any]:
    """Shapes and dtypes of all specs among the arguments: what their text does not say."""
    from torch.utils._pytree import tree_leaves

    for leaf in tree_leaves(value):
        meta = getattr(leaf, "tensor_meta", None)
        if meta is not None:
            yield meta
