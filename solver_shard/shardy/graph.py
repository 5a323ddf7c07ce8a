"""The graph that propagation works on, neutral between StableHLO modules and traced PyTorch programs.

A ``PropagationGraph`` is an arena: values and ops are named by position, and the bodies of functions and regions list positions of ops. A
pass returns a new Graph in which all positions are kept: what was erased is no longer listed in any body, what was added is
appended. So a frontend can lay the answer over the module it read: ``graph.values[i].sharding`` is the new sharding of value i.

>>> x, y = GraphValue(name="x", shape=(8, 4), dtype="f32"), GraphValue(name="y", shape=(8, 4), dtype="f32")
>>> tanh = GraphOp(name="stablehlo.tanh", operands=(0,), results=(1,), traits=Traits.ELEMENTWISE)
>>> ops = (tanh, GraphOp(name="func.return", operands=(1,)))
>>> main = Function(name="main", body=Block(arguments=(0,), ops=(0, 1)), result_shardings=(None,))
>>> graph = PropagationGraph(values=(x, y), ops=ops, functions=(main,))
>>> graph.walk()
(0, 1)
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from solver_shard.errors import InputError
from solver_shard.rules.draft import factor_name
from solver_shard.rules.rule import FactorDims
from solver_shard.shardy.sharding import MeshSpec, TensorSharding


class OpKind(enum.Enum):
    """What an op is to propagation, beside having (or lacking) a rule.

    PLAIN covers constraints and reshards too: to propagation they are ordinary identity ops with a rule.
    """

    PLAIN = "plain"
    CONSTRAINT = "sharding_constraint"  # sdy.sharding_constraint, sdy.reshard: the sharding is the op's own, single one
    EDGE = "data_flow_edge"  # sdy.data_flow_edge; operand 0 is the owner value
    FUNC_EDGE = "func_data_flow_edge"  # sdy.func_data_flow_edge; operand 0 is a function argument or a call's result
    BARRIER = "propagation_barrier"  # sdy.propagation_barrier; see Op.direction
    GROUP = "sharding_group"  # sdy.sharding_group; see Op.group
    MANUAL = "manual_computation"  # sdy.manual_computation; see Op.manual_axes, in_shardings
    NAMED = "named_computation"  # sdy.named_computation; see Op.in_shardings
    WHILE = "while"  # stablehlo.while; regions (cond, body)
    CASE = "case"  # stablehlo.case and stablehlo.if; operand 0 is the index; one region per branch
    OPT_BARRIER = "optimization_barrier"  # stablehlo.optimization_barrier
    CALL = "call"  # func.call; see Op.callee
    RETURN = "return"  # every terminator: func.return, stablehlo.return, sdy.return


class Traits(enum.Flag):
    """What op-priority and the aggressive strategy ask about an op; several may hold.

    ELEMENTWISE: StableHLO unary and binary element-wise ops, compare, select, clamp, reduce_precision, convert, complex, real,
        imag, is_finite; bitcast_convert of equal shape; sdy sharding_constraint, reshard, propagation_barrier. Not collectives.
    PASS: reshape, transpose, data_flow_edge, func_data_flow_edge, custom calls MoveToDevice and MoveToHost.
    PASS_FORWARD: dynamic_slice, dynamic_update_slice.
    BROADCAST: broadcast_in_dim.
    PURE: may be erased when no result is used (no side effect, not a terminator; an op with regions: all inside are pure). The
        reference keeps sharding_constraint, data_flow_edge, sharding_group, calls, composite, collectives, rng, infeed, and custom
        calls that say has_side_effect; it erases reshard, propagation_barrier, optimization_barrier, sdy.constant.
    """

    NONE = 0
    ELEMENTWISE = enum.auto()
    PASS = enum.auto()
    PASS_FORWARD = enum.auto()
    BROADCAST = enum.auto()
    PURE = enum.auto()


class Direction(enum.IntFlag):
    """Where shardings may flow across an op: from operands to results, back, or both."""

    NONE = 0
    FORWARD = 1
    BACKWARD = 2
    BOTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphValue:
    """A function argument, an op's result or a block argument.

    Attributes:
        name: for messages and reports: ``%0``, ``%arg1``, ``%2#1``, or a traced tensor's name.
        shape: static sizes; None for what is no tensor (tokens), which propagation skips.
        dtype: element type, as text.
        sharding: function argument: its ``sdy.sharding``; op result: its entry of the op's sharding attribute (None on all results
            of an op that has no such attribute), the ``sharding`` of a constraint, reshard or edge, the entry of ``out_shardings``
            of a manual or named computation. Always None on block arguments of ops.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    sharding: TensorSharding | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A body: its arguments (positions of values) and its ops (positions of ops) in program order; the last is the terminator."""

    arguments: tuple[int, ...] = ()
    ops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOp:
    """One op.

    Attributes:
        name: ``stablehlo.add``, ``aten.mm.default``.
        operands, results: positions of values.
        kind, traits: what propagation needs to know about the op.
        regions: single-block regions, in order.
        rule: the ``sdy.sharding_rule`` that the op carries, custom or not; None where the registry is to be asked.
        in_shardings: of a manual or named computation, where it has them.
        manual_axes: of a manual computation, in the order of the text.
        direction: of a propagation barrier.
        group: the id of a sharding group.
        callee: name of the function that is called.
        attributes: everything else that a rule registry may ask for, by the frontend's own names; not read by the passes.
    """

    name: str
    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    kind: OpKind = OpKind.PLAIN
    traits: Traits = Traits.NONE
    regions: tuple[Block, ...] = ()
    rule: ShardingRule | None = None
    in_shardings: tuple[TensorSharding, ...] | None = None
    manual_axes: tuple[str, ...] = ()
    direction: Direction = Direction.BOTH
    group: int | None = None
    callee: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function: its body, and per result the ``sdy.sharding`` of that result (None where it has none)."""

    name: str
    body: Block
    result_shardings: tuple[TensorSharding | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PropagationGraph:
    """Values, ops, functions and mesh symbols; see the module's text for how passes keep positions."""

    values: tuple[GraphValue, ...]
    ops: tuple[GraphOp, ...]
    functions: tuple[Function, ...]
    meshes: Mapping[str, MeshSpec] = field(default_factory=dict)

    def walk(self) -> tuple[int, ...]:
        """Positions of all listed ops, in pre-order (an op before what its regions hold), function after function."""
        found: list[int] = []
        stack = [i for function in reversed(self.functions) for i in reversed(function.body.ops)]
        while stack:
            i = stack.pop()
            found.append(i)
            stack.extend(inner for block in reversed(self.ops[i].regions) for inner in reversed(block.ops))
        return tuple(found)


class Registry(Protocol):
    """Where the rule of an op that carries none comes from; None where there is no rule for it."""

    def __call__(self, graph: PropagationGraph, op: int, *, conservative: bool) -> ShardingRule | None:
        """The rule of ``graph.ops[op]``."""


_SETS = ("reduction", "need_replication", "permutation", "blocked_propagation")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRule:
    """How the dims of an op's operands and results correspond, in the reference's form.

    >>> dims = lambda *factors: tuple((f,) for f in factors)
    >>> print(ShardingRule(sizes=(8, 4, 2), operands=(dims(0, 2), dims(2, 1)), results=(dims(0, 1),), reduction=(2,)))
    #sdy.op_sharding_rule<([i, k], [k, j])->([i, j]) {i=8, j=4, k=2} reduction={k}>

    In the text, factors are i to z, then z_1, z_2, ...; a dim of two factors is ``ij``, the major one first.

    Attributes:
        sizes: of the factors.
        operands, results: per tensor and dim, the positions of its factors, major to minor; never empty for a dim.
        reduction, need_replication, permutation: types of factors, ascending; a factor is in one of them at most, the others pass
            through.
        blocked: factors along which nothing propagates, ascending.
        custom: given by the user; never dropped.
    """

    sizes: tuple[int, ...]
    operands: tuple[FactorDims, ...]
    results: tuple[FactorDims, ...]
    reduction: tuple[int, ...] = ()
    need_replication: tuple[int, ...] = ()
    permutation: tuple[int, ...] = ()
    blocked: tuple[int, ...] = ()
    custom: bool = False

    def passes_through(self, factor: int) -> bool:
        """Whether the factor is of no special type."""
        return factor not in self.reduction and factor not in self.need_replication and factor not in self.permutation

    def __str__(self) -> str:
        sets = zip(_SETS, (self.reduction, self.need_replication, self.permutation, self.blocked), strict=True)
        special = "".join(f" {name}={{{', '.join(map(factor_name, held))}}}" for name, held in sets if held)
        sizes = ", ".join(f"{factor_name(f)}={size}" for f, size in enumerate(self.sizes))
        sizes = f" {{{sizes}}}" if sizes else ""
        tensors = f"({_format(self.operands)})->({_format(self.results)})"
        return f"#sdy.op_sharding_rule<{tensors}{sizes}{special}{', custom' if self.custom else ''}>"


@lru_cache(maxsize=4096)
def identity_rule(shape: tuple[int, ...], operands: int) -> ShardingRule:
    """The rule of an op whose operands and one result correspond dim by dim."""
    dims = tuple((d,) for d in range(len(shape)))
    return ShardingRule(sizes=shape, operands=(dims,) * operands, results=(dims,))


def _format(tensors: Sequence[FactorDims]) -> str:
    return ", ".join("[" + ", ".join("".join(map(factor_name, held)) for held in dims) + "]" for dims in tensors)


def check_rule(rule: ShardingRule, where: str) -> None:
    """Hold a rule against its laws; ``where`` begins the message.

    Raises:
        InputError: a factor that does not exist, is used twice by one tensor, or by none; a dim without factors, or with one of size 1
            beside others; a factor of two types; sets that are not ascending.
    """
    used = set()
    for kind, tensors in (("operand", rule.operands), ("result", rule.results)):
        for position, dims in enumerate(tensors):
            factors = [f for held in dims for f in held]
            if any(not held for held in dims):
                raise InputError(f"{where}: {kind} {position} has a dim without factors; give every dim at least one")
            if any(not 0 <= f < len(rule.sizes) for f in factors):
                raise InputError(f"{where}: {kind} {position} names a factor without a size; sizes are given for {len(rule.sizes)} factors")
            if len(set(factors)) != len(factors):
                raise InputError(f"{where}: {kind} {position} uses a factor twice; a tensor may hold each factor once")
            if any(len(held) > 1 and any(rule.sizes[f] == 1 for f in held) for held in dims):
                raise InputError(f"{where}: {kind} {position} has a factor of size 1 beside others in one dim; drop it from that dim")
            used.update(factors)
    unused = [factor_name(f) for f in range(len(rule.sizes)) if f not in used]
    if unused:
        raise InputError(f"{where}: no tensor uses factor {unused[0]}; drop it from the sizes")
    for name, held in zip(_SETS, (rule.reduction, rule.need_replication, rule.permutation, rule.blocked), strict=True):
        if any(not 0 <= f < len(rule.sizes) for f in held) or any(a >= b for a, b in itertools.pairwise(held)):
            raise InputError(f"{where}: {name} must list factors that exist, in ascending order, each once")
    typed = (*rule.reduction, *rule.need_replication, *rule.permutation)
    if len(set(typed)) != len(typed):
        raise InputError(f"{where}: a factor can be in only one of reduction, need_replication and permutation")
