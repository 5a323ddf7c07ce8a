"""Sharding groups: values that are to be sharded alike.

Before a pass starts, every group is looked at once. Shardings that say nothing (absent, or all dims open and empty) do not count. If
the others agree, all members get that sharding. If they differ, each member gets an open constraint after it, which takes over its uses
and its place in the group; so the members keep what they were given, and the uses find a common sharding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from solver_shard.annotations import DimSharding, MeshSpec, TensorSharding
from solver_shard.errors import InputError
from solver_shard.propagation.graph import Block, Graph, Kind, Op, Traits, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """A graph whose groups are settled.

    Attributes:
        constrained: of every group whose members differ, the results of the constraints that were added; they are its members, and their
            uses are to be queued earliest first. A value that is in its group twice has two, one after the other.
        warnings: one for every group whose members differ.
    """

    graph: Graph
    constrained: Mapping[int, tuple[int, ...]]
    warnings: tuple[str, ...]


def settle_groups(graph: Graph, slots: Sequence[int], maker: Sequence[int]) -> Grouped:
    """Give all members of a group its sharding, or constraints where they differ.

    ``slots`` tells for every value which value holds its sharding, -1 where none does; ``maker`` which op defines it (``state.State``).

    Raises:
        InputError: a value in two groups, or members of different shapes.
    """
    groups: dict[int, list[int]] = {}
    group_of: dict[int, int] = {}
    for i in graph.walk():
        op = graph.ops[i]
        if op.kind is Kind.GROUP and op.group is not None:
            value = op.operands[0]
            if group_of.setdefault(value, op.group) != op.group:
                raise InputError(
                    f"{graph.values[value].name} is in sharding groups {group_of[value]} and {op.group}; a value can be in one; "
                    "merge the groups"
                )
            groups.setdefault(op.group, []).append(value)
    values = list(graph.values)
    warnings: list[str] = []
    conflicting: list[tuple[int, str | MeshSpec]] = []
    for group in sorted(groups):
        members = groups[group]
        first = values[members[0]]
        for member in members:
            if values[member].shape != first.shape:
                raise InputError(
                    f"sharding group {group} has {first.name} of shape {first.shape} and {values[member].name} of shape "
                    f"{values[member].shape}; members must have one shape"
                )
        held = [values[slots[member]].sharding if 0 <= slots[member] < len(values) else None for member in members]
        said = [sharding for sharding in held if sharding is not None and _says_something(sharding)]
        if not said or len(members) < 2:
            continue
        if all(sharding == said[0] for sharding in said):
            for member in members:
                _give(graph, values, slots[member], maker, said[0])
        else:
            names = ", ".join(values[member].name for member in members)
            warnings.append(f"sharding group {group} ({names}) starts with different shardings; constraints are added after its members")
            conflicting.extend((member, said[0].mesh) for member in members)
    settled = Graph(values=tuple(values), ops=graph.ops, functions=graph.functions, meshes=graph.meshes)
    made: dict[int, list[int]] = {}
    for member, mesh in conflicting:
        settled = _constrain(settled, member, maker[member], mesh)
        made.setdefault(group_of[member], []).append(len(settled.values) - 1)
    return Grouped(graph=settled, constrained={group: tuple(members) for group, members in made.items()}, warnings=tuple(warnings))


def _says_something(sharding: TensorSharding) -> bool:
    return any(dim.axes or not dim.open for dim in sharding.dims)


def _give(graph: Graph, values: list[Value], slot: int, maker: Sequence[int], sharding: TensorSharding) -> None:
    """Set a value's sharding; the other results of its op get open ones if they have none."""
    if not 0 <= slot < len(values):
        return
    values[slot] = dataclasses.replace(values[slot], sharding=sharding)
    for other in graph.ops[maker[slot]].results if maker[slot] >= 0 else ():
        if values[other].sharding is None:
            dims = (DimSharding(open=True),) * len(values[other].shape or ())
            values[other] = dataclasses.replace(values[other], sharding=TensorSharding(mesh=sharding.mesh, dims=dims))


def _constrain(graph: Graph, member: int, maker: int, mesh: str | MeshSpec) -> Graph:
    """Add an open constraint right after the member, which takes over its uses."""
    value, op, result = graph.values[member], len(graph.ops), len(graph.values)
    open_dims = (DimSharding(open=True),) * len(value.shape or ())
    made = Value(name=f"{value.name}:constraint", shape=value.shape, dtype=value.dtype, sharding=TensorSharding(mesh=mesh, dims=open_dims))
    constraint = Op(
        name="sdy.sharding_constraint",
        operands=(member,),
        results=(result,),
        kind=Kind.CONSTRAINT,
        traits=Traits.ELEMENTWISE,
    )

    def placed(block: Block) -> Block:
        if member in block.arguments:
            return Block(arguments=block.arguments, ops=(op, *block.ops))
        if maker in block.ops and member in graph.ops[maker].results:
            at = block.ops.index(maker) + 1
            return Block(arguments=block.arguments, ops=(*block.ops[:at], op, *block.ops[at:]))
        return block

    ops = []
    for old in graph.ops:
        changes: dict[str, object] = {}
        if member in old.operands:
            changes["operands"] = tuple(result if v == member else v for v in old.operands)
        if old.regions:
            changes["regions"] = tuple(map(placed, old.regions))
        ops.append(dataclasses.replace(old, **changes) if changes else old)  # type: ignore[arg-type]  # names of fields
    functions = tuple(dataclasses.replace(f, body=placed(f.body)) for f in graph.functions)
    return Graph(values=(*graph.values, made), ops=(*ops, constraint), functions=functions, meshes=graph.meshes)
