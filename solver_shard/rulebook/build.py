"""From an op and its tensors to its rule.

>>> from solver_shard.program import Op, Ref, Tensor
>>> op = Op(name="aten.mul.Tensor", operands=(0, 1), results=(2,), attributes={"self": Ref(0), "other": Ref(1)})
>>> x = Tensor(name="x", shape=(8, 4), dtype="f32")
>>> rule = build_rule(op, [x, x], [x], load_table())
>>> [s.name for s in rule.strategies() if "avg" not in s.name]
['R', 'a', 'b', 'P(sum):0', 'P(sum):1']
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from solver_shard.errors import RuleError
from solver_shard.program import Op, Program, Tensor
from solver_shard.rulebook.conservative import conservative as conservative_rule
from solver_shard.rulebook.derive import derive
from solver_shard.rulebook.draft import FALLBACK, Call, Draft
from solver_shard.rulebook.lists import is_list_call, list_rule
from solver_shard.rulebook.registered import dtensor_rule
from solver_shard.rulebook.rule import Rule
from solver_shard.rulebook.table import Row, RuleTable, load_table


def build_rule(
    op: Op,
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
    table: RuleTable,
    *,
    conservative: bool = False,
    trust_dtensor: bool = False,
) -> Rule:
    """The rule of one op instance. RuleError where row and op disagree.

    It comes from the op's row (one of the user's replaces a shipped one); for an op on lists, from the rows of its elements; for an
    in-place or out variant, from the row of the op it follows; else from strategies that are registered with DTensor and proven (or
    trusted); else the op is replicated. ``conservative`` leaves out what could carry a sharding to a dim that it does not divide
    (StableHLO rows only; of the others see ``Rulebook``).
    """
    if is_list_call(op):
        return list_rule(op, operands, results, functools.partial(build_rule, table=table))
    row = table.get(op.name)
    if row is not None:
        return _from_row(row, op, operands, results, table, conservative)
    derived = derive(op, operands, results, functools.partial(build_rule, table=table))
    if derived is not None:
        return derived
    return dtensor_rule(op, operands, results, trust=trust_dtensor) or Draft(Call.of(op, operands, results)).rule(
        family=FALLBACK, source=FALLBACK
    )


def _from_row(row: Row, op: Op, operands: Sequence[Tensor], results: Sequence[Tensor], table: RuleTable, conservative: bool) -> Rule:
    call = Call.of(op, operands, results, conservative=conservative)
    try:
        return table.family(row).build(call, row).rule(family=row.family, source="user" if row.user else "table")
    except RuleError as error:
        raise RuleError(f"rules file {row.file}, row {op.name!r}: {error}") from None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        shapes = ", ".join(str(t.shape) for t in operands)
        raise RuleError(
            f"{op.name}: rules file {row.file} gives it family {row.family!r}, which does not fit its arguments "
            f"({', '.join(op.attributes) or 'none'}; operand shapes {shapes or 'none'}): {type(error).__name__}: {error}; correct the row"
        ) from error


class Rulebook:
    """Rules of a program's ops, each distinct signature (op, shapes, dtypes, arguments) built once; equal ones are one.

    Args:
        table: rows; default the shipped ones.
        conservative: drop what could make shards uneven or cut a dim inside (see :mod:`solver_shard.rulebook.conservative`).
        trust_dtensor: take what torch registers with DTensor where it is not proven (see :mod:`solver_shard.rulebook.registered`).
    """

    def __init__(self, table: RuleTable | None = None, *, conservative: bool = False, trust_dtensor: bool = False) -> None:
        self.table = load_table() if table is None else table
        self.conservative = conservative
        self.trust_dtensor = trust_dtensor
        self._rules: dict[Hashable, Rule] = {}
        self._known: dict[Rule, Rule] = {}

    def rule(self, program: Program, op_position: int) -> Rule:
        """The rule of the op at this position; RuleError where its row disagrees with it."""
        op = program.ops[op_position]
        tensors = program.tensors
        key = signature(op, tensors)
        found = self._rules.get(key)
        if found is None:
            operands = [tensors[t] for t in op.operands]
            found = build_rule(op, operands, [tensors[t] for t in op.results], self.table, trust_dtensor=self.trust_dtensor)
            found = conservative_rule(found) if self.conservative else found
            found = self._rules[key] = self._known.setdefault(found, found)
        return found

    def fallbacks(self, program: Program) -> Mapping[str, tuple[int, ...]]:
        """Ops without a rule: name to their positions in the program."""
        found: dict[str, tuple[int, ...]] = {}
        for i, op in enumerate(program.ops):
            if self.rule(program, i).source == FALLBACK:
                found[op.name] = (*found.get(op.name, ()), i)
        return found


def signature(op: Op, tensors: Sequence[Tensor]) -> Hashable:
    """What a rule depends on: name, shapes, dtypes, arguments."""
    shapes = tuple((tensors[t].shape, tensors[t].dtype) for t in op.operands)
    made = tuple((tensors[t].shape, tensors[t].dtype) for t in op.results)
    return op.name, shapes, made, tuple((name, _frozen(value)) for name, value in op.attributes.items())


def _frozen(value: Any) -> Hashable:
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    return value if isinstance(value, Hashable) else repr(value)
