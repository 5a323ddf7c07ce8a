"""Op-priority and user-priority: which ops, and which user annotations, have their way first.

Op-priority sweeps five times. In every sweep more ops take part, in more directions; the heuristics of earlier sweeps stay on:

    0  ops that pass a sharding through, where every operand that is no scalar has this one use
    1  the same ops without that condition
    2  all ops, along factors that pass through; broadcasts only backward
    3  all ops along all factors; broadcasts only backward
    4  everything both ways

User-priority hides the dims of lower priorities first (closed, empty, their axes kept from all other use), and brings them back
priority after priority, with a full op-priority propagation in between.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

from solver_shard.annotations import AxisRef, DimSharding, MeshSpec, TensorSharding
from solver_shard.propagation.graph import Direction, Kind, Traits
from solver_shard.propagation.rule import ShardingRule
from solver_shard.propagation.state import State
from solver_shard.propagation.step import NO_SHARDING
from solver_shard.propagation.sweep import Directions

LEVELS = 5


def op_directions(state: State, level: int) -> Directions:
    """The directions in which ops take part at a level of op-priority."""

    def directions(op: int, rule: ShardingRule) -> tuple[Direction, ...]:
        node = state.graph.ops[op]
        flow = node.traits & (Traits.ELEMENTWISE | Traits.PASS | Traits.PASS_FORWARD | Traits.BROADCAST)
        single = level > 0 or not flow or all(len(state.users[v]) == 1 for v in node.operands if state.ranks[v])
        return _directions(rule, flow, level, single)

    return directions


@lru_cache(maxsize=65536)
def _directions(rule: ShardingRule, flow: Traits, level: int, single: bool) -> tuple[Direction, ...]:
    passing = Direction.NONE
    if single:
        if flow & (Traits.ELEMENTWISE | Traits.PASS):
            passing = Direction.BOTH
        elif flow & Traits.PASS_FORWARD:
            passing = Direction.FORWARD
    everywhere = Direction.BACKWARD if flow & Traits.BROADCAST and level < 4 else Direction.BOTH
    return tuple(
        passing | everywhere if level > 2 or (level == 2 and rule.passes_through(factor)) else passing for factor in range(len(rule.sizes))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """A place whose sharding has dims of lower priority, and that sharding as given."""

    slot: int
    given: TensorSharding
    op: int


def hide_priorities(state: State) -> dict[int, list[Reserved]]:
    """Leave only dims of priority 0 in effect; the places that hold others, by ascending priority."""
    found: dict[int, list[Reserved]] = {}
    for slot, op in _places(state):
        given = state.stepper.sharding(state.numbers[slot])
        if given is None:
            continue
        for priority in sorted({dim.priority or 0 for dim in given.dims} - {0}):
            found.setdefault(priority, []).append(Reserved(slot=slot, given=given, op=op))
        state.numbers[slot] = state.stepper.number(_initial(given, state.stepper.mesh(given.mesh)))
    return dict(sorted(found.items()))


def restore_priority(state: State, priority: int, places: list[Reserved]) -> None:
    """Bring the dims of one priority back into effect."""
    for place in places:
        if place.op >= 0 and state.erased[place.op]:
            continue
        now = state.stepper.sharding(state.numbers[place.slot])
        if now is None:
            continue
        back: set[AxisRef] = set()
        dims = list(now.dims)
        for position, dim in enumerate(place.given.dims):
            if (dim.priority or 0) == priority:
                dims[position] = DimSharding(dim.axes, dim.open)
                back.update(dim.axes)
        replicated = tuple(axis for axis in now.replicated if axis not in back)
        state.numbers[place.slot] = state.stepper.number(dataclasses.replace(now, dims=tuple(dims), replicated=replicated))


def _places(state: State) -> list[tuple[int, int]]:
    """All slots with a sharding of their own, and the op they belong to (-1: none); targets of edges are left out."""
    graph = state.graph
    covered = {value for flow in state.flows.values() for value in flow.targets}
    found = []
    for function, slots in zip(graph.functions, state.result_slots, strict=True):
        found += [(value, -1) for value in function.body.arguments if value not in covered]
        found += [(slot, -1) for slot in slots]
    for op in state.order:
        node = graph.ops[op]
        found += [(value, op) for value in node.results if value not in covered]
        if node.kind in (Kind.MANUAL, Kind.NAMED):
            found += [(slot, op) for slot in state.in_slots[op] if state.value_of[slot] not in covered]
    return [(slot, op) for slot, op in found if state.numbers[slot] != NO_SHARDING]


def _initial(given: TensorSharding, mesh: MeshSpec) -> TensorSharding:
    """The sharding with only its dims of priority 0; the axes of the others are kept replicated."""
    dims, replicated = [], list(given.replicated)
    for dim in given.dims:
        if dim.priority:
            replicated.extend(dim.axes)
            dims.append(DimSharding())
        else:
            dims.append(DimSharding(dim.axes, dim.open))
    names = [name for name, _ in mesh.axes]
    replicated.sort(key=lambda axis: (names.index(axis[0]), axis[1], axis[2]))
    return dataclasses.replace(given, dims=tuple(dims), replicated=tuple(replicated))
