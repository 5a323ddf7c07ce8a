"""The search against DTensor's own, against the full product, and its moves on real shards."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch.distributed as dist
from expand_cases import FAMILIES, MESHES, Case, device_mesh, our_search_input, random_case, their_cost, their_schema, their_search
from shard_simulator import collective, local_move, rebuild, scatter
from torch.testing._internal.distributed.fake_pg import FakeStore

from solver_shard.costs.cluster import load_cluster
from solver_shard.costs.collectives import Collectives
from solver_shard.costs.dtensor import DTensorCosts
from solver_shard.expander.pricing import ClusterPricing, DTensorPricing, MovePricing
from solver_shard.expander.search import combinations, expand_exhaustively, search
from solver_shard.expander.single_axis import SingleAxis, mixed, prepare
from solver_shard.layout import Layout, P, Placements, R, dtensor_placements
from solver_shard.mesh import Mesh
from solver_shard.rules.table import RuleTable, load_table


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def table() -> RuleTable:
    return load_table()


def cases(text: str, table: RuleTable, count: int, seed: int = 0) -> Iterator[Case]:
    rng, mesh = random.Random(seed), Mesh.parse(text)
    for k in range(count):
        yield random_case(rng, mesh, table, FAMILIES[k % len(FAMILIES)])


def dtensor_pricing(text: str) -> DTensorPricing:
    return DTensorPricing(DTensorCosts(mesh_shape=Mesh.parse(text).shape, devices_per_host=1))


def cluster_pricing(text: str) -> ClusterPricing:
    return ClusterPricing(Collectives(Mesh.parse(text), load_cluster("h100")))


@pytest.mark.parametrize("text", MESHES)
def test_the_cost_is_that_of_dtensors_own_search(text: str, table: RuleTable) -> None:
    # a slice of the 2,000 calls of experiments/expand.py; sums are taken in another order, so the last digits may differ
    mesh, pricing = device_mesh(Mesh.parse(text)), dtensor_pricing(text)
    searched = 0
    for case in cases(text, table, 30):
        theirs = their_search(*their_schema(case, mesh), mesh)
        ours = search(our_search_input(case), pricing)
        assert (ours is None) == (theirs is None), case
        if ours is not None and theirs is not None:
            assert math.isclose(ours.cost, their_cost(theirs), rel_tol=1e-9), case
            searched += ours.how == "search"
    assert searched >= 10


@pytest.mark.parametrize("text", ["4", "2,2"])
def test_the_states_that_fit_are_those_of_dtensors_search(text: str, table: RuleTable) -> None:
    mesh, pricing = device_mesh(Mesh.parse(text)), dtensor_pricing(text)
    for case in itertools.islice((c for c in cases(text, table, 100) if len(c.call.operands) < 3), 20):
        collected: set[tuple[tuple[object, ...], ...]] = set()
        their_search(*their_schema(case, mesh), mesh, collect=collected)
        theirs = {tuple(map(dtensor_placements, state)) for state in collected}
        ours: set[tuple[tuple[object, ...], ...]] = set()
        prepared = our_search_input(case)
        search(prepared, pricing, matches=ours)  # type: ignore[arg-type]
        # theirs also has states with reductions that do not commute (P(max)P(sum)), which no executor accepts
        assert ours == {state for state in theirs if not any(mixed(layout) for layout in state)}, case  # type: ignore[arg-type]
        # and all of the full product that a path leads to
        reached = {
            i
            for i, _ in combinations(prepared)
            if all(reachable(operand.layout, dst) for operand, dst in zip(case.call.operands, i, strict=True))
        }
        assert ours == reached, case


def reachable(src: Placements, dst: Placements) -> bool:
    """No shard becomes partial, no reduction another."""
    return not any(after.is_partial and before != after and before != R for before, after in zip(src, dst, strict=True))


@pytest.mark.parametrize("text", MESHES)
def test_the_cost_is_at_most_that_of_the_full_product_by_greedy_redistribution(text: str, table: RuleTable) -> None:
    # it is less where the greedy path gathers a nested shard and cuts it again, or exchanges where it could slice and gather less
    pricing, less, equal = dtensor_pricing(text), 0, 0
    for case in cases(text, table, 40):
        prepared = our_search_input(case)
        found, full = search(prepared, pricing), expand_exhaustively(prepared, pricing)
        assert found is not None
        assert found.cost <= full[0].cost * (1 + 1e-9), case
        less += found.cost < full[0].cost * (1 - 1e-9)
        equal += math.isclose(found.cost, full[0].cost, rel_tol=1e-9)
    assert equal > less
    if "," in text:
        assert less


@pytest.mark.parametrize("text", ["4", "2,2"])
@pytest.mark.parametrize("price", [dtensor_pricing, cluster_pricing])
def test_the_search_finds_the_cheapest_of_all_states(text: str, price: type[MovePricing], table: RuleTable) -> None:
    """Against plain relaxation of the same moves until nothing changes, without priorities or bounds."""
    pricing = price(text)
    for case in itertools.islice((c for c in cases(text, table, 200, seed=3) if len(c.call.operands) < 3), 25):
        prepared = our_search_input(case)
        states: set[tuple[tuple[object, ...], ...]] = set()
        found = search(prepared, pricing, matches=states)  # type: ignore[arg-type]
        assert found is not None
        best = math.inf
        distances = [relax(prepared, pricing, i) for i in range(len(case.call.operands))]
        for state in states:
            best = min(best, sum(distances[i][layout] for i, layout in enumerate(state)))
        assert math.isclose(found.cost, best, rel_tol=1e-9, abs_tol=1e-9), case


def relax(prepared: object, pricing: MovePricing, number: int) -> dict[tuple[object, ...], float]:
    from solver_shard.expander.pricing import impossible
    from solver_shard.expander.search import neighbours

    operand = prepared.call.operands[number]  # type: ignore[attr-defined]
    costs = {operand.layout: 0.0}
    changed = True
    while changed:
        changed = False
        for layout, cost in list(costs.items()):
            for axis in range(len(layout)):
                for kind in neighbours(layout, axis, prepared.shardings[number], prepared.partials[number]):  # type: ignore[attr-defined]
                    if impossible(operand.layout[axis], kind):
                        continue
                    after = (*layout[:axis], kind, *layout[axis + 1 :])
                    total = cost + pricing.cost(operand, layout, axis, kind)
                    if total < costs.get(after, math.inf) - 1e-12 * max(total, 1):
                        costs[after] = total
                        changed = True
    return costs


@pytest.mark.parametrize("text", MESHES)
def test_a_found_strategy_fits_the_inputs_it_returns_and_costs_the_sum_of_its_moves(text: str, table: RuleTable) -> None:
    for pricing in (dtensor_pricing(text), cluster_pricing(text)):
        for case in cases(text, table, 24, seed=5):
            prepared = our_search_input(case)
            found = search(prepared, pricing)
            assert found is not None
            assert prepared.results(found.inputs) == found.results
            assert (found.inputs, found.results) in set(combinations(prepared))
            assert math.isclose(found.cost, sum(move.cost for move in found.moves), rel_tol=1e-9)
            now = list(case.call.layouts)
            for move in found.moves:
                assert now[move.operand] == move.before
                now[move.operand] = move.after
            assert tuple(now) == found.inputs


@pytest.mark.parametrize("text", ["4", "2,2", "2,3", "2,2,2"])
def test_moves_run_on_real_shards(text: str, table: RuleTable) -> None:
    mesh, pricing, rng, ran = Mesh.parse(text), dtensor_pricing(text), np.random.default_rng(0), 0
    for case in cases(text, table, 60, seed=7):
        if any(operand.shape and max(operand.sizes) > 60 for operand in case.call.operands):
            continue
        found = search(our_search_input(case), pricing)
        assert found is not None
        for i, operand in enumerate(case.call.operands):
            value = rng.integers(-9, 9, operand.sizes).astype(float)
            shards = scatter(value, Layout(operand.layout), mesh.shape, rng)
            for move in found.moves:
                if move.operand != i:
                    continue
                if move.kind == "partial" and move.after[move.axes[0]] != P("sum"):
                    break  # the simulator makes sums only
                before, after = Layout(move.before), Layout(move.after)
                if move.kind in ("slice", "partial"):
                    shards = local_move(shards, before, after, operand.sizes, mesh.shape)
                else:
                    shards = collective(move.kind, move.axes, shards, before, after, operand.sizes, mesh.shape)
                np.testing.assert_allclose(rebuild(shards, after, operand.sizes, mesh.shape), value)
                ran += 1
    assert ran > 5


def test_another_strategy_never_raises_the_cost(table: RuleTable) -> None:
    lowered = 0
    for text in ("4", "2,2"):
        pricing = dtensor_pricing(text)
        for case in cases(text, table, 40, seed=11):
            costs = []
            for count in range(len(case.given.strategies) + 1):
                fewer = SingleAxis(
                    **{
                        **{f.name: getattr(case.given, f.name) for f in dataclasses.fields(SingleAxis)},
                        "strategies": case.given.strategies[:count],
                    }
                )
                found = search(prepare(case.call, fewer), pricing)
                costs.append(math.inf if found is None else found.cost)
            assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(costs)), case
            lowered += costs[-1] < costs[0]
    assert lowered > 5
