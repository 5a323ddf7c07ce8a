"""Modules written by hand, one or more for every numbered section of the specification, with the shardings that propagation gives.

A case names a pass, and per value (``%x``, or ``result 0`` of the main function) the dims of its sharding as text: ``[{"a", ?}, {}]``, with
``replicated`` and ``unreduced`` where they are said; None for a value without a sharding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from solver_shard.shardy.passes import PropagationOptions

MESH = '"a"=2, "b"=4, "c"=3'


@dataclass(frozen=True, kw_only=True)
class Case:
    """A module whose main function has the given text, and what becomes of it."""

    section: str
    says: str
    body: str
    expected: dict[str, str | None]
    arguments: str
    results: str = ""
    name: str = "basic"
    options: PropagationOptions = field(default_factory=PropagationOptions)
    mesh: str = MESH
    more: str = ""

    @property
    def text(self) -> str:
        lines = "\n".join("    " + line for line in self.body.strip().splitlines())
        return f"sdy.mesh @mesh = <[{self.mesh}]>\n{self.more}\nfunc.func @main({self.arguments}) -> ({self.results}) {{\n{lines}\n}}\n"

    @property
    def reference(self) -> str:
        said = [f"conservative-propagation={str(self.options.conservative).lower()}"]
        if self.name != "basic":
            said.append(f"propagation-strategy={self.options.strategy}")
        if self.name in ("op-priority", "user-priority"):
            said.append(f"run-op-priority-propagation={str(self.options.run_op_priority).lower()}")
        return f"sdy-{self.name}-propagate{{{' '.join(said)}}}"


def _x(name: str, shape: str, sharding: str | None = None) -> str:
    return f"%{name}: tensor<{shape}xf32>" + (f" {{sdy.sharding = #sdy.sharding<@mesh, {sharding}>}}" if sharding else "")


def _f(shape: str) -> str:
    return f"tensor<{shape}xf32>"


_TANH = "%0 = stablehlo.tanh %arg0 : tensor<8x4xf32>\nreturn %0 : tensor<8x4xf32>"
_ADD = "%0 = stablehlo.add %arg0, %arg1 : tensor<8x4xf32>\nreturn %0 : tensor<8x4xf32>"
_DOT = (
    "%0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x16xf32>) -> tensor<8x16xf32>\n"
    "return %0 : tensor<8x16xf32>"
)


def _reshape(before: str, after: str) -> str:
    return f"%0 = stablehlo.reshape %arg0 : ({_f(before)}) -> {_f(after)}\nreturn %0 : {_f(after)}"


CASES = (
    Case(
        section="1",
        says="A tensor that nothing changes keeps its sharding as written, priorities included.",
        arguments=_x("arg0", "8x4", '[{"a"}p1, {?}p0], replicated={"c"}'),
        body=_TANH,
        results=_f("8x4"),
        expected={"%arg0": '[{"a"}p1, {?}p0], replicated={"c"}', "%0": '[{"a", ?}, {?}]', "result 0": '[{"a", ?}, {?}]'},
    ),
    Case(
        section="1",
        says="A sharding that is rewritten loses its priorities.",
        arguments=", ".join([_x("arg0", "8x4", '[{"a", ?}p1, {?}p2]'), _x("arg1", "8x4", '[{?}, {"b"}]')]),
        body=_ADD,
        results=_f("8x4"),
        expected={"%arg0": '[{"a", ?}, {"b", ?}]', "%0": '[{"a", ?}, {"b", ?}]'},
    ),
    Case(
        section="2",
        says="A part of an axis grows to the axis where another tensor has it whole.",
        arguments=", ".join([_x("arg0", "8x4", '[{"b":(1)2, ?}, {?}]'), _x("arg1", "8x4", '[{"b", ?}, {?}]')]),
        body=_ADD,
        results=_f("8x4"),
        expected={"%arg0": '[{"b", ?}, {?}]', "%arg1": '[{"b", ?}, {?}]', "%0": '[{"b", ?}, {?}]'},
    ),
    Case(
        section="2",
        says="Two parts that lie apart have nothing in common.",
        arguments=", ".join([_x("arg0", "8x4", '[{"b":(1)2, ?}, {?}]'), _x("arg1", "8x4", '[{"b":(2)2, ?}, {?}]')]),
        body=_ADD,
        results=_f("8x4"),
        expected={"%arg0": '[{"b":(1)2, ?}, {?}]', "%arg1": '[{"b":(2)2, ?}, {?}]', "%0": None},
    ),
    Case(
        section="3",
        says="Nothing flows along a blocked factor; the types of factors stop nothing.",
        arguments=_x("arg0", "8x4x2", '[{"a"}, {"b"}, {"c"}]'),
        body=(
            "%0 = stablehlo.custom_call @f(%arg0) {sdy.sharding_rule = #sdy.op_sharding_rule<([i, j, k])->([i, j, k]) {i=8, j=4, k=2} "
            "need_replication={j} permutation={k} blocked_propagation={i}, custom>} : (tensor<8x4x2xf32>) -> tensor<8x4x2xf32>\n"
            "return %0 : tensor<8x4x2xf32>"
        ),
        results=_f("8x4x2"),
        expected={"%0": '[{?}, {"b", ?}, {"c", ?}]'},
    ),
    Case(
        section="3",
        says="A reduction factor carries shardings between the operands.",
        arguments=", ".join([_x("arg0", "8x4", '[{?}, {"a"}]'), _x("arg1", "4x16")]),
        body=_DOT,
        results=_f("8x16"),
        expected={"%arg1": '[{"a", ?}, {?}]', "%0": None},
    ),
    Case(
        section="4",
        says="Axes of a dim are handed to its factors, major to minor.",
        arguments=_x("arg0", "32", '[{"a", "b"}]'),
        body=_reshape("32", "2x16"),
        results=_f("2x16"),
        expected={"%0": '[{"a", ?}, {"b", ?}]'},
    ),
    Case(
        section="4",
        says="An axis larger than a factor is split between two.",
        arguments=_x("arg0", "32", '[{"b", "a"}]'),
        body=_reshape("32", "2x16"),
        results=_f("2x16"),
        expected={"%0": '[{"b":(1)2, ?}, {"b":(2)2, "a", ?}]'},
    ),
    Case(
        section="4",
        says="Parts that meet at the seam of two factors are merged.",
        arguments=_x("arg0", "2x16", '[{"b":(1)2}, {"b":(2)2, "a"}]'),
        body=_reshape("2x16", "32"),
        results=_f("32"),
        expected={"%0": '[{"b", "a", ?}]'},
    ),
    Case(
        section="4",
        says="What a factor cannot take overflows: the factor after it gets nothing.",
        arguments=_x("arg0", "12", '[{"b", "a"}]'),
        body=_reshape("12", "6x2"),
        results=_f("6x2"),
        expected={"%arg0": '[{"b", "a"}]', "%0": '[{"b":(1)2, ?}, {?}]'},
    ),
    Case(
        section="4",
        says="A factor below one that is not cut in full would need a strided dim, and is left out.",
        arguments=_x("arg0", "4x8", '[{?}, {"a"}]'),
        body=_reshape("4x8", "32"),
        results=_f("32"),
        expected={"%0": None},
    ),
    Case(
        section="5",
        says="Two meshes that differ do not meet in one op.",
        more='sdy.mesh @other = <["a"=2, "b"=4]>',
        arguments=", ".join([_x("arg0", "8x4", '[{"a", ?}, {?}]'), _x("arg1", "8x4", '[{?}, {"b", ?}]').replace("@mesh", "@other")]),
        body=_ADD,
        results=_f("8x4"),
        expected={"%arg0": '[{"a", ?}, {?}]', "%0": None},
    ),
    Case(
        section="5",
        says="An empty mesh gives way to the other one.",
        more="sdy.mesh @none = <[]>",
        arguments=", ".join([_x("arg0", "8x4", "[{?}, {?}]").replace("@mesh", "@none"), _x("arg1", "8x4", '[{"a", ?}, {?}]')]),
        body=_ADD,
        results=_f("8x4"),
        expected={"%arg0": '[{"a", ?}, {?}]', "%0": '[{"a", ?}, {?}]'},
    ),
    Case(
        section="6",
        says="Tensors agree on axes from the major end: [a], [], [a, b, c] and [a, b, d] on [a, b].",
        mesh='"a"=2, "b"=2, "c"=2, "d"=2',
        arguments=", ".join(
            [
                _x("arg0", "16x2", '[{"a", ?}, {?}]'),
                _x("arg1", "16x2"),
                _x("arg2", "16x2", '[{"a", "b", "c", ?}, {?}]'),
                _x("arg3", "16x2", '[{"a", "b", "d", ?}, {?}]'),
            ]
        ),
        body=(
            "%0 = stablehlo.concatenate %arg0, %arg1, %arg2, %arg3, dim = 1 : "
            "(tensor<16x2xf32>, tensor<16x2xf32>, tensor<16x2xf32>, tensor<16x2xf32>) -> tensor<16x8xf32>\nreturn %0 : tensor<16x8xf32>"
        ),
        results=_f("16x8"),
        expected={
            "%arg0": '[{"a", "b", ?}, {?}]',
            "%arg1": '[{"a", "b", ?}, {?}]',
            "%arg2": '[{"a", "b", "c", ?}, {?}]',
            "%0": '[{"a", "b", ?}, {?}]',
        },
    ),
    Case(
        section="6",
        says="A part stops the list where more follows it: [b:(1)2, a] and [b] agree on b:(1)2.",
        arguments=", ".join([_x("arg0", "8x4", '[{"b":(1)2, "a", ?}, {?}]'), _x("arg1", "8x4", '[{"b", ?}, {?}]')]),
        body=_ADD,
        results=_f("8x4"),
        expected={"%0": '[{"b":(1)2, ?}, {?}]'},
    ),
    Case(
        section="7",
        says="An axis that another factor of some tensor uses is cut, for everybody.",
        arguments=", ".join([_x("arg0", "8x4", '[{"a", ?}, {?}]'), _x("arg1", "4x16", '[{?}, {"a", ?}]')]),
        body=_DOT,
        results=_f("8x16"),
        expected={"%0": None},
    ),
    Case(
        section="7",
        says="An axis that a tensor with the factor keeps replicated is cut, and so is one that it keeps unreduced.",
        arguments=", ".join(
            [_x("arg0", "8x4", '[{"a", ?}, {"c", ?}]'), _x("arg1", "8x4", '[{?}, {?}], replicated={"a"}, unreduced={"c"}')]
        ),
        body=_ADD,
        results=_f("8x4"),
        expected={"%arg1": '[{?}, {?}], replicated={"a"}, unreduced={"c"}', "%0": None},
    ),
    Case(
        section="7",
        says="A closed dim takes nothing more than it has.",
        arguments=", ".join([_x("arg0", "8x4", '[{"a", "b", ?}, {"c"}]'), _x("arg1", "8x4", '[{"a"}, {}]')]),
        body=_ADD,
        results=_f("8x4"),
        expected={"%arg1": '[{"a"}, {}]', "%0": '[{"a", ?}, {?}]'},
    ),
    Case(
        section="7",
        says="A factor that is not the last of its dim takes what divides it: of b only the major part, of size 2.",
        arguments=_x("arg0", "2x16", '[{"b"}, {?}]'),
        body=_reshape("2x16", "32"),
        results=_f("32"),
        expected={"%0": '[{"b":(1)2, ?}]'},
    ),
    Case(
        section="8",
        says="Aggressive: of two factors that want one axis, the one with the larger source has it.",
        name="aggressive",
        arguments=", ".join([_x("arg0", "8x4", '[{"a", ?}, {?}]'), _x("arg1", "4x16", '[{?}, {"a", ?}]')]),
        body=_DOT,
        results=_f("8x16"),
        expected={"%arg0": '[{"a", ?}, {?}]', "%arg1": '[{?}, {"a", ?}]', "%0": '[{?}, {"a", ?}]'},
    ),
    Case(
        section="8",
        says="Aggressive: in an element-wise op, where sources are equally large, the factor with more shards goes first.",
        name="aggressive",
        arguments=", ".join([_x("arg0", "8x8", '[{"a", ?}, {?}]'), _x("arg1", "8x8", '[{?}, {"a", "b", ?}]')]),
        body="%0 = stablehlo.add %arg0, %arg1 : tensor<8x8xf32>\nreturn %0 : tensor<8x8xf32>",
        results=_f("8x8"),
        expected={"%arg0": '[{"a", ?}, {?}]', "%arg1": '[{?}, {"a", "b", ?}]', "%0": '[{?}, {"a", "b", ?}]'},
    ),
    Case(
        section="8",
        says="Aggressive: an operand that objects does not stop the others.",
        name="aggressive",
        arguments=", ".join([_x("arg0", "8x4", '[{"a", ?}, {?}]'), _x("arg1", "8x4", "[{}, {?}]")]),
        body=_ADD,
        results=_f("8x4"),
        expected={"%arg1": "[{}, {?}]", "%0": '[{"a", ?}, {?}]'},
    ),
    Case(
        section="8",
        says="Aggressive: between operands of an element-wise op no more flows than the result took.",
        name="aggressive",
        arguments=", ".join([_x("arg0", "8x4", '[{"a", ?}, {?}]'), _x("arg1", "8x4")]),
        body=(
            "%0 = stablehlo.add %arg0, %arg1 {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}, {}]>]>} : tensor<8x4xf32>\n"
            "return %0 : tensor<8x4xf32>"
        ),
        results=_f("8x4"),
        expected={"%arg1": None, "%0": "[{}, {}]"},
    ),
    Case(
        section="8",
        says="Aggressive: in other ops it does.",
        name="aggressive",
        arguments=", ".join([_x("arg0", "8x4", '[{"a", ?}, {?}]'), _x("arg1", "8x4")]),
        body=(
            "%0 = stablehlo.concatenate %arg0, %arg1, dim = 1 {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}, {}]>]>}"
            " : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x8xf32>\nreturn %0 : tensor<8x8xf32>"
        ),
        results=_f("8x8"),
        expected={"%arg1": '[{"a", ?}, {?}]', "%0": "[{}, {}]"},
    ),
    Case(
        section="9",
        says="The results of the main function and what it returns are sharded alike; the first sharding of one result opens the others.",
        arguments=", ".join([_x("arg0", "8x4"), _x("arg1", "8x4", "[{?}, {}]")]),
        body=(
            "%0:2 = stablehlo.optimization_barrier %arg0, %arg1 : tensor<8x4xf32>, tensor<8x4xf32>\n"
            "return %0#0, %arg1 : tensor<8x4xf32>, tensor<8x4xf32>"
        ),
        results=", ".join(_f("8x4") + f" {{sdy.sharding = #sdy.sharding<@mesh, {dims}>}}" for dims in ('[{"a"}, {?}]', '[{"b"}, {"c"}]')),
        expected={"%arg0": None, "%0#0": '[{"a", ?}, {?}]', "%0#1": "[{?}, {?}]", "%arg1": '[{"b", ?}, {}]', "result 1": '[{"b"}, {"c"}]'},
    ),
    Case(
        section="9",
        says="A while's initial value, arguments, returned value and result share one sharding through an edge.",
        arguments=", ".join([_x("arg0", "8x4"), _x("arg1", "8x4", '[{"a"}, {?}]')]),
        body="""
