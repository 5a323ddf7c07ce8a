"""What is kept in shared storages follows from the decisions: nothing about it is left to choose."""

from __future__ import annotations

import pytest
from lowered import allowed_beside, lowered, random_assignment
from programs import gated

from solver_shard.choice.nodes import Kind

FOLLOWS = (Kind.KEEP, Kind.STORAGE, Kind.TAIL)


@pytest.mark.parametrize("whole", [False, True])
def test_keep_and_storage_nodes_have_one_choice_once_all_decisions_are_made(whole: bool) -> None:
    made = lowered(gated(whole), "2,2")
    assert any(node.kind is Kind.STORAGE for node in made.lowering.nodes)
    for seed in range(8):
        assignment = random_assignment(made.graph, seed)
        decided = {v: assignment[v] for v, node in enumerate(made.lowering.nodes) if node.kind not in FOLLOWS}
        left = allowed_beside(made.graph, decided)
        assert all(len(choices) == 1 for choices in left.values())


@pytest.mark.parametrize("whole", [False, True])
def test_the_members_of_a_storage_are_what_is_held_of_the_product(whole: bool) -> None:
    program = gated(whole)
    (storage,) = lowered(program, "2").lowering.lives.storages
    names = [program.tensors[member.tensor].name for member in storage.members]
    assert program.tensors[storage.owner].name == "product"
    assert sorted(names) == sorted(["gate", "turned", "v4", *["product"] * whole])
    assert [member.until for member in storage.members] == sorted((member.until for member in storage.members), reverse=True)
