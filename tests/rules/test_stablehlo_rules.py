"""Rules of StableHLO ops are the reference implementation's, factor by factor: text by hand, and against its own printed rules."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from shardy_oracle import Oracle
from stablehlo_ops import OPS
from stablehlo_text import Body, module_of, tensor

from solver_shard.errors import RuleError
from solver_shard.program import Op, Ref, Tensor
from solver_shard.rules.rulebook import build_rule
from solver_shard.rules.table import STABLEHLO, load_table
from solver_shard.shardy.passes import populate_rules
from solver_shard.shardy.program import sharding_rule
from solver_shard.shardy.stablehlo import StablehloModule
from solver_shard.shardy.stablehlo.rules import StablehloRules


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    oracle = Oracle()
    yield oracle
    oracle.close()


@pytest.fixture(scope="module")
def rules() -> StablehloRules:
    return StablehloRules()


def compare(text: str, oracle: Oracle, rules: StablehloRules) -> None:
    """Both modes give the reference's module with its rules."""
    module = StablehloModule.parse(text)
    for conservative in (False, True):
        expected = oracle.rules(text, conservative=conservative)
        assert expected.text is not None, expected.error or "the reference aborted"
        assert module.print(populate_rules(module.graph, rules, conservative=conservative)) == expected.text


@pytest.mark.parametrize("name", list(OPS))
def test_every_op_has_the_rule_of_the_reference(name: str, oracle: Oracle, rules: StablehloRules) -> None:
    body = Body(random.Random(name), reuse=0.3)
    for _ in range(8):
        OPS[name](body)
    compare(module_of(body), oracle, rules)


@pytest.mark.parametrize("seed", range(12))
def test_ops_that_read_each_other_have_the_rules_of_the_reference(seed: int, oracle: Oracle, rules: StablehloRules) -> None:
    body = Body(random.Random(seed), reuse=0.8)
    for _ in range(20):
        OPS[body.rng.choice(list(OPS))](body)
    compare(module_of(body), oracle, rules)


WRITTEN = [
    ("stablehlo.add %a, %a : tensor<8x4xf32>", "([i, j], [i, j])->([i, j]) {i=8, j=4}"),
    (
        "stablehlo.dot_general %b, %c, batching_dims = [0] x [0], contracting_dims = [2] x [1] : "
        "(tensor<2x8x4xf32>, tensor<2x4x6xf32>) -> tensor<2x8x6xf32>",
        "([i, j, l], [i, l, k])->([i, j, k]) {i=2, j=8, k=6, l=4} reduction={l}",
    ),
    ("stablehlo.reshape %a : (tensor<8x4xf32>) -> tensor<2x16xf32>", "([ij, k])->([i, jk]) {i=2, j=4, k=4}"),
    ("stablehlo.reshape %a : (tensor<8x4xf32>) -> tensor<1x32xf32>", "([j, k])->([i, jk]) {i=1, j=8, k=4}"),
    ("stablehlo.slice %a [0:8, 0:2] : (tensor<8x4xf32>) -> tensor<8x2xf32>", "([i, j])->([i, j]) {i=8, j=4} permutation={j}"),
    (
        "stablehlo.concatenate %a, %a, dim = 1 : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x8xf32>",
        "([i, j], [i, j])->([i, j]) {i=8, j=8} need_replication={j}",
    ),
    (
        "stablehlo.broadcast_in_dim %a, dims = [0, 2] : (tensor<8x4xf32>) -> tensor<8x3x4xf32>",
        "([i, k])->([i, j, k]) {i=8, j=3, k=4}",
    ),
    ("stablehlo.iota dim = 0 : tensor<8xf32>", None),
    ("stablehlo.custom_call @unknown(%a) : (tensor<8x4xf32>) -> tensor<8x4xf32>", None),
]


