"""Strategies that are registered with DTensor, as rules: of custom ops, and of ops of torch that have no row here.

Two kinds of registrations list what one mesh axis may do to an op, placements of results then of operands, and are read as they
are: ``register_single_dim_strategy`` and ``register_sharding``. The other strategies of torch's own follow given operands: they are
asked for every combination of placements, at most ``MOST`` of them, on an axis of two devices. A placeholder for any kind of shard is
a plain shard.

Whether shards may be uneven is part of the registration; where it says nothing, only even ones are legal.

Some registrations of torch's own are wrong, so none is used on its word: ``rules/registered.toml`` lists those that were run on numbers,
as rows are, and never failed (see ``experiments/registered.py``). What is not listed is left out, unless the caller trusts DTensor.
Registrations of others, for ops of their own or with ``register_sharding``, are theirs to answer for, as rows of a rules file are; the
source of such rules says that nobody proved them.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from solver_shard.errors import RuleError
from solver_shard.layout import REDUCTIONS, P, Placement, R, S
from solver_shard.program import Op, Ref, Tensor, refs
from solver_shard.rules.rule import AxisStrategy, Factor, FactorDims, Rule
from solver_shard.rules.table import shipped_file
from solver_shard.rules.variants import overload_of

MOST = 500
"""Combinations of operand placements that a strategy is asked for."""
DTENSOR = "dtensor"
"""``Rule.source`` and ``Rule.family`` of these rules."""
UNPROVEN = "unproven"
"""``Rule.source`` of those that nobody ran on numbers."""
PROVEN = "registered.toml"
"""The shipped list: torch's version, and op to the ranks of its operands and results to strategies."""


def dtensor_rule(op: Op, operands: Sequence[Tensor], results: Sequence[Tensor], *, trust: bool = False) -> Rule | None:
    """The rule of an op whose strategies are registered with DTensor; None where none are, or all are to replicate everything.

    Args:
        trust: take strategies of torch's own that are not proven, too.

    Raises:
        RuleError: the registration does not fit the call, with what to correct.
    """
    overload = overload_of(op.name)
    listed = None if overload is None else _registered(overload)
    if listed is None:
        return None
    strategy, uneven, own = listed
    known = frozenset() if own else proven(op, operands, results)
    try:
        made = strategy(op, operands)
    except Exception as error:
        raise RuleError(
            f"{op.name}: the sharding strategy registered for it with DTensor failed on operands of shapes "
            f"{', '.join(str(t.shape) for t in operands) or 'none'}: {type(error).__name__}: {error}; correct the registration, or give "
            "the op a row in a rules file"
        ) from error
    factors: list[Factor] = []
    strategies = [AxisStrategy(name="R", operands=(R,) * len(operands), results=(R,) * len(results))]
    for outs, ins in made:
        found = _strategy(op, outs, ins, operands, results, uneven, len(factors))
        if found is None or any((s.operands, s.results) == (found[0].operands, found[0].results) for s in strategies):
            continue
        if not (own or trust or found[0].name in known):
            continue
        strategies.append(found[0])
        factors.extend(found[1])
    if len(strategies) == 1:
        return None
    sure = not own and all(s.name in known for s in strategies[1:])
    dims: list[FactorDims] = [((),) * len(t.shape) for t in (*operands, *results)]
    return Rule(
        factors=tuple(factors),
        operands=tuple(dims[: len(operands)]),
        results=tuple(dims[len(operands) :]),
        explicit=tuple(strategies),
        flops=max((t.numel for t in (*operands, *results)), default=0),
        source=DTENSOR if sure else UNPROVEN,
        family=DTENSOR,
    )


def proven(op: Op, operands: Sequence[Tensor], results: Sequence[Tensor]) -> frozenset[str]:
    """Names of the registered strategies that are proven for calls like this.

    Which order and which sum an op keeps may depend on a number in the call, for which a list cannot speak: what is pending passes
    only where there is none.
    """
    listed = _proven().get(op.name, {}).get(ranks_of(operands, results), frozenset())
    numbers = [value for value in op.attributes.values() if isinstance(value, int | float) and not isinstance(value, bool)]
    fractions = any(isinstance(value, float) for value in numbers)
    return frozenset(
        name
        for name in listed
        if not (numbers and re.search(r"<-.*P\((max|min)\)", name)) and not (fractions and re.search(r"<-.*P\(", name))
    )