%c = stablehlo.constant dense<true> : tensor<i1>
%0 = "stablehlo.while"(%arg0) ({
^bb0(%x: tensor<8x4xf32>):
  %t = stablehlo.tanh %x : tensor<8x4xf32>
  %d = stablehlo.custom_call @use(%t) {has_side_effect = true} : (tensor<8x4xf32>) -> tensor<i1>
  stablehlo.return %d : tensor<i1>
}, {
^bb0(%x: tensor<8x4xf32>):
  %y = stablehlo.add %x, %arg1 : tensor<8x4xf32>
  stablehlo.return %y : tensor<8x4xf32>
}) : (tensor<8x4xf32>) -> tensor<8x4xf32>
%1 = sdy.data_flow_edge %0 : tensor<8x4xf32>
return %1 : tensor<8x4xf32>""",
        results=_f("8x4"),
        expected={"%arg0": '[{"a", ?}, {?}]', "%0": None, "%1": '[{"a", ?}, {?}]', "%2": '[{"a", ?}, {?}]', "result 0": '[{"a", ?}, {?}]'},
    ),
    Case(
        section="9",
        says="Without an edge nothing flows through a while, whose arguments read and write its result's sharding.",
        arguments=", ".join([_x("arg0", "8x4"), _x("arg1", "8x4", '[{"a"}, {?}]')]),
        body="""
