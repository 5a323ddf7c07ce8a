"""What is kept in shared storages follows from the decisions: nothing about it is left to choose."""

from __future__ import annotations

import numpy as np
import pytest
from lowered import allowed_beside, lowered, random_assignment
from programs import gated

from solver_shard.graph.lowering import whole_bytes
from solver_shard.graph.nodes import KeepNode, StorageNode, TailNode

FOLLOWS = (KeepNode, StorageNode, TailNode)


@pytest.mark.parametrize("whole", [False, True])
def test_keep_and_storage_nodes_have_one_choice_once_all_decisions_are_made(whole: bool) -> None:
    made = lowered(gated(whole), "2,2")
    assert any(isinstance(node, StorageNode) for node in made.lowering.nodes)
    for seed in range(8):
        assignment = random_assignment(made.graph, seed)
        decided = {v: assignment[v] for v, node in enumerate(made.lowering.nodes) if not isinstance(node, FOLLOWS)}
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


def test_parts_of_tensors_too_large_for_products_in_64_bits_are_found() -> None:
    owner, part, nbytes = 3 * 2**36, 2**36, np.array([2**37, 2**35 + 1])
    assert whole_bytes(nbytes, part, owner).tolist() == [3 * 2**37, 3 * (2**35 + 1)]
    assert whole_bytes(nbytes, part, part).tolist() == [2**37, 2**35 + 1]
