"""One sweep over a graph: every op is stepped, in an order that is part of the semantics; and sharding groups, before it.

A stack of all ops, the first on top. What a step changes puts the ops around the changed values back on the stack, on top, so that a
change is followed at once, the innermost last change first. Another order (a queue, repeated sweeps) reaches another fixed point in
about 2% of dense graphs, so it must not be changed.

A sweep ends because steps only add axes, with one exception: a manual computation gives its sharding group less than it takes itself
(``_update``). Its result and other values of the group may so take an axis from each other for ever; the reference never returns from such
a module. Here a value that comes back to the same sharding ``RETURNS`` times is an error.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from solver_shard.errors import InputError
from solver_shard.shardy.graph import Block, Direction, GraphOp, GraphValue, OpKind, PropagationGraph, ShardingRule, Traits, identity_rule
from solver_shard.shardy.sharding import DimSharding, MeshSpec, TensorSharding
from solver_shard.shardy.step import NO_OP, NO_SLOT, PropagationState, StrategyName

Directions = Callable[[int, ShardingRule], tuple[Direction, ...]]
"""From an op's position and its rule to where each factor's axes may flow."""


RETURNS = 100
"""How often a value may come back to one sharding: those that settle do so once or twice."""


def any_direction(op: int, rule: ShardingRule) -> tuple[Direction, ...]:
    """Both ways along every factor."""
    return (Direction.BOTH,) * len(rule.sizes)


def sweep(state: PropagationState, strategy: StrategyName, directions: Directions = any_direction, *, conservative: bool = False) -> None:
    """Settle function results, then all ops, then function results once more."""
    _function_results(state, strategy)
    _Sweep(state, strategy, directions, conservative).run()
    _function_results(state, strategy)


def _function_results(state: PropagationState, strategy: StrategyName) -> None:
    """Step between what the main function returns and the shardings of its results."""
    body = state.graph.functions[state.main].body
    if not body.ops:
        return
    for value, slot in zip(state.graph.ops[body.ops[-1]].operands, state.result_slots[state.main], strict=True):
        if state.graph.values[value].shape is None:
            continue
        rule = identity_rule(state.graph.values[value].shape or (), 1)
        shardings = (state.get(value), state.numbers[slot])
        changes = state.stepper.step(
            rule, state.stepper.rule(rule), shardings, directions=(Direction.BOTH,) * len(rule.sizes), strategy=strategy
        )
        own = state.slots[value]
        modified = state.value_of.get(own, own)
        for position, number in changes:
            state.put(own if position == 0 else slot, number)
            for member in state.groups.get(modified, ()) if position == 0 else ():
                if member != modified:
                    state.put(state.slots[member], number)


class _Sweep:
    """The stack and what is put on it."""

    def __init__(self, state: PropagationState, strategy: StrategyName, directions: Directions, conservative: bool) -> None:
        self.state = state
        self.strategy: StrategyName = strategy
        self.directions = directions
        self.conservative = conservative
        alive = [op for op in state.order if not state.erased[op]]
        self.stack: list[int] = alive[::-1]
        self.place = {op: i for i, op in enumerate(self.stack)}
        self.current = NO_OP
        self.returns: Counter[tuple[int, int]] = Counter()

    def run(self) -> None:
        stack, place = self.stack, self.place
        while stack:
            op = stack.pop()
            if op == NO_OP:  # taken off since
                continue
            del place[op]
            if self.state.is_dead(op):
                self._erase(op)
            else:
                self.current = op
                self._step(op)

    def _step(self, op: int) -> None:
        state = self.state
        node = state.graph.ops[op]
        if node.kind is OpKind.EDGE or node.kind is OpKind.FUNC_EDGE:
            self._step_edge(op)
            return
        if node.kind is OpKind.BARRIER:
            rule = identity_rule(state.graph.values[node.results[0]].shape or (), 1)
            directions = (node.direction,) * len(rule.sizes)
            number, conservative = state.stepper.rule(rule), False
        else:
            known = state.rules[op]
            if known is None:
                return
            rule, number, conservative = known, state.rule_numbers[op], self.conservative
            directions = self.directions(op, rule)
            if rule.blocked:
                directions = tuple(Direction.NONE if f in rule.blocked else d for f, d in enumerate(directions))
        tensors = (*node.operands, *node.results)
        changes = state.stepper.step(
            rule,
            number,
            tuple(state.get(value) for value in tensors),
            directions=directions,
            strategy=self.strategy,
            elementwise=bool(node.traits & Traits.ELEMENTWISE),
            conservative=conservative,
        )
        for position, changed in changes:
            self._update(state.slots[tensors[position]], changed)

    def _step_edge(self, op: int) -> None:
        state = self.state
        flow, target = state.flows[op], state.graph.ops[op].results[0]
        shape = state.graph.values[target].shape
        if shape is None:
            return
        rule = identity_rule(shape, len(flow.sources))
        stepper = state.stepper
        seen = stepper.number(flow.seen(stepper.sharding(state.numbers[target])))
        changes = stepper.step(
            rule,
            stepper.rule(rule),
            (*(state.get(value) for value in flow.sources), seen),
            directions=self.directions(op, rule),
            strategy=self.strategy,
        )
        for position, changed in changes:
            if position < len(flow.sources):
                self._update(state.slots[flow.sources[position]], changed)
            else:
                sharding = stepper.sharding(changed)
                assert sharding is not None, "a step never takes a sharding away"
                self._update(target, stepper.number(flow.stored(sharding)), alike=changed)

    def _update(self, slot: int, number: int, *, alike: int | None = None) -> None:
        """Store a new sharding, tell the ops around it, and give it to the sharding group.

        ``alike`` is what the group gets where a value keeps another sharding: the members of a manual computation's result get that of its
        body, without the manual axes, as the reference does.
        """
        state = self.state
        if slot == NO_SLOT:
            return
        value = state.value_of.get(slot, slot)
        self._count(value, slot, number)
        state.put(slot, number)
        self._notify(value)
        for member in state.groups.get(value, ()):
            if member != value:
                state.put(state.slots[member], number if alike is None else alike)
                self._notify(member)

    def _count(self, value: int, slot: int, number: int) -> None:
        """InputError where a value came to the same sharding again and again."""
        self.returns[slot, number] += 1
        if self.returns[slot, number] > RETURNS:
            group = next((op.group for op in self.state.graph.ops if op.kind is OpKind.GROUP and value in op.operands), None)
            of = "" if group is None else f" of sharding group {group}"
            raise InputError(
                f"propagation never settles: values{of} take an axis from each other again and again, as the result of a manual "
                "computation can, which gives the group its sharding without the manual axes; take it out of the group"
            )

    def _notify(self, value: int) -> None:
        """Queue what reads or makes the value."""
        state = self.state
        maker = state.maker[value]
        if maker in state.flows:
            for target in state.flows[maker].others:
                self._notify_users(target)
        if maker != NO_OP:
            self._push(maker)
        self._notify_users(value)

    def _notify_users(self, value: int) -> None:
        """Queue what reads the value, here or in the functions that it is handed to or returned from; calls may form a circle."""
        seen, open_ = {value}, [self._readers(value)]
        while open_:
            for op, further in open_[-1]:
                if op != NO_OP:
                    self._push(op)
                elif further not in seen:
                    seen.add(further)
                    open_.append(self._readers(further))
                    break
            else:
                open_.pop()

    def _readers(self, value: int) -> Iterator[tuple[int, int]]:
        """Ops to queue, and, with NO_OP, values that are this one in another function."""
        state = self.state
        for op, index in state.uses(value):
            edge = state.edge_of_use.get((op, index))
            kind = state.graph.ops[op].kind
            if edge is not None:
                yield edge, value
            elif kind is OpKind.CALL:
                yield NO_OP, self._argument(op, index)
            elif kind is OpKind.RETURN:
                parent = state.parent[op]
                if parent != NO_OP:
                    yield parent, value
                else:
                    for call in state.calls.get(state.graph.functions[state.function[op]].name, ()):
                        if not state.erased[call]:
                            yield NO_OP, state.graph.ops[call].results[index]
            else:
                yield op, value

    def _argument(self, call: int, index: int) -> int:
        graph = self.state.graph
        callee = next(f for f in graph.functions if f.name == graph.ops[call].callee)
        return callee.body.arguments[index]

    def _push(self, op: int) -> None:
        if op not in self.place and op != self.current:
            self.place[op] = len(self.stack)
            self.stack.append(op)

    def _erase(self, op: int) -> None:
        """Erase an op and what it holds, last op first, and queue what may now be dead."""
        state = self.state
        node = state.graph.ops[op]
        for block in reversed(node.regions):
            for inner in reversed(block.ops):
                if not state.erased[inner]:
                    self._erase(inner)
        for value in node.operands:
            maker = state.maker[value]
            if maker == NO_OP or value not in state.graph.ops[maker].results:
                continue
            others = {user for user, _ in state.users[value]} - {op}
            if len(others) < 2 and maker not in self.place and not state.erased[maker]:
                self.place[maker] = len(self.stack)
                self.stack.append(maker)
        if op in self.place:
            self.stack[self.place.pop(op)] = NO_OP
        for value in set(node.operands):
            state.users[value] = [use for use in state.users[value] if use[0] != op]
        state.erased[op] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """A graph whose groups are settled.

    Attributes:
        constrained: of every group whose members differ, the results of the constraints that were added; they are its members, and their
            uses are to be queued earliest first. A value that is in its group twice has two, one after the other.
        warnings: one for every group whose members differ.
    """

    graph: PropagationGraph
    constrained: Mapping[int, tuple[int, ...]]
    warnings: tuple[str, ...]


def settle_groups(graph: PropagationGraph, slots: Sequence[int], maker: Sequence[int]) -> Grouped:
    """Give all members of a group its sharding, or constraints where they differ.

    Sharding groups: values that are to be sharded alike.

    Before a pass starts, every group is looked at once. Shardings that say nothing (absent, or all dims open and empty) do not count. If
    the others agree, all members get that sharding. If they differ, each member gets an open constraint after it, which takes over its uses
    and its place in the group; so the members keep what they were given, and the uses find a common sharding.

    ``slots`` tells for every value which value holds its sharding, -1 where none does; ``maker`` which op defines it (``state.State``).

    Raises:
        InputError: a value in two groups, or members of different shapes.
    """
    groups: dict[int, list[int]] = {}
    group_of: dict[int, int] = {}
    for i in graph.walk():
        op = graph.ops[i]
        if op.kind is OpKind.GROUP and op.group is not None:
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
    settled = PropagationGraph(values=tuple(values), ops=graph.ops, functions=graph.functions, meshes=graph.meshes)
    made: dict[int, list[int]] = {}
    for member, mesh in conflicting:
        settled = _constrain(settled, member, maker[member], mesh)
        made.setdefault(group_of[member], []).append(len(settled.values) - 1)
    return Grouped(graph=settled, constrained={group: tuple(members) for group, members in made.items()}, warnings=tuple(warnings))


def _says_something(sharding: TensorSharding) -> bool:
    return any(dim.axes or not dim.open for dim in sharding.dims)


def _give(graph: PropagationGraph, values: list[GraphValue], slot: int, maker: Sequence[int], sharding: TensorSharding) -> None:
    """Set a value's sharding; the other results of its op get open ones if they have none."""
    if not 0 <= slot < len(values):
        return
    values[slot] = dataclasses.replace(values[slot], sharding=sharding)
    for other in graph.ops[maker[slot]].results if maker[slot] >= 0 else ():
        if values[other].sharding is None:
            dims = (DimSharding(open=True),) * len(values[other].shape or ())
            values[other] = dataclasses.replace(values[other], sharding=TensorSharding(mesh=sharding.mesh, dims=dims))


def _constrain(graph: PropagationGraph, member: int, maker: int, mesh: str | MeshSpec) -> PropagationGraph:
    """Add an open constraint right after the member, which takes over its uses."""
    value, op, result = graph.values[member], len(graph.ops), len(graph.values)
    open_dims = (DimSharding(open=True),) * len(value.shape or ())
    made = GraphValue(
        name=f"{value.name}:constraint", shape=value.shape, dtype=value.dtype, sharding=TensorSharding(mesh=mesh, dims=open_dims)
    )
    constraint = GraphOp(
        name="sdy.sharding_constraint",
        operands=(member,),
        results=(result,),
        kind=OpKind.CONSTRAINT,
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
    return PropagationGraph(values=(*graph.values, made), ops=(*ops, constraint), functions=functions, meshes=graph.meshes)