@pytest.mark.parametrize(("line", "expected"), WRITTEN)
def test_rules_as_written(line: str, expected: str | None, rules: StablehloRules) -> None:
    arguments = f"%a: {tensor((8, 4))}, %b: {tensor((2, 8, 4))}, %c: {tensor((2, 4, 6))}"
    graph = StablehloModule.parse(f"func.func @main({arguments}) {{\n%0 = {line}\nreturn\n}}").graph
    rule = rules(graph, graph.functions[0].body.ops[0], conservative=False)
    assert rule == (None if expected is None else rule)
    assert expected is None or str(rule) == f"#sdy.op_sharding_rule<{expected}>"


def pair(name: str, x: str, y: str, result: str, dtype: str) -> str:
    return f"{result} = stablehlo.{name} {x}, {y} : tensor<{dtype}>\n"


BODIES = [
    ("f32", 1, pair("add", "%x0", "%y0", "%z", "f32"), "%z"),
    ("f32", 1, pair("add", "%y0", "%x0", "%z", "f32"), "%z"),
    ("f32", 1, pair("add", "%x0", "%x0", "%z", "f32"), "%z"),
    ("f32", 1, pair("add", "%x0", "%y0", "%z", "f32"), "%y0"),
    ("f32", 1, pair("subtract", "%x0", "%y0", "%z", "f32"), "%z"),
    ("f32", 1, pair("subtract", "%x0", "%y0", "%q", "f32") + pair("multiply", "%x0", "%y0", "%z", "f32"), "%z"),
    ("f32", 1, pair("add", "%x0", "%y0", "%q", "f32") + pair("add", "%q", "%y0", "%z", "f32"), "%z"),
    ("i32", 1, pair("or", "%x0", "%y0", "%z", "i32"), "%z"),
    ("i1", 1, pair("or", "%x0", "%y0", "%z", "i1"), "%z"),
    ("i1", 1, pair("and", "%x0", "%y0", "%z", "i1"), "%z"),
    ("i1", 1, pair("xor", "%x0", "%y0", "%z", "i1"), "%z"),
    ("f32", 2, pair("add", "%x0", "%y0", "%z", "f32") + pair("add", "%x1", "%y1", "%w", "f32"), "%z, %w"),
    ("f32", 2, pair("add", "%x0", "%y0", "%z", "f32") + pair("add", "%x1", "%y1", "%w", "f32"), "%w, %z"),
    ("f32", 2, pair("add", "%x0", "%y0", "%z", "f32") + pair("minimum", "%x1", "%y1", "%w", "f32"), "%z, %w"),
    ("f32", 2, pair("add", "%x0", "%y0", "%z", "f32") + pair("add", "%x1", "%y1", "%w", "f32"), "%z, %y1"),
]


@pytest.mark.parametrize(("dtype", "count", "body", "returned"), BODIES)
def test_a_scatter_sums_where_its_body_is_a_reduction(
    dtype: str, count: int, body: str, returned: str, oracle: Oracle, rules: StablehloRules
) -> None:
    scalar, source, update = tensor((), dtype), tensor((4,), dtype), tensor((2,), dtype)
    arguments = ", ".join(f"%{side}{i}: {scalar}" for side in "xy" for i in range(count))
    text = (
        f"func.func @main(%a: {source}, %i: tensor<2x1xi32>, %u: {update}) {{\n"
        f'%0:{count} = "stablehlo.scatter"({", ".join(["%a"] * count)}, %i, {", ".join(["%u"] * count)}) '
        "<{scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], "
        f"index_vector_dim = 1>}}> ({{\n^bb0({arguments}):\n{body}stablehlo.return {returned} : {', '.join([scalar] * count)}\n}})"
        f" : ({', '.join([source] * count)}, tensor<2x1xi32>, {', '.join([update] * count)}) -> ({', '.join([source] * count)})\n"
        "return\n}"
    )
    compare(text, oracle, rules)


