"""What propagation needs to know about StableHLO, sdy and func ops beside their rules: kinds, traits, side effects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from solver_shard.propagation.graph import Kind, Traits

KINDS: Mapping[str, Kind] = {
    "sdy.sharding_constraint": Kind.CONSTRAINT,
    "sdy.reshard": Kind.CONSTRAINT,
    "sdy.data_flow_edge": Kind.EDGE,
    "sdy.func_data_flow_edge": Kind.FUNC_EDGE,
    "sdy.propagation_barrier": Kind.BARRIER,
    "sdy.sharding_group": Kind.GROUP,
    "sdy.manual_computation": Kind.MANUAL,
    "sdy.named_computation": Kind.NAMED,
    "stablehlo.while": Kind.WHILE,
    "stablehlo.case": Kind.CASE,
    "stablehlo.optimization_barrier": Kind.OPT_BARRIER,
    "func.call": Kind.CALL,
    "func.return": Kind.RETURN,
    "stablehlo.return": Kind.RETURN,
    "sdy.return": Kind.RETURN,
}
"""All other ops are plain."""

OUT_SHARDING = (
    "sdy.all_gather",
    "sdy.all_reduce",
    "sdy.all_slice",
    "sdy.all_to_all",
    "sdy.collective_permute",
    "sdy.reduce_scatter",
    "sdy.replicated_to_unreduced",
    "sdy.sharded_to_unreduced",
)
"""Explicit collectives of the sdy dialect: the sharding of their result is the attribute ``out_sharding``."""

ELEMENTWISE = frozenset({
    "stablehlo.abs", "stablehlo.add", "stablehlo.and", "stablehlo.atan2", "stablehlo.cbrt", "stablehlo.ceil", "stablehlo.clamp",
    "stablehlo.compare", "stablehlo.complex", "stablehlo.convert", "stablehlo.cosine", "stablehlo.count_leading_zeros",
    "stablehlo.divide", "stablehlo.exponential", "stablehlo.exponential_minus_one", "stablehlo.floor", "stablehlo.imag",
    "stablehlo.is_finite", "stablehlo.log", "stablehlo.log_plus_one", "stablehlo.logistic", "stablehlo.maximum", "stablehlo.minimum",
    "stablehlo.multiply", "stablehlo.negate", "stablehlo.not", "stablehlo.or", "stablehlo.popcnt", "stablehlo.power", "stablehlo.real",
    "stablehlo.reduce_precision", "stablehlo.remainder", "stablehlo.round_nearest_afz", "stablehlo.round_nearest_even",
    "stablehlo.rsqrt", "stablehlo.select", "stablehlo.shift_left", "stablehlo.shift_right_arithmetic", "stablehlo.shift_right_logical",
    "stablehlo.sign", "stablehlo.sine", "stablehlo.sqrt", "stablehlo.subtract", "stablehlo.tan", "stablehlo.tanh", "stablehlo.xor",
    "sdy.sharding_constraint", "sdy.reshard", "sdy.propagation_barrier",
})  # fmt: skip

PASS = frozenset(
    {
        "stablehlo.reshape",
        "stablehlo.transpose",
        "sdy.data_flow_edge",
        "sdy.func_data_flow_edge",
        "stablehlo.custom_call@MoveToDevice",
        "stablehlo.custom_call@MoveToHost",
    }
)

PASS_FORWARD = frozenset({"stablehlo.dynamic_slice", "stablehlo.dynamic_update_slice"})

IMPURE = frozenset({
    "func.call", "stablehlo.all_gather", "stablehlo.all_reduce", "stablehlo.all_to_all", "stablehlo.async_done",
    "stablehlo.async_start", "stablehlo.collective_broadcast", "stablehlo.collective_permute", "stablehlo.composite",
    "stablehlo.infeed", "stablehlo.outfeed", "stablehlo.recv", "stablehlo.reduce_scatter", "stablehlo.rng", "stablehlo.send",
    "sdy.data_flow_edge", "sdy.func_data_flow_edge", "sdy.sharding_constraint", "sdy.sharding_group", *OUT_SHARDING,
})  # fmt: skip
"""Ops with side effects: kept though nothing reads their results; custom calls say themselves whether they have any."""

_PURE_DIALECTS = frozenset({"stablehlo", "sdy", "chlo", "mhlo", "arith", "math", "complex"})


def has_side_effect(name: str, attributes: Mapping[str, Any]) -> bool:
    """Whether an op must be kept though nothing reads its results, its regions aside."""
    return name.partition(".")[0] not in _PURE_DIALECTS or name in IMPURE or bool(attributes.get("has_side_effect", False))


def traits(name: str, *, same_shape: bool, pure: bool) -> Traits:
    """The traits of an op; ``same_shape``: its first operand and first result have one shape."""
    found = Traits.NONE
    if name in ELEMENTWISE or (name == "stablehlo.bitcast_convert" and same_shape):
        found |= Traits.ELEMENTWISE
    if name in PASS:
        found |= Traits.PASS
    if name in PASS_FORWARD:
        found |= Traits.PASS_FORWARD
    if name == "stablehlo.broadcast_in_dim":
        found |= Traits.BROADCAST
    if pure:
        found |= Traits.PURE
    return found
