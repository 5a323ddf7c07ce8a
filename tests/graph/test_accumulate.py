"""Steps of several microbatches, reduce dtypes and clipping in the choice graph: what they cost, what they hold, what they forbid."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from lowered import Lowered, lowered, random_assignment
from programs import trained_mlp

from solver_shard.costs.cluster import load_cluster
from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import ChoiceGraph
from solver_shard.graph.lowering import accumulator_layouts, in_place_table, norm_axes, norm_table
from solver_shard.graph.nodes import AccumulateNode, AccumulatorNode, ClipNode
from solver_shard.graph.symmetry import expand, fold, node_classes
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.pipeline import plan_program
from solver_shard.plan.plan import Plan
from solver_shard.program import DTYPE_BYTES
from solver_shard.solve.engine import solve
from solver_shard.solve.solution import Status

GRADIENTS = (AccumulateNode, AccumulatorNode, ClipNode)


def laid(*texts: str) -> tuple[Layout, ...]:
    return tuple(map(Layout.parse, texts))


def same(one: ChoiceGraph, two: ChoiceGraph) -> bool:
    arrays = ("offsets", "costs", "usages", "interval_offsets", "intervals", "edges", "edge_tables")
    alike = one.names == two.names and all(np.array_equal(getattr(one, x), getattr(two, x)) for x in arrays)
    return alike and all(np.array_equal(a, b) for a, b in zip(one.tables, two.tables, strict=True))


def test_one_microbatch_in_the_gradients_own_dtype_is_the_graph_without_options() -> None:
    program = trained_mlp(12, 8, 20, 2)
    plain, asked = lowered(program, "2,2"), lowered(program, "2,2", microbatches=1, reduce_dtype="f32")
    assert same(plain.graph, asked.graph)
    assert not [node for node in plain.lowering.nodes if isinstance(node, GRADIENTS)]


def test_accumulators_may_wait_for_sums_that_the_gradient_leaves_open() -> None:
    assert accumulator_layouts((8,), (2, 2), {"sum", "max"}) == laid(
        "RR", "RS(0)", "RP(sum)", "S(0)R", "S(0)S(0)", "S(0)P(sum)", "P(sum)R", "P(sum)S(0)", "P(sum)P(sum)"
    )
    assert accumulator_layouts((8,), (2,), set()) == laid("R", "S(0)")


def test_what_a_device_cuts_from_its_accumulator_lies_in_its_bytes() -> None:
    held, need = laid("P(sum)", "R", "S(0)"), laid("R", "S(0)", "S(1)")
    moves = np.arange(9).reshape(3, 3)
    never = FORBIDDEN
    assert in_place_table(held, need, moves).tolist() == [
        [0, 1, 2, never, never, never],
        [3, 4, 5, never, never, never],
        [never, 7, never, 6, never, 8],
    ]


def test_a_norm_is_summed_over_every_axis_that_cuts_a_state() -> None:
    groups = norm_axes((2, 1, 4))
    assert groups == ((), (0,), (2,), (0, 2))
    table = norm_table(groups, laid("RRR", "S(0)RR", "RRS(1)", "S(0)RS(0)"))
    assert (table == 0).tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        [True, True, True, True],
    ]


@pytest.mark.parametrize("seed", range(4))
def test_forward_and_backward_are_paid_for_every_microbatch_and_the_update_once(seed: int) -> None:
    """Two and five microbatches of one plan differ by three times what a microbatch costs."""
    program = trained_mlp(12, 8, 20, 2)
    two, five = (lowered(program, "2,2", microbatches=n, overlap=0.3, clip=True, reduce_dtype="bf16") for n in (2, 5))
    assignment = random_assignment(two.graph, seed)
    plan = two.plan(assignment)
    inside = sum(c.nanoseconds for op in plan.ops for c in op.collectives)
    repeated = [r for r in plan.reshards if r.purpose not in ("optimizer", "update")]
    one = sum(op.nanoseconds for op in plan.ops) + inside + sum(r.nanoseconds + r.traffic_ns for r in repeated)
    assert five.graph.cost(assignment) - two.graph.cost(assignment) == 3 * one
    assert five.graph.profile(assignment).tolist() == two.graph.profile(assignment).tolist()
    once = [r for r in plan.reshards if r.purpose in ("optimizer", "update")]
    rest = plan.costs.update_ns + sum(r.nanoseconds for r in once) + (plan.clip.nanoseconds if plan.clip else 0)
    assert two.graph.cost(assignment) == 2 * one + rest


def test_an_accumulator_stays_for_the_whole_step_in_the_reduce_dtype() -> None:
    case = lowered(trained_mlp(12, 8, 20, 1), "2,2", microbatches=2, reduce_dtype="bf16")
    for p, g in case.program.gradients.items():
        v = case.lowering.index[AccumulatorNode, g, 0]
        node = case.lowering.nodes[v]
        assert case.graph.node_intervals(v).tolist() == [[0, case.lowering.lives.end]]
        shape = case.program.tensors[p].shape
        for layout, nbytes in zip(node.layouts, case.graph.node_usages(v), strict=True):
            assert nbytes == np.prod(layout.local_shape(shape, (2, 2))) * DTYPE_BYTES["bf16"]


def test_a_reduced_gradient_is_held_in_its_dtype_even_where_nothing_is_communicated() -> None:
    case = lowered(trained_mlp(12, 8, 20, 1), "2", reduce_dtype="bf16")
    met = set()
    for seed in range(20):
        for reshard in case.plan(random_assignment(case.graph, seed)).reshards:
            if reshard.purpose == "optimizer":
                elements = np.prod(reshard.layout.local_shape(case.program.tensors[reshard.tensor].shape, (2,)))
                assert reshard.copy
                assert reshard.nbytes == 2 * elements
                assert reshard.traffic_ns > 0
                met.add(bool(reshard.steps))
    assert met == {True, False}


@pytest.mark.parametrize("seed", range(3))
def test_folding_keeps_cost_and_memory_of_every_tied_assignment(seed: int) -> None:
    """One clip node touches the states of all layers; the layers' accumulators are tied like all that is theirs."""
    low = lowered(trained_mlp(16, 32, 64, 4), "2,2", microbatches=2, clip=True, reduce_dtype="bf16")
    folded = fold(low.graph, node_classes(low.lowering))
    plain = lowered(trained_mlp(16, 32, 64, 4), "2,2")
    shrunk = fold(plain.graph, node_classes(plain.lowering)).graph.size / plain.graph.size
    assert folded.graph.size / low.graph.size <= shrunk + 0.05
    folded.graph.validate()
    assignment = random_assignment(folded.graph, seed)
    free = expand(folded, assignment)
    assert low.graph.allowed(free)
    assert folded.graph.cost(assignment) == low.graph.cost(free)
    assert folded.graph.profile(assignment).tolist() == low.graph.profile(free).tolist()
    rng = np.random.default_rng(seed)
    chosen = [int(rng.integers(k)) for k in folded.graph.sizes()]
    assert folded.graph.allowed(chosen) == low.graph.allowed(expand(folded, chosen))


