"""StableHLO modules: what is read is what is printed, what a graph changes is changed, and bad text is refused with its place."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shardy.all_ops import all_ops_module
from shardy_oracle import Oracle

from solver_shard.errors import InputError
from solver_shard.shardy import stablehlo
from solver_shard.shardy.graph import Direction, GraphOp, GraphValue, OpKind, PropagationGraph, Traits
from solver_shard.shardy.sharding import AxisRef, DimSharding, MeshSpec, TensorSharding
from solver_shard.shardy.stablehlo import StablehloModule, read

EVERYTHING = """
module @m {
  sdy.mesh @mesh = <["a"=2, "b"=4]>
  sdy.mesh @other = <["a"=2, "b"=4], device_ids=[7, 6, 5, 4, 3, 2, 1, 0]>
  func.func public @main(%arg0: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a", "b":(1)2}, {?}p1], replicated={"b":(2)2}>},
      %arg1: tensor<8x4xf32> {jax.buffer_donor = true}, %arg2: !stablehlo.token)
      -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a", ?}, {}]>, jax.result_info = "y"}, tensor<8x4xf32>) {
    %c = stablehlo.constant dense<0> : tensor<i32>
    %0:2 = stablehlo.while(%i = %c, %x = %arg0) : tensor<i32>, tensor<8x4xf32>
     cond {
      %p = stablehlo.compare LT, %i, %c : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %p : tensor<i1>
    } do {
      %t = stablehlo.tanh %x {sdy.sharding = #sdy.sharding_per_value<[<@other, [{"b"}, {?}]>]>} : tensor<8x4xf32>
      stablehlo.return %i, %t : tensor<i32>, tensor<8x4xf32>
    }
    %e = sdy.data_flow_edge %0#1 sharding=<@mesh, [{?}, {"b", ?}]> : tensor<8x4xf32>
    %1 = "stablehlo.case"(%c) ({
      stablehlo.return %arg1 : tensor<8x4xf32>
    }, {
      stablehlo.return %e : tensor<8x4xf32>
    }) {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}, {}], unreduced={"a"}>]>} : (tensor<i32>) -> tensor<8x4xf32>
    %2:2 = stablehlo.optimization_barrier %1, %arg1 : tensor<8x4xf32>, tensor<8x4xf32>
    %3 = sdy.manual_computation(%2#0) in_shardings=[<@mesh, [{"a"}, {?}]>] out_shardings=[<@mesh, [{"a", ?}, {?}]>] manual_axes={"a"}
        (%arg3: tensor<4x4xf32>) {
      %4 = stablehlo.negate %arg3 : tensor<4x4xf32>
      sdy.return %4 : tensor<4x4xf32>
    } : (tensor<8x4xf32>) -> tensor<8x4xf32>
    %5 = sdy.named_computation<"f">(%3) in_shardings=[<@mesh, [{}, {}]>] (%arg4: tensor<8x4xf32>) {
      sdy.return %arg4 : tensor<8x4xf32>
    } : (tensor<8x4xf32>) -> tensor<8x4xf32>
    %6 = sdy.sharding_constraint %5 <@mesh, [{}, {"b"}]> : tensor<8x4xf32>
    %7 = sdy.propagation_barrier %6 allowed_direction=BACKWARD : tensor<8x4xf32>
    sdy.sharding_group %7 group_id=3 : tensor<8x4xf32>
    %8 = sdy.reshard %7 <mesh<["z"=3]>, [{"z"}, {}]> : tensor<8x4xf32>
    %z = stablehlo.constant dense<0.0> : tensor<f32>
    %9 = stablehlo.reduce(%8 init: %z) applies stablehlo.add across dimensions = [1] : (tensor<8x4xf32>, tensor<f32>) -> tensor<8xf32>
    %10 = call @g(%8) : (tensor<8x4xf32>) -> tensor<8x4xf32>
    %11 = stablehlo.custom_call @k(%9) {sdy.sharding_rule = #sdy.op_sharding_rule<([i])->([i, j]) {i=8, j=4}, custom>}
        : (tensor<8xf32>) -> tensor<8x4xf32>
    return %10, %11 : tensor<8x4xf32>, tensor<8x4xf32>
  }
  func.func private @g(%arg0: tensor<8x4xf32>) -> tensor<8x4xf32> {
    return %arg0 : tensor<8x4xf32>
  }
}
"""


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    oracle = Oracle()
    yield oracle
    oracle.close()


def named(graph: PropagationGraph, name: str) -> GraphOp:
    return next(op for op in graph.ops if op.name == name)


def test_a_module_is_printed_as_jaxlib_prints_it(oracle: Oracle) -> None:
    module = StablehloModule.parse(EVERYTHING)
    expected = oracle.run(EVERYTHING).text
    assert module.print() == expected
    assert module.print(module.graph) == expected


@pytest.mark.parametrize("seed", range(12))
def test_random_modules_survive_the_round_trip(seed: int, oracle: Oracle) -> None:
    text = all_ops_module(seed)
    module = StablehloModule.parse(text)
    assert module.print(module.graph) == oracle.run(text).text


@pytest.mark.parametrize("text", [EVERYTHING, *(all_ops_module(seed) for seed in range(100, 112))], ids=range(13))
def test_shardings_that_are_taken_off_and_put_back_give_the_same_text(text: str) -> None:
    annotated = StablehloModule.parse(text)
    graph = annotated.graph
    required = {v for op in graph.ops if op.kind is OpKind.CONSTRAINT or op.kind is OpKind.MANUAL for v in op.results}
    bare = dataclasses.replace(
        graph,
        values=tuple(v if i in required else dataclasses.replace(v, sharding=None) for i, v in enumerate(graph.values)),
        ops=tuple(dataclasses.replace(op, rule=None) for op in graph.ops),
        functions=tuple(dataclasses.replace(f, result_shardings=(None,) * len(f.result_shardings)) for f in graph.functions),
    )
    stripped = annotated.print(bare)
    again = StablehloModule.parse(stripped)
    assert again.graph == bare
    assert again.print(graph) == annotated.print()


def test_what_propagation_sees_of_a_module() -> None:
    graph = StablehloModule.parse(EVERYTHING).graph
    assert graph.meshes["other"] == MeshSpec(axes=(("a", 2), ("b", 4)), device_ids=(7, 6, 5, 4, 3, 2, 1, 0))
    assert graph.values[0] == GraphValue(
        name="%arg0",
        shape=(8, 4),
        dtype="f32",
        sharding=TensorSharding(
            mesh="mesh",
            dims=(DimSharding((AxisRef("a", 1, 2), AxisRef("b", 1, 2))), DimSharding(open=True, priority=1)),
            replicated=(AxisRef("b", 2, 2),),
        ),
    )
    assert graph.values[2].shape is None
    assert [f.name for f in graph.functions] == ["main", "g"]
    assert graph.functions[0].result_shardings[1] is None
    assert named(graph, "stablehlo.while").kind is OpKind.WHILE
    assert len(named(graph, "stablehlo.while").regions) == 2
    assert named(graph, "sdy.propagation_barrier").direction is Direction.BACKWARD
    assert named(graph, "sdy.sharding_group").group == 3
    assert named(graph, "sdy.manual_computation").manual_axes == ("a",)
    assert named(graph, "func.call").callee == "g"
    assert Traits.PURE not in named(graph, "sdy.sharding_constraint").traits
    assert Traits.PURE in named(graph, "stablehlo.tanh").traits
    assert Traits.PURE not in named(graph, "sdy.data_flow_edge").traits
    rule = named(graph, "stablehlo.custom_call@k").rule
    assert rule is not None
    assert rule.custom
    reshard = graph.values[named(graph, "sdy.reshard").results[0]].sharding
    assert reshard is not None
    assert reshard.mesh == MeshSpec(axes=(("z", 3),))
    assert named(graph, "stablehlo.reduce").attributes == {"dimensions": (1,), "body": "stablehlo.add"}


def test_attributes_that_are_not_the_ops_own_are_not_read() -> None:
    line = '%0 = stablehlo.reverse %x, dims = [0] {body = "stablehlo.add", padding = dense<0> : tensor<1000000000x2xi64>} : tensor<8x4xf32>'
    assert StablehloModule.parse(function(line=line)).graph.ops[0].attributes == {"dimensions": (0,)}


def test_erased_and_added_ops_are_erased_and_added() -> None:
    module = StablehloModule.parse(
        'sdy.mesh @mesh = <["a"=2]>\nfunc.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {\n%0 = stablehlo.tanh %x : tensor<8xf32>\n'
        "%1 = stablehlo.negate %0 : tensor<8xf32>\n%2 = stablehlo.sine %0 : tensor<8xf32>\nreturn %2 : tensor<8xf32>\n}"
    )
    graph = module.graph
    (main,) = graph.functions
    tanh, _, sine, end = main.body.ops
    value, op = len(graph.values), len(graph.ops)
    sharding = TensorSharding(mesh="mesh", dims=(DimSharding(open=True),))
    ops = list(graph.ops)
    ops[sine] = dataclasses.replace(ops[sine], operands=(value,))
    ops.append(GraphOp(name="sdy.sharding_constraint", operands=ops[tanh].results, results=(value,), kind=OpKind.CONSTRAINT))
    changed = PropagationGraph(
        values=(*graph.values, GraphValue(name="%new", shape=(8,), dtype="f32", sharding=sharding)),
        ops=tuple(ops),
        functions=(dataclasses.replace(main, body=dataclasses.replace(main.body, ops=(tanh, op, sine, end))),),
        meshes=graph.meshes,
    )
    assert [line.strip() for line in module.print(changed).splitlines()[3:7]] == [
        "%0 = stablehlo.tanh %arg0 : tensor<8xf32>",
        "%1 = sdy.sharding_constraint %0 <@mesh, [{?}]> : tensor<8xf32>",
        "%2 = stablehlo.sine %1 : tensor<8xf32>",
        "return %2 : tensor<8xf32>",
    ]


def function(sharding: str = "@mesh, [{}, {}]", line: str = "", mesh: str = '<["a"=2, "b"=4]>') -> str:
    return (
        f"sdy.mesh @mesh = {mesh}\nfunc.func @main(%x: tensor<8x4xf32>, %y: tensor<8x4xf32> {{sdy.sharding = #sdy.sharding<{sharding}>}})"
        f" {{\n  {line}\n  return\n}}\n"
    )


BAD = [
    (
        function("@nope, [{}, {}]"),
        r'^m.mlir, line 2: .*unknown mesh: @nope \(value %y\); meshes of this module: @mesh = <\["a"=2, "b"=4\]>$',
    ),
    (function('@mesh, [{"a"}, {"a"}]'), r'line 2: .*duplicate axis ref: "a" \(value %y\).*each axis once.*"b"=4'),
    (function('@mesh, [{"z"}, {}]'), r'line 2: .*unknown axis name: "z" \(value %y\); meshes of this module: @mesh'),
    (function("@mesh, [{}]"), r"line 2: .*sharding doesn't match tensor rank: 1 != 2 \(value %y\); write one \{...\} per dim"),
    (function('@mesh, [{"b":(3)2}, {}]'), r"line 2: .*doesn't divide the size of the full axis 4.*\(value %y\)"),
    (function(line="%3 = stablehlo.add %x, %z : tensor<8x4xf32>"), r"line 3: use of undeclared SSA value name \(value %3\)"),
    (function(line="%3 = stablehlo.nothing %x : tensor<8x4xf32>"), r"line 3: custom op 'stablehlo.nothing' is unknown"),
    (
        function(line='%3 = "other.op"(%x) : (tensor<8x4xf32>) -> tensor<8x4xf32>'),
        r"line 3: operation being parsed with an unregistered dialect",
    ),
    (
        function(line="%q = stablehlo.add %x, %y {sdy.sharding = #sdy.sharding_per_value<[<@no, [{}, {}]>]>} : tensor<8x4xf32>"),
        r"line 3: 'stablehlo.add' op result - unknown mesh: @no \(value %q\); meshes of this module: @mesh",
    ),
    (function(mesh='<["a"=2, "a"=4]>'), r'line 1: .*duplicate axis name: "a"'),
    (
        function(line="%3 = stablehlo.custom_call @f(%x) : (tensor<8x4xf32>) -> tensor<?x4xf32>"),
        r"line 3: %0 of .*custom_call is a tensor whose shape",
    ),
    (function(line="%3 = stablehlo.tuple %x : tuple<tensor<8x4xf32>>"), r"line 3: %0 of stablehlo.tuple is a tuple"),
    ("func.func @main() {\n  cf.br ^bb1\n^bb1:\n  return\n}", r"line 1: func.func has 2 blocks; only structured control flow"),
    ("module {\n  module @inner {\n  }\n}", r"line 2: builtin.module lies beside functions"),
    ("hello", r"line 1: custom op 'hello' is unknown"),
    ("func.func @main() {", "line 1: "),
    (
        function(line="%3 = stablehlo.convolution(%x, %y) dim_numbers = [b, f]x[9223372036854775807, i, o]->[b, f] : () -> ()"),
        r"m.mlir: jaxlib cannot read it: .*capacity",
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=range(len(BAD)))
def test_bad_text_is_refused_with_line_and_value(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        StablehloModule.parse(text, "m.mlir")


@pytest.mark.parametrize(
    "text",
    [
        "func.func private @f(" + "tuple<" * 100_000 + "i32" + ">" * 100_000 + ")",
        "module attributes {a = " + "[" * 100_000 + "]" * 100_000 + "} {}",
        "module {\n" * 50_000 + "}\n" * 50_000,
        "module attributes {a = affine_set<(d) : (" + "d >= 0, " * 200 + "d >= 0)>, b = " + "[" * 100_000 + "]" * 100_000 + "} {}",
    ],
    ids=["types", "attributes", "regions", "comparisons"],
)
def test_deep_nesting_is_refused_before_it_takes_the_parser_down(text: str) -> None:
    with pytest.raises(InputError, match=r"m.mlir, line [0-9]+: brackets are nested deeper than 250"):
        StablehloModule.parse(text, "m.mlir")


def chain(kind: str, length: int) -> str:
    """A module whose attribute or type is nested by aliases, each in the one before."""
    sign, first, link = {"attributes": ("#", "1", "[#a{}]"), "types": ("!", "i1", "tuple<!a{}>")}[kind]
    lines = [f"{sign}a0 = {first}", *(f"{sign}a{i + 1} = " + link.format(i) for i in range(length))]
    return "\n".join([*lines, f"module attributes {{sdy.a = {sign}a{length}}} {{}}"])


@pytest.mark.parametrize("kind", ["attributes", "types"])
def test_deep_aliases_are_refused_before_they_take_the_printer_down(kind: str) -> None:
    assert "module attributes" in StablehloModule.parse(chain(kind, 400)).print()
    with pytest.raises(InputError, match=r"m.mlir, line [0-9]+: aliases are nested deeper than 1000"):
        StablehloModule.parse(chain(kind, 100_000), "m.mlir")


@pytest.mark.parametrize("body", ["-" * 100_000 + "d", "d + " * 100_000 + "d", "(" * 100_000 + "d" + ")" * 100_000])
def test_long_affine_maps_are_refused_before_they_take_the_parser_down(body: str) -> None:
    with pytest.raises(InputError, match=r"m.mlir, line 1: an affine map has [0-9,]+ characters, at most 2,000 are read"):
        StablehloModule.parse(f"module attributes {{a = affine_map<(d) -> ({body})>}} {{}}", "m.mlir")


def test_strings_without_an_end_are_read_once() -> None:
    with pytest.raises(InputError, match=r"m\.mlir, line 1"):
        StablehloModule.parse('"\\' * 200_000, "m.mlir")


def test_tensors_of_very_many_dims_are_refused() -> None:
    with pytest.raises(InputError, match=r"m\.mlir, %arg0 is a tensor of 10000 dims; at most 256 are read"):
        StablehloModule.parse(f"func.func @main(%x: tensor<{'1x' * 10_000}f32>) {{ return }}", "m.mlir")


def test_a_message_about_a_long_word_is_short() -> None:
    with pytest.raises(InputError) as caught:
        StablehloModule.parse("x" * 1_000_000, "m.mlir")
    assert len(str(caught.value)) < 1100


def test_arrows_comments_and_strings_are_no_brackets() -> None:
    lines = "".join(f'  %{i} = stablehlo.custom_call @"<(["(%x) : (tensor<f32>) -> tensor<f32> // ((<<\n' for i in range(400))
    module = StablehloModule.parse(f"func.func @main(%x: tensor<f32>) {{\n{lines}  return\n}}")
    assert len(module.graph.ops) == 401


def test_large_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.mlir"
    path.write_text(function())
    assert len(StablehloModule.load(path).graph.functions) == 1
    monkeypatch.setattr(stablehlo, "MAX_BYTES", 20)
    with pytest.raises(InputError, match=r"m.mlir has more than 20 bytes"):
        StablehloModule.load(path)
    with pytest.raises(InputError, match=r"\d+ characters; at most 20 are read"):
        StablehloModule.parse(function())


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_files_that_cannot_be_read(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "m.mlir"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"cannot read .*m.mlir: .*give a StableHLO module as text"):
        StablehloModule.load(path)


def test_without_jaxlib_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read.bindings.cache_clear()
    monkeypatch.setitem(sys.modules, "jaxlib.mlir", None)
    with pytest.raises(InputError, match=r"pip install 'solver-shard\[jax\]'"):
        StablehloModule.parse(function())
    read.bindings.cache_clear()


def test_jaxlib_is_loaded_only_when_a_module_is_read() -> None:
    code = "import sys, solver_shard, solver_shard.shardy.stablehlo; sys.exit(any(m.startswith('jaxlib') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
