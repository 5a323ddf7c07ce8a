"""Data-flow edges: where they are put, what they start with, and what their owners keep of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shardy.all_ops import all_ops_module
from shardy.random_modules import random_module
from shardy_oracle import Oracle

from solver_shard.errors import InputError
from solver_shard.shardy.data_flow import add_edges, sink_edges
from solver_shard.shardy.passes import PassName, propagate
from solver_shard.shardy.stablehlo import StablehloModule
from solver_shard.shardy.stablehlo.rules import StablehloRules

SINK = "func.func(sdy-sink-data-flow-edges)"
LOOP = """
sdy.mesh @mesh = <["a"=2, "b"=4]>
func.func @main(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"b"}, {}]>}, %t: !stablehlo.token) -> tensor<8x4xf32> {
  %c = stablehlo.constant dense<0> : tensor<i32>
  %0:2 = stablehlo.while(%i = %c, %y = %x) : tensor<i32>, tensor<8x4xf32>
   cond {
    %p = stablehlo.compare LT, %i, %c : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
    %z = stablehlo.tanh %y : tensor<8x4xf32>
    stablehlo.return %i, %z : tensor<i32>, tensor<8x4xf32>
  }
  %1:2 = stablehlo.optimization_barrier %0#1, %t : tensor<8x4xf32>, !stablehlo.token
  %2 = sdy.manual_computation(%1#0) in_shardings=[<@mesh, [{"a", ?}, {}]>] out_shardings=[<@mesh, [{"a", ?}, {?}]>] manual_axes={"a"}
      (%l: tensor<4x4xf32>) {
    %s = stablehlo.sine %l : tensor<4x4xf32>
    sdy.return %s : tensor<4x4xf32>
  } : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %2 : tensor<8x4xf32>
}
"""


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    oracle = Oracle()
    yield oracle
    oracle.close()


def lines(text: str, word: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if word in line]


def test_every_tensor_that_control_flow_hands_on_gets_an_edge() -> None:
    module = StablehloModule.parse(LOOP)
    text = module.print(add_edges(module.graph))
    assert lines(text, "data_flow_edge") == [
        "%1 = sdy.data_flow_edge %0#0 : tensor<i32>",
        "%2 = sdy.data_flow_edge %0#1 : tensor<8x4xf32>",
        "%4 = sdy.data_flow_edge %3#0 : tensor<8x4xf32>",
        "%7 = sdy.data_flow_edge %arg2 sharding=<@mesh, [{?}, {}]> : tensor<4x4xf32>",
        '%6 = sdy.data_flow_edge %5 sharding=<@mesh, [{"a", ?}, {?}]> : tensor<8x4xf32>',
    ]
    assert lines(text, "optimization_barrier") == ["%3:2 = stablehlo.optimization_barrier %2, %arg1 : tensor<8x4xf32>, !stablehlo.token"]


def test_what_has_edges_gets_no_more() -> None:
    module = StablehloModule.parse(LOOP)
    edged = StablehloModule.parse(module.print(add_edges(module.graph)))
    assert edged.print(add_edges(edged.graph)) == edged.print()
    assert edged.print(sink_edges(edged.graph)).count("data_flow_edge") == 0


def test_shardings_flow_through_control_flow_and_stay_with_the_owners() -> None:
    module = StablehloModule.parse(LOOP)
    done = propagate(add_edges(module.graph), "basic", StablehloRules()).graph
    text = module.print(sink_edges(done))
    assert "data_flow_edge" not in text
    (loop,) = lines(text, "stablehlo.while")
    assert loop.endswith('attributes {sdy.sharding = #sdy.sharding_per_value<[<@mesh, []>, <@mesh, [{"b", ?}, {?}]>]>}')
    (inside,) = lines(text, "stablehlo.tanh")
    assert '{sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"b", ?}, {?}]>]>}' in inside
    (manual,) = lines(text, "manual_computation")
    assert 'in_shardings=[<@mesh, [{"a", ?}, {}]>]' in manual


@pytest.mark.parametrize("seed", range(100_200, 100_212))
def test_edges_are_added_and_sunk_as_by_the_reference(seed: int, oracle: Oracle) -> None:
    text = all_ops_module(seed) if seed % 2 else random_module(seed)
    module = StablehloModule.parse(text)
    edged = add_edges(module.graph)
    assert module.print(edged) == oracle.run(text, "sdy-add-data-flow-edges").text
    assert module.print(sink_edges(edged)) == oracle.run(text, "sdy-add-data-flow-edges", SINK).text
    name: PassName = "op-priority" if seed % 3 else "basic"
    theirs = oracle.run(text, "sdy-add-data-flow-edges", f"sdy-{name}-propagate", SINK)
    done = sink_edges(propagate(edged, name, StablehloRules()).graph)
    if theirs.text is None:
        assert theirs.error is not None
        with pytest.raises(InputError, match="is not valid, so it is not written"):
            module.print(done)
    else:
        assert module.print(done) == theirs.text


CALLERS = {
    "main": (
        'func.func @main(%a: tensor<8xf32>, %x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@first, [{"a"}]>}, '
        '%y: tensor<8xf32> {sdy.sharding = #sdy.sharding<@second, [{"a"}]>}) {\n'
        "  %0 = stablehlo.while(%i = %a) : tensor<8xf32> cond {\n    %c = stablehlo.constant dense<true> : tensor<i1>\n"
        "    stablehlo.return %c : tensor<i1>\n  } do {\n    %q = func.call @f(%x) : (tensor<8xf32>) -> tensor<8xf32>\n"
        "    stablehlo.return %q : tensor<8xf32>\n  }\n  %1 = func.call @f(%y) : (tensor<8xf32>) -> tensor<8xf32>\n  return\n}\n"
    ),
    "other": (
        'func.func private @other(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@third, [{"a"}]>}) {\n'
        "  %0 = func.call @f(%x) : (tensor<8xf32>) -> tensor<8xf32>\n  return\n}\n"
    ),
    "f": (
        "func.func private @f(%p: tensor<8xf32>) -> tensor<8xf32> {\n  %0 = sdy.func_data_flow_edge %p : tensor<8xf32>\n"
        "  return %0 : tensor<8xf32>\n}\n"
    ),
}


@pytest.mark.parametrize(("order", "mesh"), [(("main", "other", "f"), "@second"), (("f", "other", "main"), "@third")])
def test_the_edge_of_a_function_takes_the_mesh_name_of_its_first_caller(order: tuple[str, ...], mesh: str, oracle: Oracle) -> None:
    """Functions in order; in each the calls of its own block before those inside its ops."""
    meshes = "".join(f'sdy.mesh @{name} = <["a"=2]>\n' for name in ("first", "second", "third"))
    text = meshes + "".join(CALLERS[name] for name in order)
    module = StablehloModule.parse(text)
    done = module.print(propagate(module.graph, "basic", StablehloRules()).graph)
    assert done == oracle.run(text, "sdy-basic-propagate").text
    assert mesh in lines(done, "func_data_flow_edge")[0]
