"""Every strategy of every rule gives the unsharded numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from rulebook.cases import case, t
from rulebook.execute import execute
from rulebook.instances import FAMILIES

from solver_shard.rulebook import build_rule, load_table
from solver_shard.rulebook.verify import verify

TABLE = load_table()
MESHES = ((2,), (3,), (2, 2))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_strategies_are_sound(family: str) -> None:
    failures, count = [], 0
    for made in FAMILIES[family]():
        operands, results = made.tensors(execute)
        rule = build_rule(made.op, operands, results, TABLE)
        assert rule.source == "table", made.label
        for mesh in MESHES:
            checked = verify(made.op, made.values, rule, execute, result_shapes=[r.shape for r in results], mesh_shape=mesh)
            count += checked.strategies
            failures += [f"{made.label}: {failure}" for failure in checked.failures]
    assert not failures, "\n".join(failures)
    assert count > 0


WRONG = {
    "an activation is not linear": ("relu.default", 'family = "pointwise", linear = "self"'),
    "softmax sees its dim whole": ("_softmax.default", 'family = "pointwise"'),
    "a mean of means, not a sum": ("mean.dim", 'family = "reduce", reduction = "sum"'),
    "rows of a cumulative sum depend on each other": ("cumsum.default", 'family = "along", whole = [-1]'),
    "a product is linear in one factor at a time": ("mul.Tensor", 'family = "pointwise", linear = "self other"'),
    "a factory that counts": ("arange.default", 'family = "factory"'),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_rule_is_caught(what: str, tmp_path: Path) -> None:
    op, row = WRONG[what]
    mine = tmp_path / "wrong.toml"
    mine.write_text(f'"aten.{op}" = {{ {row} }}\n')
    x = t(4, 6)
    made = {
        "relu.default": case("aten.relu.default", self=x),
        "_softmax.default": case("aten._softmax.default", self=x, dim=-1, half_to_float=False),
        "mean.dim": case("aten.mean.dim", self=x, dim=(0,), keepdim=False, dtype=None),
        "cumsum.default": case("aten.cumsum.default", self=x, dim=0, dtype=None),
        "mul.Tensor": case("aten.mul.Tensor", self=x, other=t(4, 6)),
        "arange.default": case("aten.arange.default", end=6),
    }[op]
    operands, results = made.tensors(execute)
    rule = build_rule(made.op, operands, results, load_table([mine]))
    assert verify(made.op, made.values, rule, execute, result_shapes=[r.shape for r in results]).failures
