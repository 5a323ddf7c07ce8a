"""The passes over graphs that no frontend read: what they return, what they refuse, what they leave alone."""

from __future__ import annotations

import dataclasses

import pytest
from shardy.annotation_text import parse_rule
from shardy.graphs import MESHES, chain, pointwise, sharding

from solver_shard.errors import InputError
from solver_shard.shardy.graph import Block, Function, GraphOp, GraphValue, OpKind, PropagationGraph, ShardingRule
from solver_shard.shardy.passes import PassName, PropagationOptions, populate_rules, propagate
from solver_shard.shardy.stablehlo import StablehloModule
from solver_shard.shardy.stablehlo.rules import StablehloRules

PASSES: tuple[PassName, ...] = ("basic", "aggressive", "op-priority", "user-priority")


@pytest.mark.parametrize("name", PASSES)
def test_a_chain_is_sharded_from_both_ends(name: PassName) -> None:
    made = propagate(chain(3, '[{"a"}, {?}]', '[{?}, {"b"}]'), name, pointwise).graph
    assert made.values[0].sharding == sharding('[{"a"}, {"b", ?}]')
    assert [value.sharding for value in made.values[1:]] == [sharding('[{"a", ?}, {"b", ?}]')] * 3
    assert made.functions[0].result_shardings == (sharding('[{"a", ?}, {"b"}]'),)


def test_positions_are_kept_and_the_graph_given_is_not_changed() -> None:
    graph = chain(2, '[{"a"}, {?}]')
    before = dataclasses.replace(graph)
    dead = GraphOp(name="tanh", operands=(0,), results=(3,), traits=graph.ops[0].traits)
    values = (*graph.values, GraphValue(name="%dead", shape=(8, 4), dtype="f32"))
    body = Block(arguments=(0,), ops=(3, *graph.functions[0].body.ops))
    graph = PropagationGraph(
        values=values, ops=(*graph.ops, dead), functions=(Function(name="main", body=body, result_shardings=(None,)),), meshes=MESHES
    )
    made = propagate(graph, "basic", pointwise).graph
    assert made.functions[0].body.ops == (0, 1, 2)
    assert [op.name for op in made.ops] == [op.name for op in graph.ops]
    assert made.values[3].sharding is None
    assert graph.functions[0].body.ops == (3, 0, 1, 2)
    assert before.values == graph.values[:3]


def test_rules_are_dropped_unless_they_are_custom_or_to_be_kept() -> None:
    rule = pointwise(chain(1, None), 0, conservative=False)
    assert rule is not None
    custom = dataclasses.replace(rule, custom=True)
    graph = chain(2, '[{"a"}, {?}]')
    graph = dataclasses.replace(graph, ops=(dataclasses.replace(graph.ops[0], rule=custom), *graph.ops[1:]))
    assert [op.rule for op in propagate(graph, "basic", pointwise).graph.ops] == [custom, None, None]
    kept = propagate(graph, "basic", pointwise, PropagationOptions(keep_rules=True)).graph
    assert [op.rule for op in kept.ops] == [custom, rule, None]
    assert [op.rule for op in populate_rules(graph, pointwise).ops] == [custom, rule, None]


def test_the_registry_is_asked_for_conservative_rules() -> None:
    asked = []

    def registry(graph: PropagationGraph, op: int, *, conservative: bool) -> ShardingRule | None:
        asked.append((graph.ops[op].name, conservative))
        return None

    populate_rules(chain(1, None), registry, conservative=True)
    propagate(chain(1, None), "basic", registry, PropagationOptions(conservative=False))
    assert asked == [("tanh", True), ("tanh", False)]


def test_dumps_are_made_after_every_user_priority_but_the_last() -> None:
    dumped: list[tuple[str, object]] = []
    graph = chain(1, '[{"a"}p1, {"b"}p4]')

    def dump(made: PropagationGraph, name: str) -> None:
        dumped.append((name, made.values[1].sharding))
        assert made.ops[0].rule is not None

    propagate(graph, "user-priority", pointwise, PropagationOptions(dump=dump))
    assert dumped == [
        ("00.propagation_after_user_priority_0.mlir", None),
        ("00.propagation_after_user_priority_1.mlir", sharding('[{"a", ?}, {?}]')),
    ]
    dumped.clear()
    propagate(chain(1, '[{"a"}, {?}]'), "user-priority", pointwise, PropagationOptions(dump=dump))
    assert dumped == []