def test_clipping_prefers_the_axes_that_states_are_cut_by() -> None:
    case: Lowered = lowered(trained_mlp(64, 32, 64, 2), "2,2", clip=True)
    solution = solve(case.graph, gap=0.0, time_limit=20)
    assert solution.status is Status.OPTIMAL
    assert solution.assignment is not None
    plan = case.plan(solution.assignment)
    cut = {plan.mesh.names[a] for t in plan.tensors if t.state is not None for a, p in enumerate(t.state) if p.is_shard}
    assert set(plan.clip.axes if plan.clip is not None else ()) == cut
    without = lowered(trained_mlp(64, 32, 64, 2), "2,2")
    cheaper = solve(without.graph, gap=0.0, time_limit=20)
    assert cheaper.objective is not None
    assert solution.objective is not None
    assert cheaper.objective < solution.objective


def planned(tokens: int, microbatches: int, memory: int = 1 << 40) -> Plan:
    options = Options(memory_limit=memory, microbatches=microbatches, gap=0.0)
    program = trained_mlp(tokens, 64, 256, 2)
    return plan_program(program, mesh=Mesh.parse("4"), cluster=load_cluster("h100"), options=options)


def test_more_microbatches_fit_where_one_does_not_and_take_longer() -> None:
    """The same 4096 tokens in one, four and sixteen microbatches: less and less memory, more and more time."""
    plans = [planned(4096 // count, count) for count in (1, 4, 16)]
    peaks, times = [plan.memory.peak for plan in plans], [plan.costs.total_ns for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert times == sorted(times)
    assert all(plan.certificate.status == "optimal" for plan in plans)
    tight = planned(4096 // 16, 16, memory=(peaks[1] + peaks[2]) // 2)
    assert tight.memory.peak <= tight.memory.limit < peaks[1]
    least = solve(lowered(trained_mlp(4096, 64, 256, 2), "4").graph, objective="memory", gap=0.0, time_limit=20)
    assert least.peak_bound > tight.memory.limit, "one microbatch does not fit, however it is laid out"


def test_a_microbatch_costs_as_much_as_a_step_of_its_size() -> None:
    """With gradients as cheap as can be, N microbatches cost N times forward and backward."""
    single, many = planned(256, 1), planned(256, 16)
    ops = sum(op.nanoseconds for op in single.ops)
    assert many.costs.compute_ns >= 16 * min(ops, sum(op.nanoseconds for op in many.ops))
    assert single.costs.total_ns < many.costs.total_ns <= 16 * single.costs.total_ns + many.costs.compute_ns
    assert dataclasses.replace(many.options, microbatches=1) == single.options
