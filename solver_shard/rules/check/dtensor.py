"""Hold rules against the strategies that DTensor registers for the same ops, both ways, with numbers as the judge.

    found = compare(table["aten.mm.default"], table)
    found.false       # what DTensor accepts although the numbers are wrong
    found.only_theirs # true, accepted by DTensor, and not in our rule
    found.only_ours   # in our rule, and redistributed by DTensor

DTensor is asked for every combination of operand placements on one mesh axis of two devices, and accepts one where it wants no
operand redistributed. Only its own registrations count, not the decompositions that it may try in their absence.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from solver_shard.errors import InputError
from solver_shard.layout import REDUCTIONS, Layout, P, R, S
from solver_shard.ops.run import DTYPES
from solver_shard.program import Op, Ref
from solver_shard.rules.check import draws_of, follows, operand_names, show
from solver_shard.rules.check.instances import Instance, load_instances, parse_instance, tensor_of
from solver_shard.rules.check.shards import legal_strategies, run_local
from solver_shard.rules.check.truth import CallPlacements, holds
from solver_shard.rules.row import RuleRow
from solver_shard.rules.rule import AxisStrategy
from solver_shard.rules.rulebook import build_rule
from solver_shard.rules.table import RuleTable

DEVICES = 2
MOST = 600
"""Combinations asked per instance; where there are more, those with the fewest operands that are not replicated come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyComparison:
    """One op in both rule sets.

    Attributes:
        registered: how DTensor has it: ``single-dim``, ``strategy``, or empty.
        accepted: combinations that it accepts, over all instances.
        only_theirs, only_ours, false: as in the module's text.
        notes: what was not compared, and why.
    """

    registered: str
    accepted: int = 0
    only_theirs: tuple[str, ...] = ()
    only_ours: tuple[str, ...] = ()
    false: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """The differences, one a line."""
        if not self.registered:
            yield "DTensor has no strategy of its own"
            return
        yield f"DTensor ({self.registered}) accepts {self.accepted} combinations"
        for what, lines in (
            ("true, in DTensor only", self.only_theirs),
            ("in ours only", self.only_ours),
            ("FALSE in DTensor", self.false),
        ):
            yield from (f"  {what}: {line}" for line in lines)
        yield from (f"  {note}" for note in self.notes)


def compare(row: RuleRow, table: RuleTable) -> StrategyComparison:
    """Compare a row with what DTensor has for its op, on the row's instances.

    Raises:
        InputError: this process has a process group already.
    """
    with _propagator() as (propagator, mesh):
        target = _overload(row.op)
        kind = (
            "single-dim"
            if target in propagator.op_single_dim_strategy_funcs
            else "strategy"
            if target in propagator.op_strategy_funcs
            else ""
        )
        if not kind:
            return StrategyComparison(registered="")
        calls = [*load_instances().get(row.op, ()), *(parse_instance(row.op, text, row.file) for text in row.instances)]
        found: dict[str, dict[str, None]] = {name: {} for name in ("theirs", "ours", "false", "notes")}
        accepted = 0
        for call in calls:
            accepted += _compare_instance(row, call, table, propagator, mesh, found)
    return StrategyComparison(
        registered=kind,
        accepted=accepted,
        only_theirs=tuple(found["theirs"]),
        only_ours=tuple(found["ours"]),
        false=tuple(found["false"]),
        notes=tuple(found["notes"]),
    )


def _compare_instance(row: RuleRow, call: Instance, table: RuleTable, propagator: Any, mesh: Any, found: dict[str, dict[str, None]]) -> int:
    draws, random = draws_of(call, 3)
    if random or not call.specs:
        found["notes"]["not compared: " + ("random results" if random else "no operands")] = None
        return 0
    results = [tensor_of(f"y{i}", value) for i, value in enumerate(draws[0].results)]
    rule = build_rule(call.op, call.operands(), results, table)
    ours = [s for (s,) in legal_strategies(rule, [s.shape for s in call.specs], [r.shape for r in results], (DEVICES,))]
    names = operand_names(call.op)
    first = [s.operands for s in ours]
    asked = _ask(call.op, draws[0].operands, draws[0].results, propagator, mesh, first, found["notes"])
    truths = [t.dtype == "bool" for t in results]
    for ins, made in asked.items():
        if any(p.is_partial and rule.reads and not rule.reads[i] for i, p in enumerate(ins)):
            continue  # whatever is pending of an operand that gives only its shape
        # a pending sum of truth values is their or
        outs = tuple(P("max") if truth and p == P("sum") else p for truth, p in zip(truths, made, strict=True))
        if not _true(call.op, draws, ins, outs, rule.alike):
            found["false"][f"{show(names, ins, outs)}, in [{call.text}]"] = None
        elif not any(follows(ins, outs, s.operands, s.results, rule) for s in ours):
            found["theirs"][show(names, ins, outs)] = None
    for strategy in ours:
        if strategy.implementation is None and asked.get(strategy.operands) is None:
            found["ours"][show(names, strategy.operands, strategy.results)] = None
    for strategy in ours:
        if strategy.implementation is not None and not _accepts(asked, strategy):
            found["ours"][f"{show(names, strategy.operands, strategy.results)} ({strategy.name})"] = None
    return len(asked)