def test_work_grows_with_the_number_of_ops_and_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    from solver_shard.shardy import sweep

    count = 0
    real = sweep._Sweep._step

    def counting(self: sweep._Sweep, op: int) -> None:
        nonlocal count
        count += 1
        real(self, op)

    monkeypatch.setattr(sweep._Sweep, "_step", counting)
    steps = []
    for length in (100, 200, 400):
        count = 0
        propagate(chain(length, None, '[{"a"}, {?}]'), "user-priority", pointwise)
        steps.append(count)
    assert steps[1] - steps[0] == (steps[2] - steps[1]) / 2


@pytest.mark.parametrize(
    ("names", "message"),
    [((), "the module has no function"), (("f", "g"), "the module has @f, @g; rename the entry function to @main")],
)
def test_without_a_main_function_there_is_no_propagation(names: tuple[str, ...], message: str) -> None:
    graph = PropagationGraph(values=(), ops=(), functions=tuple(Function(name=name, body=Block()) for name in names))
    with pytest.raises(InputError, match=message):
        propagate(graph, "basic", pointwise)


def test_unknown_passes_and_strategies_are_refused() -> None:
    with pytest.raises(InputError, match="unknown propagation pass 'best'; legal: basic, aggressive, op-priority, user-priority"):
        propagate(chain(1, None), "best", pointwise)  # type: ignore[arg-type]  # what the message is for
    with pytest.raises(InputError, match="unknown propagation strategy 'x'; legal: basic, aggressive, basic-then-aggressive"):
        propagate(chain(1, None), "basic", pointwise, PropagationOptions(strategy="x"))  # type: ignore[arg-type]  # as above


def test_bad_shardings_are_refused_with_the_op_and_the_value() -> None:
    graph = chain(1, None)
    bad = dataclasses.replace(graph.values[1], sharding=dataclasses.replace(sharding('[{"a"}, {?}]'), mesh="other"))
    with pytest.raises(InputError, match="%1 of tanh: unknown mesh @other; the meshes are @mesh"):
        propagate(dataclasses.replace(graph, values=(graph.values[0], bad)), "basic", pointwise)
    with pytest.raises(InputError, match='argument %0 of @main: "a" is used twice'):
        propagate(chain(1, '[{"a"}, {"a"}]'), "basic", pointwise)
    with pytest.raises(InputError, match="result 0 of @main: the sharding has 1 dims, the tensor 2"):
        propagate(chain(1, None, '[{"a"}]'), "basic", pointwise)


def test_rules_that_do_not_fit_are_refused() -> None:
    def registry(graph: PropagationGraph, op: int, *, conservative: bool) -> ShardingRule | None:
        return parse_rule("<([i])->([i]) {i=8}>")

    with pytest.raises(InputError, match=r"tanh \(%1\): the sharding rule .* does not fit the op"):
        propagate(chain(1, None), "basic", registry)


def test_values_in_two_groups_and_groups_of_two_shapes_are_refused() -> None:
    graph = chain(1, None)
    values = (*graph.values, GraphValue(name="%y", shape=(4, 4), dtype="f32"))

    def grouped(*members: tuple[int, int]) -> PropagationGraph:
        groups = tuple(GraphOp(name="sdy.sharding_group", operands=(value,), kind=OpKind.GROUP, group=group) for value, group in members)
        body = Block(arguments=(0, 2), ops=(0, *range(2, 2 + len(groups)), 1))
        main = Function(name="main", body=body, result_shardings=(None,))
        return PropagationGraph(values=values, ops=(*graph.ops, *groups), functions=(main,), meshes=MESHES)

    with pytest.raises(InputError, match="%0 is in sharding groups 1 and 2"):
        propagate(grouped((0, 1), (0, 2)), "basic", pointwise)
    with pytest.raises(InputError, match="members must have one shape"):
        propagate(grouped((0, 1), (2, 1)), "basic", pointwise)


