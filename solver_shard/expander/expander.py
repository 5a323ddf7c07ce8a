"""From a call to the way it runs: calls of ATen ops from text or schema, their single-axis strategies, and the cheapest expansion.

>>> from solver_shard.costs.dtensor import DTensorCosts
>>> from solver_shard.expander.call import Operand
>>> from solver_shard.expander.pricing import DTensorPricing
>>> from solver_shard.mesh import Mesh
>>> mesh = Mesh.parse("dp=4,tp=2")
>>> inputs = [Operand.parse(text, mesh) for text in ("f32[512,1024]| S(0)S(1)", "f32[1024,512]| RS(0)")]
>>> call = call_of("aten.mm.default", inputs, mesh)
>>> print(*call.results), list(call.attributes)
f32[512, 512]
(None, ['self', 'mat2'])
>>> expander = Expander(DTensorPricing(DTensorCosts(mesh_shape=mesh.shape, devices_per_host=8), mesh))
>>> expansion = expander.expand(call)
>>> expansion.results[0], expansion.cost, expansion.how
((S(0), P(sum)), 0.0, 'match')
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from solver_shard.arguments import checked
from solver_shard.costs.cluster import load_cluster
from solver_shard.costs.collectives import Collectives
from solver_shard.costs.dtensor import DTensorCosts
from solver_shard.errors import InputError
from solver_shard.expander.call import Meta, Operand, PlacedCall, elements, is_list_op
from solver_shard.expander.pricing import ClusterPricing, DTensorPricing, MovePricing
from solver_shard.expander.search import Expansion, expand_exhaustively, search, searchable
from solver_shard.expander.single_axis import USER_STRATEGIES, Cut, Prepared, SingleAxis, Strategies, of_rule, prepare
from solver_shard.layout import Placements, dtensor_placements, show
from solver_shard.mesh import Mesh
from solver_shard.program import Op, Ref, Tensor
from solver_shard.rules.rulebook import build_rule
from solver_shard.rules.table import RuleTable, load_table
from solver_shard.text import format_ns, text_of


def overload(op: str) -> Any | None:
    """The torch op of a name like ``aten.mm.default``; None where there is none."""
    import torch

    found: Any = torch.ops
    for part in op.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found if isinstance(found, torch._ops.OpOverload) else None


def call_of(op: str, inputs: Sequence[Operand], mesh: Mesh, given: Mapping[str, Any] | None = None) -> PlacedCall:
    """The call of an ATen op on these inputs: they fill its tensor arguments in the order of its schema.

    A list of tensors takes all inputs that later arguments do not need. ``given`` has the other arguments by name. The results are
    found by running the op on tensors without data.

    Raises:
        InputError: no such op, too few or too many inputs, an argument that is missing or unknown, or the op refuses them.
    """
    import torch

    target = overload(op)
    if target is None:
        raise InputError(f"there is no op {op!r}; write its full name with the overload, as in 'aten.mm.default' or 'aten.add.Tensor'")
    schema, given = target._schema.arguments, dict(given or {})
    unknown = [name for name in given if name not in {a.name for a in schema}]
    if unknown:
        raise InputError(f"{op} has no argument {unknown[0]!r}; it has {', '.join(a.name for a in schema)}")
    left = list(range(len(inputs)))
    needed = [a for a in schema if a.name not in given and str(a.type) == "Tensor"]
    attributes: dict[str, Any] = {}
    keywords: list[int] = []
    for argument in schema:
        kind, value = str(argument.type), None
        later = sum(1 for a in needed if schema.index(a) > schema.index(argument))
        if argument.name in given:
            value = given[argument.name]
        elif kind in ("List[Tensor]", "List[Optional[Tensor]]"):
            value = tuple(Ref(left.pop(0)) for _ in range(len(left) - later))
        elif kind == "Tensor" or (kind == "Optional[Tensor]" and len(left) > later):
            if not left:
                raise InputError(f"{op} needs a tensor for argument {argument.name!r}, but only {len(inputs)} inputs were given")
            value = Ref(left.pop(0))
        elif argument.has_default_value():
            value = argument.default_value
        else:
            raise InputError(f"{op} needs argument {argument.name!r} of type {kind}; give it as {argument.name}=VALUE")
        attributes[argument.name] = tuple(value) if isinstance(value, list) else value
        if argument.kwarg_only and isinstance(value, Ref):
            keywords.append(value.operand)
    if left:
        raise InputError(f"{op} takes {len(inputs) - len(left)} tensors, {len(inputs)} inputs were given; drop the last ones")
    outs = tuple(attributes[a.name].operand for a in schema if a.is_out and isinstance(attributes[a.name], Ref))
    draft = PlacedCall(op=op, mesh=mesh, operands=tuple(inputs), results=(), attributes=attributes, keywords=tuple(keywords), outs=outs)
    return PlacedCall(
        op=op,
        mesh=mesh,
        operands=tuple(inputs),
        results=_results(draft, target, torch),
        attributes=attributes,
        keywords=tuple(keywords),
        outs=outs,
    )


def _results(call: PlacedCall, target: Any, torch: Any) -> tuple[Meta | None, ...]:
    """Shapes and dtypes of what the op returns."""
    from solver_shard.tracing.joint_graph import DTYPES

    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    args, kwargs = _arguments(call, target, lambda o: torch.empty(o.sizes, dtype=dtypes[o.dtype], device="meta"))
    try:
        made = target(*args, **kwargs)
    except Exception as error:
        shapes = ", ".join(map(str, call.operands))
        raise InputError(f"{call.op} does not run on {shapes or 'no inputs'}: {' '.join(str(error).split())[:300]}") from None
    flat = made if isinstance(made, tuple | list) else (made,)
    return tuple(
        Meta(shape=tuple(item.shape), dtype=DTYPES[item.dtype]) if isinstance(item, torch.Tensor) else None
        for item in flat
        if item is not None or len(flat) > 1
    )


def _arguments(call: PlacedCall, target: Any, tensor: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the torch op, with ``tensor(operand)`` for every operand."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in target._schema.arguments:
        default = argument.default_value if argument.has_default_value() else None
        value = call.attributes.get(argument.name, default)
        value = _with_tensors(value, call, tensor)
        if argument.kwarg_only:
            if value is not None:
                kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def _with_tensors(value: Any, call: PlacedCall, tensor: Any) -> Any:
    if isinstance(value, Ref):
        return tensor(call.operands[value.operand])
    if isinstance(value, tuple | list):
        return [_with_tensors(item, call, tensor) for item in value]
    return value


def dtensor_strategies(call: PlacedCall) -> SingleAxis | None:
    """The strategies that DTensor has for the op, if it has single-axis ones.

    Partials that are not of a plain kind (the mask of an embedding, norms) are ``NamedPartial``.
    """
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import TensorMeta
    from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder

    from solver_shard.tracing.joint_graph import DTYPES

    op = overload(call.op)
    info = None if op is None else DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs.get(op)
    if op is None or info is None:
        return None
    dtypes = {name: dtype for dtype, name in DTYPES.items()}

    def meta(operand: Operand) -> Any:
        held = torch.empty(operand.sizes, dtype=dtypes[operand.dtype], device="meta")
        return TensorMeta(held.shape, held.stride(), held.dtype)

    args, kwargs = _arguments(call, op, meta)
    rows = tuple(
        tuple(
            Cut(entry.dim) if isinstance(entry, _ShardingPlaceholder) else None if entry is None else dtensor_placements((entry,))[0]
            for entry in entries
        )
        for entries in info.func(op, args, kwargs)
    )
    return SingleAxis(
        strategies=rows,
        allow_uneven_sharding=info.allow_uneven_sharding,
        allow_unbacked_sharding=info.allow_unbacked_sharding,
        different_mesh_args=tuple(info.different_mesh_args or ()),
    )


Source = Literal["auto", "user", "rules", "dtensor"]


class SearchExhaustedWarning(UserWarning):
    """The search found nothing, or held too many states, so every combination was looked at instead."""


class Expander:
    """Expands calls under one cost model; full expansions are kept, by what they depend on.

    ``source``: where single-axis strategies come from. ``auto`` takes what the user registered, else our rule, else DTensor's own,
    else the op is replicated.
    """

    def __init__(
        self, pricing: MovePricing, *, source: Source = "auto", strategies: Strategies = USER_STRATEGIES, table: RuleTable | None = None
    ) -> None:
        self.pricing = pricing
        self._source, self._strategies = source, strategies
        self._table = load_table() if table is None else table
        self._kept: dict[Hashable, tuple[Expansion, ...]] = {}

    def expand(self, call: PlacedCall) -> Expansion:
        """The cheapest way to run one call.

        Raises:
            InputError: there is none, or the call is one of a list op (see ``expand_elements``).
            RuleError: strategies that do not fit the op.
        """
        if is_list_op(call):
            raise InputError(f"{call.op} runs on lists of tensors, each element its own way; expand its elements")
        prepared = self.prepare(call)
        if searchable(prepared):
            found = search(prepared, self.pricing)
            if found is not None:
                return found
            warnings.warn(f"{call.op}: the search found no strategy; all combinations are expanded", SearchExhaustedWarning, stacklevel=2)
        return self.ranked(call)[0]

    def expand_elements(self, call: PlacedCall) -> tuple[Expansion, ...]:
        """The cheapest way to run every element of a list op."""
        return tuple(self.expand(element) for element in elements(call))

    def ranked(self, call: PlacedCall) -> tuple[Expansion, ...]:
        """Every way to run a call, cheapest first."""
        registered = self._strategies.get(call.op) if self._source in ("auto", "user") else None
        try:
            key = call.key(registered.static_arguments if registered is not None else None)
        except TypeError:
            return expand_exhaustively(self.prepare(call), self.pricing)
        if key not in self._kept:
            self._kept[key] = expand_exhaustively(self.prepare(call), self.pricing)
        return self._kept[key]

    def prepare(self, call: PlacedCall) -> Prepared:
        """The strategies of a call, fitted to it."""
        return prepare(call, self.single_axis(call))

    def single_axis(self, call: PlacedCall) -> SingleAxis:
        """The strategies of a call, from the first source that has some."""
        sources: dict[str, Callable[[], SingleAxis | None]] = {
            "user": lambda: self._strategies.of(call) if self._strategies.get(call.op) is not None else None,
            "rules": lambda: rule_strategies(call, self._table) if call.op in self._table else None,
            "dtensor": lambda: dtensor_strategies(call),
        }
        for name, look in sources.items():
            if self._source in ("auto", name):
                found = look()
                if found is not None:
                    return found
        if self._source == "user":
            return self._strategies.of(call)
        return SingleAxis(strategies=())


def rule_strategies(call: PlacedCall, table: RuleTable) -> SingleAxis:
    """The single-axis strategies of our rule for the op."""
    tensors = [Tensor(name=f"x{i}", shape=operand.sizes, dtype=operand.dtype) for i, operand in enumerate(call.operands)]
    results = [Tensor(name=f"y{i}", shape=meta.sizes, dtype=meta.dtype) for i, meta in enumerate(call.results) if meta is not None]
    op = Op(name=call.op, operands=tuple(range(len(tensors))), results=tuple(range(len(results))), attributes=call.attributes)
    found = of_rule(build_rule(op, tensors, results, table), call.element_mesh.shape)
    if len(results) == len(call.results):
        return found
    present = iter(range(len(results)))
    place = [None if meta is None else next(present) for meta in call.results]
    rows = tuple((*(None if k is None else row[k] for k in place), *row[len(results) :]) for row in found.strategies)
    return SingleAxis(strategies=rows, allow_unbacked_sharding=found.allow_unbacked_sharding, legal=found.legal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """How one op runs on a mesh; ``str()`` says it in words.

    Attributes:
        call: the op, with its inputs, results and other arguments.
        best: the cheapest way, and the moves that it needs.
        ways: every way, cheapest first, where they were asked for; each priced as an executor would move each input.
        prices: whose, in words.
        mover: who would move inputs so, in words.
    """

    call: PlacedCall
    best: Expansion
    ways: tuple[Expansion, ...] | None
    prices: str
    mover: str

    def to_json(self) -> dict[str, Any]:
        """Plain data: layouts as text, costs in the unit that is given with them."""
        best = self.best
        data = {**_data(best), "visited": best.visited, "product": best.product, "how": best.how}
        return data if self.ways is None else {**data, "all": [_data(way) for way in self.ways]}

    def __str__(self) -> str:
        call, best = self.call, self.best
        lines = [f"{call.op} on {call.mesh}, priced by {self.prices}"]
        for i, operand in enumerate(call.operands):
            moves = [move for move in best.moves if move.operand == i]
            lines.append(f"  input {i}   {operand}| {show(operand.layout)}{'' if moves else '  as it is'}")
            lines += [f"            {move}" for move in moves]
        for k, meta in enumerate(call.results):
            layout = best.results[k] if k < len(best.results) else None
            lines.append(f"  result {k}  {'masked off' if meta is None or layout is None else f'{meta}| {show(layout)}'}")
        axes = len(call.element_mesh.axes)
        strategies = round(best.product ** (1 / axes))
        visited = f"{best.visited} states visited" if best.how != "exhaustive" else "all combinations expanded"
        lines.append(f"cost {_cost(best)}")
        lines.append(f"{visited}; the full product of {strategies} strategies on {axes} axes has {best.product}")
        if self.ways is not None:
            lines += ["", f"{len(self.ways)} ways, moved as {self.mover} would:"]
            lines += [f"  {_cost(way):>12}  {_layouts(way.inputs)} -> {_layouts(way.results)}" for way in self.ways]
        return text_of(lines)


@checked
def expand(
    op: str,
    inputs: Sequence[str],
    *,
    mesh: str | Mesh,
    arguments: Mapping[str, Any] | None = None,
    prices: Literal["cluster", "dtensor"] = "cluster",
    cluster: str = "h100",
    devices_per_host: int = 8,
    source: Source = "auto",
    ways: bool = False,
) -> Expanded:
    """How one op runs on a mesh from the layouts that its inputs have: the cheapest strategy on every axis, and the moves that it needs.

    >>> found = expand("aten.mm.default", ["f32[512,1024]| S(0)R", "f32[1024,512]| RS(1)"], mesh="dp=4,tp=2")
    >>> found.best.cost, found.best.how
    (0, 'match')

    Args:
        op: an ATen op with its overload.
        inputs: tensor arguments in order, with global shapes and layouts; ``?`` is an unknown size.
        mesh: axes, outermost first.
        arguments: the op's other arguments by name: ``{"dim": [1]}``.
        prices: a cluster's costs in nanoseconds, or DTensor's own formulas in microseconds.
        cluster: whose: a preset or a TOML file.
        devices_per_host: for DTensor's formulas.
        source: where single-axis strategies come from: our ``rules``, ``dtensor``, or ``auto`` for the first that has some, those that were
            registered (:func:`solver_shard.register_single_axis_strategy`) before both.
        ways: list every way to run the op, too.

    Returns:
        The cheapest way with its moves, their bytes and costs.

    Raises:
        InputError: no such op, or it does not run on these inputs; the message says what is legal.
        RuleError: strategies that do not fit the op.
    """
    on = mesh if isinstance(mesh, Mesh) else Mesh.parse(mesh)
    call = call_of(op, [Operand.parse(text, on) for text in inputs], on, arguments)
    pricing: MovePricing
    if prices == "dtensor":
        pricing = DTensorPricing(DTensorCosts(mesh_shape=on.shape, devices_per_host=devices_per_host), on)
        by, mover = f"DTensor's formulas, {devices_per_host} devices per host", "DTensor"
    else:
        pricing = ClusterPricing(Collectives(on, load_cluster(cluster)))
        by, mover = f"cluster {cluster}", "an executor of our plans"
    expander = Expander(pricing, source=source)
    best = expander.expand(call)
    return Expanded(call=call, best=best, ways=expander.ranked(call) if ways else None, prices=by, mover=mover)


def _layouts(layouts: Sequence[Placements | None]) -> str:
    return ", ".join("-" if layout is None else show(layout) for layout in layouts)


def _cost(way: Expansion) -> str:
    return format_ns(round(way.cost)) if way.unit == "ns" else f"{way.cost:.2f} {way.unit}"


def _data(way: Expansion) -> dict[str, Any]:
    return {
        "inputs": [show(layout) for layout in way.inputs],
        "results": [None if layout is None else show(layout) for layout in way.results],
        "cost": way.cost,
        "unit": way.unit,
        "moves": [
            {
                "input": move.operand,
                "kind": move.kind,
                "axes": list(move.names),
                "before": show(move.before),
                "after": show(move.after),
                "bytes": move.nbytes,
                "cost": move.cost,
            }
            for move in way.moves
        ],
    }
