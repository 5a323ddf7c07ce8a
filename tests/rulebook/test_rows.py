"""Rows without a case of their own: arguments are made up from the op's schema, and every strategy is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rulebook.cases import Case, case, flags, ints, pos
from rulebook.execute import aten
from rulebook.instances import FAMILIES

from solver_shard.program import Op
from solver_shard.rulebook import build_rule, load_table
from solver_shard.rulebook.lists import is_list_op
from solver_shard.rulebook.verify import verify

TABLE = load_table()
COVERED = {made.op.name for cases in FAMILIES.values() for made in cases()}
RANDOM = {"aten.bernoulli.default", "aten.bernoulli.p", "aten.rand_like.default", "aten.randn_like.default"}
COMPLEX = {"aten.imag.default", "aten._conj.default", "aten.polar.default", "aten.complex.default"}
ROWS = sorted(
    op
    for op, row in TABLE.items()
    if row.family in ("pointwise", "along", "reduce") and op not in COVERED | RANDOM | COMPLEX and not is_list_op(op)
)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "aten.clamp.default": {"min": 0.1, "max": 0.2},
    "aten.masked_fill.Tensor": {"mask": flags(4, 6), "value": pos()},
    "aten.div.Tensor_mode": {"rounding_mode": "floor"},
    "aten.div.Scalar_mode": {"rounding_mode": "floor"},
}
MAKERS: Sequence[Callable[[], torch.Tensor]] = (lambda: pos(4, 6) * 0.3, lambda: ints(3, 4, 6), lambda: flags(4, 6))


def execute(op: Op, operands: Sequence[torch.Tensor], _shapes: Any) -> Sequence[torch.Tensor]:
    return aten(op, operands, None)


def made_up(op: str, tensor: Callable[[], torch.Tensor]) -> Case:
    """A call with tensors from ``tensor``, default arguments, dim 1 and the number 2."""
    _, name, overload = op.split(".")
    values: dict[str, Any] = {}
    for argument in getattr(getattr(torch.ops.aten, name), overload)._schema.arguments:
        kind = str(argument.type)
        if argument.name in ARGUMENTS.get(op, {}):
            values[argument.name] = ARGUMENTS[op][argument.name]
        elif kind in ("Tensor", "Optional[Tensor]"):
            values[argument.name] = tensor()
        elif argument.has_default_value():
            values[argument.name] = argument.default_value
        else:
            by_kind = {"List[Tensor]": (tensor(), tensor()), "List[int]": (1,), "Optional[List[int]]": (1,), "bool": False}
            values[argument.name] = 1 if argument.name == "dim" and kind == "int" else by_kind.get(kind, 1 if kind == "int" else 2)
    return case(op, **values)


@pytest.mark.parametrize("op", ROWS)
@pytest.mark.filterwarnings("ignore")
def test_row(op: str) -> None:
    problems = []
    for tensor in MAKERS:
        made = made_up(op, tensor)
        try:
            operands, results = made.tensors(execute)
        except (RuntimeError, IndexError, NotImplementedError) as error:
            problems.append(str(error)[:80])
            continue
        rule = build_rule(made.op, operands, results, TABLE)
        for mesh in ((2,), (3,), (2, 2)):
            checked = verify(made.op, made.values, rule, execute, result_shapes=[r.shape for r in results], mesh_shape=mesh)
            assert not checked.failures, checked.failures[0]
        return
    pytest.fail(f"no made-up arguments run: {problems}")
