"""Single-axis strategies: where they come from, how they are fitted to a call, what the full product of them is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from solver_shard.costs.dtensor import DTensorCosts
from solver_shard.errors import InputError, RuleError
from solver_shard.expander.call import Meta, Operand, PlacedCall, element_op, elements, is_list_op
from solver_shard.expander.expander import Expander, SearchExhaustedWarning, call_of, dtensor_strategies
from solver_shard.expander.pricing import DTensorPricing
from solver_shard.expander.search import combinations, expand_exhaustively, search, searchable
from solver_shard.expander.single_axis import Cut, SingleAxis, Strategies, prepare
from solver_shard.layout import P, R, S, show, strided
from solver_shard.mesh import Mesh
from solver_shard.program import Ref

MESH = Mesh.parse("dp=2,tp=2")
PRICING = DTensorPricing(DTensorCosts(mesh_shape=MESH.shape, devices_per_host=4), MESH)


def unary(
    text: str, *, op: str = "my.op.default", results: Sequence[Meta | None] | None = None, mesh: Mesh = MESH, **more: Any
) -> PlacedCall:
    operand = Operand.parse(text, mesh)
    made = (Meta(shape=operand.shape, dtype=operand.dtype),) if results is None else tuple(results)
    return PlacedCall(op=op, mesh=mesh, operands=(operand,), results=made, attributes={"self": Ref(0)}, **more)


def table_of(*rows: Sequence[Any], **flags: Any) -> SingleAxis:
    return SingleAxis(strategies=tuple(map(tuple, rows)), **flags)


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("f32[8,8]| S(0)R", "S(1)S(1) RR"),
        ("f32[8,8]| RR", "RR"),
        ("f32[8,8]| PR", "RR"),
        ("f32[8,8]| _S(0)S(0)", "_S(1,2)_S(1,2) S(1)S(1) RR"),
    ],
)
def test_placeholders_are_filled_with_the_kinds_of_shard_among_the_inputs(text: str, filled: str) -> None:
    prepared = prepare(unary(text), table_of([Cut(1), Cut(1)]))
    assert sorted(map(show, prepared.strategies)) == sorted(filled.split())


def test_replicating_everything_is_added_once() -> None:
    assert prepare(unary("f32[8]| RR"), table_of()).strategies == ((R, R),)
    assert prepare(unary("f32[8]| RR"), table_of([R, R])).strategies == ((R, R),)


def test_a_result_that_is_masked_off_has_no_placement() -> None:
    call = unary("f32[8]| S(0)R", results=(Meta(shape=(8,), dtype="f32"), None))
    prepared = prepare(call, table_of([Cut(0), None, Cut(0)]))
    assert prepared.strategies == ((R, None, R), (S(0), None, S(0)))
    assert prepared.results(call.layouts) == ((S(0), R), None)


@pytest.mark.parametrize("row", [[R], [R, R, R]])
def test_a_strategy_of_the_wrong_length_is_an_error_that_names_the_op(row: list[Any]) -> None:
    with pytest.raises(
        RuleError, match=rf"my\.op\.default: single-axis strategy 1 has {len(row)} placements, expected 2 \(1 outputs, then 1"
    ):
        prepare(unary("f32[8]| RR"), table_of([R, R], row))


def test_only_outputs_can_be_masked_off() -> None:
    with pytest.raises(RuleError, match="no placement for an input"):
        prepare(unary("f32[8]| RR"), table_of([R, None]))


def test_the_lookup_and_what_an_input_may_be() -> None:
    prepared = prepare(unary("f32[8,8]| S(0)R"), table_of([Cut(0), Cut(0)], [P("sum"), Cut(1)], [P("sum"), P("sum")]))
    assert {show(key): show(prepared.strategies[k][:1]) for key, k in prepared.lookup.items()} == {
        "R": "R",
        "S(0)": "S(0)",
        "S(1)": "P(sum)",
        "P(sum)": "P(sum)",
    }
    assert prepared.shardings == ((S(0), S(1)),)
    assert prepared.partials == ((P("sum"),),)


@pytest.mark.parametrize(
    ("text", "uneven", "kept"),
    [
        ("f32[3]| S(0)R", False, True),  # 3 rows for 2 devices: shorter, but something for everyone
        ("f32[1]| S(0)R", False, False),
        ("f32[1]| S(0)R", True, True),  # it has that layout, and the op allows keeping it
        ("f32[3]| S(0)S(0)", False, False),
        ("f32[3]| S(0)S(0)", True, True),
    ],
)
def test_an_input_may_keep_a_layout_that_is_too_fine_where_the_op_allows_it(text: str, uneven: bool, kept: bool) -> None:
    call = unary(text)
    prepared = prepare(call, table_of([Cut(0), Cut(0)], allow_uneven_sharding=uneven))
    assert (prepared.results(call.layouts) is not None) == kept
    assert (call.layouts in {inputs for inputs, _ in combinations(prepared)}) == kept


def test_a_layout_that_is_too_fine_is_never_chosen_anew() -> None:
    call = unary("f32[1,4]| S(1)R")
    prepared = prepare(call, table_of([Cut(0), Cut(0)], allow_uneven_sharding=True))
    assert {inputs for inputs, _ in combinations(prepared)} == {((R, R),)}


@pytest.mark.parametrize(("flag", "kept"), [(True, True), (False, False)])
def test_a_dim_of_unknown_size_is_cut_where_the_op_allows_it(flag: bool, kept: bool) -> None:
    call = unary("f32[?,4]| S(0)R")
    prepared = prepare(call, table_of([Cut(0), Cut(0)], allow_unbacked_sharding=flag))
    assert (prepared.results(call.layouts) is not None) == kept
    assert not searchable(prepared)


def test_a_dim_of_unknown_size_needs_the_ops_word() -> None:
    call = unary("f32[?,4]| S(0)R")
    with pytest.raises(InputError, match=r"dim 0 of f32\[\?, 4\] has no known size.*allow_unbacked_sharding"):
        prepare(call, table_of([Cut(0), Cut(0)])).results(call.layouts)


def other_mesh(layout: str, argument: int | None) -> Iterator[Any]:
    small = Mesh.parse("dp=2")
    step = dataclasses.replace(Operand.parse(f"f32[]| {layout}", small), mesh=small)
    call = dataclasses.replace(unary("f32[8]| S(0)R"), attributes={"self": Ref(0), "factor": 2, "step": Ref(1)})
    call = dataclasses.replace(call, operands=(*call.operands, step))
    yield prepare(call, table_of([Cut(0), Cut(0), R], different_mesh_args=() if argument is None else (argument,)))


def test_inputs_on_different_meshes_are_an_error() -> None:
    with pytest.raises(InputError, match=r"different meshes, dp=2,tp=2 and dp=2 \(input 1\)"):
        next(other_mesh("R", None))


def test_an_argument_may_live_elsewhere_where_the_op_says_so() -> None:
    prepared = next(other_mesh("R", 2))
    assert prepared.elsewhere == (1,)
    assert prepared.results(prepared.call.layouts) == ((S(0), R),)
    best = expand_exhaustively(prepared, PRICING)[0]
    assert best.inputs == ((S(0), R), (R,))
    assert best.cost == 0


def test_what_lives_elsewhere_must_be_replicated() -> None:
    with pytest.raises(
        InputError, match=r"input 1 lives on mesh dp=2, not on dp=2,tp=2, so it must be replicated there, but it is P\(sum\)"
    ):
        next(other_mesh("P", 2))


def test_an_in_place_op_keeps_the_placement_of_self() -> None:
    call = unary("f32[8,8]| S(0)R", op="my.op_.default")
    found = expand_exhaustively(prepare(call, table_of([Cut(0), Cut(0)], [Cut(1), Cut(1)])), PRICING)
    assert [(e.inputs, e.results) for e in found] == [((call.layouts[0],), (call.layouts[0],))]


def test_an_in_place_op_that_cannot_keep_it_is_an_error() -> None:
    call = unary("f32[8,8]| PR", op="my.op_.default")
    assert search(prepare(call, table_of([Cut(0), Cut(0)])), PRICING) is None
    with pytest.raises(InputError, match=r"my\.op_\.default: no strategy keeps the layout of the tensor that it writes to.*P\(sum\)R"):
        expand_exhaustively(prepare(call, table_of([Cut(0), Cut(0)])), PRICING)


def foreach(op: str, lists: dict[str, list[str]], *, results: int = 0) -> PlacedCall:
    operands, attributes = [], {}
    for name, texts in lists.items():
        attributes[name] = tuple(Ref(len(operands) + k) for k in range(len(texts)))
        operands += [Operand.parse(text, MESH) for text in texts]
    metas = tuple(Meta(shape=o.shape, dtype=o.dtype) for o in operands[:results])
    return PlacedCall(op=op, mesh=MESH, operands=tuple(operands), results=metas, attributes={**attributes, "alpha": 1})


def test_a_foreach_op_is_the_op_on_each_element() -> None:
    call = foreach("aten._foreach_add.List", {"self": ["f32[8]| S(0)R", "f32[4]| RR"], "other": ["f32[8]| S(0)R", "f32[4]| PR"]}, results=2)
    made = elements(call)
    assert [(e.op, show(e.layouts[0]), show(e.layouts[1]), str(e.results[0])) for e in made] == [
        ("aten.add.Tensor", "S(0)R", "S(0)R", "f32[8]"),
        ("aten.add.Tensor", "RR", "P(sum)R", "f32[4]"),
    ]
    first, second = Expander(PRICING).expand_elements(call)
    assert (show(first.results[0] or ()), first.cost) == ("S(0)R", 0.0)
    assert show(second.results[0] or ()) in ("RR", "P(sum)R")


@pytest.mark.parametrize(
    ("op", "element"),
    [
        ("aten._foreach_add.List", "aten.add.Tensor"),
        ("aten._foreach_mul_.Scalar", "aten.mul.Scalar"),
        ("aten._foreach_sqrt.default", "aten.sqrt.default"),
        ("aten._fused_adam_.default", "aten._fused_adam_.default"),
        ("aten._amp_foreach_non_finite_check_and_unscale_.default", "aten._amp_foreach_non_finite_check_and_unscale_.default"),
    ],
)
def test_the_op_on_one_element_is_found_by_its_schema(op: str, element: str) -> None:
    assert element_op(op) == element


def test_the_op_on_one_element_is_dtensors_for_every_foreach_op() -> None:
    from torch.distributed.tensor._ops.single_dim_strategy import _resolve_foreach_elementwise_overload

    found = 0
    for name in (n for n in dir(torch.ops.aten) if n.startswith(("_foreach_", "_amp_foreach_"))):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            theirs = _resolve_foreach_elementwise_overload(getattr(packet, overload))
            assert element_op(f"aten.{name}.{overload}") == f"aten.{name}.{overload}" if theirs is None else str(theirs)
            found += theirs is not None
    assert found > 50


def test_an_element_of_an_in_place_foreach_op_keeps_the_placement_of_self() -> None:
    (element,) = elements(foreach("aten._foreach_add_.List", {"self": ["f32[8]| RR"], "other": ["f32[8]| S(0)R"]}))
    found = Expander(PRICING).expand(element)
    assert (found.inputs[0], found.results[0]) == ((R, R), (R, R))


def test_lists_of_different_lengths_are_an_error() -> None:
    call = foreach("aten._foreach_add.List", {"self": ["f32[8]| RR"] * 2, "other": ["f32[8]| RR"] * 3})
    with pytest.raises(InputError, match=r"aten\._foreach_add\.List: argument 'other' has 3 tensors, 'self' has 2"):
        elements(call)


def test_an_element_may_live_on_a_smaller_mesh() -> None:
    small = Mesh.parse("dp=2")
    held = dataclasses.replace(Operand.parse("f32[8]| S(0)", small), mesh=small)
    call = foreach("aten._foreach_sqrt.default", {"self": ["f32[8]| S(0)R"]}, results=1)
    call = dataclasses.replace(call, operands=(held,))
    (element,) = elements(call)
    assert element.element_mesh == small
    assert Expander(PRICING).expand(element).results == ((S(0),),)


def test_an_op_of_such_a_name_without_lists_is_an_op_like_others() -> None:
    assert not is_list_op(unary("f32[8]| RR", op="aten._fused_rms_norm.default"))
    assert is_list_op(foreach("aten._foreach_sqrt.default", {"self": ["f32[8]| RR"]}))


def test_registration_takes_one_op_or_several_and_what_specialises_the_cache() -> None:
    strategies = Strategies()
    calls: list[str] = []

    @strategies.register(["my.a.default", "my.b.default"], allow_uneven_sharding=True, different_mesh_args=[1], static_arguments=["dim"])
    def both(call: PlacedCall) -> list[list[Any]]:
        calls.append(call.op)
        return [[Cut(0), Cut(0)]]

    held = strategies.get("my.b.default")
    assert held is not None
    assert held.static_arguments == ("dim", "memory_format")
    assert (held.allow_uneven_sharding, held.allow_unbacked_sharding, held.different_mesh_args) == (True, None, (1,))
    expander = Expander(PRICING, strategies=strategies)

    def ranked(**attributes: Any) -> None:
        expander.ranked(dataclasses.replace(unary("f32[8]| S(0)R", op="my.a.default"), attributes={"self": Ref(0), **attributes}))

    ranked(dim=0, scale=1)
    ranked(dim=0, scale=2)
    assert len(calls) == 1  # scale is no static argument
    ranked(dim=1, scale=2)
    ranked(dim=1, memory_format="channels_last")
    assert len(calls) == 3
    ranked(dim={0: "cannot be hashed"})
    ranked(dim={0: "cannot be hashed"})
    assert len(calls) == 5


def test_ops_that_nothing_is_known_of_are_replicated() -> None:
    found = Expander(PRICING).expand(unary("f32[8]| S(0)R", op="my.unknown.default"))
    assert found.inputs == ((R, R),)


def test_a_search_without_result_says_so_and_all_is_expanded() -> None:
    partial = unary("f32[8]| PR", op="my.op_.default")
    with pytest.warns(SearchExhaustedWarning, match="the search found no strategy"), pytest.raises(InputError, match="cannot move"):
        Expander(PRICING, strategies=_only([Cut(0), Cut(0)], op="my.op_.default")).expand(partial)


def _only(*rows: Sequence[Any], op: str = "my.op.default") -> Strategies:
    strategies = Strategies()
    strategies.register(op)(lambda call: rows)
    return strategies


def test_strided_shards_are_expanded_in_full() -> None:
    call = unary("f32[8,8]| _S(0)S(0)")
    prepared = prepare(call, table_of([Cut(0), Cut(0)], [Cut(1), Cut(1)]))
    assert not searchable(prepared)
    best = expand_exhaustively(prepared, PRICING)[0]
    assert best.inputs == ((strided(0, 2), S(0)),)
    assert best.cost == 0


@pytest.mark.parametrize("how", ["lists", "keywords"])
def test_lists_and_keyword_tensors_are_expanded_in_full(how: str) -> None:
    call = unary("f32[8]| RR", keywords=(0,)) if how == "keywords" else foreach("my.cat.default", {"tensors": ["f32[8]| RR"]}, results=1)
    assert not searchable(prepare(call, table_of()))


def test_reductions_that_do_not_commute_never_meet_on_one_tensor() -> None:
    prepared = prepare(unary("f32[8]| RR"), table_of([P("sum"), P("sum")], [P("max"), P("max")], [P("avg"), P("avg")]))
    found = {show(inputs[0]) for inputs, _ in combinations(prepared)}
    assert {"P(sum)P(avg)", "P(avg)P(sum)", "P(max)P(max)", "RP(max)"} <= found
    assert not found & {"P(sum)P(max)", "P(max)P(avg)"}


def test_dtensors_own_strategies_are_read_with_their_masks() -> None:
    inputs = [Operand.parse(text, MESH) for text in ("f32[16,8]| S(0)R", "i64[4,4]| RR")]
    found = dtensor_strategies(call_of("aten.embedding.default", inputs, MESH))
    assert found is not None
    masked = [row for row in found.strategies if row[1] == S(0)]
    assert len(masked) == 1
    assert masked[0][0] == masked[0][2] != P("sum")
    assert masked[0][0] is not None
    assert masked[0][0].is_partial  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f32[8] S(0)R", "cannot read input"),
        ("float[8]| RR", "dtypes:"),
        ("f32[8]| S(1)R", r"has 1 dims, S\(1\) cuts dim 1"),
        ("f32[x]| RR", "cannot read input"),
        ("f32[8]| R", "has 1 placements"),
    ],
)
def test_an_input_that_cannot_be_read_says_what_is_legal(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Operand.parse(text, MESH)


@pytest.mark.parametrize(
    ("op", "inputs", "message"),
    [
        ("aten.nothing.default", [], "there is no op 'aten.nothing.default'"),
        ("aten.mm.default", ["f32[8,8]| RR"], "needs a tensor for argument 'mat2'"),
        ("aten.mm.default", ["f32[8,8]| RR"] * 3, "takes 2 tensors, 3 inputs were given"),
        ("aten.mm.default", ["f32[8,8]| RR", "f32[4,4]| RR"], "does not run on"),
        ("aten.view.default", ["f32[8,8]| RR"], "needs argument 'size'"),
    ],
)
def test_a_call_that_does_not_fit_its_op_says_why(op: str, inputs: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call_of(op, [Operand.parse(text, MESH) for text in inputs], MESH)