%0 = "stablehlo.while"(%arg0) ({
^bb0(%x: tensor<8x4xf32>):
  %c = stablehlo.constant dense<true> : tensor<i1>
  stablehlo.return %c : tensor<i1>
}, {
^bb0(%x: tensor<8x4xf32>):
  %y = stablehlo.add %x, %arg1 : tensor<8x4xf32>
  stablehlo.return %y : tensor<8x4xf32>
}) : (tensor<8x4xf32>) -> tensor<8x4xf32>
return %0 : tensor<8x4xf32>""",
        results=_f("8x4"),
        expected={"%arg0": None, "%0": '[{"a", ?}, {?}]', "result 0": '[{"a", ?}, {?}]'},
    ),
    Case(
        section="9",
        says="What the branches of a case return and its result are sharded alike.",
        arguments=", ".join([_x("arg0", "8x4", '[{"a"}, {?}]'), _x("arg1", "8x4"), "%arg2: tensor<i32>"]),
        body="""
%0 = "stablehlo.case"(%arg2) ({
  stablehlo.return %arg0 : tensor<8x4xf32>
}, {
  stablehlo.return %arg1 : tensor<8x4xf32>
}) : (tensor<i32>) -> tensor<8x4xf32>
%1 = sdy.data_flow_edge %0 : tensor<8x4xf32>
return %1 : tensor<8x4xf32>""",
        results=_f("8x4"),
        expected={"%arg1": '[{"a", ?}, {?}]', "%1": '[{"a", ?}, {?}]'},
    ),
    Case(
        section="9",
        says="Inside a manual computation the manual axes are gone, outside they come first.",
        arguments=_x("arg0", "8x4", '[{"a", "b"}, {?}]'),
        body="""
