"""AOTAutograd's joint graph as a RawGraph: arguments by name, module paths on every node, gradients by parameter.

While it is traced, checkpointed regions are noted on its nodes, and calls that torch traces wrongly are made in another way.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch._functorch._aot_autograd import descriptors as desc
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._higher_order_ops.effects import with_effects
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy

from solver_shard.errors import TraceError
from solver_shard.program import Phase, Role, Tensor

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint64: "u64", torch.uint32: "u32", torch.uint16: "u16", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
_SAVED = frozenset({CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE})
"""What a selective checkpoint policy says of ops that are not computed again."""
_TOKENS = (desc.ForwardTokenAOTInput, desc.BackwardTokenAOTInput, desc.ForwardTokenAOTOutput, desc.BackwardTokenAOTOutput)
"""What keeps ops with an effect in order; they have no value."""
_DROPPED = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"})


def export(
    step: nn.Module, tensors: Sequence[torch.Tensor], inputs: Sequence[str], *, name: str, names: Mapping[str, str], forward_only: bool
) -> RawGraph:
    """Trace ``step`` (whose child ``model`` is the user's) on fake tensors.

    Args:
        inputs: name of every tensor argument.
        names: parameter or buffer name to the first name of the same tensor.
    """
    gradient = torch.no_grad() if forward_only else torch.enable_grad()
    with contextlib.ExitStack() as stack, gradient, fx_traceback.preserve_node_meta(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))  # whose recurrent layers exist for some dtypes and modes only
        joint = aot_export_joint_with_descriptors(stack, step, tuple(tensors))
        return _JointGraphReader(joint.graph_module, inputs, names, step).read(name, forward_only)


class _JointGraphReader:
    """Turns fx nodes into raw nodes, one by one."""

    def __init__(self, module: Any, inputs: Sequence[str], names: Mapping[str, str], step: nn.Module) -> None:
        self._module, self._inputs, self._names, self._step = module, inputs, names, step
        self._nodes: list[RawNode] = []
        self._use: dict[Any, Use] = {}
        self._sources: dict[str, int] = {}
        self._module_of_sequence: dict[int, str] = {}
        self._schemas: dict[Any, tuple[Any, ...]] = {}
        self._constants: dict[str, torch.Tensor] = {}
        self._backward = False

    def read(self, name: str, forward_only: bool) -> RawGraph:
        returned: list[tuple[Any, Any]] = []
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr":
                self._constant(node)
            elif node.op == "output":
                returned = list(zip(node.args[0], node.meta["desc"], strict=True))
            elif node.target is operator.getitem:
                self._item(node)
            else:
                self._call(node)
        return self._finish(name, returned, forward_only)

    def _item(self, node: Any) -> None:
        """One of several results. Of an op with an effect, the first is a token that keeps such ops in order, which no one reads."""
        of, position = node.args
        if isinstance(of.target, HigherOrderOperator):
            position -= 1
        if of in self._use and position >= 0:
            self._use[node] = Use(self._use[of].node, position)

    def _add(self, node: Any, raw: RawNode) -> None:
        self._use[node] = Use(len(self._nodes))
        self._nodes.append(raw)

    def _source(self, node: Any, name: str, role: Role, *, trainable: bool = False) -> None:
        shape, dtype = _meta(node.meta["val"])
        if name in self._sources:
            self._use[node] = Use(self._sources[name])
            return
        self._sources[name] = len(self._nodes)
        tensor = Tensor(name=name, shape=shape, dtype=dtype, role=role, trainable=trainable)
        self._add(node, RawNode(name=node.name, op="", arguments={}, results=((shape, dtype),), source=tensor))

    def _placeholder(self, node: Any) -> None:
        found = node.meta["desc"]
        if isinstance(found, desc.ParamAOTInput | desc.BufferAOTInput):
            name = self._names[found.target.removeprefix("model.")]
            trained = isinstance(found, desc.ParamAOTInput) and self._step.get_parameter(found.target).requires_grad
            role = Role.PARAMETER if isinstance(found, desc.ParamAOTInput) else Role.BUFFER
            self._source(node, name, role, trainable=trained)
        elif isinstance(found, desc.PlainAOTInput):
            name = self._inputs[found.idx]
            taken = name in self._names or name.split(".")[0] in ("loss", "output")
            self._source(node, f"input.{name}" if taken else name, Role.INPUT)
        elif isinstance(found, desc.TangentAOTInput):
            shape, dtype = _meta(node.meta["val"])
            arguments = {"size": shape, "fill_value": 1.0}
            raw = RawNode(
                name=node.name, op="aten.full.default", arguments=arguments, results=((shape, dtype),), phase=Phase.BACKWARD, random=True
            )
            self._add(node, raw)
        elif not isinstance(found, _TOKENS):
            raise TraceError(
                f"the trace has an input of kind {type(found).__name__}, which is not supported: {found}; use plain tensors only"
            )

    def _constant(self, node: Any) -> None:
        """A tensor that the model made or captured: a buffer without a name."""
        value = node.meta.get("val")
        held = getattr(self._module, node.target)
        if value is None or (isinstance(held, torch.Tensor) and not isinstance(held, FakeTensor)):
            value = node.meta["val"] = held
        if not isinstance(value, torch.Tensor):
            raise TraceError(
                f"the trace calls a subgraph ({node.target}), which is not supported; remove control-flow operators from the model"
            )
        if value.numel() == 1 and not isinstance(value, FakeTensor):
            shape, dtype = _meta(value)
            with unset_fake_temporarily():
                arguments = {"size": shape, "fill_value": value.item()}
            self._add(node, RawNode(name=node.name, op="aten.full.default", arguments=arguments, results=((shape, dtype),)))
            return
        name = f"constant.{node.target.strip('_')}"
        if isinstance(held, torch.Tensor) and not isinstance(held, FakeTensor):
            self._constants[name] = held
        self._source(node, name, Role.BUFFER)

    def _call(self, node: Any) -> None:
        """An op. One that has no results checks values (``_assert_async``, ``_linalg_check_errors``): nothing depends on it, and a plan
        does without it."""
        target, args, effect = node.target, node.args, isinstance(node.target, HigherOrderOperator)
        if effect and target is with_effects:
            target, args = args[1], args[2:]
        if not isinstance(target, torch._ops.OpOverload):
            raise TraceError(f"the trace calls {target}, which is not an ATen op; supported are models that trace to ATen ops")
        self._backward = self._backward or node.meta.get("partitioner_tag") == "is_backward"
        if not target._schema.returns:
            return
        value = node.meta["val"]
        values = tuple(value) if isinstance(value, tuple | list) else (value,)
        values = values[1:] if effect else values
        arguments = self._arguments(target, args, node.kwargs)
        results = _made(tuple(map(_result, values)), arguments)
        phase = Phase.BACKWARD if self._backward else Phase.FORWARD
        op, arguments = _restrided(node, str(target), arguments, results)
        raw = RawNode(
            name=node.name,
            op=op,
            arguments=arguments,
            results=results,
            strides=tuple(tuple(map(int, v.stride())) if isinstance(v, torch.Tensor) else None for v in values),
            phase=phase,
            module=self._path(node, arguments),
            pointwise=torch.Tag.pointwise in target.tags,
            random=torch.Tag.nondeterministic_seeded in target.tags,
            region=self._region(node),
        )
        self._add(node, raw)

    def _arguments(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        schema = self._schemas.get(target)
        if schema is None:
            schema = self._schemas[target] = tuple(
                (a.name, a.default_value if a.has_default_value() else None) for a in target._schema.arguments
            )
        found: dict[str, Any] = {}
        for i, (name, default) in enumerate(schema):
            if name not in _DROPPED:
                value = args[i] if i < len(args) else kwargs.get(name, default)
                found[name] = self._plain(value)
        return found

    def _plain(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return self._use[value]
        if isinstance(value, list | tuple):
            return tuple(self._plain(item) for item in value)
        if isinstance(value, torch.dtype):
            return _dtype(value)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise TraceError("the trace has a size that depends on data; only models with sizes known beforehand are supported")
        return value

    def _path(self, node: Any, arguments: dict[str, Any]) -> str:
        """The module that was running; in backward that of the forward op, or of the operand computed last."""
        sequence = node.meta.get("seq_nr", -1)
        path = node.meta.get("custom", {}).get("module")
        if not self._backward:
            path = path or ""
            self._module_of_sequence.setdefault(sequence, path)
            return str(path)
        if path is None and "Gradient addition" not in (node.meta.get("stack_trace") or ""):
            path = self._module_of_sequence.get(sequence)
        if not path:
            found = [use.node for use in uses(tuple(arguments.values())) if self._nodes[use.node].source is None]
            path = self._nodes[max(found)].module if found else ""
        return str(path)

    def _region(self, node: Any) -> tuple[int, ...]:
        """The checkpointed regions that were open; in backward those of the forward op, as torch hands them on."""
        if not self._backward and node.meta.get("recompute") in _SAVED:
            return ()
        found: tuple[int, ...] = node.meta.get("custom", {}).get(REGION, ())
        return found

    def _finish(self, name: str, returned: list[tuple[Any, Any]], forward_only: bool) -> RawGraph:
        outputs: list[tuple[str, Use]] = []
        gradients: list[tuple[int, Use]] = []
        labels: Sequence[str] = self._step.outputs
        for node, found in returned:
            if node is None:
                continue
            if isinstance(found, desc.PlainAOTOutput):
                outputs.append((labels[found.idx], self._use[node]))
            elif isinstance(found, desc.GradAOTOutput):
                of = found.grad_of
                if isinstance(of, desc.ParamAOTInput):
                    gradients.append((self._sources[self._names[of.target.removeprefix("model.")]], self._use[node]))
            elif isinstance(found, desc.InputMutationAOTOutput):
                of = found.mutated_input
                target = getattr(of, "target", None)
                label = self._names[target.removeprefix("model.")] if target else self._inputs[of.idx]
                outputs.append((f"updated({label})", self._use[node]))
            elif not isinstance(found, _TOKENS):
                raise TraceError(f"the trace returns a value of kind {type(found).__name__}, which is not supported: {found}")
        outputs.sort(key=lambda item: item[0].startswith("updated("))
        if not forward_only and not gradients:
            raise TraceError(
                f"the backward of {name!r} is not in the trace: no trainable parameter gets a gradient from the loss; check that the loss "
                "depends on the parameters and that the model does not run under no_grad or detach its output, or use --forward-only"
            )
        return RawGraph(
            name=name,
            nodes=tuple(self._nodes),
            outputs=tuple(outputs),
            gradients=tuple(gradients),
            ties={other: first for other, first in self._names.items() if other != first},
            constants=self._constants,
        )


def _restrided(node: Any, op: str, arguments: dict[str, Any], results: tuple[Any, ...]) -> tuple[str, dict[str, Any]]:
    """as_strided over a whole contiguous tensor is a view of it, and as_strided_scatter one of what is written."""
    scatter = op == "aten.as_strided_scatter.default"
    if not scatter and op != "aten.as_strided.default":
        return op, arguments
    tensor, size = node.args[0].meta["val"], arguments["size"]
    plain = [math.prod(size[d + 1 :]) for d in range(len(size))]
    same = all(n == 1 or a == b for n, a, b in zip(size, arguments["stride"], plain, strict=True))
    if not same or not tensor.is_contiguous() or math.prod(size) != tensor.numel() or arguments["storage_offset"] not in (None, 0):
        return op, arguments
    return "aten.view.default", {"self": arguments["src" if scatter else "self"], "size": results[0][0]}


def _made(results: tuple[Any, ...], arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Results without those that a mask says are not made, which fake tensors stand for all the same."""
    mask = arguments.get("output_mask")
    if mask is None or len(mask) != len(results):
        return results
    return tuple(result if made else None for result, made in zip(results, mask, strict=True))


def _meta(value: torch.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(int(n) for n in value.shape), _dtype(value.dtype)


def _dtype(dtype: torch.dtype) -> str:
    if dtype not in DTYPES:
        raise TraceError(f"the trace has a tensor of dtype {dtype}; supported: {', '.join(map(str, DTYPES))}")
    return DTYPES[dtype]


def _result(value: Any) -> tuple[tuple[int, ...], str] | None:
    return _meta(value) if isinstance(value, torch.Tensor) else None


# The raw trace: what AOTAutograd returned, as plain values (but for the constants it holds), every argument under its name.


@dataclass(frozen=True, slots=True)
class Use:
    """In a raw node's arguments: result ``result`` of node ``node``."""

    node: int
    result: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RawNode:
    """One call of the trace.

    Attributes:
        name: node name in the traced graph.
        op: ``aten.mm.default`` style overload name; empty for sources.
        arguments: every schema argument by name, defaults filled in; tensors as ``Use``, dtypes by short name.
        results: (shape, dtype) of every result; None for a result that is not a tensor.
        strides: per result, as torch lays it out; None for a result that is not a tensor.
        pointwise: every result element depends on the operand elements at its own place only.
        random: draws from a generator; the gradient of the loss is marked so too, for it is no constant that equal ones could share.
        region: checkpointed regions that it runs in, outermost first; a backward node those of its forward node. A node
            whose results a selective policy keeps runs in none.
        source: the tensor, for sources.
    """

    name: str
    op: str
    arguments: dict[str, Any]
    results: tuple[tuple[tuple[int, ...], str] | None, ...]
    strides: tuple[tuple[int, ...] | None, ...] = ()
    phase: Phase = Phase.FORWARD
    module: str = ""
    pointwise: bool = False
    random: bool = False
    region: tuple[int, ...] = ()
    source: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RawGraph:
    """Nodes in order of execution, what they return, and which tensor is the gradient of which parameter.

    Attributes:
        outputs: (name, value) of everything returned but gradients.
        gradients: (position of the parameter's source node, value); a tied parameter has one entry per use.
        ties: other names of parameters and buffers that have several, to the one that nodes have.
        constants: values of the buffers without a name (``constant.NAME``), where the trace has them.
    """

    name: str
    nodes: tuple[RawNode, ...]
    outputs: tuple[tuple[str, Use], ...]
    gradients: tuple[tuple[int, Use], ...]
    ties: Mapping[str, str] = field(default_factory=dict, compare=False)
    constants: Mapping[str, Any] = field(default_factory=dict, compare=False)


def uses(value: Any) -> Iterator[Use]:
    """Every Use inside an argument value, in order."""
    if isinstance(value, Use):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from uses(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from uses(item)


REGION = "checkpoint"
"""Annotation of traced nodes: the numbers of the open regions, outermost first."""


@contextlib.contextmanager
def regions() -> Iterator[None]:
    """While open, every traced node carries the regions it runs in, as the annotation ``REGION``; a reentrant region is a TraceError.

    Note on every traced op which ``torch.utils.checkpoint`` regions it runs in.

    While tracing, torch ignores the hooks by which a region throws its values away: the joint graph looks as if there were no
    region. But the hooks are entered, and that is where the regions are seen here, whoever opened them:
    ``checkpoint``, ``checkpoint_sequential``, Hugging Face layers, or ``checkpoint_wrapper`` of ``torch.distributed``.
    """
    numbers = itertools.count()
    meta = fx_traceback.current_meta
    hook, reentrant = torch_checkpoint._checkpoint_hook, torch_checkpoint.CheckpointFunction

    class CheckpointRegion(hook):  # type: ignore[misc, valid-type]  # torch is not checked
        def __enter__(self) -> Any:
            self.outer = meta.get("custom")
            before = self.outer or {}
            meta["custom"] = {**before, REGION: (*before.get(REGION, ()), next(numbers))}
            return super().__enter__()

        def __exit__(self, *args: Any) -> Any:
            if self.outer is None:
                meta.pop("custom", None)
            else:
                meta["custom"] = self.outer
            return super().__exit__(*args)

    torch_checkpoint._checkpoint_hook, torch_checkpoint.CheckpointFunction = CheckpointRegion, _Reentrant
    try:
        yield
    finally:
        torch_checkpoint._checkpoint_hook, torch_checkpoint.CheckpointFunction = hook, reentrant


class _Reentrant:
    """Stands in for the autograd function of reentrant checkpoints, which calls the engine from inside the engine."""

    @staticmethod
    def apply(*_args: Any) -> Any:
        raise TraceError(
            "the model checkpoints activations with use_reentrant=True (torch's default), which cannot be traced; call "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class Rewritten(TorchFunctionMode):  # type: ignore[misc]  # torch is not checked
    """While active, such calls are made in the other way.

    Calls that torch traces wrongly, or not at all, as calls that say the same.

    Recurrent layers with dropout between them: torch's decomposition of ``lstm``, ``gru`` and ``rnn_*`` (2.13, ``_rnn_helper``) leaves the
    dropout out. They are called layer by layer, with a dropout of its own between two.

    ``Tensor.random_`` with bounds: the traced op has an argument called ``from``, which the generated code cannot name. It is
    ``randint_like``, copied.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _RECURRENT and not kwargs and func is getattr(torch._VF, name):
            return _layer_by_layer(func, *args)
        if func is torch.Tensor.random_ and len(args) > 1:
            return args[0].copy_(torch.randint_like(args[0], *args[1:]))
        return func(*args, **kwargs)


def _layer_by_layer(func: Callable[..., Any], *args: Any) -> Any:
    """``func``, the recurrent layers of a module, with every dropout a call of its own.

    Args:
        args: input, state, weights, whether there are biases, number of layers, dropout, training, both ways, batch first; of packed
            sequences the sizes of their batches after the input, and no batch first.
    """
    lstm = func.__name__ == "lstm"
    packed = isinstance(args[2] if not lstm else args[1], torch.Tensor) and isinstance(args[3], tuple | list)
    given, rest = args[: 2 if packed else 1], args[2 if packed else 1 :]
    state, weights, biases, layers, dropout, training, both = rest[:7]
    if not (dropout and training and layers > 1):
        return func(*args)
    first = not packed and rest[7]
    x = given[0].transpose(0, 1) if first else given[0]
    count, ways = len(weights) // layers, 2 if both else 1
    ends: list[Any] = []
    for layer in range(layers):
        here = slice(layer * ways, (layer + 1) * ways)
        start = [part[here] for part in state] if lstm else state[here]
        own = weights[layer * count : (layer + 1) * count]
        x, *end = func(x, *given[1:], start, own, biases, 1, 0.0, training, both, *(() if packed else (False,)))
        ends.append(end)
        x = F.dropout(x, dropout) if layer < layers - 1 else x
    return (x.transpose(0, 1) if first else x, *(torch.cat(parts) for parts in zip(*ends, strict=True)))