CALLS = [
    "%0 = stablehlo.custom_call @MoveToHost(%a, %t) : (tensor<8x4xf32>, !stablehlo.token) -> !stablehlo.token",
    "%0 = stablehlo.custom_call @MoveToHost(%v, %f) : (tensor<8xf32>, tensor<f32>) -> tensor<8x4xf32>",
    "%0:2 = stablehlo.custom_call @X64SplitLow(%a) : (tensor<8x4xf32>) -> (tensor<8x4xf32>, tensor<8xf32>)",
    "%0 = stablehlo.custom_call @X64Combine(%v, %f) : (tensor<8xf32>, tensor<f32>) -> tensor<8xf64>",
    "%0 = stablehlo.custom_call @mhlo.topk(%v) : (tensor<8xf32>) -> tensor<8x4xf32>",
    "%0 = stablehlo.custom_call @Eigh(%a) : (tensor<8x4xf32>) -> tensor<8x4xf32>",
    "%0:2 = stablehlo.custom_call @Qr(%a) : (tensor<8x4xf32>) -> (tensor<8x4xf32>, tensor<8x4xf32>)",
    "%0 = stablehlo.custom_call @ApproxTopK(%a, %a) : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x2xf32>",
]


@pytest.mark.parametrize("line", CALLS)
def test_unusual_custom_calls_have_the_rule_of_the_reference(line: str, oracle: Oracle, rules: StablehloRules) -> None:
    arguments = "%a: tensor<8x4xf32>, %v: tensor<8xf32>, %f: tensor<f32>, %t: !stablehlo.token"
    compare(f"func.func @main({arguments}) {{\n{line}\nreturn\n}}", oracle, rules)


def test_a_call_without_results_has_no_rule(rules: StablehloRules) -> None:
    """The reference aborts on it."""
    text = "func.func @main(%a: tensor<8xf32>) {\nstablehlo.custom_call @annotate_device_placement(%a) : (tensor<8xf32>) -> ()\nreturn\n}"
    assert rules(StablehloModule.parse(text).graph, 0, conservative=False) is None


def test_every_op_of_the_dialects_has_a_row() -> None:
    dialects = [importlib.import_module(f"jaxlib.mlir.dialects._{name}_ops_gen") for name in ("stablehlo", "sdy")]
    names = {found.OPERATION_NAME for dialect in dialects for found in vars(dialect).values() if hasattr(found, "OPERATION_NAME")}
    table = load_table(shipped=STABLEHLO)
    assert names - set(table) == {"stablehlo.custom_call", "stablehlo.return", "sdy.return", "sdy.mesh"}
    assert {name for name in table if "@" not in name} <= names


def test_ops_without_a_row_are_reported_once() -> None:
    text = (
        "func.func @main(%a: tensor<8xf32>) {\n%0 = stablehlo.custom_call @mine(%a) : (tensor<8xf32>) -> tensor<8xf32>\n"
        "%1 = stablehlo.custom_call @mine(%0) : (tensor<8xf32>) -> tensor<8xf32>\n%2 = stablehlo.tanh %1 : tensor<8xf32>\nreturn\n}"
    )
    rules = StablehloRules()
    populate_rules(StablehloModule.parse(text).graph, rules)
    assert rules.missing == ["stablehlo.custom_call@mine"]