def ranks_of(operands: Sequence[Tensor], results: Sequence[Tensor]) -> str:
    """Numbers of dims, as the list of proven strategies has them: ``2,3->3``."""
    return "->".join(",".join(str(len(t.shape)) for t in tensors) for tensors in (operands, results))


@functools.cache
def _proven() -> Mapping[str, Mapping[str, frozenset[str]]]:
    """The shipped list; nothing of it where another torch is installed than the one it was made with."""
    import torch

    data = tomllib.loads(shipped_file(PROVEN).read_text(encoding="utf-8"))
    if not torch.__version__.startswith(f"{data['torch']}."):
        return {}
    return {op: {ranks: frozenset(names) for ranks, names in found.items()} for op, found in data["proven"].items()}


Listed = Iterator[tuple[Sequence[Any], Sequence[Any]]]
"""Placements of the results, and of the operands in the order of the arguments; None for an argument that is no tensor."""


def _registered(overload: Any) -> tuple[Callable[[Op, Sequence[Tensor]], Listed], bool, bool] | None:
    """How to list an op's strategies, whether their shards may be uneven, and whether they are the user's and not torch's own.

    ``register_sharding`` wins: it is the user's.
    """
    from torch.distributed.tensor import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    function = propagator.op_strategy_funcs.get(overload)
    if isinstance(function, functools.partial) and function.func.__qualname__ == "register_sharding.<locals>.custom_strategy":
        return functools.partial(_from_sharding, overload, function.args[0]), False, True
    own = overload.namespace not in ("aten", "prims")
    info = propagator.op_single_dim_strategy_funcs.get(overload)
    if info is None and function is not None:
        return functools.partial(_from_following, overload, function, propagator.op_to_schema_info.get(overload)), False, own
    if info is None:
        return None
    return functools.partial(_from_single, overload, info), bool(getattr(info, "allow_uneven_sharding", False)), own


def _from_single(overload: Any, info: Any, op: Op, operands: Sequence[Tensor]) -> Listed:
    """``register_single_dim_strategy``: rows of results, then tensor arguments."""
    args, kwargs = _arguments(overload, op, lambda ref: _meta(operands[ref.operand]))
    returns = sum("Tensor" in str(r.type) for r in overload._schema.returns)
    for row in info.func(overload, args, kwargs):
        yield [place for place in row[:returns] if place is not None], list(row[returns:])


def _from_sharding(overload: Any, function: Callable[..., Any], op: Op, operands: Sequence[Tensor]) -> Listed:
    """``register_sharding``: pairs of placements of the results and of all arguments."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)  # never used to communicate
    args, kwargs = _arguments(overload, op, lambda ref: DTensorSpec(mesh, (Replicate(),), tensor_meta=_meta(operands[ref.operand])))
    for outs, ins in function(*args, **kwargs):
        yield [place for place in outs if place is not None], [place for place in ins if place is not None]


def _from_following(overload: Any, function: Callable[..., Any], info: Any, op: Op, operands: Sequence[Tensor]) -> Listed:
    """A strategy function that follows given operands: all that it answers to any of their placements."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy

    slots = [ref.operand for value in op.attributes.values() for ref in refs(value)]
    returns = sum("Tensor" in str(r.type) for r in overload._schema.returns)
    if not slots:
        return
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)  # never used to communicate
    options = []
    for tensor in operands:
        cuts = [Shard(d) for d, size in enumerate(tensor.shape) if size % 2 == 0 and size]
        options.append([Replicate(), *cuts, *(Partial(reduction) for reduction in REDUCTIONS)])
    seen = set()
    for places in itertools.islice(itertools.product(*options), MOST):
        specs = [DTensorSpec(mesh, (place,), tensor_meta=_meta(tensor)) for place, tensor in zip(places, operands, strict=True)]
        args, kwargs = _arguments(overload, op, lambda ref, specs=specs: OpStrategy([OpSpec(specs[ref.operand])]))  # type: ignore[misc]
        try:
            answer = function(OpSchema(overload, args, kwargs, schema_info=info))
        except Exception:  # whatever a strategy raises refuses this combination
            continue
        for strategy in getattr(answer, "strategies", ()):
            made = strategy.output_specs if isinstance(strategy.output_specs, tuple | list) else (strategy.output_specs,) * returns
            found = [s.placements[0] for s in made if s is not None], [s.placements[0] for s in strategy.input_specs or ()]
            if len(found[1]) == len(slots) and str(found) not in seen:
                seen.add(str(found))
                yield found