%0 = sdy.manual_computation(%arg0) in_shardings=[<@mesh, [{"a", ?}, {?}]>] out_shardings=[<@mesh, [{"a", ?}, {?}]>] manual_axes={"a"}
    (%x: tensor<4x4xf32>) {
  %e = sdy.data_flow_edge %x sharding=<@mesh, [{?}, {?}]> : tensor<4x4xf32>
  %t = stablehlo.tanh %e : tensor<4x4xf32>
  sdy.return %t : tensor<4x4xf32>
} : (tensor<8x4xf32>) -> tensor<8x4xf32>
%1 = sdy.data_flow_edge %0 sharding=<@mesh, [{"a", ?}, {?}]> : tensor<8x4xf32>
return %1 : tensor<8x4xf32>""",
        results=_f("8x4"),
        expected={"%0": '[{"a", ?}, {?}]', "%1": '[{"a", "b", ?}, {?}]', "%2": '[{"b", ?}, {?}]', "%3": '[{"b", ?}, {?}]'},
    ),
    Case(
        section="9",
        says="A named computation is looked through.",
        arguments=_x("arg0", "8x4", '[{"a"}, {?}]'),
        body="""
%0 = sdy.named_computation<"f">(%arg0) (%x: tensor<8x4xf32>) {
  %e = sdy.data_flow_edge %x : tensor<8x4xf32>
  %t = stablehlo.tanh %e : tensor<8x4xf32>
  sdy.return %t : tensor<8x4xf32>
} : (tensor<8x4xf32>) -> tensor<8x4xf32>
%1 = sdy.data_flow_edge %0 : tensor<8x4xf32>
return %1 : tensor<8x4xf32>""",
        results=_f("8x4"),
        expected={"%1": '[{"a", ?}, {?}]', "%2": '[{"a", ?}, {?}]', "%3": '[{"a", ?}, {?}]'},
    ),
    Case(
        section="9",
        says="Edges of functions carry shardings into what is called, and back.",
        arguments=_x("arg0", "8x4", '[{"a"}, {?}]'),
        body="""