def test_a_group_whose_members_differ_is_warned_of() -> None:
    graph = chain(1, '[{"a"}, {?}]')
    values = (graph.values[0], dataclasses.replace(graph.values[1], sharding=sharding('[{"b"}, {?}]')))
    groups = tuple(GraphOp(name="sdy.sharding_group", operands=(value,), kind=OpKind.GROUP, group=0) for value in (0, 1))
    main = Function(name="main", body=Block(arguments=(0,), ops=(2, 0, 3, 1)), result_shardings=(None,))
    made = propagate(PropagationGraph(values=values, ops=(*graph.ops, *groups), functions=(main,), meshes=MESHES), "basic", pointwise)
    assert made.warnings == ("sharding group 0 (%0, %1) starts with different shardings; constraints are added after its members",)
    assert [made.graph.ops[op].name for op in made.graph.functions[0].body.ops] == [
        "sdy.sharding_constraint", "sdy.sharding_group", "tanh", "sdy.sharding_constraint", "sdy.sharding_group", "return",
    ]  # fmt: skip


def test_edges_on_values_that_nothing_hands_on_are_refused() -> None:
    graph = chain(2, None)
    edge = dataclasses.replace(graph.ops[1], name="sdy.data_flow_edge", kind=OpKind.EDGE)
    with pytest.raises(InputError, match=r"sdy\.data_flow_edge on %1: this value is not handed on by control flow"):
        propagate(dataclasses.replace(graph, ops=(graph.ops[0], edge, graph.ops[2])), "basic", pointwise)


def test_a_call_of_nothing_is_refused() -> None:
    graph = chain(1, None)
    call = dataclasses.replace(graph.ops[0], name="func.call", kind=OpKind.CALL, callee="f")
    with pytest.raises(InputError, match=r"func.call \(%1\) calls @f, which is not in the module; it has @main"):
        propagate(dataclasses.replace(graph, ops=(call, graph.ops[1])), "basic", pointwise)


def test_a_priority_on_what_is_erased_is_forgotten() -> None:
    """The reference aborts here: it writes to the op that it has erased."""
    graph = chain(1, '[{"a"}, {?}]')
    dead = GraphOp(name="tanh", operands=(0,), results=(2,), traits=graph.ops[0].traits)
    values = (*graph.values, GraphValue(name="%dead", shape=(8, 4), dtype="f32", sharding=sharding('[{?}, {"b"}p1]')))
    body = Block(arguments=(0,), ops=(2, 0, 1))
    main = Function(name="main", body=body, result_shardings=(None,))
    made = propagate(
        PropagationGraph(values=values, ops=(*graph.ops, dead), functions=(main,), meshes=MESHES), "user-priority", pointwise
    ).graph
    assert made.functions[0].body.ops == (0, 1)
    assert made.values[1].sharding == sharding('[{"a", ?}, {?}]')


def test_values_that_take_an_axis_from_each_other_for_ever_are_refused() -> None:
    """A manual computation gives its group less than its result has; the other member gets the axis back. The reference never returns."""
    text = """module {
  sdy.mesh @mesh = <["a"=2, "b"=2]>
  func.func @main(%arg0: tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a", "b", ?}, {?}]>}) -> tensor<4x4xf32> {
    %0 = stablehlo.tanh %arg0 : tensor<4x4xf32>
    %1 = sdy.manual_computation(%0) in_shardings=[<@mesh, [{?}, {?}], replicated={"b"}>] out_shardings=[<@mesh, [{?}, {?}]>]
        manual_axes={"b"} (%arg1: tensor<4x4xf32>) {
      %3 = sdy.data_flow_edge %arg1 sharding=<@mesh, [{?}, {?}]> : tensor<4x4xf32>
      sdy.return %3 : tensor<4x4xf32>
    } : (tensor<4x4xf32>) -> tensor<4x4xf32>
    %2 = sdy.data_flow_edge %1 sharding=<@mesh, [{?}, {?}]> : tensor<4x4xf32>
    sdy.sharding_group %2 group_id=0 : tensor<4x4xf32>
    sdy.sharding_group %0 group_id=0 : tensor<4x4xf32>
    return %2 : tensor<4x4xf32>
  }
}
"""
    with pytest.raises(InputError, match="values of sharding group 0 take an axis from each other"):
        propagate(StablehloModule.parse(text).graph, "basic", StablehloRules())