def _strategy(
    op: Op,
    outs: Sequence[Any],
    ins: Sequence[Any],
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
    uneven: bool,
    factor: int,
) -> tuple[AxisStrategy, list[Factor]] | None:
    """The strategy, and the factor that says how often it can cut; None for placements that we do not have."""
    slots = [ref.operand for value in op.attributes.values() for ref in refs(value)]
    made = op.attributes.get("output_mask")
    if made is not None and len(made) == len(outs):  # registered for all that the op can give
        outs = [out for out, asked in zip(outs, made, strict=True) if asked]
    if len(ins) != len(slots) or len(outs) != len(results):
        raise RuleError(
            f"{op.name}: a sharding strategy registered for it with DTensor has {len(outs)} results and {len(ins)} operands, the call has "
            f"{len(results)} and {len(slots)}; correct the registration"
        )
    places: list[Placement | None] = [None] * len(operands)
    for slot, found in zip(slots, ins, strict=True):
        place = _placement(found)
        if place is None or places[slot] not in (None, place):
            return None
        places[slot] = place
    made = [_placement(found) for found in outs]
    if any(place is None for place in (*places, *made)):
        return None
    chosen = [place for place in (*places, *made) if place is not None]
    sizes = []
    for place, tensor in zip(chosen, (*operands, *results), strict=True):
        if place.is_shard:
            if place.dim >= len(tensor.shape):
                raise RuleError(
                    f"{op.name}: a sharding strategy registered for it with DTensor cuts dim {place.dim} of a tensor of shape "
                    f"{tensor.shape}; correct the registration"
                )
            sizes.append(tensor.shape[place.dim])
    name = ",".join(map(str, chosen[len(operands) :])) + "<-" + ",".join(map(str, chosen[: len(operands)]))
    size = min(sizes, default=0) if uneven else math.gcd(*sizes)
    strategy = AxisStrategy(
        name=name,
        operands=tuple(chosen[: len(operands)]),
        results=tuple(chosen[len(operands) :]),
        factor=factor if sizes else None,
    )
    return strategy, [Factor(name=name, size=size, even=not uneven)] if sizes else []


def _placement(found: Any) -> Placement | None:
    """Ours for one of DTensor's; None for strided shards, masked and other partials."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if isinstance(found, Replicate):
        return R
    if type(found) is Partial and found.reduce_op in REDUCTIONS:
        return P(found.reduce_op)
    if type(found) is Shard or type(found).__name__ == "_ShardingPlaceholder":
        return S(found.dim)
    return None


def _meta(tensor: Tensor) -> Any:
    import torch
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    from solver_shard.ops.run import DTYPES

    strides = [math.prod(tensor.shape[d + 1 :]) for d in range(len(tensor.shape))]
    return TensorMeta(torch.Size(tensor.shape), tuple(strides), DTYPES[tensor.dtype])


def _arguments(overload: Any, op: Op, tensor: Callable[[Ref], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments as the schema passes them, tensors as ``tensor`` gives them."""
    from solver_shard.ops.run import DTYPES

    def value(name: str, item: Any) -> Any:
        if isinstance(item, Ref):
            return tensor(item)
        if isinstance(item, tuple | list):
            return [value("", x) for x in item]
        return DTYPES[item] if isinstance(item, str) and "dtype" in name and item in DTYPES else item

    found: Mapping[str, Any] = {name: value(name, item) for name, item in op.attributes.items()}
    schema = overload._schema.arguments
    args = [found.get(a.name, a.default_value if a.has_default_value() else None) for a in schema if not a.kwarg_only]
    return tuple(args), {a.name: found[a.name] for a in schema if a.kwarg_only and a.name in found}