def _accepts(asked: dict[CallPlacements, CallPlacements], strategy: AxisStrategy) -> bool:
    return asked.get(strategy.operands) == strategy.results


def _true(op: Op, draws: Sequence[Any], ins: CallPlacements, outs: CallPlacements, alike: Sequence[int]) -> bool:
    held = holds(op, draws, DEVICES, run_local, ins, alike=alike)
    return held is not None and all(i in alike or out in held[i] for i, out in enumerate(outs))


def _ask(
    op: Op,
    operands: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    propagator: Any,
    mesh: Any,
    first: Sequence[CallPlacements],
    notes: dict[str, None],
) -> dict[CallPlacements, CallPlacements]:
    """What DTensor accepts: operand placements to result placements."""
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    meta = [TensorMeta(t.shape, t.stride(), t.dtype) for t in results]
    propagator._propagate_tensor_meta_non_cached = lambda _schema: meta[0] if len(meta) == 1 else tuple(meta)
    accepted: dict[CallPlacements, CallPlacements] = {}
    try:
        for ins in _combinations(operands, first):
            outs = _propagated(op, operands, ins, propagator, mesh, notes)
            if outs is not None and len(outs) == len(results):
                accepted[ins] = outs
    finally:
        del propagator._propagate_tensor_meta_non_cached
    return accepted


def _combinations(operands: Sequence[torch.Tensor], first: Sequence[CallPlacements]) -> Iterator[CallPlacements]:
    options = [
        [
            R,
            *(S(d) for d, size in enumerate(t.shape) if size % DEVICES == 0 and size),
            *(P(r) for r in REDUCTIONS if _reduces(t, r)),
        ]
        for t in operands
    ]
    rest = itertools.islice(itertools.product(*options), 200_000)
    ordered = sorted(rest, key=lambda ins: sum(p != R for p in ins))[:MOST]
    return iter(dict.fromkeys([*first, *ordered]))


def _reduces(tensor: torch.Tensor, reduction: str) -> bool:
    """Whether such numbers can be pending: truth values are no sums, integers no averages, complex numbers have no order."""
    if reduction in ("max", "min"):
        return not tensor.is_complex()
    return tensor.dtype != torch.bool and (reduction == "sum" or tensor.is_floating_point() or tensor.is_complex())


def _propagated(
    op: Op, operands: Sequence[torch.Tensor], ins: CallPlacements, propagator: Any, mesh: Any, notes: dict[str, None]
) -> CallPlacements | None:
    """The result placements of one combination; None where DTensor refuses or redistributes it."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema

    target = _overload(op.name)

    def value(item: Any, name: str = "") -> Any:
        if isinstance(item, Ref):
            t = operands[item.operand]
            placements = tuple(Layout((ins[item.operand],)).to_dtensor((DEVICES,)))
            return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(t.shape, t.stride(), t.dtype))
        if isinstance(item, tuple):
            return [value(part) for part in item]
        return DTYPES[item] if isinstance(item, str) and "dtype" in name and item in DTYPES else item

    arguments = target._schema.arguments
    positional = tuple(value(op.attributes[a.name], a.name) for a in arguments if not a.kwarg_only and a.name in op.attributes)
    keywords = {a.name: value(op.attributes[a.name], a.name) for a in arguments if a.kwarg_only and op.attributes.get(a.name) is not None}
    schema = OpSchema(target, positional, keywords, schema_info=propagator.op_to_schema_info.get(target))
    try:
        made = propagator.propagate_op_sharding_non_cached(schema)
    except Exception as error:  # whatever a registration raises is a refusal
        notes[f"DTensor raises {type(error).__name__} on some combinations"] = None
        return None
    if made.output_spec is None or (made.needs_redistribute and not _unchanged(schema, made.redistribute_schema)):
        return None
    specs = made.output_spec if isinstance(made.output_spec, tuple | list) else (made.output_spec,)
    try:
        return tuple(Layout.from_dtensor(s.placements, (DEVICES,))[0] for s in specs if s is not None)
    except InputError:
        notes["some results have placements that a layout cannot say (masks, strided shards)"] = None
        return None


def _unchanged(asked: Any, wanted: Any) -> bool:
    """Whether only the arguments that are sizes were changed for the shards, and no operand is to be redistributed."""
    return wanted is not None and [s.placements for s in asked.args_spec] == [s.placements for s in wanted.args_spec]


def _overload(op: str) -> Any:
    target: Any = torch.ops
    for part in op.split("."):
        target = getattr(target, part, None)
    return target


@contextmanager
def _propagator() -> Iterator[tuple[Any, Any]]:
    """DTensor's propagator and a mesh of two devices that exist on paper only."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise InputError("rules are compared in a process without a process group; call torch.distributed.destroy_process_group() first")
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=DEVICES)
    try:
        yield DTensor._op_dispatcher.sharding_propagator, DeviceMesh("cpu", list(range(DEVICES)))
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
