"""Prove rules right and whole on numbers: every strategy is true, and every true combination is a strategy or follows from one.

    report = check_rules(["aten.mm.default"])
    assert report.passed, report

*Sound*: all strategies of a rule give the unsharded numbers (named implementations with their collectives inside).
*Complete*: every combination of the ground truth follows from a strategy by moves that need no communication, each operand
to what the strategy reads and each result from what it makes; or the row or its family excludes it with a written reason.

Ops that draw random numbers, or leave memory as it was, have no numbers to compare: their results are checked for their shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from solver_shard.costs.layouts import free_move
from solver_shard.errors import RuleError
from solver_shard.layout import Layout, Placement, R
from solver_shard.program import Op, Tensor, refs
from solver_shard.rules.check.instances import DRAWS, Instance, load_instances, parse_instance, tensor_of
from solver_shard.rules.check.shards import NO_KERNEL, close, legal_strategies, run_local, run_whole, verify
from solver_shard.rules.check.truth import BUDGET, FAULTS, CallPlacements, DrawnCall, ground_truth
from solver_shard.rules.row import Exclusion, RuleRow
from solver_shard.rules.rule import Rule
from solver_shard.rules.rulebook import build_rule
from solver_shard.rules.table import RuleTable, load_table

MESHES = (2, 3)
UNSET = frozenset(f"aten.{name}" for name in ("empty.memory_format", "empty_strided.default", "empty_like.default"))
UNSET |= {"aten.new_empty.default", "aten.new_empty_strided.default"}
"""Ops whose results hold whatever was in memory."""
MIXED = "operands pending in different reductions at once, which a linear set cannot say"
"""Excluded everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpReport:
    """What was found of one op.

    Attributes:
        op, family: the row.
        instances: calls that were run.
        strategies: strategies that were run, over instances and numbers of devices.
        combinations: combinations that were run for the ground truth.
        wrong: strategies whose numbers are wrong, or a rule that does not fit its instance.
        missing: true combinations that follow from no strategy.
        excluded: true combinations that are left out, and the reason.
        notes: what was not compared, and why.
    """

    op: str
    family: str
    instances: int = 0
    strategies: int = 0
    combinations: int = 0
    wrong: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    excluded: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return bool(self.instances) and not self.wrong and not self.missing


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """All ops that were asked for."""

    ops: tuple[OpReport, ...] = field(default=())

    @property
    def passed(self) -> bool:
        return all(op.passed for op in self.ops)


def check_rules(
    ops: Sequence[str] = (),
    *,
    table: RuleTable | None = None,
    instances: Mapping[str, Sequence[Instance]] | None = None,
    meshes: Sequence[int] = MESHES,
    draws: int = DRAWS,
    budget: int = BUDGET,
    progress: Callable[[str], None] = lambda _: None,
) -> CheckReport:
    """Check rows of a table, all of them by default.

    Args:
        ops: full names, or parts such as ``mm``, for all overloads of ``aten.mm``.
        instances: calls to run by op name; the shipped ones by default. Those that rows bring are added.
        meshes: numbers of devices.
        draws: sets of operands that every combination has to hold on.
        budget: cuts of the operands that are tried per instance and number of devices.
        progress: called with the name of each op before it is checked.

    Raises:
        RuleError: no row is called so.
    """
    known = load_table() if table is None else table
    calls = load_instances() if instances is None else instances
    found = []
    for op in chosen(ops, known):
        progress(op)
        row = known[op]
        mine = [*calls.get(op, ()), *(parse_instance(op, text, row.file) for text in row.instances)]
        found.append(_check_op(row, mine, known, meshes, draws, budget))
    return CheckReport(ops=tuple(found))


def chosen(ops: Sequence[str], table: RuleTable) -> list[str]:
    """The rows of these names, in the order of the table; RuleError names those that are close."""
    import difflib

    if not ops:
        return list(table)
    kept: set[str] = set()
    for name in ops:
        here = [op for op in table if name in (op, op.partition(".")[2], op.rpartition(".")[0], *op.split(".")[1:2])]
        if not here:
            near = difflib.get_close_matches(name, [*table, *(op.split(".")[1] for op in table)], n=3)
            raise RuleError(f"no row is called {name!r}{'; close: ' + ', '.join(near) if near else ''}; give an op as in 'aten.mm.default'")
        kept.update(here)
    return [op for op in table if op in kept]


