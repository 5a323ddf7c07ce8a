"""Pointwise chains: what is fused, what fusing saves, and what a copy inside a chain costs."""

from __future__ import annotations

import numpy as np
from lowered import lowered, random_assignment
from programs import Builder, trained_mlp

from solver_shard.graph.nodes import OpNode
from solver_shard.graph.strategies import fused_tensors
from solver_shard.program import Phase, Program, Ref, Role, constrain
from solver_shard.rules.rulebook import Rulebook


def _fused_names(program: Program) -> set[str]:
    rulebook = Rulebook()
    rules = [rulebook.rule(program, i) for i in range(len(program.ops))]
    return {program.tensors[t].name for t in fused_tensors(program, rules)}


def test_links_between_pointwise_ops_and_casts_are_fused() -> None:
    b = Builder()
    x = b.input("x", 8, 4)
    a = b.call("aten.relu.default", (x,), {"self": Ref(0)}, (8, 4), result="a")
    c = b.call("aten._to_copy.default", (a,), {"self": Ref(0), "dtype": "bf16"}, (8, 4), result="c")
    b.call("aten.neg.default", (c,), {"self": Ref(0)}, (8, 4), role=Role.OUTPUT, result="y")
    assert _fused_names(b.program(len(b.tensors) - 1, name="chain")) == {"a", "c"}


def test_a_chain_goes_through_the_places_of_pins_and_relays() -> None:
    b = Builder()
    x = b.input("x", 8, 4)
    a = b.call("aten.relu.default", (x,), {"self": Ref(0)}, (8, 4), result="a")
    c = b.call("aten.neg.default", (a,), {"self": Ref(0)}, (8, 4), result="c")
    b.call(
        "aten.sum.dim_IntList", (c,), {"self": Ref(0), "dim": (1,), "keepdim": True, "dtype": None}, (8, 1), role=Role.OUTPUT, result="y"
    )
    program = b.program(len(b.tensors) - 1, name="chain")
    assert _fused_names(constrain(program, {}, (a, c))[0]) == {"a", "a (as made)"}


def test_what_is_read_twice_later_or_otherwise_is_written() -> None:
    b = Builder()
    x = b.input("x", 8, 4)
    twice = b.call("aten.relu.default", (x,), {"self": Ref(0)}, (8, 4), result="twice")
    square = b.call("aten.mul.Tensor", (twice, twice), {"self": Ref(0), "other": Ref(1)}, (8, 4), result="square")
    summed = b.call("aten.sum.dim_IntList", (square,), {"self": Ref(0), "dim": (1,), "keepdim": True, "dtype": None}, (8, 1), result="s")
    narrow = b.call("aten.neg.default", (summed,), {"self": Ref(0)}, (8, 1), result="narrow")
    saved = b.call("aten.add.Tensor", (x, narrow), {"self": Ref(0), "other": Ref(1)}, (8, 4), result="saved")
    b.call("aten.neg.default", (saved,), {"self": Ref(0)}, (8, 4), result="late", phase=Phase.BACKWARD)
    b.call("aten.neg.default", (len(b.tensors) - 1,), {"self": Ref(0)}, (8, 4), role=Role.OUTPUT, result="y", phase=Phase.BACKWARD)
    assert _fused_names(b.program(len(b.tensors) - 1, name="kept")) == {"late"}


def test_fused_ops_cost_less_and_copies_inside_a_chain_pay_for_memory() -> None:
    program = trained_mlp(1 << 14, 1 << 10, 1 << 11, 1)
    plain, fused = lowered(program, "2,2"), lowered(program, "2,2", fusion=True)
    assert fused.lowering.fused
    cheaper = 0
    for v, node in enumerate(plain.lowering.nodes):
        if isinstance(node, OpNode):
            before, after = plain.graph.node_costs(v), fused.graph.node_costs(v)
            assert (after <= before).all()
            cheaper += bool((after < before).any())
    assert cheaper == 2  # the maker and the reader of the one link
    assert (plain.graph.usages == fused.graph.usages).all()
    spills = set()
    for seed in range(12):
        assignment = random_assignment(fused.graph, seed)
        plan = fused.plan(assignment)
        assert fused.evaluate(plan).total_ns == fused.graph.cost(assignment)
        for reshard in plan.reshards:
            assert bool(reshard.traffic_ns) == (reshard.copy and reshard.tensor in fused.lowering.fused)
            spills.add(reshard.traffic_ns)
        # whatever is chosen, a broken chain costs at least what it costs without fusing
        cost = plain.graph.cost(assignment)
        broken = sum(reshard.traffic_ns for reshard in plan.reshards)
        assert fused.graph.cost(assignment) <= cost + broken
    assert len(spills) > 1
    assert np.array_equal(plain.graph.intervals, fused.graph.intervals)