%0 = func.call @f(%arg0) : (tensor<8x4xf32>) -> tensor<8x4xf32>
%1 = sdy.func_data_flow_edge %0 : tensor<8x4xf32>
return %1 : tensor<8x4xf32>""",
        more="""func.func private @f(%p: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %e = sdy.func_data_flow_edge %p : tensor<8x4xf32>
  %q = stablehlo.tanh %e : tensor<8x4xf32>
  return %q : tensor<8x4xf32>
}""",
        name="op-priority",
        results=_f("8x4"),
        expected={"%1": '[{"a", ?}, {?}]', "result 0": '[{"a", ?}, {?}]'},
    ),
    Case(
        section="9",
        says="A barrier lets shardings through one way.",
        arguments=", ".join([_x("arg0", "8x4", '[{"a", ?}, {?}]')]),
        body=(
            "%0 = sdy.propagation_barrier %arg0 allowed_direction=BACKWARD : tensor<8x4xf32>\n"
            '%1 = sdy.sharding_constraint %0 <@mesh, [{?}, {"b", ?}]> : tensor<8x4xf32>\nreturn %1 : tensor<8x4xf32>'
        ),
        results=_f("8x4"),
        expected={"%arg0": '[{"a", ?}, {"b", ?}]', "%0": '[{?}, {"b", ?}]', "%1": '[{?}, {"b", ?}]'},
    ),
    Case(
        section="9",
        says="The members of a sharding group start and stay alike.",
        arguments=", ".join([_x("arg0", "8x4", '[{"a", ?}, {?}]'), _x("arg1", "8x4"), _x("arg2", "8x4", '[{?}, {"b"}]')]),
        body="""