@dataclass(slots=True, kw_only=True)
class _Findings:
    """Collects what the instances of one op show; each line once."""

    wrong: dict[str, None] = field(default_factory=dict)
    missing: dict[str, None] = field(default_factory=dict)
    excluded: dict[tuple[str, str], None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    strategies: int = 0
    combinations: int = 0


def _check_op(row: RuleRow, calls: Sequence[Instance], table: RuleTable, meshes: Sequence[int], draws: int, budget: int) -> OpReport:
    found = _Findings()
    for call in calls:
        try:
            _check_instance(row, call, table, meshes, draws, budget, found)
        except RuleError as error:
            found.wrong[f"[{call.text}] {error}"] = None
    return OpReport(
        op=row.op,
        family=row.family,
        instances=len(calls),
        strategies=found.strategies,
        combinations=found.combinations,
        wrong=tuple(found.wrong),
        missing=tuple(found.missing),
        excluded=tuple(found.excluded),
        notes=tuple(found.notes) if calls else ('no instance to check: give the row one, as in instances = ["self=f64[8, 6]"]',),
    )


def _check_instance(
    row: RuleRow, call: Instance, table: RuleTable, meshes: Sequence[int], draws: int, budget: int, found: _Findings
) -> None:
    made, random = draws_of(call, draws)
    results = [tensor_of(f"y{i}", value) for i, value in enumerate(made[0].results)]
    rule = build_rule(call.op, call.operands(), results, table)
    blind = random or row.op in UNSET
    if row.op in NO_KERNEL:
        found.notes["run by a stand-in: no CPU kernel"] = None
    if blind:
        found.notes["uninitialised: shapes only" if row.op in UNSET else "random: shapes only"] = None
    for devices in meshes:
        for turn, draw in enumerate(made[:1] if blind else made):
            checked = verify(
                call.op,
                draw.operands,
                rule,
                _shapes_only if blind else run_local,
                result_shapes=[r.shape for r in results],
                mesh_shape=(devices,),
                seed=turn,
            )
            found.strategies += checked.strategies
            for failure in checked.failures:
                found.wrong[f"{failure.strategy} on {devices} devices: {failure.what}, in [{call.text}]"] = None
        if not blind:
            _completeness(row, call, table, rule, results, made, devices, budget, found)


def draws_of(call: Instance, count: int) -> tuple[list[DrawnCall], bool]:
    """Operands and unsharded results; and whether these are random."""
    made = []
    try:
        for turn in range(count):
            operands = call.draw(turn)
            made.append(DrawnCall(operands=operands, results=run_whole(call.op, operands)))
        again = run_whole(call.op, made[0].operands)
    except FAULTS as error:
        raise RuleError(f"the call does not run: {error}; correct the instance") from None
    return made, not all(close(a, b, 0.0) for a, b in zip(made[0].results, again, strict=True))


def _shapes_only(op: Op, operands: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> Sequence[torch.Tensor]:
    return [torch.zeros_like(result) for result in run_local(op, operands, shapes)]


def _completeness(
    row: RuleRow,
    call: Instance,
    table: RuleTable,
    rule: Rule,
    results: Sequence[Tensor],
    draws: Sequence[DrawnCall],
    devices: int,
    budget: int,
    found: _Findings,
) -> None:
    unread = [i for i, read in enumerate(rule.reads) if not read]
    truth = ground_truth(call.op, draws, devices, run_local, alike=rule.alike, unread=unread, budget=budget)
    found.combinations += truth.tried
    if truth.known_cuts < truth.cuts:
        found.notes[f"{truth.known_cuts} of {truth.cuts} cuts tried on {devices} devices"] = None
    legal = [s for (s,) in legal_strategies(rule, [s.shape for s in call.specs], [r.shape for r in results], (devices,))]
    names = operand_names(call.op)
    exclusions = (*row.excludes, *table.family(row).excludes)
    left = []
    for ins, outs in _strongest(truth.combinations, rule.alike):
        if not any(follows(ins, outs, s.operands, s.results, rule) for s in legal):
            reason = next((e.reason for e in exclusions if _is_excluded(e, names, ins, outs)), None)
            if reason is None and len({p for p in ins if p.is_partial}) > 1:
                reason = MIXED
            if reason is None:
                left.append((ins, outs))
            else:
                found.excluded[show(names, ins, outs), reason] = None
    for ins, outs in left:
        if not any((a, b) != (ins, outs) and follows(ins, outs, a, b, rule) for a, b in left):
            found.missing[f"{show(names, ins, outs)} on {devices} devices, in [{call.text}]"] = None


def _strongest(
    combinations: Mapping[CallPlacements, tuple[frozenset[Placement], ...]], alike: Sequence[int]
) -> Iterator[tuple[CallPlacements, CallPlacements]]:
    """What is true, without what follows from a result that is replicated."""
    for ins, held in combinations.items():
        options = [(R,) if i in alike or R in h else tuple(sorted(h)) for i, h in enumerate(held)]
        for outs in itertools.product(*options):
            yield ins, outs


def follows(ins: CallPlacements, outs: CallPlacements, operands: CallPlacements, results: CallPlacements, rule: Rule) -> bool:
    """Whether a combination is the one of ``operands`` and ``results`` after free moves of its own operands and results.

    An operand of which only the shape is used needs no move.
    """
    read = [pair for i, pair in enumerate(zip(ins, operands, strict=True)) if not rule.reads or rule.reads[i]]
    moves = [*read, *((a, b) for i, (a, b) in enumerate(zip(results, outs, strict=True)) if i not in rule.alike)]
    return all(free_move(Layout((a,)), Layout((b,))) for a, b in moves)


def operand_names(op: Op) -> tuple[str, ...]:
    """The argument that each operand is passed as; lists number their items."""
    names = [""] * len(op.operands)
    for argument, value in op.attributes.items():
        here = [ref.operand for ref in refs(value)]
        for position, operand in enumerate(here):
            names[operand] = names[operand] or (f"{argument}{position}" if isinstance(value, tuple) else argument)
    return tuple(names)


def show(names: Sequence[str], ins: CallPlacements, outs: CallPlacements) -> str:
    """``self=S(0), mat2=R -> S(0)``."""
    left = ", ".join(f"{name}={p}" for name, p in zip(names, ins, strict=True))
    return f"{left} -> {', '.join(map(str, outs))}".strip()


def _is_excluded(exclusion: Exclusion, names: Sequence[str], ins: CallPlacements, outs: CallPlacements) -> bool:
    """Whether all terms of the exclusion hold."""
    tensors = [*zip(names, ins, strict=True), *(("result", p) for p in outs)]

    def holds(term: str) -> bool:
        who, _, what = term.partition("=")
        return any(
            (name == who or name.rstrip("0123456789") == who or (who == "*" and name != "result"))
            and (str(p) == what or str(p)[:1] == what)
            for name, p in tensors
        )

    return all(holds(term) for term in exclusion.what.split())
