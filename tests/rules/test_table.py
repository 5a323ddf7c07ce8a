"""Rules files are checked when they are read, and every message names file, row, fault and what is legal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rules.cases import case, t
from rules.execute import execute

from solver_shard.errors import RuleError
from solver_shard.program import Op, Ref, Tensor
from solver_shard.rules.families import FAMILIES
from solver_shard.rules.rulebook import build_rule
from solver_shard.rules.table import load_table, parse_rows

BAD_ROWS = {
    'x.y.default = { family = "pointwise" }': "in quotes",
    '"noname" = { family = "pointwise" }': "namespace.name",
    '"x.y.default" = "pointwise"': "a row is",
    '"x.y.default" = { family = "pointwize" }': "unknown family 'pointwize'; legal: add_product, ",
    '"x.y.default" = { linear = "self" }': "needs dims or family, this one has 'linear'",
    '"x.y.default" = { family = "pointwise", whole = "dim" }': "no setting 'whole'; legal: ",
    '"x.y.default" = { family = "along" }': "needs the setting 'whole'",
    '"x.y.default" = { family = "along", whole = 1.5 }': "the argument that holds the dims",
    '"x.y.default" = { family = "pointwise", linear = [] }': "must name arguments",
    '"x.y.default" = { family = "pointwise", linear = "self", passes = "product" }': "sum avg max min",
    '"x.y.default" = { family = "reduce", reduction = "prod" }': "one of sum, avg, max, min",
    '"x.y.default" = { family = "factory", ordered = 1 }': "true or false",
    '"x.y.default" = { dims = "m k, k n" }': "must name the dims",
    '"x.y.default" = { dims = "m m+1 -> m" }': "must name the dims",
    '"x.y.default" = { dims = "m k, k n -> m n", reduce = { k = "mean" } }': "must map factors to reductions",
    '"x.y.default" = { dims = "m k, k n -> m n", reduce = { j = "sum" } }': "names factor 'j'",
    '"x.y.default" = { dims = "m k, k n -> m n", whole = "m j" }': "names factor 'j'",
    '"x.y.default" = { dims = "m m -> m" }': "factor 'm' twice in 'm m'",
    '"x.y.default" = { dims = "m k -> m n" }': "factor 'n' in a result and in no operand",
    '"x.y.default" = { family = "along", whole = [-1, -1] }': "names a dim twice",
    '"x.y.default" = { family = "pointwise", linear = "self self" }': "names an argument twice",
    '"x.y.default" = { family = "pointwise" }\n"x.y.default" = { family = "view" }': 'row "x.y.default" is there twice (line 2)',
    '"x.y.default" = { family = "pointwise" }\n"x::y" = { family = "view" }': "x.y.default has two rows",
    '"x.y.default" = [1': "not valid TOML",
    "a" + ".a" * 100_000 + " = 1": "line 1 has a name of more than 32 parts",
    '\n["a"' + '."a"' * 50_000 + "]": "line 2 has a name of more than 32 parts",
    '"x.y.default" = { a' + " . a" * 50_000 + " = 1 }": "line 1 has a name of more than 32 parts",
}


@pytest.mark.parametrize("text", BAD_ROWS)
def test_a_bad_row_is_refused_on_load(text: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse_rows(text, "mine.toml", FAMILIES)
    message = str(caught.value)
    assert "mine.toml" in message
    assert BAD_ROWS[text] in message or (BAD_ROWS[text] == "in quotes" and "x" in message)


def test_shipped_rows_name_arguments_that_the_ops_have() -> None:
    for op, row in load_table().items():
        if op.startswith("shard."):
            continue
        _, name, overload = op.split(".")
        schema = getattr(getattr(torch.ops.aten, name), overload)._schema
        known = {argument.name for argument in schema.arguments}
        whole = row.get("whole") if row.family == "along" else None
        named = {a for s, _ in row.linear() for a in s} | {*row.names("unread"), row.get("sum_if_zero")}
        named |= {a for term in row.names("monotone") for a in term.removeprefix("-").split("*")}
        named |= {whole} if isinstance(whole, str) else set()
        assert named - {None} <= known, op


def test_a_users_row_replaces_a_shipped_one(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(
        '"aten.mul.Tensor" = { dims = "a b, a b -> a b", whole = "b" }\n'
        '"my.norm.default" = { dims = "... k, k -> ... k, ... 1", whole = "k" }\n'
    )
    table = load_table([mine])
    assert table["aten.mul.Tensor"].file == str(mine)
    x = Tensor(name="x", shape=(4, 6), dtype="f32")
    op = Op(name="aten.mul.Tensor", operands=(0, 1), results=(2,), attributes={"self": Ref(0), "other": Ref(1)})
    assert [s.name for s in build_rule(op, [x, x], [x], table).strategies()] == ["R", "a"]
    norm = Op(name="my.norm.default", operands=(0, 1), results=(2, 3), attributes={"x": Ref(0), "w": Ref(1)})
    scale = Tensor(name="w", shape=(6,), dtype="f32")
    rows = Tensor(name="r", shape=(4, 1), dtype="f32")
    rule = build_rule(norm, [x, scale], [x, rows], table)
    assert [(s.name, s.operands, s.results) for s in rule.strategies()] == [("R", (-1, -1), (-1, -1)), ("...1", (0, -1), (0, 0))]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"none\.toml"):
        load_table([tmp_path / "none.toml"])


def test_an_op_without_a_row_is_replicated() -> None:
    rule = build_rule(Op(name="my.op.default", operands=(0,), results=(1,), attributes={"x": Ref(0)}), [x4x6()], [x4x6()], load_table())
    assert rule.source == "fallback"
    assert [s.name for s in rule.strategies()] == ["R"]


def x4x6() -> Tensor:
    return Tensor(name="x", shape=(4, 6), dtype="f32")


@pytest.mark.parametrize(
    ("row", "operands", "results", "message"),
    [
        ('{ dims = "a b, b -> a b" }', [(4, 6)], [(4, 6)], "describes 2 operands"),
        ('{ dims = "a b -> a" }', [(4, 6)], [(4, 6)], "write one name per dim"),
        ('{ dims = "a b -> b a" }', [(4, 6)], [(4, 6)], "mine.toml, row 'my.op.default': .*factor 'b' has sizes 6 and 4 in shapes"),
        ('{ family = "pointwise" }', [(4, 5)], [(4, 6)], "does not broadcast"),
        ('{ family = "view" }', [(4, 5)], [(4, 6)], "element counts differ"),
        ('{ family = "permute" }', [(4, 6)], [(4, 6)], "sizes do not fit"),
        ('{ family = "expand" }', [(4, 6)], [(6,)], "cannot be expanded"),
        ('{ family = "embedding" }', [(4, 6)], [(6,)], "needs a tensor argument 'weight'"),
        ('{ family = "layer_norm" }', [(4, 6)], [(4, 6)], "needs a tensor argument 'input'"),
        ('{ family = "along", whole = "other" }', [(4, 6)], [(4, 6)], "correct the row"),
    ],
)
def test_a_rule_that_disagrees_with_its_op_is_an_error(
    tmp_path: Path, row: str, operands: list[tuple[int, ...]], results: list[tuple[int, ...]], message: str
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(f'"my.op.default" = {row}\n')
    op = Op(name="my.op.default", operands=tuple(range(len(operands))), results=(8,), attributes={"self": Ref(0)})
    tensors = [[Tensor(name="x", shape=shape, dtype="f32") for shape in shapes] for shapes in (operands, results)]
    with pytest.raises(RuleError, match=message):
        build_rule(op, *tensors, load_table([mine]))


def test_an_equation_that_does_not_fit_its_operands() -> None:
    bad = case("aten.einsum.default", equation="ab,bc->ac", tensors=(t(4, 6), t(5, 8)))
    operands = [Tensor(name="x", shape=tuple(v.shape), dtype="f64") for v in bad.values]
    with pytest.raises(RuleError, match="letter 'b' has sizes 6 and 5"):
        build_rule(bad.op, operands, [Tensor(name="y", shape=(4, 8), dtype="f64")], load_table())


def test_signatures_are_built_once() -> None:
    from solver_shard.program import Program
    from solver_shard.rules.rulebook import Rulebook

    made = case("aten.mul.Tensor", self=t(4, 6), other=t(6))
    operands, results = made.tensors(execute)
    tensors = (*operands, *results, Tensor(name="again", shape=results[0].shape, dtype=results[0].dtype))
    first = Op(name=made.op.name, operands=(0, 1), results=(2,), attributes=made.op.attributes)
    second = Op(name=made.op.name, operands=(0, 1), results=(3,), attributes=made.op.attributes)
    book = Rulebook()
    program = Program(name="p", tensors=tensors, ops=(first, second), outputs=(2,))
    assert book.rule(program, 0) is book.rule(program, 1)
    assert not book.fallbacks(program)


def test_an_installed_package_brings_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "aten.toml").write_text('"aten.mm.default" = { dims = "m k, k n -> m n", whole = "k" }\n')
    monkeypatch.setattr("solver_shard.rules.table.resources.files", lambda package: tmp_path)
    assert list(load_table()) == ["aten.mm.default"]


def test_an_installation_without_its_rows_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solver_shard.rules.table.resources.files", lambda package: tmp_path)
    with pytest.raises(RuleError, match=r"aten.toml are missing from package solver_shard.rules; reinstall"):
        load_table()
