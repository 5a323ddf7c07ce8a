"""What lowering makes of a program: nodes, tables, lives, ties; and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from lowered import lowered, random_assignment
from programs import Builder, mlp, trained_mlp

from solver_shard.costs.cluster import load_cluster
from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.errors import InputError
from solver_shard.graph.nodes import HoldNode, MasterNode, ReshardNode, ResultNode, SourceNode, StateNode, StepNode, TensorNode
from solver_shard.graph.symmetry import expand, fold, node_classes, op_classes
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.pipeline import plan_program
from solver_shard.program import Role


def names(strategies: list[tuple[str, ...]]) -> set[str]:
    return {" ".join(parts) for parts in strategies}


def test_an_op_has_the_product_of_its_single_axis_strategies() -> None:
    low = lowered(mlp(16, 32, 64), "dp=2,tp=4")
    column = low.lowering.strategies[0]
    assert names([column.names(k) for k in range(len(column.axis_choice))]) == {f"{x} {y}" for x in "Rabc" for y in "Rabc"}


def test_a_dim_is_not_cut_into_more_shards_than_it_has_elements() -> None:
    low = lowered(mlp(6, 32, 64), "dp=2,tp=4")
    column = low.lowering.strategies[0]
    assert "a a" not in names([column.names(k) for k in range(len(column.axis_choice))])


def test_an_axis_of_size_one_only_replicates() -> None:
    one, two = lowered(mlp(16, 32, 64), "dp=2,tp=4"), lowered(mlp(16, 32, 64), "dp=2,x=1,tp=4")
    assert one.graph.sizes().tolist() == two.graph.sizes().tolist()


def test_readers_of_one_family_share_one_reshard() -> None:
    b = Builder()
    x = b.input("x", 8, 16)
    outs = [b.einsum("ac,bc->ab", x, b.weight(f"w{k}", 16, 16), role=Role.OUTPUT, result=f"output.{k}") for k in range(3)]
    program = b.program(*outs)
    low = lowered(program, "2,2")
    assert [len(g.readers) for g in low.lowering.lives.groups[x]] == [3]


def test_an_alias_costs_nothing_and_has_the_bytes_where_no_other_group_needs_them() -> None:
    low = lowered(mlp(16, 32, 64), "dp=2,tp=4")
    final = 0
    for v, node in enumerate(low.lowering.nodes):
        if isinstance(node, ReshardNode):
            group, held = low.lowering.lives.groups[node.tensor][node.group], low.graph.node_usages(v)[: node.aliases]
            assert (held > 0).all() if group.final else not held.any()
            assert not group.final or low.lowering.lives.base[node.tensor][1] == group.start
            final += group.final
            assert (low.graph.node_usages(v)[node.aliases :] > 0).all()
    assert final == 2  # of what the first product and the relu make


@pytest.mark.parametrize("mesh", ["2,2", "2,2,2", "a=2,b=2x2"])
def test_only_what_is_stored_or_reduced_is_cut_in_another_order(mesh: str) -> None:
    low = lowered(trained_mlp(16, 32, 64, 1), mesh).lowering
    gradients = set(low.program.gradients.values())
    for node in (node for node in low.nodes if isinstance(node, TensorNode)):
        strided = any(p.is_strided for layout in node.layouts for p in layout)
        parameter = isinstance(node, SourceNode) and low.program.tensors[node.tensor].role is Role.PARAMETER
        stored = isinstance(node, (StateNode, MasterNode, StepNode)) or parameter
        reduced = isinstance(node, ReshardNode) and node.tensor in gradients
        held = isinstance(node, HoldNode) and low.program.tensors[node.tensor].role is Role.PARAMETER
        assert strided == (stored or reduced or held), node
    assert not any(p.is_strided for s in low.strategies for c in (*s.operands, *s.results) for layout in c.layouts for p in layout)


def test_a_view_has_no_bytes_and_prolongs_what_it_views() -> None:
    b = Builder()
    x = b.input("x", 8, 16)
    y = b.relu(x)
    z = b.call("aten.view.default", (y,), {"self": b.ref(0), "size": (8, 4, 4)}, (8, 4, 4))
    w = b.relu(x)
    v = b.relu(z)
    out = b.add(b.call("aten.view.default", (v,), {"self": b.ref(0), "size": (8, 16)}, (8, 16)), w, role=Role.OUTPUT, result="output")
    low = lowered(b.program(out), "2,2")
    view = low.lowering.index[ResultNode, z, 0]
    assert not low.graph.node_usages(view).any()
    (group,) = low.lowering.lives.groups[y]
    (reader,) = low.lowering.lives.groups[z]
    assert group.stop == low.lowering.lives.base[z][1] == reader.start == 3  # where the view's reader takes the bytes


@pytest.mark.parametrize("seed", range(5))
def test_folding_keeps_cost_and_memory_of_every_tied_assignment(seed: int) -> None:
    low = lowered(trained_mlp(16, 32, 64, 4), "2,2")
    classes = node_classes(low.lowering)
    folded = fold(low.graph, classes)
    assert folded.graph.size < low.graph.size
    folded.graph.validate()
    rng = np.random.default_rng(seed)
    chosen = [int(rng.integers(k)) for k in folded.graph.sizes()]
    free = expand(folded, chosen)
    for v, w in zip(classes.tolist(), free, strict=True):
        assert w == free[classes.tolist().index(v)]
    if low.graph.allowed(free):
        assert folded.graph.cost(chosen) == low.graph.cost(free)
    assert folded.graph.allowed(chosen) == low.graph.allowed(free)
    assert folded.graph.profile(chosen).tolist() == low.graph.profile(free).tolist()


def test_folding_by_hand_agrees_on_a_tied_choice_that_is_allowed() -> None:
    low = lowered(trained_mlp(16, 32, 64, 4), "2,2")
    folded = fold(low.graph, node_classes(low.lowering))
    assignment = random_assignment(folded.graph, 0)
    free = expand(folded, assignment)
    assert low.graph.allowed(free)
    assert folded.graph.cost(assignment) == low.graph.cost(free) < FORBIDDEN
    assert folded.graph.peak(assignment) == low.graph.peak(free)


def test_repeated_layers_are_found_by_structure_not_by_name() -> None:
    program = trained_mlp(16, 32, 64, 6)
    classes = op_classes(program)
    forward = sum(op.phase.value == "forward" for op in program.ops)
    assert len(set(classes[:forward].tolist())) < forward
    assert all(program.ops[i].name == program.ops[c].name for i, c in enumerate(classes.tolist()))


def test_without_an_optimizer_pins_that_leave_parameter_and_gradient_apart_are_refused() -> None:
    program = trained_mlp(16, 32, 64, 1)
    parameter = next(iter(program.gradients))
    name = program.tensors[parameter].name
    options = Options(memory_limit=1 << 40, optimizer="none", pins=(f"{name}=R,S(0)", f"grad({name})=R,R"))
    with pytest.raises(InputError, match="no common layout"):
        plan_program(program, mesh=Mesh.parse("2,2"), cluster=load_cluster("h100"), options=options)


def test_a_pinned_activation_may_still_be_computed_partial() -> None:
    b = Builder()
    x, w = b.input("x", 8, 512), b.weight("w", 64, 512)
    y = b.einsum("ac,bc->ab", x, w)
    b.rename(y, "hidden")
    out = b.relu(y, role=Role.OUTPUT, result="output")
    options = Options(memory_limit=1 << 40, pins=("x=S(1)", "w=S(1)", "hidden=R", "output=R"))
    plan = plan_program(b.program(out), mesh=Mesh.parse("4"), cluster=load_cluster("h100"), options=options)
    assert plan.layouts["hidden"] == Layout.parse("R")
    assert [step.kind for r in plan.reshards for step in r.steps] == ["all_reduce"]
