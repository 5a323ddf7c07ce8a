"""Repetition is found by structure, inside repeated blocks too; a tied plan is a free one."""

from __future__ import annotations

import pytest
from lowered import lowered, random_assignment
from programs import Builder

from solver_shard.graph.symmetry import expand, fold, node_classes, op_classes
from solver_shard.program import Program, Ref, Role
from solver_shard.rules.rulebook import Rulebook


def scans(layers: int, steps: int, tokens: int = 8, width: int = 16) -> Program:
    """Layers of a product, then steps that each read their own place of it and carry a state, then an addition of what was carried."""
    b = Builder()
    x = b.relu(b.input("x", steps * tokens, width))
    for k in range(layers):
        made = b.einsum("ac,bc->ab", x, b.weight(f"{k}.in", width, width))
        decay = b.weight(f"{k}.decay", tokens, width)
        state = b.relu(decay)
        for i in range(steps):
            place = {"self": Ref(0), "dim": 0, "start": i * tokens, "end": (i + 1) * tokens, "step": 1}
            read = b.call("aten.slice.Tensor", (made,), place, (tokens, width))
            state = b.call("aten.mul.Tensor", (state, decay), {"self": Ref(0), "other": Ref(1)}, (tokens, width))
            state = b.relu(b.add(state, read))
        whole = {"tensors": (Ref(0), Ref(0), *(Ref(0) for _ in range(steps - 2))), "dim": 0}
        spread = b.call("aten.cat.default", (state,), whole, (steps * tokens, width))
        x = b.add(x, spread, **({"role": Role.OUTPUT, "result": "output"} if k == layers - 1 else {}))
    return b.program(x, name="scans")


def tied_nodes(program: Program) -> int:
    return len(set(node_classes(lowered(program, "2,2").lowering).tolist()))


def test_steps_of_a_scan_inside_a_layer_share_their_decisions() -> None:
    program, book = scans(3, 6), Rulebook()
    classes = op_classes(program, [book.rule(program, i) for i in range(len(program.ops))]).tolist()
    relus = [c for op, c in zip(program.ops[1:], classes[1:], strict=True) if op.name == "aten.relu.default"]
    one_layer = len(relus) // 3
    assert len(set(relus[1:one_layer])) == 1
    assert set(relus[1:one_layer]) == set(relus[one_layer + 1 : 2 * one_layer])


@pytest.mark.parametrize("layers", [1, 3])
def test_a_longer_scan_has_no_more_choices(layers: int) -> None:
    assert tied_nodes(scans(layers, 6)) == tied_nodes(scans(layers, 11))


def test_a_run_that_begins_in_the_midst_of_a_scan_is_turned_to_its_beginning() -> None:
    program = scans(4, 6)
    rulebook = Rulebook()
    rules = [rulebook.rule(program, i) for i in range(len(program.ops))]
    classes = op_classes(program, rules)
    for start in range(len(program.ops) // 8):
        cut = Program(name="cut", tensors=program.tensors, ops=program.ops[start:], outputs=program.outputs, gradients={})
        found = op_classes(cut, rules[start:])
        assert len(set(found.tolist())) <= len(set(classes.tolist())) + start


@pytest.mark.parametrize("seed", range(6))
def test_a_tied_assignment_of_nested_blocks_is_a_free_one_of_equal_cost_and_bytes(seed: int) -> None:
    low = lowered(scans(2, 5), "2,2")
    folded = fold(low.graph, node_classes(low.lowering))
    assert folded.graph.size < low.graph.size / 2
    chosen = random_assignment(folded.graph, seed)
    free = expand(folded, chosen)
    assert low.graph.allowed(free)
    assert low.graph.cost(free) == folded.graph.cost(chosen)
    assert low.graph.profile(free).tolist() == folded.graph.profile(chosen).tolist()