sdy.sharding_group %arg0 group_id=0 : tensor<8x4xf32>
sdy.sharding_group %arg1 group_id=0 : tensor<8x4xf32>
%0 = stablehlo.add %arg1, %arg2 : tensor<8x4xf32>
return %0 : tensor<8x4xf32>""",
        results=_f("8x4"),
        expected={"%arg0": '[{"a", ?}, {"b", ?}]', "%arg1": '[{"a", ?}, {"b", ?}]', "%0": '[{"a", ?}, {"b", ?}]'},
    ),
    Case(
        section="9",
        says="What a function's result gives to the value that is returned, its group gets too; what the result gets, it does not.",
        arguments=", ".join([_x("arg0", "8x4", '[{?}, {"b"}]'), _x("arg1", "8x4")]),
        body="""
sdy.sharding_group %arg0 group_id=0 : tensor<8x4xf32>
%0 = stablehlo.tanh %arg1 : tensor<8x4xf32>
sdy.sharding_group %0 group_id=0 : tensor<8x4xf32>
return %0 : tensor<8x4xf32>""",
        results=_f("8x4") + ' {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {?}]>}',
        expected={"%0": '[{"a", ?}, {"b"}]', "%arg0": '[{"a", ?}, {"b"}]', "result 0": '[{"a"}, {"b", ?}]'},
    ),
    Case(
        section="9",
        says="Members that start differently keep what they have; constraints after them take their place.",
        arguments=", ".join([_x("arg0", "8x4", '[{"a"}, {?}]'), _x("arg1", "8x4", '[{"b"}, {?}]')]),
        body="""
sdy.sharding_group %arg0 group_id=0 : tensor<8x4xf32>
sdy.sharding_group %arg1 group_id=0 : tensor<8x4xf32>
%0 = stablehlo.add %arg0, %arg1 : tensor<8x4xf32>
return %0 : tensor<8x4xf32>""",
        results=_f("8x4"),
        expected={
            "%arg0": '[{"a"}, {?}]',
            "%arg1": '[{"b"}, {?}]',
            "%arg0:constraint": '[{"b", ?}, {?}]',
            "%arg1:constraint": '[{"b", ?}, {?}]',
            "%0": '[{"b", ?}, {?}]',
        },
    ),
    Case(
        section="9",
        says="A value that is in its group twice, where members differ, gets two constraints, and both are members.",
        arguments=", ".join([_x("arg0", "8x4", '[{"a"}, {?}]'), _x("arg1", "8x4", '[{"b"}, {?}]')]),
        body="""
