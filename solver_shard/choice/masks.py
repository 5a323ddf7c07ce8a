"""Pins as masks on the nodes of a graph that was lowered without them, so that each can be dropped.

``lower(pins=...)`` leaves out what pins forbid. To ask which pins conflict, a graph is needed that has them all apart: lowered without
pins, each a mask on the nodes that decide how its tensors are stored, made or returned. With all masks it allows what the pinned graph
allows, at the same cost and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from solver_shard.choice.fold import Folded
from solver_shard.choice.graph import Ints
from solver_shard.choice.groups import OPTIMIZER, OUTPUT
from solver_shard.choice.nodes import Kind, Lowering
from solver_shard.choice.structure import node_classes
from solver_shard.layout import Layout
from solver_shard.solve.arcs import Constraint
from solver_shard.solve.spans import Bools


class Allows(Protocol):
    """What a pin leaves of a tensor's layouts."""

    def allows(self, layout: Layout) -> bool: ...


def pin_masks(lowering: Lowering, t: int, allows: Callable[[Layout], bool]) -> dict[int, Bools]:
    """What a pin on a tensor leaves of the nodes of a graph lowered without it: as stored, as made, or as handed to update and caller."""
    groups = lowering.lives.groups.get(t, ())
    last = [k for k, group in enumerate(groups) if group.purpose in (OPTIMIZER, OUTPUT)]
    kinds = [(Kind.SOURCE, 0), *((Kind.RESHARD, k) for k in last), *([] if last else [(Kind.RESULT, 0)])]
    nodes = [lowering.index[kind, t, k] for kind, k in kinds if (kind, t, k) in lowering.index]
    return {v: np.array([allows(layout) for layout in lowering.nodes[v].layouts], dtype=bool) for v in nodes}


def pin_constraints(lowering: Lowering, texts: Sequence[str], pins: Mapping[int, Mapping[str, Allows]]) -> list[Constraint]:
    """Every pin as masks on the nodes of all the tensors that it matches; ``pins``: tensor to pin text to what it leaves."""
    allowed: dict[str, dict[int, Bools]] = {text: {} for text in dict.fromkeys(texts)}
    for t, own in pins.items():
        for text, left in own.items():
            allowed[text].update(pin_masks(lowering, t, left.allows))
    return [Constraint(name=text, allowed=found) for text, found in allowed.items()]


def pinned_classes(lowering: Lowering, pinned: Lowering, constraints: Sequence[Constraint]) -> Ints:
    """Which nodes are tied, in a graph lowered without pins: those that the pinned graph ties and that no constraint tells apart."""
    keys = {(node.kind, node.item, node.group): c for node, c in zip(pinned.nodes, node_classes(pinned).tolist(), strict=True)}
    own = node_classes(lowering).tolist()
    marks: list[list[tuple[int, bytes]]] = [[] for _ in lowering.nodes]
    for k, constraint in enumerate(constraints):
        for v, mask in constraint.allowed.items():
            marks[v].append((k, mask.tobytes()))
    known: dict[object, int] = {}
    found = [
        known.setdefault((own[v], keys.get((node.kind, node.item, node.group), -1), tuple(marks[v])), len(known))
        for v, node in enumerate(lowering.nodes)
    ]
    return np.array(found, dtype=np.int64)


def folded_constraint(constraint: Constraint, folded: Folded | None) -> Constraint:
    """A constraint on the nodes of the free graph as one on those of the tied graph."""
    if folded is None:
        return constraint
    allowed: dict[int, Bools] = {}
    for v, mask in constraint.allowed.items():
        c = int(folded.member[v])
        allowed[c] = allowed[c] & mask if c in allowed else mask
    return Constraint(name=constraint.name, allowed=allowed)


def op_constraints(lowering: Lowering, edges: Ints, member: Ints) -> tuple[list[Constraint], list[int]]:
    """Every op as a constraint that owns its edges, and the op position behind each; of ops that are tied the first.

    Args:
        lowering: the free graph's.
        edges: of the graph, tied or free.
        member: node of that graph behind each node of the lowering.
    """
    ops: dict[int, int] = {}
    for v, node in enumerate(lowering.nodes):
        if node.kind is Kind.OP:
            ops.setdefault(int(member[v]), node.item)
    owned: Mapping[int, list[int]] = {c: [] for c in ops}
    for e, (u, v) in enumerate(edges.tolist()):
        for c in (u, v):
            if c in owned:
                owned[c].append(e)
    names = [lowering.program.ops[i].name for i in ops.values()]
    return [Constraint(name=name, edges=tuple(owned[c])) for c, name in zip(ops, names, strict=True)], list(ops.values())
