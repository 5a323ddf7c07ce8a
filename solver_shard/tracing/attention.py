"""Attention as the fused op that an accelerator runs, whatever the CPU has a kernel of.

``shard.attention`` is one call of a fused kernel: queries ``[batch, heads, queries, d]``, keys ``[batch, kv heads, keys, d]`` and values
``[batch, kv heads, keys, e]``, to attended values ``[batch, heads, queries, e]`` and the logarithms of the softmax's sums. It has a mask,
with a gradient where it is learned, dropout, and functions of scores. ``shard.attention_backward`` is its backward pass.

**scaled_dot_product_attention.** Where the CPU has a fused kernel the trace has that one, for tools know it; else the CPU falls back to
scores of ``[batch, heads, queries, keys]`` elements, which an accelerator never stores, and the call is traced as ``shard.attention``:
values of another width than keys (latent attention), learned masks, masks of other ranks. With dropout the CPU's op is called all the same.

**flex_attention** (Dong et al., arXiv:2412.05496) is ``shard.attention`` with its functions: ``score_mod``, by which soft caps, relative
positions and learned biases are written, and ``mask_mod`` (causal, sliding windows, packed documents). They are kept as text, the ops of
one score in order, with what they read of captured tensors (``%x0``, ...), so that a device runs them on its part, at the positions of
the whole:

    [["aten.ge.Tensor", {"self": "%q", "other": "%kv"}]]            q_idx >= kv_idx; the last step is the result

A captured tensor of which every reading picks the score's own sequence or head (``slopes[h]``, ``documents[b, q]``) is cut along that dim
with the scores, where a device finds it at ``%h.own`` or ``%b.own``; all others are whole. Positions in the batch and of heads are
operands (``batches``, a vector, and ``heads``, a column, for one tensor could not be cut as both), cut as the queries are. The blocks of a
``BlockMask`` are not in the program: kernels skip them, which the price of an attention knows from its mask (``ops.kernels.visible``).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
from torch import fx
from torch._higher_order_ops.flex_attention import math_attention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from solver_shard.errors import InputError, TraceError

ATTENTION, ATTENTION_BACKWARD = "shard.attention.default", "shard.attention_backward.default"

_OPTIONS = "Tensor? batches, Tensor? heads, str score, str mask, float dropout_p, bool is_causal, float? scale"
_READS = "Tensor query, Tensor key, Tensor value"
_LIBRARY = torch.library.Library("shard", "FRAGMENT")
_LIBRARY.define(
    f"attention({_READS}, Tensor? attn_mask, Tensor[] buffers, {_OPTIONS}) -> (Tensor, Tensor)", tags=(torch.Tag.nondeterministic_seeded,)
)
_LIBRARY.define(
    f"attention_backward(Tensor grad_out, Tensor? grad_logsumexp, {_READS}, Tensor out, Tensor logsumexp, Tensor? attn_mask, "
    f"Tensor[] buffers, {_OPTIONS}, bool[] wanted) -> Tensor[]"
)
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@torch.library.register_fake("shard::attention", lib=_LIBRARY)  # type: ignore[untyped-decorator]  # torch is not checked
def _made(query: torch.Tensor, _key: Any, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    lead, wide = query.shape[:3], torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(_beside(query, value.shape[-1])).transpose(1, 2), query.new_empty(lead, dtype=wide)


def _beside(query: torch.Tensor, width: int) -> tuple[int, ...]:
    """Kernels leave the heads of a position beside each other, as projections do."""
    return query.shape[0], query.shape[2], query.shape[1], width


@torch.library.register_fake("shard::attention_backward", lib=_LIBRARY)  # type: ignore[untyped-decorator]  # torch is not checked
def _made_backward(
    _gradient: Any, _slope: Any, query: Any, key: Any, value: Any, _out: Any, _sums: Any, attn_mask: Any, buffers: Any, *rest: Any
) -> list[torch.Tensor]:
    wanted = rest[-1]
    found = [x for x, asked in zip((attn_mask, *buffers), wanted, strict=True) if asked]
    return [*(x.new_empty(_beside(x, x.shape[-1])).transpose(1, 2) for x in (query, key, value)), *map(torch.empty_like, found)]


class _Attention(torch.autograd.Function):  # type: ignore[misc]  # torch is not checked
    """``shard.attention`` with its backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, attn_mask: Any, options: tuple[Any, ...], *buffers: Any) -> Any:
        out, sums = torch.ops.shard.attention(query, key, value, attn_mask, list(buffers), *options)
        ctx.save_for_backward(query, key, value, out, sums, attn_mask, *options[:2], *buffers)
        ctx.options = options[2:]
        ctx.set_materialize_grads(False)
        return out, sums

    @staticmethod
    def backward(ctx: Any, gradient: Any, slope: Any) -> Any:
        query, key, value, out, sums, attn_mask, batches, heads, *buffers = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[3], *ctx.needs_input_grad[5:]]
        gradient = torch.zeros_like(out) if gradient is None else gradient
        options = (batches, heads, *ctx.options)
        made = torch.ops.shard.attention_backward(gradient, slope, query, key, value, out, sums, attn_mask, list(buffers), *options, wanted)
        extra = iter(made[3:])
        mask, *rest = (next(extra) if asked else None for asked in wanted)
        return *made[:3], mask, None, *rest


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """While open, attention is traced as the fused op that an accelerator runs."""
    with FusedAttention(), _flex_calls(_traced_flex):
        yield