sdy.sharding_group %arg0 group_id=0 : tensor<8x4xf32>
sdy.sharding_group %arg1 group_id=0 : tensor<8x4xf32>
sdy.sharding_group %arg0 group_id=0 : tensor<8x4xf32>
%0 = stablehlo.add %arg0, %arg1 : tensor<8x4xf32>
return %0 : tensor<8x4xf32>""",
        results=_f("8x4"),
        expected={"%arg0": '[{"a"}, {?}]', "%arg1": '[{"b"}, {?}]', "%arg1:constraint": '[{"a", ?}, {?}]', "%0": '[{"a", ?}, {?}]'},
    ),
    Case(
        section="9",
        says="What a manual computation's body gives to its result, the group of the result gets without the manual axes.",
        arguments=", ".join([_x("arg0", "8x4"), _x("arg1", "8x4")]),
        body="""
%0 = sdy.manual_computation(%arg0) in_shardings=[<@mesh, [{?}, {?}], replicated={"a"}>]
    out_shardings=[<@mesh, [{?}, {?}], replicated={"a"}>] manual_axes={"a"} (%arg2: tensor<8x4xf32>) {
  %3 = sdy.data_flow_edge %arg2 sharding=<@mesh, [{?}, {?}]> : tensor<8x4xf32>
  %4 = sdy.sharding_constraint %3 <@mesh, [{"b", ?}, {?}]> : tensor<8x4xf32>
  sdy.return %4 : tensor<8x4xf32>
} : (tensor<8x4xf32>) -> tensor<8x4xf32>
%1 = sdy.data_flow_edge %0 sharding=<@mesh, [{?}, {?}], replicated={"a"}> : tensor<8x4xf32>
sdy.sharding_group %1 group_id=0 : tensor<8x4xf32>
sdy.sharding_group %arg1 group_id=0 : tensor<8x4xf32>
return %1 : tensor<8x4xf32>""",
        results=_f("8x4"),
        expected={"%arg1": '[{"b", ?}, {?}]'},
    ),
    Case(
        section="10",
        says="What nobody reads is erased, and with it what only it reads; it shards nothing.",
        arguments=", ".join([_x("arg0", "8x4"), _x("arg1", "8x4", '[{"a"}, {?}]')]),
        body="""
%0 = stablehlo.tanh %arg0 : tensor<8x4xf32>
%1 = stablehlo.add %0, %arg1 : tensor<8x4xf32>
return %arg1 : tensor<8x4xf32>""",
        results=_f("8x4"),
        expected={"%arg0": None, "%0": None, "%1": None, "result 0": '[{"a", ?}, {?}]'},
    ),
    Case(
        section="10",
        says="A change goes back through ops that were visited already: one sweep is enough.",
        arguments=", ".join([_x("arg0", "8x4"), _x("arg1", "8x4", '[{?}, {"b"}]')]),
        body="""
%0 = stablehlo.tanh %arg0 : tensor<8x4xf32>
%1 = stablehlo.negate %0 : tensor<8x4xf32>
%2 = stablehlo.add %1, %arg1 : tensor<8x4xf32>
return %0, %2 : tensor<8x4xf32>, tensor<8x4xf32>""",
        results=f"{_f('8x4')}, {_f('8x4')}",
        expected={"%arg0": '[{?}, {"b", ?}]', "%0": '[{?}, {"b", ?}]', "%1": '[{?}, {"b", ?}]', "result 0": '[{?}, {"b", ?}]'},
    ),
    Case(
        section="11",
        says="Op-priority: an element-wise op has its way before a matmul that comes first.",
        name="op-priority",
        arguments=", ".join([_x("arg0", "8x4", '[{"a", ?}, {?}]'), _x("arg1", "4x16"), _x("arg2", "8x16", '[{?}, {"a"}]')]),
        body="""
