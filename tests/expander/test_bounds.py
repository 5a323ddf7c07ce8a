"""The search does not outgrow memory on ops with many inputs; what then runs is the full product."""

from __future__ import annotations

import tracemalloc

import pytest

from solver_shard.costs.dtensor import DTensorCosts
from solver_shard.expander.call import Meta, Operand, PlacedCall
from solver_shard.expander.expander import Expander, SearchExhaustedWarning
from solver_shard.expander.pricing import DTensorPricing
from solver_shard.expander.search import MAX_STATES, expand_exhaustively, search, searchable
from solver_shard.expander.single_axis import Cut, SingleAxis, Strategies, prepare
from solver_shard.layout import R
from solver_shard.mesh import Mesh
from solver_shard.program import Ref

MESH = Mesh.parse("2,2,2")
PRICING = DTensorPricing(DTensorCosts(mesh_shape=MESH.shape, devices_per_host=8), MESH)
LAYOUTS = ("S(0)S(1)S(2)", "S(1)S(2)S(0)", "S(2)S(0)S(1)", "S(2)S(1)S(0)")


def many(count: int) -> tuple[PlacedCall, SingleAxis]:
    """An op like cat of this many tensors, each cut in its own way."""
    operands = tuple(Operand.parse(f"f32[8,8,8]| {LAYOUTS[i % len(LAYOUTS)]}", MESH) for i in range(count))
    attributes = {f"x{i}": Ref(i) for i in range(count)}
    call = PlacedCall(
        op="my.cat.default", mesh=MESH, operands=operands, results=(Meta(shape=(8, 8, 8), dtype="f32"),), attributes=attributes
    )
    return call, SingleAxis(strategies=tuple((Cut(d),) * (count + 1) for d in range(3)))


def test_a_search_of_many_inputs_stops_at_its_bound_of_states() -> None:
    call, given = many(9)
    prepared = prepare(call, given)
    assert searchable(prepared)
    tracemalloc.start()
    assert search(prepared, PRICING, most=5000) is None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5000 * 5000  # bytes: with all that a state reaches before the bound is looked at again


@pytest.mark.filterwarnings("error")
def test_what_is_searched_to_the_end_does_not_depend_on_the_bound() -> None:
    call, given = many(2)
    prepared = prepare(call, given)
    free, bounded = search(prepared, PRICING, most=10**9), search(prepared, PRICING, most=MAX_STATES)
    assert free is not None
    assert bounded == free
    assert search(prepared, PRICING, most=free.visited // 2) is None


def test_beyond_the_bound_the_full_product_is_expanded_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    call, given = many(9)
    strategies = Strategies()
    strategies.register(call.op)(lambda call: given.strategies)
    monkeypatch.setattr("solver_shard.expander.expander.search", lambda prepared, pricing: search(prepared, pricing, most=2000))
    with pytest.warns(SearchExhaustedWarning, match=r"my\.cat\.default: the search found no strategy; all combinations are expanded"):
        found = Expander(PRICING, strategies=strategies).expand(call)
    assert found.how == "exhaustive"
    assert found == expand_exhaustively(prepare(call, given), PRICING)[0]
    assert len(set(found.inputs)) == 1  # all tensors are cut alike while it runs
    assert found.results[0] == found.inputs[0] != (R, R, R)