def test_a_row_of_the_users_own_gives_a_custom_call_its_rule(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('"stablehlo.custom_call@mine" = { dims = "m k, k n -> m n", reduce = { k = "sum" } }\n')
    text = (
        "func.func @main(%a: tensor<8x4xf32>, %b: tensor<4x1xf32>) {\n"
        "%0 = stablehlo.custom_call @mine(%a, %b) : (tensor<8x4xf32>, tensor<4x1xf32>) -> tensor<8x1xf32>\nreturn\n}"
    )
    graph = StablehloModule.parse(text).graph
    rule = StablehloRules(load_table([mine], shipped=STABLEHLO))(graph, 0, conservative=False)
    assert str(rule) == "#sdy.op_sharding_rule<([i, j], [j, k])->([i, l]) {i=8, j=4, k=1, l=1} reduction={j}>"


@pytest.mark.parametrize(
    ("target", "operand", "result", "message"),
    [
        ("Eigh", "tensor<4xf32>", "tensor<4xf32>", r"stablehlo.custom_call@Eigh.*operand shapes \(4,\)"),
        ("Qr", "tensor<4x4xf32>", "tensor<4x4xf32>", r"stablehlo.custom_call@Qr.*operand shapes \(4, 4\)"),
        ("MoveToHost", "tensor<4x4xf32>", "tensor<4xf32>", r"MoveToHost goes dim by dim.*\(4, 4\), \(4,\)"),
    ],
)
def test_a_call_that_does_not_fit_its_row_is_an_error(target: str, operand: str, result: str, message: str, rules: StablehloRules) -> None:
    """The reference aborts or refuses."""
    text = f"func.func @main(%a: {operand}) {{\n%0 = stablehlo.custom_call @{target}(%a) : ({operand}) -> {result}\nreturn\n}}"
    graph = StablehloModule.parse(text).graph
    with pytest.raises(RuleError, match=message):
        rules(graph, 0, conservative=False)


@pytest.mark.parametrize(
    ("op", "shapes", "result", "expected"),
    [
        ("aten.mm.default", {"self": (8, 4), "mat2": (4, 2)}, (8, 2), "([i, j], [j, k])->([i, k]) {i=8, j=4, k=2} reduction={j}"),
        ("aten.mul.Tensor", {"self": (8, 1), "other": (8, 1)}, (8, 1), "([i, j], [i, k])->([i, l]) {i=8, j=1, k=1, l=1}"),
        ("aten.unknown.default", {"self": (8,)}, (8,), None),
    ],
)
def test_rules_of_aten_ops_read_as_sharding_rules(
    op: str, shapes: dict[str, tuple[int, ...]], result: tuple[int, ...], expected: str | None
) -> None:
    """Dims of size 1 that hold no factor get one of their own; an op without a row does not propagate."""
    call = Op(name=op, operands=tuple(range(len(shapes))), results=(9,), attributes={name: Ref(i) for i, name in enumerate(shapes)})
    operands = [Tensor(name=name, shape=shape, dtype="f32") for name, shape in shapes.items()]
    rule = sharding_rule(build_rule(call, operands, [Tensor(name="out", shape=result, dtype="f32")], load_table()))
    assert (rule and str(rule)) == (expected and f"#sdy.op_sharding_rule<{expected}>")


def test_what_an_aten_op_must_see_whole_needs_replication() -> None:
    call = Op(name="aten.sort.default", operands=(0,), results=(1, 2), attributes={"self": Ref(0), "dim": -1, "descending": False})
    x = Tensor(name="x", shape=(8, 4), dtype="f32")
    rule = sharding_rule(build_rule(call, [x], [x, x], load_table()))
    assert rule is not None
    assert rule.need_replication


def test_a_stablehlo_rule_has_the_strategies_of_its_factors() -> None:
    """One rule format serves propagation and the solver: shards that need their neighbours are no strategy."""
    x, y = Tensor(name="x", shape=(8, 4), dtype="f32"), Tensor(name="y", shape=(4, 2), dtype="f32")
    numbers = {"lhs_contracting_dimensions": (1,), "rhs_contracting_dimensions": (0,)}
    call = Op(name="stablehlo.dot_general", operands=(0, 1), results=(2,), attributes={"operands": (Ref(0), Ref(1)), **numbers})
    table = load_table(shipped=STABLEHLO)
    found = build_rule(call, [x, y], [Tensor(name="z", shape=(8, 2), dtype="f32")], table).strategies()
    assert [(s.name, *map(str, s.operands), *map(str, s.results)) for s in found] == [
        ("R", "R", "R", "R"),
        ("i", "S(0)", "R", "S(0)"),
        ("j", "R", "S(1)", "S(1)"),
        ("k", "S(1)", "S(0)", "P(sum)"),
    ]
    reverse = Op(name="stablehlo.reverse", operands=(0,), results=(1,), attributes={"operands": (Ref(0),), "dimensions": (1,)})
    assert [s.name for s in build_rule(reverse, [x], [x], table).strategies()] == ["R", "i"]