%0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x16xf32>) -> tensor<8x16xf32>
%1 = stablehlo.add %0, %arg2 : tensor<8x16xf32>
return %1 : tensor<8x16xf32>""",
        results=_f("8x16"),
        expected={"%0": '[{?}, {"a", ?}]', "%1": '[{?}, {"a", ?}]', "%arg1": '[{?}, {"a", ?}]'},
    ),
    Case(
        section="11",
        says="Without the levels the order of the program decides.",
        name="op-priority",
        options=PropagationOptions(run_op_priority=False),
        arguments=", ".join([_x("arg0", "8x4", '[{"a", ?}, {?}]'), _x("arg1", "4x16"), _x("arg2", "8x16", '[{?}, {"a"}]')]),
        body="""
%0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x16xf32>) -> tensor<8x16xf32>
%1 = stablehlo.add %0, %arg2 : tensor<8x16xf32>
return %1 : tensor<8x16xf32>""",
        results=_f("8x16"),
        expected={"%0": '[{"a", ?}, {?}]'},
    ),
    Case(
        section="11",
        says="A value that is read twice waits for those that are read once.",
        name="op-priority",
        arguments=", ".join([_x("arg0", "8x4", '[{"a", ?}, {?}]'), _x("arg1", "8x4", '[{?}, {"a", ?}]'), _x("arg2", "8x4")]),
        body="""
%0 = stablehlo.add %arg0, %arg2 : tensor<8x4xf32>
%1 = stablehlo.tanh %arg0 : tensor<8x4xf32>
%2 = stablehlo.add %0, %arg1 : tensor<8x4xf32>
return %1, %2 : tensor<8x4xf32>, tensor<8x4xf32>""",
        results=f"{_f('8x4')}, {_f('8x4')}",
        expected={"%0": '[{?}, {"a", ?}]', "%2": '[{?}, {"a", ?}]', "%1": '[{"a", ?}, {?}]', "%arg2": '[{?}, {"a", ?}]'},
    ),
    Case(
        section="12",
        says="User-priority: a dim of a lower priority waits, and takes what is left.",
        name="user-priority",
        arguments=", ".join([_x("arg0", "8x4", '[{"a"}p1, {?}]'), _x("arg1", "8x4", '[{?}, {"a"}]'), _x("arg2", "8x4", '[{"b"}p2, {?}]')]),
        body="""
%0 = stablehlo.add %arg0, %arg1 : tensor<8x4xf32>
%1 = stablehlo.add %0, %arg2 : tensor<8x4xf32>
return %1 : tensor<8x4xf32>""",
        results=_f("8x4"),
        expected={"%arg0": '[{"a"}, {?}]', "%0": '[{"b", ?}, {"a", ?}]', "%1": '[{"b", ?}, {"a", ?}]', "%arg2": '[{"b"}, {"a", ?}]'},
    ),
    Case(
        section="12",
        says="An empty open dim with a priority is closed until its turn.",
        name="user-priority",
        arguments=", ".join([_x("arg0", "8x4", '[{"a"}, {"b"}p1]'), _x("arg1", "8x4", "[{?}p2, {?}]")]),
        body=_ADD,
        results=_f("8x4"),
        expected={"%arg1": '[{"a", ?}, {"b", ?}]', "%0": '[{"a", ?}, {"b", ?}]'},
    ),
    Case(
        section="13",
        says="Conservative: a part of an axis is not propagated.",
        options=PropagationOptions(conservative=True),
        arguments=_x("arg0", "8x4", '[{"a", "b":(1)2}, {"c"}]'),
        body=_TANH,
        results=_f("8x4"),
        expected={"%0": '[{"a", ?}, {"c", ?}]'},
    ),
    Case(
        section="13",
        says="The basic strategy can be asked of the other passes.",
        name="aggressive",
        options=PropagationOptions(strategy="basic"),
        arguments=", ".join([_x("arg0", "8x4", '[{"a", ?}, {?}]'), _x("arg1", "4x16", '[{?}, {"a", ?}]')]),
        body=_DOT,
        results=_f("8x16"),
        expected={"%0": None},
    ),
    Case(
        section="14",
        says="Unreduced axes never propagate.",
        name="user-priority",
        arguments=_x("arg0", "8x4", '[{"a"}p1, {?}], unreduced={"b"}'),
        body=_TANH,
        results=_f("8x4"),
        expected={"%arg0": '[{"a"}, {?}], unreduced={"b"}', "%0": '[{"a", ?}, {?}]'},
    ),
)