@contextlib.contextmanager
def unfused_flex() -> Iterator[None]:
    """While open, ``flex_attention`` runs as plain ops on any device, which have the gradient that the CPU's own does not have."""
    with _flex_calls(math_attention):
        yield


@contextlib.contextmanager
def _flex_calls(kernel: Callable[..., Any]) -> Iterator[None]:
    """What ``flex_attention`` checks and returns stays torch's own (2.13); the kernel that it calls is another."""
    given: list[tuple[dict[str, Any], str, Any]] = [
        (vars(flex), "flex_attention_hop", kernel),
        (vars(flex), "_validate_device", lambda *_: None),
        (vars(flex), "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        *_of_transformers(),
    ]
    before = [(names, name, names[name]) for names, name, _ in given]
    for names, name, value in given:
        names[name] = value
    try:
        with torch.compiler.set_stance("force_eager"):  # models compile it by itself
            yield
    finally:
        for names, name, value in before:
            names[name] = value


def _of_transformers() -> Iterator[tuple[dict[str, Any], str, Any]]:
    """What the library (5.24) does otherwise on a CPU: it compiles what makes masks, looks into them, and refuses attention sinks."""
    modules = [sys.modules.get(f"transformers.{name}") for name in ("masking_utils", "integrations.flex_attention", "modeling_utils")]
    if None in modules:
        return
    masks, calls, models = map(vars, modules)

    def create(*args: Any, _compile: bool = False, **kwargs: Any) -> Any:
        return flex.create_block_mask(*args, **kwargs)

    def call(*args: Any, training: bool = False, **kwargs: Any) -> Any:
        return flex.flex_attention(*args, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        """Whatever padding there is is looked at, for whether there is any is not known."""
        asked, masks["fast_all"] = masks["fast_all"], lambda *_: False
        try:
            return known_masks["flex_attention"](*args, **kwargs)
        finally:
            masks["fast_all"] = asked

    known_masks = dict(masks["AttentionMaskInterface"]._global_mapping)
    yield masks["AttentionMaskInterface"]._global_mapping, "flex_attention", mask
    yield masks, "create_block_mask", create
    yield calls, "compile_friendly_flex_attention", call
    known = models["AttentionInterface"]._global_mapping
    yield known, "flex_attention", functools.partial(_with_sinks, known["flex_attention"])


def _with_sinks(attend: Callable[..., Any], module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
    """As ``flex_attention_forward`` of transformers does on an accelerator."""
    sinks = kwargs.get("s_aux")
    if sinks is None or not isinstance(mask, flex.BlockMask):
        return attend(module, query, key, value, mask, *args, **kwargs)
    cap = kwargs.get("softcap")
    out, aux = flex.flex_attention(
        query,
        key,
        value,
        score_mod=None if cap is None else lambda score, *_: cap * torch.tanh(score / cap),
        block_mask=mask,
        scale=kwargs.get("scaling"),
        enable_gqa=True,
        return_aux=flex.AuxRequest(lse=True),
    )
    sums = aux.lse.to(value.dtype).unsqueeze(-1)
    both = torch.cat([sums, sinks.view(1, -1, 1, 1).expand(sums.shape)], -1)
    scale = torch.exp(sums - torch.logsumexp(both, -1, keepdim=True))
    return (out * scale).to(query.dtype).transpose(1, 2).contiguous(), sums.squeeze(-1)


class FusedAttention(TorchFunctionMode):  # type: ignore[misc]  # torch is not checked
    """While active, scaled_dot_product_attention is one op where a device's kernels take its operands."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            fused = _fused(*args, **kwargs)
            if fused is not None:
                return fused
        return func(*args, **kwargs)


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """The fused call, or None where torch makes it by itself or no kernel takes these operands."""
    alike = query.ndim == key.ndim == value.ndim == 4 and query.shape[0] == key.shape[0] == value.shape[0]
    if not alike or key.shape[1] != value.shape[1] or (query.shape[1] != key.shape[1] and not enable_gqa):
        return None
    learned = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
    usual = query.shape[-1] == value.shape[-1] and not learned and (attn_mask is None or attn_mask.ndim in (2, 4))
    if usual and dropout_p == 0.0:
        return None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), float("-inf"))
    if usual:
        attended: torch.Tensor = _FUSED(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
        return attended
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
        if learned:  # kernels write its gradient whole
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    attended, _ = _Attention.apply(query, key, value, attn_mask, (None, None, "", "", dropout_p, is_causal, scale))
    return attended


def _traced_flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: Sequence[Any],
    scale: float,
    _options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attended values, the logarithms of the sums (to base 2, as the kernel leaves them), and no maxima."""
    buffers: list[torch.Tensor] = []
    score = "" if score_mod is flex._identity else function_text(score_mod, buffers, scored=True, like=query)
    mask_mod = block_mask[-1]
    mask = "" if mask_mod is flex.noop_mask else function_text(mask_mod, buffers, scored=False, like=query)
    score, mask = _with_own(score, mask, [tuple(x.shape) for x in buffers], query.shape)
    batches = torch.arange(query.shape[0], device=query.device) if '"%b"' in score + mask else None
    heads = torch.arange(query.shape[1], device=query.device).unsqueeze(1) if '"%h"' in score + mask else None
    if key.shape[0] != query.shape[0]:
        key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    out, sums = _Attention.apply(query, key, value, None, (batches, heads, score, mask, 0.0, False, scale), *buffers)
    return out, sums / math.log(2.0), sums.new_empty(0)


def _with_own(score: str, mask: str, buffers: Sequence[Sequence[int]], lead: Sequence[int]) -> tuple[str, str]:
    """The functions, with places on the device where all readings of a captured tensor pick the score's own sequence or head."""
    functions = [json.loads(text) if text else [] for text in (score, mask)]
    for i, shape in enumerate(buffers):
        readings = [
            arguments["indices"] if op == "aten.index.Tensor" and arguments["self"] == f"%x{i}" else []
            for op, arguments in itertools.chain(*functions)
            if f'"%x{i}"' in json.dumps(arguments)
        ]
        for dim, size in enumerate(shape):
            for name, count in (("%b", lead[0]), ("%h", lead[1])):
                if size == count and all(reading[dim : dim + 1] == [name] for reading in readings):
                    for reading in readings:
                        reading[dim] = f"{name}.own"
    return json.dumps(functions[0]) if score else "", json.dumps(functions[1]) if mask else ""


def own_dims(score: str, mask: str, place: int) -> Mapping[int, str]:
    """Which dims of a captured tensor are the scores' own sequences (``%b``) or heads (``%h``)."""
    found: dict[int, str] = {}
    for _, arguments in (*read_function(score or "[]"), *read_function(mask or "[]")):
        if arguments.get("self") == f"%x{place}":
            found |= {dim: name[:2] for dim, name in enumerate(arguments.get("indices", ())) if name.endswith(".own")}
    return found


# Functions of scores as text.

_PLACES = ("%b", "%h", "%q", "%kv")
_MAKES = frozenset({"scalar_tensor", "full", "ones", "zeros", "new_ones", "new_zeros", "new_full", "full_like", "ones_like", "zeros_like"})
_READERS = frozenset({"index", "select", "_to_copy", "view", "unsqueeze", "squeeze", "expand", "alias", "clone", "lift_fresh_copy"})
"""Ops of functions beside those that torch says are elementwise."""


def function_text(function: Callable[..., torch.Tensor], buffers: list[torch.Tensor], *, scored: bool, like: torch.Tensor) -> str:
    """The ops of a ``score_mod`` (``scored``) or a ``mask_mod`` as text; tensors that it captures are appended to ``buffers``.

    >>> function_text(lambda b, h, q, kv: q >= kv, [], scored=False, like=torch.empty(0))
    '[["aten.ge.Tensor", {"self": "%q", "other": "%kv"}]]'

    Raises:
        TraceError: it branches by positions, or calls what works on more than one element.
    """
    names = ("%score", *_PLACES) if scored else _PLACES
    graph = fx.Graph()
    tracer = _FunctionTracer(graph, buffers)
    inputs = [fx.Proxy(graph.placeholder(name[1:]), tracer) for name in names]
    try:
        with _CapturedIndex(tracer):
            result = function(*inputs)
        graph.output(tracer.create_arg(result))
        steps = _steps(_canonical(graph, names, buffers, like), names)
    except (fx.proxy.TraceError, TypeError, RuntimeError, NotImplementedError) as error:
        what = "score_mod" if scored else "mask_mod"
        raise TraceError(
            f"the {what} {getattr(function, '__qualname__', function)!r} of flex_attention cannot be traced: {str(error).splitlines()[0]}; "
            "write it with elementwise ops of its score and positions, and tensors indexed by these"
        ) from error
    return json.dumps(steps)


class _FunctionTracer(fx.proxy.GraphAppendingTracer):  # type: ignore[misc]  # torch is not checked
    """Captured tensors by their place among the buffers."""

    def __init__(self, graph: fx.Graph, buffers: list[torch.Tensor]) -> None:
        super().__init__(graph)
        self.buffers = buffers

    def create_arg(self, a: Any) -> Any:
        return self.captured(a).node if isinstance(a, torch.Tensor) else super().create_arg(a)

    def captured(self, tensor: torch.Tensor) -> fx.Proxy:
        place = next((i for i, known in enumerate(self.buffers) if known is tensor), len(self.buffers))
        if place == len(self.buffers):
            self.buffers.append(tensor)
        return fx.Proxy(self.graph.create_node("get_attr", f"x{place}"), self)


class _CapturedIndex(TorchFunctionMode):  # type: ignore[misc]  # torch is not checked
    """While active, captured tensors can be indexed by positions."""

    def __init__(self, tracer: _FunctionTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__ and isinstance(args[0], torch.Tensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, fx.Proxy) for i in index):
                return self._tracer.captured(args[0])[args[1]]
        return func(*args, **(kwargs or {}))


def _canonical(graph: fx.Graph, names: Sequence[str], buffers: Sequence[torch.Tensor], like: torch.Tensor) -> fx.Graph:
    """The function as ATen ops on single elements."""

    def replay(*given: torch.Tensor) -> Any:
        known: dict[Any, Any] = {}
        inputs, captured = iter(given), given[len(names) :]
        for node in graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: known[n])
            if node.op == "placeholder":
                known[node] = next(inputs)
            elif node.op == "get_attr":
                known[node] = captured[int(node.target[1:])]
            elif node.op == "call_method":
                known[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
            elif node.op == "output":
                return torch.as_tensor(args[0])
            else:
                known[node] = _picked(*args) if node.target is operator.getitem else node.target(*args, **kwargs)
        return None

    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), FakeTensorMode():
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        elements = [torch.empty((), dtype=wide if name == "%score" else torch.int64) for name in names]
        stand_ins = [torch.empty(tuple(x.shape), dtype=x.dtype) for x in buffers]
        made = make_fx(replay)(*elements, *stand_ins)
    made.graph.eliminate_dead_code()
    return made.graph


def _picked(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """An element, or a part, by positions and whole numbers."""
    index = list(index) if isinstance(index, tuple) else [index]
    for dim in reversed(range(len(index))):
        if isinstance(index[dim], int):
            tensor = tensor.select(dim, index.pop(dim))
    if not all(isinstance(i, torch.Tensor) for i in index):
        raise TypeError("it indexes a tensor by something else than positions and whole numbers")
    return torch.ops.aten.index.Tensor(tensor, index) if index else tensor


def _steps(graph: fx.Graph, names: Sequence[str]) -> list[Any]:
    known: dict[fx.Node, str] = {}
    places = iter(names)
    steps: list[list[Any]] = []
    captured = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            name = next(places, None)
            known[node] = name or f"%x{captured}"
            captured += name is None
        elif node.op == "get_attr":
            value = getattr(graph.owning_module, node.target)
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                raise TypeError("it makes a tensor of several elements; make it before the call")
            known[node] = f"%{len(steps)}"
            steps.append(["aten.scalar_tensor.default", {"s": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}])
        elif node.op == "output":
            last = known[node.args[0]]
            if last != f"%{len(steps) - 1}":
                steps.append(["aten.alias.default", {"self": last}])
        else:
            target = _legal(str(node.target))
            arguments = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False)) | node.kwargs
            step: list[Any] = [str(node.target), {name: _plain(value, known) for name, value in arguments.items() if value is not None}]
            both = list(step[1].values()) if step[0] == "aten.bitwise_and.Tensor" else []
            if _TRUE in (given := [steps[int(name[1:])] if name[1:].isdigit() else name for name in both]):
                known[node] = both[1 - given.index(_TRUE)]
                continue
            known[node] = f"%{len(steps)}"
            steps.append(_TRUE if step[0] == "aten.new_ones.default" and node.meta["val"].dtype == torch.bool else step)
    return _needed(steps)


def _needed(steps: list[Any]) -> list[Any]:
    """Those that the last one reads, numbered anew."""
    kept: dict[str, Any] = {}

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [renamed(item) for item in value]
        return keep(value) if isinstance(value, str) and value[:1] == "%" and value[1:].isdigit() else value

    def keep(name: str) -> str:
        if name not in kept:
            op, arguments = steps[int(name[1:])]
            step = [op, {key: renamed(value) for key, value in arguments.items() if key not in _PLACED}]
            kept[name] = len(made)
            made.append(step)
        return f"%{kept[name]}"

    made: list[Any] = []
    keep(f"%{len(steps) - 1}")
    return made


_TRUE = ["aten.scalar_tensor.default", {"s": True, "dtype": "bool"}]
_PLACED = frozenset({"device", "layout", "pin_memory", "memory_format"})


def _plain(value: Any, known: Mapping[fx.Node, str]) -> Any:
    if isinstance(value, fx.Node):
        return known[value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return [_plain(item, known) for item in value] if isinstance(value, list | tuple) else value


def _legal(name: str) -> Any:
    """The overload of a step; TypeError for ops that are not of single elements."""
    namespace, base, overload = [*name.split("."), "", "", ""][:3]
    target = getattr(getattr(torch.ops.aten, base, None), overload, None) if namespace == "aten" else None
    if isinstance(target, torch._ops.OpOverload) and (torch.Tag.pointwise in target.tags or base in _MAKES | _READERS):
        return target
    raise TypeError(f"it calls {name}")


@functools.lru_cache(maxsize=1024)
def read_function(text: str) -> tuple[tuple[Any, Mapping[str, Any]], ...]:
    """The steps of a function: an overload and its arguments by name, references as text.

    >>> [(str(op), sorted(arguments)) for op, arguments in read_function('[["aten.tanh.default", {"self": "%score"}]]')]
    [('aten.tanh.default', ['self'])]

    Raises:
        InputError: it is not a list of ops on single elements.
    """
    try:
        steps = [(_legal(name), dict(arguments)) for name, arguments in json.loads(text)]
    except (TypeError, ValueError) as error:
        raise InputError(f"a function of attention scores is not a list of elementwise ATen ops: {error}") from None
    for _, arguments in steps:
        if isinstance(arguments.get("dtype"), str):
            arguments["dtype"] = getattr(torch, arguments["dtype"])
    return tuple(steps)
